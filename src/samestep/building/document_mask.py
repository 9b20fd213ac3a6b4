"""The mask of packed documents without its T x T elements, and attention that runs document by document.

    tokens          d0 d0 d0 d0 d1 d1 d2 d2 d2
    attention       ■
                    ■ ■              each document is attended alone, by the kernel of causal attention: no pair of
                    ■ ■ ■            tokens of different documents is computed, and no mask is read or kept
                    ■ ■ ■ ■
                            ■
                            ■ ■
                                ■ ...

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
from torch.utils._pytree import tree_map_only


class DocumentMask(Tensor):
    """A mask bool [B, 1, T, T], true where a token may look at another: at itself and at earlier ones of its document."""

    documents: Tensor
    """A number for each token, int64 [B, T], which the tokens of a document share, and neighbouring documents do not."""
    lengths: list[list[int]] | None
    """The tokens of each document, by sample; None where their number is not known on the host."""

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
        return self.rows(0, self.documents.shape[1], self.documents.shape[1])

    def rows(self, start: int, stop: int, num_keys: int) -> Tensor:
        """Return what the tokens from `start` to before `stop` see of the first `num_keys`: bool [B, 1, stop - start, num_keys]."""
        documents = self.documents
        tokens = torch.arange(documents.shape[1], device=documents.device)
        is_past = tokens[start:stop, None] >= tokens[None, :num_keys]
        return (documents[:, None, start:stop, None] == documents[:, None, None, :num_keys]) & is_past

    def fits(self, query: Tensor, key: Tensor, dropout_p: float, *, is_causal: bool) -> bool:
        """Return whether an attention can run document by document: of all tokens with all, by a kernel that drops nothing.

        A trace that follows slices of sequences gives a part of the tokens, and a run gives all.
        """
        sizes = (self.shape[0], self.shape[3])
        alike = all(one.dim() == 4 and (one.is_meta or (one.shape[0], one.shape[2]) == sizes) for one in (query, key))
        return alike and dropout_p == 0.0 and not is_causal

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.scaled_dot_product_attention:
                return _attention(*args, **kwargs)
            if func in _OF_FORM:
                return func(*args, **kwargs)
            args, kwargs = tree_map_only(DocumentMask, DocumentMask.dense, (args, kwargs))
            return func(*args, **kwargs)


def lengths_of(documents: Tensor) -> list[list[int]]:
    """Return the tokens of each document, by sample; the host waits for `documents`, int64 [B, T]."""
    return [row.unique_consecutive(return_counts=True)[1].tolist() for row in documents.cpu()]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `scaled_dot_product_attention` of packed documents; query, key and value are [B, A, T, D]."""
    mask: DocumentMask = attn_mask
    fits = mask.fits(query, key, dropout_p, is_causal=is_causal)
    if fits and mask.lengths is not None:
        return attend_each(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    given: Tensor = mask if query.is_meta else mask.dense()
    how = (given, dropout_p, is_causal)
    if not (fits and query.is_meta):
        return F.scaled_dot_product_attention(query, key, value, *how, scale=scale, enable_gqa=enable_gqa)
    # A trace computes all documents at once, with the copies that splitting and joining them make.
    query, key, value = (one.split(one.shape[2], 2)[0] for one in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, *how, scale=scale, enable_gqa=enable_gqa)
    return output.transpose(1, 2).clone().transpose(1, 2)


def attend_each(query: Tensor, key: Tensor, value: Tensor, mask: DocumentMask, **how: Any) -> Tensor:
    """Return the outputs of causal attentions within each document, the heads of a token side by side in memory."""
    outputs = []
    for *sample, lengths in zip(query.split(1), key.split(1), value.split(1), mask.lengths or (), strict=True):
        for q, k, v in zip(*(one.split(lengths, 2) for one in sample), strict=True):
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, **how)
            outputs.append(output.squeeze(0).transpose(0, 1))
    joined = torch.cat(outputs).unflatten(0, (query.shape[0], -1))
    return joined.transpose(1, 2)


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
"""Functions that read no elements."""
