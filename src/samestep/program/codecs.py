"""Gradient codecs: how the elements of a gradient are written down for the reductions of the data axes. No torch.

A codec is one row of `CODECS` and one file with its torch part, `module`. The row says in which dtype elements are sent, so
that programs, the ledger, the clock and the planner know the bytes; the file says what torch does. Every bucket, unit and
op of a reduction names its codec. What is summed over other axes (`tp`, and the tied stages of units) is sent as it is, and
so is what FSDP2 sums over the replicas of a unit's shards: it lets its reduce_scatter be replaced, and not that all_reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.program.ops import BYTES_OF, Op, OpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A gradient codec, as far as a program has to know it."""

    name: str
    dtype: str | None
    """Dtype of an element as it is sent; None for master precision."""
    module: str | None
    """Name of the module whose `codec()` returns a `runtime.codecs.codec.Codec`, imported where a run is assembled; None of
    one that is priced alone, and that nothing carries out."""

    def sent_dtype(self, master_dtype: str) -> str:
        """Return the dtype in which gradients of master precision are sent."""
        return self.dtype or master_dtype

    def size_bytes(self, numel: int, master_dtype: str) -> int:
        """Return the bytes of `numel` elements as they are sent."""
        return numel * BYTES_OF[self.sent_dtype(master_dtype)]

    def op(self, kind: OpKind, owner: str, axis: str, numel: int, master_dtype: str) -> Op:
        """Return one collective of the reduction of a buffer of `numel` elements."""
        dtype, size_bytes = self.sent_dtype(master_dtype), self.size_bytes(numel, master_dtype)
        return Op(kind=kind, owner=owner, axis=axis, dtype=dtype, size_bytes=size_bytes, codec=self.name)


PLAIN = "plain"
"""Name of the codec that changes nothing: gradients are summed as they are."""
CODECS = {PLAIN: CodecSpec(name=PLAIN, dtype=None, module="samestep.runtime.codecs.plain")}
"""All codecs, by name."""
