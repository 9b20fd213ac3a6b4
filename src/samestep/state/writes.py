"""Whether tensors were written since a moment, by comparing the marks of both moments; and copies of tensors, to put their values back.

    versions    count the operations of torch that wrote a tensor
    addresses   show another storage, as by `param.data = ...`
    norms       show what `param.data.copy_(...)` has written, which no version counts

The first two are on the host; norms stay on the device until somebody asks for each tensor. `KeptTensors` are running statistics that a
skipped step restores, copied by one call for all of a dtype; `KeptValues` (`snapshot.py`) keeps attributes as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Marks(NamedTuple):
    """The marks of some tensors at one moment."""

    versions: list[int]
    addresses: list[int]
    """Empty where they were not asked for."""
    norms: Tensor | None

    def differ(self, before: Marks) -> bool:
        """Return whether versions or addresses are others than they were; the host need not wait for the device."""
        return self[:2] != before[:2]

    def since(self, before: Marks) -> list[bool]:
        """Return for each tensor whether it was written since `before`; the host waits for the device if there are norms."""
        written = list(map(operator.ne, self.versions, before.versions))
        if self.addresses:
            moved = map(operator.ne, self.addresses, before.addresses)
            written = list(map(operator.or_, written, moved))
        if self.norms is None or before.norms is None:
            return written
        same = (self.norms == before.norms) | (self.norms.isnan() & before.norms.isnan())
        return [is_written or not alike for is_written, alike in zip(written, same.tolist(), strict=True)]

    def any_since(self, before: Marks, device: torch.device) -> Tensor:
        """Return 1 if a tensor was written since `before`, else 0 (float64 []), for which the host need not wait."""
        if self.versions != before.versions or self.norms is None or before.norms is None:
            return torch.full((), float(self.differ(before)), dtype=torch.float64, device=device)
        return (self.norms != before.norms).any().double()


def marks_of(
    tensors: Iterable[Tensor], *, addresses: bool = False, norms: Callable[[Sequence[Tensor]], Tensor] | None = None
) -> Marks:
    """Return the marks of tensors now; `norms` computes those of the values where these are compared too."""
    listed = list(tensors)
    places = [0 if tensor.is_meta else tensor.data_ptr() for tensor in listed] if addresses else []
    try:
        versions = [tensor._version for tensor in listed]
    except RuntimeError:  # of a tensor that no operation may write
        versions = list(map(version_of, listed))
    return Marks(versions, places, norms(listed) if norms is not None and listed else None)


def version_of(tensor: Tensor) -> int:
    """Return how many operations have written a tensor; 0 of one that no operation may write."""
    return 0 if tensor.is_inference() else tensor._version


def exact_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of tensors (float64), 0 of those that are not floating; of a sharded tensor, that of this rank's part."""
    parts = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    values = [part if part.is_floating_point() else part.new_zeros(1, dtype=torch.float32) for part in parts]
    return torch.stack(torch._foreach_norm(values, 2.0, torch.float64))


@dataclass(frozen=True, slots=True)
class KeptTensors:
    """Tensors with copies of their values, in one tensor for all that are alike."""

    tensors: tuple[Sequence[Tensor], ...]
    copies: tuple[Tensor, ...]
    """For tensors of no dimension one element each, for others all elements one after the other."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> KeptTensors:
        """Copy the values of tensors."""
        return AlikeTensors(tensors).keep()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values back."""
        for tensors, copies in zip(self.tensors, self.copies, strict=True):
            for tensor, value in zip(tensors, copies.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(value.view(tensor.shape))


class AlikeTensors:
    """Tensors whose values are copied again and again, in lists of those that one call copies."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        alike: dict[tuple[Any, ...], list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.dtype, tensor.device, tensor.dim()), []).append(tensor)
        self._lists = tuple(alike.values())
        self._dims = [dims for _, _, dims in alike]

    def keep(self) -> KeptTensors:
        """Copy the values."""
        for tensors, dims in zip(self._lists, self._dims, strict=True):
            if {*map(Tensor.dim, tensors)} != {dims}:  # code has given one of them another tensor's values, by `.data`
                return KeptTensors.of(tensor for tensors in self._lists for tensor in tensors)
        copies = [
            torch.stack(tensors) if dims == 0 else torch.cat(tensors if dims == 1 else [t.flatten() for t in tensors])
            for tensors, dims in zip(self._lists, self._dims, strict=True)
        ]
        return KeptTensors(self._lists, tuple(copies))
