"""The squared norm of the gradients of all weights, as shares of ranks that add up to it: each element counts once.

What several ranks hold alike is divided by their number (`norm_of_pieces`), or each of them adds up a run of it (`BucketNorms`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.program.buckets import Bucket
from samestep.program.holding import REPLICAS, Holding
from samestep.program.step import StepSpec
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.flat_buffers import FlatBuffer
from samestep.runtime.weights.pieces import Piece, gradients_of

_ROW = 4096


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over all elements of `tensors`, in float64.

    On a CPU torch adds up a norm one element after the other: in float32 the norm of a bucket is off by 1e-4, by an
    amount that depends on the layout. So rows of a few thousand elements are summed first.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    if max(map(Tensor.numel, tensors)) < _ROW:
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    norms: list[Tensor] = []
    rest: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() < _ROW:
            rest.append(tensor)
            continue
        if left := tensor.numel() % _ROW:
            flat = tensor.reshape(-1)
            tensor = flat[:-left]
            rest.append(flat[-left:])
        norms.append(torch.linalg.vector_norm(tensor.reshape(-1, _ROW), dim=1))
    if rest:
        norms.append(torch.stack(torch._foreach_norm(rest)))
    return torch.cat(norms).double().square().sum()


def norm_of_pieces(
    pieces: Sequence[Piece], step: StepSpec, device: torch.device, names: Set[str] | None = None
) -> Tensor:
    """Return the squared norm (float64 []) of the gradients of pieces, or of those of some weights; each is divided by the number of
    ranks that hold it alike, so that their shares add up to one.
    """
    copies, numbers = step.copies
    alike: list[tuple[int, list[Tensor]]] = []
    for number in numbers:
        mine = pieces if len(numbers) == 1 else [piece for piece in pieces if copies[piece.name] == number]
        alike.append(
            (number, gradients_of(mine if names is None else [piece for piece in mine if piece.name in names]))
        )
    return _sum_of_shares(alike, device)


def _sum_of_shares(alike: Iterable[tuple[int, list[Tensor]]], device: torch.device) -> Tensor:
    """Return the sum of squares (float64 []) of gradients, each divided by the number of ranks that add it up too.

    Most often all have one number: each call of torch costs the host as much as that of a model.
    """
    shares = [
        norm if number == 1 else norm / number for number, norm in ((n, squared_norm(t, device)) for n, t in alike)
    ]
    return functools.reduce(torch.add, shares) if shares else torch.zeros((), dtype=torch.float64, device=device)


@dataclass(frozen=True, slots=True)
class _Run:
    """The run of a bucket's gradients whose squares this rank adds up."""

    bucket: Bucket
    gradients: Tensor
    first: int
    """The element of the bucket with which it begins."""

    def of(self, names: Set[str]) -> Iterator[Tensor]:
        """Yield the parts of it that are gradients of some weights."""
        for member in self.bucket.members:
            start = max(member.offset - self.first, 0)
            stop = min(member.offset + member.numel - self.first, self.gradients.numel())
            if member.name in names and start < stop:
                yield self.gradients[start:stop]


class BucketNorms:
    """The runs of buckets' gradients whose squares this rank adds up: found once, since buckets stay where they are."""

    def __init__(self, flats: Sequence[FlatBuffer], step: StepSpec, mesh: Mesh) -> None:
        self._device = mesh.device
        self._alike: list[tuple[int, list[_Run]]] = []
        """With the number of ranks that add up the same."""
        for copies in sorted({flat.bucket.holding.num_copies for flat in flats}):
            alike = [flat for flat in flats if flat.bucket.holding.num_copies == copies]
            _, repeated_over = _axes_of(step, alike[0].bucket.holding)
            number = math.prod(map(mesh.size, repeated_over)) * copies
            self._alike.append((number, [_run_of(flat, step, mesh) for flat in alike]))
        self._whole = [(number, [run.gradients for run in runs]) for number, runs in self._alike]

    def squared(self, names: Set[str] | None = None) -> Tensor:
        """Return this rank's share of the squared norm (float64 []) of the gradients in buckets, or of those of some weights."""
        if names is None:
            return _sum_of_shares(self._whole, self._device)
        some = ((number, [part for run in runs for part in run.of(names)]) for number, runs in self._alike)
        return _sum_of_shares(some, self._device)


def _run_of(flat: FlatBuffer, step: StepSpec, mesh: Mesh) -> _Run:
    """Return the run of a bucket's gradients whose squares this rank adds up."""
    divided_over, _ = _axes_of(step, flat.bucket.holding)
    number, index = (mesh.size(divided_over), mesh.index(divided_over)) if divided_over else (1, 0)
    run = flat.gradients if number == 1 else flat.gradients.view(number, -1)[index]
    return _Run(flat.bucket, run, index * run.numel())


def _axes_of(step: StepSpec, holding: Holding) -> tuple[str | None, tuple[str, ...]]:
    """Return the axis whose ranks each add up the squares of a part of a bucket's gradients, None where each rank adds up all
    that it has, and the axes whose ranks add up the same."""
    if holding.num_shards > 1:
        return holding.data_axis, summed_replicas(step)
    return (None, ("cp",)) if step.sharing.trains_apart else (holding.data_axis, holding.data_axes[1:])


def summed_replicas(step: StepSpec) -> tuple[str, ...]:
    """Return the data axis over whose ranks a step sums shards of gradients; nothing where replicas are trained independently."""
    return () if step.sharing.trains_apart else (REPLICAS,)
