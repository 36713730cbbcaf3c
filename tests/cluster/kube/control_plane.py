"""The control plane, as processes of this machine: etcd, API server, controller manager, scheduler and cluster DNS."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from tests.cluster.kube.layout import BRIDGE, HOST_ADDRESS, SERVICE_NETWORK, Layout
from tests.cluster.kube.shell import ClusterError, run, start_daemon, until
from tests.ports import free_port

__all__ = ["start_control_plane", "wait_for_api_server"]

_SERVICE_ADDRESS = SERVICE_NETWORK.replace("0.0/16", "0.1")
"""Address of the Service `kubernetes`: the first one of the network."""
_READY_TIMEOUT = 120.0
_COREFILE = """\
.:53 {{
  bind {address}
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig}
  }}
  cache 2
}}
"""


def start_control_plane(layout: Layout, programs: Path) -> None:
    """Start all of it and wait until the API server is ready; raises ClusterError with the end of a log."""
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{HOST_ADDRESS}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    _write_keys(layout.keys)
    _write_kubeconfig(layout)
    etcd = _start_etcd(layout, programs)
    _start_api_server(layout, programs, etcd)
    _start_controllers(layout, programs)
    _start_dns(layout, programs)


def _start_etcd(layout: Layout, programs: Path) -> str:
    """Return its address. On ports that are free: another etcd may run here."""
    clients, peers = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    _daemon(
        *(layout, programs / "etcd", "--data-dir", layout.folder / "etcd", "--unsafe-no-fsync"),
        *("--listen-client-urls", clients, "--advertise-client-urls", clients),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"),
    )
    return clients


def _start_api_server(layout: Layout, programs: Path, etcd: str) -> None:
    keys = layout.keys
    process = _daemon(
        *(layout, programs / "kube-apiserver", f"--etcd-servers={etcd}"),
        *(f"--bind-address={HOST_ADDRESS}", f"--advertise-address={HOST_ADDRESS}", "--secure-port=6443"),
        *(f"--tls-cert-file={keys}/apiserver.crt", f"--tls-private-key-file={keys}/apiserver.key"),
        *(f"--client-ca-file={keys}/ca.crt", "--authorization-mode=Node,RBAC", "--allow-privileged=true"),
        *(f"--service-account-key-file={keys}/accounts.pub", f"--service-account-signing-key-file={keys}/accounts.key"),
        *("--service-account-issuer=https://kubernetes.default.svc", f"--service-cluster-ip-range={SERVICE_NETWORK}"),
        "--kubelet-preferred-address-types=InternalIP",
        *(f"--kubelet-client-certificate={keys}/admin.crt", f"--kubelet-client-key={keys}/admin.key"),
    )
    wait_for_api_server(layout, programs, lambda: _ended(process, "kube-apiserver", layout))


def wait_for_api_server(layout: Layout, programs: Path, ended: Callable[[], bool] = lambda: False) -> None:
    """Wait until the API server is ready; ``ended`` raises once that is in vain. Raises ClusterError."""
    ready = (programs / "kubectl", "--kubeconfig", layout.kubeconfig, "get", "--raw", "/readyz")
    until(
        lambda: ended() or _succeeds(*ready),
        "the API server is ready",
        timeout=_READY_TIMEOUT,
        log=layout.logs / "kube-apiserver.log",
    )


def _start_controllers(layout: Layout, programs: Path) -> None:
    keys, kubeconfig = layout.keys, layout.kubeconfig
    _daemon(
        *(layout, programs / "kube-controller-manager", f"--kubeconfig={kubeconfig}", "--leader-elect=false"),
        *(f"--service-account-private-key-file={keys}/accounts.key", f"--root-ca-file={keys}/ca.crt"),
        *("--use-service-account-credentials", "--secure-port=0"),
        *("--node-monitor-grace-period=16s", "--node-monitor-period=2s"),
    )
    _daemon(
        layout, programs / "kube-scheduler", f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0"
    )


def _start_dns(layout: Layout, programs: Path) -> None:
    corefile = layout.folder / "Corefile"
    corefile.write_text(_COREFILE.format(address=HOST_ADDRESS, kubeconfig=layout.kubeconfig))
    _daemon(layout, programs / "coredns", "-conf", corefile)


def _daemon(layout: Layout, program: Path, *arguments: str | Path) -> Popen[bytes]:
    return start_daemon([program, *arguments], layout.logs / f"{program.name}.log")


def _ended(process: Popen[bytes], name: str, layout: Layout) -> bool:
    """Return False while it runs; raises ClusterError once it has ended: waiting on would be in vain."""
    if process.poll() is None:
        return False
    log = (layout.logs / f"{name}.log").read_text(errors="replace")
    raise ClusterError(f"{name} ended with exit code {process.returncode}; the end of its log:\n{log[-2000:]}")


def _succeeds(*command: str | Path) -> bool:
    try:
        run(*command, timeout=20)
    except ClusterError:
        return False
    return True


def _write_keys(folder: Path) -> None:
    """Make an authority, and what it signs: the API server, the administrator; and the key of service accounts."""
    folder.mkdir(parents=True, mode=0o700)
    new_key = (
        "openssl",
        "req",
        "-x509",
        "-nodes",
        "-days",
        "30",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    )
    run(*new_key, "-subj", "/CN=fthsdp-test", "-keyout", folder / "ca.key", "-out", folder / "ca.crt")
    names = [f"IP:{HOST_ADDRESS}", f"IP:{_SERVICE_ADDRESS}", "DNS:kubernetes.default.svc", "DNS:kubernetes.default"]
    for name, subject, alternative in (
        ("apiserver", "/CN=kube-apiserver", ",".join(names)),
        ("admin", "/O=system:masters/CN=admin", "DNS:admin"),
    ):
        run(
            *(*new_key, "-subj", subject, "-addext", f"subjectAltName={alternative}"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-CA", folder / "ca.crt", "-CAkey", folder / "ca.key"),
            *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"),
        )
    run("openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", folder / "accounts.key")
    run("openssl", "ec", "-in", folder / "accounts.key", "-pubout", "-out", folder / "accounts.pub")


def _write_kubeconfig(layout: Layout) -> None:
    """Write the administrator's credentials, complete in one file, so that it can be copied."""

    def data(name: str) -> str:
        return base64.b64encode((layout.keys / name).read_bytes()).decode()

    cluster = {"server": f"https://{HOST_ADDRESS}:6443", "certificate-authority-data": data("ca.crt")}
    user = {"client-certificate-data": data("admin.crt"), "client-key-data": data("admin.key")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fthsdp", "cluster": cluster}],
        "users": [{"name": "admin", "user": user}],
        "contexts": [{"name": "fthsdp", "context": {"cluster": "fthsdp", "user": "admin"}}],
        "current-context": "fthsdp",
    }
    layout.kubeconfig.touch(mode=0o600)
    layout.kubeconfig.write_text(json.dumps(config, indent=1))
