"""Helm, as the tests use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.kube.binaries import find_helm
from tests.cluster.kube.images import PROJECT
from tests.cluster.kube.shell import ClusterError, run

__all__ = ["CHART", "Helm", "render"]

CHART = PROJECT / "charts" / "fthsdp-operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Helm:
    """The command, for one cluster and one namespace."""

    kubeconfig: Path
    namespace: str

    def install(self, release: str, chart: Path, values: Mapping[str, str]) -> str:
        """Install a chart, wait until it is ready, and return its notes; raises ClusterError."""
        settings = [word for name, value in values.items() for word in ("--set-string", f"{name}={value}")]
        return self._run("install", release, str(chart), "--wait", "--timeout=120s", *settings)

    def uninstall(self, release: str) -> None:
        """Remove all that a release installed, except what it is told to keep; fine if there is none."""
        self._run("uninstall", release, "--ignore-not-found", "--wait", "--timeout=120s")

    def _run(self, *arguments: str) -> str:
        program = find_helm()
        if program is None:
            raise ClusterError("helm is not installed")
        return run(program, "--kubeconfig", self.kubeconfig, "--namespace", self.namespace, *arguments)


def render(program: Path, *settings: str, namespace: str) -> list[dict[str, Any]]:
    """Return the objects of our chart with these settings (name=value), without a cluster; raises ClusterError."""
    options = [word for setting in settings for word in ("--set", setting)]
    text = run(program, "template", "fthsdp", CHART, "--namespace", namespace, *options)
    return [document for document in yaml.safe_load_all(text) if document]
