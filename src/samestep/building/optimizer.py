"""The optimizer of a job and its learning rate at each step; optimizers of several classes act as one.

A job may have, say, Muon over matrices and AdamW over the rest. These members share the groups and the states of the
combined optimizer, so that code which sets a learning rate, saves a state, or lets the optimizer hold some of its
weights for a while, need not know that there are several.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.datasets.imported import import_function
from samestep.errors import JobError, did_you_mean, failures_of
from samestep.job import Job
from samestep.optimizer_tables import OptimizerTable, matches


class CombinedOptimizer(Optimizer):
    """An optimizer whose groups are those of its members, and whose step is one step of each.

    Members that the user has given have names, a text or the index in a list; those of a job have none.
    """

    def __init__(self, members: Sequence[Optimizer], names: Sequence[str | int] = ()) -> None:
        self.members, self.names = tuple(members), tuple(names)
        super().__init__([group for member in members for group in member.param_groups], {})
        for member in members:
            self.state.update(member.state)  # Adagrad has one from the start
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Give each member its slice of the combined groups; all members share one dict of states."""
        first = 0
        for member in self.members:
            last = first + len(member.param_groups)
            member.param_groups = self.param_groups[first:last]
            member.state = self.state
            first = last

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run one step of each member that holds weights on this rank."""
        for member in self.members:
            if any(group["params"] for group in member.param_groups):
                member.step()


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of one class that an optimizer consists of: itself, unless it is a combined one."""
    return optimizer.members if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def member_over(optimizer: Optimizer, weight: Tensor) -> Optimizer:
    """Return the member that updates a weight; the optimizer itself if none does."""
    members = (
        member
        for member in members_of(optimizer)
        if any(param is weight for group in member.param_groups for param in group["params"])
    )
    return next(members, optimizer)


def class_names(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, or those of its members."""
    return " and ".join(type(member).__name__ for member in members_of(optimizer))


# -- the optimizer ---------------------------------------------------------------------------------

_UNFIT = {"lbfgs": "it evaluates the loss several times per step", "sparseadam": "it needs sparse gradients"}
_FUSED = {"cpu": ("adam", "adamw", "sgd", "adagrad"), "cuda": ("adam", "adamw", "sgd")}
"""Classes with a fused update in every torch we run on, by the parameters' device."""


def optimizer_of(job: Job) -> Callable[[list[tuple[str, Tensor]]], Optimizer]:
    """Return the function that makes the job's optimizer over named parameters, or over pieces of them.

    Raises:
        JobError: torch.optim has no such class, or the class no such option; when called, the function raises it for a value.
    """
    table, folder = job.optimizer, job.run.folder
    if ":" in table.name:
        return functools.partial(
            _from_function, import_function(table.name, "optimizer.name", JobError, folder), table.name
        )
    for index, group in enumerate(table.groups):
        if group.name is not None and ":" in group.name:
            import_function(group.name, f"optimizer.groups.{index}.name", JobError, folder)
    _check_settings(table, _optimizer_class(table.name, "optimizer.name"))
    return functools.partial(_make_optimizer, table, folder)


def _check_settings(table: OptimizerTable, kind: type[Optimizer]) -> None:
    """Refuse options that a class does not take, and a weight decay where it has none.

    Raises:
        JobError: there is one.
    """
    settings = [("optimizer", kind, table.options, table.weight_decay)]
    for index, group in enumerate(table.groups):
        group_key = f"optimizer.groups.{index}"
        if group.name is not None and ":" in group.name:
            continue
        of_group = kind if group.name is None else _optimizer_class(group.name, f"{group_key}.name")
        decay = table.weight_decay if group.weight_decay is None else group.weight_decay
        settings.append((group_key, of_group, group.options, decay))
    for key, of_group, options, decay in settings:
        arguments = inspect.signature(of_group).parameters
        accepted = [name for name in arguments if name not in ("params", "lr", "weight_decay")]
        for name in options:
            if name not in accepted:
                hint = did_you_mean(name, accepted)
                raise JobError(
                    "optimizer-refuses", f"{key}.options.{name}: {of_group.__name__} takes {', '.join(accepted)}{hint}"
                )
        if decay and "weight_decay" not in arguments:
            raise JobError(
                "optimizer-refuses", f"{key}.weight_decay: {of_group.__name__} has none. Set weight_decay = 0.0"
            )


def _optimizer_class(name: str, key: str) -> type[Optimizer]:
    classes = {
        word.lower(): kind
        for word, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    kind = classes.get(name.lower())
    if kind is None:
        usable = sorted(set(classes) - set(_UNFIT))
        hint = did_you_mean(name.lower(), usable)
        raise JobError(
            "none-nor-module-function", f"{key} = {name!r} must be one of {', '.join(usable)}{hint}, or module:function"
        )
    if name.lower() in _UNFIT:
        raise JobError("optimizer-fails", f"{key} = {name!r} cannot be used: {_UNFIT[name.lower()]}. Use adamw")
    return kind


def _from_function(function: Callable[..., Any], source: str, named: list[tuple[str, Tensor]]) -> Optimizer:
    with failures_of(f"optimizer: {source}", JobError):
        # A rank may have nothing to update; torch takes an empty group, though not an empty list.
        optimizer = function([tensor for _, tensor in named] or [{"params": []}])
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise JobError(
        "optimizer-refuses", f"optimizer: {source} returned a {type(optimizer).__name__}, not a torch optimizer"
    )


def _make_optimizer(table: OptimizerTable, folder: str | None, named: list[tuple[str, Tensor]]) -> Optimizer:
    """Return the optimizer over the parameters, in groups with weight decay and without, and in those of the job.

    Groups that name a class or a function have an optimizer of that class, or the function's, with none of the job's options.

    Raises:
        JobError: a class refuses its settings, or one of its parameters.
    """
    members: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        number = table.group_number(name)
        group_name = (number and table.groups[number - 1].name) or ""
        members.setdefault(group_name if ":" in group_name else group_name.lower(), []).append((name, tensor))
    optimizers = [_member_of(member, table, folder, members.get(member, [])) for member in sorted(members) or [""]]
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)


def _member_of(kind_name: str, table: OptimizerTable, folder: str | None, named: list[tuple[str, Tensor]]) -> Optimizer:
    """Return the optimizer of one class, or of a user's function, over its parameters; "" stands for the job's
    class."""
    if ":" in kind_name:
        return _from_function(import_function(kind_name, "optimizer.groups", JobError, folder), kind_name, named)
    kind = _optimizer_class(kind_name or table.name, "optimizer.name")
    accepted = inspect.signature(kind).parameters
    options = _options({} if kind_name else table.options)
    options["lr"] = table.lr
    if "weight_decay" in accepted:
        options["weight_decay"] = table.weight_decay
    rivals = ("fused", "foreach", "differentiable", "capturable")
    if "fused" in accepted and not any(rival in options for rival in rivals):
        options["fused"] = _can_fuse(kind, [tensor for _, tensor in named])
    places: dict[tuple[int, bool], list[Tensor]] = {}
    for name, tensor in named:
        places.setdefault(_place_of(name, table), []).append(tensor)
    groups = [{"params": places[place], **_settings_of(*place, table)} for place in sorted(places)]
    try:
        # A rank may have nothing to update; torch takes an empty group, though not an empty list.
        return kind(groups or [{"params": []}], **options)
    except _REFUSALS as error:
        if (refused := _refused_parameter(kind, named)) is not None:
            group = f'Use {{ match = ["{refused}"], name = "adamw" }} as the first of optimizer.groups'
            raise JobError(
                "optimizer-refuses", f"optimizer: {kind.__name__} rejects {refused}: {error}. {group}"
            ) from None
        raise JobError("optimizer-refuses", f"optimizer: {kind.__name__} rejects its settings: {error}") from None


_REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError)


def _refused_parameter(kind: Callable[..., Optimizer], named: Sequence[tuple[str, Tensor]]) -> str | None:
    """Return the first parameter that a class refuses by itself, whatever its settings: Muon takes matrices alone."""
    for name, tensor in named:
        try:
            kind([tensor])
        except _REFUSALS:
            return name
    return None


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _place_of(name: str, table: OptimizerTable) -> tuple[int, bool]:
    """Return the number of a parameter's group, from 1, or 0 for none; and whether it has no weight decay."""
    number = table.group_number(name)
    has_own = number > 0 and table.groups[number - 1].weight_decay is not None
    return number, table.weight_decay > 0 and not has_own and matches(name, table.no_weight_decay)


def _settings_of(number: int, is_spared: bool, table: OptimizerTable) -> dict[str, Any]:
    """Return the settings of a group that differ from those of the optimizer."""
    spared = {"weight_decay": 0.0} if is_spared else {}
    if not number:
        return spared
    group = table.groups[number - 1]
    settings = {"lr": group.lr, "weight_decay": group.weight_decay}
    return {**spared, **{key: value for key, value in settings.items() if value is not None}, **_options(group.options)}


def check_groups(table: OptimizerTable, names: Sequence[str]) -> None:
    """Refuse a pattern of a group that matches none of the names of the trained parameters.

    Raises:
        JobError: there is such a pattern.
    """
    for number, group in enumerate(table.groups):
        for pattern in group.match:
            if not any(matches(name, [pattern]) for name in names):
                hint = did_you_mean(pattern, names)
                raise JobError(
                    "optimizer-groups",
                    f"optimizer.groups.{number}.match: {pattern!r} matches no trained parameter{hint}",
                )


def unmatched(table: OptimizerTable, names: Sequence[str]) -> tuple[str, ...]:
    """Return a remark on each pattern of weights without decay that matches none of the names."""
    return tuple(
        f"optimizer.no_weight_decay: {pattern!r} matches no trained parameter{did_you_mean(pattern, names)}"
        for pattern in table.no_weight_decay
        if not any(matches(name, [pattern]) for name in names)
    )


def _can_fuse(kind: type[Optimizer], tensors: Sequence[Tensor]) -> bool:
    """Return whether torch updates these tensors in one kernel: plain floating tensors, on one device."""
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) != 1 or kind.__name__.lower() not in _FUSED.get(devices.pop(), ()):
        return False
    dtypes = (torch.float32, torch.float64)
    return all(type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in dtypes for tensor in tensors)


def learning_rate_factor(job: Job) -> Callable[[int], float]:
    """Return a function from the step, from 0, to the factor on the learning rate: up to 1, then down to final_ratio.

    Step `warmup_steps` has the whole learning rate, step `train.steps - 1` and all later ones the last. With f the fraction of the
    decay that is left, the learning rate is proportional to f (linear), f^power (polynomial) or (1 - cos(pi f)) / 2 (cosine); wsd,
    by Hu et al. 2024 (arXiv:2404.06395), is constant up to the last `decay_steps`, and linear in them.

    Raises:
        JobError: the job's function cannot be imported; the returned function: it fails, or returns no factor.
    """
    schedule, num_steps = job.schedule, job.train.steps
    warmup, last = schedule.warmup_steps, num_steps - 1
    code = import_function(schedule.name, "schedule.name", JobError, job.run.folder) if ":" in schedule.name else None
    first = last - schedule.decay_steps if schedule.name == "wsd" else warmup

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if code is not None:
            return _own_factor(code, schedule.name, step, num_steps)
        if schedule.name == "constant" or last <= 0 or step < first:
            return 1.0
        done = min((step - first) / (last - first), 1.0) if last > first else 1.0
        left = (1.0 + math.cos(math.pi * done)) / 2.0 if schedule.name == "cosine" else (1.0 - done) ** schedule.power
        return schedule.final_ratio + (1.0 - schedule.final_ratio) * left

    return factor


def _own_factor(function: Callable[..., Any], source: str, step: int, num_steps: int) -> float:
    with failures_of(f"schedule.name: {source}", JobError):
        value = float(function(step, num_steps))
    if math.isfinite(value) and value >= 0:
        return value
    raise JobError(
        "schedule-factor", f"schedule.name: {source} returned {value} for step {step}. Use a finite factor of 0 or more"
    )


OptimizerSource = Callable[[list[tuple[str, Tensor]]], Optimizer]
