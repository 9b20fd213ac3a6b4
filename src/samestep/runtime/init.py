"""Taped initialisation: each tensor's first value is a function of (seed, its full name), whatever the layout.

The model is built on the meta device, where nothing has values, while a tape writes down which operations wrote
which memory. To make one tensor is to replay the entries its memory descends from, and no others:

    memory 0   empty  uniform_  normal_            materialize("a.weight") = normal_ seeded by (seed, "a.weight", 0)
    memory 1   empty  uniform_           mul_(0)   materialize("b.weight") = uniform_ seeded by (seed, "b.weight", 0),
                                                                             the same normal_ again, and mul_

A write that covers a memory whole (`normal_` over `uniform_`) makes what stood there before irrelevant. A random
entry is keyed by the first name that descends from it, so all that descend from it see the same numbers. Tensors are
known by their memory and geometry, not as values: views and `.data` then need no entries, and nothing that happens
behind the dispatcher's back (as in `nn.Parameter`) is lost. The idea of recording and replaying an initialisation is
that of torchdistX's deferred_init (Meta, 2022); the keys by name, and so the equality between layouts, are ours.

Code that asks a tensor where it lives is told "cpu": `torch.nn.init` and several models skip their work on meta.
"""

from __future__ import annotations

import bisect
import copy
import functools
import hashlib
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from samestep.errors import ModelError, did_you_mean

WAY_OUT = "pass an instance instead of a build function: it is built whole on every rank from the job's seed"

_META = torch.device("meta")
_CPU = torch.device("cpu")
_RESERVED = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor as the tape knows it: a window on a memory."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False

    @property
    def extent(self) -> tuple[int, int]:
        """First byte, and the byte after the last."""
        if 0 in self.size:
            return 0, 0
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    def overlaps(self, other: _Ref) -> bool:
        """Say whether the spans of two tensors in one memory meet."""
        return max(self.extent[0], other.extent[0]) < min(self.extent[1], other.extent[1])

    def window(self, storage: torch.UntypedStorage) -> Tensor:
        """Look at `storage` as this tensor does."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return tensor._neg_view() if self.neg else tensor


@dataclass(slots=True)
class _Memory:
    """One storage: its stand-in on meta, the bytes it began with, and the entries that wrote it, in order."""

    meta: torch.UntypedStorage
    constant: torch.UntypedStorage | None = None
    real: torch.UntypedStorage | None = None
    """The real storage it stands for; kept, so that its address is not used again."""
    foreign: bool = False
    """It came from outside the tape without values."""
    writers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One operation; `args` and `kwargs` hold a `_Ref` where a tensor stood."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[_Ref | None, ...]
    """Outputs in memory of their own; None for those in memory that was there before."""
    reads: frozenset[int]
    writes: frozenset[int]
    kills: frozenset[int]
    """Memories it writes whole, so that earlier writes do not matter."""
    random: bool


@dataclass(frozen=True, slots=True)
class _Slice:
    """The entries one memory descends from, in order, and the memories whose first bytes they see."""

    entries: tuple[int, ...]
    bases: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Traits:
    """What the tape must know of an operator."""

    written: tuple[tuple[int, str], ...]
    """Position and name of each argument it writes."""
    overwrites: bool
    """It writes without reading what was there."""
    random: bool
    needs_values: bool
    only_geometry: bool
    has_device: bool


def _aten(names: str) -> frozenset[str]:
    """Write out schema names."""
    return frozenset(f"aten::{name}" for name in names.split())


_EMPTY = _aten("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
_LIFTS = _aten("lift_fresh lift lift_fresh_copy")
_OVERWRITES = _aten("zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_")
_TORCH_FOLDER = os.path.dirname(torch.__file__)


@functools.cache
def _traits(func: Any) -> _Traits:
    """Read an operator's schema."""
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


class _Tape(TorchDispatchMode):
    """Runs every operation on meta and writes down those that put values into memory."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[_Entry] = []
        self.memories: list[_Memory] = []
        self._number: dict[int, int] = {}
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out `func` on meta, or on real values where its outcome depends on them."""
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
        """Carry out `func` on meta and write it down."""
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
        """Write an operation down, if it put values into memory."""
        args, kwargs = pytree.tree_map_only(Tensor, self.ref, (args, kwargs))
        seen = [leaf.memory for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Ref)]
        targets = [self.ref(leaf) for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]
        kills = {t.memory for t in targets if overwrites and seen.count(t.memory) == 1 and self._covers(t)}
        outputs: list[_Ref | None] = []
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

    def ref(self, tensor: Tensor, fresh: bool = False, copies: bool = True) -> _Ref:
        """Name a tensor's memory and geometry; of a real one not seen before the bytes are copied, or shared."""
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
        return _Ref(
            memory,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),  # type: ignore[arg-type]
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def twin(self, tensor: Tensor, copies: bool = True) -> Tensor:
        """Return the tensor on meta that stands for this one: itself, if it is there already."""
        if tensor.is_meta:
            return tensor
        ref = self.ref(tensor, copies=copies)
        return ref.window(self.memories[ref.memory].meta)

    def lift(self, tensor: Tensor) -> Tensor:
        """Return a tensor on meta whose memory begins with this one's values, and forget this one."""
        constant = tensor.detach().clone(memory_format=torch.contiguous_format)
        twin = torch.empty_like(constant, device=_META)
        memory = _Memory(twin.untyped_storage(), constant=constant.untyped_storage())
        self._number[memory.meta._cdata] = len(self.memories)
        self.memories.append(memory)
        return twin

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor's present values; random ones are refused, since their names are not yet known."""
        ref = self.ref(tensor)
        part = self.slice(ref.memory)
        if any(self.entries[entry].random for entry in part.entries):
            raise ModelError(
                f"{_where(ref, self)} looks at numbers that are random, which exist only once each tensor has its "
                f"name: {WAY_OUT}"
            )
        if any(self.memories[base].foreign for base in part.bases):
            raise ModelError(f"{_where(ref, self)} looks at the values of a tensor that was on meta before: {WAY_OUT}")
        with self.paused():
            return _replay(self, part, ref, _CPU, {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations on real tensors through."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def slice(self, memory: int) -> _Slice:
        """Collect what a memory descends from: each needed memory's writers, back to one that writes it whole."""
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
        return _Slice(tuple(sorted(chosen)), frozenset(bases))

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operation on real values; tensors that come out are constants."""
        args, kwargs = pytree.tree_map_only(Tensor, self.read, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        return pytree.tree_map_only(Tensor, self.lift, func(*args, **kwargs))

    def _covers(self, ref: _Ref) -> bool:
        """Say whether a tensor fills its memory, each element once."""
        whole = math.prod(ref.size) * ref.dtype.itemsize == self.memories[ref.memory].meta.nbytes()
        return whole and ref.offset == 0 and ref.stride == _contiguous(ref.size)

    def _stand_in(self, storage: torch.UntypedStorage, copies: bool) -> _Memory:
        """Make the memory that stands for a real storage; numpy may write to it unseen, hence the copy."""
        meta = torch.UntypedStorage(storage.nbytes(), device="meta")
        return _Memory(meta, constant=storage.clone() if copies else storage, real=storage)


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1]
    for length in size[:0:-1]:
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if size else ()


_TENSOR: Any = Tensor  # attributes are asked for by descriptor, which the type checker does not know
_DISGUISE = {_TENSOR.is_meta.__get__: False, _TENSOR.is_cpu.__get__: True, _TENSOR.device.__get__: _CPU}
_MOVES = frozenset({Tensor.cuda, Tensor.pin_memory})
_NUMPY = frozenset({_TENSOR.numpy, _TENSOR.__array__})
_READS: frozenset[Any] = frozenset({Tensor.tolist, Tensor.__format__}) | _NUMPY
_FROM_DATA: frozenset[Any] = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})


class _Surface(TorchFunctionMode):
    """What the dispatcher never sees: questions about the device, devices that are not here, reads in C++."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out `func` as if all tensors were real and on the CPU."""
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
                outcome.flags.writeable = False  # what is written to a copy would be lost silently
            return outcome
        if func in _FROM_DATA:  # a list of tensors is read in C++
            args = tuple(
                pytree.tree_map_only(Tensor, self._tape.read, arg) if isinstance(arg, list | tuple) else arg
                for arg in args
            )
        return func(*args, **kwargs)


def _is_device(arg: Any) -> bool:
    """Say whether a positional argument of `Tensor.to` is a device."""
    return isinstance(arg, torch.device | str) or (isinstance(arg, int) and not isinstance(arg, bool))


@contextmanager
def _whole_truncated_normal(tape: _Tape) -> Iterator[None]:
    """Tape `trunc_normal_` as one operation: it redraws until its numbers fit, which only replaying can tell."""
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
def _process_randomness(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch for what a build function draws itself, and put all back as it was."""
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


def _where(ref: _Ref | None = None, tape: _Tape | None = None) -> str:
    """Say who is at work, as far as the stack tells: the module being built, its tensor, the line."""
    frame, owner, line = sys._getframe(1), None, ""
    while frame:
        code = frame.f_code
        if not line and code.co_filename != __file__ and not code.co_filename.startswith(_TORCH_FOLDER):
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


def _replay(tape: _Tape, part: _Slice, ref: _Ref, device: torch.device, keys: dict[int, int]) -> Tensor:
    """Carry out a slice on `device` and return the tensor `ref`, contiguous and alone in its memory."""
    storages: dict[int, torch.UntypedStorage] = {}
    last = {memory: e for e in part.entries for memory in tape.entries[e].reads | tape.entries[e].writes}
    last[ref.memory] = len(tape.entries)

    def window(ref: _Ref) -> Tensor:
        if ref.memory not in storages:
            memory = tape.memories[ref.memory]
            if memory.constant is not None:
                held = torch.empty(0, dtype=torch.uint8, device=memory.constant.device).set_(memory.constant)
                storages[ref.memory] = held.to(device, copy=True).untyped_storage()
            else:  # torch.empty promises nothing, but every rank must see the same nothing
                zeros = torch.zeros(memory.meta.nbytes(), dtype=torch.uint8, device=device)
                storages[ref.memory] = zeros.untyped_storage()
        return ref.window(storages[ref.memory])

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        constant = tape.memories[ref.memory].constant
        if not part.entries and constant is not None:  # no need to move the memory it is a part of
            return _alone(ref.window(constant).to(device, copy=True))
        for number in part.entries:
            entry = tape.entries[number]
            args, kwargs = pytree.tree_map_only(_Ref, window, (entry.args, entry.kwargs))
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


def _keep(entry: _Entry, outcome: Any, storages: dict[int, torch.UntypedStorage], tape: _Tape) -> None:
    """Keep the memory an entry made, in the geometry that the tape wrote down: kernels may choose other strides."""
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
    """Return the tensor contiguous in a memory of its own, copied only if it is not yet."""
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


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model on the meta device, and how each of its tensors is made.

    Every parameter, buffer and other tensor attribute of `module` is on meta. `canonical` maps every name of a tensor
    to its first one: names of a tied parameter, of a module that is used twice.
    """

    module: nn.Module
    seed: int
    canonical: dict[str, str]
    _tape: _Tape = field(repr=False)
    _refs: dict[str, _Ref] = field(repr=False)
    _slices: dict[int, _Slice] = field(repr=False)
    _keys: dict[int, int] = field(repr=False)
    _parameters: tuple[str, ...] = field(repr=False)

    def materialize(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Make the whole tensor `name`: detached, contiguous, in a memory of its own that is the caller's to free.

        Equal bits on every rank (per device type), in whatever order and number tensors are made; the process's random
        state stays as it was. `dtype` casts what was drawn in the model's own dtype.

        Raises:
            ModelError: the model has no such tensor, or it has no values.
        """
        ref = self._refs.get(name)
        if ref is None:
            raise ModelError(f"the model has no tensor {name!r}{did_you_mean(name, self._refs)}")
        part = self._slices[ref.memory]
        if any(self._tape.memories[base].foreign for base in part.bases):
            raise ModelError(f"{name} was made on the meta device outside the build function, so it has no values")
        made = _replay(self._tape, part, ref, torch.device(device), self._keys)
        return made if dtype is None else made.to(dtype)


def blueprint(source: Callable[[], nn.Module] | nn.Module, seed: int) -> Blueprint:
    """Build a model on the meta device, and remember how each of its tensors is made.

    A build function is taped; of an instance the values are kept (not copied: do not train it meanwhile). Values that
    a build function looks at (`.item()`, `if`, `.numpy()`) are computed at once, unless they are random.

    Raises:
        ModelError: the first values cannot be a function of seed and name; the text names the module or the tensor.
    """
    tape = _Tape()
    if isinstance(source, nn.Module):
        module = source
    else:
        surface = _Surface(tape)
        with _process_randomness(seed), _whole_truncated_normal(tape), tape, surface, torch.device("cpu"):
            module = _call(source)
        if not isinstance(module, nn.Module):
            raise ModelError(f"the build function returned a {type(module).__name__}; it must return an nn.Module")
    module = _on_meta(module, tape, from_instance=module is source)
    places = list(_places(module))
    refs = {place.name: tape.ref(place.tensor) for place in places}
    slices = {ref.memory: tape.slice(ref.memory) for ref in refs.values()}
    parameters = [place for place in places if place.kind == "parameter"]
    _check_parameters(parameters, refs, slices, tape)
    first: dict[tuple[int, _Ref], str] = {}
    canonical = {p.name: first.setdefault((id(p.tensor), refs[p.name]), p.name) for p in places}
    keys = _random_keys(seed, [(name, slices[refs[name].memory]) for name in canonical], tape)
    return Blueprint(module, seed, canonical, tape, refs, slices, keys, tuple(p.name for p in parameters))


def _call(source: Callable[[], nn.Module]) -> nn.Module:
    """Call the build function; what torch says of values that are not there becomes our error."""
    try:
        return source()
    except RuntimeError as error:
        if "meta tensor" in str(error):
            raise ModelError(
                f"the build function looks at values that do not exist yet ({error}): {WAY_OUT}"
            ) from error
        raise


def fill_rest(blueprint: Blueprint, device: torch.device, float_dtype: torch.dtype | None = None) -> None:
    """Give every buffer and tensor attribute of the module that is still on meta its value.

    Parameters are the caller's (set them by `setattr`: an LSTM keeps a list of its own). Attributes are tensors in a
    module's `__dict__`, also within lists, tuples and dicts there. Two names of one tensor stay one tensor. Floating
    ones are cast to `float_dtype`. An attribute that is a window on a parameter's memory stays on meta: the parameter
    will move, and using the stale window must fail aloud.

    Raises:
        ModelError: a buffer is a window on a parameter's memory.
    """
    refs = blueprint._refs
    owned: dict[int, list[str]] = {}
    for name in blueprint._parameters:
        owned.setdefault(refs[name].memory, []).append(name)
    made: dict[_Ref, Tensor] = {}

    def fill(name: str, tensor: Tensor, is_buffer: bool) -> Tensor:
        ref = refs.get(name)
        if ref is None or not tensor.is_meta:
            return tensor
        for parameter in owned.get(ref.memory, ()):
            if refs[parameter].overlaps(ref):
                if is_buffer:
                    raise ModelError(f"buffer {name} is a window on parameter {parameter}; register a clone of it")
                return tensor
        if ref not in made:
            made[ref] = blueprint.materialize(name, device, float_dtype if ref.dtype.is_floating_point else None)
        value = made[ref]
        return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value

    for prefix, module in blueprint.module.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = fill(_join(prefix, key), buffer, True)
        _map_attributes(prefix, module, functools.partial(fill, is_buffer=False))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor stands in a module."""

    name: str
    kind: str
    """parameter, buffer or attribute."""
    tensor: Tensor


def _places(module: nn.Module) -> Iterator[_Place]:
    """Find every tensor under every name: parameters, then buffers, then attributes, each in the module's order."""
    modules = list(module.named_modules(remove_duplicate=False))
    for kind, held in (("parameter", "_parameters"), ("buffer", "_buffers")):
        for prefix, owner in modules:
            for key, tensor in getattr(owner, held).items():
                if tensor is not None:
                    yield _Place(_join(prefix, key), kind, tensor)
    parameters = {id(parameter) for parameter in module.parameters()}
    found: list[_Place] = []

    def find(name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters:
            found.append(_Place(name, "attribute", tensor))
        return tensor

    for prefix, owner in modules:
        _map_attributes(prefix, owner, find)
    yield from found


def _map_attributes(prefix: str, module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Put `change(name, tensor)` in the place of every tensor attribute of one module."""
    attributes = vars(module)
    for key in [key for key in attributes if key not in _RESERVED]:
        before = attributes[key]
        after = _map_within(_join(prefix, key), before, change, depth=3)
        if after is not before:
            attributes[key] = after


def _map_within(name: str, value: Any, change: Callable[[str, Tensor], Tensor], depth: int) -> Any:
    """Change a tensor, or those in a list, a dict (both in place) or a tuple."""
    if isinstance(value, Tensor):
        return change(name, value)
    if depth == 0:
        return value
    items: Iterable[tuple[Any, Any]]
    if type(value) is dict or type(value) is list:
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, item in items:
            after = _map_within(f"{name}.{key}", item, change, depth - 1)
            if after is not item:
                value[key] = after
    elif type(value) is tuple:
        after = tuple(_map_within(f"{name}.{key}", item, change, depth - 1) for key, item in enumerate(value))
        return after if any(a is not b for a, b in zip(after, value, strict=True)) else value
    return value


def _join(prefix: str, key: str) -> str:
    """Write a full name."""
    return f"{prefix}.{key}" if prefix else key


def _on_meta(module: nn.Module, tape: _Tape, from_instance: bool) -> nn.Module:
    """Return the module with all tensors on meta: itself if they are, else a copy that keeps its ties and its tags."""
    memo: dict[int, Any] = {}
    for place in _places(module):
        tensor = place.tensor
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ModelError(f"{place.name} has no shape yet (a lazy module): run one forward and pass the instance")
        if tensor.is_meta and from_instance:
            raise ModelError(f"{place.name} is on the meta device, so it has no values: pass a build function instead")
        twin = tensor
        if not tensor.is_meta:
            twin = tape.twin(tensor.detach(), copies=False)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, tensor.requires_grad)
            twin.__dict__.update(tensor.__dict__)
        memo.setdefault(id(tensor), twin)
    if not from_instance and all(place.tensor.is_meta for place in _places(module)):
        return module
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ModelError(f"the {type(module).__name__} cannot be copied ({error}): pass a build function") from error


def _check_parameters(places: list[_Place], refs: dict[str, _Ref], slices: dict[int, _Slice], tape: _Tape) -> None:
    """Refuse parameters without values, and different parameters in one memory: each would go its own way."""
    owners: dict[int, list[_Place]] = {}
    for place in places:
        ref = refs[place.name]
        memory, part = tape.memories[ref.memory], slices[ref.memory]
        if any(tape.memories[base].foreign for base in part.bases):
            raise ModelError(
                f"{place.name} was made on the meta device outside the build function, so it has no values"
            )
        if not part.entries and memory.constant is None and 0 not in ref.size:
            raise ModelError(f"{place.name} is never given values (torch.empty): fill it where it is made")
        for other in owners.setdefault(ref.memory, []):
            apart = other.tensor is place.tensor or ref.stride != _contiguous(ref.size)
            if not apart and refs[other.name].overlaps(ref):
                raise ModelError(
                    f"{other.name} and {place.name} are two parameters in one memory; to tie them, assign one "
                    "nn.Parameter to both names"
                )
        owners[ref.memory].append(place)


def _random_keys(seed: int, named: list[tuple[str, _Slice]], tape: _Tape) -> dict[int, int]:
    """Key every random entry by (seed, first name that descends from it, its place among that name's random entries).

    The CPU's generator uses 32 bits of its seed, so two of 10^5 keys would meet: who comes second is hashed again.
    """
    keys: dict[int, int] = {}
    used: set[int] = set()
    for name, part in named:
        drawn = [entry for entry in part.entries if tape.entries[entry].random]
        for ordinal, entry in enumerate(drawn):
            attempt = 0
            while entry not in keys:
                text = f"{seed}\0{name}\0{ordinal}\0{attempt}"
                key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
                if key % 2**32 not in used:
                    used.add(key % 2**32)
                    keys[entry] = key
                attempt += 1
    return keys
