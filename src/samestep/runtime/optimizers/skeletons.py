"""An optimizer over weights that have no values, or small ones, as trials of its rule take it; and other weights put in their place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.optimizer import OptimizerSource
from samestep.errors import ModelError
from samestep.runtime.optimizers.followed_step import CountsOnHost
from samestep.state.step_code import StepCode
from samestep.trees import tree_leaves


def skeleton(
    source: OptimizerSource, shapes: Mapping[str, tuple[int, ...]], marks: Mapping[str, Mapping[str, Any]]
) -> tuple[Optimizer, dict[str, Tensor]]:
    """Return the optimizer over weights of these shapes that have no values, and the weights by name.

    Raises:
        ModelError: the optimizer keeps its parameters outside of its groups.
    """

    def build(device: str) -> tuple[Optimizer, dict[str, Tensor]]:
        weights: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            weights[name] = nn.Parameter(torch.empty((), device=device).expand(shape))  # one element in memory
            weights[name].__dict__.update(marks.get(name, {}))
        with CountsOnHost():
            return source(list(weights.items())), weights

    try:
        return build("meta")
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
    # fused=True is checked against the device.
    optimizer, weights = build("cpu")
    absent = {name: like(weight, shapes[name], "meta") for name, weight in weights.items()}
    if put_in_place(StepCode(optimizer), weights, absent) is None:
        raise ModelError(f"{type(optimizer).__name__} keeps its parameters outside of its groups: foreach=None works")
    return optimizer, absent


def over_small_weights(
    source: OptimizerSource,
    whole: Mapping[str, tuple[int, ...]],
    marks: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    held: Collection[str] | None = None,
) -> tuple[StepCode, dict[str, Tensor]]:
    """Return the code of the optimizer of whole weights over small ones with values, and these by name: all, or those with `shapes`,
    of which it has the ones that are `held`.
    """
    optimizer, weights = skeleton(source, whole, marks)
    used: dict[str, Tensor] = {}
    for index, (name, shape) in enumerate(
        (shapes or {name: small_shape(shape) for name, shape in whole.items()}).items()
    ):
        generator = torch.Generator().manual_seed(index)
        value = nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))
        value.__dict__.update(marks.get(name, {}))
        used[name] = value
    mine = {name: value for name, value in used.items() if held is None or name in held}
    code = StepCode(optimizer)
    placed = None if any(one.state for one in code.optimizers) else put_in_place(code, weights, mine)
    return placed or StepCode(source(list(mine.items()))), used


def put_in_place(code: StepCode, weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> StepCode | None:
    """Give an optimizer that has not stepped the `others` in place of its weights, group by group; drop what has none.

    Returns:
        What its code reaches then; None if anything in the optimizer still holds one of the weights, or a copy of one.
    """
    names = {id(weight): name for name, weight in weights.items()}
    done = set[int]()
    for one in code.optimizers:
        for group in [group for group in one.param_groups if id(group["params"]) not in done]:
            done.add(id(group["params"]))  # which a wrapper may share with the optimizers in it
            held = [names[id(param)] for param in group["params"] if id(param) in names]
            group["params"][:] = [others[name] for name in held if name in others]
            if "param_names" in group:
                group["param_names"] = [name for name in held if name in others]
        _move_state(one, weights, others)
    kept = [value for key, value in vars(code.optimizer).items() if key not in ("param_groups", "state", "defaults")]
    tensors = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]
    copies = [leaf for leaf in tensors if leaf.is_meta]  # of the weights, as the slow ones of Lookahead
    placed = StepCode(code.optimizer)
    reached = {id(leaf) for leaf in tensors} | placed.tensors
    return None if copies or reached & names.keys() else placed


def _move_state(optimizer: Any, weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Give the states of some weights to those in their place, with the shapes of these."""
    for name, weight in weights.items():
        state = optimizer.state.pop(weight, None)
        if state and name in others:
            optimizer.state[others[name]] = {
                key: like(value, others[name].shape, others[name].device)
                if isinstance(value, Tensor) and value.shape == weight.shape and value.device == weight.device
                else value
                for key, value in state.items()
            }


def like(tensor: Tensor, shape: Sequence[int], device: Any) -> Tensor:
    """Return a tensor without values of another shape, a parameter with the attributes of one."""
    made = torch.empty(shape, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return made
    param = nn.Parameter(made)
    param.__dict__.update(tensor.__dict__)
    return param


def small_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with as many dimensions, of at most about four thousand elements."""
    most = 4096 if len(shape) < 2 else 64 if len(shape) == 2 else max(2, round(4096 ** (1 / len(shape))))
    return tuple(min(size, most) for size in shape)
