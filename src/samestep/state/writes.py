"""Whether tensors were written since a moment: the marks of both moments are compared.

    versions    count the operations of torch that wrote a tensor
    addresses   show another storage, as by `param.data = ...`
    norms       show what `param.data.copy_(...)` has written, which no version counts

The first two are on the host; norms stay on the device until somebody asks for each tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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
        found = list(map(operator.ne, self.versions, before.versions))
        if self.addresses:
            found = [one or now != then for one, now, then in zip(found, self.addresses, before.addresses, strict=True)]
        if self.norms is None or before.norms is None:
            return found
        same = (self.norms == before.norms) | (self.norms.isnan() & before.norms.isnan())
        return [one or not alike for one, alike in zip(found, same.tolist(), strict=True)]

    def any_since(self, before: Marks, device: torch.device) -> Tensor:
        """Return 1 if a tensor was written since `before`, else 0 (float64 []), for which the host need not wait."""
        if self.versions != before.versions or self.norms is None or before.norms is None:
            return torch.full((), float(self.differ(before)), dtype=torch.float64, device=device)
        return (self.norms != before.norms).any().double()


def marks_of(
    tensors: Iterable[Tensor],
    *,
    addresses: bool = False,
    norms: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> Marks:
    """Return the marks of tensors now; `norms` computes those of the values where these are compared too."""
    held = list(tensors)
    places = [0 if tensor.is_meta else tensor.data_ptr() for tensor in held] if addresses else []
    try:
        versions = [tensor._version for tensor in held]
    except RuntimeError:  # of a tensor that no operation may write
        versions = list(map(version_of, held))
    return Marks(versions, places, norms(held) if norms is not None and held else None)


def version_of(tensor: Tensor) -> int:
    """Return how many operations have written a tensor; 0 of one that no operation may write."""
    return 0 if tensor.is_inference() else tensor._version


def exact_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of tensors (float64), 0 of those that are not floating; of a sharded tensor, that of this rank's part."""
    parts = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    values = [part if part.is_floating_point() else part.new_zeros(1, dtype=torch.float32) for part in parts]
    return torch.stack(torch._foreach_norm(values, 2.0, torch.float64))
