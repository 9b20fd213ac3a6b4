"""The mask of packed documents without its elements: attention within a document, and nothing else.

A dense mask would take B T^2 bytes, and the kernels that are given one convert it to the dtype of the scores in every layer and
keep that for the backward. A `DocumentMask` has the shape of the dense mask, and holds the document of each token, [B, T]. Code
that does anything else with it than attend gets the dense one.

Legend: B samples, A heads, T tokens, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.building.attention.carriers import AttentionCall, output_of
from samestep.building.attention.fused import dense_mask
from samestep.building.torch_seams import DisableTorchFunctionSubclass
from samestep.trees import tree_map_only

_PROPERTIES = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta", "is_cuda", "is_cpu", "is_leaf", "grad_fn", "_version",
    "_base", "is_nested", "is_sparse", "is_quantized",
)  # fmt: skip
_OF_FORM = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.storage_offset,
        Tensor.untyped_storage, Tensor.data_ptr, Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point,
        Tensor.is_complex, torch.is_floating_point, torch.is_complex, Tensor.__hash__, Tensor.get_device,
    )
)  # fmt: skip
"""Functions of a tensor that read its form, and no elements."""


class DocumentMask(Tensor):
    """A mask bool [B, 1, T, T], true where a token may look at another: at itself and at earlier ones of its document."""

    documents: Tensor
    """A number for each token, int64 [B, T], which the tokens of a document share, and neighbouring documents do not."""
    lengths: list[list[int]] | None
    """The number of tokens of each document, by sample; None where the host does not know it."""

    @classmethod
    def of(cls, documents: Tensor, lengths: list[list[int]] | None) -> DocumentMask:
        """Return the mask of these documents."""
        length = documents.shape[1]
        one_each = documents.bool()[:, None, :, None]
        mask = one_each.expand(-1, 1, length, length).as_subclass(cls)
        mask.documents, mask.lengths = documents, lengths
        return mask

    def dense(self) -> Tensor:
        """Return all elements of the mask, bool [B, 1, T, T]."""
        return dense_mask(self.documents)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if func is F.scaled_dot_product_attention:
                return _attention(AttentionCall(*args, **kwargs))
            if func in _OF_FORM:
                return func(*args, **kwargs)
            args, kwargs = tree_map_only(DocumentMask, DocumentMask.dense, (args, kwargs))
            return func(*args, **kwargs)


def _attention(call: AttentionCall) -> Tensor:
    """Return `scaled_dot_product_attention` of packed documents; query, key and value are [B, A, T, D]."""
    query, key, value, mask, dropout_p, is_causal = call[:6]
    assert isinstance(mask, DocumentMask), "it is called for such masks"
    sizes = (mask.shape[0], mask.shape[3])
    # A trace that follows slices of sequences gives a part of the tokens, and a run gives all.
    alike = all(x.dim() == 4 and (x.is_meta or (x.shape[0], x.shape[2]) == sizes) for x in (query, key))
    if not alike or dropout_p or is_causal:
        return call._replace(attn_mask=mask if query.is_meta else mask.dense()).run(F.scaled_dot_product_attention)
    if not query.is_meta:
        return output_of(query, key, value, call.spec())
    # A trace computes all documents at once, with the copies that splitting and joining them make.
    query, key, value = (x.split(x.shape[2], 2)[0] for x in (query, key, value))
    output = call._replace(query=query, key=key, value=value).run(F.scaled_dot_product_attention)
    return output.transpose(1, 2).clone().transpose(1, 2)
