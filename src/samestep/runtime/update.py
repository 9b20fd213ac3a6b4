"""The optimizer's side of a step: the pieces a rank updates, the optimizer over them, and when a step is skipped.

However a layout cuts the weights, what is left for a rank to update is a list of `Piece`: a run of one parameter's
elements as a plain tensor in master precision. Optimizers that treat every element by itself (SGD, Adam, ...) give
the one-device update on any pieces. Whether one does is tried out on a small matrix, whole and cut; one that does not
(Muon, Adafactor, LBFGS) is refused where weights are cut, and works where they are whole.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import LayoutError, ModelError
from samestep.job import NumericsTable
from samestep.model import ModelSpec

OptimizerSource = Callable[[list[tuple[str, Tensor]]], Optimizer]
"""Builds an optimizer over named tensors: the weights on one device, pieces of them in a layout."""


@dataclass(slots=True)
class Piece:
    """A run of one parameter's elements that this rank updates."""

    name: str
    start: int
    stop: int
    """Elements [start, stop) of the flattened whole parameter."""
    value: Tensor
    """Master values: what the optimizer updates. Stands on the host under offload."""
    gradient: Callable[[], Tensor]
    """Returns the summed gradient of these elements once the step's reductions are done."""
    target: Tensor | None = None
    """Where the updated values go (another dtype, or the device); None where `value` is itself in use."""


def optimizer_source(
    optimizer: Callable[[list[Tensor]], Optimizer] | Optimizer, names: Mapping[int, str] | None = None
) -> OptimizerSource:
    """Turn what a user gives into a source: a function of parameters, or an instance that has not stepped.

    `names` maps the id of each parameter of the user's own model instance to its full name.

    Raises:
        ModelError: an instance has stepped already, or holds parameters that are not the model's.
    """
    if not isinstance(optimizer, Optimizer):
        return lambda named: optimizer([tensor for _, tensor in named])
    if optimizer.state:
        raise ModelError("the optimizer has stepped already: give one that has not, or a function of the parameters")
    groups: list[tuple[set[str], dict[str, Any]]] = []
    for group in optimizer.param_groups:
        strangers = [p for p in group["params"] if id(p) not in (names or {})]
        if strangers:
            raise ModelError(
                f"the optimizer holds a parameter of shape {tuple(strangers[0].shape)} that is not the model's: "
                "build it over model.parameters(), or give a function of the parameters"
            )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(({(names or {})[id(p)] for p in group["params"]}, options))
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}

    def rebuild(named: list[tuple[str, Tensor]]) -> Optimizer:
        cut = [
            {"params": [tensor for name, tensor in named if name in members], **options} for members, options in groups
        ]
        return type(optimizer)([group for group in cut if group["params"]], **defaults)

    return rebuild


def is_elementwise(source: OptimizerSource, model: ModelSpec) -> bool:
    """Try out whether the optimizer treats every element by itself, whole against cut, over three steps."""
    name = model.params[0].name
    whole = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).reshape(4, 6)
    # The cut has gradients of another size, so that a rule which looks at a whole matrix cannot agree by chance.
    gradients = [torch.sin(torch.arange(24.0, dtype=torch.float64) * (step + 1)).reshape(4, 6) for step in range(3)]
    gradients = [gradient * torch.tensor([[1.0], [2.0], [3.0], [40.0]]) for gradient in gradients]
    try:
        at_once = _stepped(source, name, [whole], [[g] for g in gradients])
        in_parts = _stepped(
            source, name, list(whole.flatten().split(7)), [list(g.flatten().split(7)) for g in gradients]
        )
    except (ValueError, TypeError, RuntimeError, AssertionError, IndexError):
        return False
    return torch.allclose(torch.cat([part.flatten() for part in at_once]), torch.cat(in_parts), rtol=1e-12, atol=1e-12)


def _stepped(
    source: OptimizerSource, name: str, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    tensors = [nn.Parameter(value.clone()) for value in values]
    optimizer = source([(name, tensor) for tensor in tensors])
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()
    return [tensor.detach() for tensor in tensors]


def check_optimizer(source: OptimizerSource, model: ModelSpec, zero: int) -> None:
    """Refuse an optimizer that looks at whole weights where the layout cuts them.

    Raises:
        LayoutError: says which ZeRO stage works.
    """
    if zero == 0 or is_elementwise(source, model):
        return
    name = type(source([(model.params[0].name, nn.Parameter(torch.zeros(4, 6)))])).__name__
    raise LayoutError(
        f"{name} does not treat every element by itself, so weights cut by zero={zero} would get another update: "
        "zero=0 works"
    )


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scaling for fp16: halved at an overflow, doubled after a while without one."""

    scale: float
    growth_steps: int
    steps_since: int = 0

    def after(self, *, overflowed: bool) -> None:
        """Adapt to a step. Every rank sees the same `overflowed`, so every rank holds the same scale."""
        if overflowed:
            self.scale, self.steps_since = max(self.scale / 2, 1.0), 0
            return
        self.steps_since += 1
        if self.steps_since >= self.growth_steps:
            self.scale, self.steps_since = self.scale * 2, 0


@dataclass(slots=True)
class Updater:
    """The optimizer over this rank's pieces."""

    pieces: list[Piece]
    optimizer: Optimizer | None
    """None where the rank has no piece: the last of more ranks than rows."""
    loss_scale: LossScale | None
    first_lr: list[float] = field(default_factory=list)

    @classmethod
    def over(cls, pieces: list[Piece], source: OptimizerSource, numerics: NumericsTable) -> Updater:
        """Build the optimizer over `pieces`."""
        for piece in pieces:
            piece.value.requires_grad_(True)
        optimizer = source([(piece.name, piece.value) for piece in pieces]) if pieces else None
        scaled = numerics.precision == "fp16"
        scale = LossScale(numerics.loss_scale, numerics.loss_scale_growth_steps) if scaled else None
        first_lr = [float(group["lr"]) for group in optimizer.param_groups] if optimizer else []
        return cls(pieces, optimizer, scale, first_lr)

    def set_lr(self, factor: float) -> None:
        """Set each group's learning rate to `factor` times the one it was built with."""
        if self.optimizer is not None:
            for group, first in zip(self.optimizer.param_groups, self.first_lr, strict=True):
                group["lr"] = first * factor

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Multiply the gradients by `factor` and update the pieces."""
        if self.optimizer is None:
            return
        gradients = [piece.gradient() for piece in self.pieces]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        for piece, gradient in zip(self.pieces, gradients, strict=True):
            piece.value.grad = gradient.to(piece.value.device).view_as(piece.value)
        self.optimizer.step()
        for piece in self.pieces:
            if piece.target is not None:
                piece.value.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Write updated values to where the forward reads them."""
        for piece in self.pieces:
            if piece.target is not None:
                piece.target.copy_(piece.value.view_as(piece.target))


def clip_factor(norm: float, limit: float | None) -> float:
    """Return what gradients are multiplied by so that their global norm is at most `limit` (torch's own rule)."""
    if limit is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, limit / (norm + 1e-6))


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over all elements of `tensors`, in float64."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
