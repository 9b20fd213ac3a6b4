"""The entries of a tape as data, and their replay: the operations that wrote a memory, run again on a real device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from samestep import trees as pytree


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
class Memory:
    """One storage: its counterpart on meta, its initial bytes, and the entries that wrote it, in order."""

    meta: torch.UntypedStorage
    constant: torch.UntypedStorage | None = None
    real: torch.UntypedStorage | None = None
    """The real storage it represents; kept, so that its address is not used again."""
    foreign: bool = False
    """Whether it came from outside the tape without values."""
    placeless: bool = False
    """Whether the code itself asked for it on the meta device, and gets "meta" as its device."""
    writers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
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


class Recorded(Protocol):
    """A tape, as far as a replay reads it."""

    entries: list[Entry]
    memories: list[Memory]


def replay(tape: Recorded, part: Slice, ref: Ref, device: torch.device, keys: dict[int, int]) -> Tensor:
    """Run a slice of a tape on `device` and return the tensor `ref`, contiguous and alone in its memory."""
    storages: dict[int, torch.UntypedStorage] = {}
    last = {memory: e for e in part.entries for memory in tape.entries[e].reads | tape.entries[e].writes}
    last[ref.memory] = len(tape.entries)

    def window(ref: Ref) -> Tensor:
        if ref.memory not in storages:
            memory = tape.memories[ref.memory]
            if memory.constant is not None:
                constant_bytes = torch.empty(0, dtype=torch.uint8, device=memory.constant.device).set_(memory.constant)
                storages[ref.memory] = constant_bytes.to(device, copy=True).untyped_storage()
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
            with drawing(device, keys[number]) if entry.random else nullcontext():
                outcome = entry.func(*args, **kwargs)
            _keep(entry, outcome, storages, tape)
            del args, kwargs, outcome
            for memory in entry.reads | entry.writes:
                if last[memory] == number:
                    storages.pop(memory, None)
        return _alone(window(ref))


def _keep(entry: Entry, outcome: Any, storages: dict[int, torch.UntypedStorage], tape: Recorded) -> None:
    """Keep the memory that an entry allocated, in the geometry that the tape recorded: kernels may choose other
    strides."""
    leaves = pytree.tree_leaves(outcome)
    for ref, leaf in zip(entry.outputs, leaves if entry.outputs else (), strict=False):
        if ref is None or ref.memory in storages:
            continue
        storage, size_bytes = leaf.untyped_storage(), tape.memories[ref.memory].meta.nbytes()
        if leaf.stride() != ref.stride or leaf.storage_offset() != ref.offset or storage.nbytes() != size_bytes:
            storage = torch.zeros(size_bytes, dtype=torch.uint8, device=leaf.device).untyped_storage()
            ref.window(storage).copy_(leaf)
        storages[ref.memory] = storage


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous in a separate memory, copied only if necessary."""
    tensor = tensor.resolve_conj().resolve_neg()
    size_bytes = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size_bytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@contextmanager
def drawing(device: torch.device, key: int) -> Iterator[torch.Generator]:
    """Seed the device's default generator by `key`, yield it, and put it back as it was.

    A separate generator would not do, since many random operators take none; nor would `torch.manual_seed`, which
    reseeds every other device too.
    """
    if device.type == "cpu":
        generator = torch.default_generator
    else:
        module = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        generator = module.default_generators[index]
    state = generator.get_state()
    generator.manual_seed(key)
    try:
        yield generator
    finally:
        generator.set_state(state)
