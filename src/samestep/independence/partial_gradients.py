"""Whole tensors whose gradients are partial under a tensor cut, and where `copy` sums them.

An operation on a whole tensor and a cut one leaves each rank a summand of the whole tensor's gradient. `copy` stands at
the input of a module: of each one cut by columns, and of whole modules whose output is combined with what is cut in the
code around them, as the rotary key of multi-head latent attention does:

    x ─ copy ─ kv_a_proj ─┬─ norm ─ kv_b_proj (cut) ─┬─ heads        all between has partial gradients, so kv_b_proj
                          └─ rotary key ─────────────┘               needs no copy, and weights there are summed

Between a `copy` and what is cut every gradient must be partial, and before it none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from samestep.independence.feature_units import MixesError, UnitFlow, UnitRows, cut_weights_of
from samestep.models.spec import is_below
from samestep.tracing.operations import Operation, View

COPYING = ("column", "qkv", "gather", "vocab")
"""Styles of modules whose input is copied; an embedding, cut by vocabulary too, is given tokens without gradients."""


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


def partial_gradients(operations: list[Operation], entered: Mapping[str, set[int]], flow: UnitFlow) -> PartialGradients:
    """Return where gradients are partial; `entered` are the storages of modules' inputs, by path.

    Raises:
        MixesError: a gradient would be partial in one use of a tensor, and whole in another.
    """
    search = _CutSearch(operations, entered, flow)
    for index, op in enumerate(operations):
        if search.meets(index):
            for view in op.given:
                if search.is_whole_data(view, index) and not search.is_copied_input(view, op):
                    search.add(view.storage, op)
    search.close()
    found = search.found
    found.copied = {path for path in found.copied if not entered[path] & found.storages}
    for path in sorted(found.copied):
        search.check_copied(path)
    found.uncopied = {
        path
        for path, style in flow.styles.items()
        if style in COPYING and path in entered and entered[path] & found.storages
    }
    return found


def check_whole_gradients(operations: list[Operation], partial: PartialGradients, flow: UnitFlow) -> None:
    """Check that no gradient is partial that a hook is given, or in a module whose code looks at values: a branch that is not followed
    might add a whole one.

    Raises:
        MixesError: one is.
    """
    for index, op in enumerate(operations):
        if op.func == "hook" and any(view.storage in partial.storages for view in op.given):
            raise MixesError(
                f"{op.where or 'the model'} has a hook on a gradient of which each rank would have a summand"
            ).at(op.where, ())
        path = next((path for path in flow.looking if is_below(op.where, path)), None)
        seen = [view for view in (*op.given, *op.results) if view.takes_gradient and view.storage in partial.storages]
        if path is not None and (index in partial.operations or seen):
            readers = [one for one in operations if any(view in one.given for view in seen)]
            met = frozenset(name for one in readers for name in cut_weights_of(flow, one))
            raise MixesError(
                f"shapes or branches at {path} depend on values, and its result meets what tp cuts in the code around it: its "
                "gradient would be partial"
            ).at(path, met)


class _CutSearch:
    def __init__(self, operations: list[Operation], entered: Mapping[str, set[int]], flow: UnitFlow) -> None:
        self.operations, self.entered, self.flow = operations, entered, flow
        self.found = PartialGradients()
        self._makers: dict[int, list[int]] = {}
        self._readers: dict[int, list[int]] = {}
        self._weights = flow.weights.keys() | flow.from_weights.keys()
        self._open: list[tuple[int, Operation]] = []
        self._taking = {view.storage for op in operations for view in op.given if view.takes_gradient}
        for index, op in enumerate(operations):
            if op.func == "left":
                continue
            for view in op.results:
                self._makers.setdefault(view.storage, []).append(index)
            for view in op.given:
                self._readers.setdefault(view.storage, []).append(index)

    def meets(self, index: int) -> bool:
        """Return whether an operation has an operand that tp cuts."""
        op = self.operations[index]
        return op.func not in ("left", "outputs", "hook", "hooked") and any(
            isinstance(state, UnitRows) for state in self.flow.history[index][: len(op.given)]
        )

    def is_whole_data(self, view: View, index: int) -> bool:
        """Return whether an operand takes a gradient, and is neither a weight nor cut."""
        op = self.operations[index]
        state = self.flow.history[index][op.given.index(view)]
        return view.takes_gradient and view.storage not in self._weights and not isinstance(state, UnitRows)

    def is_copied_input(self, view: View, op: Operation) -> bool:
        """Return whether a tensor is the input of a module that is cut by columns, whose code runs."""
        return any(
            style in COPYING
            and is_below(op.where, path)
            and path in self.entered
            and view.storage in self.entered[path]
            for path, style in self.flow.styles.items()
        )

    def add(self, storage: int, op: Operation) -> None:
        """Add a tensor whose gradient `op` makes partial."""
        if storage not in self.found.storages:
            self.found.storages.add(storage)
            self._open.append((storage, op))

    def check_copied(self, path: str) -> None:
        """Check that every use of the input of a module after its `copy` has a partial gradient.

        Raises:
            MixesError: one has not, or is summed by a `copy` of its own.
        """
        for storage, index in [(one, index) for one in self.entered[path] for index in self._readers.get(one, ())]:
            op = self.operations[index]
            view = next(view for view in op.given if view.storage == storage)
            made = [one.storage for one in op.results if one.storage in self._taking]
            is_partial = self.meets(index) or all(one in self.found.storages for one in made)
            if is_below(op.where, path) and (not is_partial or self.is_copied_input(view, op)):
                raise MixesError(
                    f"{path} computes with its input both what meets what tp cuts and what does not: its gradient would be "
                    "partial in one use. Use a module of its own for each"
                ).at(path, cut_weights_of(self.flow, op))

    def close(self) -> None:
        """Add everything that must have partial gradients too."""
        while self._open:
            storage, meeting = self._open.pop()
            for index in self._makers.get(storage, ()):
                self._made_by(index, storage, meeting)
            for index in self._readers.get(storage, ()):
                self._read_by(index, meeting)

    def _made_by(self, index: int, storage: int, meeting: Operation) -> None:
        """Follow a tensor back to its operands; `meeting` is the operation that makes its gradient partial."""
        op = self.operations[index]
        self.found.operations.add(index)
        for view in op.given:
            if not view.takes_gradient or view.storage in self._weights or view.storage == storage:
                continue
            if self.meets(index):
                raise MixesError(
                    f"{op.where or 'the model'} sums over what tp cuts, and its result meets what tp cuts in the same module: "
                    "its gradient would be partial"
                ).at(meeting.where, cut_weights_of(self.flow, meeting))
            if self.is_copied_input(view, op):
                continue
            if op.where in self.entered and view.storage in self.entered[op.where]:
                self.found.copied.add(op.where)
            else:
                self.add(view.storage, meeting)

    def _read_by(self, index: int, meeting: Operation) -> None:
        """Follow a tensor to the results of operations on it."""
        op = self.operations[index]
        if self.meets(index):
            return
        if op.func == "outputs":
            raise MixesError(
                f"{meeting.where or 'the model'} computes {meeting.name} of a whole tensor and of what tp cuts, and the "
                "loss gets the whole tensor too: its gradient would be partial in one use alone"
            ).at(meeting.where, cut_weights_of(self.flow, meeting))
        for view in op.results:
            if view.storage in self._taking:
                self.add(view.storage, meeting)
