"""Gradients of matrices as products of two narrow ones: the best of rank r that one step of a power iteration finds.

```
M = sum_i M_i      M_i = G_i + e_i, the gradient [n, m] of contribution i with what was left of it in the step before
P = M Q            [n, r], the sum of M_i Q                          Q [m, r] of the step before; drawn for the first one
P ← orthonormal columns of the same span                             the same on every rank, which all have one P
Q' = M^T P         [m, r], the sum of M_i^T P
D = P Q'^T         what M is decoded as: its projection onto the span of P
e_i ← M_i - P (M_i^T P)^T
Q ← orthonormal columns of the span of Q'
```
(Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727, algorithms 1 and 2.) D is a projection, so |M - D| <= |M|; over steps with
one M the power iteration finds the largest r singular vectors, and M of rank r or less is exact in the first one. All of it is
linear in M, so D depends on the sum of the contributions alone: not on their number, nor on their ranks.

A column of P that lies in the span of the columns before it, as where M has a smaller rank than r, becomes zeros, which
find nothing; its direction in Q stays as it was. Values that are not finite spread to all of D, and leave nothing in
e_i and Q. Factors are held transposed, as P^T and Q^T: libraries take a third of the time, or less, for products with
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.codecs import CodedPart, Matrix
from samestep.runtime.codecs.codec import BufferResidual, Directions

SMALLEST_SINE_SQUARED = 1e-10
"""A column at a smaller angle to those before it counts as dependent: in float32 its direction would be that of
rounding errors."""
_SHIFT = 1e-12
"""Added to the squared length of each column, of length 1, so that rounding errors leave all sines positive."""


def first_directions(name: str, rank: int, columns: int) -> Tensor:
    """Return the directions Q^T [rank, columns] along which a weight's first gradient is projected: a function of its name."""
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return torch.randn(rank, columns, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


def orthonormalise(factors: Sequence[Tensor]) -> None:
    """Make the rows of each of several factors P^T [matrices, rank, n] orthonormal, of the same span; those in the span of
    rows before them become zeros.

    By Cholesky's factor of P^T P in float64, for all factors at once.
    """
    wide = [factor.double() for factor in factors]
    grams = torch.cat([matrix @ matrix.mT for matrix in wide])
    lengths = grams.diagonal(dim1=1, dim2=2)
    inverse = torch.where(lengths == 0, 0.0, lengths.rsqrt())
    # Once more without those that depend on others: in float32 rounding errors give them a direction.
    sines = _cholesky(grams, inverse).diagonal(dim1=1, dim2=2)
    inverse = inverse.masked_fill(sines.square() <= SMALLEST_SINE_SQUARED, 0.0)
    lower = _cholesky(grams, inverse)
    mixing = torch.linalg.solve_triangular(lower, torch.diag_embed(inverse), upper=False)
    mixing += 0.0 * lengths.sum(1)[:, None, None]  # keeps values that are not finite
    for factor, matrix, mix in zip(factors, wide, mixing.split([len(matrix) for matrix in wide]), strict=True):
        factor.copy_(mix @ matrix)


def _cholesky(grams: Tensor, inverse: Tensor) -> Tensor:
    """Return Cholesky's lower factor of inner products [matrices, rank, rank] of rows divided by their lengths."""
    cosines = inverse[:, :, None] * grams * inverse[:, None, :]
    cosines.diagonal(dim1=1, dim2=2).add_(_SHIFT)
    lower: Tensor = torch.linalg.cholesky_ex(cosines).L
    return lower


def next_directions(tensors: Sequence[Tensor], directions: Sequence[Tensor]) -> None:
    """Set directions Q^T [matrices, rank, m] to orthonormal rows of the span of `tensors`, Q'^T; rows that found nothing stay
    as they are.

    `tensors` are overwritten.
    """
    orthonormalise(tensors)
    for new, direction in zip(tensors, directions, strict=True):
        is_new = (new != 0).any(2, keepdim=True) & new.sum((1, 2), keepdim=True).isfinite()
        direction.copy_(torch.where(is_new, new, direction))


class _Alike(NamedTuple):
    """Adjacent matrices of one shape, and their views of the exchange's buffers."""

    matrices: tuple[Matrix, ...]
    left: Tensor
    """P^T [matrices, rank, rows]"""
    own: Tensor
    """P^T M_i [matrices, rank, columns]"""
    right: Tensor
    """Q'^T [matrices, rank, columns]"""
    directions: Tensor
    """Q^T [matrices, rank, columns]"""
    rest: Tensor
    """e_i, and M_i while a step is under way [matrices, rows, columns]"""


class FactoredExchange:
    """The exchange of one buffer, through all steps of a run.

    With N ranks, each of them with M_i and all with one Q:

    ```
    rank i      G_i + e_i ─ times Q ─► P_i and the elements outside of matrices ─ all_reduce ─► P ─ orthonormal ─►
                M_i^T P ─ all_reduce ─► Q' ─► D = P Q'^T            (meanwhile e_i = M_i - P (M_i^T P)^T)
    ```
    """

    def __init__(self, part: CodedPart, group: dist.ProcessGroup, like: Tensor, *, gathers: bool) -> None:
        """Make an exchange over `group` of a buffer in the dtype and on the device of `like`.

        Unless it `gathers`, each rank gets only its chunk of the sum.
        """
        self._part, self._group, self._gathers = part, group, gathers
        self._index, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        first, second = part.factor_numels
        self._first, self._own, self._second, self._directions = map(like.new_zeros, (first, second, second, second))
        self._kept = like.new_zeros(part.numel)
        self._factored = [*self._views()]
        self._outside = [*_runs_outside(part)]
        self._plain = self._first[first - sum(run.stop - run.start for run in self._outside) :]
        self._start()
        self.begin_step()

    def _views(self) -> Iterator[_Alike]:
        left = right = 0
        for matrices in _alike(self._part.matrices):
            _, offset, rows, columns, rank = matrices[0]
            number = len(matrices)
            window = slice(right, right + number * columns * rank)
            own, summed, directions = (
                flat[window].view(number, rank, columns) for flat in (self._own, self._second, self._directions)
            )
            yield _Alike(
                matrices,
                self._first[left : left + number * rows * rank].view(number, rank, rows),
                own,
                summed,
                directions,
                self._kept[offset : offset + number * rows * columns].view(number, rows, columns),
            )
            left, right = left + number * rows * rank, window.stop

    @torch.no_grad()
    def _start(self) -> None:
        """Set residuals and directions to their values before the first step."""
        self._kept.zero_()
        for matrix, directions in self.directions():
            directions.copy_(first_directions(matrix, *directions.shape))

    def residuals(self, number: int) -> Iterator[BufferResidual]:
        """Yield the residuals of this rank's contribution: views, flat."""
        for alike in self._factored:
            for matrix, rest in zip(alike.matrices, alike.rest, strict=True):
                yield BufferResidual(str(self._index), matrix.offset, rest.view(-1))

    def directions(self) -> Iterator[Directions]:
        """Yield the directions along which each weight's next gradient is projected, which are equal on all ranks."""
        for alike in self._factored:
            for matrix, directions in zip(alike.matrices, alike.directions, strict=True):
                yield Directions(matrix.name, directions)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all residuals, as the gradients will be from now on; with 0 directions become those before the first step, too."""
        if factor == 0.0:
            self._start()
        else:
            self._kept.mul_(factor)

    def begin_step(self) -> None:
        """Discard the contribution of the previous step."""
        self._num_sent = 0

    def send(self, values: Sequence[Tensor]) -> dist.Work:
        """Add the residuals to this rank's contribution, a flat buffer, and start to sum the left factors; called again, start to sum the
        right ones.

        Collective over the group, see [Note: collective calls].
        """
        if self._num_sent == 0:
            self._project(values[0])
        else:
            self._find()
        sent = self._second if self._num_sent else self._first
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        if self._num_sent:
            self._keep_rest()
        self._num_sent += 1
        return work

    @torch.no_grad()
    def finish(self, values: Sequence[Tensor]) -> None:
        """Write the sums to the buffer, or only this rank's chunk; called once the collectives of `send` have ended."""
        self._decode(values[0])
        for run, summed in zip(self._outside, self._runs(), strict=True):
            values[0][run] = summed
        # On GPUs a pass takes less time than to wait for the answer whether one is needed.
        if self._kept.is_cuda or not self._second.sum().isfinite():
            for alike in self._factored:
                alike.rest.masked_fill_(~alike.right.sum((1, 2), keepdim=True).isfinite(), 0.0)
        if self._factored:
            next_directions([alike.right for alike in self._factored], [alike.directions for alike in self._factored])
        self.begin_step()

    def _decode(self, value: Tensor) -> None:
        """Write the sums of matrices to the buffer, at least the rows in this rank's chunk."""
        size = value.numel() if self._gathers else value.numel() // self._ranks
        first = 0 if self._gathers else self._index * size
        for alike in self._factored:
            start, stop = alike.matrices[0].offset, alike.matrices[-1].offset + alike.matrices[-1].numel
            if first <= start and stop <= first + size:
                torch.bmm(alike.left.mT, alike.right, out=value[start:stop].view_as(alike.rest))
                continue
            for matrix, left, right in zip(alike.matrices, alike.left, alike.right, strict=True):
                begin, end = first - matrix.offset, first + size - matrix.offset
                rows = slice(max(begin, 0) // matrix.columns, min(-(-end // matrix.columns), matrix.rows))
                if rows.start < rows.stop:
                    whole = value[matrix.offset : matrix.offset + matrix.numel].view(matrix.rows, matrix.columns)
                    torch.mm(left[:, rows].T, right, out=whole[rows])

    @torch.no_grad()
    def _project(self, value: Tensor) -> None:
        """Compute this rank's left factors, and take the elements outside of matrices from the contribution."""
        self._kept += value
        for alike in self._factored:
            torch.bmm(alike.directions, alike.rest.mT, out=alike.left)
        for run, sent in zip(self._outside, self._runs(), strict=True):
            sent.copy_(self._kept[run])
            self._kept[run] = 0.0

    @torch.no_grad()
    def _find(self) -> None:
        """Compute this rank's right factors from the sum of the left ones."""
        if self._factored:
            orthonormalise([alike.left for alike in self._factored])
        for alike in self._factored:
            torch.bmm(alike.left, alike.rest, out=alike.own)
        self._second.copy_(self._own)

    @torch.no_grad()
    def _keep_rest(self) -> None:
        """Subtract the product of this rank's factors from its contributions, which leaves the residuals."""
        for alike in self._factored:
            alike.rest.baddbmm_(alike.left.mT, alike.own, alpha=-1.0)

    def _runs(self) -> Sequence[Tensor]:
        """Return the elements outside of matrices that are sent, run by run."""
        return self._plain.split([run.stop - run.start for run in self._outside])


def _alike(matrices: Sequence[Matrix]) -> Iterator[tuple[Matrix, ...]]:
    """Yield runs of adjacent matrices of one shape."""
    run: list[Matrix] = []
    for matrix in matrices:
        if run and (run[-1][2:] != matrix[2:] or run[-1].offset + matrix.numel != matrix.offset):
            yield tuple(run)
            run = []
        run.append(matrix)
    if run:
        yield tuple(run)


def _runs_outside(part: CodedPart) -> Iterator[slice]:
    """Yield the runs of a buffer outside of its matrices."""
    stop = 0
    for matrix in part.matrices:
        if matrix.offset > stop:
            yield slice(stop, matrix.offset)
        stop = matrix.offset + matrix.numel
    if part.numel > stop:
        yield slice(stop, part.numel)
