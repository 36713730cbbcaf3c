"""What a neighbour says of itself when it dials a rail, and who is turned away."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from fthsdp.environment import Identity
from fthsdp.errors import Refused
from fthsdp.ftar.ring import RailMember
from fthsdp.ftar.settings import FtarSettings
from fthsdp.wire import Json

__all__ = ["RailHello", "judge_neighbour", "judge_stranger"]

_SAME = ("chunk_bytes", "streams", "wire_dtype")
"""Settings that decide which frames travel: both sides must have the same."""


class RailHello(BaseModel):
    """The details of a dial with the purpose of a rail."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    epoch: int
    replica: int
    attempt: int
    rank: int
    to: int
    """Replica that it means to reach."""
    to_attempt: int
    stream: int
    """Which of the connections between the two this one is, from 0 on."""
    chunk_bytes: int
    streams: int
    wire_dtype: str

    @classmethod
    def read(cls, hello: Json) -> RailHello:
        """Check the fields; raises Refused."""
        try:
            return cls.model_validate(hello)
        except ValidationError as error:
            raise Refused(f"not the hello of a rail: {error.errors(include_url=False)[0]['loc']}") from error

    @classmethod
    def to_neighbour(
        cls, neighbour: RailMember, me: Identity, settings: FtarSettings, *, epoch: int, stream: int
    ) -> Json:
        """Return what we say when we dial."""
        return cls(
            epoch=epoch,
            replica=me.replica,
            attempt=me.attempt,
            rank=me.rank,
            to=neighbour.replica,
            to_attempt=neighbour.attempt,
            stream=stream,
            chunk_bytes=settings.chunk_bytes,
            streams=settings.streams,
            wire_dtype=str(settings.wire_dtype),
        ).model_dump()


def judge_stranger(who: RailHello, me: Identity, settings: FtarSettings) -> None:
    """Raise Refused unless ``who`` means us and speaks as we do."""
    if who.rank != me.rank:
        raise Refused(f"rank {who.rank} dialled rail {me.rank}: only the same rank of other replicas belongs here")
    if (who.to, who.to_attempt) != (me.replica, me.attempt):
        raise Refused(
            f"this is replica {me.replica} attempt {me.attempt}, not replica {who.to} attempt {who.to_attempt}"
        )
    for name in _SAME:
        ours, theirs = getattr(settings, name), getattr(who, name)
        if ours != theirs:
            raise Refused(f"{name} is {ours} here, not {theirs}: use one value in the whole job")
    if not 0 <= who.stream < settings.streams:
        raise Refused(f"stream {who.stream} is none of 0 to {settings.streams - 1}")


def judge_neighbour(who: RailHello, me: Identity, line: Sequence[RailMember]) -> None:
    """Raise Refused unless ``who`` comes before us in the ring."""
    index = next(i for i, member in enumerate(line) if member.replica == me.replica)
    left = line[index - 1]
    if (who.replica, who.attempt) != (left.replica, left.attempt):
        raise Refused(
            f"epoch {who.epoch}: replica {left.replica} attempt {left.attempt} comes before this one in the ring,"
            f" not replica {who.replica} attempt {who.attempt}"
        )
