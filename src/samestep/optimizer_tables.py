"""The tables of a job that say how weights are updated: the optimizer, its groups of parameters, and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import Field, model_validator

from samestep.errors import JobError, did_you_mean, short_repr
from samestep.job_tables import MOST_SCALE, MOST_STEPS, Table

SCHEDULES = ("constant", "linear", "cosine", "polynomial", "wsd")
"""The shapes of the learning rate after warm-up."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns, such as `*norm*`, matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class GroupTable(Table):
    """A parameter group: optimizer settings for some parameters."""

    match: Annotated[tuple[str, ...], Field(min_length=1)]
    """Patterns of the names of the parameters. A parameter belongs to the first group that matches."""
    name: str | None = None
    """Optimizer of the group: a class of torch.optim, such as muon, or `module:function` of (parameters), which makes all settings; by
    default `optimizer.name` with `optimizer.options`."""
    lr: Annotated[float, Field(ge=0.0, le=MOST_SCALE)] | None = None
    """Learning rate after warm-up; by default `optimizer.lr`."""
    weight_decay: Annotated[float, Field(ge=0.0, le=MOST_SCALE)] | None = None
    """Weight decay; by default `optimizer.weight_decay`, or 0 for parameters that `optimizer.no_weight_decay` matches."""
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it for each table
    """More keyword arguments of the optimizer, such as betas."""

    @model_validator(mode="after")
    def _function_sets_its_own(self) -> GroupTable:
        keys = [key for key in ("lr", "weight_decay", "options") if getattr(self, key) not in (None, {})]
        if keys and ":" in (self.name or ""):
            raise JobError("job-keys-conflict", f"{keys[0]} is set by the function {self.name} itself: leave it out")
        return self


class OptimizerTable(Table):
    """The optimizer: a class of torch.optim, in upper or lower case, or `module:function` of (parameters)."""

    name: str = "adamw"
    """A class of torch.optim, in upper or lower case, or `module:function`."""
    lr: Annotated[float, Field(ge=0.0, le=MOST_SCALE)] = 1e-3
    """Learning rate after warm-up."""
    weight_decay: Annotated[float, Field(ge=0.0, le=MOST_SCALE)] = 0.0
    """Weight decay of every parameter that `no_weight_decay` does not match."""
    no_weight_decay: tuple[str, ...] = ()
    """Patterns of the names of parameters without weight decay, such as `*norm*` or `*.bias`."""
    groups: tuple[GroupTable, ...] = ()
    """Parameter groups with other settings or another optimizer: `[{ match = ["*_proj.weight"], name = "muon", lr = 0.02,
    weight_decay = 0.0, options = {} }]`. Without `name` a group changes the settings of the main optimizer."""
    clip_norm: Annotated[float, Field(gt=0.0)] | None = None
    """Maximum global gradient norm for clipping; by default gradients are not clipped."""
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it for each table
    """More keyword arguments of the optimizer, such as betas."""

    @model_validator(mode="after")
    def _function_makes_its_groups(self) -> OptimizerTable:
        if self.groups and ":" in self.name:
            raise JobError(
                "job-keys-conflict",
                f"groups belong to a class of torch.optim, and {self.name} makes its own: leave one of them out",
            )
        return self

    def group_number(self, name: str) -> int:
        """Return the number of a parameter's group, counted from 1: the first that matches its name; 0 if none does."""
        return next((number for number, group in enumerate(self.groups, 1) if matches(name, group.match)), 0)


class ScheduleTable(Table):
    """The learning-rate schedule: linear warm-up for `warmup_steps`, then constant, or decay to `final_ratio`."""

    name: str = "constant"
    """Shape after warm-up: `constant`, `linear`, `cosine`, `polynomial`, `wsd`, or `module:function` of (step, steps) -> factor."""
    warmup_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Number of steps of linear warm-up."""
    final_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Learning rate at the last step, as a fraction of the peak."""
    power: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """`polynomial` only: exponent of the decay."""
    decay_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """`wsd` only (warm-up, stable, decay): number of steps of linear decay at the end."""

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> ScheduleTable:
        if self.name not in SCHEDULES and ":" not in self.name:
            hint = did_you_mean(self.name, SCHEDULES)
            raise JobError(
                "none-nor-module-function",
                f"name = {short_repr(self.name)} must be one of {', '.join(SCHEDULES)}{hint}, or module:function",
            )
        if self.power != 1.0 and self.name != "polynomial":
            raise JobError(
                "job-keys-conflict", f'power = {self.power} belongs to name = "polynomial", and name is {self.name!r}'
            )
        if bool(self.decay_steps) != (self.name == "wsd"):
            raise JobError(
                "job-keys-conflict",
                f'decay_steps = {self.decay_steps} with name = {self.name!r}: name = "wsd" takes a positive number of last '
                "steps, and the others take none",
            )
        return self
