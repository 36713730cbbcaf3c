import socket
import threading

import pytest

from fthsdp.catchup.shelf import Shelf, Stripe
from fthsdp.wire import receive_frame

STRIPE = Stripe(step=4, start=0, data=memoryview(b"abc"), head={})


@pytest.fixture
def fetch():
    """Ask a shelf for a stripe of replica 2; return the head of the answer."""
    threads: list[threading.Thread] = []

    def fetch(shelf: Shelf, epoch: int):
        ours, theirs = socket.socketpair()
        with ours:
            hello = {"what": "stripe", "shadow": 2, "epoch": epoch}
            threads.append(threading.Thread(target=shelf.serve, args=(theirs, hello), daemon=True))
            threads[-1].start()
            return receive_frame(ours)

    yield fetch
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_stripe_is_there_for_its_epoch(fetch):
    shelf = Shelf()
    shelf.keep_stripes_of([2], 3)
    shelf.put_stripe(2, 3, STRIPE)
    assert fetch(shelf, 3) == {"step": 4, "start": 0, "bytes": 3}
    assert "gone" in fetch(shelf, 2)


def test_a_stripe_outlives_a_change_that_leaves_its_shadow_as_it_is(fetch):
    shelf = Shelf()
    shelf.keep_stripes_of([2], 3)
    shelf.keep_stripes_of([1, 2], 4)
    shelf.put_stripe(2, 3, STRIPE)
    assert fetch(shelf, 3)["step"] == 4


def test_a_stripe_that_is_copied_when_nobody_wants_it_any_more_is_not_kept(fetch):
    shelf = Shelf()
    shelf.keep_stripes_of([2], 3)
    shelf.keep_stripes_of([], 4)  # while it was copied
    shelf.put_stripe(2, 3, STRIPE)
    assert "gone" in fetch(shelf, 3)
    shelf.keep_stripes_of([2], 5)
    shelf.put_stripe(2, 5, STRIPE)
    assert fetch(shelf, 5)["step"] == 4
