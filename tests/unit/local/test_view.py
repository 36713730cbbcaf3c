"""What the screen of a run on this machine says."""

from tests.unit.operator.world import manifest

from fthsdp.coordinator.messages import Status
from fthsdp_operator.api import parse_job
from fthsdp_operator.local.view import view


def test_the_step_does_not_go_back_when_the_coordinator_has_left() -> None:
    job = parse_job(manifest() | {"status": {"step": 50, "loss": 2.0}})
    last = Status(epoch=1, paused=False, finished=True, step=58, loss=1.5, replicas=())
    assert (view(job, last).step, view(job, None, last=last).step) == (58, 58)
    assert view(job, None, last=last).loss == 1.5
    assert (view(job, None).step, view(job, None).loss) == (50, 2.0)
