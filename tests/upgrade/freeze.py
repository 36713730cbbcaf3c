"""Keep what this version installs and makes, for the upgrade tests of the versions after it: run it at each release.

    python -m tests.upgrade.freeze          # needs helm

It writes the rendered chart, as a chart without settings, and a job in the middle of its life: the job with its status,
its pods and all that they lean on, as the API server has them, and what its coordinator says.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.cluster.kube.binaries import find_helm
from tests.cluster.kube.helm import CHART
from tests.cluster.kube.shell import run
from tests.unit.operator.world import World, manifest
from tests.upgrade.before import BEFORE, JOB, OBJECTS, UID

NAMESPACE = "fthsdp-system"
SPEC = {
    "spares": 1,
    "ttlSecondsAfterFinished": 3600,
    "failurePolicy": {
        "rules": [{"name": "disk", "onPodReasons": ["Evicted"], "action": "RestartReplica"}],
        "job": {"limit": 20},
    },
}


def job() -> dict[str, Any]:
    """Return what job.json holds, of this version."""
    world = asyncio.run(_live())
    assert world.coordinator is not None
    said = world.coordinator.model_dump(mode="json")
    return {"objects": list(world.objects.values()), "coordinator": said}


async def _live() -> World:
    """Return a job of three replicas and a spare, of which one failed once and trains again."""
    wanted = manifest(**SPEC)
    wanted["metadata"]["uid"] = UID
    world = World(wanted)
    await world.train()
    world.exits("r2-a0-1", 1)
    await world.settle()
    world.vanish("llama-r2-a0-0")
    world.kubelets_start_everything()
    world.everybody_trains(step=20)
    await world.settle()
    return world


def main() -> int:
    """Write both."""
    helm = find_helm()
    if helm is None:
        sys.exit("helm is needed, and not installed")
    text = run(helm, "template", "fthsdp", CHART, "--namespace", NAMESPACE, "--no-hooks")
    assert "{{" not in text, "this would be taken for a template"
    OBJECTS.write_text(text, encoding="utf-8")
    JOB.write_text(json.dumps(job(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {OBJECTS} and {JOB}; set the version in {BEFORE / 'Chart.yaml'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
