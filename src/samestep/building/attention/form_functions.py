"""Functions of a tensor that read its form, and no elements: those that tensors without elements answer."""

from __future__ import annotations

import torch
from torch import Tensor

_PROPERTIES = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta", "is_cuda", "is_cpu", "is_leaf", "grad_fn", "_version",
    "_base", "is_nested", "is_sparse", "is_quantized",
)  # fmt: skip
OF_FORM = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.storage_offset,
        Tensor.untyped_storage, Tensor.data_ptr, Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point,
        Tensor.is_complex, torch.is_floating_point, torch.is_complex, Tensor.__hash__, Tensor.get_device,
    )
)  # fmt: skip
"""Functions of a tensor that read its form and no elements."""
