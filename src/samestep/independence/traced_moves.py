"""Calls of a traced forward that need more than a rank's tokens, and which ranks of `cp` can compute: by tokens of neighbours, or one after the other.

A call needs tokens of neighbours (`token_moves.py`) if its operand has a row for each token of the slice, in their order, and the form
of the call says at which distance the tokens are that a result needs. The result belongs to its token then: ranks send each other the
tokens at the ends of slices.

A function with a state (`building/recurrences.py`) is a recurrence, which each rank begins at the state of the rank before, if it begins
at no state, its operands have a row for each token of the slice, in their order, or depend on none, and on drawn values two parts of a
sequence, the second from the state behind the first, are the whole, with their gradients.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from samestep.building.recurrences import StateCall
from samestep.building.torch_seams import DisableTorchFunction, disable_current_modes
from samestep.independence.dependence import NO_DIM, Along, Mixed, Wide
from samestep.independence.operation_trial import gradients_of, is_same
from samestep.independence.slice_prover import BlockProver
from samestep.independence.token_moves import (
    Edge,
    MoveForm,
    TokenPlace,
    ViewSources,
    form_of,
    kind_of,
    operands_of,
    whole_of,
)
from samestep.models.layer_parts import TokenMove
from samestep.trees import operands, tree_leaves, tree_map_only


class TracedMoves:
    """Receives the functions that a forward calls, and finds those of blocks which need tokens of neighbours."""

    def __init__(self, watch: BlockProver) -> None:
        self._watch = watch
        self._calls = Counter[int]()
        """Number of such calls in each call of a module."""
        self._sources = ViewSources()

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call, as the last rank has it."""
        result = self._called(func, args, kwargs)
        self._sources.note(result, args, kwargs)
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of a call, as the last rank computes it of its tokens."""
        watch = self._watch
        if kind_of(func) is None or not watch.is_on_slices:
            return func(*args, **kwargs)
        number = self._calls[watch.tracer.modules.number]
        self._calls[watch.tracer.modules.number] += 1
        if not watch.is_following or not watch.is_in_block:
            return func(*args, **kwargs)
        with disable_current_modes():
            form = self._form(func, args, kwargs)
            ends = None if form is None else self._ends_of(form)
        if form is None or ends is None:
            return func(*args, **kwargs)
        return self._moved(form, number, ends)

    def _form(self, func: Any, args: Any, kwargs: Any) -> MoveForm | None:
        """Return a call in its form; None if no operand has a row for each token, or the call is of no form."""
        watch = self._watch
        for operand, x in enumerate(operands_of(func, args, kwargs)):
            known, margin = watch.known.of(x) if x.is_meta else None, 0
            if isinstance(known, Along) and isinstance(known.start, Wide):
                margin = known.start.last
                if known.start.rows != watch.num_rows + margin:
                    continue
                known = known._replace(start=0)
            if not isinstance(known, Along) or known.dim < 0 or known.inner != 1 or not isinstance(known.start, int):
                continue
            place = TokenPlace(operand, known.dim, known.start)
            if watch.of_some_tokens(x) or not (margin or self._has_all(x, place)):
                continue
            if (form := form_of(func, args, kwargs, place, watch.num_rows, self._sources, margin)) is not None:
                return form
        return None

    def _has_all(self, x: Tensor, place: TokenPlace) -> bool:
        """Return whether an operand, with what code has cut off of it, has a row for each token."""
        try:
            return self._watch.known.has_rows(whole_of(x, place, self._watch.num_rows, self._sources), place.dim)
        except ValueError:
            return False

    def _ends_of(self, form: MoveForm) -> tuple[int, ...] | None:
        """Return the tokens on which the other operands depend, counted from the end of the sequence at which they are put; None if
        one depends on tokens in another way, which are others on the rank that has that end."""
        watch, ends = self._watch, list[int]()
        for at, operand in enumerate(form.given[1:]):
            known = watch.known.of(operand) if operand.is_meta else None
            if known is None:
                continue
            if form.kind == "write" and watch.known.has_rows(operand, form.place.dim):
                continue
            if form.kind != "cat" or not isinstance(known, Along) or not isinstance(known.start, int):
                return None
            rows = 1 if known.dim == NO_DIM else operand.shape[form.place.dim]
            if known.dim not in (form.place.dim, NO_DIM) or known.inner != 1 or known.start + rows > watch.num_rows:
                return None
            ends.append(known.start - (0 if at < form.place.operand else watch.num_rows))
        return tuple(ends)

    def _moved(self, form: MoveForm, number: int, ends: tuple[int, ...]) -> Any:
        """Compute a call of tokens as the last rank does, and note that each row of its result belongs to its token."""
        watch, operand = self._watch, form.given[0]
        point = watch.tracer.places.point()
        with disable_current_modes():
            what = [watch.numbers.of(_first(tensor) if watch.is_uniform(tensor) else tensor) for tensor in form.given]
        watch.is_following = False
        outcome = form.compute(_extended)
        watch.is_following = True
        result = form.given[-1] if outcome is None else outcome
        with disable_current_modes():
            is_wide = form.rows > watch.num_rows
            start = Wide(form.rows, form.last, f"{watch.where} by {form.kind}") if is_wide else 0
            watch.learn(result, None)
            watch.learn(result, Along(form.place.dim, 1, start))
            watch.numbers.name(result, "moved", form.kind, repr(form.what), ends, *what, where=watch.where)
            if not (form.left or form.right or form.kind == "edge"):
                return outcome  # of tokens of neighbours that are there already
            move = TokenMove(
                owner=watch.where,
                number=number,
                kind=form.kind,
                dim=form.place.dim,
                left=form.left,
                right=form.right,
                start=form.place.start,
                elements=operand.numel() // operand.shape[form.place.dim],
                is_cut=watch.key(operand) in watch.tracer.cut.storages,
                takes_gradient=operand.requires_grad and torch.is_grad_enabled(),
            )
        watch.parts.move(move, point._replace(nodes=watch.tracer.places.point(_made_of(operand, result)).nodes))
        return outcome


def _made_of(operand: Tensor, result: Tensor) -> list[Tensor]:
    """Return the tensors that a call has computed of an operand: the result, and what it is a view of.

    Code that writes into the view makes another node of the view, and keeps that of what is viewed.
    """
    base = result._base
    return [result] if base is None or base is operand or base is operand._base else [result, base]


def _first(tensor: Tensor) -> Tensor:
    """Return the first element, which says what equal elements are, however many there are."""
    return tensor[(slice(0, 1),) * tensor.dim()]


def _extended(
    x: Tensor, dim: int, left: int, right: int, first: Edge | None = None, last: Edge | None = None
) -> Tensor:
    """Return an operand with as many rows more as neighbours send."""
    if not left and not right:
        return x.view_as(x)
    parts = [x.narrow(dim, 0, left), x, x.narrow(dim, 0, right)]
    if isinstance(first, Tensor) and left:
        parts[0] = parts[0] + first
    return torch.cat([part for part in parts if part.shape[dim]], dim)


_PARTS = ((5, 3), (64, 64))
"""Tokens of the two parts of a trial, other numbers where the function does not run with these."""
_LIMIT = 5e-6
"""Largest relative difference of a trial, in which the function's own float32 stays."""


class TracedStates:
    """Receives the calls of functions with a state."""

    def __init__(self, watch: BlockProver) -> None:
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
            tensors = operands(*call.args, *call.kwargs.values())
            numbers = [watch.numbers.of(tensor) for tensor in tensors]
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
            for tensor in state:
                watch.learn(tensor, Mixed(f"{watch.where} by {call.name}", True))
            others = tuple(repr(leaf) for leaf in tree_leaves((call.args, call.kwargs)) if not isinstance(leaf, Tensor))
            if isinstance(call.args[0] if call.args else None, torch.nn.Module):
                others = others[1:]
            for tensor in (tokens, *state):
                watch.numbers.name(tensor, "recurrence", call.name, others, *numbers, where=watch.where)
            move = TokenMove(
                owner=watch.where,
                number=number,
                kind="state",
                dim=dim,
                left=1,
                right=0,
                elements=sum(tensor.numel() for tensor in state),
                is_cut=any(watch.key(tensor) in watch.tracer.cut.storages for tensor in tensors if tensor.is_meta),
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
        for tensor in operands(*call.args, *call.kwargs.values()):
            dependence = watch.known.of(tensor) if tensor.is_meta else None
            if dependence is None:
                dims.append(None)
            elif isinstance(dependence, Along) and dependence.dim >= 0 and watch.known.has_rows(tensor, dependence.dim):
                dims.append(dependence.dim)
                if watch.of_some_tokens(tensor):
                    return None
            else:
                return None
        return dims if any(dim is not None for dim in dims) else None


_tried: dict[Any, int | None] = {}
"""The dimension of tokens of the result of each function that was tried; None where two parts are not the whole."""


def _token_dim_of(call: StateCall, dims: list[int | None]) -> int | None:
    """Return the dimension of tokens of what a function returns, if from a state on it computes what it does of the whole."""
    tensors = operands(*call.args, *call.kwargs.values())
    shapes = tuple(
        (tuple(tensor.shape[: dim or 0]), tuple(tensor.shape[(0 if dim is None else dim + 1) :]), dim, tensor.dtype)
        for tensor, dim in zip(tensors, dims, strict=True)
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

    def draw(tensor: Tensor) -> Tensor:
        dim, shape = next(places), [*tensor.shape]
        if dim is not None:
            shape[dim] = sum(lengths)
        if not tensor.is_floating_point():
            if dim is None:
                raise ValueError("numbers that may show where something of the whole sequence is")
            numbers = torch.randint(2, shape, generator=source).to(tensor.dtype)
            # As between two documents.
            numbers.select(dim, lengths[0]).copy_(1 - numbers.select(dim, lengths[0] - 1).int())
        else:
            numbers = -torch.rand(shape, dtype=torch.float64, generator=source)
            if call.convention.is_layer and dim is None:
                numbers /= shape[-1]  # as small as weights are, with which gates are neither open nor closed
            numbers.requires_grad_()
        drawn.append(numbers)
        return numbers

    args, kwargs = tree_map_only(Tensor, draw, (call.args, call.kwargs))

    def part(start: int, length: int) -> Any:
        places = iter(dims)

        def cut(tensor: Tensor) -> Tensor:
            dim = next(places)
            return tensor if dim is None else tensor.narrow(dim, start, length)

        return tree_map_only(Tensor, cut, (args, kwargs))

    whole, end = call.run(None, args, kwargs)
    first, state = call.run(None, *part(0, lengths[0]))
    second, last = call.run(state, *part(*lengths))
    alone, _ = call.run(None, *part(*lengths))
    sizes = (whole.shape, first.shape, second.shape)
    along = [dim for dim, size in enumerate(zip(*sizes, strict=True)) if size == (sum(lengths), *lengths)]
    if len(along) != 1 or is_same(second, alone, _LIMIT):  # these values do not show what a state does
        return None
    expected, joined = (whole, *end), (torch.cat((first, second), along[0]), *last)
    upstream = [torch.rand(result.shape, dtype=torch.float64, generator=source).to(result.dtype) for result in expected]
    of_whole, of_parts = (gradients_of(results, upstream, drawn) for results in (expected, joined))
    pairs = [*zip(joined, expected, strict=True)]
    pairs += [(a, b) for a, b in zip(of_parts, of_whole, strict=True) if a is not None and b is not None]
    is_recurrence = all(bool(b.isfinite().all()) and is_same(a, b, _LIMIT) for a, b in pairs)
    return along[0] if is_recurrence else None
