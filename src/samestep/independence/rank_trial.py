"""The forward of one rank of a tensor cut, tried on the meta device with the shapes of a rank.

Weights have the shapes that the rank holds; sums over ranks are left out, and what is gathered is made whole by a
stand-in. The forward must run the operations of the whole model, one by one, with the same numbers, each on the rank's
part of the same tensors (`independence/unit_walk.py` knows which part). Code that counts its heads, neurons or features by an
attribute needs the rank's number there: the trial finds the attributes which make it succeed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.building.named_tensors import set_attributes
from samestep.errors import ModelError
from samestep.independence.dependence import Rows
from samestep.independence.dimension_maps import FILLS
from samestep.independence.feature_units import State, UnitFlow, WeightCut, part_of
from samestep.models.spec import is_below
from samestep.state.snapshot import holding
from samestep.tracing.operations import Operation, Recorder, View

Forward = Callable[[Recorder], object]
"""Runs the model's forward, with its operations recorded; raises a `ModelError` if that fails."""


@dataclass(frozen=True, slots=True)
class Count:
    """An integer attribute by which modules count what a rank has a part of, such as heads."""

    path: str
    """Path of one module that has it; modules of its class with the same cuts below have it too."""
    name: str
    divisor: int


MOST_TRIALS = 64
"""Forwards of a rank that are tried at most, besides the first."""


class DiffersError(ModelError):
    """The forward of a rank runs another operation than that of the whole model, or on other tensors."""

    def __init__(self, reason: str, where: str, after: str = "") -> None:
        super().__init__("rank-computes-otherwise", reason)
        self.where, self.after = where, after


class _Compared(Recorder):
    """Compares each operation of a rank's forward with the same one of the whole model's, as it is recorded."""

    def __init__(self, whole: list[Operation], flow: UnitFlow, degree: int, degrees: Mapping[str, int]) -> None:
        super().__init__()
        self.degree, self.degrees = degree, degrees
        written = {op.results[0].storage for op in whole if op.results and op.writes}
        pairs = list(zip(whole, flow.history, strict=True))
        self.copies = {op.results[0].storage: (op, states[0]) for op, states in pairs if _is_copy(op, written)}
        """Copies that the whole model makes, and the state of what they are copied from, by their storages."""
        self.whole = [(op, states) for op, states in pairs if not _is_copy(op, written)]
        self.mine: dict[int, Operation] = {}
        """Copies that the rank makes, which may be others: of a single head, code often makes none."""
        self.same: dict[int, int] = {}
        """Storage of the rank's forward, by that of the whole model's."""

    def record(self, func: Any, where: str, args: Any, kwargs: Any, outcome: Any) -> None:
        """Compare an operation.

        Raises:
            DiffersError: it differs.
        """
        known = len(self.operations)
        Recorder.record(self, func, where, args, kwargs, outcome)
        for rank_op in self.operations[known:]:
            whole, states = self.whole[known] if known < len(self.whole) else (None, ())
            if _is_copy(rank_op, ()) and (whole is None or whole.func != rank_op.func):
                self.mine[rank_op.results[0].storage] = self.operations.pop()
            elif whole is None or not self._is_part(whole, rank_op, states):
                reason = f"{_describe(rank_op)} once more with the numbers of a rank"
                if whole is not None:
                    reason = f"{_describe(whole)} in the whole model, and {_describe(rank_op)} on a rank"
                where = where if whole is None else whole.where
                raise DiffersError(f"{where} computes {reason}", where)

    def check_end(self) -> None:
        """Check that the rank's forward has run all operations of the whole model's.

        Raises:
            DiffersError: it has fewer.
        """
        if len(self.operations) < len(self.whole):
            missing, _ = self.whole[len(self.operations)]
            reason = f"{missing.where} computes {_describe(missing)} no more with the numbers of a rank"
            raise DiffersError(reason, missing.where)

    def _is_part(self, whole: Operation, rank_op: Operation, states: tuple[State, ...]) -> bool:
        """Return whether an operation of a rank is that of the whole model, with its numbers, on the rank's part of the same tensors."""
        views, rank_views = ([*op.given, *op.results] for op in (whole, rank_op))
        if whole.func == "left":  # where a cut output is gathered
            self.same.update((view.storage, other.storage) for view, other in zip(views, rank_views, strict=False))
        return (
            (whole.func, whole.where, numbers_of(whole)) == (rank_op.func, rank_op.where, numbers_of(rank_op))
            and len(views) == len(rank_views)
            and all(map(self._is_part_of, views, rank_views, states))
        )

    def _is_part_of(self, whole: View, rank_view: View, state: State) -> bool:
        """Return whether a rank's tensor is its part of the whole model's."""
        if whole.values is not None or rank_view.values is not None:
            return (whole.values, whole.shape) == (rank_view.values, rank_view.shape)
        if whole.numel == rank_view.numel == 0:
            return True
        sources = state.sources if isinstance(state, Rows) else ()
        for degree in {self.degree, *(self.degrees[name] for name in sources)}:
            if isinstance(state, Rows):
                part = part_of(whole, state, degree)
            else:
                part = _shrink_repeats(whole, rank_view, degree, state)
            if part is not None and part.shape == rank_view.shape:
                is_free = isinstance(state, frozenset) or state == "uniform"
                return is_free or self._shows_same(whole, rank_view, degree, state)
        return False

    def _shows_same(self, whole: View, rank_view: View, degree: int, state: State) -> bool:
        """Return whether a rank's view shows its part of the whole model's view, both taken for views of what copies were made of."""
        of_whole: View | None = whole
        while of_whole is not None and of_whole.storage in self.copies:
            copy, state = self.copies[of_whole.storage]
            of_whole = _before_copy(of_whole, copy)
        of_rank: View | None = rank_view
        while of_rank is not None and of_rank.storage in self.mine:
            of_rank = _before_copy(of_rank, self.mine[of_rank.storage])
        if of_whole is None or of_rank is None:
            return False
        if self.same.setdefault(of_whole.storage, of_rank.storage) != of_rank.storage:
            return False
        if state is None and of_whole is whole and of_rank is rank_view:
            return True
        part = part_of(of_whole, state, degree) if isinstance(state, Rows) else of_whole
        return part is not None and _shows(part) == _shows(of_rank)


def _describe(op: Operation) -> str:
    """Return an operation as text, with what it is given and computes."""
    shapes = " and ".join(str(list(view.shape)) for view in (*op.given, *op.results))
    numbers = ", ".join(str(number) for number in numbers_of(op) if isinstance(number, int | float))
    return f"{op.name} of {shapes}{f' with {numbers}' if numbers else ''}"


def _is_copy(op: Operation, written: Collection[int]) -> bool:
    """Return whether an operation copies a tensor, and neither the tensor nor the copy is written later."""
    is_clone = not isinstance(op.func, str) and op.func.overloadpacket is torch.ops.aten.clone
    return is_clone and not {op.results[0].storage, op.given[0].storage} & {*written}


def _shrink_repeats(whole: View, rank_view: View, degree: int, state: State) -> View | None:
    """Return a whole tensor as a rank sees it: with fewer repetitions of the elements that it repeats."""
    is_free = isinstance(state, frozenset) or state == "uniform"
    fits = len(whole.shape) == len(rank_view.shape) and all(
        a == b or (a == b * degree and (is_free or s == 0))
        for a, b, s in zip(whole.shape, rank_view.shape, whole.strides, strict=True)
    )
    return replace(whole, shape=rank_view.shape) if fits else None


def _before_copy(view: View, copy: Operation) -> View | None:
    """Return a view of a copy as one of the tensor that was copied, a dimension that runs over several of its dimensions as so many; None
    if it is none."""
    source, result = copy.given[0], copy.results[0]
    steps = zip(result.strides, result.shape, source.strides, strict=True)
    digits = sorted((stride, size, step) for stride, size, step in steps if size > 1)
    offset, rest, last = source.offset, view.offset - result.offset, dict[int, int]()
    for stride, _, step in reversed(digits):
        last[stride], rest = divmod(rest, stride)
        offset += last[stride] * step
    dims, fits = list[tuple[int, int]](), True
    for size, along in zip(view.shape, view.strides, strict=True):
        parts = [(size, 0)] if along == 0 else []
        for stride, count, step in digits if along else ():
            if size > 1 and stride <= along < stride * count:
                by = along // stride
                taken = min(size, count // by)
                fits &= along % stride == 0 and size % taken == 0 and (taken == size or taken * by == count)
                parts.append((taken, by * step))
                last[stride] += (taken - 1) * by
                size, along = size // taken, stride * count
        dims += reversed(parts)
    if not fits or any(last[stride] >= count for stride, count, _ in digits):
        return None
    shape, strides = (tuple(dim[at] for dim in dims) for at in (0, 1))
    return replace(view, storage=source.storage, offset=offset, shape=shape, strides=strides)


def _shows(view: View) -> tuple[int, list[tuple[int, int]]]:
    """Return which elements of its storage a view shows, in their order: their first one, and the sizes and strides of the fewest dimensions."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(view.shape, view.strides, strict=True):
        if dims and size > 1 and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size > 1:
            dims.append((size, stride))
    return view.offset, dims


def numbers_of(op: Operation) -> list[Any]:
    """Return the numbers and words that code gave to an operation; shapes of the tensors it makes are not among them."""
    sized = not isinstance(op.func, str) and (
        op.func.overloadpacket in FILLS
        or op.func.overloadpacket in (torch.ops.aten.repeat, torch.ops.aten._unsafe_view)
        or torch.Tag.nondeterministic_seeded in op.func.tags
    )
    numbers: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, tuple):
            if not sized:
                for item in value:
                    collect(item)
        elif not isinstance(value, View):
            numbers.append(value)

    for value in (*op.args, *op.kwargs.values()):
        collect(value)
    return numbers


# -- a model with the shapes of a rank ---------------------------------------------------------------


class _Failed(NamedTuple):
    """A trial of a rank's forward that fails."""

    counts: list[Count]
    reached: int
    """Number of operations until one differed; with views, which may fail alone."""
    error: DiffersError


@dataclass(frozen=True, slots=True)
class RankTrial:
    """The forward of a rank of this degree, held against that of the whole model."""

    model: nn.Module
    styles: Mapping[str, str]
    """Cut style of each module, by its path."""
    cuts: Mapping[str, WeightCut]
    degrees: Mapping[str, int]
    """Number of parts of each cut weight: the degree, or the number of heads that ranks share."""
    degree: int
    whole: list[Operation]
    flow: UnitFlow
    forward: Forward

    def counts(self, known: Collection[Count]) -> list[Count]:
        """Return the attributes by which code counts what a rank has a part of.

        `known` are tried first. A forward that fails names a module; of the integers there and around, those that bring
        the forward further are divided, the furthest first; two at once where none does alone, as where code compares
        the number of queries with that of keys. A choice that leads nowhere is taken back.

        Raises:
            DiffersError: no attributes help.
        """
        outcome = self._tried(list(known))
        if not isinstance(outcome, _Failed):
            return outcome
        counts = self._more_counts(outcome, failed := [outcome])
        if counts is None:
            raise max(failed, key=lambda trial: trial.reached).error
        return counts

    def _more_counts(self, best: _Failed, failed: list[_Failed]) -> list[Count] | None:
        """Return the counts of a failed trial and more, with which the forward succeeds; None where there are none. `failed` are all trials."""
        single = [(count,) for count in self._candidates(best.error.where) if count not in best.counts]
        pairs = [(a, b) for (a,), (b,) in itertools.combinations(single, 2) if a.path == b.path and a.name != b.name]
        for choices in (single, pairs):
            further: list[_Failed] = []
            for more in choices[: MOST_TRIALS + 1 - len(failed)]:
                outcome = self._tried([*best.counts, *more])
                if not isinstance(outcome, _Failed):
                    return outcome
                failed.append(outcome)
                further += [outcome] if outcome.reached > best.reached else []
            for trial in sorted(further, key=lambda trial: -trial.reached):
                if (counts := self._more_counts(trial, failed)) is not None:
                    return counts
            if further:
                break
        return None

    def _tried(self, counts: list[Count]) -> list[Count] | _Failed:
        """Return the counts with which a rank's forward succeeds, or how far it comes."""
        recorder = _Compared(self.whole, self.flow, self.degree, self.degrees)
        with self._shapes_of_a_rank(counts, recorder):
            try:
                self.forward(recorder)
                recorder.check_end()
            except DiffersError as error:
                return _Failed(counts, recorder.seen, error)
        return counts

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
            for name, value in set_attributes(module).items():
                if isinstance(value, int) and not isinstance(value, bool):
                    yield from (Count(path, name, by) for by in divisors if value >= by and value % by == 0)

    @contextmanager
    def _shapes_of_a_rank(self, counts: list[Count], recorder: Recorder) -> Iterator[None]:
        """Give the model the weights and the counts of a rank; afterwards it is as before."""
        modules = dict(self.model.named_modules())
        tables = [table for m in modules.values() for table in (m.__dict__, m._parameters, m._buffers)]
        named = {name: param for name, param in self.model.named_parameters() if name in self.cuts}
        parts = {id(param): _part(param, self.cuts[name], self.degrees[name]) for name, param in named.items()}
        gather = functools.partial(_whole, self.degree, recorder)
        with holding([(table, dict(table)) for table in tables]), ExitStack() as hooks:
            for module in modules.values():
                module._parameters.update(
                    {leaf: parts[id(param)] for leaf, param in module._parameters.items() if id(param) in parts}
                )
            for count in counts:
                divide(self.model, self.styles, count)
            for path, style in self.styles.items():
                if style == "gather":
                    hooks.enter_context(modules[path].register_forward_hook(gather, prepend=True))
            yield


def _part(param: nn.Parameter, cut: WeightCut, degree: int) -> nn.Parameter:
    shape = [size // degree if dim == cut.dim else size for dim, size in enumerate(param.shape)]
    return nn.Parameter(param.new_empty(shape), requires_grad=param.requires_grad)


def _whole(degree: int, recorder: Recorder, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    recorder.paused = True
    tensor = torch.cat([output] * degree, dim=-1)
    recorder.paused = False
    return tensor


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
    return [
        other for other, module in model.named_modules() if type(module) is kind and _cuts_below(styles, other) == below
    ]


def _cuts_below(styles: Mapping[str, str], path: str) -> dict[str, str]:
    start = len(path) + 1 if path else 0
    return {inner[start:]: style for inner, style in styles.items() if is_below(inner, path)}
