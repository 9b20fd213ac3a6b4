"""What operations do with dimensions: the one table by which samples, tokens and the features that tp cuts are followed.

A map says of one call, for each result, which dimension of an operand becomes which dimension of the result:

    elementwise            aligned from the right, as broadcasting does
    sum, softmax, norms    dimensions that are kept become themselves, those along which is reduced are SUMMED
    x W                    rows of x become rows of the result, columns of W its columns, and the inner ones are SUMMED
    groups of channels     a position depends on all those of its block, and becomes the positions of another `Blocks`
    cat, roll, pad, x[i]   positions along the dimension are MOVED to others

A map reads shapes, dtypes and numbers alone, so that it serves meta tensors (`calls.mapped`, for samples and tokens) and
their descriptions (`unit_rules.py`) alike. What an axis knows beside it, it adds itself: rows that are moved by
a known number or picked and written back, and sums of which each rank has a summand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from samestep.tracing.batch_norms import OPERATIONS as BATCH_NORMS
from samestep.tracing.meta_tensors import arguments, is_mask

_aten = torch.ops.aten

SUMMED = -2
"""Target of a dimension along which is summed, sorted or compared."""
MOVED = -3
"""Target of a dimension whose positions go elsewhere: beside others, shifted, turned, repeated, or picked by values."""


class Blocks(NamedTuple):
    """Target of a dimension of which each `each` positions side by side become `gives` positions along `dim`."""

    dim: int
    each: int
    gives: int


Computation = Any
"""A call of an operation: `func`, `args`, `kwargs`, `results`, and `given`, the tensors among its arguments, of which a map
reads shapes and dtypes."""
Target = int | Blocks
Operand = tuple[Any, Sequence[Target]]
"""A tensor, and for each of its dimensions what it becomes."""
Map = Callable[[Computation], Iterable[Sequence[Operand]]]
"""Returns for each result of a call its operands."""


def bind_arguments(call: Computation) -> dict[str, Any]:
    """Return all arguments of a call by name, with their defaults."""
    return arguments(call.func, call.args, call.kwargs)


def broadcast(tensor: Any, result: Any) -> Operand:
    """Return an operand whose dimensions are aligned from the right with those of a result."""
    return tensor, range(len(result.shape) - len(tensor.shape), len(result.shape))


# -- element by element, and sums ------------------------------------------------------------------


def elementwise(call: Computation) -> Iterator[list[Operand]]:
    """Map of operations on aligned elements."""
    for result in call.results:
        yield [broadcast(tensor, result) for tensor in call.given if len(tensor.shape) <= len(result.shape)]


def copy_into(call: Computation) -> Iterator[list[Operand]]:
    """Map of copy_(self, source): what self was is overwritten."""
    yield [broadcast(call.args[1], call.results[0])]


def _look_up(call: Computation) -> Iterator[list[Operand]]:
    """Map of operations that hold each element of one tensor against all of another."""
    first, *others = call.given
    yield [broadcast(first, call.results[0]), *((other, [SUMMED] * len(other.shape)) for other in others)]


def _of_a_triangle(call: Computation) -> Iterator[list[Operand]]:
    """Map of tril and triu, which treat positions along the last two dimensions differently."""
    (x,), size = call.given, len(call.results[0].shape)
    yield [(x, [*range(size - 2), MOVED, MOVED])]


def along(call: Computation) -> Iterator[list[Operand]]:
    """Map of sums, norms, sorts and scans along dimensions."""
    first, *others = call.given
    size, chosen = len(first.shape), _dims_of_sum(call, first)
    for result in call.results:
        keeps_dims, targets = len(result.shape) == size, []
        for dim in range(size):
            place = dim if keeps_dims else dim - sum(summed < dim for summed in chosen)
            targets.append(SUMMED if dim in chosen else place)
        yield [
            (first, targets),
            *(broadcast(other, result) for other in others if len(other.shape) <= len(result.shape)),
        ]


def _dims_of_sum(call: Computation, x: Any) -> set[int]:
    arguments, size = bind_arguments(call), len(x.shape)
    dims = arguments.get("dim")
    if "normalized_shape" in arguments:
        dims = range(-len(arguments["normalized_shape"]), 0)
    chosen: Iterable[int] = [dims] if isinstance(dims, int) else dims or range(size)
    return {dim % max(size, 1) for dim in chosen}


def _within(call: Computation, last: int) -> Iterator[list[Operand]]:
    """Map of operations that mix the last dimensions and keep those before: pooling, resizing, decompositions."""
    for result in call.results:
        yield [
            (x, [d if d < min(len(x.shape) - last, len(result.shape)) else SUMMED for d in range(len(x.shape))])
            for x in call.given
        ]


def _likelihood(call: Computation) -> Iterator[list[Operand]]:
    """Map of nll_loss [N, C] and nll_loss2d [N, C, ...]: a mean is that of the labels that count, those of all samples."""
    arguments = bind_arguments(call)
    x, labels, weight = arguments["self"], arguments["target"], arguments["weight"]
    channel = min(1, len(x.shape) - 1)
    for result in call.results:
        is_each = result is call.results[0] and arguments["reduction"] == 0
        targets = [SUMMED if not is_each or dim == channel else dim - (dim > channel) for dim in range(len(x.shape))]
        yield [
            (x, targets),
            (labels, range(len(labels.shape)) if is_each else [SUMMED] * len(labels.shape)),
            *([] if weight is None else [(weight, [SUMMED])]),
        ]


# -- products --------------------------------------------------------------------------------------


def product(call: Computation) -> Iterator[list[Operand]]:
    """Map of matrix products [.., M, K] x [.., K, N], plus a tensor in addmm, addmv and baddbmm."""
    (result,), adds = call.results, call.func.overloadpacket in _ADDING
    left, right = call.args[1:3] if adds else call.args[:2]
    batch = range(max(len(left.shape) - 2, 0))
    rows = [*batch, len(batch), SUMMED] if len(left.shape) > 1 else [SUMMED]
    columns = [*batch, SUMMED, *([len(result.shape) - 1] if len(right.shape) > 1 else [])]
    yield [(left, rows), (right, columns), *([broadcast(call.args[0], result)] if adds else [])]


_ADDING = (_aten.addmm, _aten.baddbmm, _aten.addmv)
PRODUCTS = (_aten.mm, _aten.bmm, _aten.mv, _aten.dot, *_ADDING)


def attention(call: Computation) -> Iterator[list[Operand]]:
    """Map of fused attention [.., T, D]: what is summed are keys and features."""
    query, key, value, *masks = call.given
    batch = [*range(len(query.shape) - 2)]
    for result in call.results:
        others: list[Operand] = [(operand, [*batch, SUMMED, SUMMED]) for operand in (key, value)]
        others += [(mask, [*broadcast(mask, result)[1][:-1], SUMMED]) for mask in masks]
        yield [(query, [*batch, len(batch), SUMMED]), *others]


def _convolution(call: Computation) -> Iterator[list[Operand]]:
    """Map of convolutions [N, C, ...]: channels of a group are summed, positions too unless the kernel has one."""
    (result,), arguments = call.results, bind_arguments(call)
    x, weight, bias, groups = (arguments[name] for name in ("input", "weight", "bias", "groups"))
    is_pointwise = {*weight.shape[2:], *arguments["stride"]} == {1} and not any(arguments["padding"])
    channels = Blocks(1, x.shape[1] // groups, result.shape[1] // groups) if groups > 1 else SUMMED
    inner = 1 if arguments["transposed"] and groups == 1 else SUMMED
    kernel: list[Target] = [channels, inner] if arguments["transposed"] else [1, SUMMED]
    space = [dim if is_pointwise else SUMMED for dim in range(2, len(x.shape))]
    yield [
        (x, [0, channels, *space]),
        (weight, [*kernel, *[SUMMED] * (len(weight.shape) - 2)]),
        *([] if bias is None else [(bias, [1])]),
    ]


def _embedding(call: Computation) -> Iterator[list[Operand]]:
    table, indices = call.args[:2]
    size = len(indices.shape)
    yield [(indices, range(size)), (table, [SUMMED, size])]


def _bags(call: Computation) -> Iterator[list[Operand]]:
    """Map of embedding bags [B, D] of N items, N / B in each; bags of other sizes are those of offsets that depend on the samples."""
    table, items, offsets, *factors = call.given
    of_items = len(items.shape) == 1 and items.shape[0] % max(call.results[0].shape[0], 1) == 0
    target = [Blocks(0, items.shape[0] // call.results[0].shape[0], 1) if of_items else SUMMED]
    yield [(table, [SUMMED, 1]), (offsets, [SUMMED]), *((each, target) for each in (items, *factors))]
    for _ in call.results[1:]:  # what a backward keeps
        yield [(items, [SUMMED]), (offsets, [SUMMED])]


# -- norms of channels -----------------------------------------------------------------------------


def _by_channel(call: Computation) -> Iterator[list[Operand]]:
    """Map of batch norm: in training the statistics of a channel are those of all other dimensions."""
    arguments = bind_arguments(call)
    x, uses_batch = arguments["input"], bool(arguments.get("training", arguments.get("train", True)))
    targets = [1 if dim == 1 else SUMMED if uses_batch else dim for dim in range(len(x.shape))]
    others = [tensor for tensor in call.given if tensor is not x]
    for result in call.results:
        if len(result.shape) == len(x.shape):
            yield [(x, targets), *((other, [1]) for other in others)]
        else:
            yield [(x, [0 if to == 1 else SUMMED for to in targets]), *((other, [0]) for other in others)]


def _by_group(call: Computation) -> Iterator[list[Operand]]:
    """Map of group norm: the statistics of a group of channels are those of one sample."""
    x = call.args[0]
    others = [tensor for tensor in call.given if tensor is not x]
    for result in call.results:
        yield [
            (x, [0, *[SUMMED] * (len(x.shape) - 1)]),
            *((other, [min(1, len(result.shape) - 1)]) for other in others),
        ]


def along_dimension(dim: int) -> Map:
    """Return the map of an operation that works on each position along `dim` of all its tensors by itself."""

    def map_along(call: Computation) -> Iterator[list[Operand]]:
        for result in call.results:
            at = dim % max(len(result.shape), 1)
            pairs: list[Operand] = []
            for tensor in call.given:
                tensor_dim = dim % max(len(tensor.shape), 1)
                is_one = len(tensor.shape) > 0 and tensor.shape[tensor_dim] == result.shape[at]
                pairs.append(
                    (tensor, [at if place == tensor_dim and is_one else SUMMED for place in range(len(tensor.shape))])
                )
            yield pairs

    return map_along


# -- positions that go elsewhere -------------------------------------------------------------------


def _move_dims(x: Any, dims: Iterable[int]) -> list[Operand]:
    moved = {dim % len(x.shape) for dim in dims}
    return [(x, [MOVED if dim in moved else dim for dim in range(len(x.shape))])]


def cat(call: Computation) -> Iterator[list[Operand]]:
    """Map of cat: positions along its dimension are joined with those of other pieces."""
    size, dim = len(call.results[0].shape), bind_arguments(call)["dim"]
    yield [operand for piece in call.args[0] if len(piece.shape) == size for operand in _move_dims(piece, [dim])]


def stack(call: Computation) -> Iterator[list[Operand]]:
    """Map of stack: pieces along a new dimension."""
    size = len(call.results[0].shape)
    dim = bind_arguments(call)["dim"] % size
    yield [(piece, [at for at in range(size) if at != dim]) for piece in call.args[0]]


def pad(call: Computation) -> Iterator[list[Operand]]:
    """Map of constant padding."""
    x, pad = call.args[:2]
    yield _move_dims(x, (-1 - at // 2 for at, by in enumerate(pad) if by))


def roll_or_flip(call: Computation) -> Iterator[list[Operand]]:
    """Map of roll and flip; a roll without dimensions rolls all of them as one."""
    x, dims = call.args[0], bind_arguments(call)["dims"]
    yield _move_dims(x, dims or range(len(x.shape)))


def repeat(call: Computation) -> Iterator[list[Operand]]:
    """Map of repeat: the positions of each repetition follow those of others."""
    x, times = call.args[0], bind_arguments(call)["repeats"]
    lead = len(times) - len(x.shape)
    yield [(x, [lead + dim if times[lead + dim] == 1 else MOVED for dim in range(len(x.shape))])]


def _glu(call: Computation) -> Iterator[list[Operand]]:
    x = call.args[0]
    yield _move_dims(x, [bind_arguments(call)["dim"]])


# -- positions that values choose ------------------------------------------------------------------


def gather(call: Computation) -> Iterator[list[Operand]]:
    """Map of gather: each element of the index chooses one along a dimension of the first tensor."""
    x, index = bind_arguments(call)["self"], bind_arguments(call)["index"]
    (result,), dim = call.results, bind_arguments(call)["dim"] % max(len(x.shape), 1)
    yield [(x, [MOVED if at == dim else at for at in range(len(x.shape))]), broadcast(index, result)]


def _take(call: Computation) -> Iterator[list[Operand]]:
    """Map of take: each element of the index chooses one of all."""
    x, index = call.args[:2]
    yield [(x, [MOVED] * len(x.shape)), broadcast(index, call.results[0])]


def scatter_by_index(call: Computation) -> Iterator[list[Operand]]:
    """Map of scatter and its kin: positions along one dimension are chosen by values."""
    for result in call.results:
        size = len(result.shape)
        targets = [MOVED if at == bind_arguments(call)["dim"] % max(size, 1) else at for at in range(size)]
        yield [(tensor, targets[: len(tensor.shape)]) for tensor in call.given]


class Picks(NamedTuple):
    """The outcome of an indexing x[i, j, ...] or x[mask], for the dimensions of x: each is kept at some place, or covered by an index."""

    place: int
    """The first dimension of what is picked."""
    width: int
    """Number of its dimensions that stand for those that the indices cover."""
    indices: list[tuple[Any, range]]
    """Each index, and the dimensions of x that it covers."""
    dims: list[Target]
    """What each dimension of x becomes."""


def picks(x: Any, indices: Iterable[Any]) -> Picks:
    """Return what an indexing of x does with its dimensions; an index of None takes a dimension whole."""
    at, pairs = 0, []
    for index in indices:
        count = len(index.shape) if index is not None and is_mask(index) else 1
        if index is not None:
            pairs.append((index, range(at, at + count)))
        at += count
    covered = [dim for _, dims in pairs for dim in dims]
    width = max(1 if is_mask(index) else len(index.shape) for index, _ in pairs)
    place = covered[0] if covered == [*range(covered[0], covered[-1] + 1)] else 0
    dims, to = list[Target](), 0
    for dim in range(len(x.shape)):
        to += width if to == place else 0
        dims.append(MOVED if dim in covered else to)
        to += dim not in covered
    return Picks(place, width, pairs, dims)


def index(call: Computation) -> Iterator[list[Operand]]:
    """Map of x[i, j, ...] and x[mask]: the indexed dimensions become those of the indices."""
    x, indices = call.args[:2]
    if call.func.overloadpacket is _aten.masked_select and x.shape != indices.shape:
        raise ValueError  # a mask that is broadcast is no index
    picked = picks(x, indices if isinstance(indices, list | tuple) else [indices])
    yield [(x, picked.dims), *((positions, _places_of(positions, picked)) for positions, _ in picked.indices)]


def _places_of(index: Any, picked: Picks) -> list[Target]:
    size = len(index.shape)
    if is_mask(index):
        return [MOVED] * size
    return [picked.place + picked.width - size + dim for dim in range(size)]


def index_select(call: Computation) -> Iterator[list[Operand]]:
    """Map of index_select: the positions of an index along one dimension."""
    x, dim, index = call.args[:3]
    yield [*_move_dims(x, [dim]), (index, [dim % max(len(x.shape), 1)] * len(index.shape))]


def write_at_indices(call: Computation) -> Iterator[list[Operand]]:
    """Map of index_put, index_add and their kin: a source is written to the places that indices choose.

    A mask is aligned with the target.
    """
    arguments = bind_arguments(call)
    target = arguments["self"]
    if "indices" not in arguments:  # index_add, index_copy
        dim, index = arguments["dim"], arguments["index"]
        yield [*_move_dims(target, [dim]), *_move_dims(arguments["source"], [dim]), (index, [MOVED] * len(index.shape))]
        return
    source, picked = arguments["values"], picks(target, arguments["indices"])
    covered = {dim for _, dims in picked.indices for dim in dims}
    is_masked = len(picked.indices) == 1 and is_mask(picked.indices[0][0])
    back = {to: dim for dim, to in enumerate(picked.dims) if to != MOVED}
    beside = len(target.shape) - len(covered) + picked.width - len(source.shape)
    yield [
        (target, [MOVED if dim in covered and not is_masked else dim for dim in range(len(target.shape))]),
        (source, [back.get(beside + dim, MOVED) for dim in range(len(source.shape))]),
        *((positions, [*dims] if is_masked else [MOVED] * len(positions.shape)) for positions, dims in picked.indices),
    ]


# -- the table -------------------------------------------------------------------------------------


FILLS = {
    _aten.zeros, _aten.ones, _aten.full, _aten.empty, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.empty_strided,
    _aten.new_empty_strided, _aten.scalar_tensor, _aten.zero_, _aten.fill_, _aten.zero, _aten.fill,
}  # fmt: skip
"""Operations that make a tensor of equal elements, or of uninitialised ones."""
OVERWRITES = {_aten.copy_, _aten.zero_, _aten.fill_}
"""Operations that write all of a tensor, whatever it was."""
_ELEMENTWISE = {
    _aten.clone, _aten._to_copy, _aten.lift_fresh_copy, _aten.dropout, _aten.native_dropout, _aten.masked_fill,
    _aten.masked_fill_, _aten.contiguous, _aten.lerp, _aten.lerp_, _aten._prelu_kernel, _aten.log_sigmoid_forward,
    _aten.addcmul, _aten.addcdiv, _aten._conj_physical, _aten.bernoulli, _aten.bernoulli_, _aten.rand_like,
    _aten.randn_like, _aten.randint_like, _aten.uniform_, _aten.normal_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_, _aten.random_, _aten._standard_gamma, _aten.poisson, _aten.binomial,
}  # fmt: skip
"""Elementwise operations that torch does not tag as such; what is random is drawn as a part of the whole."""
TRIANGLES = (_aten.tril, _aten.triu, _aten.tril_, _aten.triu_)
MAPS: dict[Any, Map] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys((_aten.copy_, _aten.copy), copy_into),
    **dict.fromkeys((_aten.bucketize, _aten.isin), _look_up),
    **dict.fromkeys(TRIANGLES, _of_a_triangle),
    **dict.fromkeys(
        (
            _aten.mean, _aten.sum, _aten.amax, _aten.amin, _aten.aminmax, _aten.var, _aten.std, _aten.var_mean,
            _aten.std_mean, _aten.any, _aten.all, _aten.argmax, _aten.argmin, _aten.max, _aten.min, _aten.logsumexp,
            _aten.linalg_vector_norm, _aten.norm, _aten._softmax, _aten._log_softmax, _aten.native_layer_norm,
            _aten._fused_rms_norm, _aten.topk, _aten.kthvalue, _aten.median, _aten.nanmedian, _aten.mode, _aten.sort,
            _aten.argsort, _aten.cumsum, _aten.cumsum_, _aten.cumprod, _aten.logcumsumexp, _aten.cummax, _aten.cummin,
            _aten.prod, _aten.nansum, _aten._fft_r2c, _aten._fft_c2r, _aten._fft_c2c, _aten.count_nonzero,
        ),
        along,
    ),
    **dict.fromkeys(PRODUCTS, product),
    **dict.fromkeys((_aten.nll_loss_forward, _aten.nll_loss2d_forward), _likelihood),
    _aten.convolution: _convolution,
    _aten.embedding: _embedding,
    _aten._embedding_bag: _bags,
    **dict.fromkeys((*BATCH_NORMS, _aten.batch_norm_stats), _by_channel),
    _aten.native_group_norm: _by_group,
    **dict.fromkeys(
        (
            _aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_, _aten.scatter_reduce,
            _aten.scatter_reduce_,
        ),
        scatter_by_index,
    ),
    _aten.gather: gather,
    _aten.take: _take,
    _aten.cat: cat,
    _aten.stack: stack,
    _aten.constant_pad_nd: pad,
    **dict.fromkeys((_aten.roll, _aten.flip), roll_or_flip),
    _aten.repeat: repeat,
    _aten.glu: _glu,
    **dict.fromkeys((_aten.index, _aten._unsafe_index, _aten.masked_select), index),
    _aten.index_select: index_select,
    **dict.fromkeys(
        (
            _aten.index_put, _aten.index_put_, _aten._unsafe_index_put, _aten.index_add, _aten.index_add_,
            _aten.index_copy, _aten.index_copy_, _aten.index_reduce, _aten.index_reduce_,
        ),
        write_at_indices,
    ),
    **dict.fromkeys(
        (
            _aten.linalg_inv_ex, _aten.linalg_cholesky_ex, _aten.linalg_solve_triangular, _aten._linalg_svd,
            _aten._linalg_eigh, _aten.linalg_qr, _aten.linalg_lu_factor_ex, _aten._linalg_det, _aten.triangular_solve,
            _aten.cholesky_inverse, _aten._linalg_slogdet, _aten.pixel_shuffle, _aten.pixel_unshuffle,
        ),
        functools.partial(_within, last=2),
    ),
}  # fmt: skip
"""The map of each operation that has one of its own."""

_SPATIAL = ("pool", "upsample", "reflection_pad", "replication_pad", "im2col", "col2im", "grid_sampler")


def is_elementwise(func: Any) -> bool:
    """Return whether an operation works element by element on aligned operands."""
    return torch.Tag.pointwise in func.tags or MAPS.get(func.overloadpacket) in (elementwise, copy_into)


def map_of(func: Any) -> Map | None:
    """Return the map of an operation: that of the operation, that of its kind, or none."""
    packet = func.overloadpacket
    if packet in MAPS:
        return MAPS[packet]
    if torch.Tag.pointwise in func.tags:
        return elementwise
    name: str = packet.__name__
    if any(word in name for word in _SPATIAL):
        return functools.partial(_within, last=next((n for n in (1, 2, 3) if f"{n}d" in name), 2))
    return None


def operands_of(call: Computation) -> list[Sequence[Operand]] | None:
    """Return for each result of a call its operands; None without a map, or where it does not foresee this form."""
    rule = map_of(call.func)
    try:
        return None if rule is None else [*rule(call)]
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def place_of(dims: Sequence[Target], dim: int) -> int | None:
    """Return which dimension of an operand becomes this one of a result."""
    return next((at for at, to in enumerate(dims) if (to.dim if isinstance(to, Blocks) else to) == dim), None)
