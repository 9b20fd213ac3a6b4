"""Proof that ranks of a tensor cut compute apart: which units (heads, neurons, tokens of a vocabulary) each value holds.

Units are followed by storage. In the output [B, T, D] of a column cut, each of the D features is a unit:

    Rows(stride=1, units=D)      the element at offset o of the storage belongs to unit (o // stride) % units

A view needs no rule, since its strides say where the units are: seen as [B, T, heads, width], the same storage has units
of `width` features, and may be cut between heads only. Every operation must then compute each unit by itself:

    element by element          all operands have their units along the same dimension
    along dimensions            norms, softmax, sums, sorts: not along the units
    a product                   units of its rows, columns or batch; summed over units it is partial, until the module
                                whose weight is cut by rows has left, where `reduce` sums it over the ranks
    anything else               is refused by the name of the module and of the operation

A whole tensor that meets units must not tell them apart: a weight with an element for each unit is cut like them, and
a number for each unit that code has counted itself, as the slopes of ALiBi, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.models.spec import is_below
from samestep.tracing.operations import Operation, View

_aten = torch.ops.aten


class MixesError(Exception):
    """An operation that does not compute each unit by itself."""

    def __init__(self, reason: str, sources: Collection[str] = (), parts: int = 1) -> None:
        """Keep the weights whose output is taken apart, and the number of equal parts."""
        super().__init__(reason)
        self.sources, self.parts = sources, parts


@dataclass(frozen=True, slots=True)
class WeightCut:
    """A weight of which a rank holds a part: along `dim`, `parts` weights side by side, each cut by itself."""

    dim: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Rows:
    """The units of a storage: the element at offset o belongs to unit (o // stride) % units."""

    stride: int
    units: int
    sources: frozenset[str] = frozenset()
    """Names of the weights whose units these are."""

    @property
    def period(self) -> int:
        """Number of elements after which the units repeat."""
        return self.stride * self.units


State = Rows | Literal["uniform", "partial"] | frozenset[tuple[int, int]] | None
"""What a storage holds: units; equal elements; summands of one rank each; elements that repeat along dimensions of
these strides and sizes; or None, a tensor that every rank has whole."""


@dataclass(frozen=True, slots=True)
class Along:
    """The dimension of a view that has the units: index k belongs to unit (k // inner) % units."""

    dim: int
    units: int
    inner: int
    outer: int
    sources: frozenset[str] = frozenset()
    is_last: bool = False
    """Whether it is the last dimension of the view."""


def along(view: View, rows: Rows) -> Along | None:
    """Return the dimension of a view that has the units of its storage; None where they are not apart in one."""
    period, best = rows.period, -1
    for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        if size > 1 and 0 < stride < period and size * stride % period == 0 and (best < 0 or stride > view.strides[best]):
            best = dim
    if best < 0:
        return None
    step = view.strides[best]
    inner = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if size > 1]
    inner = [(size, stride) for size, stride in inner if stride % period and (size, stride) != (view.shape[best], step)]
    reach = view.offset % step + sum((size - 1) * stride for size, stride in inner)
    if reach >= step or view.offset % period >= step:
        return None
    outer = view.shape[best] * step // period
    is_last = best == len(view.shape) - 1
    if rows.stride % step == 0:
        return Along(best, rows.units, rows.stride // step, outer, rows.sources, is_last)
    if step % rows.stride == 0 and period % step == 0:
        return Along(best, period // step, 1, outer, rows.sources, is_last)
    return None


def _parts_in(view: View, rows: Rows) -> int:
    """Return the number of equal parts of which a view shows one; 1 if it does not."""
    for size, stride in zip(view.shape, view.strides, strict=True):
        if stride == rows.stride and 1 < size < rows.units and rows.units % size == 0 and view.offset % size == 0:
            return rows.units // size
    return 1


def part_of(view: View, rows: Rows, degree: int) -> View | None:
    """Return the view of a rank that holds one of `degree` equal parts of the units; None where there is none."""
    found = along(view, rows)
    if found is None or found.units % degree:
        return None
    shape = tuple(size // degree if dim == found.dim else size for dim, size in enumerate(view.shape))
    strides = tuple(s // degree if s >= rows.period else s for s in view.strides)
    offset = view.offset // rows.period * (rows.period // degree) + view.offset % rows.period
    return replace(view, shape=shape, strides=strides, offset=offset)


@dataclass(slots=True)
class Flow:
    """Where the units are at every operation of a forward."""

    styles: Mapping[str, str]
    """Cut style of each module, by its path."""
    weights: Mapping[int, str]
    """Name of each weight and buffer by its storage."""
    owners: Mapping[int, frozenset[str]]
    """Paths of the modules that own each trained weight, by its storage."""
    trained: frozenset[str]
    """Names of the weights, as opposed to buffers."""
    from_weights: dict[int, frozenset[str]] = field(default_factory=dict)
    """Storages made of nothing but trained weights, with the modules that own these."""
    groups: dict[str, int] = field(default_factory=dict)
    """Number of units between which each weight may be cut, by its name."""
    like: dict[str, int] = field(default_factory=dict)
    """Weights that the plan does not name, with an element for each unit: the dimension of these elements."""
    states: dict[int, State] = field(default_factory=dict)
    history: list[tuple[State, ...]] = field(default_factory=list)
    """State of each operand and result of every operation."""
    made_of: dict[int, str] = field(default_factory=dict)
    """Storages made element by element of one weight, by its name."""
    prediction: Along | None = None
    """The units of the model's prediction."""
    others_cut: bool = False
    """Whether another output has units."""

    def along(self, view: View, op: Operation) -> Along | None:
        """Return the dimension of a tensor that has units; None for a tensor without.

        Raises:
            MixesError: the tensor cannot be cut between units, or holds partial sums.
        """
        state = self.states.get(view.storage) if view.values is None else None
        if state == "partial":
            raise MixesError(f"{_place(op)} computes {op.name} on sums of which each rank has a summand")
        if not isinstance(state, Rows):
            return None
        found = along(view, state)
        if found is None:
            raise MixesError(
                f"{_place(op)} takes a part {list(view.shape)} of {_named(state.sources)}, of which a rank would hold "
                "other elements",
                state.sources,
                _parts_in(view, state),
            )
        for name in state.sources:
            self.groups[name] = math.gcd(self.groups[name], found.units)
        return found

    def check_whole(self, view: View, dim: int, found: Along, op: Operation) -> None:
        """Check that a tensor without units does not tell the units along its dimension `dim` apart.

        Raises:
            MixesError: it does.
        """
        if dim < 0 or view.shape[dim] == 1 or view.strides[dim] == 0 or self.is_constant(view, dim):
            return
        name = self.weights.get(view.storage) or self.made_of.get(view.storage, "")
        size = view.shape[dim]
        if name in self.trained and name not in self.like and found.outer == 1:
            raise _LikeError(name, view.strides[dim] if view.storage in self.weights else None, size)
        what = f"{name}, with" if name else "a tensor with"
        raise MixesError(
            f"{_place(op)} computes {op.name} of {_named(found.sources)} and {what} {size} elements of its own for what "
            "tp cuts, which every rank would hold whole"
        )

    def is_constant(self, view: View, dim: int) -> bool:
        """Return whether a tensor without units repeats its elements along a dimension."""
        if view.values is not None:
            return len(set(view.values)) == 1
        state = self.states.get(view.storage)
        return state == "uniform" or (
            isinstance(state, frozenset) and (view.strides[dim], view.shape[dim]) in state
        )

    def learn(self, view: View, found: Along | None, op: Operation) -> None:
        """Store the units of a result.

        Raises:
            MixesError: it is written into a tensor without units, or with other ones.
        """
        if found is None:
            return
        state = self.states.get(view.storage)
        rows = Rows(view.strides[found.dim] * found.inner, found.units, found.sources)
        if isinstance(state, Rows):
            held = along(view, state)
            if held is None or (held.dim, held.outer) != (found.dim, found.outer):
                raise MixesError(f"{_place(op)} writes {_named(found.sources)} into other rows of another tensor")
        elif op.writes and state != "uniform":
            raise MixesError(f"{_place(op)} writes {_named(found.sources)} into a tensor that every rank has whole")
        else:
            self.states[view.storage] = rows


class _LikeError(Exception):
    """A weight has an element for each unit: it is to be cut like them."""

    def __init__(self, name: str, stride: int | None, size: int) -> None:
        super().__init__(name)
        self.name, self.stride, self.size = name, stride, size

    def dim_of(self, weight: Tensor) -> int | None:
        """Return the dimension with the elements; None if none of it is as long."""
        places = [dim for dim, size in enumerate(weight.shape) if size == self.size]
        return next((dim for dim in places if self.stride in (None, weight.stride(dim))), None)


def _place(op: Operation) -> str:
    return op.where or "the model's own code"


def _named(sources: Iterable[str]) -> str:
    names = sorted(sources)
    return f"what tp cuts by {', '.join(names[:2])}{' and others' if len(names) > 2 else ''}" if names else "what tp cuts"


def follow(
    operations: list[Operation], model: nn.Module, styles: Mapping[str, str], cuts: Mapping[str, WeightCut]
) -> Flow:
    """Return where the units of cut weights are at every operation of a forward of the whole model.

    `styles` are those of modules, `cuts` those of weights by name; weights with an element for each unit are added.

    Raises:
        MixesError: an operation does not compute each unit by itself.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    weights = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in reversed(named)}
    cuts, owners = dict(cuts), _owners(model)
    while True:
        names = {storage: name for storage, (name, _) in weights.items()}
        flow = Flow(styles, names, owners, frozenset(name for name, _ in model.named_parameters()))
        flow.like = {name: cut.dim for name, cut in cuts.items() if _owner(name) not in styles}
        for storage, (name, tensor) in weights.items():
            if name in cuts:
                cut = cuts[name]
                flow.groups[name] = tensor.shape[cut.dim] // cut.parts
                flow.states[storage] = Rows(tensor.stride(cut.dim), flow.groups[name], frozenset({name}))
        try:
            for op in operations:
                _carry_on(flow, op)
        except _LikeError as found:
            dim = found.dim_of(model.get_parameter(found.name))
            if dim is None:
                raise MixesError(f"{found.name} is used on what tp cuts, and none of its dimensions is as long") from None
            cuts[found.name] = WeightCut(dim)
            continue
        return flow


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _owners(model: nn.Module) -> dict[int, frozenset[str]]:
    """Return the paths of the modules that own each trained weight, by its storage."""
    owners: dict[int, frozenset[str]] = {}
    for path, part in model.named_modules():
        for param in part.parameters(recurse=False):
            if param.requires_grad:
                storage = param.untyped_storage()._cdata
                owners[storage] = owners.get(storage, frozenset()) | {path}
    return owners


def _follow_weights(flow: Flow, op: Operation) -> None:
    """Record tensors that are made of nothing but weights, with the modules that own those."""
    owners = owners_in(flow, op)
    if owners and not data_in(flow, op):
        flow.from_weights |= {view.storage: owners for view in op.results if view.storage not in flow.weights}


def owners_in(flow: Flow, op: Operation) -> frozenset[str]:
    """Return the modules that own the trained weights among an operation's operands, or what is made of them."""
    storages = {view.storage for view in op.given if view.values is None}
    return frozenset(path for key in storages for table in (flow.owners, flow.from_weights) for path in table.get(key, ()))


def data_in(flow: Flow, op: Operation) -> list[View]:
    """Return an operation's operands that are no weights."""
    tables = (flow.owners, flow.from_weights, flow.weights)
    return [view for view in op.given if view.values is None and not any(view.storage in table for table in tables)]


def _carry_on(flow: Flow, op: Operation) -> None:
    """Set the units of the results of an operation."""
    before = [flow.states.get(view.storage) if view.values is None else None for view in op.given]
    if op.func not in ("left", "outputs"):
        _follow_weights(flow, op)
    if isinstance(op.func, str):
        _EVENTS[op.func](flow, op)
    else:
        _compute(flow, op)
    flow.history.append((*before, *(flow.states.get(view.storage) for view in op.results)))


def _compute(flow: Flow, op: Operation) -> None:
    packet = op.func.overloadpacket
    is_pointwise = torch.Tag.pointwise in op.func.tags or packet in _COPIES
    cut = [view for view in op.given if flow.states.get(view.storage) == "partial" or flow.along(view, op) is not None]
    if not cut:
        _without_units(flow, op, packet, is_pointwise)
        return
    if packet in FILLS:
        _filled(flow, op)
        return
    is_pointwise |= op.func._overloadname == "other"  # the larger of two tensors
    rule = _pointwise if is_pointwise else _RULES.get(packet)
    if rule is None:
        states = (flow.states.get(view.storage) for view in cut)
        units = _named({name for state in states if isinstance(state, Rows) for name in state.sources})
        raise MixesError(f"{_place(op)} computes {op.name} of {units}, and nothing is known of this operation")
    for view, found in zip(op.results, rule(flow, op), strict=False):
        flow.learn(view, found, op)


def _without_units(flow: Flow, op: Operation, packet: Any, is_pointwise: bool) -> None:
    """Follow tensors that every rank has whole: equal elements, elements that repeat, tensors made of one weight."""
    uniform = all(flow.states.get(v.storage) == "uniform" or v.numel == 1 for v in op.given if v.values is None)
    for view in op.results:
        if packet in FILLS or (is_pointwise and uniform and not op.given == [] and not _is_random(op)):
            if view.storage not in flow.weights:
                flow.states[view.storage] = "uniform"
            continue
        if op.writes:
            flow.states.pop(view.storage, None)
        owners = {flow.weights.get(v.storage) or flow.made_of.get(v.storage) for v in op.given if v.numel > 1}
        if is_pointwise and not op.writes and len(owners) == 1 and None not in owners:
            flow.made_of[view.storage] = next(iter(owners)) or ""
        repeated = _repeated(flow, op, view) if is_pointwise or packet is _aten.repeat else []
        if repeated and not op.writes and not _is_random(op):
            flow.states[view.storage] = frozenset(repeated)


def _is_random(op: Operation) -> bool:
    return torch.Tag.nondeterministic_seeded in op.func.tags


def _repeated(flow: Flow, op: Operation, result: View) -> list[tuple[int, int]]:
    """Return strides and sizes of the dimensions of a result along which all operands repeat their elements."""
    found = []
    for dim, size in enumerate(result.shape):
        if size == 1:
            continue
        places = [(view, dim - len(result.shape) + len(view.shape)) for view in op.given if view.numel > 1]
        if places and all(
            at < 0 or view.shape[at] == 1 or view.strides[at] == 0 or flow.is_constant(view, at) for view, at in places
        ):
            found.append((result.strides[dim], size))
    return found


def _filled(flow: Flow, op: Operation) -> None:
    """A tensor of equal elements: with units where it has the shape of an operand that has."""
    for view in op.results:
        like = next((one for one in op.given if one.shape == view.shape), None)
        found = None if like is None else flow.along(like, op)
        if found is None:
            flow.states[view.storage] = "uniform"
        else:
            flow.learn(view, found, op)


# -- rules: the units of each operation's results -----------------------------------------------------

_Rule = Callable[[Flow, Operation], Iterator[Along | None]]


def _joined(a: Along | None, b: Along | None, op: Operation) -> Along | None:
    """Return the units of a result of two operands with these units.

    Raises:
        MixesError: they are along different dimensions.
    """
    if a is None or b is None:
        return a or b
    sources = a.sources | b.sources
    if (a.dim, a.outer) != (b.dim, b.outer):
        raise MixesError(f"{_place(op)} computes {op.name} across {_named(sources)}: their units are in other dimensions")
    finer = a if a.units >= b.units else b
    coarser = b if finer is a else a
    if finer.units % coarser.units:
        raise MixesError(f"{_place(op)} computes {op.name} across {_named(sources)}: their units do not match")
    return replace(finer, sources=sources)


def _broadcast(flow: Flow, op: Operation, views: list[View], dims: int) -> Along | None:
    """Return the units of operands that are broadcast to a tensor of `dims` dimensions.

    Raises:
        MixesError: they are not aligned, or a whole operand tells the units apart.
    """
    total: Along | None = None
    for view in views:
        found = flow.along(view, op)
        if found is not None:
            total = _joined(total, replace(found, dim=found.dim + dims - len(view.shape)), op)
    for view in views:
        if total is not None and flow.along(view, op) is None:
            flow.check_whole(view, total.dim - dims + len(view.shape), total, op)
    return total


def _pointwise(flow: Flow, op: Operation) -> Iterator[Along | None]:
    partial = [view for view in op.given if flow.states.get(view.storage) == "partial"]
    if partial:
        _check_linear(flow, op, partial)
        for view in op.results:
            flow.states[view.storage] = "partial"
        return
    for view in op.results:
        yield _broadcast(flow, op, op.given, len(view.shape))


def _check_linear(flow: Flow, op: Operation, partial: list[View]) -> None:
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
        raise MixesError(f"{_place(op)} computes {op.name} on sums of which each rank has a summand")


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


def _along(flow: Flow, op: Operation) -> Iterator[Along | None]:
    """Rule of norms, sums, softmax and sorts along dimensions, which must not be that of the units."""
    tensor, *others = op.given
    found = flow.along(tensor, op)
    dims = _dims_of(op, len(tensor.shape))
    if found is None or any(flow.along(view, op) is not None for view in others):
        raise MixesError(f"{_place(op)} computes {op.name} of a whole tensor with a weight that tp cuts")
    if found.dim in dims:
        raise MixesError(f"{_place(op)} computes {op.name} across {_named(found.sources)}")
    for view in op.results:
        kept = len(view.shape) == len(tensor.shape)
        yield found if kept else replace(found, dim=found.dim - sum(dim < found.dim for dim in dims))


def _product(flow: Flow, op: Operation) -> Iterator[Along | None]:
    """Rule of a matrix product: units of its batch, rows or columns; a sum over units is partial."""
    adds = op.func.overloadpacket in (_aten.addmm, _aten.baddbmm)
    left, right = op.args[1:3] if adds else op.args[:2]
    result, dims = op.results[0], len(op.results[0].shape)
    a, b = flow.along(left, op), flow.along(right, op)
    inner = [one is not None and one.dim == at for one, at in ((a, dims - 1), (b, dims - 2))]
    if any(inner):
        _check_sum(flow, op, a if inner[0] else None, b if inner[1] else None)
        if adds and flow.weights.get(op.args[0].storage, "") != f"{op.where}.bias" and flow.states.get(op.args[0].storage) != "uniform":
            raise MixesError(f"{_place(op)} adds a tensor to sums of which each rank has a summand")
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


def _added(flow: Flow, op: Operation, total: Along | None, dims: int) -> Along | None:
    """Return the units of a product and of the tensor that is added to it."""
    added, first = op.args[0], dims - len(op.args[0].shape)
    found = flow.along(added, op)
    total = _joined(total, None if found is None else replace(found, dim=found.dim + first), op)
    if found is None and total is not None:
        flow.check_whole(added, total.dim - first, total, op)
    return total


def _check_sum(flow: Flow, op: Operation, a: Along | None, b: Along | None) -> None:
    """Check that a sum over units belongs to a module that is cut by rows, and that both factors have these units.

    Raises:
        MixesError: it does not, or they do not.
    """
    known = a or b
    assert known is not None
    row = next((path for path, style in flow.styles.items() if style == "row" and is_below(op.where, path)), None)
    if row is None or a is None or b is None:
        side = "by a weight that every rank has whole" if b is None else "of a tensor that every rank has whole" if a is None else ""
        raise MixesError(f"{_place(op)} sums over {_named(known.sources)} {side}".rstrip())
    if a.outer != b.outer:
        raise MixesError(f"{_place(op)} sums over {_named(a.sources)}: their units are in other places than the weight's")
    units = max((flow.groups[name] for name in a.sources), default=a.units)
    for name in b.sources:
        flow.groups[name] = math.gcd(flow.groups[name], math.lcm(units, a.units) if a.units % units == 0 else a.units)


def _embedding(flow: Flow, op: Operation) -> Iterator[Along | None]:
    weight, tokens = op.args[:2]
    found, picked = flow.along(weight, op), flow.along(tokens, op)
    if found is not None and picked is not None:
        raise MixesError(f"{_place(op)} looks up {_named(found.sources)} by {_named(picked.sources)}")
    if found is not None and found.dim == 0:
        if flow.styles.get(op.where) != "vocab":
            raise MixesError(f"{_place(op)} looks up rows of {_named(found.sources)} and is not planned as 'vocab'")
        flow.states[op.results[0].storage] = "partial"
        return
    yield picked if found is None else replace(found, dim=len(op.results[0].shape) - 1)


def _cat(flow: Flow, op: Operation) -> Iterator[Along | None]:
    """Rule of tensors put side by side along a dimension, which must not be that of the units."""
    stacks = op.func.overloadpacket is _aten.stack
    views, dims = [view for view in op.args[0] if stacks or view.numel], len(op.results[0].shape)
    dim = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % dims
    total: Along | None = None
    for view in views:
        found = flow.along(view, op)
        if found is not None:
            total = _joined(total, replace(found, dim=found.dim + (stacks and found.dim >= dim)), op)
    assert total is not None
    if not stacks and total.dim == dim:
        raise MixesError(f"{_place(op)} puts tensors beside {_named(total.sources)}")
    for view in views:
        if flow.along(view, op) is None:
            flow.check_whole(view, total.dim - (stacks and total.dim > dim), total, op)
    yield total


def _moved(flow: Flow, op: Operation) -> Iterator[Along | None]:
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
        raise MixesError(f"{_place(op)} moves {_named(found.sources)} by {op.name}")
    yield found


def _repeat(flow: Flow, op: Operation) -> Iterator[Along | None]:
    tensor, times = op.args[:2]
    found = flow.along(tensor, op)
    assert found is not None
    dim = found.dim + len(times) - len(tensor.shape)
    if times[dim] != 1:
        raise MixesError(f"{_place(op)} repeats {_named(found.sources)} as a whole")
    yield replace(found, dim=dim)


def _index(flow: Flow, op: Operation) -> Iterator[Along | None]:
    """Rule of elements picked by whole indices along other dimensions than that of the units."""
    tensor, indices = op.args[:2]
    found = flow.along(tensor, op)
    chosen = [dim for dim, index in enumerate(indices) if index is not None]
    picks = [index for index in indices if index is not None]
    side_by_side = chosen == list(range(chosen[0], chosen[0] + len(chosen)))
    if found is None or found.dim in chosen or not side_by_side or any(flow.along(pick, op) for pick in picks):
        raise MixesError(f"{_place(op)} picks among {_named(found.sources if found else ())}")
    added = max(len(pick.shape) for pick in picks)
    yield replace(found, dim=found.dim if found.dim < chosen[0] else found.dim - len(chosen) + added)


def _index_select(flow: Flow, op: Operation) -> Iterator[Along | None]:
    tensor, dim, index = op.args[:3]
    found = flow.along(tensor, op)
    if found is None or found.dim == dim % len(tensor.shape) or flow.along(index, op) is not None:
        raise MixesError(f"{_place(op)} picks among {_named(found.sources if found else ())}")
    yield found


def _gather(flow: Flow, op: Operation) -> Iterator[Along | None]:
    """Rule of elements picked from or put into places along a dimension, which must not be that of the units."""
    dims = len(op.results[0].shape)
    total = _broadcast(flow, op, [view for view in op.given if len(view.shape) == dims], dims)
    if total is None or total.dim == op.args[1] % dims:
        raise MixesError(f"{_place(op)} computes {op.name} across {_named(total.sources if total else ())}")
    yield total


def _attention(flow: Flow, op: Operation) -> None:
    """An attention: queries, keys, values and mask of each head by themselves."""
    query, key, value = op.args[:3]
    masks = [view for view in op.args[3:] if isinstance(view, View)]
    dims = len(query.shape)
    total: Along | None = None
    for view in (query, key, value):
        total = _joined(total, flow.along(view, op), op)
    if total is None:
        if any(flow.along(mask, op) for mask in masks):
            raise MixesError(f"{_place(op)} masks whole heads by {_named(())}")
        return
    if total.dim >= dims - 2:
        what = "features of heads or tokens" if dims > 3 else "features"
        raise MixesError(f"{_place(op)} attends across {_named(total.sources)}: a rank would hold {what}, not whole heads")
    for view in (query, key, value):
        if flow.along(view, op) is None:
            flow.check_whole(view, total.dim, total, op)
    _broadcast(flow, op, [query, *masks], dims)
    queries = flow.along(query, op)
    flow.states[op.results[0].storage] = "uniform"
    flow.learn(op.results[0], replace(queries or total, sources=total.sources), op)


def _left(flow: Flow, op: Operation) -> None:
    """The end of a module's forward, where `reduce` and `gather_last` make partial and cut tensors whole."""
    style = flow.styles.get(op.where)
    for view in op.results:
        state = flow.states.get(view.storage)
        if style in ("row", "vocab") and state == "partial":
            flow.states[view.storage] = None
        elif style == "row":
            raise MixesError(f"{op.where} is planned as 'row', and its output is no sum over what tp cuts")
        elif style == "gather" and isinstance(state, Rows):
            found = flow.along(view, op)
            if found is None or found.dim != len(view.shape) - 1 or found.outer > 1:
                raise MixesError(f"{op.where} is planned as 'gather', and its output is not cut along its last dimension")
            flow.states[view.storage] = None


def _outputs(flow: Flow, op: Operation) -> None:
    """The outputs of the model: its prediction first, if there is one, then all others."""
    prediction, others = op.args
    flow.prediction = None if prediction is None else flow.along(prediction, op)
    flow.others_cut = any(flow.along(view, op) is not None for view in others if view != prediction)


_EVENTS: dict[str, Callable[[Flow, Operation], None]] = {
    "attention": _attention, "left": _left, "outputs": _outputs,
}  # fmt: skip

FILLS = {
    _aten.zeros, _aten.ones, _aten.full, _aten.empty, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.empty_strided,
    _aten.new_empty_strided, _aten.scalar_tensor, _aten.fill_, _aten.zero_,
}  # fmt: skip
"""Operations that make a tensor of equal elements, or of uninitialised ones."""
_COPIES = {_aten.clone, _aten._to_copy, _aten.copy_, _aten.lift_fresh_copy, _aten.native_dropout, _aten.bernoulli_}
_LINEAR = {_aten.mul, _aten.mul_, _aten.div, _aten.div_, _aten.neg, _aten.clone, _aten._to_copy}
"""Operations that may come before a sum over ranks as well as after it."""
_RULES: dict[Any, _Rule] = {
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
    _aten.repeat: _repeat,
    _aten.index: _index,
    _aten.index_select: _index_select,
}  # fmt: skip
