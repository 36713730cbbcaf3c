"""A Kubernetes on this machine, for people: ``python -m tests.cluster.kube up|down``."""

from __future__ import annotations

import argparse
import sys

from tests.cluster.kube.machine import bring_down, bring_up
from tests.cluster.kube.shell import ClusterError

__all__ = ["main"]


def main() -> int:
    """Bring it up and say how to reach it, or take it down."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.kube", description=__doc__)
    parser.add_argument("command", choices=("up", "down"))
    try:
        if parser.parse_args().command == "down":
            bring_down()
            return 0
        cluster = bring_up()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    print(f"{cluster.kubectl.program} get nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
