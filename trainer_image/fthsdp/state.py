"""Everything that decides the next update, behind one object: its gradients, its digest, its snapshot.

``TrainState`` knows the parameters of this rank (plain tensors, or the local shards of FSDP2 and tensor parallelism) in
one fixed order and deals their gradients into flat fp32 buckets, in the reverse of that order since backward ends with
the first parameters. It takes part in no communication across replicas: whoever reduces the buckets hands the sums back
to ``update``, which is the same code for a live step and for one that a joiner replays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fthsdp.catchup.snapshot import Snapshot
from fthsdp.catchup.values import pack, unpack
from fthsdp.digest import digest
from fthsdp.errors import ConfigError, WireError
from fthsdp.gradients import Buckets, OnReady, Slot, deal, local, sum_of_squares
from fthsdp.scramble import scramble

__all__ = ["Stateful", "TrainState"]


class Stateful(Protocol):
    """Anything of the user's that has to be the same on all replicas and travels with the state."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, text, bytes, plain tensors, and lists, tuples and dicts of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take over what ``state_dict`` returned elsewhere."""
        ...


class TrainState:
    """The model, optimizer, scheduler and user state of one rank; raises ConfigError for what cannot be kept identical.

    ``clip_grad_norm`` is the largest global gradient norm, over all parameters of a whole replica. ``scaler`` scales
    the loss of fp16 training: losses and gradients are scaled and unscaled here, not by the script. ``user`` must be
    the same on all replicas; what belongs to each update, such as an average of the weights, is done in a hook of the
    optimizer (``register_step_post_hook``), which a replica that catches up runs too. ``bucket_bytes`` is the size from
    which on gradients travel on their own (25 MiB, as in torch's DistributedDataParallel: smaller ones start earlier,
    larger ones use the network better).

    Persistent buffers are part of the state, and no forward may change them. Shard the model before making this, and
    make it before the first forward.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: LRScheduler | None = None,
        clip_grad_norm: float | None = None,
        scaler: GradScaler | None = None,
        user: Stateful | None = None,
        bucket_bytes: int = 25 << 20,
    ) -> None:
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ConfigError(f"clip_grad_norm={clip_grad_norm}: the largest norm is a number above 0, or None")
        if bucket_bytes < 4:
            raise ConfigError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one gradient of 4 bytes")
        self.model, self.optimizer, self.scheduler, self.user = model, optimizer, scheduler, user
        self.clip_grad_norm, self.scaler = clip_grad_norm, scaler
        self.updates = 0
        """Updates that are in the state."""
        _check_model(model)
        _check_scheduler(scheduler, optimizer)
        self._slots, self.bucket_sizes = deal(_trained(model), bucket_bytes // 4)
        self._names = _check_optimizer(optimizer, self._slots)
        self._buckets = Buckets(self._slots, self.bucket_sizes)
        self._seen: Mapping[str, tuple[int, int]] | None = None
        """Identity and version of each buffer when the state was settled last."""
        self._digests = ThreadPoolExecutor(1, "fthsdp-digest")
        self._begun: Future[int] | None = None
        self._copies = ThreadPoolExecutor(1, "fthsdp-copy")
        self._reading: list[Future[None]] = []
        self._pack_parts(lambda _: 0)  # what cannot travel is named now, not when somebody wants to catch up

    bucket_sizes: tuple[int, ...]
    """fp32 elements of each bucket; the same in all replicas for the same rank, not for all ranks of a replica."""

    # --- gradients --------------------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what to run backward for."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def arm(self, on_ready: OnReady) -> None:
        """Call before the backward of the last micro-batch: its gradients are final, and handed over as they come.

        ``on_ready`` is called in the order 0, 1, 2, … from inside backward, so it must neither block nor raise. The
        ``grad`` of parameters whose bucket was handed over is None.
        """
        self._buckets.arm(on_ready)

    def flush(self) -> None:
        """Call after that backward: hand over the rest. Parameters that no micro-batch used have gradient 0."""
        self._buckets.flush()

    @property
    def uses_norm(self) -> bool:
        """Whether an update depends on the norm; else any number will do."""
        return self.clip_grad_norm is not None or self.scaler is not None

    @torch.no_grad()
    def norm_squared(self, reduced: Sequence[Tensor]) -> float:
        """Return the sum of squares of this rank's share of ``reduced``: summed over the ranks, the norm's square.

        Elements that several ranks hold count once in that sum. Not scaled.
        """
        parts = [sum_of_squares(slot.part(reduced)) / slot.copies for slot in self._slots if slot.bucket is not None]
        return float(torch.stack(parts).sum()) if parts else 0.0

    @torch.no_grad()
    def update(self, reduced: Sequence[Tensor], *, scale: float, norm_squared: float, lr_factor: float = 1.0) -> None:
        """Take one step with the gradients ``reduced * scale``, clipped by their norm over the whole replica.

        ``reduced`` are the buckets summed over replicas (not modified, and not the ones that were handed over: those
        are used again); ``norm_squared`` is the sum of ``self.norm_squared(reduced)`` over the ranks of the replica.
        FSDP2's reduce-scatter *averages* over these ranks, and the caller's ``scale`` makes up for it: when each loss
        (a mean over its micro-batch) was multiplied by the samples of its micro-batch,
        ``scale = world_size / total_samples`` gives the gradient of the mean over all samples of the step, over all
        ranks of all replicas.

        This one step is taken with every learning rate times ``lr_factor``; the schedule knows nothing of it. With a
        scaler, gradients that overflowed only lower the scale. Sets torch's random numbers, so that an optimizer that
        rounds at random does the same in all replicas.

        Raises ConfigError when the factor is not 1 and the optimizer has no learning rate, and when a forward changed a
        buffer.
        """
        self._settle()
        self._check_buffers()
        scale /= self._loss_scale
        norm = math.sqrt(norm_squared) * scale
        if self._loss_scale_fits(norm):
            self._step(reduced, scale * self._clip_factor(norm), lr_factor)
        self.model.zero_grad(set_to_none=True)
        self._buckets.leave_what_is_kept()
        self.updates += 1
        self._seen = self._buffers()

    def _step(self, reduced: Sequence[Tensor], factor: float, lr_factor: float) -> None:
        for slot in self._slots:
            self._set_gradient(slot, reduced, factor)
        torch.manual_seed(scramble(self.updates) >> 1)
        with _scaled_rates(self.optimizer, lr_factor):
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _set_gradient(self, slot: Slot, reduced: Sequence[Tensor], factor: float) -> None:
        memory = self._buckets.memory(slot)
        if memory is None:
            gradient = slot.parameter.grad = torch.zeros_like(slot.parameter)
            if slot.bucket is not None:
                target = local(gradient)
                target.copy_(slot.part(reduced).mul(factor).view(target.shape))
            return
        part = slot.part(reduced).view(memory.shape)
        if part.device == memory.device:
            torch.mul(part, factor, out=memory)
        else:
            memory.copy_(part.mul(factor))
        slot.parameter.grad = _shard_alike(memory, slot.parameter) if isinstance(slot.parameter, DTensor) else memory

    def _clip_factor(self, norm: float) -> float:
        """The rule of torch.nn.utils.clip_grad_norm_."""
        return 1.0 if self.clip_grad_norm is None else min(1.0, self.clip_grad_norm / (norm + 1e-6))

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def _loss_scale_fits(self, norm: float) -> bool:
        """Move the scale by torch's rule; return whether the gradients are good (without a scaler they are taken)."""
        if self.scaler is None or not self.scaler.is_enabled():
            return True
        good, state = math.isfinite(norm), self.scaler.state_dict()
        state["_growth_tracker"] = state["_growth_tracker"] + 1 if good else 0
        if not good:
            state["scale"] *= state["backoff_factor"]
        elif state["_growth_tracker"] == state["growth_interval"]:
            state["scale"], state["_growth_tracker"] = state["scale"] * state["growth_factor"], 0
        self.scaler.load_state_dict(state)
        return good

    # --- buffers ----------------------------------------------------------------------------------------------------

    def _buffers(self) -> dict[str, tuple[int, int]]:
        return {
            name: (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for name, buffer in _persistent_buffers(self.model)
        }

    def _check_buffers(self) -> None:
        if self._seen is not None and self._seen != (now := self._buffers()):
            changed = next(name for name in now if now[name] != self._seen.get(name))
            raise ConfigError(
                f"a forward changed the buffer {changed}: replicas see different samples, and one that catches up sees"
                " none, so their buffers would differ; change it in a hook of the optimizer, or keep it out of the"
                " state (persistent=False)"
            )

    # --- identity ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def digest(self) -> int:
        """Return 64 bits over every bit of this rank's parameters, buffers, optimizer, scaler and learning rates."""
        begun, self._begun = self._begun, None
        self._seen = self._seen or self._buffers()
        return digest(self._decisive()) if begun is None else begun.result()

    def begin_digest(self) -> None:
        """Begin with what ``digest`` will return, in another thread: a forward and a backward only read the state."""
        self._settle()
        self._begun = self._digests.submit(digest, self._decisive())

    def read_beside(self, read: Callable[[], None]) -> None:
        """Let ``read`` look at the state in another thread, beside a forward and a backward.

        The next change of the state waits for its end, and raises what it raised.
        """
        self._reading.append(self._copies.submit(read))

    def _settle(self) -> None:
        """Before the state changes: nobody reads it any more."""
        begun, self._begun = self._begun, None
        reading, self._reading = self._reading, []
        if begun is not None:
            begun.result()
        for copied in reading:
            copied.result()

    @torch.no_grad()
    def _decisive(self) -> list[Tensor]:
        """All tensors, and the bytes of all numbers beside them."""
        scaler = self.scaler.state_dict() if self.scaler is not None else {}
        states = [self.optimizer.state.get(parameter, {}) for parameter in self._names]
        numbers = [number for part in (scaler, *states, *self.optimizer.param_groups) for number in _numbers(part)]
        written = torch.tensor([self.updates, *numbers], dtype=torch.float64)
        return [*self._model_tensors().values(), *self._optimizer_tensors(), written]

    def _model_tensors(self) -> dict[str, Tensor]:
        tensors = {name: local(parameter) for name, parameter in self.model.named_parameters()}
        return tensors | {name: local(buffer) for name, buffer in _persistent_buffers(self.model)}

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        states = [self.optimizer.state.get(parameter, {}) for parameter in self._names]
        for entries in [*states, *self.optimizer.param_groups]:
            for _, value in sorted(entries.items()):
                if isinstance(value, Tensor):
                    yield local(value)

    # --- snapshot and restore ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """Describe the whole state of this rank at a boundary; its tensors are views of the live ones.

        Those of scheduler, scaler, user and extra state are copies: only updates change the others.
        What the optimizer has not created yet is left out, and stays uncreated where it is restored, so that the first
        step does the same there. Raises ConfigError for state that cannot travel.
        """
        tensors: list[Tensor] = []

        def put(tensor: Tensor) -> int:
            tensors.append(tensor.detach())
            return len(tensors) - 1

        content = {
            "model": {name: put(tensor) for name, tensor in self._model_tensors().items()},
            "optimizer": self._pack_optimizer(put),
            "groups": self._pack_groups(put),
            "updates": self.updates,
            **self._pack_parts(lambda tensor: put(tensor.clone())),
        }
        return Snapshot.of(content, tensors)

    def _pack_parts(self, put: Callable[[Tensor], int]) -> dict[str, Any]:
        extra = {name: module.get_extra_state() for name, module in _extra_states(self.model)}
        return {
            "scheduler": self._pack_part(self.scheduler, put, "the scheduler's state"),
            "scaler": self._pack_part(self.scaler, put, "the scaler's state"),
            "user": self._pack_part(self.user, put, "the user state"),
            "extra": pack(extra, put, where="the model's extra state"),
        }

    def _pack_optimizer(self, put: Callable[[Tensor], int]) -> dict[str, Any]:
        return {
            name: {
                key: _pack_state(value, parameter, put, where=f"the optimizer's state {key!r} of {name}")
                for key, value in sorted(self.optimizer.state[parameter].items())
            }
            for parameter, name in self._names.items()
            if parameter in self.optimizer.state
        }

    def _pack_groups(self, put: Callable[[Tensor], int]) -> list[dict[str, Any]]:
        return [
            {
                "params": [self._names[parameter] for parameter in group["params"]],
                "options": pack(
                    {key: value for key, value in group.items() if key != "params"}, put, where="the optimizer's group"
                ),
            }
            for group in self.optimizer.param_groups
        ]

    @staticmethod
    def _pack_part(part: Stateful | LRScheduler | GradScaler | None, put: Callable[[Tensor], int], where: str) -> Any:
        return None if part is None else pack(part.state_dict(), put, where=where)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Take over the state in ``snapshot``; raises ConfigError when it is another model's or optimizer's, WireError.

        Everything is read and checked before anything changes. Nothing refers to the snapshot's memory afterwards.
        """
        try:
            content, tensors = snapshot.meta["content"], snapshot.tensors
            model = {name: tensors[number] for name, number in content["model"].items()}
            moments = self._read_moments(content["optimizer"], tensors)
            names = [group["params"] for group in content["groups"]]
            options = [dict(unpack(group["options"], tensors)) for group in content["groups"]]
            parts = {name: unpack(content[name], tensors) for name in ("scheduler", "scaler", "user", "extra")}
            updates = int(content["updates"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise WireError("a snapshot does not describe the state of a training job") from error
        self._check_alike(model, names, options, parts)
        self._settle()
        self._apply(model, moments, options)
        for name, part in self._parts():
            part.load_state_dict(parts[name])
        for name, module in _extra_states(self.model):
            module.set_extra_state(parts["extra"][name])
        self.model.zero_grad(set_to_none=True)
        self.updates, self._seen = updates, self._buffers()

    def _parts(self) -> list[tuple[str, Stateful | LRScheduler | GradScaler]]:
        parts = (("scheduler", self.scheduler), ("scaler", self.scaler), ("user", self.user))
        return [(name, part) for name, part in parts if part is not None]

    def _read_moments(self, packed: dict[str, Any], tensors: Sequence[Tensor]) -> dict[Tensor, dict[str, Any]]:
        return {
            parameter: {key: _unpack_state(value, parameter, tensors) for key, value in packed[name].items()}
            for parameter, name in self._names.items()
            if name in packed
        }

    def _apply(
        self, model: dict[str, Tensor], moments: dict[Tensor, dict[str, Any]], options: list[dict[str, Any]]
    ) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for name, tensor in self._model_tensors().items():
            tensor.copy_(model[name])
        self.optimizer.state.clear()
        self.optimizer.state.update(moments)
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            _restore_options(group, values)

    def _check_alike(
        self, model: dict[str, Tensor], names: list[Any], options: list[Any], parts: dict[str, Any]
    ) -> None:
        """Raise ConfigError when the snapshot is not of this model, optimizer and scheduler."""
        ours = {name: _describe(tensor) for name, tensor in self._model_tensors().items()}
        theirs = {name: _describe(tensor) for name, tensor in model.items()}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise ConfigError(
                    f"{name} is {ours.get(name, 'missing')} here and {theirs.get(name, 'missing')}"
                    " in the other replicas: all must run the same script"
                )
        groups = self.optimizer.param_groups
        if names != [[self._names[parameter] for parameter in group["params"]] for group in groups]:
            raise ConfigError("the other replicas' optimizer holds other parameters: all must run the same script")
        if [values.keys() for values in options] != [group.keys() - {"params"} for group in groups]:
            raise ConfigError("the other replicas have another optimizer or scheduler: all must run the same script")
        given = {name for name in ("scheduler", "scaler", "user") if parts[name] is not None}
        if (
            given != {name for name, _ in self._parts()}
            or parts["extra"].keys() != dict(_extra_states(self.model)).keys()
        ):
            raise ConfigError(
                "only some replicas have a scheduler, a scaler, user state or extra state: all must run the same script"
            )


@contextmanager
def _scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates for a while; afterwards each has the bits from before, and tensors are the same."""
    if factor == 1.0:
        yield
        return
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} has no learning rate 'lr' in its groups, so lrPolicy cannot scale it: use None"
        )
    before = [{"lr": _copy(group["lr"])} for group in optimizer.param_groups]
    for group, kept in zip(optimizer.param_groups, before, strict=True):
        _restore_options(group, {"lr": kept["lr"] * factor})
    try:
        yield
    finally:
        for group, kept in zip(optimizer.param_groups, before, strict=True):
            _restore_options(group, kept)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# --- the optimizer's state --------------------------------------------------------------------------------------------


def _pack_state(value: object, parameter: Tensor, put: Callable[[Tensor], int], *, where: str) -> Any:
    """Pack one entry of an optimizer's state, which may be sharded as its parameter is."""
    if not isinstance(value, Tensor):
        return {"value": pack(value, put, where=where)}
    sharded = isinstance(value, DTensor)
    if isinstance(value, DTensor) and not _sharded_alike(value, parameter):
        raise ConfigError(f"{where} is sharded in another way than its parameter: use an optimizer that keeps to it")
    held = local(value)
    return {"tensor": put(held), "sharded": sharded, "moved": held.device == local(parameter).device}


def _sharded_alike(value: DTensor, parameter: Tensor) -> bool:
    return (
        isinstance(parameter, DTensor)
        and value.shape == parameter.shape
        and value.placements == parameter.placements
        and value.device_mesh == parameter.device_mesh
    )


def _unpack_state(packed: dict[str, Any], parameter: Tensor, tensors: Sequence[Tensor]) -> Any:
    if "tensor" not in packed:
        return unpack(packed["value"], tensors)
    held = tensors[packed["tensor"]].detach().clone()
    if packed["moved"]:
        held = held.to(local(parameter).device)
    return _shard_alike(held, parameter) if packed["sharded"] else held


def _shard_alike(held: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        raise ConfigError("the other replicas' parameters are sharded, these are not: all must run the same script")
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(held, mesh, placements, run_check=False, shape=shape, stride=stride)


def _restore_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Set a group's options; tensors (a learning rate on the device) stay the objects that others hold."""
    for key, value in options.items():
        if isinstance(value, Tensor) and isinstance(group[key], Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _numbers(part: Mapping[str, Any]) -> Iterator[float]:
    """Yield the numbers of an optimizer's group or state that are none of its tensors."""
    for _, value in sorted(part.items()):
        if isinstance(value, (int, float)):
            yield float(value)
        elif isinstance(value, tuple):
            yield from (float(one) for one in value if isinstance(one, (int, float)))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# --- what can be kept identical -------------------------------------------------------------------------------------


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__} with running statistics, which differ between"
                " replicas: use a norm without them (LayerNorm, RMSNorm, GroupNorm)"
            )
    if not _trained(model):
        raise ConfigError("the model has no parameter to train")
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_meta:
        raise ConfigError(f"{name} is on the meta device: give it memory before making the TrainState")
    if not parameter.is_floating_point():
        raise ConfigError(f"{name} is {parameter.dtype}: gradients are reduced in fp32, so parameters are real floats")
    sharded = isinstance(parameter, DTensor)
    if isinstance(parameter, DTensor) and any(isinstance(placement, Partial) for placement in parameter.placements):
        raise ConfigError(f"{name} is a partial DTensor: parameters are sharded or replicated")
    if not sharded and parameter.requires_grad and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"{name} is not sharded, so the ranks of this replica would train it apart:"
            " call fully_shard(model, mesh=group.mesh) before making the TrainState"
        )


def _check_scheduler(scheduler: LRScheduler | None, optimizer: Optimizer) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau needs a metric, which a replayed step does not have: use another one")
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ConfigError("the scheduler belongs to another optimizer than the one given")


def _check_optimizer(optimizer: Optimizer, slots: Sequence[Slot]) -> dict[Tensor, str]:
    """Return the names of the optimizer's parameters, in its order."""
    names: dict[Tensor, str] = {slot.parameter: slot.name for slot in slots}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(held):
        if parameter not in names:
            raise ConfigError(
                f"parameter {number} of the optimizer, of shape {list(parameter.shape)}, is none of the model's trained"
                " ones: make the optimizer after fully_shard, from model.parameters()"
            )
    return {parameter: names[parameter] for parameter in held}
