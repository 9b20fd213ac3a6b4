"""The tape: which operations wrote which memory while a model was built on the meta device, and their replay.

    memory 0   empty  uniform_  normal_            replayed for a.weight: normal_
    memory 1   empty  uniform_           mul_(0)   replayed for b.weight: uniform_, the same normal_ again, and mul_

A write that covers a memory whole (`normal_` over `uniform_`) makes its earlier content irrelevant. The tape identifies
tensors by memory and geometry, not as values: so views and `.data` need no entries, and operations that bypass the
dispatcher (as in `nn.Parameter`) lose nothing.

Code that asks for a tensor's device gets "cpu": `torch.nn.init` and several models skip their work on meta.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from samestep.errors import ModelError

WAY_OUT = "pass an instance instead of a build function: it is built whole on every rank from the job's seed"

_META = torch.device("meta")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as the tape identifies it: a view of a memory."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False

    @property
    def extent(self) -> tuple[int, int]:
        """Offset of the first byte, and of the byte after the last."""
        if 0 in self.size:
            return 0, 0
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    def overlaps(self, other: Ref) -> bool:
        """Return whether two tensors in one memory share bytes between their first and last ones."""
        return max(self.extent[0], other.extent[0]) < min(self.extent[1], other.extent[1])

    def window(self, storage: torch.UntypedStorage) -> Tensor:
        """Return this tensor's view of `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return tensor._neg_view() if self.neg else tensor


@dataclass(slots=True)
class _Memory:
    """One storage: its counterpart on meta, its initial bytes, and the entries that wrote it, in order."""

    meta: torch.UntypedStorage
    constant: torch.UntypedStorage | None = None
    real: torch.UntypedStorage | None = None
    """The real storage it represents; kept, so that its address is not used again."""
    foreign: bool = False
    """Whether it came from outside the tape without values."""
    writers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One operation; `args` and `kwargs` hold a `Ref` in place of each tensor."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Ref | None, ...]
    """Outputs in newly allocated memory; None for those in memory that existed before."""
    reads: frozenset[int]
    writes: frozenset[int]
    kills: frozenset[int]
    """Memories it writes whole, so that earlier writes do not matter."""
    random: bool


@dataclass(frozen=True, slots=True)
class Slice:
    """The entries from which one memory descends, in order, and the memories whose initial bytes they read."""

    entries: tuple[int, ...]
    bases: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Traits:
    """Properties of an operator that the tape needs."""

    written: tuple[tuple[int, str], ...]
    """Position and name of each argument it writes."""
    overwrites: bool
    """Whether it writes without reading the earlier content."""
    random: bool
    needs_values: bool
    only_geometry: bool
    has_device: bool


def _aten(names: str) -> frozenset[str]:
    """Return the schema names of operators of aten."""
    return frozenset(f"aten::{name}" for name in names.split())


_EMPTY = _aten("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
_LIFTS = _aten("lift_fresh lift lift_fresh_copy")
_OVERWRITES = _aten("zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_")
_NOT_THEIRS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


@functools.cache
def _traits(func: Any) -> _Traits:
    """Return the properties of an operator, from its schema."""
    arguments = func._schema.arguments
    written = [(index, a.name, a.is_out) for index, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    tags = func.tags
    return _Traits(
        written=tuple((index, name) for index, name, _ in written),
        overwrites=func._schema.name in _OVERWRITES or all(is_out for *_, is_out in written),
        random=torch.Tag.nondeterministic_seeded in tags,
        needs_values=torch.Tag.data_dependent_output in tags,
        only_geometry=torch.Tag.inplace_view in tags,
        has_device=any(a.name == "device" for a in arguments),
    )


class Tape(TorchDispatchMode):
    """Runs every operation on meta and records those that write values into memory."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[_Entry] = []
        self.memories: list[_Memory] = []
        self._number: dict[int, int] = {}
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on meta, or on real values where its outcome depends on them.

        Raises:
            ModelError: it draws from a generator of its own, or needs values that do not exist.
        """
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        traits = _traits(func)
        with torch._C.DisableTorchFunction():  # else our own questions about a tensor's device are answered "cpu"
            if func._schema.name in _LIFTS and not args[0].is_meta:
                return self.lift(args[0])
            if traits.needs_values:
                return self._answer(func, args, kwargs)
            if any(isinstance(leaf, torch.Generator) for leaf in (*args, *kwargs.values())):
                raise ModelError(
                    f"{_where()} draws from a torch.Generator of its own, but a weight's first numbers come from "
                    f"the job's seed and its name: leave generator= out, or {WAY_OUT}"
                )
            if traits.only_geometry:
                real = isinstance(args[0], Tensor) and not args[0].is_meta
                return func(*(args if real else pytree.tree_map_only(Tensor, self.twin, args)), **kwargs)
            return self._run(func, traits, args, kwargs)

    def _run(self, func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` on meta and record it.

        Raises:
            ModelError: torch cannot run it without values.
        """
        args, kwargs = pytree.tree_map_only(Tensor, self.twin, (args, kwargs))
        makes = not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
        if traits.has_device and (makes or kwargs.get("device") is not None):
            kwargs["device"] = _META
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        try:
            outcome = func(*args, **kwargs)
        except RuntimeError as error:  # torch cannot tell the outcome's shape without values
            if not isinstance(error, NotImplementedError) and torch.Tag.dynamic_output_shape not in func.tags:
                raise
            if traits.written or traits.random:
                raise ModelError(f"{_where()} runs {func}, which torch cannot run without values: {WAY_OUT}") from None
            return self._answer(func, args, kwargs)
        written = [args[index] if index < len(args) else kwargs.get(name) for index, name in traits.written]
        self.record(func, args, kwargs, outcome, written, overwrites=traits.overwrites, random=traits.random)
        return outcome

    def record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outcome: Any,
        written: Any,
        *,
        overwrites: bool,
        random: bool,
    ) -> None:
        """Record an operation, if it wrote values into memory."""
        args, kwargs = pytree.tree_map_only(Tensor, self.ref, (args, kwargs))
        seen = [leaf.memory for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Ref)]
        targets = [self.ref(leaf) for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]
        kills = {t.memory for t in targets if overwrites and seen.count(t.memory) == 1 and self._covers(t)}
        outputs: list[Ref | None] = []
        for leaf in pytree.tree_leaves(outcome):
            fresh = isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._number
            outputs.append(self.ref(leaf, fresh=True) if fresh else None)
        made = {output.memory for output in outputs if output}
        writes = made | {target.memory for target in targets}
        if not writes or getattr(getattr(func, "_schema", None), "name", None) in _EMPTY:
            return
        for memory in writes:
            self.memories[memory].writers.append(len(self.entries))
        reads = frozenset(seen) - kills
        self.entries.append(
            _Entry(func, args, kwargs, tuple(outputs), reads, frozenset(writes), frozenset(kills | made), random)
        )

    def ref(self, tensor: Tensor, fresh: bool = False, copies: bool = True) -> Ref:
        """Return a tensor's memory and geometry; the bytes of a real tensor not seen before are copied, or shared.

        Raises:
            ModelError: the tensor is not a plain strided one.
        """
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            raise ModelError(
                f"{_where()} holds a {type(tensor).__name__} of layout {tensor.layout}: only plain ones work"
            )
        storage = tensor.untyped_storage()
        memory = self._number.get(storage._cdata)
        if memory is None:
            memory = self._number[storage._cdata] = len(self.memories)
            if tensor.is_meta:
                self.memories.append(_Memory(storage, foreign=not fresh))
            else:
                self.memories.append(self._stand_in(storage, copies))
                self._number[self.memories[memory].meta._cdata] = memory
        return Ref(
            memory,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),  # type: ignore[arg-type]
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def twin(self, tensor: Tensor, copies: bool = True) -> Tensor:
        """Return the tensor on meta that represents this one: itself, if it is on meta."""
        if tensor.is_meta:
            return tensor
        ref = self.ref(tensor, copies=copies)
        return ref.window(self.memories[ref.memory].meta)

    def lift(self, tensor: Tensor) -> Tensor:
        """Return a tensor on meta whose memory starts with this one's values; this one is not tracked."""
        constant = tensor.detach().clone(memory_format=torch.contiguous_format)
        twin = torch.empty_like(constant, device=_META)
        memory = _Memory(twin.untyped_storage(), constant=constant.untyped_storage())
        self._number[memory.meta._cdata] = len(self.memories)
        self.memories.append(memory)
        return twin

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor's present values.

        Raises:
            ModelError: they are random, and so need a name that is not known yet; or they do not exist.
        """
        ref = self.ref(tensor)
        part = self.slice(ref.memory)
        if any(self.entries[entry].random for entry in part.entries):
            raise ModelError(
                f"{_where(ref, self)} looks at random values, which exist only once each tensor has its name: {WAY_OUT}"
            )
        if any(self.memories[base].foreign for base in part.bases):
            raise ModelError(f"{_where(ref, self)} looks at the values of a tensor that was on meta before: {WAY_OUT}")
        with self.paused():
            return replay(self, part, ref, _CPU, {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations on real tensors through."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def slice(self, memory: int) -> Slice:
        """Return the entries from which a memory descends: each needed memory's writers since its last whole write."""
        chosen: set[int] = set()
        walked: set[tuple[int, int]] = set()
        bases: set[int] = set()
        todo = [(memory, len(self.entries))]
        while todo:
            memory, bound = todo.pop()
            writers = self.memories[memory].writers
            for at in range(bisect.bisect_left(writers, bound) - 1, -1, -1):
                entry = writers[at]
                if (memory, entry) in walked:
                    break
                walked.add((memory, entry))
                if entry not in chosen:
                    chosen.add(entry)
                    todo.extend((read, entry) for read in self.entries[entry].reads)
                if memory in self.entries[entry].kills:
                    break
            else:
                bases.add(memory)
        return Slice(tuple(sorted(chosen)), frozenset(bases))

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on real values; the tensors that it returns are constants."""
        args, kwargs = pytree.tree_map_only(Tensor, self.read, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        return pytree.tree_map_only(Tensor, self.lift, func(*args, **kwargs))

    def _covers(self, ref: Ref) -> bool:
        """Return whether a tensor fills its memory, each element once."""
        whole = math.prod(ref.size) * ref.dtype.itemsize == self.memories[ref.memory].meta.nbytes()
        return whole and ref.offset == 0 and ref.stride == contiguous(ref.size)

    def _stand_in(self, storage: torch.UntypedStorage, copies: bool) -> _Memory:
        """Return the memory that represents a real storage; numpy may write to the storage unseen, hence the copy."""
        meta = torch.UntypedStorage(storage.nbytes(), device="meta")
        return _Memory(meta, constant=storage.clone() if copies else storage, real=storage)


def contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for length in size[:0:-1]:
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if size else ()


_TENSOR: Any = Tensor  # attributes are read by descriptor, which the type checker does not know
_DISGUISE = {_TENSOR.is_meta.__get__: False, _TENSOR.is_cpu.__get__: True, _TENSOR.device.__get__: _CPU}
_MOVES = frozenset({Tensor.cuda, Tensor.pin_memory})
_NUMPY = frozenset({_TENSOR.numpy, _TENSOR.__array__})
_READS: frozenset[Any] = frozenset({Tensor.tolist, Tensor.__format__}) | _NUMPY
_FROM_DATA: frozenset[Any] = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})


class Surface(TorchFunctionMode):
    """A function mode for calls that bypass the dispatcher: questions about devices, absent devices, reads in C++."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` as if all tensors were real and on the CPU."""
        kwargs = dict(kwargs or {})
        if func in _DISGUISE and args[0].is_meta:
            return _DISGUISE[func]
        if func in _MOVES:
            return args[0]
        if kwargs.get("device") is not None:  # on meta, torch.tensor(data) would lose its data here already
            out = kwargs.get("out")
            kwargs["device"] = _META if isinstance(out, Tensor) and out.is_meta else _CPU
        kwargs.pop("pin_memory", None)
        if func is Tensor.to:
            args = (args[0], *(_CPU if _is_device(arg) else arg for arg in args[1:]))
        if func in _READS:
            with self._tape.paused():
                outcome = func(self._tape.read(args[0]), *args[1:], **kwargs)
            if func in _NUMPY:
                outcome.flags.writeable = False  # a write to a copy would be lost silently
            return outcome
        if func in _FROM_DATA:  # a list of tensors is read in C++
            args = tuple(
                pytree.tree_map_only(Tensor, self._tape.read, arg) if isinstance(arg, list | tuple) else arg
                for arg in args
            )
        return func(*args, **kwargs)


def _is_device(arg: Any) -> bool:
    """Return whether a positional argument of `Tensor.to` is a device."""
    return isinstance(arg, torch.device | str) or (isinstance(arg, int) and not isinstance(arg, bool))


@contextmanager
def whole_truncated_normal(tape: Tape) -> Iterator[None]:
    """Tape `trunc_normal_` as one operation: it redraws until its numbers fit, which only a replay can decide."""
    original = nn.init._no_grad_trunc_normal_

    def taped(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.pop("generator", None) is not None or len(args) > 4:
            raise ModelError(f"{_where()} gives trunc_normal_ a generator of its own: leave it out, or {WAY_OUT}")
        with torch._C.DisableTorchFunction():
            tape.record(original, (tensor, *args), kwargs, None, tensor, overwrites=True, random=True)
        return tensor

    nn.init._no_grad_trunc_normal_ = taped
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@contextmanager
def process_randomness(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch for what a build function draws itself, and restore their states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _where(ref: Ref | None = None, tape: Tape | None = None) -> str:
    """Return what is being built, as far as the stack shows it: the module, its tensor, the line."""
    frame, owner, line = sys._getframe(1), None, ""
    while frame:
        code = frame.f_code
        if not line and not code.co_filename.startswith(_NOT_THEIRS):
            line = f" ({code.co_filename}:{frame.f_lineno})"
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, nn.Module) and "_parameters" in vars(candidate):
            owner = candidate
            break
        frame = frame.f_back  # type: ignore[assignment]
    if owner is None:
        return f"the build function{line}"
    named = [*owner.named_parameters(), *owner.named_buffers()] if ref and tape else []
    for name, tensor in named:
        if ref and tape and tape.ref(tensor).memory == ref.memory:
            return f"{type(owner).__name__}, at its tensor {name!r},{line}"
    return f"{type(owner).__name__}{line}"


def replay(tape: Tape, part: Slice, ref: Ref, device: torch.device, keys: dict[int, int]) -> Tensor:
    """Run a slice of the tape on `device` and return the tensor `ref`, contiguous and alone in its memory."""
    storages: dict[int, torch.UntypedStorage] = {}
    last = {memory: e for e in part.entries for memory in tape.entries[e].reads | tape.entries[e].writes}
    last[ref.memory] = len(tape.entries)

    def window(ref: Ref) -> Tensor:
        if ref.memory not in storages:
            memory = tape.memories[ref.memory]
            if memory.constant is not None:
                held = torch.empty(0, dtype=torch.uint8, device=memory.constant.device).set_(memory.constant)
                storages[ref.memory] = held.to(device, copy=True).untyped_storage()
            else:  # torch.empty guarantees no values, but every rank must get the same ones
                zeros = torch.zeros(memory.meta.nbytes(), dtype=torch.uint8, device=device)
                storages[ref.memory] = zeros.untyped_storage()
        return ref.window(storages[ref.memory])

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        constant = tape.memories[ref.memory].constant
        if not part.entries and constant is not None:  # without moving the whole memory
            return _alone(ref.window(constant).to(device, copy=True))
        for number in part.entries:
            entry = tape.entries[number]
            args, kwargs = pytree.tree_map_only(Ref, window, (entry.args, entry.kwargs))
            if "device" in kwargs:
                kwargs["device"] = device
            with _drawing(device, keys[number]) if entry.random else nullcontext():
                outcome = entry.func(*args, **kwargs)
            _keep(entry, outcome, storages, tape)
            del args, kwargs, outcome
            for memory in entry.reads | entry.writes:
                if last[memory] == number:
                    storages.pop(memory, None)
        return _alone(window(ref))


def _keep(entry: _Entry, outcome: Any, storages: dict[int, torch.UntypedStorage], tape: Tape) -> None:
    """Keep the memory an entry made, in the geometry that the tape recorded: kernels may choose other strides."""
    leaves = pytree.tree_leaves(outcome)
    for ref, made in zip(entry.outputs, leaves if entry.outputs else (), strict=False):
        if ref is None or ref.memory in storages:
            continue
        storage, size_bytes = made.untyped_storage(), tape.memories[ref.memory].meta.nbytes()
        if made.stride() != ref.stride or made.storage_offset() != ref.offset or storage.nbytes() != size_bytes:
            storage = torch.zeros(size_bytes, dtype=torch.uint8, device=made.device).untyped_storage()
            ref.window(storage).copy_(made)
        storages[ref.memory] = storage


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous in a memory of its own, copied only if necessary."""
    tensor = tensor.resolve_conj().resolve_neg()
    size_bytes = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size_bytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@contextmanager
def _drawing(device: torch.device, key: int) -> Iterator[None]:
    """Seed the device's default generator by `key`, and put it back as it was.

    Not a generator of its own, since many random operators take none; not `torch.manual_seed`, which reseeds every
    other device too.
    """
    if device.type == "cpu":
        generator = torch.default_generator
    else:
        module = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        generator = module.default_generators[index]
    before = generator.get_state()
    generator.manual_seed(key)
    try:
        yield
    finally:
        generator.set_state(before)
