"""Gradients of which only the largest elements are sent: k of a block of n, at least one in 16, exactly and with their
places.

```
block of 256     x_0 x_1 ... x_255       the 16 largest |x|, of equal ones the first
wire             x, float32 each         ...       the place of each in its block, uint8
```
Sent elements are exact in float32, and the others are at most as large as the smallest of these: |x - Q(x)|^2 <= (1 -
k/n) |x|^2 (Stich et al. 2018, arXiv:1809.07599, who show that with the loss added to the next gradient it trains as the
whole does; Lin et al. 2018, arXiv:1712.01887, for its use). Choosing within blocks, not in the whole gradient, makes
the choice the same in every layout, since no layout divides a block. Values that are not finite are among the largest,
and sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.program.codecs import CODECS
from samestep.runtime.codecs.codec import Codec


class TopK:
    """The codec that sends the largest elements of each block."""

    def encode(self, values: Tensor, block: int, wire: Tensor, lost: Tensor | None = None) -> None:
        """Write the largest of values [rows, n], plus what was lost, to `wire`, uint8 [rows, 5 n k / block]."""
        blocks, k = (values if lost is None else lost.add_(values)).view(-1, block), CODECS["topk"].num_sent(block)
        places = torch.sort(blocks.abs(), dim=1, descending=True, stable=True).indices[:, :k]
        sent = blocks.gather(1, places).float()
        end = 4 * sent.numel() // len(values)
        wire[:, :end].copy_(sent.view(torch.uint8).view(len(values), -1))
        wire[:, end:].copy_(places.reshape(len(values), -1))
        if lost is not None:
            blocks.scatter_add_(1, places, -sent.to(blocks.dtype))
            blocks.masked_fill_(~sent.isfinite().all(1, keepdim=True), 0.0)

    def decode(self, wire: Tensor, block: int, values: Tensor) -> None:
        """Add the decoded `wire` to values [rows, n]."""
        blocks, k = values.view(-1, block), CODECS["topk"].num_sent(block)
        end = wire.shape[1] // 5 * 4
        sent = wire[:, :end].flatten().clone().view(torch.float32).view(-1, k)  # a clone begins at a whole float
        places = wire[:, end:].reshape(-1, k).long()
        blocks.scatter_add_(1, places, sent.to(blocks.dtype))


def codec() -> Codec:
    """Return the codec."""
    return TopK()
