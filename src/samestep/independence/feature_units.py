"""The units that tensors of a forward hold; `unit_walk.py` follows them from the weights that a plan cuts through every operation."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from samestep.independence.dependence import NO_DIM, Along, Rows, rows_along
from samestep.tracing.operations import Operation, View


class MixesError(Exception):
    """An operation that does not compute each unit by itself."""

    def __init__(self, reason: str, sources: Collection[str] = (), parts: int = 1) -> None:
        """Keep the weights whose output is split, and the number of equal parts."""
        super().__init__(reason)
        self.sources, self.parts = sources, parts
        self.where = ""
        """Path of the module whose code runs the operation."""
        self.cut: frozenset[str] = frozenset()
        """Names of the cut weights whose units the operation meets."""

    def at(self, where: str, cut: Iterable[str]) -> MixesError:
        """Return the error with the module and the cut weights that it is about, unless it knows them."""
        self.where, self.cut = self.where or where, self.cut | frozenset(cut)
        return self


@dataclass(frozen=True, slots=True)
class WeightCut:
    """A weight of which a rank holds a part: along `dim`, `parts` weights side by side, each cut by itself."""

    dim: int
    parts: int = 1


State = Rows | Literal["uniform", "partial"] | frozenset[tuple[int, int]] | None
"""What a storage holds: units; equal elements; summands of one rank each; elements that repeat along dimensions of
these strides and sizes; or None, a tensor that every rank has whole."""


@dataclass(frozen=True, slots=True)
class UnitDim:
    """The dimension of a view that has the units: index k belongs to unit (k // inner) % units."""

    dim: int
    units: int
    inner: int
    outer: int
    sources: frozenset[str] = frozenset()


@functools.lru_cache(maxsize=4096)
def along(view: View, rows: Rows) -> UnitDim | None:
    """Return the dimension of a view that has the units of its storage, or groups of them that it separates; None where there is none."""
    period = rows.span
    steps = (step for step in view.strides if step > rows.stride and step % rows.stride == 0)
    coarser = {period // step for step in steps if step < period and period % step == 0}
    for units in (period // rows.stride, *sorted(coarser, reverse=True)):
        part = rows_along(Rows(period // units, period), units, view.offset, view.shape, view.strides)
        if isinstance(part, Along) and part.dim != NO_DIM and part.start == 0:
            outer, rest = divmod(view.shape[part.dim], units * part.inner)
            if not rest:
                return UnitDim(part.dim, units, part.inner, outer, rows.sources)
    return None


def _parts_in(view: View, rows: Rows) -> int:
    """Return the number of equal parts of which a view shows one; 1 if it does not."""
    within = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if 0 < stride < rows.span]
    step = min((stride for _, stride in within), default=1)  # of interleaved halves, each shows every second element
    shown = step + sum((size - 1) * stride for size, stride in within)
    whole_units = shown % rows.stride == 0 and view.offset % rows.span // step * step % shown == 0
    return rows.span // shown if whole_units and rows.span % shown == 0 else 1


def part_of(view: View, rows: Rows, degree: int) -> View | None:
    """Return the view of a rank that holds one of `degree` equal parts of the units; None where there is none."""
    unit_dim = along(view, rows)
    if unit_dim is None or unit_dim.units % degree:
        return None
    shape = tuple(size // degree if dim == unit_dim.dim else size for dim, size in enumerate(view.shape))
    strides = tuple(s // degree if s >= rows.span else s for s in view.strides)
    offset = view.offset // rows.span * (rows.span // degree) + view.offset % rows.span
    return replace(view, shape=shape, strides=strides, offset=offset)


@dataclass(slots=True)
class UnitFlow:
    """The places of the units at every operation of a forward."""

    styles: Mapping[str, str]
    """Cut style of each module, by its path."""
    weights: Mapping[int, str]
    """Name of each weight and buffer by its storage."""
    owners: Mapping[int, frozenset[str]]
    """Paths of the modules that own each trained weight, by its storage."""
    trained: frozenset[str]
    """Names of the weights, as opposed to buffers."""
    looking: tuple[str, ...] = ()
    """Modules whose code looks at values."""
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
    logits_of: frozenset[str] = frozenset()
    """The weights by which the model's prediction is cut, if it is cut once, along its last dimension."""
    tried: list[str] = field(default_factory=list)
    """Operations without a rule, and custom backwards, of which a trial has passed."""
    cut_outputs: dict[int, frozenset[str]] = field(default_factory=dict)
    """The weights by which outputs are cut, by their number among all tensors of the outputs; that of the prediction is -1."""

    def along(self, view: View, op: Operation) -> UnitDim | None:
        """Return the dimension of a tensor that has units; None for a tensor without.

        Raises:
            MixesError: the tensor cannot be cut between units, or holds partial sums.
        """
        state = self.states.get(view.storage) if view.values is None else None
        if state == "partial":
            raise MixesError(f"{place(op)} computes {op.name} on partial sums, one summand on each rank")
        if not isinstance(state, Rows) or view.numel == 0:
            return None
        unit_dim = along(view, state)
        if unit_dim is None:
            raise MixesError(
                f"{place(op)} takes a part {list(view.shape)} of {describe_sources(state.sources)}, and a rank would hold "
                "other elements of it",
                state.sources,
                _parts_in(view, state),
            )
        for name in state.sources:
            self.groups[name] = math.gcd(self.groups[name], unit_dim.units)
        return unit_dim

    def check_whole(self, view: View, dim: int, unit_dim: UnitDim, op: Operation) -> None:
        """Check that a tensor without units does not distinguish the units along its dimension `dim`.

        Raises:
            MixesError: it does.
        """
        if view.numel == 0 or view.shape[dim] == 1 or view.strides[dim] == 0 or self.is_constant(view, dim):
            return
        name = self.weights.get(view.storage) or self.made_of.get(view.storage, "")
        size = view.shape[dim]
        if name in self.trained and name not in self.like and unit_dim.outer == 1:
            raise LikeError(name, view.strides[dim], size, is_weight=view.storage in self.weights)
        what = f"{name}, with" if name else "a tensor with"
        raise MixesError(
            f"{place(op)} computes {op.name} of {describe_sources(unit_dim.sources)} and {what} {size} elements of its own for a "
            "dimension that tp shards, and every rank would hold all of them"
        )

    def is_constant(self, view: View, dim: int) -> bool:
        """Return whether a tensor without units repeats its elements along a dimension."""
        if view.values is not None:
            return len(set(view.values)) == 1
        state = self.states.get(view.storage)
        return state == "uniform" or (isinstance(state, frozenset) and (view.strides[dim], view.shape[dim]) in state)

    def learn(self, view: View, unit_dim: UnitDim | None, op: Operation) -> None:
        """Store the units of a result.

        Raises:
            MixesError: it is written into a tensor without units, or with other ones.
        """
        if unit_dim is None:
            return
        state = self.states.get(view.storage)
        stride = view.strides[unit_dim.dim] * unit_dim.inner
        rows = Rows(stride, stride * unit_dim.units, sources=unit_dim.sources)
        if isinstance(state, Rows):
            stored = along(view, state)
            if stored is None or (stored.dim, stored.outer) != (unit_dim.dim, unit_dim.outer):
                raise MixesError(
                    f"{place(op)} writes {describe_sources(unit_dim.sources)} into other rows of another tensor"
                )
        elif op.writes and state != "uniform":
            raise MixesError(
                f"{place(op)} writes {describe_sources(unit_dim.sources)} into a tensor that every rank has whole"
            )
        else:
            self.states[view.storage] = rows


def cut_weights_of(flow: UnitFlow, op: Operation) -> frozenset[str]:
    """Return the names of the cut weights whose units an operation is given."""
    states = [flow.states.get(view.storage) for view in op.given if view.values is None]
    return frozenset(name for state in states if isinstance(state, Rows) for name in state.sources)


class LikeError(Exception):
    """A weight has an element for each unit: it is to be cut like them."""

    def __init__(self, name: str, stride: int, size: int, *, is_weight: bool) -> None:
        super().__init__(name)
        self.name, self.stride, self.size, self.is_weight = name, stride, size, is_weight

    def dim_of(self, weight: Tensor) -> int | None:
        """Return the dimension with the elements; None if none of it is as long.

        What is made of a weight may have other strides than the weight itself.
        """
        places = [dim for dim, size in enumerate(weight.shape) if size == self.size]
        same = [dim for dim in places if weight.stride(dim) == self.stride]
        return next(iter(same or ([] if self.is_weight else places[::-1])), None)


def place(op: Operation) -> str:
    """Return the module whose code runs an operation, as text."""
    return op.where or "the model's own code"


def describe_sources(sources: Iterable[str]) -> str:
    """Return what these weights' outputs are, as text."""
    names = sorted(sources)
    return (
        f"what tp cuts by {', '.join(names[:2])}{' and others' if len(names) > 2 else ''}" if names else "what tp cuts"
    )
