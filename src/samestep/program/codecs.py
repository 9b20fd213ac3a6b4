"""Gradient codecs: how the elements of a gradient are written down where contributions are summed. No torch.

A codec is one row of `CODECS` and one file with its torch part, `module`. The row says how many bytes a block of elements
takes, or that matrices are sent as two factors, so that programs, the ledger, the clock and the planner know what is sent;
the file says what torch does.

```
part of a rank    │ codes of its blocks, one after the other │ what each block needs besides, such as a scale │   bytes
```
Blocks are those of the whole weight (`update_rules.block_of`), whatever a layout leaves of it to a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from samestep.program.ops import Op, OpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A gradient codec, as far as a program has to know it."""

    name: str
    module: str
    """Name of the module whose `codec()` returns a `runtime.codecs.codec.Codec`, imported where a run is assembled."""
    element_bytes: int
    """Bytes of an element as it is sent."""
    block_bytes: int = 0
    """Bytes that a block takes besides its elements."""
    feeds_back: bool = False
    """Whether what a code loses is added to the gradient that is encoded next."""
    can_be_fused: bool = False
    """Whether its module also has `fused(backend)`, the same codec with kernels that are compiled as one loop."""
    factors: bool = False
    """Whether a matrix is sent as two factors, which all_reduces sum, and everything else as it is, in master precision."""

    def size_bytes(self, numel: int, block: int) -> int:
        """Return the bytes of `numel` elements in blocks of `block` as they are sent."""
        return numel * self.element_bytes + numel // block * self.block_bytes


PLAIN = "plain"
"""The codec of a reduction that sums gradients as they are, in master precision."""
CODECS = {
    "bf16": CodecSpec(name="bf16", module="samestep.runtime.codecs.bf16", element_bytes=2),
    "int8": CodecSpec(
        name="int8",
        module="samestep.runtime.codecs.int8",
        element_bytes=1,
        block_bytes=1,
        feeds_back=True,
        can_be_fused=True,
    ),
    "powersgd": CodecSpec(
        name="powersgd", module="samestep.wings.slow_links.powersgd", element_bytes=4, feeds_back=True, factors=True
    ),
}
"""All codecs, by the words of `numerics.compression`."""


class Matrix(NamedTuple):
    """The gradient of a weight [rows, columns] in a flat buffer, sent as factors [rows, rank] and [columns, rank]."""

    name: str
    """The weight's."""
    offset: int
    rows: int
    columns: int
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


def is_factored(shape: Sequence[int], rank: int) -> bool:
    """Return whether two factors of a rank have fewer elements than a weight, its first dimension against all others."""
    numel, rows = math.prod(shape), shape[0] if len(shape) > 1 else 0
    return rows > 0 and (rows + numel // rows) * rank < numel


class CodedPart(NamedTuple):
    """A flat buffer of gradients that are encoded in blocks of one size; ranks that sum it have equal parts of it."""

    numel: int
    block: int
    matrices: tuple[Matrix, ...] = ()
    """Matrices in it that are sent as factors, in order; all other elements are sent as they are."""

    @property
    def factor_numels(self) -> tuple[int, int]:
        """Elements of what is sent first, the left factors and what is sent as it is, and of the right factors."""
        plain = self.numel - sum(matrix.numel for matrix in self.matrices)
        left = sum(matrix.rows * matrix.rank for matrix in self.matrices)
        return left + plain, sum(matrix.columns * matrix.rank for matrix in self.matrices)

    @property
    def factor_flops(self) -> tuple[int, int]:
        """FLOPs of the left factors, and of everything that follows: three products, and what makes columns orthonormal."""
        product = sum(2 * matrix.numel * matrix.rank for matrix in self.matrices)
        return product, 3 * product + sum(4 * (m.rows + m.columns) * m.rank**2 for m in self.matrices)


def coded_bytes(codec: str, parts: Sequence[CodedPart]) -> int:
    """Return the bytes of buffers as a codec sends them."""
    return sum(CODECS[codec].size_bytes(part.numel, part.block) for part in parts)


def exchange(
    owner: str, codec: str, axis: str, parts: Sequence[CodedPart], dtype: str, *, gathers: bool
) -> Iterator[Op]:
    """Yield the collectives that sum what the ranks of an axis have encoded.

    Every rank sums its part of the buffers, of all contributions, and encodes the sum, which all ranks gather. Buffers that
    are sent as they are, in `dtype`, are summed by one all_reduce. Of factors the second one is made from the sum of the
    first, so that there are two.
    """
    if codec == PLAIN:
        plain = Op(kind=OpKind.ALL_REDUCE, owner=owner, axis=axis, dtype=dtype, codec=PLAIN)
        yield plain.sized(sum(part.numel for part in parts))
        return
    if CODECS[codec].factors:
        factor = Op(kind=OpKind.ALL_REDUCE, owner=owner, axis=axis, dtype=dtype, codec=codec)
        numels = map(sum, zip(*(part.factor_numels for part in parts), strict=True))
        flops = map(sum, zip(*(part.factor_flops for part in parts), strict=True))
        yield from (factor.sized(numel).but(flops=work) for numel, work in zip(numels, flops, strict=True) if numel)
        return
    size = coded_bytes(codec, parts)
    sent = Op(kind=OpKind.ALL_TO_ALL, owner=owner, axis=axis, dtype="uint8", size_bytes=size, codec=codec)
    yield sent
    if gathers:
        yield sent.but(kind=OpKind.ALL_GATHER, size_bytes=size)
