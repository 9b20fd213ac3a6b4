"""An optimizer over weights that have no values, or small ones, as trials of its rule take it; and other weights put in their place.

The surroundings of an optimizer's code are those of one process, in trials and in every update. Code that divides its work among ranks, as
distributed forms of Muon do, asks torch.distributed for them. Here gradients are summed already, and the layout divides the update; so the
code finds no process group, as where none was made (`alone`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.optimizer import OptimizerSource
from samestep.building.torch_seams import FunctionMode
from samestep.errors import ModelError
from samestep.state.step_code import StepCode
from samestep.trees import tree_leaves

_LEFT: list[dist.ProcessGroup] = []
"""The process groups that code finds none of at present, the innermost last."""


@contextmanager
def rejoined() -> Iterator[None]:
    """Let code find the process group again inside, which `alone` has hidden around it: a closure sends what a step sends."""
    if not _LEFT:
        yield
        return
    dist.group.WORLD = _LEFT[-1]
    try:
        yield
    finally:
        dist.group.WORLD = None


class alone:  # noqa: N801  # a context, entered in every update: a generator takes twice as many calls
    """Let code find no process group inside, as in one process: an update is that of one device, on gradients that are summed.

    Raises:
        ModelError: the code asks for a rank or sends something without one.
    """

    __slots__ = ("_is_left", "_what")

    def __init__(self, what: str) -> None:
        """Name the code."""
        self._what, self._is_left = what, False

    def __enter__(self) -> None:
        """Hide the process group of all ranks, if there is one."""
        group = dist.group.WORLD if dist.is_available() else None
        if group is not None:
            dist.group.WORLD = None
            _LEFT.append(group)
            self._is_left = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Let the process group be found again, and explain an error that its absence has caused."""
        if self._is_left:
            dist.group.WORLD = _LEFT.pop()
        if isinstance(error, ValueError | RuntimeError) and "process group" in str(error):
            raise ModelError(
                "own-collective",
                f"{self._what} calls torch.distributed itself. samestep runs each update as in one process, on gradients that are already summed "
                "over ranks. Use the optimizer's form for one process, or check "
                "dist.is_initialized() first",
            ) from error


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
        with FunctionMode(_counts_on_host):
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
        raise ModelError(
            "optimizer-not-elementwise",
            f"{type(optimizer).__name__} keeps its parameters outside of its param_groups, so samestep cannot find them. Use an optimizer of torch.optim",
        )
    return optimizer, absent


def over_values(
    source: OptimizerSource,
    shapes: Mapping[str, tuple[int, ...]],
    marks: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, Tensor],
) -> StepCode:
    """Return the code of the optimizer of whole weights over `values` of some of them, which may have other shapes."""
    optimizer, weights = skeleton(source, shapes, marks)
    code = StepCode(optimizer)
    placed = None if any(optimizer.state for optimizer in code.optimizers) else put_in_place(code, weights, values)
    return placed or StepCode(source(list(values.items())))


def put_in_place(code: StepCode, weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> StepCode | None:
    """Give an optimizer that has not stepped the `others` in place of its weights, group by group; drop what has none.

    Returns:
        What its code reaches then; None if anything in the optimizer still holds one of the weights, or a copy of one.
    """
    names = {id(weight): name for name, weight in weights.items()}
    done = set[int]()
    for optimizer in code.optimizers:
        for group in [group for group in optimizer.param_groups if id(group["params"]) not in done]:
            done.add(id(group["params"]))  # which a wrapper may share with the optimizers in it
            members = [names[id(param)] for param in group["params"] if id(param) in names]
            group["params"][:] = [others[name] for name in members if name in others]
            if "param_names" in group:
                group["param_names"] = [name for name in members if name in others]
        _move_state(optimizer, weights, others)
    attributes = [
        value for key, value in vars(code.optimizer).items() if key not in ("param_groups", "state", "defaults")
    ]
    tensors = [leaf for leaf in tree_leaves(attributes) if isinstance(leaf, Tensor)]
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


def _counts_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch. Counts and rates, tensors without dimensions, are made on the host: the code may read their values."""
    if func in _MAKING and "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "meta":
        size = args[0] if args else kwargs.get("size", kwargs.get("data"))
        if (isinstance(size, int | float) and func in _OF_DATA) or (isinstance(size, tuple | list) and not size):
            kwargs = {**kwargs, "device": "cpu"}
    return func(*args, **kwargs)


_OF_DATA = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_MAKING = (*_OF_DATA, torch.zeros, torch.ones, torch.full, torch.empty)


def like(tensor: Tensor, shape: Sequence[int], device: Any) -> Tensor:
    """Return a tensor without values of another shape, a parameter with the attributes of one."""
    empty = torch.empty(shape, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    param = nn.Parameter(empty)
    param.__dict__.update(tensor.__dict__)
    return param


def small_shape(shape: tuple[int, ...], most: int, side: int = 0) -> tuple[int, ...]:
    """Return a shape with as many dimensions, and `most` elements unless every dimension has as few as `side`.

    By default that is 129 for a matrix, since rules differ from 128 rows or columns on, and 16 for more dimensions.
    """
    least = side or (129 if len(shape) < 3 else 16)
    sizes = list(shape)
    while math.prod(sizes) > most and max(sizes) > least:
        longest = sizes.index(max(sizes))
        sizes[longest] = max(least, -(-sizes[longest] // 2))
    return tuple(sizes)
