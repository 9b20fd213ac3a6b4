"""Experts of a model: the modules that hold them, the arguments they are called with, and the rows of each dispatch."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from samestep.building.families import facts_of
from samestep.errors import ModelError
from samestep.models.analysis import ExpertModules
from samestep.models.layer_spec import ExpertDispatch, LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec, is_below


def experts_of(model: nn.Module) -> ExpertModules:
    """Return the modules of experts: those of transformers, or those that the model's own `expert_plan` names.

    Raises:
        ModelError: the model's own `expert_plan` names none, or one that holds something else.
    """
    plan, facts = getattr(model, "expert_plan", None), facts_of(model)
    modules = dict(model.named_modules())
    switchable = tuple(path for path, part in modules.items() if facts.expert_configuration(part) is not None)
    if plan is None:
        return ExpertModules({path: n for path in switchable if (n := facts.experts_in(modules[path]))}, switchable)
    found = {path: part for path, part in modules.items() if any(fnmatch.fnmatch(path, word) for word in plan)}
    if not found:
        raise ModelError(f"expert_plan names no module: {', '.join(plan)}")
    for path, part in found.items():
        if not facts.experts_in(part):
            raise ModelError(
                f"expert_plan: {path} must have an attribute `{facts.expert_count}`, and so many experts along dimension 0 "
                "of each weight"
            )
    return ExpertModules({path: facts.experts_in(part) for path, part in found.items()}, switchable)


def _compute(model: nn.Module, experts: ExpertModules, way: str) -> dict[int, tuple[Any, str]]:
    """Set how transformers computes all experts of a model; return each configuration with its earlier value."""
    facts = facts_of(model)
    found = [facts.expert_configuration(model.get_submodule(path)) for path in experts.switchable]
    configs = {id(config): config for config in found}
    before = {key: (config, getattr(config, facts.expert_way)) for key, config in configs.items()}
    for config in configs.values():
        setattr(config, facts.expert_way, way)
    return before


@contextmanager
def grouped(model: nn.Module, experts: ExpertModules) -> Iterator[None]:
    """Compute experts inside by grouped products, whose shapes do not depend on the choice: what a trace can follow."""
    before = _compute(model, experts, facts_of(model).grouped_way)
    try:
        yield
    finally:
        for config, way in before.values():
            setattr(config, facts_of(model).expert_way, way)


# -- dispatches, seen in a forward on the meta device ----------------------------------------------


@contextmanager
def record_dispatches(
    model: nn.Module, experts: ExpertModules, calls: dict[str, tuple[Any, Any]] | None = None
) -> Iterator[list[ExpertDispatch]]:
    """Record the dispatches of the modules of experts, in a forward of one sample that runs inside, and how each is called."""
    seen: list[ExpertDispatch] = []

    def note(path: str, module: nn.Module, args: Any, named: Any) -> None:
        x, chosen, _ = called_with(args, named)
        if calls is not None:
            calls[path] = (args, named)
        seen.append(ExpertDispatch(owner=path, rows=chosen.numel(), width=x.shape[-1], experts=experts.counts[path]))

    handles = [
        model.get_submodule(path).register_forward_pre_hook(functools.partial(note, path), with_kwargs=True)
        for path in experts.counts
    ]
    try:
        with grouped(model, experts):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def called_with(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
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
    given = dict(zip(_places(args, named), (rows, chosen, weights), strict=True))
    return forward(
        *(given.get(index, value) for index, value in enumerate(args)),
        **{name: given.get(name, value) for name, value in named.items()},
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
        "a module of experts is called with rows [N, D], the experts chosen for each as integers [N, K], and their weights "
        "[N, K]"
    )


def with_experts(spec: ModelSpec, dispatches: list[ExpertDispatch], balanced: nn.Module | None) -> ModelSpec:
    """Return the spec with its experts' weights marked, and the dispatches of each layer.

    `balanced` is the model, where its configuration may ask for a loss that balances experts; None where the loss is
    the user's own.
    """
    sizes = {exchange.owner: exchange.experts for exchange in dispatches}

    def param_with(param: ParamSpec) -> ParamSpec:
        return replace(param, experts=sizes.get(param.name.rpartition(".")[0], 0))

    def layer_with(layer: LayerSpec) -> LayerSpec:
        mine = [exchange for exchange in dispatches if any(is_below(exchange.owner, root) for root in layer.modules)]
        return replace(layer, dispatches=tuple(mine))

    asks = balanced is not None and facts_of(balanced).balance_of(balanced)
    return replace(
        spec,
        params=tuple(map(param_with, spec.params)),
        layers=tuple(map(layer_with, spec.layers)),
        balanced_experts=max(sizes.values(), default=0) if asks else 0,
    )
