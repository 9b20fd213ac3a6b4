"""The optimizer's part of a step: the pieces a rank updates, the optimizer over them, loss scaling and clipping.

However a layout cuts the weights, a rank updates a list of `Piece`s: runs of one parameter's elements as plain tensors
in master precision. Optimizers that treat every element by itself (SGD, Adam, ...) give the one-device update on any
pieces. Whether one does is tried on small tensors, whole on one rank and cut over two; one that does not (Muon,
Adafactor) is refused where weights are cut, and works where they are whole.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import LayoutError, ModelError
from samestep.job import NumericsTable
from samestep.layout import Layout
from samestep.models.spec import ModelSpec, ParamSpec
from samestep.runtime.first_state import optimizer_digests

_ROW = 4096
LARGEST_SUM = torch.finfo(torch.float16).max / 2
"""The largest sum of gradients under a loss scale: partial sums, some of which cancel, then fit float16 as well."""

OptimizerSource = Callable[[list[tuple[str, Tensor]]], Optimizer]
"""Builds an optimizer over named tensors: whole weights on one device, pieces of them in a layout."""


@dataclass(slots=True)
class Piece:
    """A run of one parameter's elements that this rank updates."""

    name: str
    start: int
    stop: int
    """Elements [start, stop) of the flattened whole parameter."""
    value: Tensor
    """Master values, which the optimizer updates; on the host under offload."""
    gradient: Callable[[], Tensor]
    """Returns the summed gradient of these elements, once the step's reductions are done."""
    target: Tensor | None = None
    """Tensor that receives the updated values, in another dtype or on the device; None where `value` itself is in use.

    """


def optimizer_source(
    optimizer: Callable[[list[Tensor]], Optimizer] | Optimizer, names: Mapping[int, str] | None = None
) -> OptimizerSource:
    """Return a function that builds the optimizer, from such a function or from an instance that has not stepped.

    `names` maps the id of each parameter of the user's own model instance to its full name.

    Raises:
        ModelError: an instance has stepped already, holds parameters that are not the model's, or cannot be rebuilt.
    """
    if not isinstance(optimizer, Optimizer):
        return lambda named: optimizer([tensor for _, tensor in named])
    # Adagrad has state from the start, with step 0.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
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
    kind = type(optimizer)
    accepted = [name for name in inspect.signature(kind).parameters if name != "params"]
    if forgotten := [name for name in accepted if name not in optimizer.defaults]:
        raise ModelError(
            f"{kind.__name__} does not keep its argument {forgotten[0]} in `defaults`, so it cannot be built again over "
            "the pieces of a layout: give a function of the parameters"
        )
    defaults = {name: optimizer.defaults[name] for name in accepted}

    def rebuild(named: list[tuple[str, Tensor]]) -> Optimizer:
        cut = [
            {"params": [tensor for name, tensor in named if name in members], **options} for members, options in groups
        ]
        # A rank may have nothing to update; torch takes an empty group, though not an empty list.
        return kind([group for group in cut if group["params"]] or cut[:1], **defaults)

    return rebuild


def check_optimizer(source: OptimizerSource, model: ModelSpec, layout: Layout) -> None:
    """Refuse an optimizer whose update of cut or distributed weights differs from its update of the whole.

    Raises:
        LayoutError: the layout cuts or distributes weights in such a way; the text says which layout word works.
        ModelError: the optimizer cannot be used in any layout.
    """
    params = [param for param in model.params if param.trainable]
    for word, cuts in _cuts_of(layout) if params else ():
        if reason := next(filter(None, (_refusal(source, params, cut) for cut in cuts)), None):
            name = word.partition("=")[0]
            works = f"{name}={0 if name == 'zero' else 1} works"
            if word == "zero=1" and not _refusal(source, params, _rows):
                works = "zero=2 and 3, which cut between rows, work, and so does zero=0"
            how = "spread" if name == "pp" else "cut"
            raise LayoutError(f"{reason}, so weights {how} by {word} would get another update: {works}")


def _refusal(source: OptimizerSource, params: Sequence[ParamSpec], cut: _Cut) -> str | None:
    """Return why two ranks with parts of the weights would not make the update of one that has all; None if they do."""
    optimizer, whole = _grouped(source, [(param.name, _probe(param)) for param in params])
    _check_step(optimizer)
    kind = type(optimizer).__name__
    for rank in range(2):
        named = [(param.name, part) for param in params[rank::2] if (part := cut(_probe(param), rank)).numel()]
        try:
            _, mine = _grouped(source, named)
        except _TRIED:
            return f"{kind} cannot be built over parts of the weights"
        for name, options in mine.items():
            if options != whole[name]:
                return f"the optimizer has other options for {name} when it is given parts of the weights"
    # One weight represents all whose options are alike; learning rate and decay are mere numbers.
    numbers = ("lr", "initial_lr", "weight_decay")
    alike = {repr([(k, v) for k, v in options.items() if k not in numbers]): name for name, options in whole.items()}
    if all(_is_cut_alike(source, param, cut) for param in params if param.name in alike.values()):
        return None
    return f"{kind} does not treat every {'weight' if cut is _every_other else 'element'} by itself"


_TRIED = (ValueError, TypeError, RuntimeError, AssertionError, IndexError)
"""Exceptions by which an optimizer may refuse tensors it was not made for."""


def _grouped(source: OptimizerSource, named: list[tuple[str, Tensor]]) -> tuple[Optimizer, dict[str, dict[str, Any]]]:
    """Build the optimizer; return it with the options of each parameter that it accepted."""
    params = [(name, nn.Parameter(value)) for name, value in named]
    optimizer = source([(name, param) for name, param in params])
    options = {
        id(p): {k: v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return optimizer, {name: options[id(param)] for name, param in params if id(param) in options}


def _probe(param: ParamSpec) -> Tensor:
    """Return a small tensor with as many dimensions as the weight, for trying an optimizer."""
    sizes = {0: (), 1: (24,), 2: (4, 6)}.get(len(param.shape), (4, 3, 2, *(1 for _ in param.shape[3:])))
    return torch.linspace(-1.0, 1.0, math.prod(sizes), dtype=torch.float64).reshape(sizes)


_Cut = Callable[[Tensor, int], Tensor]
"""Returns the part of a weight that one of two ranks holds."""


def _cuts_of(layout: Layout) -> Iterator[tuple[str, tuple[_Cut, ...]]]:
    """Yield each word of the layout that leaves a rank less than all weights, with the ways in which it cuts them."""
    if layout.num_shards > 1:
        yield f"zero={layout.zero}", (_run if layout.zero == 1 else _rows,)
    for axis, degree in layout.weight_axes.items():
        if degree > 1:
            yield f"{axis}={degree}", (_rows, _columns) if axis == "tp" else (_rows,)
    if layout.pp > 1:
        yield f"pp={layout.pp}", (_every_other,)


def _rows(whole: Tensor, rank: int) -> Tensor:
    if not whole.dim():
        return whole
    return whole.tensor_split([whole.shape[0] * 2 // 3])[rank]


def _columns(whole: Tensor, rank: int) -> Tensor:
    return _rows(whole.mT, rank).mT if whole.dim() > 1 else whole


def _run(whole: Tensor, rank: int) -> Tensor:
    """Return a run of elements, flattened; a single element belongs to the first rank."""
    return whole.reshape(-1).tensor_split([max(1, whole.numel() * 2 // 3)])[rank]


def _every_other(whole: Tensor, rank: int) -> Tensor:
    """Return the whole weight: every other weight belongs to the other rank."""
    return whole


def _is_cut_alike(source: OptimizerSource, param: ParamSpec, cut: _Cut) -> bool:
    """Return whether an optimizer updates two weights to the same values whole and as parts on two ranks."""
    whole = [_probe(param), -2 * _probe(param)]
    numbers = torch.arange(float(whole[0].numel()), dtype=torch.float64)
    # Rows differ in size, so that a rule which looks at a whole matrix cannot agree by chance; so do steps, so that one
    # which only acts beyond a threshold acts.
    waves = [
        (scale * torch.sin((numbers + 1) * (step + 1)) * (1 + numbers) ** 2).reshape(whole[0].shape)
        for step, scale in enumerate((1.0, 1e6, 1e-6, 30.0, 1.0))
    ]
    gradients = [[wave, 3 * wave.cos()] for wave in waves]
    try:
        at_once = _stepped(source, param.name, whole, gradients)
        for rank in range(2):
            mine = slice(rank, rank + 1) if cut is _every_other else slice(None)
            parts = [cut(weight, rank) for weight in whole[mine]]
            steps = [[cut(gradient, rank) for gradient in step[mine]] for step in gradients]
            for ours, weight in zip(_stepped(source, param.name, parts, steps), at_once[mine], strict=True):
                if not torch.allclose(ours, cut(weight, rank), rtol=1e-12, atol=1e-12):
                    return False
    except _TRIED:
        return False
    return True


def _stepped(
    source: OptimizerSource, name: str, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Take a step with each list of gradients; return the weights after the last one."""
    tensors = [nn.Parameter(value.clone()) for value in values]
    held = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    if not held:
        return [tensor.detach() for tensor in tensors]
    optimizer = source([(name, tensors[index]) for index in held])
    for step in gradients:
        for index in held:
            tensors[index].grad = step[index].clone()
        optimizer.step()
    return [tensor.detach() for tensor in tensors]


def _check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose `step` needs a closure, since it would run the model itself.

    Raises:
        ModelError: its `step` has an argument without a default.
    """
    needed = [
        name
        for name, parameter in inspect.signature(optimizer.step).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise ModelError(
            f"{type(optimizer).__name__}.step needs {needed[0]}: it evaluates the loss several times a step, and a step "
            "here has one forward and one backward; adamw works"
        )


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scaling for fp16: halved at an overflow, doubled after `growth_steps` without one."""

    scale: float = 1.0
    growth_steps: float = math.inf
    steps_since: int = 0

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale may change; it stays 1 in other precisions than fp16."""
        return self.growth_steps < math.inf

    def after(self, *, overflowed: bool) -> None:
        """Adapt the scale after a step. Every rank passes the same `overflowed`, so every rank holds the same scale."""
        if overflowed:
            self.scale, self.steps_since = max(self.scale / 2, min(self.scale, 1.0)), 0
            return
        self.steps_since += 1
        if self.steps_since >= self.growth_steps:
            self.scale, self.steps_since = self.scale * 2, 0


@dataclass(slots=True)
class Updater:
    """The optimizer over this rank's pieces."""

    pieces: list[Piece]
    optimizer: Optimizer | None
    """None on a rank without pieces, as the last ones of more ranks than rows."""
    loss_scale: LossScale
    first_lr: list[float] = field(default_factory=list)
    first_digests: Mapping[str, int] = field(default_factory=dict)
    """Digests of the optimizer's options and attributes before its first step."""

    @classmethod
    def over(cls, pieces: list[Piece], source: OptimizerSource, numerics: NumericsTable) -> Updater:
        """Build the optimizer over `pieces`.

        Raises:
            ModelError: the optimizer's `step` needs a closure.
        """
        for piece in pieces:
            piece.value.requires_grad_(True)
        optimizer = source([(piece.name, piece.value) for piece in pieces]) if pieces else None
        if optimizer is not None:
            _check_step(optimizer)
        scaled = numerics.precision == "fp16"
        scale = LossScale(numerics.loss_scale, numerics.loss_scale_growth_steps) if scaled else LossScale()
        first_lr = [float(group["lr"]) for group in optimizer.param_groups] if optimizer else []
        return cls(pieces, optimizer, scale, first_lr, first_digests=optimizer_digests(optimizer) if optimizer else {})

    def set_lr(self, factor: float) -> None:
        """Set each group's learning rate to `factor` times its initial one."""
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
        lent = [piece.value for piece in self.pieces if piece.value.grad is None]
        for piece, gradient in zip(self.pieces, gradients, strict=True):
            if piece.value.grad is not gradient:
                piece.value.grad = gradient.to(piece.value.device).view_as(piece.value)
        self.optimizer.step()
        for value in lent:  # a gradient that was lent would stay allocated beside that of the next step
            value.grad = None

    @torch.no_grad()
    def overflow(self, device: torch.device) -> Tensor:
        """Return infinity if a gradient of this rank, under the loss scale, exceeds float16; else 0 (float64 []).

        Whether float16 overflows on the way depends on how many samples a micro-batch adds up; their sum over the whole
        step does not. So the sum alone decides whether a step is skipped, and all layouts decide alike.
        """
        none = torch.zeros((), dtype=torch.float64, device=device)
        if self.loss_scale.scale <= 1.0:
            return none
        gradients = [gradient for piece in self.pieces if (gradient := piece.gradient()).numel()]
        if not gradients:
            return none
        largest = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
        return torch.where(largest > LARGEST_SUM, math.inf, 0.0).double()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy updated values to the tensors that the forward reads."""
        for piece in self.pieces:
            if piece.target is not None:
                piece.target.copy_(piece.value.view_as(piece.target))


def clip_factor(norm: float, limit: float | None) -> float:
    """Return the factor on the gradients that limits their global norm to `limit` (torch's own rule)."""
    if limit is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, limit / (norm + 1e-6))


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over all elements of `tensors`, in float64.

    On a CPU torch adds up a norm one element after the other: in float32 the norm of a bucket is off by 1e-4, by an
    amount that depends on the layout. So rows of a few thousand elements are summed first.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    norms: list[Tensor] = []
    rest: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() - flat.numel() % _ROW
        if whole:
            norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1))
        if whole < flat.numel():
            rest.append(flat[whole:])
    if rest:
        norms.append(torch.stack(torch._foreach_norm(rest)))
    return torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
