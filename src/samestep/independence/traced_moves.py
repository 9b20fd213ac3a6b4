"""The calls of a traced forward that need tokens of neighbours (`token_moves.py`), found by what each operand depends on.

A call is one if its operand has a row for each token of the slice, in their order, and the form of the call says at which distance
the tokens are that a result needs. The result belongs to its token then: ranks send each other the tokens at the ends of slices.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.torch_seams import disable_current_modes
from samestep.independence.dependence import NO_DIM, Along, Dependence, WithNeighbours
from samestep.independence.slice_prover import SliceProver
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


class TracedMoves(TorchFunctionMode):
    """A function mode that finds the calls of blocks which need tokens of neighbours."""

    def __init__(self, watch: SliceProver) -> None:
        super().__init__()
        self._watch = watch
        self._calls = Counter[int]()
        """Number of such calls in each call of a module."""
        self._sources = ViewSources()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
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
            if isinstance(known, WithNeighbours):
                dim, margin = known.dim_of(x), known.last
                if known.rows != watch.size + margin or x.shape[dim] != known.rows:
                    continue
                known = Along(dim, 1, 0)
            if not isinstance(known, Along) or known.dim < 0 or known.inner != 1 or not isinstance(known.start, int):
                continue
            place = TokenPlace(operand, known.dim, known.start)
            if watch.of_some_tokens(x) or not (margin or self._has_all(x, place)):
                continue
            if (form := form_of(func, args, kwargs, place, watch.size, self._sources, margin)) is not None:
                return form
        return None

    def _has_all(self, x: Tensor, place: TokenPlace) -> bool:
        """Return whether an operand, with what code has cut off of it, has a row for each token."""
        try:
            return self._watch.known.has_rows(whole_of(x, place, self._watch.size, self._sources), place.dim)
        except ValueError:
            return False

    def _ends_of(self, form: MoveForm) -> tuple[int, ...] | None:
        """Return the tokens on which the other operands depend, counted from the end of the sequence at which they are put; None if
        one depends on tokens in another way, which are others on the rank that has that end."""
        watch, found = self._watch, list[int]()
        for at, one in enumerate(form.given[1:]):
            known = watch.known.of(one) if one.is_meta else None
            if known is None:
                continue
            if form.kind == "write" and watch.known.has_rows(one, form.dim):
                continue
            if form.kind != "cat" or not isinstance(known, Along) or not isinstance(known.start, int):
                return None
            rows = 1 if known.dim == NO_DIM else one.shape[form.dim]
            if known.dim not in (form.dim, NO_DIM) or known.inner != 1 or known.start + rows > watch.size:
                return None
            found.append(known.start - (0 if at < form.place.operand else watch.size))
        return tuple(found)

    def _moved(self, form: MoveForm, number: int, ends: tuple[int, ...]) -> Any:
        """Compute a call of tokens as the last rank does, and note that each row of its result belongs to its token."""
        watch, operand = self._watch, form.given[0]
        point = watch.tracer.places.point()
        with disable_current_modes():
            what = [watch.numbers.of(_first(one) if watch.is_uniform(one) else one) for one in form.given]
        watch.is_following = False
        outcome = form.compute(_extended)
        watch.is_following = True
        result = form.given[-1] if outcome is None else outcome
        with disable_current_modes():
            found: Dependence = Along(form.dim, 1, 0)
            if form.rows > watch.size:
                found = WithNeighbours.of(result, form.dim, form.last, f"{watch.where} by {form.kind}")
            watch.learn(result, None)
            watch.learn(result, found)
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
