"""An API server alone, with etcd and the garbage collector: no node, no kubelet. Enough for the CRD and the operator.

Pods stay as they are until a test says what a kubelet would say. It listens on loopback on free ports, so any number of
these, and a whole cluster, may run side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.kube.binaries import program_folder
from tests.cluster.kube.shell import until
from tests.ports import free_port

CRD = Path(__file__).parents[3] / "crds" / "fthsdpjobs.yaml"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
CONTROLLERS = tuple(
    f"{name}-controller" for name in ("garbage-collector", "serviceaccount", "namespace", "podgroup-protection")
)
GANG_FEATURE = "GenericWorkload=true"
"""Kubernetes' own gang scheduling is switched off where nobody switches it on."""
READY_TIMEOUT = 120.0
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}


def programs() -> Path:
    """Return the folder with the programs: FTHSDP_KUBE_BIN, or where the cluster tests keep what they build."""
    return Path(os.environ.get("FTHSDP_KUBE_BIN") or program_folder())


def why_not_here() -> str:
    """Return what is missing, in words; empty when nothing is."""
    missing = [name for name in PROGRAMS if not os.access(programs() / name, os.X_OK)]
    where = f"{programs()} (name another folder with FTHSDP_KUBE_BIN)"
    return f"no {', '.join(missing)} in {where}" if missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """A running one."""

    kubeconfig: Path
    audit: Path
    """What service accounts asked of it, a JSON object a line."""
    etcd: str = ""
    """Address of its etcd."""

    def kubectl(self, *arguments: str, stdin: str | None = None, fails: bool = False) -> str:
        """Run kubectl; returns what it printed, standard error as well when it is to fail."""
        command = [str(programs() / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
        assert (done.returncode != 0) is fails, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stderr if fails else done.stdout

    def account(self, namespace: str, name: str = "default") -> None:
        """Make sure that a service account is there: no pod is taken without its own, and a controller is slow."""
        made = self.kubectl("create", "serviceaccount", name, "-n", namespace, "--dry-run=client", "-o", "json")
        self.kubectl("apply", "--server-side", "-f", "-", stdin=made)

    def items(self, kind: str, namespace: str) -> dict[str, dict[str, Any]]:
        """Return all objects of a kind, by name."""
        found = json.loads(self.kubectl("get", kind, "-n", namespace, "-o", "json"))["items"]
        return {it["metadata"]["name"]: it for it in found}


@contextmanager
def running(
    folder: Path,
    *options: str,
    controllers: Sequence[str] = CONTROLLERS,
    calls_per_second: int = 20,
) -> Iterator[ApiServer]:
    """Start one that keeps its files in ``folder``, with our CRD; gone when this returns.

    ``options`` are those of kube-apiserver; ``calls_per_second`` are the controllers', who have 20 otherwise.
    """
    etcd, peer, port = (free_port() for _ in range(3))
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(_kubeconfig(port))
    (folder / "tokens").write_text("test-token,admin,1,system:masters\n")
    key = folder / "accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    server = ApiServer(kubeconfig=kubeconfig, audit=folder / "audit.jsonl", etcd=f"http://127.0.0.1:{etcd}")
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    with ExitStack() as stack:
        stack.enter_context(daemon(folder, _etcd(folder, etcd, peer)))
        stack.enter_context(daemon(folder, [*_api_server(folder, etcd, port), *options]))
        until(lambda: _ready(server), "the API server is ready", timeout=READY_TIMEOUT, log=_log(folder, PROGRAMS[1]))
        server.kubectl("apply", "-f", str(CRD))
        server.kubectl("wait", "--for=condition=established", "crd/fthsdpjobs.fthsdp.dev", "--timeout=60s")
        stack.enter_context(daemon(folder, _controllers(folder, controllers, calls_per_second)))
        yield server


def _etcd(folder: Path, clients: int, peers: int) -> list[str]:
    here, others = f"http://127.0.0.1:{clients}", f"http://127.0.0.1:{peers}"
    return [
        *("etcd", "--data-dir", f"{folder}/etcd", "--unsafe-no-fsync"),
        *("--listen-client-urls", here, "--advertise-client-urls", here, "--listen-peer-urls", others),
        *("--initial-advertise-peer-urls", others, "--initial-cluster", f"default={others}"),
    ]


def _api_server(folder: Path, etcd: int, port: int) -> list[str]:
    return [
        *("kube-apiserver", f"--etcd-servers=http://127.0.0.1:{etcd}", f"--secure-port={port}"),
        *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"),
        *(f"--cert-dir={folder}/certificates", f"--token-auth-file={folder}/tokens", "--authorization-mode=RBAC"),
        *(f"--service-account-key-file={folder}/accounts.key", "--service-cluster-ip-range=10.97.0.0/16"),
        *(f"--service-account-signing-key-file={folder}/accounts.key", "--service-account-issuer=https://test"),
        *(f"--audit-policy-file={folder}/audit.json", f"--audit-log-path={folder}/audit.jsonl"),
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",  # as some clusters have it
        *("--runtime-config=scheduling.k8s.io/v1beta1=true", f"--feature-gates={GANG_FEATURE}"),
    ]


def _controllers(folder: Path, names: Sequence[str], calls_per_second: int) -> list[str]:
    return [
        *("kube-controller-manager", f"--kubeconfig={folder}/kubeconfig", "--leader-elect=false", "--secure-port=0"),
        *(f"--controllers={','.join(names)}", f"--kube-api-qps={calls_per_second}"),
        f"--kube-api-burst={calls_per_second + calls_per_second // 2}",
        f"--feature-gates={GANG_FEATURE}",
    ]


@contextmanager
def daemon(folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Run one of the programs, with its log in ``folder``."""
    with _log(folder, command[0]).open("wb") as log:
        process = subprocess.Popen(
            [programs() / command[0], *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield
        finally:
            process.kill()
            process.wait(timeout=30)


def _log(folder: Path, program: str) -> Path:
    return folder / f"{program}.log"


def _ready(server: ApiServer) -> bool:
    command = [str(programs() / "kubectl"), "--kubeconfig", str(server.kubeconfig), "get", "--raw", "/readyz"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def _kubeconfig(port: int) -> str:
    return f"""\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:{port}", insecure-skip-tls-verify: true}}}}]
users: [{{name: u, user: {{token: test-token}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
current-context: c
"""
