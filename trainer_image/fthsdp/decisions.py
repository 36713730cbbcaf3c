"""What the coordinator decided, brought to all ranks of a replica at the same point of their training threads."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch.distributed as dist

from fthsdp.coordinator.messages import EpochRecord
from fthsdp.errors import Refused
from fthsdp.member import Effect, Leader
from fthsdp.replica import LeaderShell
from fthsdp.vote import share
from fthsdp.wire import Json

__all__ = ["Decisions", "Over"]

Question = Callable[[Leader], EpochRecord | None]


class Over(Exception):
    """There is nothing more to do for this replica: the run is finished, or it was let go at a boundary."""

    def __init__(self, *, finished: bool) -> None:
        super().__init__()
        self.finished = finished


class Decisions:
    """The leader asks and shares, the other ranks listen; all of them call the same method at the same time."""

    def __init__(self, shell: LeaderShell | None, group: dist.ProcessGroup) -> None:
        self._shell = shell
        self._group = group

    def wait(self, question: Question) -> EpochRecord:
        """Wait for an answer, for hours if need be; raises Over, Refused."""
        record = None
        while record is None:
            record = self.poll(question, None)
        return record

    def poll(self, question: Question, timeout: float | None) -> EpochRecord | None:
        """Wait for an answer for at most ``timeout`` seconds (None: without end); raises Over, Refused."""
        if self._shell is None:
            return self._read(share(None, self._group))
        answer = self._shell.wait(lambda leader: _decision(leader, question), timeout)
        return self._read(share(json.dumps(answer).encode(), self._group))

    def tell(self, event: Callable[[Leader], list[Effect] | None]) -> None:
        """Give the leader an event; nothing on the other ranks."""
        if self._shell is not None:
            self._shell.run(lambda leader: event(leader) or [])

    def may_commit(self, epoch: int) -> tuple[bool, int]:
        """On the leader, begin a vote: whether its fence lets this epoch commit, and the fence. Else (True, 0)."""
        if self._shell is None:
            return True, 0
        return self._shell.ask(lambda leader: leader.vote_begins(epoch))

    def _read(self, data: bytes) -> EpochRecord | None:
        match json.loads(data):
            case {"record": dict(record)}:
                return EpochRecord.model_validate(record)
            case {"refused": str(reason)}:
                raise Refused(reason)
            case {"closed": int(step)}:
                self.tell(lambda leader: leader.changes(finished=step))
                raise Over(finished=True)
            case {"bye": True}:
                raise Over(finished=False)
        return None


def _decision(leader: Leader, question: Question) -> Json | None:
    if leader.refused is not None:
        return {"refused": leader.refused}
    if leader.closed is not None:
        return {"closed": leader.closed}
    if leader.bye:
        return {"bye": True}
    record = question(leader)
    return None if record is None else {"record": record.model_dump(mode="json")}
