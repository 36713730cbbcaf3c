"""kubectl, as the tests use it: what a person would type, and what it prints."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.kube.shell import ClusterError, run

__all__ = ["Kubectl", "Watch"]

Object = dict[str, Any]


@dataclass(slots=True)
class Watch:
    """The lines that a command prints while it runs; whoever waits for one is woken by each."""

    lines: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    def wait_for(self, wanted: Callable[[str], bool], what: str, *, timeout: float, after: int = 0) -> int:
        """Return the number of the first line from ``after`` on that is wanted; else raises AssertionError."""
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                for number in range(after, len(self.lines)):
                    if wanted(self.lines[number]):
                        return number
                after = len(self.lines)
                left = deadline - time.monotonic()
                if left <= 0 or self._ended:
                    raise AssertionError(f"{what}: not seen in {timeout:g} s, but\n" + "\n".join(self.lines[-60:]))
                self._news.wait(left)

    def wait_for_end(self, *, timeout: float) -> None:
        """Wait until the command ends by itself; raises AssertionError when it goes on."""
        with self._news:
            assert self._news.wait_for(lambda: self._ended, timeout), f"still printing after {timeout:g} s"

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """The command, for one cluster."""

    program: Path
    kubeconfig: Path

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 120) -> str:
        """Run it and return what it prints; raises ClusterError with what it says."""
        return run(self.program, "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin, timeout=timeout)

    def answer(self, *arguments: str) -> str:
        """Run it and return the command with what it prints, also when it fails: for people to read."""
        try:
            return f"$ kubectl {' '.join(arguments)}\n{self(*arguments)}"
        except ClusterError as error:
            return f"$ {error}"

    def apply(self, *objects: Object) -> None:
        """Create or change objects."""
        self("apply", "--filename", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def refusal(self, manifest: Object) -> str:
        """Return why the API server refuses a manifest; raises AssertionError when it takes it."""
        try:
            self("create", "--dry-run=server", "--filename", "-", stdin=json.dumps(manifest))
        except ClusterError as error:
            return str(error)
        raise AssertionError(f"the API server takes {manifest}")

    def get(self, *what: str) -> Object:
        """Return an object, or a list of them; raises ClusterError when a named one is not there."""
        found: Object = json.loads(self("get", *what, "--output=json"))
        return found

    def items(self, *what: str) -> list[Object]:
        """Return the objects of a list."""
        found: list[Object] = self.get(*what)["items"]
        return found

    @contextmanager
    def watch(self, *arguments: str) -> Iterator[Watch]:
        """Run a command that goes on printing (``get --watch``, ``logs --follow``) for as long as the block."""
        watch = Watch()
        command: list[str | Path] = [self.program, "--kubeconfig", self.kubeconfig, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            reader = threading.Thread(target=watch._read, args=(process,), name="kubectl-watch")
            reader.start()
            try:
                yield watch
            finally:
                process.terminate()
                reader.join()
