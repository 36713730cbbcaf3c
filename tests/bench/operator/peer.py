"""The same groups of pods with LeaderWorkerSet's own controller, on the same cluster, one system after the other.

LeaderWorkerSet is served neither as a Go module nor as anything else that a package manager brings: its controller is
built from a checkout of its source, which the environment names. Its StatefulSets are the controller manager's, which
may make as many calls a second here as everybody else.
"""

from __future__ import annotations

import base64
import os
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.bench.figures import Figure, Of, at_most
from tests.bench.operator.client import Pods
from tests.bench.operator.ground import CALLS_PER_SECOND, Ground, ground
from tests.bench.operator.large import DEADLINE, Say, group_of, untouched
from tests.bench.operator.sizes import Size
from tests.bench.operator.subject import NAMESPACE, container, job, jobs_path, operator, warm_up
from tests.bench.processes import BenchmarkFailed, Child, environment
from tests.cluster.apiserver import server
from tests.cluster.kube.binaries import cache_folder
from tests.cluster.kube.shell import ClusterError, run, until
from tests.ports import free_port

from fthsdp_operator.api import JOB_LABEL, REPLICA_LABEL, ROLE_LABEL, Role

__all__ = ["LWS_SOURCE", "next_to_lws"]

LWS_SOURCE = "FTHSDP_LWS_SOURCE"
"""Names a checkout of github.com/kubernetes-sigs/lws."""
NAME = "peer"
GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
LWS_PATH = f"apis/leaderworkerset.x-k8s.io/v1/namespaces/{NAMESPACE}/leaderworkersets"
READY = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of the two, and how to speak to it."""

    name: str
    path: str
    """Where its objects are created."""
    selector: str
    group_label: str
    manifest: Callable[[str, int, int], dict[str, Any]]
    """Takes name, groups and pods of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Seconds."""

    running: float
    """From the creation of the object until all pods ran."""
    back: tuple[float, ...]
    """From the deletion of a pod until all pods ran again, one of each group that failed."""


def next_to_lws(size: Size, say: Say, folder: Path) -> list[Figure]:
    """Bring both up and break a group of each; of small groups, then of large ones."""
    source = os.environ.get(LWS_SOURCE)
    if not source:
        words = f"not measured: set {LWS_SOURCE} to a checkout of github.com/kubernetes-sigs/lws"
        say(words)
        return [Figure(name="next to LeaderWorkerSet", note=words)]
    controller = _build(Path(source))
    figures: list[Figure] = []
    with ground(folder / "peer", controllers=(*server.CONTROLLERS, "statefulset-controller")) as under:
        under.add_nodes(size.peer_groups * max(size.peer_sizes) + 8)
        for pods in size.peer_sizes:
            with operator(under):
                warm_up(under.api, OURS.path, OURS.manifest)
                ours = _measure(under, OURS, size, pods, say)
            with _lws(under, controller, Path(source)):
                warm_up(under.api, LWS.path, LWS.manifest)
                theirs = _measure(under, LWS, size, pods, say)
            figures += _figures(size, pods, ours, theirs, first=pods == size.peer_sizes[0])
    return figures


def _figures(size: Size, pods: int, ours: Result, theirs: Result, *, first: bool) -> Iterator[Figure]:
    what = f"{size.peer_groups} groups x {pods} pods"
    yield Figure(
        name=f"{what}: all running",
        values=(ours.running,),
        peer="LWS",
        peer_values=(theirs.running,),
        must=at_most(1.0, Of.RATIO),
        aim=at_most(1 / 3, Of.RATIO) if first else None,
    )
    yield Figure(
        name=f"{what}: a failed group is back",
        values=ours.back,
        peer="LWS",
        peer_values=theirs.back,
        must=at_most(1.0, Of.RATIO),
    )


def _measure(under: Ground, system: System, size: Size, each: int, say: Say) -> Result:
    total = size.peer_groups * each
    with Pods(under.api, NAMESPACE, system.selector) as pods:
        began = time.monotonic()
        under.api.call("POST", system.path, system.manifest(NAME, size.peer_groups, each))
        running = pods.until(lambda: len(pods.running) >= total, "all pods run", DEADLINE) - began
        back = [_break(under, system, pods, number % size.peer_groups, total) for number in range(size.peer_failures)]
        say(f"{system.name}, {size.peer_groups} x {each}: all running after {running:.1f} s, a group is back after"
            f" {statistics.median(back):.2f} s")  # fmt: skip
        under.api.call("DELETE", f"{system.path}/{NAME}", {"propagationPolicy": "Background"})
        pods.until(lambda: not pods.there, "all pods are gone", DEADLINE)
    return Result(running=running, back=tuple(back))


def _break(under: Ground, system: System, pods: Pods, number: int, total: int) -> float:
    group = group_of(pods, number, system.group_label)
    born = {name: pods.made[name] for name in group}
    began = under.api.delete_pod(NAMESPACE, max(group))

    def back() -> bool:  # names come back with LeaderWorkerSet
        renewed = all(name not in pods.there or pods.made[name] > at for name, at in born.items())
        return renewed and len(pods.running) >= total and len(pods.there) == total

    done = pods.until(back, "the group is back", DEADLINE)
    untouched(pods, group | group_of(pods, number, system.group_label), began)
    return done - began


# --- the two --------------------------------------------------------------------------------------------------------

OURS = System(
    name="fthsdp",
    path=jobs_path(),
    selector=f"{JOB_LABEL}={NAME},{ROLE_LABEL}={Role.TRAINER}",
    group_label=REPLICA_LABEL,
    manifest=job,
)


def _leader_worker_set(name: str, groups: int, each: int) -> dict[str, Any]:
    pod = {"spec": {"containers": [container()], "terminationGracePeriodSeconds": 1}}
    template = {"size": each, "restartPolicy": "RecreateGroupOnPodRestart", "workerTemplate": pod}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {"replicas": groups, "leaderWorkerTemplate": template},
    }


LWS = System(
    name="LWS",
    path=LWS_PATH,
    selector=f"{NAME_LABEL}={NAME}",
    group_label=GROUP_LABEL,
    manifest=_leader_worker_set,
)


# --- LeaderWorkerSet's controller -----------------------------------------------------------------------------------


def _build(source: Path) -> Path:
    """Build the controller into the cache folder, once for each commit; raises BenchmarkFailed."""
    if not (source / "cmd" / "main.go").is_file():
        raise BenchmarkFailed(f"{LWS_SOURCE}={source} is no checkout of LeaderWorkerSet: it has no cmd/main.go")
    if shutil.which("go") is None:
        raise BenchmarkFailed("LeaderWorkerSet's controller is built with Go, which is not installed")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True).stdout.strip()
    program = cache_folder() / "peers" / f"lws-{commit[:12] or 'unknown'}" / "lws"
    if not program.exists():
        print(f"building LeaderWorkerSet's controller into {program.parent}", flush=True)
        program.parent.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_name(".lws.unfinished")
        try:
            run("go", "build", "-o", unfinished, "./cmd", cwd=source, env={"CGO_ENABLED": "0"}, timeout=1800.0)
        except ClusterError as error:
            raise BenchmarkFailed(f"LeaderWorkerSet's controller cannot be built: {error}") from error
        unfinished.rename(program)
    return program


@contextmanager
def _lws(under: Ground, program: Path, source: Path) -> Iterator[None]:
    """Run the controller with its definitions and webhooks, on loopback."""
    port, folder = free_port(), under.folder / "lws"
    folder.mkdir(exist_ok=True)
    _certificate(folder)
    kubectl = (server.programs() / "kubectl", "--kubeconfig", under.kubeconfig)
    run(*kubectl, "apply", "--server-side", "-f", source / "config" / "crd" / "bases")
    config = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": port, "host": "127.0.0.1", "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": CALLS_PER_SECOND, "burst": CALLS_PER_SECOND},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    hooks = _webhooks((source / "config" / "webhook" / "manifests.yaml").read_text(), folder, port)
    command = [str(program), f"--config={folder}/config.yaml"]
    log = folder / "controller.log"
    controller = Child("lws", command, log=log, env=environment(KUBECONFIG=str(under.kubeconfig)))
    try:
        until(lambda: _listens(port) or _over(controller), "LeaderWorkerSet's webhooks listen", timeout=READY, log=log)
        run(*kubectl, "apply", "-f", "-", stdin=hooks)
        yield
        run(*kubectl, "delete", "-f", "-", stdin=hooks)
    except ClusterError as error:
        raise BenchmarkFailed(str(error)) from error
    finally:
        controller.end()


def _over(controller: Child) -> bool:
    if not controller.alive:
        raise controller.failure("ended while it started")
    return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _certificate(folder: Path) -> None:
    run(
        *("openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-subj", "/CN=lws", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", folder / "tls.key", "-out", folder / "tls.crt"),
    )


def _webhooks(published: str, folder: Path, port: int) -> str:
    """Return its webhooks, called at an address instead of a Service, and for none but its own pods."""
    authority = base64.b64encode((folder / "tls.crt").read_bytes()).decode()
    documents = [document for document in yaml.safe_load_all(published) if document]
    for document in documents:
        document["metadata"]["name"] = f"lws-{document['metadata']['name']}"
        for hook in document["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
            if path.endswith("v1-pod"):
                hook["objectSelector"] = {"matchExpressions": [{"key": NAME_LABEL, "operator": "Exists"}]}
    return yaml.safe_dump_all(documents)
