"""The tape: which operations wrote which memory while a model was built on the meta device, and their replay.

    memory 0   empty  uniform_  normal_            replayed for a.weight: normal_
    memory 1   empty  uniform_           mul_(0)   replayed for b.weight: uniform_, the same normal_ again, and mul_

A write that covers a memory whole (`normal_` over `uniform_`) makes its earlier content irrelevant. The tape identifies
tensors by memory and geometry, not as values: so views and `.data` need no entries, and operations that bypass the
dispatcher (as in `nn.Parameter`) lose nothing.

Code that asks for a tensor's device gets "cpu": `torch.nn.init` and several models skip their work on meta.

The data, a `Memory` for each storage and an `Entry` for each operation that wrote to one, and their replay are in `replay.py`.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep import trees as pytree
from samestep.building.replay import Entry, Memory, Ref, Slice, replay
from samestep.building.torch_seams import DisableTorchFunction, DispatchMode, is_traceable_wrapper_subclass
from samestep.errors import ModelError, line_of


@dataclass(frozen=True, slots=True)
class Traits:
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


EMPTY = _aten("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")

LIFTS = _aten("lift_fresh lift lift_fresh_copy")

_OVERWRITES = _aten("zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_")


@functools.cache
def traits_of(func: Any) -> Traits:
    """Return the properties of an operator, from its schema."""
    arguments = func._schema.arguments
    written = [(index, a.name, a.is_out) for index, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    tags = func.tags
    return Traits(
        written=tuple((index, name) for index, name, _ in written),
        overwrites=func._schema.name in _OVERWRITES or all(is_out for *_, is_out in written),
        random=torch.Tag.nondeterministic_seeded in tags,
        needs_values=torch.Tag.data_dependent_output in tags,
        only_geometry=torch.Tag.inplace_view in tags,
        has_device=any(a.name == "device" for a in arguments),
    )


WAY_OUT = "pass an instance instead of a build function: it is built whole on every rank from the job's seed"

_META = torch.device("meta")
_CPU = torch.device("cpu")
_FEW_BYTES = 1 << 20
"""The bytes of constants, such as tables from Python's numbers, that a build without files may hold."""


class Tape(DispatchMode):
    """Runs every operation on meta and records those that write values into memory."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.memories: list[Memory] = []
        self._number: dict[int, int] = {}
        self._paused = False
        self._any_placeless = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on meta, or on real values where its outcome depends on them.

        Raises:
            ModelError: it draws from a generator that the code created, or needs values that do not exist.
        """
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        traits = traits_of(func)
        with DisableTorchFunction():  # else our questions about a tensor's device are answered "cpu" too
            if func._schema.name in LIFTS and not args[0].is_meta:
                return self.lift(args[0])
            if traits.needs_values:
                return self._answer(func, args, kwargs)
            if any(isinstance(leaf, torch.Generator) for leaf in (*args, *kwargs.values())):
                return self._draw_now(func, traits, args, kwargs)
            if traits.only_geometry:
                real = isinstance(args[0], Tensor) and not args[0].is_meta
                return func(*(args if real else self._twins(args)), **kwargs)
            return self._run(func, traits, args, kwargs)

    def _run(self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` on meta and record it.

        Raises:
            ModelError: torch cannot run it without values.
        """
        args, kwargs = pytree.tree_map_only(Tensor, self.twin, (args, kwargs))
        follows = self._follows_placeless(args, kwargs)
        makes = not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
        if traits.has_device and (makes or kwargs.get("device") is not None):
            kwargs["device"] = _META
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        try:
            outcome = func(*args, **kwargs)
        except RuntimeError as error:  # torch cannot infer the outcome's shape without values
            if not isinstance(error, NotImplementedError) and torch.Tag.dynamic_output_shape not in func.tags:
                raise
            if traits.written or traits.random:
                raise ModelError(
                    "build-not-repeatable", f"{where()} runs {func}, which torch cannot run without values: {WAY_OUT}"
                ) from None
            return self._answer(func, args, kwargs)
        written = [args[index] if index < len(args) else kwargs.get(name) for index, name in traits.written]
        self.record(func, args, kwargs, outcome, written, overwrites=traits.overwrites, random=traits.random)
        if follows:
            self.mark_placeless(
                [leaf for leaf in pytree.tree_leaves(outcome) if all(leaf is not target for target in written)]
            )
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
        new = {output.memory for output in outputs if output}
        writes = new | {target.memory for target in targets}
        if not writes or getattr(getattr(func, "_schema", None), "name", None) in EMPTY:
            return
        for memory in writes:
            self.memories[memory].writers.append(len(self.entries))
        reads = frozenset(seen) - kills
        self.entries.append(
            Entry(func, args, kwargs, tuple(outputs), reads, frozenset(writes), frozenset(kills | new), random)
        )

    def ref(self, tensor: Tensor, fresh: bool = False, copies: bool = True) -> Ref:
        """Return a tensor's memory and geometry; the bytes of a real tensor not seen before are copied, or shared.

        Raises:
            ModelError: the tensor is not a plain strided one.
        """
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            raise ModelError(
                "tensor-form",
                f"{where()} holds a {type(tensor).__name__} of layout {tensor.layout}. Use only plain ones",
            )
        storage = tensor.untyped_storage()
        memory = self._number.get(storage._cdata)
        if memory is None:
            memory = self._number[storage._cdata] = len(self.memories)
            if tensor.is_meta:
                self.memories.append(Memory(storage, foreign=not fresh))
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

    def _twins(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments with tensors and storages replaced by their counterparts on meta, as for `set_` to a
        file's content."""
        args = pytree.tree_map_only(Tensor, self.twin, args)
        tensors = [
            torch.empty(0, dtype=torch.uint8, device=argument.device).set_(argument) if _is_real(argument) else argument
            for argument in args
        ]
        return tuple(
            self.twin(tensor).untyped_storage() if tensor is not argument else argument
            for tensor, argument in zip(tensors, args, strict=True)
        )

    def _follows_placeless(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the outcome of an operation is on the meta device because the code asked for its inputs there."""
        if not self._any_placeless or kwargs.get("device") is not None:
            return False
        return any(self.is_placeless(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))

    def is_placeless(self, tensor: Tensor) -> bool:
        """Return whether the code itself asked for a tensor on the meta device."""
        number = self._number.get(tensor.untyped_storage()._cdata)
        return number is not None and self.memories[number].placeless

    def mark_placeless(self, outcome: Any) -> None:
        """Note that the code itself asked for these tensors on the meta device."""
        for leaf in pytree.tree_leaves(outcome):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self.memories[self.ref(leaf, fresh=True).memory].placeless = self._any_placeless = True

    @property
    def holds_other_tensors(self) -> bool:
        """Whether the build used tensors that it did not make by operations, such as those of a file."""
        lifted = sum(memory.constant.nbytes() for memory in self.memories if memory.constant is not None)
        return any(memory.real is not None for memory in self.memories) or lifted > _FEW_BYTES

    def is_unwritten(self, ref: Ref) -> bool:
        """Return whether nothing has ever given a tensor values."""
        memory = self.memories[ref.memory]
        return not memory.writers and memory.constant is None and 0 not in ref.size

    def is_foreign(self, part: Slice) -> bool:
        """Return whether values descend from a tensor on the meta device that came from outside the tape."""
        return any(self.memories[base].foreign for base in part.bases)

    def lift(self, tensor: Tensor) -> Tensor:
        """Return a tensor on meta whose memory starts with this one's values; this one is not tracked."""
        constant = tensor.detach().clone(memory_format=torch.contiguous_format)
        twin = torch.empty_like(constant, device=_META)
        memory = Memory(twin.untyped_storage(), constant=constant.untyped_storage())
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
                "build-not-repeatable",
                f"{where(ref, self)} looks at random values, which exist only once each tensor has its name: {WAY_OUT}",
            )
        if self.is_foreign(part):
            raise ModelError(
                "build-not-repeatable",
                f"{where(ref, self)} looks at the values of a tensor that was on meta before: {WAY_OUT}",
            )
        with self.paused():
            return replay(self, part, ref, _CPU, {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations on real tensors through."""
        was_paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = was_paused

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

    def random_keys(self, seed: int, named: Sequence[tuple[str, Slice]]) -> dict[int, int]:
        """Key every random entry by (seed, first name that descends from it, its index among that name's random entries).

        The CPU's generator uses 32 bits of its seed, so two of 10^5 keys would collide: the second is hashed once more.
        """
        keys: dict[int, int] = {}
        used: set[int] = set()
        for name, part in named:
            for ordinal, entry in enumerate(entry for entry in part.entries if self.entries[entry].random):
                attempt = 0
                while entry not in keys:
                    text = f"{seed}\0{name}\0{ordinal}\0{attempt}"
                    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
                    if key % 2**32 not in used:
                        used.add(key % 2**32)
                        keys[entry] = key
                    attempt += 1
        return keys

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on real values; the tensors that it returns are constants."""
        args, kwargs = pytree.tree_map_only(Tensor, self.read, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        return pytree.tree_map_only(Tensor, self.lift, func(*args, **kwargs))

    def _draw_now(self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw from a generator that the code created: its numbers are constants, independent of the job's seed.

        Raises:
            ModelError: the operation writes without replacing all that it writes to.
        """
        if not traits.written:
            return self._answer(func, args, kwargs)
        if not traits.overwrites or [index for index, _ in traits.written] != [0]:
            raise ModelError(
                "build-not-repeatable", f"{where()} runs {func} with a torch.Generator of its own: {WAY_OUT}"
            )
        drawn = torch.empty(args[0].shape, dtype=args[0].dtype)
        func(drawn, *args[1:], **kwargs)
        copy = torch.ops.aten.copy_.default
        return self._run(copy, traits_of(copy), (args[0], self.lift(drawn)), {})

    def _covers(self, ref: Ref) -> bool:
        """Return whether a tensor fills its memory, each element once."""
        fills = math.prod(ref.size) * ref.dtype.itemsize == self.memories[ref.memory].meta.nbytes()
        return fills and ref.offset == 0 and ref.stride == contiguous(ref.size)

    def _stand_in(self, storage: torch.UntypedStorage, copies: bool) -> Memory:
        """Return the memory that represents a real storage; numpy may write to the storage unseen, hence the copy."""
        meta = torch.UntypedStorage(storage.nbytes(), device="meta")
        return Memory(meta, constant=storage.clone() if copies else storage, real=storage)


def _is_real(storage: Any) -> bool:
    """Return whether a value is a storage with a memory."""
    return isinstance(storage, torch.UntypedStorage) and storage.device.type != "meta"


def contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for length in size[:0:-1]:
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if size else ()


def where(ref: Ref | None = None, tape: Tape | None = None) -> str:
    """Return a description of what is being built, as far as the stack shows it: the module, its tensor, the line."""
    frame, owner, line = sys._getframe(1), None, line_of()
    while frame:
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
