"""What a tape holds: memories, the operations that wrote them, and what an operator's schema says of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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
    """Whether the code itself asked for it on the meta device, and is told that it is there."""
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
