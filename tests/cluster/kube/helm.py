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
_WAIT = ("--wait", "--timeout=120s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Helm:
    """The command, for one cluster and one namespace."""

    kubeconfig: Path
    namespace: str

    def install(self, release: str, chart: Path, values: Mapping[str, str | int]) -> str:
        """Install a chart, wait until it is ready, and return its notes; raises ClusterError."""
        return self._run("install", release, str(chart), *_WAIT, *_settings(values))

    def upgrade(self, release: str, chart: Path, values: Mapping[str, str | int]) -> None:
        """Bring a release to another chart and other values, and wait until it is ready; raises ClusterError."""
        self._run("upgrade", release, str(chart), *_WAIT, *_settings(values))

    def rollback(self, release: str, revision: int) -> None:
        """Bring a release back to what it was, and wait until it is ready; raises ClusterError."""
        self._run("rollback", release, str(revision), *_WAIT)

    def test(self, release: str) -> str:
        """Run the tests of a release and return what is said of them; raises ClusterError when one fails."""
        return self._run("test", release, "--timeout=120s")

    def uninstall(self, release: str) -> None:
        """Remove all that a release installed, except what it is told to keep; fine if there is none."""
        self._run("uninstall", release, "--ignore-not-found", *_WAIT)

    def _run(self, *arguments: str) -> str:
        program = find_helm()
        if program is None:
            raise ClusterError("helm is not installed")
        return run(program, "--kubeconfig", self.kubeconfig, "--namespace", self.namespace, *arguments)


def _settings(values: Mapping[str, str | int]) -> list[str]:
    """Words stay words, also where they look like numbers."""
    options = {name: "--set-string" if isinstance(value, str) else "--set" for name, value in values.items()}
    return [word for name, value in values.items() for word in (options[name], f"{name}={value}")]


def render(program: Path, *settings: str, namespace: str) -> list[dict[str, Any]]:
    """Return the objects of our chart with these settings (name=value), without a cluster; raises ClusterError."""
    options = [word for setting in settings for word in ("--set", setting)]
    text = run(program, "template", "fthsdp", CHART, "--namespace", namespace, *options)
    return [document for document in yaml.safe_load_all(text) if document]
