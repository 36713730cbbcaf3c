"""Ports of a run: one coordinator, one rendezvous for each attempt."""

from pathlib import Path

from fthsdp_operator.local.addresses import Addresses, coordinator_arguments


def test_pods_of_one_attempt_share_a_rendezvous_and_other_attempts_have_their_own() -> None:
    addresses = Addresses()
    first, again = addresses.variables("0", "0"), addresses.variables("0", "0")
    other, later = addresses.variables("1", "0"), addresses.variables("0", "1")
    assert first == again
    assert len({v["MASTER_PORT"] for v in (first, other, later)}) == 3
    assert {v["FTHSDP_COORDINATOR"] for v in (first, other, later)} == {addresses.coordinator}


def test_the_coordinator_is_given_its_port_store_and_record_folder_on_this_machine() -> None:
    argv = ("python", "-m", "fthsdp.coordinator", "--job", "j", "--port", "29400", "--store", "configmap:ns/j-epoch")
    assert coordinator_arguments(argv, port=21000, store=Path("/run/epoch.json"), record=Path("/run")) == (
        "python", "-m", "fthsdp.coordinator", "--job", "j",
        "--port", "21000", "--store", "file:/run/epoch.json", "--record-dir", "/run",
    )  # fmt: skip
