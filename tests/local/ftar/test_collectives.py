"""Collectives over real sockets: the right result on every member, however they are submitted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fthsdp.errors import NotReady, RingBroken
from fthsdp.ftar import FtarSettings
from fthsdp.ftar.settings import WireDtype

pytestmark = pytest.mark.local


def reduce_everywhere(
    ring: Any, numel: int, *, step: int = 1, bucket: int = 0
) -> tuple[list[Any], list[Any], list[Any]]:
    """Submit on all members; return sources, results and works."""
    generator = torch.Generator().manual_seed(1000 * step + bucket)
    sources = [torch.randn(numel, generator=generator) for _ in ring]
    outs = [torch.full((numel,), float("nan")) for _ in ring]
    works = [
        member.engine.all_reduce(step=step, bucket=bucket, source=source, out=out)
        for member, source, out in zip(ring, sources, outs, strict=True)
    ]
    return sources, outs, works


def check(sources: Any, outs: Any, works: Any) -> None:
    before = [source.clone() for source in sources]
    for work in works:
        assert work.wait(20) is None
        assert work.done()
    assert all(torch.equal(a, b) for a, b in zip(before, sources, strict=True))
    assert len({out.numpy().tobytes() for out in outs}) == 1
    torch.testing.assert_close(outs[0].double(), sum(s.double() for s in sources), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_member_gets_the_same_sum_and_keeps_its_source(make_ring: Any, n: int) -> None:
    with make_ring(n) as ring:
        for step, numel in enumerate((0, 1, 2, 7, 1_003, 400_009)):
            check(*reduce_everywhere(ring, numel, step=step))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_gathered_payloads_come_in_ring_order_whatever_their_lengths(make_ring: Any, n: int) -> None:
    with make_ring(n) as ring:
        for payloads in ([b"%d" % i * i for i in range(n)], [b""] * n, [bytes([i]) * (64 << 10) for i in range(n)]):
            works = [m.engine.all_gather(step=3, payload=p) for m, p in zip(ring, payloads, strict=True)]
            assert [work.wait(20) for work in works] == [payloads] * n


def test_many_collectives_can_be_submitted_ahead_of_the_others(make_ring: Any) -> None:
    small = FtarSettings(chunk_bytes=4096, window=2, silence_timeout=60, connect_timeout=20)
    with make_ring(3, settings=small) as ring:
        results = []
        for member in ring:
            # One member after the other submits everything: the first ones wait for the last.
            for step in range(6):
                source = torch.full((10_001,), float(step + member.replica))
                out = torch.empty(10_001)
                work = member.engine.all_reduce(step=step, bucket=step % 3, source=source, out=out)
                gathered = member.engine.all_gather(step=step, payload=b"%d" % member.replica)
                results.append((step, out, work, gathered))
        for step, out, work, gathered in results:
            work.wait(20)
            assert gathered.wait(20) == [b"0", b"1", b"2"]
            assert out.eq(3 * step + 3).all()


def test_special_values_are_summed_as_floats_are(make_ring: Any) -> None:
    with make_ring(2) as ring:
        inf, nan = float("inf"), float("nan")
        sources = [torch.tensor([inf, inf, nan, 1e-45, -0.0]), torch.tensor([1.0, -inf, 1.0, 1e-45, -0.0])]
        outs = [torch.empty(5), torch.empty(5)]
        for work in [
            m.engine.all_reduce(step=1, bucket=0, source=sources[m.replica], out=outs[m.replica]) for m in ring
        ]:
            work.wait(20)
        assert outs[0].numpy().tobytes() == outs[1].numpy().tobytes()
        torch.testing.assert_close(outs[0], sources[0] + sources[1], equal_nan=True)


def test_a_wait_that_takes_too_long_says_so_and_can_be_repeated(make_ring: Any) -> None:
    with make_ring(2) as ring:
        work = ring[0].engine.all_gather(step=1, payload=b"a")
        assert not work.done()
        with pytest.raises(TimeoutError, match="not done after"):
            work.wait(0.05)
        ring[1].engine.all_gather(step=1, payload=b"b")
        assert work.wait(20) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 0, 10), (2, 0, 10)), ((1, 0, 10), (1, 1, 10)), ((1, 0, 10), (1, 0, 12))],
    ids=["step", "bucket", "length"],
)
def test_members_that_disagree_break_the_ring_by_name(
    make_ring: Any, first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    with make_ring(2) as ring:
        works = []
        for member, (step, bucket, numel) in zip(ring, (first, second), strict=True):
            tensor = torch.ones(numel)
            out = torch.empty(numel)
            works.append(member.engine.all_reduce(step=step, bucket=bucket, source=tensor, out=out))
        for work in works:
            with pytest.raises(RingBroken):
                work.wait(20)
        # Whoever reads first finds it; the other one may only see that the connection ends.
        errors = [member.await_broken(1) for member in ring]
        assert any("' was due" in str(error) for error in errors)
        assert [error.suspect for error in errors] == [1, 0]


def test_what_is_wrong_on_this_side_is_refused_at_the_call(make_member: Any) -> None:
    member = make_member(0)
    with pytest.raises(NotReady, match="no epoch has begun"):
        member.engine.all_gather(step=1, payload=b"")
    with pytest.raises(NotReady, match="epoch 4 cannot begin before it was connected"):
        member.engine.activate(4)
    with pytest.raises(ValueError, match="replica 0 attempt 0 is not among its members"):
        member.engine.connect(1, [])
    member.engine.connect(1, [member.place])
    member.engine.activate(1)
    with pytest.raises(ValueError, match="larger than 65536"):
        member.engine.all_gather(step=1, payload=bytes(65_537))
    with pytest.raises(ValueError, match=r"out is a 1-D torch\.int64"):
        member.engine.all_reduce(step=1, bucket=0, source=torch.ones(3), out=torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [WireDtype.BFLOAT16, WireDtype.FLOAT16])
def test_narrow_types_on_the_wire_leave_the_same_bits_everywhere(make_ring: Any, n: int, dtype: WireDtype) -> None:
    settings = FtarSettings(wire_dtype=dtype, silence_timeout=60, connect_timeout=20)
    with make_ring(n, settings=settings) as ring:
        for step, numel in enumerate((1, 7, 1_003, 700_009)):
            sources, outs, works = reduce_everywhere(ring, numel, step=step)
            for work in works:
                work.wait(20)
            assert len({out.numpy().tobytes() for out in outs}) == 1
            # Each of the at most n roundings is off by half a unit in the last place of what the sum can have reached.
            bound = sum(source.abs() for source in sources) * n * torch.finfo(getattr(torch, dtype)).eps / 2
            assert ((outs[0] - sum(sources)).abs() <= bound + 1e-6).all()
            if n > 1:
                assert torch.equal(outs[0], outs[0].to(getattr(torch, dtype)).float())


def test_sums_of_narrow_types_are_built_in_float32(make_ring: Any) -> None:
    settings = FtarSettings(wire_dtype=WireDtype.BFLOAT16, silence_timeout=60, connect_timeout=20)
    with make_ring(2, settings=settings) as ring:
        # Element i starts at member i with 256 and is added to by the other one. 257.001 is nearer to 258 than to 256;
        # were 1.001 rounded to 1 before, the sum would lie between both and become 256.
        sources = [torch.tensor([256.0, 1.001]), torch.tensor([1.001, 256.0])]
        outs = [torch.empty(2), torch.empty(2)]
        works = [m.engine.all_reduce(step=1, bucket=0, source=sources[m.replica], out=outs[m.replica]) for m in ring]
        for work in works:
            work.wait(20)
        assert [out.tolist() for out in outs] == [[258.0, 258.0]] * 2


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_chunks_are_dealt_over_several_streams(make_ring: Any, n: int, streams: int) -> None:
    settings = FtarSettings(streams=streams, window=streams, chunk_bytes=4096, silence_timeout=60, connect_timeout=20)
    with make_ring(n, settings=settings) as ring:
        for step, numel in enumerate((0, 1, 1_000, 300_007)):
            check(*reduce_everywhere(ring, numel, step=step))
            works = [m.engine.all_gather(step=step, payload=b"%d" % m.replica) for m in ring]
            assert [work.wait(20) for work in works] == [[b"%d" % i for i in range(n)]] * n


def test_streams_and_narrow_types_work_together(make_ring: Any) -> None:
    settings = FtarSettings(streams=3, wire_dtype=WireDtype.BFLOAT16, silence_timeout=60, connect_timeout=20)
    with make_ring(3, settings=settings) as ring:
        _, outs, works = reduce_everywhere(ring, 3_000_001)
        for work in works:
            work.wait(20)
        assert len({out.numpy().tobytes() for out in outs}) == 1
