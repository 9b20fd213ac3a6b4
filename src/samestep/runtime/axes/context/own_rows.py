"""The rows of a rank's tokens, cut out of tensors of the whole sequence.

Autograd keeps a view with all of the tensor that it is a view of, and the rows of one run of tokens of a single sample are a view that
`contiguous` returns as it is. So what a rank goes on with is a copy, of which blocks that are given one tensor (angles, a mask) share one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.state.writes import version_of


def rows_of(tensor: Tensor, runs: Sequence[range], dim: int) -> Tensor:
    """Return the rows at some runs of places along a dimension; of a single run it is a view."""
    parts = [tensor.narrow(dim, run.start, len(run)) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def own_rows(tensor: Tensor, runs: Sequence[range], dim: int) -> Tensor:
    """Return a copy of the rows at some runs of places along a dimension."""
    rows = rows_of(tensor, runs, dim)
    return rows.clone(memory_format=torch.contiguous_format) if len(runs) == 1 else rows


class SharedRows:
    """The rows that were cut out of whole tensors in a forward, each cut once as long as it is in use and nobody writes it."""

    def __init__(self) -> None:
        self._cut: dict[tuple[int, int, bool], tuple[weakref.ref[Tensor], int, weakref.ref[Tensor], int]] = {}

    def of(self, whole: Tensor, runs: Sequence[range], dim: int) -> Tensor:
        """Return the rows at some runs of places of a tensor along a dimension; of a weight, which is there anyway, a view."""
        if isinstance(whole, nn.Parameter):
            return rows_of(whole, runs, dim)
        key = id(whole), dim, torch.is_grad_enabled()
        if key in self._cut:
            of, version, cut, cut_version = self._cut[key]
            rows = cut()
            if of() is whole and version == version_of(whole) and rows is not None and cut_version == version_of(rows):
                return rows
        rows = own_rows(whole, runs, dim)
        self._cut[key] = weakref.ref(whole), version_of(whole), weakref.ref(rows), version_of(rows)
        return rows
