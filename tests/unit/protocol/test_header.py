"""What rides along each rail, and whose state is the odd one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fthsdp.errors import WireError
from fthsdp.protocol.header import Flag, Header, Opening, misfits, odd_ones


def header(replica: int, digest: int, flags: Flag = Flag.FULL) -> Header:
    return Header(replica=replica, flags=flags, step=3, heard=0, samples=4, batch_size=8, loss_sum=1.0, digest=digest)


@given(digest=st.integers(0, 2**64 - 1), step=st.integers(0, 2**62), loss=st.floats(allow_nan=False))
def test_a_header_survives_the_wire(digest: int, step: int, loss: float) -> None:
    sent = Header(
        replica=2,
        flags=Flag.FULL | Flag.CLOSING,
        step=step,
        heard=9,
        samples=8,
        batch_size=16,
        loss_sum=loss,
        digest=digest,
    )
    assert Header.unpack(sent.pack()) == sent


def test_an_opening_survives_the_wire() -> None:
    sent = Opening(replica=1, epoch=4, step=-1)
    assert Opening.unpack(sent.pack()) == sent


@pytest.mark.parametrize("kind", [Header, Opening])
def test_other_bytes_are_refused(kind: type[Header] | type[Opening]) -> None:
    with pytest.raises(WireError, match="bytes"):
        kind.unpack(b"nonsense")


def test_equal_states_have_no_odd_one() -> None:
    assert odd_ones([header(0, 5), header(1, 5), header(2, 0, Flag(0))]) == frozenset()


def test_the_majority_is_right() -> None:
    assert odd_ones([header(0, 6), header(1, 5), header(2, 5)]) == {0}


def test_without_a_majority_the_lowest_replica_is_right() -> None:
    assert odd_ones([header(0, 6), header(1, 5)]) == {1}
    assert odd_ones([header(2, 6), header(1, 5), header(0, 4)]) == {1, 2}


def contribution(replica: int, batch_size: int, flags: Flag = Flag.CONTRIBUTES) -> Header:
    """Under the constant-batch policy the samples differ by nature."""
    samples = replica
    return Header(
        replica=replica, flags=flags, step=3, heard=0, samples=samples, batch_size=batch_size, loss_sum=1.0, digest=0
    )


def test_a_contributor_with_another_batch_size_does_not_fit() -> None:
    assert misfits([contribution(0, 4), contribution(1, 2), contribution(2, 4)]) == {1}
    assert misfits([contribution(1, 2), contribution(0, 4)]) == {1}


def test_who_contributes_nothing_always_fits() -> None:
    assert misfits([contribution(0, 4), contribution(1, 4), contribution(2, 0, Flag.FULL)]) == frozenset()
    assert misfits([contribution(0, 0, Flag.CLOSING), contribution(1, 0, Flag.CLOSING)]) == frozenset()


def test_who_ends_the_run_at_another_step_than_the_others_does_not_fit() -> None:
    assert misfits([contribution(0, 4), contribution(1, 0, Flag.CLOSING), contribution(2, 4)]) == {1}
    assert misfits([contribution(0, 0, Flag.CLOSING), contribution(1, 4), contribution(2, 0, Flag.CLOSING)]) == {1}
