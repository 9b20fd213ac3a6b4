"""A gradient codec that the product does not know: sums in bfloat16, under masters in float32. One file, and one row.

gradients, float32 ── cast ──► bfloat16 ── all_reduce, reduce_scatter ──► bfloat16 ── cast ──► gradients
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.program.codecs import CodecSpec
from samestep.program.ops import OpKind
from samestep.runtime.codecs.codec import Pending, result_of, send

ROW = CodecSpec(name="bf16-sums", dtype="bfloat16", module=__name__)


class Bf16Sums:
    def reduce(self, kind: OpKind, flat: Tensor, group: dist.ProcessGroup) -> Pending:
        encoded = flat.to(torch.bfloat16)
        work = send(kind, encoded, group)
        return _Decoding(work, result_of(kind, encoded, group), result_of(kind, flat, group))


@dataclass
class _Decoding:
    work: dist.Work
    encoded: Tensor
    decoded: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.decoded.copy_(self.encoded)


def codec() -> Bf16Sums:
    return Bf16Sums()
