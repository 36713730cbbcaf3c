"""What the other tests take for granted of their cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.kube.cluster import Cluster

pytestmark = pytest.mark.cluster

NAMESPACE = "kube-works"
SERVER = """
import http.server, socket
from pathlib import Path
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(socket.gethostname().encode())
http.server.HTTPServer(("", 8000), Hello).serve_forever()
"""
CLIENT = """
import json, os, socket, ssl, sys, time, urllib.request
def fetch(url, **options):
    deadline = time.monotonic() + 60
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5, **options).read().decode()
        except OSError as error:
            if time.monotonic() > deadline or getattr(error, "code", 0):
                return f"{url}: {error}"
            time.sleep(0.5)
account = "/var/run/secrets/kubernetes.io/serviceaccount"
token = open(f"{account}/token").read()
request = urllib.request.Request(
    "https://kubernetes.default.svc/api/v1/namespaces/kube-works/pods/client",
    headers={"Authorization": f"Bearer {token}"},
)
trusted = ssl.create_default_context(cafile=f"{account}/ca.crt")
print(json.dumps({
    "headless": fetch("http://server.peers.kube-works.svc.cluster.local:8000"),
    "virtual": fetch("http://front:8000"),
    "api": json.loads(fetch(request, context=trusted))["metadata"]["name"],
    "user": os.getuid(),
}))
"""


def pod(name: str, node: str, image: str, script: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", script],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name, "set": "peers"}},
        "spec": {
            "nodeName": node,
            "hostname": name,
            "subdomain": "peers",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }


def service(name: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 8000}], **spec}}


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[None]:
    cluster.kubectl("create", "namespace", NAMESPACE)
    allowed = ("--clusterrole=view", f"--serviceaccount={NAMESPACE}:default", f"--namespace={NAMESPACE}")
    cluster.kubectl("create", "rolebinding", "view", *allowed)
    yield
    cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s")


@pytest.mark.usefixtures("namespace")
def test_pods_of_two_nodes_reach_each_other_and_the_api_by_name(cluster: Cluster) -> None:
    image = cluster.operator_image()
    first, second, *_ = [
        node["metadata"]["name"] for node in cluster.kubectl.items("nodes") if not node["spec"].get("taints")
    ]
    cluster.kubectl.apply(
        service("peers", clusterIP="None", selector={"set": "peers"}, publishNotReadyAddresses=True),
        service("front", selector={"app": "server"}),
        pod("server", first, image, SERVER),
        pod("client", second, image, CLIENT),
    )
    cluster.kubectl("--namespace", NAMESPACE, "wait", "pod/client", "--for=jsonpath={.status.phase}=Succeeded")
    said = json.loads(cluster.kubectl("--namespace", NAMESPACE, "logs", "client"))
    assert said == {"headless": "server", "virtual": "server", "api": "client", "user": 65532}
