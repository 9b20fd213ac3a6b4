"""Tensors with copies of their values, to be put back: the running statistics that a skipped step restores.

They are copied by one call for all of a dtype, whatever their number. `KeptSlots` (`kept_slots.py`) keeps attributes as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
            for held, value in zip(tensors, copies.split([held.numel() for held in tensors]), strict=True):
                held.copy_(value.view(held.shape))


class AlikeTensors:
    """Tensors whose values are copied again and again, in lists of those that one call copies."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        alike: dict[tuple[Any, ...], list[Tensor]] = {}
        for held in tensors:
            alike.setdefault((held.dtype, held.device, held.dim()), []).append(held)
        self._lists = tuple(alike.values())
        self._dims = [dims for _, _, dims in alike]

    def keep(self) -> KeptTensors:
        """Copy the values."""
        for tensors, dims in zip(self._lists, self._dims, strict=True):
            if {*map(Tensor.dim, tensors)} != {dims}:  # code has given one of them another tensor's values, by `.data`
                return KeptTensors.of(held for tensors in self._lists for held in tensors)
        copies = [
            torch.stack(held) if dims == 0 else torch.cat(held if dims == 1 else [one.flatten() for one in held])
            for held, dims in zip(self._lists, self._dims, strict=True)
        ]
        return KeptTensors(self._lists, tuple(copies))
