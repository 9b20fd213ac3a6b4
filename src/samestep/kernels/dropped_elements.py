"""Dropout of elements by one kernel that draws the mask, drops and scales; the backward draws it anew, so no mask is kept.

The result and the gradient are those of `masked_fill(dropped, 0) * scale` in torch, to the bit.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.kernels.kernel_choice import kernels_of, on_device_of

MOST_DIMENSIONS = 3
"""Dimensions of rows that a kernel takes apart; of more, in no common order, a tensor is copied."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ELEMENTS = 2048
"""Elements of a tile, which one program computes."""
_MOST_COLUMNS = 1024


class _StridedRows(NamedTuple):
    """The sizes and strides of the dimensions of rows, of which the first ones are 1 where there are fewer."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Those of rows, and last that of a column."""

    @classmethod
    def of(cls, x: Tensor, num_columns: int) -> _StridedRows | None:
        """Return how a kernel walks a tensor by rows of so many columns; None where it cannot.

        A tensor of one dimension may have several rows.
        """
        shape, strides = tuple(x.shape), x.stride()
        if len(shape) == 1:
            shape, strides = (shape[0] // num_columns, num_columns), (num_columns * strides[0], strides[0])
        assert shape[-1] == num_columns
        dims: list[tuple[int, int]] = []
        for size, stride in zip(shape[:-1], strides[:-1], strict=True):
            if dims and dims[-1][1] == size * stride:
                dims[-1] = (dims[-1][0] * size, stride)
            elif size > 1:
                dims.append((size, stride))
        if len(dims) > MOST_DIMENSIONS:
            return None
        dims = [(1, 0)] * (MOST_DIMENSIONS - len(dims)) + dims
        return cls(tuple(size for size, _ in dims), (*(stride for _, stride in dims), strides[-1]))


class HashedMask(NamedTuple):
    """A mask by its rows, in the order of a tensor, and its columns."""

    halves: Tensor
    """int32 [rows, 2], contiguous."""
    columns: Tensor
    """int32 [columns], contiguous."""
    threshold: int
    """What the bits of dropped elements are below."""


def can_drop(x: Tensor, num_columns: int, *, inplace: bool) -> bool:
    """Return whether the kernel takes this tensor where kernels run; another one, as of complex numbers, is left to torch."""
    has_rows = x.shape[-1:] == (num_columns,) or (x.dim() == 1 and x.shape[0] % num_columns == 0)
    return x.dtype in _TYPES and x.numel() > 0 and has_rows and (x.is_contiguous() or not inplace)


def drop_elements(x: Tensor, mask: HashedMask, scale: float, *, inplace: bool) -> Tensor:
    """Return x without the dropped elements, the others scaled, written to x itself where it is `inplace`."""
    result: Tensor = _DropElements.apply(x, mask, scale, inplace)
    return result


class _DropElements(torch.autograd.Function):
    """The gradient of dropped elements is that of the same function, so it has gradients of every order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: HashedMask, scale: float, inplace: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(mask.halves, mask.columns)
        ctx.save_for_forward(mask.halves, mask.columns)
        ctx.threshold, ctx.scale = mask.threshold, scale
        return _dropped(x, mask, scale, inplace=inplace)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _DropElements._linear(ctx, gradients[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _DropElements._linear(ctx, tangents[0])

    @staticmethod
    def _linear(ctx: Any, x: Tensor) -> Tensor:
        halves, columns = ctx.saved_tensors
        return drop_elements(x, HashedMask(halves, columns, ctx.threshold), ctx.scale, inplace=False)


def _dropped(x: Tensor, mask: HashedMask, scale: float, *, inplace: bool) -> Tensor:
    """Return the result, which is contiguous, as that of `masked_fill` is."""
    rows = _StridedRows.of(x, mask.columns.numel())
    if rows is None:
        return _dropped(x.contiguous(), mask, scale, inplace=True)
    y = x if inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, tile = _tiles(mask)
    with on_device_of(x):
        kernels_of("hashed_dropout").drop_and_scale[grid](
            x, y, mask.halves, mask.columns, mask.halves.shape[0], mask.columns.numel(), *rows.sizes[1:], *rows.strides,
            mask.threshold, _bits(scale), **tile,
        )  # fmt: skip
    return y


def mask_of(mask: HashedMask) -> Tensor:
    """Return which elements are dropped, bool [rows, columns]."""
    dropped = torch.empty(mask.halves.shape[0], mask.columns.numel(), dtype=torch.bool, device=mask.halves.device)
    if dropped.numel():
        grid, tile = _tiles(mask)
        with on_device_of(dropped):
            kernels_of("hashed_dropout").write_mask[grid](
                dropped, mask.halves, mask.columns, *dropped.shape, mask.threshold, **tile
            )
    return dropped


def _tiles(mask: HashedMask) -> tuple[tuple[int], dict[str, int]]:
    """Return the number of programs, and the rows and columns of a tile."""
    num_rows, num_columns = mask.halves.shape[0], mask.columns.numel()
    columns = min(_MOST_COLUMNS, 1 << (num_columns - 1).bit_length())
    rows = _ELEMENTS // columns
    return (-(-num_rows // rows) * -(-num_columns // columns),), {"ROWS": rows, "COLUMNS": columns}


def _bits(number: float) -> int:
    """Return the bits of a float64, which Triton would take for a float32."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)
