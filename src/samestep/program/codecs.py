"""Gradient codecs: how the elements of a gradient are written down where contributions are summed. No torch.

A codec is one row of `CODECS` and one file with its torch part, `module`. The row says how many bytes a block of elements
takes, so that programs, the ledger, the clock and the planner know what is sent; the file says what torch does.

```
part of a rank    │ codes of its blocks, one after the other │ what each block needs besides, such as a scale │   bytes
```
Blocks are those of the whole weight (`state_blocks.block_of`), whatever a layout leaves of it to a rank.
"""

from __future__ import annotations

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

    def size_bytes(self, numel: int, block: int) -> int:
        """Return the bytes of `numel` elements in blocks of `block` as they are sent."""
        return numel * self.element_bytes + numel // block * self.block_bytes


PLAIN = "plain"
"""What an op of a reduction names that sums gradients as they are, in master precision."""
CODECS = {
    "bf16": CodecSpec(name="bf16", module="samestep.runtime.codecs.bf16", element_bytes=2),
    "fp16": CodecSpec(name="fp16", module="samestep.runtime.codecs.fp16", element_bytes=2),
    "int8": CodecSpec(
        name="int8", module="samestep.runtime.codecs.int8", element_bytes=1, block_bytes=1, feeds_back=True
    ),
}
"""All codecs, by the words of `numerics.compression`."""


class CodedPart(NamedTuple):
    """A flat buffer of gradients that are encoded in blocks of one size; ranks that sum it have equal parts of it."""

    numel: int
    block: int


def coded_bytes(codec: str, parts: Sequence[CodedPart]) -> int:
    """Return the bytes of buffers as a codec sends them."""
    return sum(CODECS[codec].size_bytes(part.numel, part.block) for part in parts)


def exchange(
    owner: str, codec: str, axis: str, parts: Sequence[CodedPart], each: int, *, gathers: bool
) -> Iterator[Op]:
    """Yield the collectives that sum what the ranks of an axis have encoded, `each` of them so many contributions.

    Every rank sums its part of the buffers, of all contributions, and encodes the sum, which all ranks gather.
    """
    size = coded_bytes(codec, parts)
    sent = Op(kind=OpKind.ALL_TO_ALL, owner=owner, axis=axis, dtype="uint8", size_bytes=each * size, codec=codec)
    yield sent
    if gathers:
        yield sent.but(kind=OpKind.ALL_GATHER, size_bytes=size)
