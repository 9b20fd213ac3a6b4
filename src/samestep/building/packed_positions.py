"""Packed documents in models of transformers: attention document by document, with a mask that holds no T x T elements.

Transformers inspects the positions of every forward to see whether documents are packed, and the host waits for the
answer. Where transformers' code itself makes one row of positions for all samples, it counts from 0 and looks at no
sample, so the answer of the first forward holds for all of that shape. With a batch of one sample such a row is
recognised by its origin: it is a view of a tensor without a dimension of samples, and positions of a batch are not.

Where documents are packed, transformers composes a function of two positions that says which tokens see each other, and
makes its mask from that. The mask of "causal, within a document" and nothing else becomes a `DocumentMask`. It is
recognised by the functions that transformers composed; a window as long as the sample hides nothing. Anything else that
a model adds, such as a shorter window or pairs beyond it, gives another function, and the dense mask.

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

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.torch_seams import DisableTorchFunctionSubclass
from samestep.trees import tree_map_only


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
        return self.rows(0, self.documents.shape[1], self.documents.shape[1])

    def rows(self, start: int, stop: int, num_keys: int) -> Tensor:
        """Return which of the first `num_keys` tokens those from `start` to before `stop` see: bool [B, 1, stop -
        start, num_keys]."""
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
        with DisableTorchFunctionSubclass():
            if func is F.scaled_dot_product_attention:
                return _attention(*args, **kwargs)
            if func in _OF_FORM:
                return func(*args, **kwargs)
            args, kwargs = tree_map_only(DocumentMask, DocumentMask.dense, (args, kwargs))
            return func(*args, **kwargs)


def lengths_of(documents: Tensor) -> list[list[int]]:
    """Return the number of tokens of each document, by sample; the host waits for `documents`, int64 [B, T]."""
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
    """Return the outputs of causal attentions within each document, the heads of a token adjacent in memory."""
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
"""Functions of a mask that read its form and no elements."""


_MODULE, _ATTENTION = "transformers.masking_utils", "transformers.integrations.sdpa_attention"
_FOUND, _JOINED = "find_packed_sequence_indices", "packed_sequence_compatibility_function"
_MASKS, _SHARED = "ALL_MASK_ATTENTION_FUNCTIONS", "use_gqa_in_sdpa"
_CAUSAL, _WINDOWED = "causal_mask_function", "sliding_window_causal_mask_function"
_UNPACKED: weakref.WeakKeyDictionary[nn.Module, set[torch.Size]] = weakref.WeakKeyDictionary()
"""The shapes of one row of positions for all samples in which no documents are packed, by model."""


@contextmanager
def packed_documents(model: nn.Module) -> Iterator[None]:
    """Attend document by document where `model` packs them, while the body of the `with` statement runs.

    Whether documents are packed is asked once for each shape of positions that a model of transformers makes itself.
    """
    masking, attention = sys.modules.get(_MODULE), sys.modules.get(_ATTENTION)
    named = ((masking, (_FOUND, _JOINED, _MASKS, _CAUSAL, _WINDOWED)), (attention, (_SHARED,)))
    if not all(hasattr(module, name) for module, names in named for name in names):
        yield
        return
    shared = getattr(attention, _SHARED)
    if not isinstance(shared, _Sharing):  # never undone, since a recomputed block asks after the model's forward
        setattr(attention, _SHARED, _Sharing(shared))
    found, joined, windowed = (getattr(masking, name) for name in (_FOUND, _JOINED, _WINDOWED))
    masks = getattr(masking, _MASKS)._global_mapping
    dense = masks["sdpa"]
    try:
        if type(model).__module__.startswith("transformers.models."):
            setattr(masking, _FOUND, functools.partial(_find_documents, found, _UNPACKED.setdefault(model, set())))
        setattr(masking, _JOINED, functools.partial(_mask_within_documents, joined, getattr(masking, _CAUSAL)))
        setattr(masking, _WINDOWED, lambda window: _Window(windowed(window), window))
        masks["sdpa"] = functools.partial(_mask, dense)
        yield
    finally:
        masks["sdpa"] = dense
        setattr(masking, _WINDOWED, windowed)
        setattr(masking, _JOINED, joined)
        setattr(masking, _FOUND, found)


def _find_documents(
    asked: Callable[[Tensor], Tensor | None], unpacked: set[torch.Size], positions: Tensor
) -> Tensor | None:
    """Return the document of each token, as transformers' function does: None where no documents are packed."""
    is_one_row = (
        positions.dim() == 2 and not positions.is_meta and _is_for_all(positions)
    )  # traces see the same each time
    if is_one_row and positions.shape in unpacked:
        return None
    found = asked(positions)
    if is_one_row and found is None:
        unpacked.add(positions.shape)
    return found


def _is_for_all(positions: Tensor) -> bool:
    """Return whether positions [samples, tokens] are one row that transformers built for any number of samples."""
    if len(positions) > 1:
        return positions.stride(0) == 0
    return positions._base is not None and positions._base.dim() == 1


@dataclass(frozen=True)
class _Sharing:
    """Transformers' test whether queries share unrepeated heads of keys and values; a `DocumentMask` counts as no
    mask."""

    asked: Callable[..., bool]

    def __call__(self, mask: Tensor | None, *of: Tensor) -> bool:
        return self.asked(None if isinstance(mask, DocumentMask) else mask, *of)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """One of transformers' functions of two positions, which says whether they see each other."""

    pairs: Callable[..., Tensor]

    def __call__(self, *positions: Any) -> Tensor:
        return self.pairs(*positions)


@dataclass(frozen=True, eq=False)
class _Window(_Pairs):
    """The function that says "causal, and not as far away as the window"."""

    window: int


@dataclass(frozen=True, eq=False)
class _CausalWithin(_Pairs):
    """The function that says "causal, within a document", and the documents."""

    documents: Tensor


def _mask_within_documents(
    joined: Callable[..., Any], causal: Any, function: Any, positions: Tensor, documents: Tensor
) -> Any:
    """Return the function that transformers composes, with the documents where `function` says "causal" and nothing
    else."""
    pairs = joined(function, positions, documents)
    sees_all = isinstance(function, _Window) and function.window >= documents.shape[1]
    return _CausalWithin(pairs, documents) if function is causal or sees_all else pairs


def _mask(dense: Callable[..., Any], **asked: Any) -> Tensor | None:
    """Return the mask that a model of transformers asks for: of documents that it packs without its elements."""
    function = asked.get("mask_function")
    if isinstance(function, _CausalWithin) and asked.get("attention_mask") is None and not any(map(asked.get, _MORE)):
        documents = function.documents
        return DocumentMask.of(documents, None if documents.is_meta else lengths_of(documents))
    found: Tensor | None = dense(**asked)
    return found


_MORE = ("q_offset", "kv_offset", "use_vmap")
"""Further arguments of a mask; 0, False or None where it stands for documents and nothing else."""
