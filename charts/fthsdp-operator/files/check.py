"""What ``helm test`` runs: the API server knows FTHSDPJobs, and what is named on the command line answers."""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("FTHSDP_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
SERVED = "apis/fthsdp.dev/v1alpha1"
TIMEOUT = 10


def main(urls: list[str]) -> None:
    """Check everything; raises SystemExit with a sentence about the first thing that is wrong."""
    if "fthsdpjobs" not in served():
        raise SystemExit("the API server does not serve fthsdpjobs: install the chart with crds.install=true")
    print(f"{SERVED} is served")
    for url in urls:
        try:
            get(urllib.request.Request(url))  # noqa: S310 - the chart's own Service
        except OSError as error:
            raise SystemExit(f"{url}: {error}; see the operator's log") from error
        print(f"{url} answers")


def served() -> set[str]:
    """Return the kinds of our group that the API server has."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    token = (ACCOUNT / "token").read_text().strip()
    request = urllib.request.Request(f"https://{address}/{SERVED}", headers={"Authorization": f"Bearer {token}"})
    try:
        answer = get(request, context=ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return set()
        raise
    return {resource["name"] for resource in json.loads(answer)["resources"]}


def get(request: urllib.request.Request, *, context: ssl.SSLContext | None = None) -> bytes:
    """Return what a URL answers with; raises OSError when it answers with an error, or not at all."""
    with urllib.request.urlopen(request, timeout=TIMEOUT, context=context) as response:  # noqa: S310
        return bytes(response.read())


if __name__ == "__main__":
    main(sys.argv[1:])
