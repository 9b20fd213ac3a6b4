"""How operations map dimensions: the rules by which dependences on rows (`independence.py`) go from operands to results.

A rule says of one call, for each result, which dimension of an operand becomes which dimension of the result:

    elementwise            aligned from the right, as broadcasting does
    sum, softmax, norms    dimensions that are kept become themselves, those along which is reduced are SUMMED
    x W                    rows of x become rows of the result, columns of W its columns, and the inner ones are SUMMED
    cat, roll, pad         positions along the dimension shift by a known number
    x[chosen]              a dimension becomes that of the picks; written back by the same picks it becomes itself again

A result with an operand whose rows lie along a SUMMED dimension is mixed. An operation without a rule is assumed to keep
a dimension of rows whose size and place its result has too, where that may be tried on real values later; else nothing is
known of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.tracing.forward import operands
from samestep.tracing.independence import NO_DIM, Along, Dependence, Dependences, Mixed, Pick, identity_of, joined

SUMMED = -2
"""The dimension of the result of a dimension along which is summed, sorted or compared."""

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a traced forward, and the dependences before it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    known: Dependences
    where: str
    """Path of the module whose code runs."""
    on_constant: Callable[[Tensor, int, int, str], None]
    """Called with a constant that has several positions along the dimension of rows, that dimension of the constant, its
    elements a row, and the path."""
    value_of: Callable[[Tensor], Tensor | None]
    """Returns the value of a tensor of integers, where it is known."""

    @property
    def text(self) -> str:
        """The module that runs and the operation, as text."""
        return f"{self.where} by {'attention' if self.func is None else self.func.overloadpacket.__name__}"

    def named(self) -> dict[str, Any]:
        """Return all arguments by name, with their defaults."""
        schema = self.func._schema.arguments
        given = {one.name: value for one, value in zip(schema, self.args, strict=False)} | self.kwargs
        return {one.name: given.get(one.name, one.default_value) for one in schema}

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [tensor for tensor in operands(*self.args, *self.kwargs.values()) if tensor.is_meta]


Operand = tuple[Tensor, Sequence[int]]
"""A tensor, and for each of its dimensions the dimension of the result."""
Rule = Callable[[Call], Iterable[Dependence]]
"""Returns the dependence of each result."""


def mapped(call: Call, given: Iterable[Operand], adds: Along | Mixed | None = None) -> Dependence:
    """Return the dependence of a result from the dimensions that its operands become."""
    parts: list[Along | Mixed] = [] if adds is None else [adds]
    constants: list[Operand] = []
    for tensor, dims in given:
        found = call.known.of(tensor)
        if found is None:
            constants.append((tensor, dims))
        elif isinstance(found, Mixed) or found.dim == NO_DIM:
            parts.append(found)
        elif dims[found.dim] == SUMMED:
            parts.append(Mixed(call.text, shown=True))
        else:
            parts.append(Along(dims[found.dim], found.inner, found.start))
    result = joined(parts, call.text)
    if isinstance(result, Along) and result.dim != NO_DIM:
        for tensor, dims in constants:
            if result.dim in dims and tensor.shape[(own := list(dims).index(result.dim))] > 1:
                call.on_constant(tensor, own, result.inner, call.where)
    return result


# -- rules -----------------------------------------------------------------------------------------


def _broadcast(tensor: Tensor, result: Tensor) -> Operand:
    return tensor, range(result.dim() - tensor.dim(), result.dim())


def elementwise(call: Call) -> Iterator[Dependence]:
    """Rule of operations on aligned elements."""
    for result in call.results:
        yield mapped(call, [_broadcast(tensor, result) for tensor in call.tensors() if tensor.dim() <= result.dim()])


def _copy(call: Call) -> Iterator[Dependence]:
    """Rule of copy_(self, source): what self was is overwritten."""
    yield mapped(call, [_broadcast(call.args[1], call.results[0])])


def _along(call: Call) -> Iterator[Dependence]:
    """Rule of sums, norms, sorts and scans along dimensions."""
    named = call.named()
    first, *others = call.tensors()
    dims = named.get("dim")
    if "normalized_shape" in named:
        dims = list(range(-len(named["normalized_shape"]), 0))
    if dims is None or dims == []:
        dims = list(range(first.dim()))
    chosen = {dim % max(first.dim(), 1) for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    for result in call.results:
        kept = result.dim() == first.dim()
        mine, at = [], 0
        for dim in range(first.dim()):
            mine.append(SUMMED if dim in chosen else dim if kept else at)
            at += dim not in chosen
        given: list[Operand] = [(first, mine)]
        given += [_broadcast(other, result) for other in others if other.dim() <= result.dim()]
        yield mapped(call, given)


def _product(call: Call) -> Iterator[Dependence]:
    """Rule of matrix products [.., M, K] x [.., K, N], plus a tensor in addmm and baddbmm."""
    (result,) = call.results
    adds = call.func.overloadpacket in (_aten.addmm, _aten.baddbmm, _aten.addmv)
    left, right = call.args[1:3] if adds else call.args[:2]
    batch = range(left.dim() - 2) if left.dim() > 1 else range(0)
    rows = [*batch, len(batch), SUMMED] if left.dim() > 1 else [SUMMED]
    columns = [*batch, SUMMED, *([result.dim() - 1] if right.dim() > 1 else [])]
    yield mapped(call, [(left, rows), (right, columns), *([_broadcast(call.args[0], result)] if adds else [])])


def _convolution(call: Call) -> Iterator[Dependence]:
    """Rule of convolutions [N, C, ...]: channels of a group are summed, positions too unless the kernel has one."""
    (result,) = call.results
    named = call.named()
    x, weight, bias = named["input"], named["weight"], named["bias"]
    is_pointwise = all(size == 1 for size in weight.shape[2:]) and all(step == 1 for step in named["stride"])
    is_pointwise = is_pointwise and not any(named["padding"])
    space = [dim if is_pointwise else SUMMED for dim in range(2, x.dim())]
    found, groups = call.known.of(x), named["groups"]
    each, gives = x.shape[1] // groups, result.shape[1] // groups
    if (
        isinstance(found, Along)
        and found.dim == 1
        and found.inner % each == 0
        and found.start == 0
        and not any(isinstance(call.known.of(one), Mixed) for one in (weight, *([] if bias is None else [bias])))
    ):  # a group of channels for each row
        inner = found.inner // each * gives
        yield mapped(call, [(weight, [1, *[SUMMED] * (weight.dim() - 1)])], Along(1, inner, 0))
        return
    given: list[Operand] = [(x, [0, SUMMED, *space]), (weight, [1, *[SUMMED] * (weight.dim() - 1)])]
    yield mapped(call, [*given, *([] if bias is None else [(bias, [1])])])


def _embedding(call: Call) -> Iterator[Dependence]:
    table, indices = call.args[:2]
    yield mapped(call, [(indices, range(indices.dim())), (table, [SUMMED, indices.dim()])])


def _by_channel(call: Call) -> Iterator[Dependence]:
    """Rule of batch norm: in training the statistics of a channel are those of all other dimensions."""
    named = call.named()
    x = named["input"]
    uses_batch = bool(named.get("training", named.get("train", True)))
    own = [1 if dim == 1 else SUMMED if uses_batch else dim for dim in range(x.dim())]
    others = [tensor for tensor in call.tensors() if tensor is not x]
    for result in call.results:
        if result.dim() == x.dim():
            yield mapped(call, [(x, own), *((other, [1]) for other in others)])
        else:
            yield mapped(call, [(x, [0 if to == 1 else SUMMED for to in own]), *((other, [0]) for other in others)])


def _by_group(call: Call) -> Iterator[Dependence]:
    """Rule of group norm: the statistics of a group of channels are those of one sample."""
    x = call.args[0]
    others = [tensor for tensor in call.tensors() if tensor is not x]
    for result in call.results:
        own = [0, *[SUMMED] * (x.dim() - 1)]
        yield mapped(call, [(x, own), *((other, [min(1, result.dim() - 1)]) for other in others)])


def _within(call: Call, last: int) -> Iterator[Dependence]:
    """Rule of operations that mix the last dimensions and keep those before: pooling, resizing, decompositions."""
    for result in call.results:
        given = []
        for tensor in call.tensors():
            kept = tensor.dim() - last
            given.append(
                (tensor, [dim if dim < kept and dim < result.dim() else SUMMED for dim in range(tensor.dim())])
            )
        yield mapped(call, given)


def _gather(call: Call) -> Iterator[Dependence]:
    """Rule of gather, scatter and their kin: positions along one dimension are chosen by values."""
    named = call.named()
    dim = named["dim"] % max(call.args[0].dim(), 1)
    for result in call.results:
        own = [SUMMED if one == dim else one for one in range(result.dim())]
        yield mapped(call, [(tensor, own[: tensor.dim()]) for tensor in call.tensors()])


def _cat(call: Call) -> Iterator[Dependence]:
    """Rule of cat: pieces with rows along its dimension fit where their rows go on counting."""
    (result,) = call.results
    pieces = [piece for piece in call.args[0] if piece.dim() == result.dim()]
    dim = call.named()["dim"] % max(result.dim(), 1)
    yield _side_by_side(call, pieces, [piece.shape[dim] for piece in pieces], dim, range(result.dim()))


def _stack(call: Call) -> Iterator[Dependence]:
    (result,) = call.results
    dim = call.named()["dim"] % result.dim()
    pieces = list(call.args[0])
    yield _side_by_side(call, pieces, [1] * len(pieces), dim, [at for at in range(result.dim()) if at != dim])


def _side_by_side(call: Call, pieces: list[Tensor], sizes: list[int], dim: int, dims: Sequence[int]) -> Dependence:
    parts: list[Along | Mixed] = []
    constants: list[Tensor] = []
    width, at = _pieces_of_a_row(call, pieces), 0
    for piece, size in zip(pieces, sizes, strict=True):
        found = call.known.of(piece)
        if found is None:
            constants.append(piece)
        elif isinstance(found, Mixed):
            parts.append(found)
        elif found.dim == NO_DIM or dims[found.dim] == dim:
            inner = width * size if found.dim == NO_DIM else found.inner
            if isinstance(found.start, int) and at % inner in range(0, inner, size if found.dim == NO_DIM else inner):
                parts.append(Along(dim, inner, (found.start - at // inner) % call.known.num_rows))
            else:
                parts.append(found if len(pieces) == 1 else Mixed(call.text, shown=False))
        else:
            parts.append(Along(dims[found.dim], found.inner, found.start))
        at += size
    result = joined(parts, call.text)
    if isinstance(result, Mixed) and not any(isinstance(part, Mixed) for part in parts):
        return Mixed(call.text, shown=False)  # rows in another order, which by itself mixes nothing
    if isinstance(result, Along) and result.dim not in (dim, NO_DIM):
        for piece in constants:
            own = list(dims).index(result.dim)
            if piece.shape[own] > 1:
                call.on_constant(piece, own, result.inner, call.where)
    return result


def _pieces_of_a_row(call: Call, pieces: list[Tensor]) -> int:
    """Return how many pieces from the first on depend on one and the same row."""
    first = call.known.of(pieces[0]) if pieces else None
    return max(1, next((at for at, piece in enumerate(pieces) if call.known.of(piece) != first), len(pieces)))


def _shifted(call: Call, dim: int, by: int) -> Dependence:
    """Return the dependence of a result whose position p along `dim` is the operand's position p - by."""
    found = call.known.of(call.args[0])
    if not isinstance(found, Along) or found.dim != dim or not by:
        return found
    if not isinstance(found.start, int) or by % found.inner:
        return Mixed(call.text, shown=False)
    return found._replace(start=(found.start - by // found.inner) % call.known.num_rows)


def _pad(call: Call) -> Iterator[Dependence]:
    x, pad = call.args[:2]
    found = call.known.of(x)
    dim = found.dim if isinstance(found, Along) else NO_DIM
    place = 2 * (x.dim() - 1 - dim)
    yield _shifted(call, dim, pad[place] if dim != NO_DIM and place < len(pad) else 0)


def _roll(call: Call) -> Iterator[Dependence]:
    named = call.named()
    shifts, dims = named["shifts"], named["dims"]
    found = call.known.of(call.args[0])
    if not dims or not isinstance(found, Along):
        yield found if not isinstance(found, Along) else Mixed(call.text, shown=False)
        return
    by = sum(s for s, d in zip(shifts, dims, strict=False) if d % call.args[0].dim() == found.dim)
    yield _shifted(call, found.dim, by)


def _flip(call: Call) -> Iterator[Dependence]:
    """Rule of flip: rows in the opposite order are not known to be of use."""
    x = call.args[0]
    found = call.known.of(x)
    is_turned = isinstance(found, Along) and found.dim in {dim % x.dim() for dim in call.named()["dims"]}
    yield Mixed(call.text, shown=False) if is_turned else found


def _repeat(call: Call) -> Iterator[Dependence]:
    (result,) = call.results
    x = call.args[0]
    found = call.known.of(x)
    if isinstance(found, Along) and found.dim != NO_DIM:
        at = found.dim + result.dim() - x.dim()
        is_whole = x.shape[found.dim] % (found.inner * call.known.num_rows) == 0
        if call.named()["repeats"][at] > 1 and not is_whole:
            yield Mixed(call.text, shown=False)
            return
    yield mapped(call, [_broadcast(x, result)])


def _index(call: Call) -> Iterator[Dependence]:
    """Rule of x[i, j, ...] and x[mask]: the indexed dimensions become those of the indices."""
    x, indices = call.args[0], list(call.args[1])
    spread = _spread(x, indices)
    if spread is None:
        yield joined([part for tensor in call.tensors() if (part := _unknown(call, tensor))], call.text)
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
    index = next(index for index, dims in given if rows.dim in dims)
    is_mask = index.dtype in (torch.bool, torch.uint8)
    if not is_mask and index.dim() == 1 and index.numel() == x.shape[rows.dim] and _counts(call, index):
        return Along(place, rows.inner, rows.start)
    if not is_mask and index.dim() != 1:
        return Mixed(call.text, shown=False)
    return Along(place, 1, Pick(identity_of(index), rows, x.shape[rows.dim]))


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


def _write_back(call: Call) -> Iterator[Dependence]:
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
    found, chosen = call.known.of(source), call.known.of(index)
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
    own = call.known.of(target)
    parts = [part for part in (moved, own) if part is not None]
    if chosen is not None:
        is_aligned = isinstance(chosen, Along) and isinstance(own, Along) and chosen.dim + covered[0] == own.dim
        parts.append(own if is_aligned and own is not None else Mixed(call.text, shown=False))
    yield joined(parts, call.text)


def _unclear_write(call: Call) -> Dependence:
    return joined([part for tensor in call.tensors() if (part := _unknown(call, tensor))], call.text)


def _index_select(call: Call) -> Iterator[Dependence]:
    x, dim, index = call.args[:3]
    dim %= max(x.dim(), 1)
    found, chosen = call.known.of(x), call.known.of(index)
    if isinstance(found, Along) and found.dim == dim:
        yield _picked(call, found, [(index, range(dim, dim + 1))], x, dim)
        return
    yield mapped(call, [(x, range(x.dim())), *([] if chosen is None else [(index, [dim])])])


def _places(call: Call) -> Iterator[Dependence]:
    """Rule of nonzero and of the order of a sort: the places that are named are used to pick rows, or not known."""
    given = [found for tensor in call.tensors() if (found := call.known.of(tensor)) is not None]
    for _ in call.results:
        shown = next((one for one in given if isinstance(one, Mixed) and one.shown), None)
        yield shown or (Mixed(call.text, shown=False) if given else None)


def _sorted(call: Call) -> Iterator[Dependence]:
    """Rule of sort: along the dimension of rows the values are mixed, and the places are a permutation to pick by."""
    for result, found in zip(call.results, _along(call), strict=True):
        is_order = result.dtype is torch.int64 and isinstance(found, Mixed) and found.where == call.text
        yield Mixed(call.text, shown=False) if is_order else found


def attention(call: Call) -> Iterator[Dependence]:
    """Rule of fused attention [.., T, D]: what is summed are keys and features."""
    query, key, value, *rest = call.tensors()
    batch = [*range(query.dim() - 2)]
    for result in call.results:
        given: list[Operand] = [(query, [*batch, len(batch), SUMMED])]
        given += [(one, [*batch, SUMMED, SUMMED]) for one in (key, value)]
        for mask in rest:
            lead = range(result.dim() - mask.dim(), result.dim())
            given.append((mask, [*lead[:-1], SUMMED]))
        yield mapped(call, given)


def _unknown(call: Call, tensor: Tensor) -> Mixed | None:
    found = call.known.of(tensor)
    if found is None or isinstance(found, Mixed):
        return found
    return Mixed(call.text, shown=False)


def nothing_known(call: Call) -> Iterator[Dependence]:
    """Rule of an operation without one: nothing is known of its results."""
    parts = [part for tensor in call.tensors() if (part := _unknown(call, tensor))]
    for _ in call.results:
        yield joined(parts, call.text)


def assumed(call: Call) -> Iterator[Dependence]:
    """Rule of an operation that is to be tried: a dimension of rows stays where it is, if the result has it too."""
    rows = [(tensor, found) for tensor in call.tensors() if isinstance(found := call.known.of(tensor), Along)]
    alike = {found for _, found in rows}
    for result, unknown in zip(call.results, nothing_known(call), strict=True):
        one = next(iter(alike)) if len(alike) == 1 else None
        fits = (
            one is not None
            and one.dim != NO_DIM
            and all(one.dim < result.dim() and result.shape[one.dim] == tensor.shape[one.dim] for tensor, _ in rows)
        )
        mixed = any(isinstance(call.known.of(tensor), Mixed) for tensor in call.tensors())
        yield one if fits and not mixed else unknown


def along_dimension(dim: int) -> Rule:
    """Return the rule of an operation that works on each position along `dim` of all its tensors by itself."""

    def rule(call: Call) -> Iterator[Dependence]:
        for result in call.results:
            at = dim % max(result.dim(), 1)
            given = []
            for tensor in call.tensors():
                own = dim % max(tensor.dim(), 1)
                is_one = tensor.dim() and tensor.shape[own] == result.shape[at]
                given.append((tensor, [at if one == own and is_one else SUMMED for one in range(tensor.dim())]))
            yield mapped(call, given)

    return rule


FILLS = {
    _aten.zeros, _aten.ones, _aten.full, _aten.empty, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.empty_strided,
    _aten.new_empty_strided, _aten.scalar_tensor, _aten.zero_, _aten.fill_,
}  # fmt: skip
"""Operations that make a tensor of equal elements, or of uninitialised ones."""
COPIES = {
    _aten.clone, _aten._to_copy, _aten.lift_fresh_copy, _aten.dropout, _aten.native_dropout, _aten.masked_fill,
    _aten.masked_fill_, _aten.tril, _aten.triu, _aten.contiguous, _aten.bucketize, _aten.lerp, _aten.lerp_,
    _aten.isin, _aten._prelu_kernel, _aten.log_sigmoid_forward, _aten.addcmul, _aten.addcdiv, _aten._conj_physical,
}  # fmt: skip
"""Elementwise operations that torch does not tag as such."""
RULES: dict[Any, Rule] = {
    **dict.fromkeys(COPIES, elementwise),
    _aten.copy_: _copy,
    _aten.copy: _copy,
    **dict.fromkeys(
        (
            _aten.mean, _aten.sum, _aten.amax, _aten.amin, _aten.aminmax, _aten.var, _aten.std, _aten.var_mean,
            _aten.std_mean, _aten.any, _aten.all, _aten.argmax, _aten.argmin, _aten.max, _aten.min, _aten.logsumexp,
            _aten.linalg_vector_norm, _aten.norm, _aten._softmax, _aten._log_softmax, _aten.native_layer_norm,
            _aten._fused_rms_norm, _aten.topk, _aten.kthvalue, _aten.median, _aten.nanmedian, _aten.mode,
            _aten.cumsum, _aten.cumsum_, _aten.cumprod, _aten.logcumsumexp, _aten.cummax, _aten.cummin, _aten.prod,
            _aten.nansum, _aten._fft_r2c, _aten._fft_c2r, _aten._fft_c2c, _aten.count_nonzero,
        ),
        _along,
    ),
    **dict.fromkeys((_aten.sort, _aten.argsort), _sorted),
    **dict.fromkeys((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot), _product),
    _aten.convolution: _convolution,
    _aten.embedding: _embedding,
    **dict.fromkeys(
        (
            _aten.native_batch_norm, _aten._native_batch_norm_legit, _aten._native_batch_norm_legit_functional,
            _aten.cudnn_batch_norm, _aten._batch_norm_with_update, _aten._batch_norm_no_update,
            _aten.miopen_batch_norm, _aten.batch_norm_stats,
        ),
        _by_channel,
    ),
    _aten.native_group_norm: _by_group,
    **dict.fromkeys(
        (
            _aten.gather, _aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_, _aten.scatter_reduce,
            _aten.scatter_reduce_,
        ),
        _gather,
    ),
    _aten.cat: _cat,
    _aten.stack: _stack,
    _aten.constant_pad_nd: _pad,
    _aten.roll: _roll,
    _aten.flip: _flip,
    _aten.repeat: _repeat,
    _aten.index: _index,
    _aten._unsafe_index: _index,
    _aten.masked_select: lambda call: _index(
        Call(call.func, (call.args[0], [call.args[1]]), {}, call.results, call.known, call.where, call.on_constant, call.value_of)
    ),
    **dict.fromkeys(
        (_aten.index_put, _aten.index_put_, _aten._unsafe_index_put, _aten.index_add, _aten.index_add_, _aten.index_copy,
         _aten.index_copy_),
        _write_back,
    ),
    _aten.index_select: _index_select,
    **dict.fromkeys((_aten.nonzero, _aten.bincount, _aten.histc), _places),
    **dict.fromkeys(
        (
            _aten.linalg_inv_ex, _aten.linalg_cholesky_ex, _aten.linalg_solve_triangular, _aten._linalg_svd,
            _aten._linalg_eigh, _aten.linalg_qr, _aten.linalg_lu_factor_ex, _aten._linalg_det, _aten.triangular_solve,
            _aten.cholesky_inverse, _aten._linalg_slogdet, _aten.pixel_shuffle, _aten.pixel_unshuffle,
        ),
        functools.partial(_within, last=2),
    ),
}  # fmt: skip
"""The rule of each operation that has one."""

_SPATIAL = ("pool", "upsample", "reflection_pad", "replication_pad", "im2col", "col2im", "grid_sampler")


def rule_of(func: Any) -> Rule | None:
    """Return the rule of an operation: its own, that of its kind, or none."""
    packet = func.overloadpacket
    if packet in RULES:
        return RULES[packet]
    if packet in DECLARED:
        return DECLARED[packet]
    if torch.Tag.pointwise in func.tags:
        return elementwise
    name: str = packet.__name__
    if any(word in name for word in _SPATIAL):
        return functools.partial(_within, last=next((n for n in (1, 2, 3) if f"{n}d" in name), 2))
    return None


DECLARED: dict[Any, Rule] = {}
"""Rules that libraries have stated by `independent`."""


def independent(op: Any, *, along: int) -> None:
    """State that an operation works on each position along one dimension of its tensors by itself.

    The statement is used where samples are split over ranks or micro-batches, and is tried on the first batch of a run.

    Args:
        op: an operation of `torch.ops`, such as `torch.ops.mylib.scan`, with or without the name of an overload.
        along: the dimension, the same for every tensor that the operation takes and returns.
    """
    DECLARED[getattr(op, "overloadpacket", op)] = along_dimension(along)
