"""A node: a network namespace with a containerd, a kubelet and a kube-proxy of its own.

Any number of them share one kernel. What that takes, and would cost hours to find out again:

- Two kubelets delete each other's pods ("Pod sandbox changed") unless each has a cgroup of its own as its root.
- ``ip netns exec`` mounts another /sys and so hides the cgroups: the namespace is entered with ``nsenter --net``.
- Without CAP_SYS_RESOURCE nobody may lower the score by which the kernel picks a victim when memory ends: containerd
  must not try (``restrict_oom_score_adj``), or each sandbox fails with "can't get final child's PID from pipe".
- Kubernetes refuses cgroup v1 unless told otherwise (``failCgroupV1``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.kube.images import PAUSE_IMAGE
from tests.cluster.kube.layout import BRIDGE, HOST_ADDRESS, POD_NETWORK, Layout, NodeLayout
from tests.cluster.kube.shell import run, start_daemon, until

__all__ = ["CNI_FOLDERS", "CNI_PLUGINS", "import_image", "start_in_node", "start_node"]

CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PLUGINS = ("ptp", "host-local", "loopback")
_CGROUPS = Path("/sys/fs/cgroup")
WEIGHT = 4
"""The processor time of a node and all its pods, where it is short, next to that of one process of the tests beside it:
else a pod would take as long to end as a silent one is waited for."""
_START_TIMEOUT = 60.0

_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "{folder}/run/containerd"
[grpc]
address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{cni}"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "{folder}/run/runc"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
"""


def start_node(layout: Layout, node: NodeLayout, programs: Path) -> None:
    """Start one node's daemons; the pods' pause image must be among ``images``. Raises ClusterError."""
    for name in ("run", "cni", "logs"):
        (node.folder / name).mkdir(parents=True)
    _connect(layout, node)
    _make_cgroups(node.name)
    _start_containerd(node)
    _start_kubelet(layout, node, programs)
    _daemon(
        *(node, programs / "kube-proxy", f"--kubeconfig={layout.kubeconfig}", f"--hostname-override={node.name}"),
        *("--proxy-mode=nftables", f"--cluster-cidr={POD_NETWORK}"),
    )


def import_image(node: NodeLayout, archive: Path) -> None:
    """Give the image in an archive to the node's containerd."""
    run("ctr", "--address", node.socket, "--namespace", "k8s.io", "images", "import", archive, timeout=600)


def _connect(layout: Layout, node: NodeLayout) -> None:
    """Plug the namespace into the bridge, and route each node's pods through it."""
    name, ip = node.name, ("ip", "-netns", node.name)
    run("ip", "netns", "add", name)
    run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "link", "set", name, "master", BRIDGE, "up")
    run(*ip, "address", "add", f"{node.address}/16", "dev", "eth0")
    run(*ip, "link", "set", "eth0", "up")
    run(*ip, "link", "set", "lo", "up")
    run(*ip, "route", "add", "default", "via", HOST_ADDRESS)
    for other in layout.nodes:
        if other != node:
            run(*ip, "route", "add", other.pod_network, "via", other.address)
    run("ip", "route", "replace", node.pod_network, "via", node.address)
    run("nsenter", f"--net={node.namespace}", "sysctl", "--quiet", "--write", "net.ipv4.ip_forward=1")


def _make_cgroups(name: str) -> None:
    if (_CGROUPS / "cgroup.controllers").exists():
        _make_unified_cgroup(name)
        return
    for hierarchy in (path for path in _CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()):
        (hierarchy / name).mkdir()
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / setting).exists():
                (hierarchy / name / setting).write_text((hierarchy / setting).read_text())
        if (hierarchy / name / "cpu.shares").exists():
            (hierarchy / name / "cpu.shares").write_text(str(WEIGHT * 1024))


def _make_unified_cgroup(name: str) -> None:
    controllers = (_CGROUPS / "cgroup.controllers").read_text().split()
    (_CGROUPS / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in controllers))
    (_CGROUPS / name).mkdir()
    if (_CGROUPS / name / "cpu.weight").exists():
        (_CGROUPS / name / "cpu.weight").write_text(str(WEIGHT * 100))


def _start_containerd(node: NodeLayout) -> None:
    cni = next(folder for folder in CNI_FOLDERS if (folder / CNI_PLUGINS[0]).exists())
    config = _CONTAINERD.format(folder=node.folder, socket=node.socket, pause=PAUSE_IMAGE, cni=cni)
    (node.folder / "containerd.toml").write_text(config)
    (node.folder / "cni" / "10-pods.conflist").write_text(json.dumps(_pod_network(node)))
    program = Path(shutil.which("containerd") or "containerd")
    log = _daemon(node, program, "--config", node.folder / "containerd.toml")
    until(node.socket.exists, f"containerd of {node.name} listens", timeout=_START_TIMEOUT, log=log)


def _pod_network(node: NodeLayout) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": str(node.folder / "addresses"),
        "ranges": [[{"subnet": node.pod_network}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugin = {"type": "ptp", "ipMasq": False, "ipam": addresses}
    return {"cniVersion": "0.4.0", "name": node.name, "plugins": [plugin]}


def _start_kubelet(layout: Layout, node: NodeLayout, programs: Path) -> None:
    config = node.folder / "kubelet.json"
    config.write_text(json.dumps(_kubelet_configuration(layout, node), indent=1))
    _daemon(
        *(node, programs / "kubelet", f"--config={config}", f"--kubeconfig={layout.kubeconfig}"),
        *(f"--root-dir={node.folder}/kubelet", f"--cert-dir={node.folder}/kubelet/keys"),
        *(f"--hostname-override={node.name}", f"--node-ip={node.address}"),
    )


def _kubelet_configuration(layout: Layout, node: NodeLayout) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.name}",
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(layout.keys / "ca.crt")},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "clusterDomain": "cluster.local",
        "clusterDNS": [HOST_ADDRESS],
        "resolvConf": "/etc/resolv.conf",
        # This machine's disk is not the node's business: nothing is evicted and no image removed because it fills up.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {},
        # A node that falls silent is NotReady after a quarter of a minute instead of a whole one.
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 10,
        "volumePluginDir": str(node.folder / "plugins"),
        "podLogsDir": str(node.folder / "podlogs"),
    }


def start_in_node(node: NodeLayout, command: Sequence[str | Path]) -> Path:
    """Start a daemon inside the node's namespace and return its log."""
    log = node.folder / "logs" / f"{Path(command[0]).name}.log"
    start_daemon(["nsenter", f"--net={node.namespace}", *command], log)
    return log


def _daemon(node: NodeLayout, program: Path, *arguments: str | Path) -> Path:
    return start_in_node(node, [program, *arguments])
