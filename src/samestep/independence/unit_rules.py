"""The units of each operation's results, or why it does not compute each unit by itself.

What an operation does with dimensions is stated in `dimension_maps.py`; these rules add what units need: sums of which each
rank has a summand, whole operands that distinguish units, weights that are joined along a dimension, and the trial of an
operation without a map. A rule raises a `MixesError` that names the module, the operation and the weights whose outputs it
mixes. `unit_walk.py` applies them to a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from samestep.independence import dimension_maps
from samestep.independence.dependence import Rows
from samestep.independence.dimension_maps import MOVED, SUMMED, Blocks, Operand, Target, operands_of
from samestep.independence.feature_units import MixesError, UnitDim, UnitFlow, cut_weights_of, describe_sources, place
from samestep.independence.operation_trial import Given, RowsAlong, try_apart
from samestep.models.spec import is_below
from samestep.tracing.operations import LOOKED, Operation, View
from samestep.trees import fold

_aten = torch.ops.aten

_Rule = Callable[[UnitFlow, Operation], Iterator[UnitDim | None]]


def by_map(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of an operation by its map of dimensions; one without is tried.

    Raises:
        MixesError: it does not compute each unit by itself.
    """
    operand_lists = operands_of(op)
    if operand_lists is None or len(operand_lists) != len(op.results):
        yield from try_units(flow, op)
        return
    for view, operands in zip(op.results, operand_lists, strict=True):
        yield _map_units(flow, op, view, operands)


def _map_units(flow: UnitFlow, op: Operation, result: View, operands: Sequence[Operand]) -> UnitDim | None:
    """Return the units of a result from the dimensions that its operands become.

    Raises:
        MixesError: units are summed over or moved, operands are not aligned, or a whole one distinguishes the units.
    """
    total: UnitDim | None = None
    all_operands = [*operands]
    if op.writes and result.storage not in {view.storage for view, _ in operands}:
        all_operands.append(dimension_maps.broadcast(result, result))  # what is not overwritten
    for view, dims in all_operands:
        unit_dim = flow.along(view, op)
        if unit_dim is not None:
            total = _join_units(total, _become(unit_dim, dims[unit_dim.dim], op), op)
    if total is None:
        return None
    for view, dims in all_operands:
        at = dimension_maps.place_of(dims, total.dim)
        if at is not None and flow.along(view, op) is None:
            flow.check_whole(view, at, total, op)
    if result.shape[total.dim] != total.units * total.inner * total.outer:
        raise MixesError(f"{place(op)} computes {op.name} of a part of {describe_sources(total.sources)}")
    return total


def _operands(op: Operation) -> Sequence[Operand]:
    """Return the operands of the only result of an operation."""
    operand_lists = operands_of(op)
    if operand_lists is None:
        raise MixesError(f"{place(op)} computes {op.name} in an unknown form")
    return operand_lists[0]


def _become(unit_dim: UnitDim, to: Target, op: Operation) -> UnitDim:
    """Return what units along a dimension of an operand become.

    Raises:
        MixesError: they are summed over, or moved.
    """
    inner = math.lcm(unit_dim.inner, to.each if isinstance(to, Blocks) else 1)
    size = unit_dim.inner * unit_dim.units
    if to in (SUMMED, MOVED) or size % inner:
        raise MixesError(f"{place(op)} computes {op.name} across {describe_sources(unit_dim.sources)}")
    if isinstance(to, Blocks):
        return replace(unit_dim, dim=to.dim, units=size // inner, inner=inner // to.each * to.gives)
    return replace(unit_dim, dim=to)


def _join_units(a: UnitDim | None, b: UnitDim | None, op: Operation) -> UnitDim | None:
    """Return the units of a result of two operands with these units.

    Raises:
        MixesError: they are along different dimensions.
    """
    if a is None or b is None:
        return a or b
    sources = a.sources | b.sources
    coarser, finer = sorted((b, a), key=lambda unit_dim: unit_dim.units)
    are_apart = (a.dim, a.outer) != (b.dim, b.outer)
    if are_apart or finer.units % coarser.units:
        why = "are in other dimensions" if are_apart else "do not match"
        raise MixesError(f"{place(op)} computes {op.name} across {describe_sources(sources)}: their units {why}")
    return replace(finer, sources=sources)


def pointwise(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of an operation element by element, which may be linear in partial sums."""
    partial = [view for view in op.given if flow.states.get(view.storage) == "partial"]
    if not partial:
        yield from by_map(flow, op)
        return
    _check_linear(flow, op, partial)
    for view in op.results:
        flow.states[view.storage] = "partial"


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
        raise MixesError(f"{place(op)} computes {op.name} on partial sums, one summand on each rank")


def _product(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of a matrix product: a sum over units is partial."""
    (left, rows), (right, columns), *added = _operands(op)
    a, b = flow.along(left, op), flow.along(right, op)
    inner = [unit_dim is not None and dims[unit_dim.dim] == SUMMED for unit_dim, dims in ((a, rows), (b, columns))]
    if not any(inner):
        yield from by_map(flow, op)
        return
    _check_sum(flow, op, a if inner[0] else None, b if inner[1] else None)
    for view, _ in added:
        if flow.weights.get(view.storage, "") != f"{op.where}.bias" and flow.states.get(view.storage) != "uniform":
            raise MixesError(f"{place(op)} adds a tensor to partial sums, one summand on each rank")
    flow.states[op.results[0].storage] = "partial"


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
        raise MixesError(f"{place(op)} sums over {describe_sources(known.sources)} {side}".rstrip())
    if a.outer != b.outer:
        raise MixesError(
            f"{place(op)} sums over {describe_sources(a.sources)}: their units are in other places than the weight's"
        )
    units = max((flow.groups[name] for name in a.sources), default=a.units)
    for name in b.sources:
        flow.groups[name] = math.gcd(flow.groups[name], math.lcm(units, a.units) if a.units % units == 0 else a.units)


def _embedding(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of a lookup, of which each rank has a summand where the table is cut by vocabulary."""
    unit_dim = flow.along(op.args[0], op)
    if unit_dim is None or unit_dim.dim != 0:
        yield from by_map(flow, op)
    elif flow.styles.get(op.where) != "vocab" or flow.along(op.args[1], op) is not None:
        raise MixesError(
            f"{place(op)} looks up rows of {describe_sources(unit_dim.sources)} and is not planned as 'vocab'"
        )
    else:
        flow.states[op.results[0].storage] = "partial"


def _glu(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of a gated unit, whose halves along a dimension must be separate weights, each with its cut."""
    tensor = op.args[0]
    unit_dim, dim = flow.along(tensor, op), (op.args[1] if len(op.args) > 1 else -1) % len(tensor.shape)
    assert unit_dim is not None
    if unit_dim.dim == dim and unit_dim.outer % 2:
        raise MixesError(
            f"{place(op)} computes {op.name} across {describe_sources(unit_dim.sources)}", unit_dim.sources, 2
        )
    yield replace(unit_dim, outer=unit_dim.outer // 2) if unit_dim.dim == dim else unit_dim


def _write_elements(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of elements that are written to the places that a mask or whole indices choose."""
    _, (source, places), *indices = _operands(op)
    is_several = any(to == MOVED and size > 1 for to, size in zip(places, source.shape, strict=True))
    for total in by_map(flow, op):
        if total is not None and is_several and any(total.dim in dims for _, dims in indices):
            raise MixesError(f"{place(op)} writes elements one after the other into {describe_sources(total.sources)}")
        yield total


def _attention(flow: UnitFlow, op: Operation) -> None:
    """An attention: queries, keys, values and mask of each head by themselves."""
    query, *_ = op.given
    for view in op.given[:3]:
        unit_dim = flow.along(view, op)
        if unit_dim is not None and unit_dim.dim >= len(query.shape) - 2:
            what = "features of heads or tokens" if len(query.shape) > 3 else "features"
            raise MixesError(
                f"{place(op)} attends across {describe_sources(unit_dim.sources)}: a rank would hold {what}, not whole heads"
            )
    total = _map_units(flow, op, op.results[0], next(iter(dimension_maps.attention(op))))
    if total is not None:
        flow.states[op.results[0].storage] = "uniform"
        flow.learn(op.results[0], total, op)


def _leave_module(flow: UnitFlow, op: Operation) -> None:
    """The end of a module's forward, where `reduce` and `gather_last` make partial and cut tensors whole."""
    style = flow.styles.get(op.where)
    for view in op.results:
        state = flow.states.get(view.storage)
        if style in ("row", "vocab") and state == "partial":
            flow.states[view.storage] = None
        elif style == "row":
            raise MixesError(f"{op.where} is planned as 'row', and its output is not a sum over a sharded dimension")
        elif style == "gather" and isinstance(state, Rows):
            unit_dim = flow.along(view, op)
            if unit_dim is None or unit_dim.dim != len(view.shape) - 1 or unit_dim.outer > 1:
                raise MixesError(
                    f"{op.where} is planned as 'gather', and its output is not cut along its last dimension"
                )
            flow.states[view.storage] = None


def _outputs(flow: UnitFlow, op: Operation) -> None:
    """The outputs of the model: its prediction first, if there is one, then all others."""
    prediction, others = op.args
    of_prediction = None if prediction is None else flow.along(prediction, op)
    if of_prediction is not None and (of_prediction.dim, of_prediction.outer) == (len(prediction.shape) - 1, 1):
        flow.logits_of = of_prediction.sources
    unit_dims = {-1: of_prediction, **{i: flow.along(view, op) for i, view in enumerate(others) if view != prediction}}
    flow.cut_outputs = {index: units.sources for index, units in unit_dims.items() if units is not None}


def check_unseen(flow: UnitFlow, op: Operation) -> None:
    """Check that code which looks at values is given whole tensors alone: what it would do for other values is not known.

    Raises:
        MixesError: tp cuts one of them.
    """
    for view in op.given:
        state = flow.states.get(view.storage) if view.values is None else None
        if isinstance(state, Rows) or state == "partial":
            names = describe_sources(state.sources if isinstance(state, Rows) else ())
            raise MixesError(f"shapes or branches at {place(op)} depend on values, and it is given {names}")


def try_units(flow: UnitFlow, op: Operation) -> Iterator[UnitDim | None]:
    """Rule of an operation that has none: its units stay where they are, if a trial on drawn values passes.

    Raises:
        MixesError: it does not.
    """
    unit_dims = [unit_dim for view in op.given if (unit_dim := flow.along(view, op)) is not None]
    total = unit_dims[0] if unit_dims else None
    for unit_dim in unit_dims:
        total = _join_units(total, unit_dim, op)
    names = describe_sources(total.sources if total else ())
    if total is None or any(
        total.dim >= len(view.shape) or view.shape[total.dim] != total.outer * total.inner * total.units
        for view in op.results
    ):
        raise MixesError(f"{place(op)} computes {op.name} of {names}, and nothing is known of this operation")
    units = _most_separate_units(flow, op, op.func, op.args, total, op.name)
    for _ in op.results:
        yield replace(total, units=units, inner=total.inner * total.units // units)


def _most_separate_units(
    flow: UnitFlow, op: Operation, compute: Any, args: tuple[Any, ...], total: UnitDim, what: str
) -> int:
    """Return the largest number of units that a trial shows to be computed independently, forward and backward, and note the trial.

    Raises:
        MixesError: there is none.
    """
    for units in (n for n in range(total.units, 1, -1) if total.units % n == 0):

        def describe(view: Any, units: int = units) -> Any:
            if not isinstance(view, View):
                return view
            unit_dim = flow.along(view, op)
            if unit_dim is None and view.shape and any(view.storage == result.storage for result in op.results):
                unit_dim = total  # it is written
            rows = (
                None if unit_dim is None else RowsAlong(unit_dim.dim, unit_dim.inner * unit_dim.units // units, units)
            )
            return Given(view.shape, view.dtype, view.takes_gradient, rows, values=view.values)

        results = [RowsAlong(total.dim, total.inner * total.units // units, units)] * len(op.results)
        named_args = tuple(sorted((name, fold(value, describe)) for name, value in op.kwargs.items()))
        if try_apart(compute, fold(args, describe), named_args, results) == "same":
            flow.tried.append(f"{place(op)} by {what}")
            for name in total.sources:
                flow.groups[name] = math.gcd(flow.groups[name], units)
            return units
    raise MixesError(
        f"{place(op)} computes {what.rpartition(' ')[2]} of {describe_sources(total.sources)}, and on a part of it, it does not compute that "
        "part of the whole"
    )


def _function(flow: UnitFlow, op: Operation) -> None:
    """A custom Function of autograd: its operations have been followed, and its backward is tried."""
    operand_dims, results = ([flow.along(view, op) for view in views] for views in (op.given, op.results))
    if not any(operand_dims):
        return
    function, name = op.args[0], op.args[0].__self__.__name__
    if not results or (total := results[0]) is None or None in results:
        raise MixesError(
            f"{place(op)} computes {name} of {describe_sources(cut_weights_of(flow, op))}: its backward is not known"
        )
    _most_separate_units(flow, op, function, op.args[1:], total, f"the gradient of {name}")


def _hook(flow: UnitFlow, op: Operation) -> None:
    """The gradients that a hook is given: cut as their tensors are. That of a sum whose summands ranks have is whole on each."""
    for view, gradient in zip(op.given, op.results, strict=True):
        if isinstance(flow.states.get(view.storage), Rows):
            flow.learn(gradient, flow.along(view, op), op)


def _hooked(flow: UnitFlow, op: Operation) -> None:
    """The gradients that a hook returns: cut as their tensors are."""
    for view, gradient in zip(*op.args, strict=True):
        units = flow.along(view, op) if isinstance(flow.states.get(view.storage), Rows) else None
        unit_dim = flow.along(gradient, op)
        if (units is None) != (unit_dim is None) and flow.states.get(gradient.storage) != "uniform":
            raise MixesError(f"{place(op)} has a hook that does not return a gradient for each element that tp shards")
        _join_units(units, unit_dim, op)


EVENTS: dict[str, Callable[[UnitFlow, Operation], None]] = {
    "attention": _attention, "function": _function, "left": _leave_module, "outputs": _outputs,
    LOOKED: check_unseen, "hook": _hook, "hooked": _hooked,
}  # fmt: skip

_LINEAR = {_aten.mul, _aten.mul_, _aten.div, _aten.div_, _aten.neg, _aten.clone, _aten._to_copy}
"""Operations that may come before a sum over ranks as well as after it."""
_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(dimension_maps.PRODUCTS, _product),
    _aten.embedding: _embedding,
    _aten.glu: _glu,
    **dict.fromkeys((_aten.index_put, _aten.index_put_, _aten._unsafe_index_put), _write_elements),
}


def rule_of(func: Any) -> _Rule:
    """Return the rule of an operation on units or partial sums."""
    return pointwise if dimension_maps.is_elementwise(func) else _RULES.get(func.overloadpacket, by_map)
