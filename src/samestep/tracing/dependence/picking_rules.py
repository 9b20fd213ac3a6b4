"""Rules of operations that choose positions by values: indices, masks, gathers, sorts, and what writes picks back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from samestep.tracing.dependence.calls import SUMMED, Call, along, mapped, unknown
from samestep.tracing.dependence.independence import NO_DIM, Along, Dependence, Mixed, Pick, identity_of, joined


def gather(call: Call) -> Iterator[Dependence]:
    """Rule of gather, scatter and their kin: positions along one dimension are chosen by values."""
    named = call.named()
    dim = named["dim"] % max(call.args[0].dim(), 1)
    for result in call.results:
        own = [SUMMED if one == dim else one for one in range(result.dim())]
        yield mapped(call, [(tensor, own[: tensor.dim()]) for tensor in call.tensors()])


def index(call: Call) -> Iterator[Dependence]:
    """Rule of x[i, j, ...] and x[mask]: the indexed dimensions become those of the indices."""
    x, indices = call.args[0], list(call.args[1])
    spread = _spread(x, indices)
    if spread is None:
        yield joined([part for tensor in call.tensors() if (part := unknown(call, tensor))], call.text)
        return
    dims, place, width, given = spread
    found = call.known.of(x)
    parts: list[Along | Mixed] = []
    if isinstance(found, Mixed):
        parts.append(found)
    elif found is not None:
        to = NO_DIM if found.dim == NO_DIM else dims[found.dim]
        parts.append(
            found if to == NO_DIM else _picked(call, found, given, x, place) if to == SUMMED else found._replace(dim=to)
        )
    for index, covered in given:
        picks_rows = isinstance(found, Along) and found.dim in covered
        mine = call.known.of(index)
        if mine is None or (isinstance(mine, Mixed) and picks_rows and not mine.shown):
            continue  # which rows are picked, the pick itself says
        if isinstance(mine, Along) and mine.dim != NO_DIM:
            if index.dtype in (torch.bool, torch.uint8):
                if not picks_rows:
                    parts.append(Mixed(call.text, shown=False))
                continue
            mine = mine._replace(dim=place + width - index.dim() + mine.dim)
        parts.append(mine)
    yield joined(parts, call.text)


def _spread(x: Tensor, indices: list[Any]) -> tuple[list[int], int, int, list[tuple[Tensor, range]]] | None:
    """Return where the dimensions of x go, where the picks stand, their dimensions, and what each index covers."""
    at, given, whole = 0, [], []
    for index in indices:
        count = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None:
            given.append((index, range(at, at + count)))
        else:
            whole.append(at)
        at += count
    covered = [dim for _, dims in given for dim in dims]
    if not covered or covered != list(range(covered[0], covered[-1] + 1)):
        return None
    width = max(1 if index.dtype in (torch.bool, torch.uint8) else index.dim() for index, _ in given)
    place = covered[0]
    dims = [SUMMED if dim in covered else dim if dim < place else dim - len(covered) + width for dim in range(x.dim())]
    return dims, place, width, given


def _picked(call: Call, rows: Along, given: list[tuple[Tensor, range]], x: Tensor, place: int) -> Along | Mixed:
    """Return the dependence of what indices pick along the dimension of rows."""
    index, covered = next((index, dims) for index, dims in given if rows.dim in dims)
    is_mask = index.dtype in (torch.bool, torch.uint8)
    if not is_mask and index.dim() == 1 and index.numel() == x.shape[rows.dim] and _counts(call, index):
        return Along(place, rows.inner, rows.start)
    _note_constant(call, index, rows, covered)
    if not is_mask and index.dim() != 1:
        return Mixed(call.text, shown=False)
    return Along(place, 1, Pick(identity_of(index), rows, x.shape[rows.dim]))


def _note_constant(call: Call, index: Tensor, rows: Along, covered: range) -> None:
    """Report an index that is the same whatever the data: it chooses rows by their places."""
    is_mask = index.dtype in (torch.bool, torch.uint8)
    if call.known.of(index) is None and index.dim() and not _counts(call, index):
        call.on_constant(index, rows.dim - covered[0] if is_mask else 0, 1, call.where)


def _counts(call: Call, index: Tensor) -> bool:
    """Return whether an index is 0, 1, 2, ..., whatever the data."""
    values = None if call.known.of(index) is not None else call.value_of(index)
    return values is not None and values.tolist() == list(range(values.numel()))


def _restored(call: Call, target: Tensor, dim: int, source: Along, index: Tensor) -> Dependence:
    """Return the dependence of a target into which picked rows are written along `dim`."""
    pick = source.start
    before = call.known.of(target)
    if isinstance(pick, Pick) and pick.index == identity_of(index) and pick.size == target.shape[dim]:
        own = Along(dim, pick.picked.inner, pick.picked.start)
        return joined([own, *([] if before is None else [before])], call.text)
    if isinstance(pick, int) and index.numel() == target.shape[dim] and _counts(call, index):
        own = Along(dim, source.inner, pick)
        return joined([own, *([] if before is None else [before])], call.text)
    return Mixed(call.text, shown=False)


def write_back(call: Call) -> Iterator[Dependence]:
    """Rule of index_put and index_add: rows that were picked by the same index return to their places."""
    named = call.named()
    if "indices" in named:
        target, source = named["self"], named["values"]
        spread = _spread(target, list(named["indices"]))
        if spread is None or len(spread[3]) != 1:
            yield _unclear_write(call)
            return
        dims, place, width, given = spread
        index, covered = given[0]
        back = {to: dim for dim, to in enumerate(dims) if to != SUMMED}
    else:
        target, source, index = named["self"], named["source"], named["index"]
        place = named["dim"] % max(target.dim(), 1)
        width, covered = 1, range(place, place + 1)
        back = {dim: dim for dim in range(target.dim()) if dim != place}
    found, chosen, own = call.known.of(source), call.known.of(index), call.known.of(target)
    if isinstance(own, Along) and own.dim in covered:
        _note_constant(call, index, own, covered)
    lies_behind = source.dim() - (target.dim() - len(covered) + width)
    if isinstance(found, Along) and found.dim != NO_DIM:
        at = found.dim - lies_behind
        if at == place and width == 1:
            pick = found.start
            dim = pick.picked.dim if isinstance(pick, Pick) and pick.picked.dim in covered else place
            yield _restored(call, target, dim, found, index)
            return
        moved: Dependence = Along(back[at], found.inner, found.start) if at in back else Mixed(call.text, shown=False)
    else:
        moved = found
    parts = [part for part in (moved, own) if part is not None]
    if chosen is not None:
        is_aligned = isinstance(chosen, Along) and isinstance(own, Along) and chosen.dim + covered[0] == own.dim
        parts.append(own if is_aligned and own is not None else Mixed(call.text, shown=False))
    yield joined(parts, call.text)


def _unclear_write(call: Call) -> Dependence:
    return joined([part for tensor in call.tensors() if (part := unknown(call, tensor))], call.text)


def index_select(call: Call) -> Iterator[Dependence]:
    """Rule of index_select: the positions of an index along one dimension."""
    x, dim, index = call.args[:3]
    dim %= max(x.dim(), 1)
    found, chosen = call.known.of(x), call.known.of(index)
    if isinstance(found, Along) and found.dim == dim:
        yield _picked(call, found, [(index, range(dim, dim + 1))], x, dim)
        return
    yield mapped(call, [(x, range(x.dim())), *([] if chosen is None else [(index, [dim])])])


def places(call: Call) -> Iterator[Dependence]:
    """Rule of nonzero and of the order of a sort: the places that are named are used to pick rows, or not known."""
    given = [found for tensor in call.tensors() if (found := call.known.of(tensor)) is not None]
    for _ in call.results:
        shown = next((one for one in given if isinstance(one, Mixed) and one.shown), None)
        yield shown or (Mixed(call.text, shown=False) if given else None)


def sort(call: Call) -> Iterator[Dependence]:
    """Rule of sort: along the dimension of rows the values are mixed, and the places are a permutation to pick by."""
    for result, found in zip(call.results, along(call), strict=True):
        is_order = result.dtype is torch.int64 and isinstance(found, Mixed) and found.where == call.text
        yield Mixed(call.text, shown=False) if is_order else found
