"""Frozen weights in 4 bits (NF4), the base of QLoRA: how a weight is rounded, how it is held, and the product with it.

    w = LEVELS[code] * scale        a code of 4 bits for each element, a scale for each block of 64 elements of a row

The 16 levels are quantiles of a normal distribution between -1 and 1, and the scale is the block's largest magnitude, itself
rounded to 8 bits. Dettmers et al. 2023, arXiv:2305.14314; codes and scales are those of torchao's `to_nf4`, to the bit.

The job rounds (`round_weight`): the weights of a model with such a base are these values in every layout. The run packs (`pack_values`):
a rank holds codes and scales of its part of a weight, as bytes in one tensor,

    row of 128 elements    [ 64 bytes of codes | scale 0 | scale 1 ]

which is sent as it is, and unpacked for each product and again for its backward. To pack rounded values loses nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from samestep.models.param_spec import BLOCK, SCALE_BYTES, packed_bytes

LEVELS = torch.tensor([
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0
])  # fmt: skip
"""The values of the codes 0 to 15."""
_PAIRS = torch.stack((LEVELS.repeat_interleave(16), LEVELS.repeat(16)), dim=1)
"""The two values in each byte, [256, 2]; the first element is in the upper half."""
_GROUP = 256
"""Number of scales that are rounded together."""
_AT_ONCE = 2**20
"""Number of elements that are compared with all levels at once."""

# -- values ----------------------------------------------------------------------------------------


def round_weight(weight: Tensor) -> Tensor:
    """Return a whole weight with its elements rounded, [rows, columns] of floating numbers -> the same in float32.

    A block of zeros stays as it is, and a scale that rounding would make negative is not rounded.
    """
    scales, codes = _encode_blocks(weight)
    return (LEVELS.to(weight.device)[codes] * _rounded_scales(scales)[:, None]).view(weight.shape)


def _encode_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each block, [blocks], and the code of each element, [blocks, BLOCK]."""
    blocks = weight.to(torch.float32).reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    levels, each = LEVELS.to(weight.device), _AT_ONCE // BLOCK
    parts = [
        (some / scale[:, None]).nan_to_num(0.0)[..., None].sub(levels).abs_().argmin(dim=-1)
        for some, scale in zip(blocks.split(each), scales.split(each), strict=True)
    ]
    return scales, torch.cat(parts)


def _rounded_scales(scales: Tensor) -> Tensor:
    """Return scales rounded to 256 steps of their group, less the mean of all; they are those of one whole weight."""
    mean = scales.mean()
    groups = (scales - mean).view(-1, math.gcd(_GROUP, len(scales)))
    steps = 256 / (2 * groups.abs().amax(dim=1, keepdim=True))
    rounded = ((groups * steps).round().clamp(-128, 127) / steps).flatten() + mean
    return torch.where(rounded > 0, rounded, scales)


# -- bytes -----------------------------------------------------------------------------------------


def pack_values(values: Tensor) -> Tensor:
    """Return rounded values as bytes, [rows, columns] -> uint8 [rows, columns * 9/16]; a row is whole blocks."""
    rows, columns = values.shape
    scales, codes = _encode_blocks(values)
    codes = codes.to(torch.uint8).view(rows, columns)
    pairs = (codes[:, ::2] << 4) | codes[:, 1::2]
    return torch.cat((pairs, scales.view(rows, -1).view(torch.uint8)), dim=1)


def unpack_values(tensor: Tensor) -> Tensor:
    """Return the values that bytes hold, uint8 [rows, bytes] -> float32 [rows, columns]."""
    rows, size = tensor.shape
    num_blocks = size // packed_bytes(BLOCK)
    pairs = tensor[:, : size - num_blocks * SCALE_BYTES]
    scales = tensor[:, size - num_blocks * SCALE_BYTES :].view(torch.float32)
    values = _PAIRS.to(tensor.device)[pairs.int()]
    return values.view(rows, num_blocks, BLOCK).mul_(scales[..., None]).view(rows, num_blocks * BLOCK)


# -- products --------------------------------------------------------------------------------------


def multiply_packed(module: nn.Module, is_transposed: bool) -> None:
    """Make a linear module, whose weight is [in, out] if it is transposed, multiply by the bytes that it holds."""

    def forward(x: Tensor) -> Tensor:
        product: Tensor = _PackedProduct.apply(x, module.weight, is_transposed)
        bias = module._parameters["bias"]
        return product if bias is None else product + bias

    module.forward = forward


class _PackedProduct(torch.autograd.Function):
    """x W^T with a weight that asks for no gradient; for the backward the bytes are kept, not the values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Tensor, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.is_transposed = is_transposed
        weight = unpack_values(tensor).to(x.dtype)
        return x @ (weight if is_transposed else weight.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (held,) = ctx.saved_tensors
        weight = unpack_values(held).to(gradients[0].dtype)
        return gradients[0] @ (weight.T if ctx.is_transposed else weight), None, None
