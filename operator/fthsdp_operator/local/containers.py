"""What a pod's manifest means on this machine: pure translation of the first container into a command line.

Kubernetes' rules are kept where they make sense without a container: ``$(NAME)`` in commands, arguments and variables;
values from the pod's own fields, from Secrets and ConfigMaps. There is no image and nothing is mounted, so

- ``python`` is the interpreter that runs ``fthsdp``, and commands beside it (``torchrun``) are found first;
- a path below a mounted Secret, ConfigMap, emptyDir or downwardAPI volume is rewritten to the folder that stands for
  the volume; other volumes are not mounted: their paths mean what they mean on this machine;
- environment that describes *this* process's place in some job is not passed on.
"""

from __future__ import annotations

import os
import re
import sys
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fthsdp.errors import ConfigError
from fthsdp_operator.local.process import Launch
from fthsdp_operator.manifests.adapt import SHARED_MEMORY

__all__ = ["check_template", "contents", "localised", "mount_folders", "own_fields", "volume_files"]

Json = dict[str, Any]
Lookup = Callable[[str, str], Json | None]
"""(kind, name) -> the object in the pod's namespace, or None."""

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_NOT_INHERITED = re.compile(r"FTHSDP_.*|PET_.*|MASTER_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_VOLUMES_WITH_FOLDER = ("secret", "configMap", "emptyDir", "downwardAPI")


def check_template(template: Json) -> None:
    """Raise ConfigError when a pod of this template could not run as processes here."""
    containers = template.get("spec", {}).get("containers") or []
    if not containers:
        raise ConfigError("spec.template.spec.containers is empty: it needs one container with the training command")
    container = containers[0]
    if not container.get("command"):
        raise ConfigError(
            f"spec.template.spec.containers[0] ({container.get('name', 'unnamed')}) has no command: on this machine"
            " there is no image to take one from, so write it into the manifest"
        )
    for entry in container.get("env") or ():
        _check_source(entry)


def _check_source(entry: Json) -> None:
    for source in entry.get("valueFrom") or {}:
        if source not in ("fieldRef", "secretKeyRef", "configMapKeyRef"):
            raise ConfigError(
                f"variable {entry['name']} takes its value from {source}, which does not exist without Kubernetes:"
                " give it a value to run on this machine"
            )


def localised(
    pod: Json, *, overrides: Mapping[str, str], folders: Mapping[str, str], lookup: Lookup, outer: Mapping[str, str]
) -> Launch:
    """Return how to start the pod's first container; raises ConfigError.

    ``overrides`` wins over the manifest's variables, ``folders`` maps mount paths to what stands for them, ``outer``
    is the launcher's own environment.
    """
    container = pod["spec"]["containers"][0]
    env = _variables(pod, container, overrides, folders, lookup)
    words = [*container.get("command", ()), *(container.get("args") or ())]
    argv = [_relocated(_expanded(word, env), folders) for word in words]
    if _PYTHON.fullmatch(argv[0]):
        argv[0] = sys.executable
    cwd = _relocated(container.get("workingDir") or str(Path.cwd()), folders)
    return Launch(argv=tuple(argv), env=_inherited(outer) | env, cwd=cwd)


def _inherited(outer: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in outer.items() if not _NOT_INHERITED.fullmatch(name)}
    beside_python = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join([beside_python, env.get("PATH") or os.defpath])
    env["PYTHONUNBUFFERED"] = "1"  # logs are read while the pod runs, and a killed process flushes nothing
    return env


def _variables(
    pod: Json, container: Json, overrides: Mapping[str, str], folders: Mapping[str, str], lookup: Lookup
) -> dict[str, str]:
    env: dict[str, str] = {}
    for entry in container.get("env") or ():
        name = entry["name"]
        if name in overrides:
            env[name] = overrides[name]
            continue
        given = entry.get("value")
        value = _looked_up(pod, entry, lookup) if given is None else _expanded(given, env)
        if value is not None:
            env[name] = _relocated(value, folders)
    return env


def _looked_up(pod: Json, entry: Json, lookup: Lookup) -> str | None:
    source = entry.get("valueFrom") or {}
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"])
    for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
        if key in source:
            return _from_object(entry["name"], kind, source[key], lookup)
    return ""


def _from_object(variable: str, kind: str, reference: Json, lookup: Lookup) -> str | None:
    found = lookup(kind, reference["name"])
    value = contents(found).get(reference["key"]) if found else None
    if value is None and not reference.get("optional"):
        raise ConfigError(
            f"variable {variable} needs key {reference['key']} of {kind} {reference['name']}, which does not exist on"
            " this machine: give the variable a value, or mark the reference optional"
        )
    return None if value is None else value.decode()


def _field(pod: Json, path: str) -> str:
    special = {"status.podIP": "127.0.0.1", "status.hostIP": "127.0.0.1", "spec.nodeName": "localhost"}
    if path in special:
        return special[path]
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if keyed:
        return str(pod["metadata"].get(keyed[1], {}).get(keyed[2], ""))
    if path in ("metadata.name", "metadata.namespace", "metadata.uid"):
        return str(pod["metadata"].get(path.removeprefix("metadata."), ""))
    raise ConfigError(f"field {path} of a pod does not exist on this machine")


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` as Kubernetes does: unknown names stay as they are, ``$$`` is a dollar sign."""
    return _REFERENCE.sub(lambda m: "$" if m[1] is None else env.get(m[1], m[0]), text)


def _relocated(text: str, folders: Mapping[str, str]) -> str:
    for mount, folder in folders.items():
        if text == mount or text.startswith(mount.rstrip("/") + "/"):
            return folder + text[len(mount.rstrip("/")) :]
    return text


def _volumes(pod: Json) -> list[Json]:
    """Return the volumes that something has to stand for; this machine has shared memory of its own."""
    return [volume for volume in pod["spec"].get("volumes") or () if volume["name"] != SHARED_MEMORY]


def mount_folders(pod: Json, root: Path) -> dict[str, str]:
    """Return mount path -> folder below ``root`` for the volumes that get a folder; longest path first."""
    with_folder = {volume["name"] for volume in _volumes(pod) if any(kind in volume for kind in _VOLUMES_WITH_FOLDER)}
    mounts = pod["spec"]["containers"][0].get("volumeMounts") or ()
    found = {m["mountPath"]: str(root / m["name"]) for m in mounts if m["name"] in with_folder}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def volume_files(pod: Json, lookup: Lookup) -> dict[str, bytes]:
    """Return ``volume/file`` -> content for Secret and ConfigMap volumes, and ``volume/`` -> b"" for empty ones."""
    files: dict[str, bytes] = {}
    for volume in _volumes(pod):
        name = volume["name"]
        if any(kind in volume for kind in _VOLUMES_WITH_FOLDER):
            files[f"{name}/"] = b""
        for kind, source, names in (("Secret", "secret", "secretName"), ("ConfigMap", "configMap", "name")):
            if source in volume:
                files |= _object_files(name, kind, volume[source], volume[source][names], lookup)
    return files | own_fields(pod)


def own_fields(pod: Json) -> dict[str, bytes]:
    """Return ``volume/file`` -> content for volumes that show fields of the pod itself."""
    return {
        f"{volume['name']}/{item['path']}": _field(pod, item["fieldRef"]["fieldPath"]).encode()
        for volume in pod["spec"].get("volumes") or ()
        for item in (volume.get("downwardAPI") or {}).get("items") or ()
        if "fieldRef" in item
    }


def _object_files(volume: str, kind: str, source: Json, name: str, lookup: Lookup) -> dict[str, bytes]:
    found = lookup(kind, name)
    if found is None:
        if source.get("optional"):
            return {}
        raise ConfigError(f"volume {volume} needs {kind} {name}, which does not exist on this machine")
    data = contents(found)
    paths = {item["key"]: item["path"] for item in source.get("items") or ()} or {key: key for key in data}
    return {f"{volume}/{path}": data[key] for key, path in paths.items() if key in data}


def contents(item: Json) -> dict[str, bytes]:
    """Return the data of a Secret or ConfigMap."""
    plain = {k: v.encode() for k, v in (item.get("stringData") or {}).items()}
    if item.get("kind") == "Secret":
        return {k: b64decode(v) for k, v in (item.get("data") or {}).items()} | plain
    return {k: v.encode() for k, v in (item.get("data") or {}).items()}
