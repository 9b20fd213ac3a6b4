"""The rows of samples in a tensor, wherever its dimension of samples is, and as numbers that every backend gathers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowsPlace(NamedTuple):
    """The place of a micro-batch's samples in a tensor."""

    dim: int
    """Its dimension of samples; negative where it has none."""
    inner: int = 0
    """Positions of one sample side by side; 0 for all that it has."""


def by_sample(tensor: Tensor, place: RowsPlace, num_samples: int) -> Tensor:
    """Return a tensor as [samples, views, positions of a sample, ...]."""
    rows = tensor.movedim(place.dim, 0)
    inner = place.inner or len(rows) // num_samples
    return rows.unflatten(0, (-1, num_samples, inner)).transpose(0, 1)


def joined(tensor: Tensor, place: RowsPlace) -> Tensor:
    """Return the values that `by_sample` has split, joined again."""
    return tensor.transpose(0, 1).flatten(0, 2).movedim(0, place.dim)


def as_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor as floating numbers or bytes, which every backend gathers."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() else tensor.contiguous().view(torch.uint8)


def from_numbers(numbers: Tensor, like: Tensor) -> Tensor:
    """Return what `as_numbers` has changed."""
    if like.is_complex():
        return torch.view_as_complex(numbers.contiguous())
    return numbers if like.is_floating_point() else numbers.contiguous().view(like.dtype)
