"""Recurrences of a traced forward that ranks of `cp` compute one after the other, each from the state of the rank before.

A call of a function with a state (`building/recurrences.py`) is one if it begins at no state, its operands have a row for each token of the
slice, in their order, or depend on none, and on drawn values two parts of a sequence, the second from the state behind the
first, are the whole, with their gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from samestep.building.recurrences import StateCall
from samestep.building.torch_seams import DisableTorchFunction, disable_current_modes
from samestep.independence.dependence import Along, Mixed
from samestep.independence.slice_prover import SliceProver
from samestep.models.layer_parts import TokenMove
from samestep.trees import operands, tree_leaves, tree_map_only

_PARTS = ((5, 3), (64, 64))
"""Tokens of the two parts of a trial, other numbers where the function does not run with these."""
_LIMIT = 1e-5
"""Largest difference of a trial, in which the function's own float32 stays."""


class TracedStates:
    """Receives the calls of functions with a state."""

    def __init__(self, watch: SliceProver) -> None:
        self._watch = watch
        self._calls = Counter[tuple[int, str]]()

    def __call__(self, call: StateCall) -> Any:
        """Return what a call computes of a slice; `NotImplemented` where it is not shown to be a recurrence."""
        watch = self._watch
        if not watch.is_on_slices or watch.is_in_function:
            return NotImplemented
        place = watch.tracer.modules.number, call.name
        number = self._calls[place]
        self._calls[place] += 1
        if not watch.is_following or not watch.is_in_block:
            return NotImplemented
        with disable_current_modes():
            dims = self._token_dims(call)
            watch.is_in_function = True
            dim = None if dims is None else _token_dim_of(call, dims)
            watch.is_in_function = False
            given = operands(*call.args, *call.kwargs.values())
            numbers = [watch.numbers.of(one) for one in given]
        if dim is None:
            return NotImplemented
        watch.is_following, watch.is_in_function = False, True
        try:
            tokens, state = call.run(None)
        finally:
            watch.is_following, watch.is_in_function = True, False
        with disable_current_modes():
            watch.learn(tokens, None)
            watch.learn(tokens, Along(dim, 1, 0))
            for one in state:
                watch.learn(one, Mixed(f"{watch.where} by {call.name}", True))
            others = tuple(repr(one) for one in tree_leaves((call.args, call.kwargs)) if not isinstance(one, Tensor))
            if isinstance(call.args[0] if call.args else None, torch.nn.Module):
                others = others[1:]
            for one in (tokens, *state):
                watch.numbers.name(one, "recurrence", call.name, others, *numbers, where=watch.where)
            move = TokenMove(
                owner=watch.where,
                number=number,
                kind="state",
                dim=dim,
                left=1,
                right=0,
                elements=sum(one.numel() for one in state),
                is_cut=any(watch.key(one) in watch.tracer.cut.storages for one in given if one.is_meta),
                takes_gradient=tokens.requires_grad and torch.is_grad_enabled(),
                function=call.name,
                is_of_weights=call.convention.is_layer,
            )
        watch.parts.move(move, watch.tracer.places.point((tokens, state)))
        watch.tried.append(f"{watch.where} by {call.name}")
        return call.returned(tokens, state)

    def _token_dims(self, call: StateCall) -> list[int | None] | None:
        """Return the dimension of tokens of each operand, None for one that depends on none; None where they are not in order."""
        watch, dims = self._watch, list[int | None]()
        if not call.begins:
            return None
        for one in operands(*call.args, *call.kwargs.values()):
            found = watch.known.of(one) if one.is_meta else None
            if found is None:
                dims.append(None)
            elif isinstance(found, Along) and found.dim >= 0 and watch.known.has_rows(one, found.dim):
                dims.append(found.dim)
                if watch.of_some_tokens(one):
                    return None
            else:
                return None
        return dims if any(dim is not None for dim in dims) else None


_tried: dict[Any, int | None] = {}
"""The dimension of tokens of the result of each function that was tried; None where two parts are not the whole."""


def _token_dim_of(call: StateCall, dims: list[int | None]) -> int | None:
    """Return the dimension of tokens of what a function returns, if from a state on it computes what it does of the whole."""
    given = operands(*call.args, *call.kwargs.values())
    shapes = tuple(
        (tuple(one.shape[: dim or 0]), tuple(one.shape[(0 if dim is None else dim + 1) :]), dim, one.dtype)
        for one, dim in zip(given, dims, strict=True)
    )
    key = call.key, shapes
    if key not in _tried:
        _tried[key] = _try(call, dims)
    return _tried[key]


def _try(call: StateCall, dims: list[int | None]) -> int | None:
    for lengths in _PARTS:
        try:
            with torch.enable_grad(), DisableTorchFunction(), saved_tensors_hooks(_kept, _kept):
                return _tried_with(call, dims, lengths)
        except Exception:
            continue
    return None


def _kept(tensor: Tensor) -> Tensor:
    """Return what a trial saves for its backward: the forward around it may keep nothing."""
    return tensor


def _tried_with(call: StateCall, dims: list[int | None], lengths: tuple[int, int]) -> int | None:
    places, drawn, source = iter(dims), list[Tensor](), torch.Generator().manual_seed(0)

    def draw(one: Tensor) -> Tensor:
        dim, shape = next(places), [*one.shape]
        if dim is not None:
            shape[dim] = sum(lengths)
        if not one.is_floating_point():
            if dim is None:
                raise ValueError("numbers that may say where something of the whole sequence is")
            made = torch.randint(2, shape, generator=source).to(one.dtype)
            made.select(dim, lengths[0]).copy_(1 - made.select(dim, lengths[0] - 1).int())  # as between two documents
        else:
            made = -torch.rand(shape, dtype=torch.float64, generator=source)
            if call.convention.is_layer and dim is None:
                made /= shape[-1]  # as small as weights are, with which gates are neither open nor closed
            made.requires_grad_()
        drawn.append(made)
        return made

    args, kwargs = tree_map_only(Tensor, draw, (call.args, call.kwargs))

    def part(start: int, length: int) -> Any:
        places = iter(dims)

        def cut(one: Tensor) -> Tensor:
            dim = next(places)
            return one if dim is None else one.narrow(dim, start, length)

        return tree_map_only(Tensor, cut, (args, kwargs))

    whole, end = call.run(None, args, kwargs)
    first, state = call.run(None, *part(0, lengths[0]))
    second, last = call.run(state, *part(*lengths))
    alone, _ = call.run(None, *part(*lengths))
    sizes = (whole.shape, first.shape, second.shape)
    along = [dim for dim, size in enumerate(zip(*sizes, strict=True)) if size == (sum(lengths), *lengths)]
    if len(along) != 1 or _is_close(second, alone):  # these values do not show what a state does
        return None
    pairs = [(whole, torch.cat((first, second), along[0])), *zip(end, last, strict=True)]
    weights = [torch.rand(one.shape, dtype=torch.float64, generator=source) for one, _ in pairs]
    inputs = [one for one in drawn if one.requires_grad]
    mine, others = (
        torch.autograd.grad(_sum_of((pair[at] for pair in pairs), weights), inputs, allow_unused=True) for at in (0, 1)
    )
    pairs += [(one, other) for one, other in zip(mine, others, strict=True) if one is not None and other is not None]
    return along[0] if all(_is_close(*pair) for pair in pairs) else None


def _sum_of(results: Iterable[Tensor], weights: list[Tensor]) -> Tensor:
    return torch.stack([(one * weight).sum() for one, weight in zip(results, weights, strict=True)]).sum()


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not math.isfinite(float(one.detach().abs().max() if one.numel() else 0.0)):
        return False
    scale = max(float(one.detach().abs().max()), 1e-6) if one.numel() else 1.0
    return not one.numel() or float((one - other).detach().abs().max()) <= _LIMIT * scale
