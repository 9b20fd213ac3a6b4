"""The rules by which dependences on rows (`dependence.py`) go from operands to results.

They are the maps of dimensions (`dimension_maps.py`), what becomes of rows along a MOVED dimension (they are moved by a known number, or
picked by values and written back), and what a library has stated. An operation without any is assumed to keep a dimension of rows whose size and place its result
has too, where that may be tried on drawn values; else nothing is known of its result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samestep import calls
from samestep.independence import dimension_maps
from samestep.independence.dependence import (
    NO_DIM,
    Along,
    Call,
    Dependence,
    Mixed,
    Pick,
    Rule,
    identity_of,
    join_dependences,
    map_dependence,
    nothing_known,
)
from samestep.independence.dimension_maps import MAPS, MOVED, Map, Operand, along_dimension, bind_arguments, map_of
from samestep.tracing.meta_tensors import is_mask

_aten = torch.ops.aten


# -- by a known number -----------------------------------------------------------------------------


def rearrange(call: Call) -> Iterator[Dependence]:
    """Rule of operations that put positions elsewhere, which by itself mixes no rows."""
    (operands,) = MAPS[call.func.overloadpacket](call)
    dependence = map_dependence(call, operands, lambda at, rows: _rearrange_rows(call, operands, at, rows))
    yield Mixed(call.text, shown=False) if dependence == Mixed(call.text, shown=True) else dependence


def _rearrange_rows(call: Call, operands: Sequence[Operand], at: int, rows: Along) -> Along | Mixed:
    packet = call.func.overloadpacket
    if packet in (_aten.cat, _aten.stack):
        return _beside(call, operands, at, rows)
    if rows.dim == NO_DIM:
        return rows
    (tensor,), named_args = call.given, bind_arguments(call)
    if packet is _aten.constant_pad_nd:
        return _shift_rows(call, rows, named_args["pad"][2 * (tensor.dim() - 1 - rows.dim)])
    if packet is _aten.roll and named_args["dims"]:
        pairs = zip(named_args["shifts"], named_args["dims"], strict=False)
        return _shift_rows(call, rows, sum(by for by, dim in pairs if dim % tensor.dim() == rows.dim))
    if packet is _aten.repeat and tensor.shape[rows.dim] % (rows.inner * call.known.num_rows) == 0:
        dim = rows.dim + call.results[0].dim() - tensor.dim()
        return rows._replace(dim=dim)  # whole rounds of all rows go on counting
    return Mixed(call.text, shown=False)


def _shift_rows(call: Call, rows: Along, by: int) -> Along | Mixed:
    """Return the dependence of a result whose position p is the operand's position p - by."""
    if not by:
        return rows
    if not isinstance(rows.start, int) or by % rows.inner:
        return Mixed(call.text, shown=False)
    return rows._replace(start=(rows.start - by // rows.inner) % call.known.num_rows)


def _beside(call: Call, operands: Sequence[Operand], at: int, rows: Along) -> Along | Mixed:
    """Return the dependence of a piece among others along a dimension: it fits where its rows go on counting."""
    dim = bind_arguments(call)["dim"] % call.results[0].dim()
    is_cat = call.func.overloadpacket is _aten.cat
    pieces = [piece for piece, _ in operands]
    sizes = [piece.shape[dim] if is_cat else 1 for piece in pieces]
    first = call.known.of(pieces[0])
    width = next((end for end, piece in enumerate(pieces) if call.known.of(piece) != first), len(pieces))  # of one row
    is_one = rows.dim == NO_DIM
    inner, offset = max(1, width) * sizes[at] if is_one else rows.inner, sum(sizes[:at])
    if isinstance(rows.start, int) and offset % inner in range(0, inner, sizes[at] if is_one else inner):
        return Along(dim, inner, (rows.start - offset // inner) % call.known.num_rows)
    return rows if len(pieces) == 1 else Mixed(call.text, shown=False)


# -- by values -------------------------------------------------------------------------------------


def pick_rows(call: Call) -> Iterator[Dependence]:
    """Rule of x[i, j, ...], x[mask] and index_select: the order of picked rows is that of the index."""
    ((x, dims), *indices), place, covers = *MAPS[call.func.overloadpacket](call), *_index_coverage(call)
    of_x = call.known.of(x)
    if of_x is None and len(covers) == 1 and (rows := _rows_of_mask(call, *covers[0])) is not None:
        call.on_constant(x, rows.dim, rows.inner, call.where)
        yield _pick_along_rows(call, rows, covers, place)
        return
    operands: list[Operand] = [(x, dims)]
    for (index, places), (_, covered) in zip(indices, covers, strict=True):
        of_index = call.known.of(index)
        is_said_by_pick = isinstance(of_x, Along) and of_x.dim in covered and (
            (isinstance(of_index, Mixed) and not of_index.shown) or (isinstance(of_index, Along) and is_mask(index))
        )  # fmt: skip
        if of_index is not None and not is_said_by_pick:
            operands.append((index, places))

    def moved(at: int, rows: Along) -> Along | Mixed:
        if rows.dim == NO_DIM:
            return rows
        if at == 0 and any(rows.dim in dims and _picks_others(call, rows, index) for index, dims in covers):
            return Mixed(call.text, shown=True)
        return Mixed(call.text, shown=False) if at else _pick_along_rows(call, rows, covers, place)

    yield map_dependence(call, operands, moved)


def _rows_of_mask(call: Call, index: Tensor, covered: range) -> Along | None:
    """Return the rows of a mask as they are along the dimensions that it covers; None where they are along none."""
    dependence = call.known.of(index)
    if not is_mask(index) or not isinstance(dependence, Along) or dependence.dim == NO_DIM:
        return None
    return dependence._replace(dim=covered[dependence.dim])


def gather(call: Call) -> Iterator[Dependence]:
    """Rule of gather: along the dimension of rows, the values of the index say whether it picks the rows of others."""
    arguments, ((x, dims), index) = bind_arguments(call), *MAPS[call.func.overloadpacket](call)

    def moved(at: int, rows: Along) -> Along | Mixed:
        if rows.dim == NO_DIM:
            return rows
        return Mixed(call.text, shown=at == 0 and _picks_others(call, rows, arguments["index"], [rows.dim]))

    yield map_dependence(call, [(x, dims), index], moved)


def _row_of_each(call: Call, tensor: Tensor) -> Tensor | None:
    """Return the number of the row on which each element of a tensor depends; None where it is not one that is known."""
    dependence = call.known.of(tensor)
    if not call.known.are_placed or not isinstance(dependence, Along) or not isinstance(dependence.start, int):
        return None
    if dependence.dim == NO_DIM:
        return torch.full(tensor.shape, dependence.start)
    numbers = _numbers(call, dependence, torch.arange(tensor.shape[dependence.dim]))
    return numbers.view([-1 if dim == dependence.dim else 1 for dim in range(tensor.dim())]).expand(tensor.shape)


def _numbers(call: Call, rows: Along, positions: Tensor) -> Tensor:
    """Return the numbers of the rows of positions along a dimension."""
    assert isinstance(rows.start, int)
    return (positions // rows.inner + rows.start) % call.known.num_rows


def _picks_others(call: Call, rows: Along, index: Tensor, dims: Sequence[int] | None = None) -> bool:
    """Return whether an index, whose values are known, picks positions of other rows than the one on which each element depends;
    with `dims`, its first elements along all other dimensions."""
    owners, values = _row_of_each(call, index), call.value_of(index)
    if owners is None or values is None or is_mask(index) or not isinstance(rows.start, int):
        return False
    if dims is not None:
        values, owners = _first_of_others(values, dims), _first_of_others(owners, dims)
    return bool((_numbers(call, rows, values) != owners).any())


def _share_positions(call: Call, dims: Sequence[int], indices: Sequence[Tensor], source: Tensor | None) -> bool:
    """Return whether indices, whose values are known, lead elements that depend on different rows to one position of a target.

    `dims` are the dimensions of an index along which it chooses positions; along others each element keeps its own, so the first says it.
    """
    values = [None if is_mask(index) else call.value_of(index) for index in indices]
    known = [value for value in values if value is not None]
    tensors = indices if source is None else [*indices, source]
    owner = next((rows for tensor in tensors if (rows := _row_of_each(call, tensor)) is not None), None)
    if len(known) < len(indices) or owner is None:
        return False
    *known, owner = (_first_of_others(tensor, dims) for tensor in torch.broadcast_tensors(*known, owner))
    if not owner.numel():
        return False
    positions = torch.zeros_like(owner)
    for value in known:
        positions = positions * (value.max() - value.min() + 1) + value - value.min()
    with_owners = positions * call.known.num_rows + owner
    return with_owners.unique().numel() > positions.unique().numel()


def _first_of_others(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Return a tensor with the first position of all but some dimensions, where an index repeats itself as a rule."""
    return tensor[tuple(slice(None) if dim in dims else slice(1) for dim in range(tensor.dim()))]


def _index_coverage(call: Call) -> tuple[int, list[tuple[Tensor, range]]]:
    """Return the first dimension of what is picked, or written; and each index with the dimensions that it covers."""
    arguments = bind_arguments(call)
    if "dim" in arguments:
        dim = arguments["dim"] % max(call.args[0].dim(), 1)
        return dim, [(arguments["index"], range(dim, dim + 1))]
    picked = dimension_maps.picks(call.args[0], arguments.get("indices") or [arguments["mask"]])
    return picked.place, picked.indices


def _pick_along_rows(call: Call, rows: Along, covers: list[tuple[Tensor, range]], place: int) -> Along | Mixed:
    """Return the dependence of what indices pick along the dimension of rows."""
    index, covered = next((index, dims) for index, dims in covers if rows.dim in dims)
    shape, size = call.args[0].shape, call.args[0].shape[rows.dim]
    if not is_mask(index) and index.numel() == size == max(index.shape, default=0) and _counts(call, index):
        # the dimension of the index that counts, from the last one on
        behind = index.dim() - [*index.shape].index(size)
        for other, _ in covers:
            if other is not index and not is_mask(other) and other.dim() >= behind and other.shape[-behind] > 1:
                call.on_constant(other, other.dim() - behind, rows.inner, call.where)
        width = max(1 if is_mask(other) else other.dim() for other, _ in covers)
        return Along(place + width - behind, rows.inner, rows.start)
    _note_constant(call, index, rows, covered)
    flat = _flattened(shape, rows, covered) if is_mask(index) or index.dim() == 1 else None
    if flat is None:
        return Mixed(call.text, shown=False)
    return Along(place, 1, Pick(_identity(index), flat, math.prod(shape[covered.start : covered.stop])))


def _identity(index: Tensor) -> tuple[object, ...]:
    """Return what identifies an index, which of a mask is the same for its views of other shapes."""
    storage, offset, shape, strides, version = identity_of(index)
    if is_mask(index) and index.is_contiguous():
        shape, strides = (index.numel(),), (1,)
    return storage, offset, shape, strides, version


def _flattened(shape: Sequence[int], rows: Along, covered: range) -> Along | None:
    """Return where rows are along the one dimension that neighbouring dimensions of a shape are together.

    Rows along dimension 0 of [4, 6] are along the 24 elements with 6 of each; along dimension 1 they begin anew 4 times, so None.
    """
    if math.prod(shape[covered.start : rows.dim]) > 1:
        return None
    behind = math.prod(shape[rows.dim + 1 : covered.stop])
    return Along(covered.start, rows.inner * behind, rows.start)


def _unflattened(shape: Sequence[int], rows: Along, covered: range) -> Along | None:
    """Return where rows along the one dimension of `_flattened` are in a shape; None if they are along several of its dimensions.

    In [4, 6], rows of 6 of the 24 elements are along dimension 0, and rows of 12 too, with 2 positions each; rows of 4 are along both.
    """
    for dim in covered:
        behind = math.prod(shape[dim + 1 : covered.stop])
        if rows.inner % behind == 0:
            return Along(dim, rows.inner // behind, rows.start)
        if shape[dim] > 1:
            return None
    return None


def _note_constant(call: Call, index: Tensor, rows: Along, covered: range) -> None:
    """Report an index that is the same whatever the data: it chooses rows by their places."""
    if call.known.of(index) is None and index.dim() and not _counts(call, index):
        call.on_constant(index, rows.dim - covered[0] if is_mask(index) else 0, 1, call.where)


def _counts(call: Call, index: Tensor) -> bool:
    """Return whether an index is 0, 1, 2, ..., whatever the data."""
    values = None if call.known.of(index) is not None else call.value_of(index)
    return values is not None and values.flatten().tolist() == list(range(values.numel()))


def write_rows_back(call: Call) -> Iterator[Dependence]:
    """Rule of index_put and index_add: rows that were picked by the same index return to their places."""
    (operands,), (place, covers) = dimension_maps.write_at_indices(call), _index_coverage(call)
    (target, _), (source, places), *_ = operands
    of_target, of_source = call.known.of(target), call.known.of(source)
    indices = [index for index, _ in covers]
    lies_there = isinstance(of_source, Along) and of_source.dim != NO_DIM and places[of_source.dim] == MOVED
    is_aligned = lies_there and len(covers) == 1 and covers[0][0].dim() == source.dim() == 1
    if _share_positions(call, range(source.dim()), indices, source if is_aligned else None):
        yield Mixed(call.text, shown=True)
        return
    if isinstance(of_source, Along) and lies_there:
        is_one = len(covers) == 1 and (is_mask(covers[0][0]) or covers[0][0].dim() == 1)
        yield _restore_rows(call, target, place, of_source, *covers[0]) if is_one else Mixed(call.text, shown=False)
        return

    def moved(at: int, rows: Along) -> Along | Mixed:
        if at == 0:
            for index, covered in covers:
                if rows.dim in covered:
                    _note_constant(call, index, rows, covered)
        return rows if at == 0 or rows.dim == NO_DIM else Mixed(call.text, shown=False)

    result = map_dependence(call, operands, moved)
    if of_source is None and isinstance(of_target, Along) and any(of_target.dim in covered for _, covered in covers):
        for dim, to in enumerate(places):
            if to == MOVED and source.shape[dim] > 1:  # which row gets which of its elements, the number of rows says
                call.on_constant(source, dim, 1, call.where)
    yield result


def scatter(call: Call) -> Iterator[Dependence]:
    """Rule of scatter and its kin: along the dimension of rows, the values of the index say whether several write to one position."""
    arguments = bind_arguments(call)
    dim, index = arguments["dim"] % max(arguments["index"].dim(), 1), arguments["index"]
    is_shared = _share_positions(call, [dim], [index], None)
    for operands in MAPS[call.func.overloadpacket](call):
        yield Mixed(call.text, shown=True) if is_shared else map_dependence(call, operands)


def _restore_rows(call: Call, target: Tensor, place: int, source: Along, index: Tensor, covered: range) -> Dependence:
    """Return the dependence of a target into which picked rows are written."""
    pick, of_target = source.start, call.known.of(target)
    restored: Along | None
    if isinstance(pick, Pick):
        restored = _unflattened(target.shape, pick.picked, covered)
        size = math.prod(target.shape[covered.start : covered.stop])
        is_restored = pick.index == _identity(index) and pick.size == size
    else:
        restored = Along(place, source.inner, pick)
        is_restored = index.numel() == target.shape[place] and _counts(call, index)
    if restored is None or not is_restored:
        return Mixed(call.text, shown=False)
    return join_dependences([restored, *([] if of_target is None else [of_target])], call.text)


def _places(call: Call) -> Iterator[Dependence]:
    """Rule of nonzero and its kin: the places that are named are used to pick rows, or not known."""
    dependences = [dependence for tensor in call.given if (dependence := call.known.of(tensor)) is not None]
    counted = bind_arguments(call)["self"] if call.func.overloadpacket is _aten.bincount else None
    if counted is not None and _share_positions(call, [0], [counted], None):
        yield Mixed(call.text, shown=True)
        return
    for _ in call.results:
        shown = next(
            (dependence for dependence in dependences if isinstance(dependence, Mixed) and dependence.shown), None
        )
        yield shown or (Mixed(call.text, shown=False) if dependences else None)


def _sort_rows(call: Call) -> Iterator[Dependence]:
    """Rule of sort: along the dimension of rows the values are mixed, and the places are a permutation to pick by."""
    for result, operands in zip(call.results, dimension_maps.along(call), strict=True):
        dependence = map_dependence(call, operands)
        is_order = result.dtype is torch.int64 and dependence == Mixed(call.text, shown=True)
        yield Mixed(call.text, shown=False) if is_order else dependence


# -- gradients of losses ---------------------------------------------------------------------------

_LIKELIHOODS = (_aten.nll_loss_backward, _aten.nll_loss2d_backward)
_MEAN = 1
"""The number of `reduction="mean"` in torch's operations."""


def _likelihood_backward(call: Call) -> Iterator[Dependence]:
    """Rule of the gradient of nll_loss [N, C, ...]: each row has that of its label, divided by the labels that count in a mean."""
    named = bind_arguments(call)
    x, labels, gradient = named["self"], named["target"], named["grad_output"]
    channel = min(1, x.dim() - 1)
    label_dims = [dim for dim in range(x.dim()) if dim != channel]
    operands: list[Operand] = [
        (x, range(x.dim())),
        (labels, label_dims),
        (gradient, label_dims if gradient.dim() else []),
    ]
    if named["weight"] is not None:
        operands.append((named["weight"], [channel]))
    if named["reduction"] == _MEAN:
        operands.append((named["total_weight"], []))
    yield map_dependence(call, operands)


def of_each_row(call: Call) -> list[Dependence] | None:
    """Return what the gradient of a mean depends on but for the number by which the mean is divided; None of another operation.

    The number is a factor that all rows share, which a sign or a norm takes away again.
    """
    if not call.func.overloadpacket.__name__.endswith("_backward") or bind_arguments(call).get("reduction") != _MEAN:
        return None
    if call.func.overloadpacket in _LIKELIHOODS:
        named = {**bind_arguments(call), "reduction": _MEAN + 1}
        return list(_likelihood_backward(replace(call, args=tuple(named.values()), kwargs={})))
    return list(assume_rows_stay(call))


ARRANGING = (
    dimension_maps.cat,
    dimension_maps.stack,
    dimension_maps.pad,
    dimension_maps.roll_or_flip,
    dimension_maps.repeat,
)
BY_MAP: dict[Map, Rule] = {
    **dict.fromkeys(ARRANGING, rearrange),
    **dict.fromkeys((dimension_maps.index, dimension_maps.index_select), pick_rows),
    dimension_maps.write_at_indices: write_rows_back,
    dimension_maps.gather: gather,
    dimension_maps.scatter_by_index: scatter,
}
"""The rule of the operations of each map that moves, picks or writes back rows."""
BY_OPERATION: dict[Any, Rule] = {
    **dict.fromkeys((_aten.nonzero, _aten.bincount, _aten.histc), _places),
    **dict.fromkeys((_aten.sort, _aten.argsort), _sort_rows),
    **dict.fromkeys(_LIKELIHOODS, _likelihood_backward),
}
"""The rule of operations that name places, and of the gradients of losses."""


def by_map(of: Map, call: Call) -> Iterator[Dependence]:
    """Rule of an operation by its map of dimensions."""
    return (map_dependence(call, operands) for operands in of(call))


def assume_rows_stay(call: Call) -> Iterator[Dependence]:
    """Rule of an operation that is to be tried: a dimension of rows stays where it is, if the result has it too."""
    rows = [(tensor, dependence) for tensor in call.given if isinstance(dependence := call.known.of(tensor), Along)]
    alike = {dependence for _, dependence in rows}
    for result, unknown in zip(call.results, nothing_known(call), strict=True):
        along = next(iter(alike)) if len(alike) == 1 else None
        fits = (
            along is not None
            and along.dim != NO_DIM
            and all(
                along.dim < result.dim() and result.shape[along.dim] == tensor.shape[along.dim] for tensor, _ in rows
            )
        )
        mixed = any(isinstance(call.known.of(tensor), Mixed) for tensor in call.given)
        yield along if fits and not mixed else unknown


def rule_of(func: Any) -> Rule | None:
    """Return the rule of an operation, or none."""
    packet = func.overloadpacket
    dimension_map = map_of(func) or DECLARED.get(packet)
    if packet in BY_OPERATION or dimension_map is None:
        return BY_OPERATION.get(packet)
    return BY_MAP.get(dimension_map) or functools.partial(by_map, dimension_map)


DECLARED: dict[Any, Map] = {}
"""Maps that libraries have stated by `independent`."""


@calls.checked
def independent(op: Any, *, along: int) -> None:
    """State that an operation works on each position along one dimension of its tensors by itself.

    The statement is used where samples are split over ranks or micro-batches, and is tried on the first batch of a run.

    Args:
        op: an operation of `torch.ops`, such as `torch.ops.mylib.scan`, with or without the name of an overload.
        along: the dimension, the same for every tensor that the operation takes and returns.
    """
    DECLARED[getattr(op, "overloadpacket", op)] = along_dimension(along)
