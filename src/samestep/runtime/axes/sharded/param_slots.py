"""Where the modules of a rank hold each weight, and the shape that FSDP2 is given of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from samestep.models.packing import packed_bytes
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import is_below
from samestep.program.program import Program
from samestep.runtime.axes.precision import DTYPES

ParamSlots = list[tuple[nn.Module, str]]
"""Modules of a unit that hold a weight, each with the weight's name in it."""


def reshape_params(model: nn.Module, program: Program) -> dict[str, ParamSlots]:
    """Give every parameter, still on meta, the shape and dtype that this rank's program has of it; return its slots."""
    dtype = DTYPES[program.step.master_dtype]
    mine = {name: {*unit.modules} for unit in program.units for name in unit.params}
    slots: dict[str, ParamSlots] = {}
    for spec in program.step.model.params:
        names = [name.rpartition(".") for name in (spec.name, *spec.aliases)]
        if program.step.holding(spec).tied_over and spec.name in mine:  # other names of the weight are on other stages
            names = [name for name in names if any(is_below(name[0], module) for module in mine[spec.name])]
        slots[spec.name] = [(model.get_submodule(path), leaf) for path, _, leaf in names]
        shape = (spec.rows, packed_bytes(spec.row_numel)) if spec.held_as else sharded_shape(spec)
        empty = torch.empty(shape, dtype=torch.uint8 if spec.held_as else dtype, device="meta")
        put_param(slots[spec.name], nn.Parameter(empty, requires_grad=spec.trainable))
    return slots


def param_at(slot: tuple[nn.Module, str]) -> Tensor:
    """Return the parameter that a slot holds."""
    owner, leaf = slot
    value: Tensor = getattr(owner, leaf)
    return value


def put_param(slots: ParamSlots, param: nn.Parameter) -> None:
    """Let all slots of a weight hold the same parameter."""
    for owner, leaf in slots:
        setattr(owner, leaf, param)


def sharded_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of a parameter as FSDP2 is given it, which has a first dimension."""
    return spec.shape or (1,)
