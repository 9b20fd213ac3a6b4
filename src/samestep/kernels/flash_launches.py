"""Launches of the kernels of `flash_dropout.py`: their grids, blocks and strides.

Legend: B samples, A heads, K heads of keys, L queries, S keys, T tokens of a sequence, D features of a head, E features of a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.kernels.kernel_choice import kernels_of, on_device_of


class FlashForm(NamedTuple):
    """The form of an attention of some queries to some keys, which are runs of the tokens of a sequence."""

    halves: Tensor
    """The halves of the hashed rows of the mask, int32 [B, A, L, 2]."""
    columns: Tensor
    """Its hashed columns, int32 [S]."""
    threshold: int
    """The number below which the bits of dropped weights are."""
    p: float
    """The probability with which a weight is dropped, below 1."""
    scale: float
    causal: bool = False
    mask: Tensor | None = None
    """Which keys a query sees, bool, or a number that is added to scores [B or 1, A or 1, L or 1, S or 1]; it takes no gradient."""
    documents: Tensor | None = None
    """The document of each token of the sequence, int64 [B, T]."""
    query_start: int = 0
    key_start: int = 0
    """The tokens of the first query and of the first key."""


class _Blocks(NamedTuple):
    """The queries and keys of a block, and how many warps and stages compute it."""

    queries: int
    keys: int
    warps: int
    stages: int

    def launch(self) -> dict[str, int]:
        """Return what a kernel is launched with."""
        return {"ROWS": self.queries, "COLUMNS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


class _Sizes(NamedTuple):
    """The blocks of the three kernels."""

    forward: _Blocks
    of_queries: _Blocks
    of_keys: _Blocks


_HALF = {
    64: _Sizes(_Blocks(64, 64, 4, 2), _Blocks(64, 64, 4, 2), _Blocks(32, 64, 4, 2)),
    128: _Sizes(_Blocks(64, 64, 4, 2), _Blocks(64, 64, 8, 2), _Blocks(32, 64, 8, 2)),
    256: _Sizes(_Blocks(64, 32, 8, 1), _Blocks(32, 32, 8, 1), _Blocks(32, 32, 8, 1)),
}
_FULL = {
    64: _Sizes(_Blocks(32, 32, 4, 1), _Blocks(32, 32, 4, 1), _Blocks(32, 32, 4, 1)),
    128: _Sizes(_Blocks(32, 32, 8, 1), _Blocks(32, 32, 8, 1), _Blocks(32, 32, 8, 1)),
    256: _Sizes(_Blocks(32, 16, 8, 1), _Blocks(16, 16, 8, 1), _Blocks(16, 16, 8, 1)),
}
WIDEST = 256
"""The largest head that the kernels take."""


def _sizes_for(query: Tensor, value: Tensor) -> _Sizes:
    """Return the blocks for heads of a width: so large that sums stay in registers, and within 96 KiB of shared memory."""
    table, width = _FULL if query.dtype is torch.float32 else _HALF, max(query.shape[3], value.shape[3])
    return next(sizes for widest, sizes in table.items() if width <= widest)


def forward(query: Tensor, key: Tensor, value: Tensor, form: FlashForm) -> tuple[Tensor, Tensor]:
    """Return the output [B, A, L, E], and the log-sum-exp of each query, float32 [B, A, L]."""
    samples, heads, length, _ = query.shape
    # The heads of a token side by side: code views the output so.
    output = query.new_empty(samples, length, heads, value.shape[3]).transpose(1, 2)
    log_sum_exp = query.new_empty((samples, heads, length), dtype=torch.float32)
    query, key, value = (_with_rows(tensor) for tensor in (query, key, value))
    blocks = _sizes_for(query, value).forward
    some, strides, numbers, words = _arguments(query, key, value, form)
    with on_device_of(query):
        kernels_of(_FILE).forward_kernel[(_number(length, blocks.queries) * samples * heads,)](
            query, key, value, output, log_sum_exp, *some, *_strides(query, key, value, output), *strides, *numbers,
            **words, **blocks.launch(),
        )  # fmt: skip
    return output, log_sum_exp


def products_of(tensor: Tensor, output: Tensor) -> Tensor:
    """Return the sums over features of the gradient of an output times the output, float32 [B, A, L]."""
    samples, heads, length, width = output.shape
    tensor, output = _with_rows(tensor), _with_rows(output)
    products = output.new_empty((samples, heads, length), dtype=torch.float32)
    with on_device_of(output):
        kernels_of(_FILE).products_kernel[(_number(length, _ROWS) * samples * heads,)](
            tensor, output, products, *_strides(tensor, output), length,
            HEADS=heads, E=width, PADDED_E=_padded(width), ROWS=_ROWS, num_warps=4,
        )  # fmt: skip
    return products


def backward(
    gradient: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    log_sum_exp: Tensor,
    products: Tensor,
    form: FlashForm,
    *,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, in their dtype or in float32.

    `gradient` is that of the output over all keys, of which these may be a part; the log-sum-exps are over all of them too, and
    the `products` are those of that gradient and that output [B, A, L].
    """
    query, key, value = (_with_rows(tensor) for tensor in tensors)
    gradient, log_sum_exp, products = _with_rows(gradient), log_sum_exp.contiguous(), products.contiguous()
    of_queries, of_keys, of_values = (_gradient_of(tensor, in_float32=in_float32) for tensor in (query, key, value))
    (samples, heads, length, _), sizes = query.shape, _sizes_for(query, value)
    some, strides, numbers, words = _arguments(query, key, value, form)
    inputs = [query, key, value, gradient, log_sum_exp, products]
    of_inputs = [*_strides(query, key, value, gradient), *log_sum_exp.stride()[:2]]
    kernels = kernels_of(_FILE)
    with on_device_of(query):
        kernels.query_gradients_kernel[(_number(length, sizes.of_queries.queries) * samples * heads,)](
            *inputs, of_queries, *some, *of_inputs, *_strides(of_queries), *strides, *numbers,
            **words, **sizes.of_queries.launch(),
        )  # fmt: skip
        kernels.key_gradients_kernel[(_number(key.shape[2], sizes.of_keys.keys) * samples * key.shape[1],)](
            *inputs, of_keys, of_values, *some, *of_inputs, *_strides(of_keys, of_values), *strides, *numbers,
            **words, **sizes.of_keys.launch(),
        )  # fmt: skip
    return of_queries, of_keys, of_values


_FILE = "flash_dropout"
_ROWS = 32
"""Queries of a program that adds up products."""


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, form: FlashForm
) -> tuple[list[Tensor], list[int], list[float], dict[str, Any]]:
    """Return what the kernels are given alike: tensors of the form, their strides, numbers, and what they are compiled for."""
    samples, heads, length, width = query.shape
    mask, documents, kind = query, query, ""  # which are not read
    of_mask, of_documents = [0, 0, 0, 0], 0
    if form.mask is not None:
        kind = "bool" if form.mask.dtype is torch.bool else "added"
        mask = form.mask.view(torch.uint8) if kind == "bool" else form.mask
        mask = mask.expand(samples, heads, length, key.shape[2])
        of_mask = [*mask.stride()]
    if form.documents is not None:
        documents = form.documents if form.documents.stride(1) == 1 else form.documents.contiguous()
        of_documents = documents.stride(0)
    tensors = [form.halves, form.columns, mask, documents]
    strides = [*form.halves.stride()[:2], *of_mask, of_documents]
    numbers = [
        length, key.shape[2], form.query_start, form.key_start, form.scale, 1.0 / (1.0 - form.p), form.threshold
    ]  # fmt: skip
    # The products of a job that forbids TF32 are float32's own.
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    words = {
        "HEADS": heads, "GROUP": heads // key.shape[1], "D": width, "E": value.shape[3],
        "PADDED_D": _padded(width), "PADDED_E": _padded(value.shape[3]), "IS_CAUSAL": form.causal,
        "MASK": kind, "HAS_DOCUMENTS": form.documents is not None, "PRECISION": precision,
    }  # fmt: skip
    return tensors, strides, numbers, words


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of samples, heads and tokens of each tensor."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _number(length: int, block: int) -> int:
    return -(-length // block)


def _padded(width: int) -> int:
    """Return the features of a block, a power of two and at least as many as the products of a GPU take."""
    return max(16, 1 << (width - 1).bit_length())


def _with_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose features are adjacent in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _gradient_of(tensor: Tensor, *, in_float32: bool) -> Tensor:
    """Return the memory of a gradient, in the order of its tensor."""
    return _with_rows(torch.empty_like(tensor, dtype=torch.float32 if in_float32 else tensor.dtype))
