"""The walk of units through a forward, which proves that ranks of a tensor cut compute independently: which units (heads, neurons,
tokens of a vocabulary) each value holds.

In the output [B, T, D] of a column cut, each of the D features is a unit, `Rows(stride=1, span=D)`. Seen as [B, T, heads, width], the same storage
has units of `width` features, and may be cut between heads only. Every operation must then compute each unit by itself:

    an operation with a map     units lie along dimensions that are kept (`dimension_maps.py`), the same of all
                                operands, and are neither summed nor moved
    a product                   summed over units it is partial, until the module whose weight is cut by rows has left, where
                                `reduce` sums it over the ranks
    anything else               is tried on drawn values, whole and on parts (`operation_trial.py`), or refused

A whole tensor that is combined with units must not distinguish them: a weight with an element for each unit is cut like them. Where
code needs more than a rank's part, as the slopes of ALiBi that it counts itself do, or a norm over all heads, the cut
before it is refused; `cut_proof.to_gather` says which outputs are gathered instead.

A walk back through the same operations finds whole tensors whose gradients are partial. An operation on a whole tensor and a cut one
leaves each rank a summand of the whole tensor's gradient. `copy` sums them at the input of a module: of each one cut by columns, and of
whole modules whose output is combined with what is cut in the code around them, as the rotary key of multi-head latent attention does:

    x ─ copy ─ kv_a_proj ─┬─ norm ─ kv_b_proj (cut) ─┬─ heads        all between has partial gradients, so kv_b_proj
                          └─ rotary key ─────────────┘               needs no copy, and weights there are summed

Between a `copy` and what is cut every gradient must be partial, and before it none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from samestep.independence.dependence import Rows
from samestep.independence.dimension_maps import FILLS, is_elementwise
from samestep.independence.feature_units import LikeError, MixesError, UnitFlow, WeightCut, cut_weights_of
from samestep.independence.unit_rules import EVENTS, check_unseen, rule_of
from samestep.models.spec import is_below, owner_of
from samestep.tracing.costs import BY_COLUMNS
from samestep.tracing.module_inputs import ForwardCalls
from samestep.tracing.operations import Operation, View

_LOOKUPS = {torch.ops.aten.embedding, torch.ops.aten.index, torch.ops.aten.index_select}


def follow(
    operations: list[Operation],
    model: nn.Module,
    styles: Mapping[str, str],
    cuts: Mapping[str, WeightCut],
    looking: Collection[str] = (),
    branching: Collection[str] = (),
) -> UnitFlow:
    """Return where the units of cut weights are at every operation of a forward of the whole model.

    `styles` are those of modules, `cuts` those of weights by name; weights with an element for each unit are added.
    No unit may reach the modules `looking`, whose code looks at values, nor the own code of those that branch by whole numbers of
    the sample: the branch for another sample is not known.

    Raises:
        MixesError: an operation does not compute each unit by itself.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    weights = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in reversed(named)}
    cuts, owners = dict(cuts), _owners(model)
    while True:
        names = {storage: name for storage, (name, _) in weights.items()}
        trained = frozenset(name for name, _ in model.named_parameters())
        flow = UnitFlow(styles, names, owners, trained, looking=tuple(looking))
        flow.like = {name: cut.dim for name, cut in cuts.items() if owner_of(name) not in styles}
        for storage, (name, tensor) in weights.items():
            if name in cuts:
                cut = cuts[name]
                flow.groups[name], stride = tensor.shape[cut.dim] // cut.parts, tensor.stride(cut.dim)
                flow.states[storage] = Rows(stride, stride * flow.groups[name], sources=frozenset({name}))
        try:
            for op in operations:
                _carry_on(
                    flow, op, is_unseen=op.where in branching or any(is_below(op.where, path) for path in looking)
                )
        except LikeError as error:
            dim = error.dim_of(model.get_parameter(error.name))
            if dim is None or error.name in cuts:
                raise MixesError(
                    f"{error.name} is used on a tensor that tp shards, and none of its dimensions is as long"
                ) from None
            cuts[error.name] = WeightCut(dim)
            continue
        return flow


def _owners(model: nn.Module) -> dict[int, frozenset[str]]:
    """Return the paths of the modules that hold each trained weight, by its storage."""
    owners: dict[int, frozenset[str]] = {}
    for path, part in model.named_modules():
        for param in part.parameters(recurse=False):
            if param.requires_grad:
                storage = param.untyped_storage()._cdata
                owners[storage] = owners.get(storage, frozenset()) | {path}
    return owners


def owners_in(flow: UnitFlow, op: Operation) -> frozenset[str]:
    """Return the modules that hold the trained weights from which an operation's operands are computed."""
    storages = {view.storage for view in op.given if view.values is None}
    return frozenset(
        path for key in storages for table in (flow.owners, flow.from_weights) for path in table.get(key, ())
    )


def data_in(flow: UnitFlow, op: Operation) -> list[View]:
    """Return an operation's operands that are no weights."""
    tables = (flow.owners, flow.from_weights, flow.weights)
    return [view for view in op.given if view.values is None and not any(view.storage in table for table in tables)]


def _carry_on(flow: UnitFlow, op: Operation, *, is_unseen: bool) -> None:
    """Set the units of the results of an operation; `is_unseen` if other values may let its module run others."""
    states = [flow.states.get(view.storage) if view.values is None else None for view in op.given]
    if op.func not in ("left", "outputs") and (owners := owners_in(flow, op)) and not data_in(flow, op):
        flow.from_weights |= {view.storage: owners for view in op.results if view.storage not in flow.weights}
    try:
        if is_unseen:
            check_unseen(flow, op)
        if isinstance(op.func, str):
            EVENTS[op.func](flow, op)
        else:
            _compute(flow, op)
    except MixesError as reason:
        raise reason.at(op.where, cut_weights_of(flow, op)) from None
    flow.history.append((*states, *(flow.states.get(view.storage) for view in op.results)))


def _compute(flow: UnitFlow, op: Operation) -> None:
    packet = op.func.overloadpacket
    if not any(flow.states.get(view.storage) == "partial" or flow.along(view, op) is not None for view in op.given):
        _without_units(flow, op, packet, is_elementwise(op.func))
        return
    if packet in FILLS:
        _fill_equal(flow, op)
        return
    for view, unit_dim in zip(op.results, rule_of(op.func)(flow, op), strict=False):
        flow.learn(view, unit_dim, op)


def _without_units(flow: UnitFlow, op: Operation, packet: Any, is_pointwise: bool) -> None:
    """Follow tensors that every rank has whole: equal elements, elements that repeat, functions of one weight."""
    uniform = all(flow.states.get(v.storage) == "uniform" or v.numel == 1 for v in op.given if v.values is None)
    for view in op.results:
        if packet in FILLS or (is_pointwise and uniform and op.given and not _is_random(op)):
            if view.storage not in flow.weights:
                flow.states[view.storage] = "uniform"
            continue
        if op.writes:
            flow.states.pop(view.storage, None)
        if name := _only_weight(flow, op, is_pointwise=is_pointwise):
            flow.made_of[view.storage] = name
        repeated = _repeated_dims(flow, op, view) if is_pointwise or packet is torch.ops.aten.repeat else []
        if repeated and not op.writes and not _is_random(op):
            flow.states[view.storage] = frozenset(repeated)


def _only_weight(flow: UnitFlow, op: Operation, *, is_pointwise: bool) -> str:
    """Return the weight from which an operation computes its results element by element, or looks them up; empty if there is none.

    What takes no gradient may take part, such as a mask or the distances of positions at which a table is read.
    """
    names = {v.storage: flow.weights.get(v.storage) or flow.made_of.get(v.storage) for v in op.given if v.numel > 1}
    owners = {names[v.storage] for v in op.given if v.numel > 1 and (names[v.storage] or v.takes_gradient)}
    is_made = (is_pointwise or op.func.overloadpacket in _LOOKUPS) and not op.writes
    return (next(iter(owners)) or "") if is_made and len(owners) == 1 else ""


def _is_random(op: Operation) -> bool:
    return torch.Tag.nondeterministic_seeded in op.func.tags


def _repeated_dims(flow: UnitFlow, op: Operation, result: View) -> list[tuple[int, int]]:
    """Return strides and sizes of the dimensions of a result along which all operands repeat their elements."""
    dims = []
    for dim, size in enumerate(result.shape):
        if size == 1:
            continue
        places = [(view, dim - len(result.shape) + len(view.shape)) for view in op.given if view.numel > 1]
        if places and all(
            at < 0 or view.shape[at] == 1 or view.strides[at] == 0 or flow.is_constant(view, at) for view, at in places
        ):
            dims.append((result.strides[dim], size))
    return dims


def _fill_equal(flow: UnitFlow, op: Operation) -> None:
    """A tensor of equal elements: with units where it has the shape of an operand that has."""
    for view in op.results:
        like = next((operand for operand in op.given if operand.shape == view.shape), None)
        unit_dim = None if like is None else flow.along(like, op)
        if unit_dim is None:
            flow.states[view.storage] = "uniform"
        else:
            flow.learn(view, unit_dim, op)


@dataclass(slots=True)
class PartialGradients:
    """The tensors with partial gradients, and the modules at whose input `copy` stands."""

    storages: set[int] = field(default_factory=set)
    copied: set[str] = field(default_factory=set)
    """Whole modules whose input is copied."""
    uncopied: set[str] = field(default_factory=set)
    """Modules that are cut by columns, and whose input needs no copy."""
    operations: set[int] = field(default_factory=set)
    """Indices of operations that compute a tensor with a partial gradient."""


def partial_gradients(operations: list[Operation], calls: ForwardCalls, flow: UnitFlow) -> PartialGradients:
    """Return where gradients are partial; `calls` are those of the forward's modules.

    Raises:
        MixesError: a gradient would be partial in one use of a tensor, and whole in another.
    """
    entered: dict[str, set[int]] = {}
    for call in calls.ended:
        if call.is_positional and call.input is not None:
            entered.setdefault(call.path, set()).add(call.input.storage)
    search = _CutSearch(operations, entered, flow)
    partial = search.found
    partial.copied = {path for path in partial.copied if not entered[path] & partial.storages}
    for path in sorted(partial.copied):
        search.check_copied(path)
    partial.uncopied = {
        path
        for path, style in flow.styles.items()
        if style in BY_COLUMNS and path in entered and entered[path] & partial.storages
    }
    return partial


def check_whole_gradients(operations: list[Operation], partial: PartialGradients, flow: UnitFlow) -> None:
    """Check that no gradient is partial that a hook is given, or in a module whose code looks at values: a branch that is not followed
    might add a whole one.

    Raises:
        MixesError: one is.
    """
    for index, op in enumerate(operations):
        if op.func == "hook" and any(view.storage in partial.storages for view in op.given):
            raise MixesError(
                f"{op.where or 'the model'} has a hook on a gradient, and each rank would have one summand of it"
            ).at(op.where, ())
        path = next((path for path in flow.looking if is_below(op.where, path)), None)
        seen = [view for view in (*op.given, *op.results) if view.takes_gradient and view.storage in partial.storages]
        if path is not None and (index in partial.operations or seen):
            readers = [reader for reader in operations if any(view in reader.given for view in seen)]
            met = frozenset(name for reader in readers for name in cut_weights_of(flow, reader))
            raise MixesError(
                f"shapes or branches at {path} depend on values, and its result meets a tensor that tp shards in the code around it: its "
                "gradient would be partial"
            ).at(path, met)


class _CutSearch:
    """The search for tensors with partial gradients: from the whole operands of operations that have cut ones too, to all they are made of."""

    def __init__(self, operations: list[Operation], entered: Mapping[str, set[int]], flow: UnitFlow) -> None:
        self.operations, self.entered, self.flow = operations, entered, flow
        self.found = PartialGradients()
        self._makers: dict[int, list[int]] = {}
        self._readers: dict[int, list[int]] = {}
        self._weights = flow.weights.keys() | flow.from_weights.keys()
        self._open: list[tuple[int, Operation]] = []
        self._taking = {view.storage for op in operations for view in op.given if view.takes_gradient}
        for index, op in enumerate(operations):
            for views, table in ((op.results, self._makers), (op.given, self._readers)):
                for view in views if op.func != "left" else ():
                    table.setdefault(view.storage, []).append(index)
            for view, state in zip(op.given, flow.history[index], strict=False) if self._meets(index) else ():
                if view.takes_gradient and view.storage not in self._weights and not isinstance(state, Rows):
                    self._add(view, op, op)
        while self._open:
            storage, meeting = self._open.pop()
            for index in self._makers.get(storage, ()):
                self._made_by(index, storage, meeting)
            for index in self._readers.get(storage, ()):
                self._read_by(index, meeting)

    def _meets(self, index: int) -> bool:
        """Return whether an operation has an operand that tp cuts."""
        op = self.operations[index]
        return op.func not in ("left", "outputs", "hook", "hooked") and any(
            isinstance(state, Rows) for state in self.flow.history[index][: len(op.given)]
        )

    def _is_copied_input(self, view: View, op: Operation) -> bool:
        """Return whether a tensor is the input of a module that is cut by columns, whose code runs."""
        paths = (path for path, style in self.flow.styles.items() if style in BY_COLUMNS and is_below(op.where, path))
        return any(view.storage in self.entered.get(path, ()) for path in paths)

    def _add(self, view: View, op: Operation, meeting: Operation) -> None:
        """Add an operand of `op` whose gradient `meeting` makes partial, unless it is copied there."""
        if view.storage not in self.found.storages and not self._is_copied_input(view, op):
            self.found.storages.add(view.storage)
            self._open.append((view.storage, meeting))

    def check_copied(self, path: str) -> None:
        """Check that every use of the input of a module after its `copy` has a partial gradient.

        Raises:
            MixesError: one has not, or is summed by a `copy` of its own.
        """
        for storage, index in [(key, index) for key in self.entered[path] for index in self._readers.get(key, ())]:
            op = self.operations[index]
            view = next(view for view in op.given if view.storage == storage)
            storages = [result.storage for result in op.results if result.storage in self._taking]
            is_partial = self._meets(index) or all(key in self.found.storages for key in storages)
            if is_below(op.where, path) and (not is_partial or self._is_copied_input(view, op)):
                raise MixesError(
                    f"{path} computes two results of its input, and only one of them meets a tensor that tp shards: its gradient would be "
                    "partial in one use. Use a module of its own for each"
                ).at(path, cut_weights_of(self.flow, op))

    def _made_by(self, index: int, storage: int, meeting: Operation) -> None:
        """Follow a tensor back to its operands; `meeting` is the operation that makes its gradient partial."""
        op = self.operations[index]
        self.found.operations.add(index)
        for view in op.given:
            if not view.takes_gradient or view.storage in self._weights or view.storage == storage:
                continue
            if self._meets(index):
                raise MixesError(
                    f"{op.where or 'the model'} sums over a dimension that tp shards, and its result meets a sharded tensor in the same module: "
                    "its gradient would be partial"
                ).at(meeting.where, cut_weights_of(self.flow, meeting))
            if view.storage in self.entered.get(op.where, ()) and not self._is_copied_input(view, op):
                self.found.copied.add(op.where)
            else:
                self._add(view, op, meeting)

    def _read_by(self, index: int, meeting: Operation) -> None:
        """Follow a tensor to the results of operations on it."""
        op = self.operations[index]
        if self._meets(index):
            return
        if op.func == "outputs":
            raise MixesError(
                f"{meeting.where or 'the model'} computes {meeting.name} of a whole tensor and of one that tp shards, and the "
                "loss gets the whole tensor too: its gradient would be partial in one use alone"
            ).at(meeting.where, cut_weights_of(self.flow, meeting))
        for view in op.results:
            if view.storage in self._taking and view.storage not in self.found.storages:
                self.found.storages.add(view.storage)
                self._open.append((view.storage, meeting))
