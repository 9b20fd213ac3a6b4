"""Experts of a model: the modules that hold them, the arguments they are called with, and the rows of each dispatch.

A user's own module of experts is tried: it must compute the sum of weight x expert(row), and nothing else. Expert parallelism calls the module with one choice of weight 1 for each row, and adds up the weighted results itself. So
what a module does beyond that sum would be lost or come twice: weights that it normalises, a factor of the slot, a
residual, a norm of the sum, rows that influence each other.

    module(x, chosen, weights) == sum over slots k of weights[:, k] * module(x, chosen[:, k], 1)        on a few rows
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.families import (
    EXPERT_COUNT,
    EXPERT_WAY,
    GROUPED_WAY,
    balance_of,
    expert_configuration,
    experts_in,
)
from samestep.building.named_tensors import copy_module
from samestep.errors import LayoutError, ModelError
from samestep.models.layer_parts import ExpertDispatch, OtherWork
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ExpertModules, ModelSpec, owner_of
from samestep.tracing.arranged_layers import layers_of_regions
from samestep.tracing.checkpointed import Point, TracedPlaces
from samestep.tracing.module_inputs import ForwardCalls


def experts_of(model: nn.Module) -> ExpertModules:
    """Return the modules of experts: those of transformers, or those that the model's `expert_plan` names.

    Raises:
        ModelError: the model's own `expert_plan` names none, or one that holds something else.
    """
    plan = getattr(model, "expert_plan", None)
    modules = dict(model.named_modules())
    switchable = tuple(path for path, part in modules.items() if expert_configuration(part) is not None)
    if plan is None:
        return ExpertModules({path: n for path in switchable if (n := experts_in(modules[path]))}, switchable)
    experts = {path: part for path, part in modules.items() if any(fnmatch.fnmatch(path, word) for word in plan)}
    if not experts:
        raise ModelError("expert-plan-form", f"expert_plan names no module: {', '.join(plan)}")
    for path, part in experts.items():
        if not experts_in(part):
            raise ModelError(
                "expert-plan-form",
                f"expert_plan: {path} must have an attribute `{EXPERT_COUNT}`, and so many experts along dimension 0 "
                "of each weight",
            )
    return ExpertModules({path: experts_in(part) for path, part in experts.items()}, switchable)


def _compute(model: nn.Module, experts: ExpertModules, way: str) -> dict[int, tuple[Any, str]]:
    """Set how transformers computes all experts of a model; return each configuration with its earlier value."""
    configurations = [expert_configuration(model.get_submodule(path)) for path in experts.switchable]
    configs = {id(config): config for config in configurations}
    ways_before = {key: (config, getattr(config, EXPERT_WAY)) for key, config in configs.items()}
    for config in configs.values():
        setattr(config, EXPERT_WAY, way)
    return ways_before


@contextmanager
def compute_by_groups(model: nn.Module, experts: ExpertModules) -> Iterator[None]:
    """Compute experts inside by grouped products, whose shapes do not depend on the choice: what a trace can follow."""
    ways_before = _compute(model, experts, GROUPED_WAY)
    try:
        yield
    finally:
        for config, way in ways_before.values():
            setattr(config, EXPERT_WAY, way)


# -- dispatches, seen in a forward on the meta device ----------------------------------------------


@contextmanager
def record_dispatches(
    model: nn.Module, experts: ExpertModules, calls: dict[str, tuple[Any, Any]], places: TracedPlaces
) -> Iterator[list[ExpertDispatch]]:
    """Record the dispatches of the modules of experts, in a forward of one sample that runs inside, and how each is called.

    `places` are the points of the forward.
    """
    seen: list[ExpertDispatch] = []
    points: list[Point] = []
    if not experts.switchable and not experts.counts:
        yield seen
        return

    def note(path: str, module: nn.Module, args: Any, named: Any) -> None:
        x, chosen, _ = routing_arguments(args, named)
        calls[path] = (args, named)
        dispatch = ExpertDispatch(owner=path, rows=chosen.numel(), width=x.shape[-1], experts=experts.counts[path])
        seen.append(dispatch)
        points.append(places.point())

    def begin(*_: Any) -> None:  # anew with each forward: a trace that needs values runs it again
        seen.clear()
        points.clear()

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(begin))
        for path in experts.counts:
            hook, part = functools.partial(note, path), model.get_submodule(path)
            hooks.enter_context(part.register_forward_pre_hook(hook, with_kwargs=True))
        hooks.enter_context(compute_by_groups(model, experts))
        yield seen
    for index, (dispatch, point) in enumerate(zip(seen, points, strict=True)):
        around = [*itertools.accumulate(dispatch.owner.split("."), lambda path, name: f"{path}.{name}")]
        seen[index] = replace(dispatch, place=places.place(point, around, is_kept=True))


def routing_arguments(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [N, D], the experts chosen for each row [N, K], and their weights [N, K], in whatever order they come.

    Raises:
        ModelError: the module was called with other arguments.
    """
    values: dict[int | str, Any] = dict(enumerate(args))
    values.update(named)
    rows, chosen, weights = (values[key] for key in _places(args, named))
    return rows, chosen, weights


def call_again(
    forward: Callable[..., Tensor],
    args: tuple[Any, ...],
    named: dict[str, Any],
    rows: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Call a module of experts in the way of an earlier call, with other rows, choices and weights."""
    tensors = dict(zip(_places(args, named), (rows, chosen, weights), strict=True))
    return forward(
        *(tensors.get(index, value) for index, value in enumerate(args)),
        **{name: tensors.get(name, value) for name, value in named.items()},
    )


def _places(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[int | str, int | str, int | str]:
    """Return the position or name of the rows, of the choices, which are integers, and of the weights, shaped like them.

    Raises:
        ModelError: the arguments are others.
    """
    values: dict[int | str, Any] = dict(enumerate(args))
    values.update(named)
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    integers = [key for key, value in tensors.items() if not value.is_floating_point()]
    if len(tensors) == 3 and len(integers) == 1:
        chosen = integers[0]
        others = [key for key in tensors if key != chosen]
        alike = [key for key in others if tensors[key].shape == tensors[chosen].shape]
        if alike:
            told = [key for key in alike if isinstance(key, str) and "weight" in key]
            weights = (told or alike)[-1]
            rows = next(key for key in others if key != weights)
            if tensors[rows].dim() == 2:
                return rows, chosen, weights
    raise ModelError(
        "expert-plan-form",
        "a module of experts is called with rows [N, D], the experts chosen for each as integers [N, K], and their weights "
        "[N, K]",
    )


def with_experts(
    spec: ModelSpec, dispatches: list[ExpertDispatch], calls: ForwardCalls, balanced: nn.Module | None
) -> ModelSpec:
    """Return the spec with its experts' weights marked, and the dispatches of each layer.

    `calls` are those of the forward that has made them. `balanced` is the model, where its configuration may ask for a loss that balances experts; None where the loss is
    the user's own.
    """
    if not dispatches:
        return spec
    sizes = {exchange.owner: exchange.experts for exchange in dispatches}

    def param_with(param: ParamSpec) -> ParamSpec:
        return replace(param, experts=sizes.get(owner_of(param.name), 0))

    layer_of, again = layers_of_regions(spec.layers, calls), Counter[str]()
    exchanges: dict[int | None, tuple[ExpertDispatch, ...]] = {}
    for dispatch in dispatches:
        index = layer_of.get(calls.of[dispatch.owner][again[dispatch.owner]].region)
        exchanges[index] = (*exchanges.get(index, ()), dispatch)
        again[dispatch.owner] += 1
    layers = list(spec.layers)
    for index, layer in enumerate(spec.layers):
        if (
            index in exchanges
        ):  # a compiler leaves experts out of its graphs, and what is fused of the rest is not counted
            layers[index] = replace(layer, dispatches=exchanges[index], fusible=OtherWork())
    asks = balanced is not None and balance_of(balanced)
    return replace(
        spec,
        params=tuple(map(param_with, spec.params)),
        layers=tuple(layers),
        balanced_experts=max(sizes.values(), default=0) if asks else 0,
    )


_ROWS = 12
_LARGEST = 2**28
"""Elements of the largest experts that are tried."""


def check_experts(path: str, module: nn.Module, call: tuple[Any, Any], value_of: Callable[[str], Tensor]) -> None:
    """Refuse a module of experts, on the meta device, that does not compute the sum; `call` is how the model calls it.

    Raises:
        LayoutError: it computes something else, or cannot be run on a part of its experts.
    """
    args, named = call
    rows, chosen, _ = routing_arguments(args, named)
    count = experts_in(module)
    some = min(count, max(3, chosen.shape[1]))
    if some * sum(param.numel() for param in module.parameters()) // count > _LARGEST:
        return
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x = drawn(_ROWS, rows.shape[1])
    order = torch.stack([torch.randperm(some, generator=generator) for _ in range(_ROWS)])
    picks = order[:, : chosen.shape[1]].to(chosen.dtype)
    picks[: _ROWS // 2] = picks[0]  # several rows of one expert: a limit on their number would show
    factors = drawn(_ROWS, chosen.shape[1]).abs() + 0.1
    works = "Use ep=1, or a module that adds weight x expert(row) and leaves the rest to the model around it"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            tried = _real(path, module, count, some, value_of, drawn)
            forward = tried.forward
            at_once = call_again(forward, args, named, x, picks, factors)
            slots = [
                call_again(forward, args, named, x, picks[:, k : k + 1], torch.ones_like(factors[:, :1]))
                for k in range(picks.shape[1])
            ]
            single = call_again(forward, args, named, x[-1:], picks[-1:, :1], torch.ones_like(factors[:1, :1]))
            expected = torch.stack([factors[:, k, None] * slot for k, slot in enumerate(slots)]).sum(0)
    except Exception as error:
        raise LayoutError(
            "expert-plan-differs",
            f"expert_plan: {path} cannot be run on {some} of its experts with one choice a row "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}), as expert parallelism runs it. {works}",
        ) from error
    if at_once.shape != expected.shape or not torch.allclose(
        at_once, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max())
    ):
        raise LayoutError(
            "expert-plan-differs",
            f"expert_plan: {path} does not compute the sum of weight x expert(row) from its arguments, so rows that are "
            f"sent to the ranks of their experts would return with other values. {works}",
        )
    if not torch.allclose(single, slots[0][-1:], rtol=1e-6, atol=1e-9 * float(expected.abs().max())):
        raise LayoutError(
            "expert-plan-differs",
            f"expert_plan: the rows of {path} influence each other, and expert parallelism groups rows differently, by their "
            f"experts. {works}",
        )


def _real(
    path: str, module: nn.Module, count: int, some: int, value_of: Callable[[str], Tensor], drawn: Callable[..., Tensor]
) -> nn.Module:
    """Return a copy of a module on the meta device that holds a few experts, with values drawn."""
    copied = copy_module(module).eval()
    setattr(copied, EXPERT_COUNT, some)
    for name, param in list(copied.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        shape = (some, *param.shape[1:])
        value = drawn(*shape) / math.sqrt(max(1, shape[-1]))
        setattr(copied.get_submodule(owner), leaf, nn.Parameter(value))
    for name, buffer in list(copied.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        value = value_of(f"{path}.{name}" if path else name)
        if value.is_floating_point():
            value = value.double()
        if buffer.dim() and buffer.shape[0] == count:
            value = value[:some]
        setattr(copied.get_submodule(owner), leaf, value)
    return copied
