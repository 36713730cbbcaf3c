"""From a manifest to a job, or to one sentence about the first thing that is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fthsdp.data.policies import BatchPolicy, LrPolicy
from fthsdp.errors import ConfigError
from fthsdp_operator.api.deadlines import FORCE_RULE
from fthsdp_operator.api.failure_policy import (
    BACKOFF_RULE,
    CONTAINER_RULE,
    CRITERION_RULE,
    RULE_NAMES_RULE,
    ZERO_RULE,
    ExitCodeOperator,
    OnExitCodes,
    Rule,
)
from fthsdp_operator.api.gang import gang_complaint
from fthsdp_operator.api.in_place import COMMAND_RULE
from fthsdp_operator.api.job import Job
from fthsdp_operator.api.names import (
    API_VERSION,
    KIND,
    MAX_JOB_NAME,
    MAX_REPLICAS,
    NAME_PATTERN,
    NAME_RULE,
    RESERVED_ENV,
    RESERVED_ENV_PREFIX,
    TRANSPORT_ENV,
)
from fthsdp_operator.api.network import LAST_PORT, PORTS_RULE, last_port
from fthsdp_operator.api.node_policy import OWN_CONDITION_RULE, OWN_TAINT_RULE, OWN_TAINTS, NodePolicy
from fthsdp_operator.api.placement import AFFINITY_RULE, EXCLUSIVE_RULE
from fthsdp_operator.api.spec import LR_RULE, REPLICAS_RULE, SPARES_RULE, STALL_RULE, Checkpoint, JobSpec
from fthsdp_operator.api.template import (
    ENV_RULE,
    HOSTNAME_RULE,
    LABEL_RULE,
    MOUNT_RULE,
    OUR_FOLDERS,
    OUR_LABELS,
    OUR_VOLUMES,
    RESTART_RULE,
    VOLUME_RULE,
)
from fthsdp_operator.api.update_policy import RECREATE_RULE, UpdateType

__all__ = ["parse_job"]


def parse_job(manifest: Mapping[str, Any]) -> Job:
    """Turn a manifest into a Job; raises ConfigError with one sentence about the first thing that is wrong."""
    if not isinstance(manifest, Mapping):
        raise ConfigError(f"the manifest is {_show(manifest)}: it has to be a mapping with kind: {KIND}")
    _check_kind(manifest)
    _check_name(manifest)
    try:
        job = Job.model_validate(dict(manifest))
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from error
    for complaint in _complaints(job.spec):
        raise ConfigError(complaint)
    return job


def _check_kind(manifest: Mapping[str, Any]) -> None:
    for field, right in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != right:
            raise ConfigError(f"{field} is {_show(manifest.get(field))}: it has to be {right}")
    if "spec" not in manifest:
        raise ConfigError("spec is missing: it has to name at least replicas and template")


def _check_name(manifest: Mapping[str, Any]) -> None:
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not name and isinstance(metadata, Mapping) and metadata.get("generateName"):
        raise ConfigError("metadata.name is missing: only 'kubectl create' makes one from metadata.generateName")
    if not isinstance(name, str) or not name:
        raise ConfigError("metadata.name is missing: give the job a name")
    if len(name) > MAX_JOB_NAME or not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{NAME_RULE} (it is {name!r}, {len(name)} characters)")


def _complaints(spec: JobSpec) -> Iterator[str]:
    """Say what the types above cannot, in the order in which people read a manifest."""
    if spec.min_replicas > spec.replicas:
        yield f"spec.{REPLICAS_RULE} (they are {spec.min_replicas} and {spec.replicas})"
    if spec.groups > MAX_REPLICAS:
        yield f"spec.{SPARES_RULE} (they are {spec.replicas} and {spec.spares})"
    if spec.batch_policy is BatchPolicy.CONSTANT and spec.lr_policy is not LrPolicy.NONE:
        yield f"spec.{LR_RULE} (it is {spec.lr_policy})"
    if spec.update_policy.type is UpdateType.RECREATE and spec.checkpoint is None:
        yield f"spec.{RECREATE_RULE}"
    if spec.failure_policy.backoff.initial_seconds > spec.failure_policy.backoff.max_seconds:
        yield f"spec.failurePolicy.{BACKOFF_RULE}"
    if spec.coordinator.stall_timeout_seconds <= spec.coordinator.silence_timeout_seconds + 10:
        yield f"spec.{STALL_RULE}"
    yield from _node_policy_complaints(spec.node_policy)
    if spec.deadlines.termination_seconds is not None and not spec.node_policy.force_delete:
        yield f"spec.{FORCE_RULE}"
    if spec.placement.exclusive and spec.placement.replica_topology_key is None:
        yield f"spec.placement: {EXCLUSIVE_RULE}"
    if complaint := gang_complaint(spec.gang):
        yield f"spec.{complaint}"
    yield from _template_complaints(spec.template)
    if spec.placement.replica_topology_key is not None and _requires_pods(spec.template["spec"]):
        yield f"spec.{AFFINITY_RULE}"
    highest = last_port(spec.network.master_port, spec.groups)
    if spec.template["spec"].get("hostNetwork") and highest > LAST_PORT:
        yield f"spec.{PORTS_RULE} (the last one would be {highest})"
    yield from _rules_complaints(spec.failure_policy.rules, spec.template["spec"])
    if spec.failure_policy.in_place is not None and not spec.template["spec"]["containers"][0].get("command"):
        yield f"spec.{COMMAND_RULE}"
    if spec.checkpoint is not None:
        yield from _checkpoint_complaints(spec.checkpoint, spec.template["spec"])


def _node_policy_complaints(policy: NodePolicy) -> Iterator[str]:
    if any(one.type == "Ready" for one in policy.unhealthy_conditions):
        yield f"spec.{OWN_CONDITION_RULE}"
    if own := next((key for key in policy.unhealthy_taints if key in OWN_TAINTS), ""):
        yield f"spec.{OWN_TAINT_RULE} (it is {own})"
    if twice := _repeated(policy.unhealthy_taints):
        yield f"spec.nodePolicy.unhealthyTaints has {twice} twice: remove one"


def _requires_pods(pod: Mapping[str, Any]) -> bool:
    """Whether the template says near which other pods its pods have to be."""
    near = (pod.get("affinity") or {}).get("podAffinity") or {}
    return bool(near.get("requiredDuringSchedulingIgnoredDuringExecution"))


def _rules_complaints(rules: Sequence[Rule], pod: Mapping[str, Any]) -> Iterator[str]:
    names = [rule.name for rule in rules]
    if twice := _repeated(names):
        yield f"spec.{RULE_NAMES_RULE} (it is {twice})"
    known = {one["name"] for field in ("containers", "initContainers") for one in pod.get(field) or ()}
    for number, rule in enumerate(rules):
        where = f"spec.failurePolicy.rules[{number}]"
        if sum(it is not None for it in (rule.on_exit_codes, rule.on_pod_reasons, rule.on_pod_conditions)) != 1:
            yield f"{where}: {CRITERION_RULE}"
        if twice := _repeated(rule.on_pod_reasons or ()):
            yield f"{where}.onPodReasons has {twice} twice: remove one"
        if rule.on_exit_codes is not None:
            yield from _exit_codes_complaints(rule.on_exit_codes, f"{where}.onExitCodes", known)


def _exit_codes_complaints(codes: OnExitCodes, where: str, known: Collection[str]) -> Iterator[str]:
    if codes.operator is ExitCodeOperator.IN and 0 in codes.values:
        yield f"{where}: {ZERO_RULE}"
    if twice := _repeated(codes.values):
        yield f"{where}.values has {twice} twice: remove one"
    if codes.container_name is not None and codes.container_name not in known:
        yield f"{where}: {CONTAINER_RULE} (it is {codes.container_name}; known are {', '.join(sorted(known))})"


def _repeated(values: Sequence[object]) -> str:
    """Return the first value that was there before, as text; empty where each is another one."""
    return next((str(value) for number, value in enumerate(values) if value in values[:number]), "")


def _checkpoint_complaints(checkpoint: Checkpoint, pod: Mapping[str, Any]) -> Iterator[str]:
    """A checkpoint that is gone with the pod that wrote it helps nobody."""
    path = PurePosixPath(checkpoint.path)
    mounts = {
        PurePosixPath(str(mount.get("mountPath"))): mount for mount in _mappings(pod["containers"][0], "volumeMounts")
    }
    at = max((at for at in mounts if path.is_relative_to(at)), key=lambda at: len(at.parts), default=None)
    name = None if at is None else mounts[at].get("name")
    kinds = [kind for volume in _mappings(pod, "volumes") if volume.get("name") == name for kind in volume]
    for kind in {"emptyDir", "secret", "configMap"}.intersection(kinds):
        yield (
            f"spec.checkpoint.path {checkpoint.path} is on the volume {name}, which is of the kind {kind}:"
            " use one that outlives the pods and that all of them share"
        )


def _mappings(part: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    return [item for item in part.get(field) or () if isinstance(item, Mapping)]


def _template_complaints(template: Mapping[str, Any]) -> Iterator[str]:
    pod = template.get("spec")
    if not isinstance(pod, Mapping):
        yield "spec.template.spec is missing: it has to hold the pod's containers"
        return
    if not pod.get("containers"):
        yield "spec.template.spec.containers is missing or empty: name one container with image and command"
    if pod.get("restartPolicy", "Never") != "Never":
        yield f"spec.{RESTART_RULE}"
    if "hostname" in pod or "subdomain" in pod:
        yield f"spec.{HOSTNAME_RULE}"
    if not isinstance(pod.get("hostNetwork", False), bool):
        yield f"spec.template.spec.hostNetwork is {_show(pod['hostNetwork'])}: it has to be true or false"
    yield from _metadata_complaints(template.get("metadata"))
    yield from _list_complaint(pod.get("volumes"), "spec.template.spec.volumes")
    for number, volume in enumerate(_mappings(pod, "volumes")):
        if str(volume.get("name", "")).startswith(OUR_VOLUMES):
            yield f"spec.template.spec.volumes[{number}] is {volume['name']}: {VOLUME_RULE}"
    for field in ("containers", "initContainers"):
        where = f"spec.template.spec.{field}"
        yield from _list_complaint(pod.get(field), where)
        for number, container in enumerate(pod.get(field) or ()):
            yield from _container_complaints(container, f"{where}[{number}]")
    if (pod.get("containers") or [{}])[0].get("restartPolicy", "Never") != "Never":
        yield f"spec.{RESTART_RULE}"


def _metadata_complaints(metadata: object) -> Iterator[str]:
    where = "spec.template.metadata"
    if not isinstance(metadata, Mapping):
        if metadata is not None:
            yield f"{where} is {_show(metadata)}: it has to be a mapping"
        return
    for field in ("labels", "annotations"):
        if not isinstance(metadata.get(field) or {}, Mapping):
            yield f"{where}.{field} is {_show(metadata[field])}: it has to be a mapping of names to values"
            continue
        for name, value in (metadata.get(field) or {}).items():
            if str(name).startswith(OUR_LABELS):
                yield f"{where}.{field} has {name}: {LABEL_RULE}"
            yield from _text_complaint(value, f"{where}.{field}.{name}")


def _list_complaint(value: object, where: str) -> Iterator[str]:
    if value is not None and not isinstance(value, list):
        yield f"{where} is {_show(value)}: it has to be a list"


def _container_complaints(container: object, where: str) -> Iterator[str]:
    if not isinstance(container, Mapping):
        yield f"{where} is {_show(container)}: it has to be a mapping with name, image and command"
        return
    if not isinstance(container.get("name"), str) or not container["name"]:
        yield f"{where}.name is missing: give the container a name"
    for field in ("command", "args"):
        yield from _list_complaint(container.get(field), f"{where}.{field}")
        for number, word in enumerate(container.get(field) or ()):
            yield from _text_complaint(word, f"{where}.{field}[{number}]")
    yield from _text_complaint(container.get("workingDir", ""), f"{where}.workingDir")
    yield from _list_complaint(container.get("volumeMounts"), f"{where}.volumeMounts")
    for number, mount in enumerate(_mappings(container, "volumeMounts")):
        if str(mount.get("mountPath")).startswith(OUR_FOLDERS):
            yield f"{where}.volumeMounts[{number}].mountPath is {mount['mountPath']}: {MOUNT_RULE}"
    yield from _list_complaint(container.get("env"), f"{where}.env")
    for number, variable in enumerate(container.get("env") or ()):
        yield from _variable_complaints(variable, f"{where}.env[{number}]")


def _variable_complaints(variable: object, where: str) -> Iterator[str]:
    if not isinstance(variable, Mapping) or not isinstance(variable.get("name"), str):
        yield f"{where}.name is missing: each entry of env has a name and a value"
        return
    if not variable["name"] or not set(variable["name"]).isdisjoint("=\0"):
        yield f"{where}.name is {_show(variable['name'])}: it cannot be the name of a variable"
    if _reserved(variable["name"]):
        yield f"{where} names {variable['name']}: {ENV_RULE}"
    yield from _text_complaint(variable.get("value", ""), f"{where}.value")
    if not isinstance(variable.get("valueFrom") or {}, Mapping):
        yield f"{where}.valueFrom is {_show(variable['valueFrom'])}: it has to be a mapping"


def _text_complaint(value: object, where: str) -> Iterator[str]:
    """Numbers and booleans are the usual slip: YAML reads them as such unless they stand in quotes."""
    if value is not None and not isinstance(value, str):
        yield f"{where} is {_show(value)}: it has to be text, so put it in quotes"
    elif value is not None and "\0" in value:
        yield f"{where} is {_show(value)}: no process can be given a NUL character"


def _reserved(name: str) -> bool:
    reserved = name.startswith((RESERVED_ENV_PREFIX, "PET_")) or name in RESERVED_ENV
    return reserved and name not in TRANSPORT_ENV


def _sentence(error: ValidationError) -> str:
    """Say the first thing that pydantic found, in our words."""
    first = error.errors(include_url=False)[0]
    where = _path(first["loc"])
    given, kind, context = first["input"], first["type"], first.get("ctx", {})
    if kind == "missing":
        return f"{where} is missing: {_description(first['loc'])}"
    if kind == "extra_forbidden":
        return f"{where} is not a field of {KIND}{_suggestion(first['loc'])}"
    if kind in _WORDS:
        return f"{where} is {_show(given)}: it has to be {_WORDS[kind].format(**context)}"
    return f"{where} is {_show(given)}: {first['msg'][:1].lower()}{first['msg'][1:]}"


_WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "too_short": "a list with at least {min_length} entry",
    "too_long": "a list with at most {max_length} entries",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} character long",
    "string_too_long": "at most {max_length} characters long",
    "enum": "{expected}",
    "string_pattern_mismatch": "of the form {pattern}",
}


def _path(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _show(value: object) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Return the model that holds the last name of a location."""
    model: type[BaseModel] = Job
    for part in location[:-1]:
        if isinstance(part, int):
            continue  # a place in a list, whose items are of the model that was found before
        field = next((f for f in model.model_fields.values() if f.alias == part), None)
        inner = next(_models_in(field.annotation), None) if field is not None else None
        if inner is None:
            return None
        model = inner
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in X, X | None or tuple[X, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _description(location: tuple[int | str, ...]) -> str:
    model = _model_at(location)
    fields = model.model_fields.values() if model else ()
    field = next((f for f in fields if f.alias == location[-1]), None)
    words = " ".join((field.description or "").split()) if field else ""
    return words.rstrip(".") or "it has to be given"


def _suggestion(location: tuple[int | str, ...]) -> str:
    model = _model_at(location)
    names = [f.alias or "" for f in model.model_fields.values()] if model else []
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f": did you mean {near[0]}?" if near else f": known here are {', '.join(names)}"
