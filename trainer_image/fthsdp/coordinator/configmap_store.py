"""The epoch store in a cluster: one ConfigMap, replaced only in the version that was read.

The operator creates the ConfigMap; the coordinator's service account may get and update this one object and nothing
else. The only module here that needs the kubernetes package.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client, config

from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.store import StoreConflict, StoreUnavailable
from fthsdp.errors import ConfigError

__all__ = ["EPOCH", "REPORT", "ConfigMapStore"]

log = logging.getLogger(__name__)
# It logs a missing file before it raises the error that is reported anyway.
logging.getLogger("kubernetes.aio.config").setLevel(logging.ERROR)

EPOCH, REPORT = "epoch.json", "report.json"
"""Keys in the ConfigMap."""
LARGEST_REPORT = 512 << 10
"""Bytes. A ConfigMap holds 1 MiB, and the epoch needs its share."""
TIMEOUT = 10.0
"""Seconds for one call to the API server."""
CONFLICT, TOO_BUSY, SERVER_ERROR = 409, 429, 500

_T = TypeVar("_T")


class ConfigMapStore:
    """Keeps the ledger, and the report, in one ConfigMap."""

    def __init__(self, api: client.ApiClient, namespace: str, name: str) -> None:
        self._client = api
        self._api = client.CoreV1Api(api)
        self._namespace = namespace
        self._name = name
        self._origin = f"configmap {namespace}/{name}"
        self._lock = asyncio.Lock()
        """One write at a time, so that the report's does not make the epoch's find another version."""

    @classmethod
    async def connect(cls, namespace: str, name: str) -> ConfigMapStore:
        """Use the pod's service account, or KUBECONFIG outside a cluster; raises ConfigError."""
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST"):
                config.load_incluster_config()
            else:
                await config.load_kube_config()
        except (config.ConfigException, OSError) as error:
            raise ConfigError(f"store configmap:{namespace}/{name}: no access to a cluster: {error}") from error
        return cls(client.ApiClient(), namespace, name)

    async def load(self) -> Ledger | None:
        """See EpochStore."""
        return self._ledger(await self._read())

    async def save(self, ledger: Ledger, *, expected: int) -> None:
        """See EpochStore. Somebody else's change of anything but the epoch is kept and written around."""
        async with self._lock:
            while not await self._swap(ledger, expected):
                log.info("%s changed meanwhile; reading it again", self._origin)

    async def publish(self, report: str) -> None:
        """See EpochStore; a report that is too large for a ConfigMap is left out."""
        if len(report) > LARGEST_REPORT:
            log.warning("the report has %d bytes and is not put into %s", len(report), self._origin)
            return
        async with self._lock:
            while not await self._replace(await self._read(), REPORT, report):
                log.info("%s changed meanwhile; reading it again", self._origin)

    async def close(self) -> None:
        """See EpochStore."""
        await self._client.close()

    async def _swap(self, ledger: Ledger, expected: int) -> bool:
        found = await self._read()
        stored = self._ledger(found)
        if stored == ledger:
            return True
        number = stored.number if stored else 0
        if number != expected:
            raise StoreConflict(self._origin, found=number, expected=expected)
        return await self._replace(found, EPOCH, ledger.encode())

    def _ledger(self, found: client.V1ConfigMap) -> Ledger | None:
        text = (found.data or {}).get(EPOCH)
        return Ledger.decode(text, origin=self._origin) if text else None

    async def _read(self) -> client.V1ConfigMap:
        return await self._call(self._api.read_namespaced_config_map)

    async def _replace(self, found: client.V1ConfigMap, key: str, text: str) -> bool:
        """Write one key into the version that was read; False when there is a newer one."""
        found.data = {**(found.data or {}), key: text}
        try:
            await self._call(self._api.replace_namespaced_config_map, body=found)
        except client.ApiException as error:
            if error.status == CONFLICT:
                return False
            raise
        return True

    async def _call(self, method: Callable[..., Coroutine[Any, Any, _T]], **kwargs: Any) -> _T:
        try:
            return await method(self._name, self._namespace, _request_timeout=TIMEOUT, **kwargs)
        except client.ApiException as error:
            if error.status == CONFLICT:
                raise
            if error.status and error.status < SERVER_ERROR and error.status != TOO_BUSY:
                raise ConfigError(f"{self._origin}: the API server says {error.status} {error.reason}") from error
            raise StoreUnavailable(f"{self._origin}: {error.status} {error.reason}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StoreUnavailable(f"{self._origin}: {error or type(error).__name__}") from error
