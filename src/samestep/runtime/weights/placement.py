"""Placements: which elements of a whole weight a rank's part consists of, as intervals and as runs of elements.

See [Note: what a rank holds of a weight], the head of `runtime/weights/__init__.py`.

A cut divides one dimension, and leaves a rank some intervals of it: one, or one of each component of a fused weight. In
the flattened whole weight these are runs of elements:

    [4, 6] cut along dim 1 into (0:2, 3:5)        runs 0:2 3:5 | 6:8 9:11 | 12:14 15:17 | 18:20 21:23

Checkpoints store which intervals a file holds, so that a rank of any other cut finds what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.building.initial_values import Blueprint
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec
from samestep.program.holding import Holding
from samestep.program.program import Program
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.pieces import Piece

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """The part of a weight that a rank holds: intervals along the dimension `dim`, in the rank's order."""

    shape: tuple[int, ...]
    """Shape of the whole weight."""
    dim: int
    intervals: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Number of elements in the slice."""
        length = sum(stop - start for start, stop in self.intervals)
        return length * math.prod(self.shape) // self.shape[self.dim] if self.shape and self.shape[self.dim] else 0

    def of(self, whole: Tensor) -> Tensor:
        """Return the slice's elements of a whole tensor, in the rank's order."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.intervals]
        return torch.cat(parts, dim=self.dim) if parts else whole.narrow(self.dim, 0, 0)

    def copy_into(self, whole: Tensor, part: Tensor) -> None:
        """Copy a part, in the rank's order and maybe flat, to its elements' positions in a whole tensor."""
        shape = list(self.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.intervals)
        at, part = 0, part.view(shape)
        for start, stop in self.intervals:
            whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
            at += stop - start

    def runs(self, start: int, stop: int) -> Runs:
        """Return the runs of the whole weight that make up elements [start, stop) of the flattened slice."""
        if not self.shape:
            return Runs(np.array([start]), np.array([stop - start]))
        inner = math.prod(self.shape[self.dim + 1 :])
        outer = math.prod(self.shape[: self.dim])
        ends = np.array(self.intervals, dtype=np.int64).reshape(-1, 2)
        width = self.shape[self.dim] * inner
        starts = (np.arange(outer, dtype=np.int64)[:, None] * width + ends[:, 0] * inner).ravel()
        lengths = np.tile((ends[:, 1] - ends[:, 0]) * inner, outer)
        return Runs(starts, lengths).part(start, stop)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of elements of a flattened whole tensor, in rising order; concatenated they are a flat part of it."""

    starts: Integers
    lengths: Integers

    @property
    def offsets(self) -> Integers:
        """Index in the flat tensor at which each run begins, int64 [number of runs]."""
        return np.cumsum(self.lengths) - self.lengths

    def part(self, start: int, stop: int) -> Runs:
        """Return the runs of elements [start, stop) of the flat tensor."""
        offsets = self.offsets
        skipped = np.clip(start - offsets, 0, self.lengths)
        after = np.clip(offsets + self.lengths - stop, 0, self.lengths)
        lengths = self.lengths - skipped - after
        is_in = lengths > 0
        return Runs((self.starts + skipped)[is_in], lengths[is_in])

    def in_blocks(self, block: int) -> Runs:
        """Return these runs in units of blocks of `block` elements."""
        return Runs(self.starts // block, self.lengths // block)

    def positions(self) -> Tensor:
        """Return the index in the whole tensor of each element, int64 [numel]."""
        return torch.from_numpy(np.repeat(self.starts - self.offsets, self.lengths) + np.arange(self.lengths.sum()))

    def shared(self, other: Runs) -> tuple[Runs, Runs]:
        """Return the elements that both contain, as runs of this flat tensor and as runs of the other."""
        edges = np.unique(
            np.concatenate([r.starts for r in (self, other)] + [r.starts + r.lengths for r in (self, other)])
        )
        starts, lengths = edges[:-1], np.diff(edges)
        mine, in_mine = self._find(starts)
        theirs, in_theirs = other._find(starts)
        both = in_mine & in_theirs
        return Runs(mine[both], lengths[both]), Runs(theirs[both], lengths[both])

    def _find(self, positions: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Return the index in the flat tensor of each element of the whole tensor, and whether the flat tensor contains it."""
        if not len(self.starts):
            return np.zeros_like(positions), np.zeros(len(positions), dtype=bool)
        run = np.clip(np.searchsorted(self.starts, positions, side="right") - 1, 0, None)
        into = positions - self.starts[run]
        return self.offsets[run] + into, (into >= 0) & (into < self.lengths[run])


def whole(shape: Sequence[int]) -> WeightSlice:
    """Return the slice that is the whole weight."""
    return WeightSlice(tuple(shape), 0, ((0, shape[0]),) if shape else ())


def part_index(holding: Holding, mesh: Mesh) -> int:
    """Return the index of this rank's part of a weight among all its parts."""
    index = 0
    for axis in holding.sharded_over:
        index = index * mesh.size(axis) + mesh.index(axis)
    return index


def local_part(whole: Tensor, cut: ParamSpec, holding: Holding, mesh: Mesh) -> Tensor:
    """Return this rank's part of a whole weight; `cut` describes the part."""
    dim = _cut_dim(tuple(whole.shape), cut)
    return whole if dim is None else _part_along(whole, dim, cut, holding, mesh)


def part_of(spec: ParamSpec, cut: ParamSpec, holding: Holding, mesh: Mesh) -> WeightSlice:
    """Return the placement of this rank's part, which `cut` describes, in the whole weight `spec`.

    Indices along the cut dimension are cut in the same way as the weight, so that the two cannot disagree.
    """
    assert holding.sharded_over or cut.shape == spec.shape, f"no axis shards {cut.name}"
    return part_at(spec, cut, holding.num_parts, part_index(holding, mesh))


def part_at(spec: ParamSpec, cut: ParamSpec, number: int, index: int) -> WeightSlice:
    """Return the placement of part `index` of `number` parts, which `cut` describes, in the whole weight `spec`."""
    dim = _cut_dim(spec.shape, cut)
    if dim is None:
        return whole(spec.shape)
    along = [1] * len(spec.shape)
    along[dim] = spec.shape[dim]
    positions = _part_at(torch.arange(spec.shape[dim]).view(along), dim, cut, number, index).flatten().numpy()
    if not len(positions):
        return WeightSlice(tuple(spec.shape), dim, ())
    breaks = np.flatnonzero(np.diff(positions) != 1)
    first, last = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [len(positions) - 1]])
    return WeightSlice(
        tuple(spec.shape),
        dim,
        tuple((int(positions[a]), int(positions[b]) + 1) for a, b in zip(first, last, strict=True)),
    )


def _cut_dim(shape: tuple[int, ...], cut: ParamSpec) -> int | None:
    """Return the dimension along which a rank holds a part; None where it holds the whole."""
    dims = [dim for dim, (size, length) in enumerate(zip(shape, cut.shape, strict=True)) if size != length]
    assert len(dims) <= 1, f"{cut.name} is sharded along the dimensions {dims}, and only one is supported"
    return dims[0] if dims else None


def _part_along(whole: Tensor, dim: int, cut: ParamSpec, holding: Holding, mesh: Mesh) -> Tensor:
    """Return the part at this rank's index; for a fused weight, that of each of its components."""
    assert holding.sharded_over, f"no axis shards {cut.name}"
    return _part_at(whole, dim, cut, holding.num_parts, part_index(holding, mesh))


def _part_at(whole: Tensor, dim: int, cut: ParamSpec, number: int, index: int) -> Tensor:
    fused = cut.cut.parts if cut.cut is not None else 1
    return torch.cat([matrix.chunk(number, dim=dim)[index] for matrix in whole.chunk(fused, dim=dim)], dim=dim)


@dataclass(frozen=True, slots=True)
class Placements:
    """The placements of the parts that this rank holds of all weights: first values, checkpoints and packed states ask for them."""

    whole: Mapping[str, ParamSpec]
    """The specs of whole weights."""
    parts: Mapping[str, ParamSpec]
    """The specs of this rank's parts."""
    program: Program
    mesh: Mesh

    @classmethod
    def of(cls, model: ModelSpec, program: Program, mesh: Mesh) -> Placements:
        """Return the placements in a program for the whole `model`."""
        parts = {param.name: param for param in program.step.model.params}
        return cls({param.name: param for param in model.params}, parts, program, mesh)

    def slice_of(self, piece: Piece) -> WeightSlice:
        """Return the slice of a whole weight that contains a piece."""
        return whole(self.whole[piece.name].shape) if piece.is_uncut else self.part(piece.name)

    def part(self, name: str) -> WeightSlice:
        """Return the slice of a whole weight that tp and ep leave this rank."""
        return part_of(self.whole[name], self.parts[name], self.holding(name), self.mesh)

    def holding(self, name: str) -> Holding:
        """Return the holding of a weight."""
        return self.program.step.holding(self.parts[name])

    def materialize(self, plan: Blueprint, name: str, dtype: torch.dtype) -> Tensor:
        """Return the first values of this rank's part of a weight, computed without the rest of it where that is possible."""
        if self.parts[name].shape == self.whole[name].shape:
            return plan.materialize(name, self.mesh.device, dtype)
        part = self.part(name)
        if part.dim == 0 and len(part.shape) > 2 and part.intervals:  # a stack of experts, which no rank holds whole
            return plan.materialize(name, self.mesh.device, dtype, part.intervals)
        if part.numel and plan.makes_parts(name):
            return plan.materialize(name, self.mesh.device, dtype, part.intervals, part.dim)
        value = plan.materialize(name, self.mesh.device, dtype)
        return local_part(value, self.parts[name], self.holding(name), self.mesh)


def copy_shared(into: Tensor, mine: Runs, source: Tensor, theirs: Runs) -> int:
    """Copy the elements that both runs contain from a flat `source` into the flat tensor `into`; return their number."""
    here, there = mine.shared(theirs)
    if len(here.starts) < 64:
        for to, at, length in zip(here.starts.tolist(), there.starts.tolist(), here.lengths.tolist(), strict=True):
            into[to : to + length] = source[at : at + length].to(into.device)
    else:
        into[here.positions().to(into.device)] = source[there.positions()].to(into.device)
    return int(here.lengths.sum())


def rows_of_shard(spec: ParamSpec, num_shards: int, index: int) -> slice:
    """Return the rows of a parameter that FSDP2 gives to a rank: equal runs, the last ones shorter."""
    each = -(-spec.rows // num_shards)
    return slice(min(index * each, spec.rows), min((index + 1) * each, spec.rows))
