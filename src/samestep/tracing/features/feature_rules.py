"""Rules of operations: the units of each operation's results, or why it does not compute each unit by itself.

A rule raises a `MixesError` that names the module, the operation and the weights whose outputs it mixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from samestep.models.spec import is_below
from samestep.tracing.features.feature_units import MixesError, UnitDim, UnitFlow, UnitRows, met_by, named, place
from samestep.tracing.operation_trial import Given, RowsAlong, try_apart
from samestep.tracing.operations import Operation, View

_aten = torch.ops.aten

_Rule = Callable[[UnitFlow, Operation], Iterator[UnitDim | None]]


def _joined(a: UnitDim | None, b: UnitDim | None, op: Operation) -> UnitDim | None:
    """Return the units of a result of two operands with these units.

    Raises:
        MixesError: they are along different dimensions.
    """
    if a is None or b is None:
        return a or b
    sources = a.sources | b.sources
    if (a.dim, a.outer) != (b.dim, b.outer):
        raise MixesError(f"{place(op)} computes {op.name} across {named(sources)}: their units are in other dimensions")
    finer = a if a.units >= b.units else b
    coarser = b if finer is a else a
    if finer.units % coarser.units:
        raise MixesError(f"{place(op)} computes {op.name} across {named(sources)}: their units do not match")
    return replace(finer, sources=sources)


def _broadcast(flow: UnitFlow, op: Operation, views: list[View], dims: int) -> UnitDim | None:
    """Return the units of operands that are broadcast to a tensor of `dims` dimensions.

    Raises:
        MixesError: they are not aligned, or a whole operand tells the units apart.
    """
    total: UnitDim | None = None
    for view in views:
        found = flow.along(view, op)
        if found is not None:
            total = _joined(total, replace(found, dim=found.dim + dims - len(view.shape)), op)
    for view in views:
        if total is not None and flow.along(view, op) is None:
            flow.check_whole(view, total.dim - dims + len(view.shape), total, op)
    return total


def pointwise(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of an operation element by element, of aligned operands."""
    partial = [view for view in op.given if flow.states.get(view.storage) == "partial"]
    if partial:
        _check_linear(flow, op, partial)
        for view in op.results:
            flow.states[view.storage] = "partial"
        return
    for view in op.results:
        yield _broadcast(flow, op, op.given, len(view.shape))


def _check_linear(flow: UnitFlow, op: Operation, partial: list[View]) -> None:
    """Check that partial sums are scaled, copied, or given the bias of the module that is cut by rows.

    Raises:
        MixesError: something else happens to them.
    """
    packet, others = op.func.overloadpacket, [view for view in op.given if view not in partial]
    names = [flow.weights.get(view.storage, "") for view in others]
    adds_bias = packet in (_aten.add, _aten.add_) and others and all(name == f"{op.where}.bias" for name in names)
    scales = packet in _LINEAR and len(partial) == 1 and not any(view.takes_gradient for view in others)
    is_divisor = packet in (_aten.div, _aten.div_) and op.args[0] not in partial
    if not adds_bias and (not scales or is_divisor):
        raise MixesError(f"{place(op)} computes {op.name} on sums of which each rank has a summand")


def _dims_of(op: Operation, size: int) -> list[int]:
    """Return the dimensions along which an operation computes; without any, all of them."""
    schema = [one.name for one in op.func._schema.arguments]
    named = dict(zip(schema, op.args, strict=False)) | dict(op.kwargs)
    if "normalized_shape" in named:
        return list(range(size))[-len(named["normalized_shape"]) :]
    name = next((one for one in ("dim", "dims") if one in schema), None)
    defaults = {one.name: one.default_value for one in op.func._schema.arguments if one.has_default_value()}
    dims = named.get(name, defaults.get(name)) if name else None
    if dims is None or dims == ():
        return list(range(size))
    return [dim % size for dim in (dims if isinstance(dims, list | tuple) else (dims,))]


def _along(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of norms, sums, softmax and sorts along dimensions, which must not be that of the units."""
    tensor, *others = op.given
    found = flow.along(tensor, op)
    dims = _dims_of(op, len(tensor.shape))
    if found is None or any(flow.along(view, op) is not None for view in others):
        raise MixesError(f"{place(op)} computes {op.name} of a whole tensor with a weight that tp cuts")
    if found.dim in dims:
        raise MixesError(f"{place(op)} computes {op.name} across {named(found.sources)}")
    for view in op.results:
        kept = len(view.shape) == len(tensor.shape)
        yield found if kept else replace(found, dim=found.dim - sum(dim < found.dim for dim in dims))


def _product(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of a matrix product: units of its batch, rows or columns; a sum over units is partial."""
    adds = op.func.overloadpacket in (_aten.addmm, _aten.baddbmm)
    left, right = op.args[1:3] if adds else op.args[:2]
    result, dims = op.results[0], len(op.results[0].shape)
    a, b = flow.along(left, op), flow.along(right, op)
    inner = [one is not None and one.dim == at for one, at in ((a, dims - 1), (b, dims - 2))]
    if any(inner):
        _check_sum(flow, op, a if inner[0] else None, b if inner[1] else None)
        if (
            adds
            and flow.weights.get(op.args[0].storage, "") != f"{op.where}.bias"
            and flow.states.get(op.args[0].storage) != "uniform"
        ):
            raise MixesError(f"{place(op)} adds a tensor to sums of which each rank has a summand")
        flow.states[result.storage] = "partial"
        return
    total = _joined(a, b, op)
    if total is not None and total.dim == 0 and dims == 3:
        for view, found in ((left, a), (right, b)):
            if found is None:
                flow.check_whole(view, 0, total, op)
    if adds:
        total = _added(flow, op, total, dims)
    yield total


def _added(flow: UnitFlow, op: Operation, total: UnitDim | None, dims: int) -> UnitDim | None:
    """Return the units of a product and of the tensor that is added to it."""
    added, first = op.args[0], dims - len(op.args[0].shape)
    found = flow.along(added, op)
    total = _joined(total, None if found is None else replace(found, dim=found.dim + first), op)
    if found is None and total is not None:
        flow.check_whole(added, total.dim - first, total, op)
    return total


def _check_sum(flow: UnitFlow, op: Operation, a: UnitDim | None, b: UnitDim | None) -> None:
    """Check that a sum over units belongs to a module that is cut by rows, and that both factors have these units.

    Raises:
        MixesError: it does not, or they do not.
    """
    known = a or b
    assert known is not None
    row = next((path for path, style in flow.styles.items() if style == "row" and is_below(op.where, path)), None)
    if row is None or a is None or b is None:
        side = (
            "by a weight that every rank has whole"
            if b is None
            else "of a tensor that every rank has whole"
            if a is None
            else ""
        )
        raise MixesError(f"{place(op)} sums over {named(known.sources)} {side}".rstrip())
    if a.outer != b.outer:
        raise MixesError(f"{place(op)} sums over {named(a.sources)}: their units are in other places than the weight's")
    units = max((flow.groups[name] for name in a.sources), default=a.units)
    for name in b.sources:
        flow.groups[name] = math.gcd(flow.groups[name], math.lcm(units, a.units) if a.units % units == 0 else a.units)


def _embedding(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    weight, tokens = op.args[:2]
    found, picked = flow.along(weight, op), flow.along(tokens, op)
    if found is not None and picked is not None:
        raise MixesError(f"{place(op)} looks up {named(found.sources)} by {named(picked.sources)}")
    if found is not None and found.dim == 0:
        if flow.styles.get(op.where) != "vocab":
            raise MixesError(f"{place(op)} looks up rows of {named(found.sources)} and is not planned as 'vocab'")
        flow.states[op.results[0].storage] = "partial"
        return
    yield picked if found is None else replace(found, dim=len(op.results[0].shape) - 1)


def _glu(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of a gated unit, whose halves along a dimension must be weights of their own, cut each by itself."""
    tensor = op.args[0]
    found, dim = flow.along(tensor, op), (op.args[1] if len(op.args) > 1 else -1) % len(tensor.shape)
    assert found is not None
    if found.dim == dim and found.outer % 2:
        raise MixesError(f"{place(op)} computes {op.name} across {named(found.sources)}", found.sources, 2)
    yield replace(found, outer=found.outer // 2) if found.dim == dim else found


def _cat(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of tensors put side by side along a dimension, which must not be that of the units."""
    stacks = op.func.overloadpacket is _aten.stack
    views, dims = [view for view in op.args[0] if stacks or view.numel], len(op.results[0].shape)
    dim = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % dims
    total: UnitDim | None = None
    for view in views:
        found = flow.along(view, op)
        if found is not None:
            total = _joined(total, replace(found, dim=found.dim + (stacks and found.dim >= dim)), op)
    assert total is not None
    if not stacks and total.dim == dim:
        raise MixesError(f"{place(op)} puts tensors beside {named(total.sources)}")
    for view in views:
        if flow.along(view, op) is None:
            flow.check_whole(view, total.dim - (stacks and total.dim > dim), total, op)
    yield total


def _moved(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of padding, rolling and flipping, along other dimensions than that of the units."""
    tensor = op.args[0]
    found = flow.along(tensor, op)
    assert found is not None
    size = len(tensor.shape)
    if op.func.overloadpacket is _aten.constant_pad_nd:
        pads = op.args[1]
        moved = [size - 1 - at // 2 for at, pad in enumerate(pads) if pad]
    else:
        moved = _dims_of(op, size)
    if found.dim in moved:
        raise MixesError(f"{place(op)} moves {named(found.sources)} by {op.name}")
    yield found


def _repeat(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    tensor, times = op.args[:2]
    found = flow.along(tensor, op)
    assert found is not None
    dim = found.dim + len(times) - len(tensor.shape)
    if times[dim] != 1:
        raise MixesError(f"{place(op)} repeats {named(found.sources)} as a whole")
    yield replace(found, dim=dim)


def _index(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of elements picked by whole indices along other dimensions than that of the units."""
    tensor, indices = op.args[:2]
    found = flow.along(tensor, op)
    chosen = [dim for dim, index in enumerate(indices) if index is not None]
    picks = [index for index in indices if index is not None]
    side_by_side = chosen == list(range(chosen[0], chosen[0] + len(chosen)))
    if found is None or found.dim in chosen or not side_by_side or any(flow.along(pick, op) for pick in picks):
        raise MixesError(f"{place(op)} picks among {named(found.sources if found else ())}")
    added = max(len(pick.shape) for pick in picks)
    yield replace(found, dim=found.dim if found.dim < chosen[0] else found.dim - len(chosen) + added)


def _index_select(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    tensor, dim, index = op.args[:3]
    found = flow.along(tensor, op)
    if found is None or found.dim == dim % len(tensor.shape) or flow.along(index, op) is not None:
        raise MixesError(f"{place(op)} picks among {named(found.sources if found else ())}")
    yield found


def _gather(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of elements picked from or put into places along a dimension, which must not be that of the units."""
    dims = len(op.results[0].shape)
    total = _broadcast(flow, op, [view for view in op.given if len(view.shape) == dims], dims)
    if total is None or total.dim == op.args[1] % dims:
        raise MixesError(f"{place(op)} computes {op.name} across {named(total.sources if total else ())}")
    yield total


def _attention(flow: UnitFlow, op: Operation) -> None:
    """An attention: queries, keys, values and mask of each head by themselves."""
    query, key, value = op.args[:3]
    masks = [view for view in op.args[3:] if isinstance(view, View)]
    dims = len(query.shape)
    total: UnitDim | None = None
    for view in (query, key, value):
        total = _joined(total, flow.along(view, op), op)
    if total is None:
        if any(flow.along(mask, op) for mask in masks):
            raise MixesError(f"{place(op)} masks whole heads by {named(())}")
        return
    if total.dim >= dims - 2:
        what = "features of heads or tokens" if dims > 3 else "features"
        raise MixesError(
            f"{place(op)} attends across {named(total.sources)}: a rank would hold {what}, not whole heads"
        )
    for view in (query, key, value):
        if flow.along(view, op) is None:
            flow.check_whole(view, total.dim, total, op)
    _broadcast(flow, op, [query, *masks], dims)
    queries = flow.along(query, op)
    flow.states[op.results[0].storage] = "uniform"
    flow.learn(op.results[0], replace(queries or total, sources=total.sources), op)


def _left(flow: UnitFlow, op: Operation) -> None:
    """The end of a module's forward, where `reduce` and `gather_last` make partial and cut tensors whole."""
    style = flow.styles.get(op.where)
    for view in op.results:
        state = flow.states.get(view.storage)
        if style in ("row", "vocab") and state == "partial":
            flow.states[view.storage] = None
        elif style == "row":
            raise MixesError(f"{op.where} is planned as 'row', and its output is no sum over what tp cuts")
        elif style == "gather" and isinstance(state, UnitRows):
            found = flow.along(view, op)
            if found is None or found.dim != len(view.shape) - 1 or found.outer > 1:
                raise MixesError(
                    f"{op.where} is planned as 'gather', and its output is not cut along its last dimension"
                )
            flow.states[view.storage] = None


def _outputs(flow: UnitFlow, op: Operation) -> None:
    """The outputs of the model: its prediction first, if there is one, then all others."""
    prediction, others = op.args
    flow.prediction = None if prediction is None else flow.along(prediction, op)
    flow.others_cut = any(flow.along(view, op) is not None for view in others if view != prediction)


def tried(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of an operation that has none: its units stay where they are, if a trial on drawn values passes.

    Raises:
        MixesError: it does not.
    """
    given = [found for view in op.given if (found := flow.along(view, op)) is not None]
    total = given[0] if given else None
    for found in given:
        total = _joined(total, found, op)
    names = named(total.sources if total else ())
    if total is None or any(
        total.dim >= len(view.shape) or view.shape[total.dim] != total.outer * total.inner * total.units
        for view in op.results
    ):
        raise MixesError(f"{place(op)} computes {op.name} of {names}, and nothing is known of this operation")
    units = _tried_units(flow, op, op.func, op.args, total, len(op.results))
    flow.tried.append(f"{place(op)} by {op.name}")
    for name in total.sources:
        flow.groups[name] = math.gcd(flow.groups[name], units)
    for _ in op.results:
        yield replace(total, units=units, inner=total.inner * total.units // units)


def _tried_units(
    flow: UnitFlow, op: Operation, compute: Any, args: tuple[Any, ...], total: UnitDim, num_results: int
) -> int:
    """Return the largest number of units that a trial shows to be computed apart, forward and backward.

    Raises:
        MixesError: there is none.
    """
    for units in (n for n in range(total.units, 1, -1) if total.units % n == 0):

        def given(view: View, units: int = units) -> Given:
            found = flow.along(view, op)
            if found is None and view.shape and any(view.storage == result.storage for result in op.results):
                found = total  # it is written
            rows = None if found is None else RowsAlong(found.dim, found.inner * found.units // units, units)
            return Given(view.shape, view.dtype, view.takes_gradient, rows, values=view.values)

        results = [RowsAlong(total.dim, total.inner * total.units // units, units)] * num_results
        named_args = tuple(sorted((name, _with_given(value, given)) for name, value in op.kwargs.items()))
        if try_apart(compute, _with_given(args, given), named_args, results) == "same":
            return units
    name = compute.__self__.__name__ if op.func == "function" else op.name
    raise MixesError(
        f"{place(op)} computes {name} of {named(total.sources)}, and on a part of it, it does not compute that part of the "
        "whole"
    )


def _with_given(value: Any, given: Callable[[View], Given]) -> Any:
    """Return an argument with a description in the place of its tensors."""
    if isinstance(value, View):
        return given(value)
    return tuple(_with_given(item, given) for item in value) if isinstance(value, tuple) else value


def _function(flow: UnitFlow, op: Operation) -> None:
    """A custom Function of autograd: its operations have been followed, and its backward is tried."""
    given = [flow.along(view, op) for view in op.given]
    results = [flow.along(view, op) for view in op.results]
    known = [one for one in results if one is not None]
    if not any(given):
        return
    if len(known) < len(results) or not known:
        raise MixesError(
            f"{place(op)} computes {op.args[0].__self__.__name__} of {named(met_by(flow, op))}: its backward is not known"
        )
    units = _tried_units(flow, op, op.args[0], op.args[1:], known[0], len(known))
    for name in known[0].sources:
        flow.groups[name] = math.gcd(flow.groups[name], units)
    flow.tried.append(f"{place(op)} by the gradient of {op.args[0].__self__.__name__}")


EVENTS: dict[str, Callable[[UnitFlow, Operation], None]] = {
    "attention": _attention, "function": _function, "left": _left, "outputs": _outputs,
}  # fmt: skip

FILLS = {
    _aten.zeros, _aten.ones, _aten.full, _aten.empty, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.empty_strided,
    _aten.new_empty_strided, _aten.scalar_tensor, _aten.fill_, _aten.zero_,
}  # fmt: skip
"""Operations that make a tensor of equal elements, or of uninitialised ones."""
COPIES = {
    _aten.clone, _aten._to_copy, _aten.copy_, _aten.lift_fresh_copy, _aten.native_dropout, _aten.bernoulli_,
    _aten.bernoulli, _aten.rand_like, _aten.randn_like, _aten.randint_like, _aten.uniform_, _aten.normal_,
    _aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_, _aten.random_,
}  # fmt: skip
"""Operations element by element that torch does not tag as such; what is random is drawn as a part of the whole."""
_LINEAR = {_aten.mul, _aten.mul_, _aten.div, _aten.div_, _aten.neg, _aten.clone, _aten._to_copy}
"""Operations that may come before a sum over ranks as well as after it."""
RULES: dict[Any, _Rule] = {
    **dict.fromkeys(
        (
            _aten.mean, _aten.sum, _aten.amax, _aten.amin, _aten.aminmax, _aten.var, _aten.std, _aten.var_mean,
            _aten.std_mean, _aten.any, _aten.all, _aten.argmax, _aten.argmin, _aten.max, _aten.min, _aten.logsumexp,
            _aten.linalg_vector_norm, _aten._softmax, _aten._log_softmax, _aten.native_layer_norm, _aten.topk,
            _aten._fused_rms_norm, _aten.sort, _aten.argsort, _aten.cumsum, _aten.cumprod, _aten.prod, _aten.median,
            _aten.kthvalue, _aten.logcumsumexp, _aten.nansum, _aten.norm,
        ),
        _along,
    ),
    **dict.fromkeys((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm), _product),
    **dict.fromkeys((_aten.cat, _aten.stack), _cat),
    **dict.fromkeys((_aten.constant_pad_nd, _aten.roll, _aten.flip), _moved),
    **dict.fromkeys(
        (_aten.gather, _aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_, _aten.scatter_reduce), _gather
    ),
    _aten.embedding: _embedding,
    _aten.glu: _glu,
    _aten.repeat: _repeat,
    _aten.index: _index,
    _aten.index_select: _index_select,
}  # fmt: skip
