"""The forward of one rank of a tensor cut, tried on the meta device with the shapes of a rank.

Weights have the shapes that the rank holds; sums over ranks are left out, and what is gathered is made whole by a
stand-in. The forward must run the operations of the whole model, one by one, with the same numbers, each on the rank's
part of the same tensors (`tracing/features.py` knows which part). Code that counts its heads, neurons or features by an
attribute needs the rank's number there: the trial finds the attributes which make it succeed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.models.spec import is_below
from samestep.tracing.feature_rules import FILLS
from samestep.tracing.operations import Operation, Recorder, View
from samestep.tracing.units import Flow, Rows, State, WeightCut, part_of

Forward = Callable[[Recorder], None]
"""Runs the model's forward, with its operations recorded; raises a `ModelError` if that fails."""


@dataclass(frozen=True, slots=True)
class Count:
    """An integer attribute by which modules count what a rank has a part of, such as heads."""

    path: str
    """Path of one module that has it; modules of its class with the same cuts below have it too."""
    name: str
    divisor: int


class DiffersError(ModelError):
    """The forward of a rank runs another operation than that of the whole model, or on other tensors."""

    def __init__(self, reason: str, where: str) -> None:
        super().__init__(reason)
        self.where = where


class _Compared(Recorder):
    """Compares each operation of a rank's forward with the same one of the whole model's, as it is recorded."""

    def __init__(self, whole: list[Operation], flow: Flow, degree: int, degrees: Mapping[str, int]) -> None:
        super().__init__()
        self.whole, self.flow, self.degree, self.degrees = whole, flow, degree, degrees
        self.same: dict[int, int] = {}
        """Storage of the rank's forward, by that of the whole model's."""

    def record(self, func: Any, where: str, args: Any, kwargs: Any, outcome: Any) -> None:
        """Compare an operation.

        Raises:
            DiffersError: it differs.
        """
        known = len(self.operations)
        Recorder.record(self, func, where, args, kwargs, outcome)
        for mine in self.operations[known:]:
            if known >= len(self.whole):
                raise DiffersError(f"{where} computes {mine.name} once more with the numbers of a rank", where)
            whole = self.whole[known]
            self._compare(whole, mine, self.flow.history[known])

    def check_end(self) -> None:
        """Raise an error if the rank's forward has fewer operations."""
        if len(self.operations) < len(self.whole):
            missing = self.whole[len(self.operations)]
            raise DiffersError(
                f"{missing.where} computes {missing.name} no more with the numbers of a rank", missing.where
            )

    def _compare(self, whole: Operation, mine: Operation, states: tuple[State, ...]) -> None:
        if (whole.func, whole.where) != (mine.func, mine.where):
            raise DiffersError(
                f"{whole.where} computes {whole.name} in the whole model, and {mine.where} {mine.name} on a rank",
                whole.where,
            )
        if numbers_of(whole) != numbers_of(mine):
            pairs = zip(numbers_of(whole), numbers_of(mine), strict=False)
            a, b = next(((a, b) for a, b in pairs if a != b), ("more", "fewer"))
            raise DiffersError(
                f"{whole.where} computes {whole.name} with {a} in the whole model, and with {b} on a rank", whole.where
            )
        views = [*whole.given, *whole.results], [*mine.given, *mine.results]
        if len(views[0]) != len(views[1]):
            raise DiffersError(f"{whole.where} computes {whole.name} of other tensors on a rank", whole.where)
        for one, other, state in zip(*views, states, strict=True):
            if whole.func == "left":  # where a cut output is gathered
                self.same[one.storage] = other.storage
            if reason := self._differs(one, other, state):
                raise DiffersError(f"{whole.where} computes {whole.name} {reason}", whole.where)

    def _differs(self, whole: View, mine: View, state: State) -> str:
        """Return how a rank's tensor is not its part of the whole model's; empty if it is."""
        if whole.values is not None or mine.values is not None:
            return "" if (whole.values, whole.shape) == (mine.values, mine.shape) else "with other constants on a rank"
        if self.same.setdefault(whole.storage, mine.storage) != mine.storage:
            return "of another tensor on a rank"
        if isinstance(state, Rows):
            for degree in {self.degree, *(self.degrees[name] for name in state.sources)}:
                part = part_of(whole, state, degree)
                if part is not None and _shows(part) == _shows(mine):
                    return ""
            wanted = "whole units" if part is None else str(list(part.shape))
            return f"of {list(mine.shape)} where a rank has {wanted} of {list(whole.shape)}"
        if state is None or state == "partial":
            fits = all(
                a == b or (s == 0 and a == b * self.degree)
                for a, b, s in zip(whole.shape, mine.shape, whole.strides, strict=False)
            )
        else:
            fits = all(a in (b, b * self.degree) for a, b in zip(whole.shape, mine.shape, strict=False))
        if fits and len(whole.shape) == len(mine.shape):
            return ""
        return f"of {list(whole.shape)} in the whole model, and of {list(mine.shape)} on a rank"


def _shows(view: View) -> tuple[Any, ...]:
    """Return which elements of its storage a view shows; the stride of a dimension of one element says nothing."""
    return view.shape, view.offset, [s for size, s in zip(view.shape, view.strides, strict=True) if size > 1]


def numbers_of(op: Operation) -> list[Any]:
    """Return the numbers and words that code gave to an operation; shapes of the tensors it makes are not among them."""
    sized = not isinstance(op.func, str) and (
        op.func.overloadpacket in FILLS
        or op.func.overloadpacket in (torch.ops.aten.repeat, torch.ops.aten._unsafe_view)
        or torch.Tag.nondeterministic_seeded in op.func.tags
    )
    found: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, tuple):
            if not sized:
                for item in value:
                    collect(item)
        elif not isinstance(value, View):
            found.append(value)

    for value in (*op.args, *op.kwargs.values()):
        collect(value)
    return found


# -- a model with the shapes of a rank ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """The forward of a rank of this degree, held against that of the whole model."""

    model: nn.Module
    styles: Mapping[str, str]
    """Cut style of each module, by its path."""
    cuts: Mapping[str, WeightCut]
    degrees: Mapping[str, int]
    """Number of parts of each cut weight: the degree, or the number of heads that ranks share."""
    degree: int
    whole: list[Operation]
    flow: Flow
    forward: Forward

    def counts(self, known: Collection[Count]) -> list[Count]:
        """Return the attributes by which code counts what a rank has a part of.

        `known` are tried first. A forward that fails names a module; of the integers there and around, the one that
        brings the forward furthest is divided next.

        Raises:
            DiffersError: no attribute helps.
        """
        counts = list(known)
        reached, error = self._tried(counts)
        while error is not None:
            outcomes = [
                (*self._tried([*counts, one]), one) for one in self._candidates(error.where) if one not in counts
            ]
            best = max(outcomes, key=lambda outcome: (outcome[1] is None, outcome[0]), default=None)
            if best is None or (best[1] is not None and best[0] <= reached):
                raise error
            reached, error = best[:2]
            counts.append(best[2])
        return counts

    def _tried(self, counts: list[Count]) -> tuple[int, DiffersError | None]:
        """Return the number of operations until one differs, and why it does; with views, which may fail alone."""
        recorder = _Compared(self.whole, self.flow, self.degree, self.degrees)
        with self._shapes_of_a_rank(counts, recorder):
            try:
                self.forward(recorder)
                recorder.check_end()
            except DiffersError as error:
                return recorder.seen, error
        return recorder.seen, None

    def _candidates(self, where: str) -> Iterator[Count]:
        """Yield the integers of a module, of the cut modules below it, and of the modules around it."""
        names = where.split(".") if where else []
        around = [".".join(names[:size]) for size in range(len(names), -1, -1)]
        below = [path for path in self.styles if path != where and is_below(path, where)]
        seen: set[tuple[type, tuple[tuple[str, str], ...]]] = set()
        divisors = sorted({self.degree, *(self.degree // heads for heads in self.degrees.values())} - {1}, reverse=True)
        for path in (*around[:1], *below, *around[1:]):
            module = self.model.get_submodule(path)
            kind = type(module), tuple(sorted(_cuts_below(self.styles, path).items()))
            if kind in seen:
                continue
            seen.add(kind)
            for name, value in vars(module).items():
                if isinstance(value, int) and not isinstance(value, bool):
                    yield from (Count(path, name, by) for by in divisors if value >= by and value % by == 0)

    @contextmanager
    def _shapes_of_a_rank(self, counts: list[Count], recorder: Recorder) -> Iterator[None]:
        """Give the model the weights and the counts of a rank; afterwards it is as before."""
        modules = dict(self.model.named_modules())
        tables: list[dict[str, Any]] = [
            table for m in modules.values() for table in (m.__dict__, m._parameters, m._buffers)
        ]
        kept = [dict(table) for table in tables]
        named = {name: param for name, param in self.model.named_parameters() if name in self.cuts}
        parts = {id(param): _part(param, self.cuts[name], self.degrees[name]) for name, param in named.items()}
        gathers = {path for path, style in self.styles.items() if style == "gather"}
        whole = functools.partial(_whole, self.degree, recorder)
        try:
            for module in modules.values():
                module._parameters.update(
                    {leaf: parts[id(param)] for leaf, param in module._parameters.items() if id(param) in parts}
                )
            for count in counts:
                divide(self.model, self.styles, count)
            handles = [modules[path].register_forward_hook(whole, prepend=True) for path in gathers]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
        finally:
            for now, before in zip(tables, kept, strict=True):
                now.clear()
                now.update(before)


def _part(param: nn.Parameter, cut: WeightCut, degree: int) -> nn.Parameter:
    shape = [size // degree if dim == cut.dim else size for dim, size in enumerate(param.shape)]
    return nn.Parameter(param.new_empty(shape), requires_grad=param.requires_grad)


def _whole(degree: int, recorder: Recorder, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    recorder.paused = True
    whole = torch.cat([output] * degree, dim=-1)
    recorder.paused = False
    return whole


def divide(model: nn.Module, styles: Mapping[str, str], count: Count) -> None:
    """Divide a count of all modules that have it."""
    for path in having(model, styles, count):
        module = model.get_submodule(path)
        setattr(module, count.name, getattr(module, count.name) // count.divisor)


def having(model: nn.Module, styles: Mapping[str, str], count: Count) -> list[str]:
    """Return the paths of the modules in which a count is divided."""
    values = {path: getattr(model.get_submodule(path), count.name, None) for path in alike(model, styles, count.path)}
    return [path for path, value in values.items() if isinstance(value, int) and value % count.divisor == 0]


def alike(model: nn.Module, styles: Mapping[str, str], path: str) -> list[str]:
    """Return the paths of modules of one class that have the same cuts below them."""
    kind, below = type(model.get_submodule(path)), _cuts_below(styles, path)
    return [o for o, one in model.named_modules() if type(one) is kind and _cuts_below(styles, o) == below]


def _cuts_below(styles: Mapping[str, str], path: str) -> dict[str, str]:
    start = len(path) + 1 if path else 0
    return {inner[start:]: style for inner, style in styles.items() if is_below(inner, path)}
