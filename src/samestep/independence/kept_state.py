"""What a forward keeps: buffers, weights and attributes of modules that it writes and a later forward may read.

A step of one device runs the forward once, on the whole batch. A layout runs it on a part of the samples, or several
times, so whatever a forward writes may differ. The trace compares the modules before and after, and looks at every
operation that writes in place. Where anything has changed, the forward is traced three times more from the same start:

    A   on n samples         what does it write, and does that depend on the samples?
    B   on n samples again   what does it write again, and what does it read of what A has written?
    C   on 2n samples        which numbers depend on how many samples there are?

Dependence is carried along the operations: a storage depends on what those depended on that it was computed from.

    written by A alone, not from samples             a cache (rotary tables, masks): no state
    replaced by B, and not read before               a note of the last forward (activations, statistics): no state
    written by B again, or from samples and read     state

Afterwards the modules are as they were: no tensor of the meta device stays in a cache, and the first real forward makes
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.building.named_tensors import address
from samestep.errors import ModelError
from samestep.independence.dimension_maps import FILLS, OVERWRITES
from samestep.models.spec import ModelSpec, StateKind, StateSpec
from samestep.state.named_variables import Variable
from samestep.state.snapshot import OUTSIDE, Content, Snapshot, changed_slots
from samestep.tracing.forward import ForwardTracer, ValueOf
from samestep.tracing.meta_tensors import NeedsValuesError, mutated_operands
from samestep.tracing.operations import Analysis, Events, Executed
from samestep.tracing.watched_forward import watch_forward
from samestep.trees import can_be_kept, operands, tensors_in, tree_leaves

_FEW = 16
_MOST_JUMPS, _LARGEST_JUMP = 8, 10_000
SAMPLES = -1
"""The label of what depends on the values of the samples; other labels are addresses of storages."""


def has_changed(start: Snapshot, module: nn.Module, events: Events) -> bool:
    """Return whether a traced forward has changed its modules or written into their tensors, or counts tokens."""
    after = Snapshot(module)
    addresses = {address(tensor) for value in after.values.values() for tensor in value.tensors}
    return bool(addresses & events.written) or bool(events.counting) or bool(changed_slots(start, after))


# -- dependence ------------------------------------------------------------------------------------


def _call_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return an operation with all it is given, tensors by their shapes, and those of a few real numbers by these."""

    def seen(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return (leaf.shape, None if leaf.is_meta or leaf.numel() > _FEW else repr(leaf.tolist()))
        return repr(leaf)

    return str(func), [seen(leaf) for leaf in tree_leaves((args, kwargs))]


class _Labels(Analysis):
    """Carries, for each storage of a forward, the labels of what it was computed from."""

    def __init__(self, module: nn.Module, keeps_all: bool) -> None:
        self.tracer = ForwardTracer(module, {}, keeps_all, analysis=self, has_backward=False)
        self.key = self.tracer.key
        self.labels: dict[int, set[int]] = {}
        self.used: set[int] = set()
        """Storages that some operation has read or looked at."""
        self.written: dict[int, set[int]] = {}
        """The labels of what was written into each storage."""
        self.overwritten: set[int] = set()
        """Storages whose first use was to be overwritten as a whole."""
        self.looked_at: set[int] = set()
        """Labels of values that the code has looked at."""
        self.calls: list[Any] = []
        """The operations, with their numbers and shapes."""

    def made_on_meta(self, made: Tensor, real: Tensor) -> None:
        """Set the label of a tensor that stands for a real one."""
        self.labels[address(made)] = self.labels.get(address(real), set()) | {address(real)}
        self.used.add(address(real))

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an operation, and what it uses, looks at or overwrites."""
        self.calls.append(_call_of(func, args, kwargs))
        keys = {self.key(tensor) for tensor in operands(*args, *kwargs.values())}
        for tensor in mutated_operands(func, args, kwargs):
            is_whole = tensor.numel() == tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
            if self.key(tensor) not in self.used and func.overloadpacket in OVERWRITES and is_whole:
                self.overwritten.add(self.key(tensor))
        self.used |= keys
        if torch.Tag.data_dependent_output in func.tags:
            self.looked_at |= self._labels_of(keys)

    def ran(self, op: Executed) -> Any:
        """Give the results of an operation, and what it writes into, the labels of its operands."""
        labels = self._labels_of({self.key(tensor) for tensor in operands(*op.args, *op.kwargs.values())})
        if op.func.overloadpacket not in FILLS:
            self._label(op.given, operands(op.outcome))
        for tensor in mutated_operands(op.func, op.args, op.kwargs):
            self.written.setdefault(self.key(tensor), set()).update(labels)
            self.labels.setdefault(self.key(tensor), set()).update(labels)
        return op.outcome

    def attended(self, call: AttentionCall, output: Tensor) -> None:
        """Give the output of an attention the labels of its operands."""
        self._label(operands(*call[:4]), [output])

    def _label(self, sources: list[Tensor], results: list[Tensor]) -> None:
        """Give the results of a computation the labels of its operands."""
        keys = {self.key(tensor) for tensor in sources}
        self.used |= keys
        labels = self._labels_of(keys)
        for tensor in results:
            if tensor.is_meta and self.key(tensor) not in keys:
                self.labels.setdefault(self.key(tensor), set()).update(labels)

    def take_values(self, kind: Literal["sum", "cat"], x: Tensor, result: Tensor) -> None:
        """Let a value of all samples, which every rank computes alike, be none of the samples at hand."""
        self.labels[self.key(result)] = self.labels.get(self.key(x), set()) - {SAMPLES}

    def keep(self, buffer: Tensor, value: Tensor) -> None:
        """Take a value of the samples at hand for one that the forward writes; what is the same on all ranks is no such state."""
        if SAMPLES in (labels := self._labels_of({self.key(value)})):
            self.written.setdefault(self.key(buffer), set()).update(labels)

    def given(self, batch: Any) -> None:
        """Label the tensors of the batch, which are the samples."""
        for tensor in tensors_in(batch):
            self.labels[self.key(tensor)] = {SAMPLES}

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the values of the samples."""
        return SAMPLES in self.labels.get(address(tensor), ())

    def _labels_of(self, keys: set[int]) -> set[int]:
        return keys.union(*(self.labels.get(key, ()) for key in keys))


@dataclass(slots=True)
class _Traced:
    """One traced forward and the modules after it."""

    watch: _Labels
    after: Snapshot
    reached: set[int] = field(default_factory=set)
    """Labels of the outputs, and of what the code has looked at."""


def examine(
    module: nn.Module, sample: Any, spec: ModelSpec, num_samples: int, value_of: ValueOf
) -> tuple[StateSpec, ...]:
    """Return what a forward keeps that another forward may read; the modules are unchanged afterwards.

    Raises:
        ModelError: the forward does not run on other samples, or again.
    """

    def run(count: int) -> _Traced:
        watch = _Labels(module, keeps_all=bool(spec.varies_at))
        try:
            outputs = watch_forward(module, sample, count, watch.tracer, value_of, spec.name)
        except NeedsValuesError:
            raise ModelError(
                "forward-looks-at-values",
                f"{spec.name} cannot be traced again: {watch.tracer.reached} looks at a value",
            ) from None
        reached = watch._labels_of({address(tensor) for tensor in tensors_in(outputs)}) | watch.looked_at
        return _Traced(watch, Snapshot(module), reached)

    def follows(counters: list[Variable], count: int) -> bool:
        """Return whether two forwards with all counters near a number do something else than the first."""
        start.restore()
        for counter in counters:
            counter.put(count)
        try:
            return any(run(num_samples).watch.calls != known.watch.calls for known in (first, again))
        except (ModelError, NeedsValuesError, RuntimeError):
            return True

    start = Snapshot(module)
    try:
        first = run(num_samples)
        again = run(num_samples)
        acts = run(num_samples).watch.calls != again.watch.calls  # not the first one's, which may fill caches
        start.restore()
        wider = run(2 * num_samples)
        counters = [] if acts else list(counters_of(start, first.after, again.after))
        acts = acts or any(follows(counters, count - 1) for count in jumps_of(start, counters))
    finally:
        start.restore()
    states = [
        *_find_written_state(module, start, first, again),
        *_find_replaced_state(start, first, again, wider, looks=bool(spec.varies_at), acts=acts),
    ]
    states += [StateSpec(owner=path, name="weight", kind="counts") for path in first.watch.tracer.events.counting[-1:]]
    modules = dict(module.named_modules())
    return tuple(_with_form(state, modules) for state in states if not _is_known(module, state, spec))


def _with_form(state: StateSpec, modules: Mapping[str, nn.Module]) -> StateSpec:
    """Return what a forward keeps, with whether a layout can put it back."""
    owner = modules.get(state.owner)
    if owner is None or state.of_samples or state.kind not in ("buffer", "attribute"):
        return state
    values = owner._buffers if state.name in owner._buffers else vars(owner)
    return replace(state, is_restorable=can_be_kept(values.get(state.name)))


def counters_of(start: Snapshot, first: Snapshot, again: Snapshot) -> Iterator[Variable]:
    """Yield the numbers that the first forward has changed, and the second one again."""
    later = {id(container): items for container, items in first.containers}
    latest = {id(container): items for container, items in again.containers}
    for container, items in start.containers:
        after, last = later.get(id(container)), latest.get(id(container))
        if (
            after is None
            or last is None
            or isinstance(container, set)
            or len(items) != len(after)
            or len(after) != len(last)
        ):
            continue
        for key in items if isinstance(container, dict) else range(len(items)):
            now = after.get(key) if isinstance(after, dict) else after[key]
            if _is_number(items[key]) and _is_number(now) and items[key] != now:
                yield Variable("", container, key, now)
    for name, variable in start.variables.items():
        after = first.variables.get(name)
        if after and _is_number(variable.value) and _is_number(after.value) and variable.value != after.value:
            yield variable


def acts_by_calls(holder: Callable[..., Any], is_alike: Callable[[], bool]) -> bool:
    """Return whether a function comes to compute something else by the number of its calls, which `holder` counts.

    `is_alike` calls it, and returns whether its result is the one at first.
    """
    states = [Snapshot(holder) for _ in range(3) if is_alike()]
    counters = list(counters_of(*states)) if len(states) == 3 else []
    for count in jumps_of(states[0], counters) if counters else ():
        for counter in counters:
            counter.put(count - 1)
        if not (is_alike() and is_alike()):
            return True
    return len(states) < 3


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def jumps_of(start: Snapshot, counters: list[Variable]) -> list[int]:
    """Return the numbers near which counters are tried: those of the attributes and of the code, and a large one."""
    if not counters:
        return []
    numbers = {int(number) for number in start.numbers if 1 < int(number) < _LARGEST_JUMP}
    return [*sorted(numbers)[-_MOST_JUMPS:], _LARGEST_JUMP]


def _is_known(module: nn.Module, state: StateSpec, spec: ModelSpec) -> bool:
    """Return whether it is a statistic of one of torch's norms, which a rule of this file reproduces."""
    return state.owner in spec.coupled_modules and state.name in ("running_mean", "running_var", "num_batches_tracked")


def _find_written_state(module: nn.Module, start: Snapshot, first: _Traced, again: _Traced) -> Iterator[StateSpec]:
    """Yield the tensors that were there at the start and that forwards write into."""
    weights = {address(param) for param in module.parameters()}
    listed: set[int] = set()
    for (owner, name), value in start.values.items():
        for tensor in value.tensors:
            key = address(tensor)
            labels = first.watch.written.get(key, set()) | again.watch.written.get(key, set())
            is_written = key in first.watch.written or key in again.watch.written
            if not is_written or key in listed or key in again.watch.overwritten:
                continue
            listed.add(key)
            if SAMPLES in labels or key in again.watch.written:
                yield StateSpec(
                    owner=owner if owner != OUTSIDE else "",
                    name=name,
                    kind="weight" if key in weights else _kind(owner, "buffer"),
                    of_samples=SAMPLES in labels,
                    is_read=key in (first.reached | again.reached),
                )


def _find_replaced_state(
    start: Snapshot, first: _Traced, again: _Traced, wider: _Traced, *, looks: bool, acts: bool
) -> Iterator[StateSpec]:
    """Yield the attributes that forwards replace, and of which a later forward reads what an earlier one left.

    `acts` tells whether forwards do something else once numbers that they keep have changed.
    """
    none = Content(None, [])
    for slot in sorted(changed_slots(start, first.after) | changed_slots(first.after, again.after)):
        old, new, newer, wide = (seen.values.get(slot, none) for seen in (start, first.after, again.after, wider.after))
        known = set(old.identities)
        new_tensors = [tensor for tensor, where in zip(new.tensors, new.identities, strict=True) if where not in known]
        read = [tensor for tensor in new_tensors if address(tensor) in again.watch.used]
        of_samples = any(first.watch.depends(tensor) for tensor in read)
        counts = (
            acts and newer.skeleton != new.skeleton and not (new_tensors and not read and _only_tensors(new, newer))
        )
        written = any(address(tensor) in again.watch.written for tensor in read)
        is_weight = bool(old.tensors) and old.skeleton == new.skeleton and isinstance(old.tensors[0], nn.Parameter)
        if (
            of_samples
            or counts
            or (read and (written or newer.identities != new.identities))
            or (is_weight and new_tensors)
        ):
            yield StateSpec(
                owner=slot[0] if slot[0] != OUTSIDE else "",
                name=slot[1],
                kind="weight" if is_weight else _kind(slot[0], "attribute"),
                of_samples=of_samples or (counts and (looks or wide.skeleton != new.skeleton)),
                is_read=True,
            )


def _kind(owner: str, kind: StateKind) -> StateKind:
    return "variable" if owner == OUTSIDE else kind


def _only_tensors(value: Content, other: Content) -> bool:
    """Return whether both are flat containers of tensors alone, as a log of activations is."""
    return all(
        isinstance(seen.skeleton, tuple) and len(seen.skeleton) == 1 + len(seen.tensors) for seen in (value, other)
    )
