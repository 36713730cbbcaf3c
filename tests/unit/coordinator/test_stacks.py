"""What a stack tells of a rank that does not go on."""

from fthsdp.coordinator.stacks import place, waits_for_others

SCRIPT = '  File "/app/train.py", line 7, in loss\n    time.sleep(1e6)\n'
LIBRARY = '  File "/usr/lib/python3.11/threading.py", line 629, in wait\n    waiter.acquire()\n'
COLLECTIVE = (
    '  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3, in all_gather\n'
    "    work.wait()\n"
)


def test_the_place_is_in_the_users_own_code() -> None:
    assert place(SCRIPT + LIBRARY) == 'File "/app/train.py", line 7, in loss / time.sleep(1e6)'


def test_without_any_of_it_the_innermost_frame_has_to_do() -> None:
    assert place(LIBRARY) == 'File "/usr/lib/python3.11/threading.py", line 629, in wait / waiter.acquire()'
    assert place("") == ""


def test_who_is_in_a_collective_waits_for_others() -> None:
    assert waits_for_others(SCRIPT + COLLECTIVE)
    assert not waits_for_others(SCRIPT + LIBRARY)
    assert not waits_for_others("")
