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
from collections.abc import Sequence

import torch
from torch import Tensor

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
    grams = torch.cat([one @ one.mT for one in wide])
    lengths = grams.diagonal(dim1=1, dim2=2)
    inverse = torch.where(lengths == 0, 0.0, lengths.rsqrt())
    # Once more without those that depend on others: in float32 rounding errors give them a direction.
    sines = _cholesky(grams, inverse).diagonal(dim1=1, dim2=2)
    inverse = inverse.masked_fill(sines.square() <= SMALLEST_SINE_SQUARED, 0.0)
    lower = _cholesky(grams, inverse)
    mixing = torch.linalg.solve_triangular(lower, torch.diag_embed(inverse), upper=False)
    mixing += 0.0 * lengths.sum(1)[:, None, None]  # keeps values that are not finite
    for factor, one, mix in zip(factors, wide, mixing.split([len(one) for one in wide]), strict=True):
        factor.copy_(mix @ one)


def _cholesky(grams: Tensor, inverse: Tensor) -> Tensor:
    """Return Cholesky's lower factor of inner products [matrices, rank, rank] of rows divided by their lengths."""
    cosines = inverse[:, :, None] * grams * inverse[:, None, :]
    cosines.diagonal(dim1=1, dim2=2).add_(_SHIFT)
    lower: Tensor = torch.linalg.cholesky_ex(cosines).L
    return lower


def next_directions(found: Sequence[Tensor], directions: Sequence[Tensor]) -> None:
    """Set directions Q^T [matrices, rank, m] to orthonormal rows of the span of `found`, Q'^T; rows that found nothing stay
    as they are.

    `found` is overwritten.
    """
    orthonormalise(found)
    for new, kept in zip(found, directions, strict=True):
        is_new = (new != 0).any(2, keepdim=True) & new.sum((1, 2), keepdim=True).isfinite()
        kept.copy_(torch.where(is_new, new, kept))
