"""The remainders of masters in two halves, of one kernel: 7 bytes of memory traffic an element, where torch's operations take 25."""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.kernels.kernel_choice import kernels_of, on_device_of

_BLOCK = 1024
"""Elements of one program."""


def split_remainders(bits: Tensor, remainders: Tensor) -> Tensor:
    """Write the lower halves of the bits of masters, int32 [size], to `remainders`, int16 [size]; return which masters are halfway
    between two weights and rounded down, bool [size]."""
    is_halfway = torch.empty(bits.shape, dtype=torch.bool, device=bits.device)
    with on_device_of(bits):
        kernels_of("remainder_bits").write_remainders[(-(-bits.numel() // _BLOCK),)](
            bits, remainders, is_halfway, bits.numel(), BLOCK=_BLOCK
        )
    return is_halfway
