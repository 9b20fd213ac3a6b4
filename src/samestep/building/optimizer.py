"""The optimizer of a job, and its learning rate at each step."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.imported import imported
from samestep.errors import JobError, did_you_mean, failures_of
from samestep.job import Job, OptimizerTable, ScheduleTable

# -- the optimizer ---------------------------------------------------------------------------------

_UNFIT = {
    "lbfgs": "it evaluates the loss several times a step",
    "sparseadam": "it needs sparse gradients",
}
_FUSED = {"cpu": ("adam", "adamw", "sgd", "adagrad"), "cuda": ("adam", "adamw", "sgd")}
"""Classes with a fused update in every torch we run on, by the parameters' device."""


def optimizer_of(job: Job) -> Callable[[list[tuple[str, Tensor]]], Optimizer]:
    """Return the function that makes the job's optimizer over named parameters, or over pieces of them.

    Raises:
        JobError: torch.optim has no such class, or the class no such option; the returned function: a value is wrong.
    """
    table = job.optimizer
    if ":" in table.name:
        return functools.partial(_from_function, imported(table.name, "optimizer.name", JobError), table.name)
    kind = _optimizer_class(table.name)
    accepted = [name for name in inspect.signature(kind).parameters if name not in ("params", "lr", "weight_decay")]
    given = [(f"optimizer.options.{name}", name) for name in table.options]
    given += [(f"optimizer.groups.{i}.options.{name}", name) for i, g in enumerate(table.groups) for name in g.options]
    for key, name in given:
        if name not in accepted:
            raise JobError(f"{key}: {kind.__name__} takes {', '.join(accepted)}{did_you_mean(name, accepted)}")
    decays = table.weight_decay or any(group.weight_decay for group in table.groups)
    if decays and "weight_decay" not in inspect.signature(kind).parameters:
        raise JobError(f"optimizer.weight_decay: {kind.__name__} has none; weight_decay = 0.0 works")
    return functools.partial(_make_optimizer, kind, table)


def _optimizer_class(name: str) -> type[Optimizer]:
    classes = {
        word.lower(): kind
        for word, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    kind = classes.get(name.lower())
    if kind is None:
        usable = sorted(set(classes) - set(_UNFIT))
        hint = did_you_mean(name.lower(), usable)
        raise JobError(f"optimizer.name = {name!r} is none of {', '.join(usable)}{hint}, nor module:function")
    if name.lower() in _UNFIT:
        raise JobError(f"optimizer.name = {name!r} cannot be used: {_UNFIT[name.lower()]}; adamw works")
    return kind


def _from_function(function: Callable[..., Any], source: str, named: list[tuple[str, Tensor]]) -> Optimizer:
    with failures_of(f"optimizer.name: {source}", JobError):
        optimizer = function([tensor for _, tensor in named])
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise JobError(f"optimizer.name: {source} returned a {type(optimizer).__name__}, not a torch optimizer")


def _make_optimizer(kind: type[Optimizer], table: OptimizerTable, named: list[tuple[str, Tensor]]) -> Optimizer:
    """Return the optimizer over the parameters, in groups with weight decay and without, and in those of the job.

    Raises:
        JobError: the class refuses its settings.
    """
    options = _options(table.options)
    accepted = inspect.signature(kind).parameters
    options["lr"] = table.lr
    if "weight_decay" in accepted:
        options["weight_decay"] = table.weight_decay
    rivals = ("fused", "foreach", "differentiable", "capturable")
    if "fused" in accepted and not any(rival in options for rival in rivals):
        options["fused"] = _can_fuse(kind, [tensor for _, tensor in named])
    members: dict[tuple[int, bool], list[Tensor]] = {(0, False): []}
    for name, tensor in named:
        members.setdefault(_place_of(name, table), []).append(tensor)
    groups = [
        {"params": tensors, **_settings_of(*place, table)} for place, tensors in sorted(members.items(), key=_first)
    ]
    try:
        # A rank may have nothing to update; torch takes an empty group, though not an empty list.
        return kind([group for group in groups if group["params"]] or groups[:1], **options)
    except (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError) as error:
        raise JobError(f"optimizer: {kind.__name__} refuses its settings: {error}") from None


def _first(item: tuple[tuple[int, bool], Any]) -> tuple[int, bool]:
    return item[0]


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


def _place_of(name: str, table: OptimizerTable) -> tuple[int, bool]:
    """Return the number of a parameter's group, from 1, or 0 for none; and whether it has no weight decay."""
    number = next((n for n, group in enumerate(table.groups, 1) if _matches(name, group.match)), 0)
    has_own = number > 0 and table.groups[number - 1].weight_decay is not None
    return number, table.weight_decay > 0 and not has_own and _matches(name, table.no_weight_decay)


def _settings_of(number: int, is_spared: bool, table: OptimizerTable) -> dict[str, Any]:
    """Return the settings in which a group differs from the optimizer's own."""
    spared = {"weight_decay": 0.0} if is_spared else {}
    if not number:
        return spared
    group = table.groups[number - 1]
    own = {"lr": group.lr, "weight_decay": group.weight_decay}
    return {**spared, **{key: value for key, value in own.items() if value is not None}, **_options(group.options)}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_groups(table: OptimizerTable, names: Sequence[str]) -> None:
    """Refuse a pattern of a group that matches none of the names of the trained parameters.

    Raises:
        JobError: there is such a pattern.
    """
    for number, group in enumerate(table.groups):
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                hint = did_you_mean(pattern, names)
                raise JobError(f"optimizer.groups.{number}.match: {pattern!r} matches no trained parameter{hint}")


def _can_fuse(kind: type[Optimizer], tensors: Sequence[Tensor]) -> bool:
    """Return whether torch updates these tensors in one kernel: plain floating tensors, on one device."""
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) != 1 or kind.__name__.lower() not in _FUSED.get(devices.pop(), ()):
        return False
    dtypes = (torch.float32, torch.float64)
    return all(type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in dtypes for tensor in tensors)


def learning_rate_factor(schedule: ScheduleTable, num_steps: int) -> Callable[[int], float]:
    """Return a function from the step, from 0, to the factor on the learning rate: up to 1, then down to final_ratio.

    Step `warmup_steps` has the whole learning rate, step `num_steps - 1` and all later ones the last. With f the fraction of the
    decay that is left, the learning rate is proportional to f (linear), f^power (polynomial) or (1 - cos(pi f)) / 2 (cosine); wsd,
    by Hu et al. 2024 (arXiv:2404.06395), is constant up to the last `decay_steps`, and linear in them.

    Raises:
        JobError: the job's function cannot be imported; the returned function: it fails, or returns no factor.
    """
    warmup, last = schedule.warmup_steps, num_steps - 1
    own = imported(schedule.name, "schedule.name", JobError) if ":" in schedule.name else None
    first = last - schedule.decay_steps if schedule.name == "wsd" else warmup

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if own is not None:
            return _own_factor(own, schedule.name, step, num_steps)
        if schedule.name == "constant" or last <= 0 or step < first:
            return 1.0
        done = min((step - first) / (last - first), 1.0) if last > first else 1.0
        left = (1.0 + math.cos(math.pi * done)) / 2.0 if schedule.name == "cosine" else (1.0 - done) ** schedule.power
        return schedule.final_ratio + (1.0 - schedule.final_ratio) * left

    return factor


def _own_factor(function: Callable[..., Any], source: str, step: int, num_steps: int) -> float:
    with failures_of(f"schedule.name: {source}", JobError):
        found = float(function(step, num_steps))
    if math.isfinite(found) and found >= 0:
        return found
    raise JobError(f"schedule.name: {source} returned {found} for step {step}; a finite factor of 0 or more works")
