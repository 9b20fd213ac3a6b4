"""Packed documents in models of transformers: attention document by document, with a mask that holds no T x T elements.

Transformers inspects the positions of every forward to see whether documents are packed, and the host waits for the
answer. Where transformers' code itself makes one row of positions for all samples, it counts from 0 and looks at no
sample, so the answer of the first forward holds for all of that shape. With a batch of one sample such a row is
recognised by its origin: it is a view of a tensor without a dimension of samples, and positions of a batch are not.

Where documents are packed, transformers composes a function of two positions that says which tokens see each other, and
makes its mask from that. The mask of "causal, within a document" and nothing else becomes a `DocumentMask`. It is
recognised by the functions that transformers composed; a window as long as the sample hides nothing. Anything else that
a model adds, such as a shorter window or pairs beyond it, gives another function, and the dense mask.

Legend: B samples, T tokens.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.attention.document_mask import DocumentMask
from samestep.building.attention.fused import lengths_of
from samestep.errors import ModelError

_MODULE, _ATTENTION = "transformers.masking_utils", "transformers.integrations.sdpa_attention"
_FOUND, _JOINED = "find_packed_sequence_indices", "packed_sequence_compatibility_function"
_MASKS, _SHARED = "ALL_MASK_ATTENTION_FUNCTIONS", "use_gqa_in_sdpa"
_CAUSAL, _WINDOWED = "causal_mask_function", "sliding_window_causal_mask_function"
_UNPACKED: weakref.WeakKeyDictionary[nn.Module, set[torch.Size]] = weakref.WeakKeyDictionary()
"""The shapes of one row of positions for all samples in which no documents are packed, by model."""

_MIXES: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Whether a model mixes the tokens of packed documents, as its traced forward has shown."""


@contextmanager
def packed_documents(model: nn.Module, *, are_given: bool = True) -> Iterator[_FindsDocuments | None]:
    """Attend document by document where `model` packs them, while the body of the `with` statement runs.

    Whether documents are packed is asked once for each shape of positions that a model of transformers makes itself. A graph of a
    compiler, which cannot ask, packs none unless positions `are_given`, and leaves the question outside if they are.
    """
    masking, attention = sys.modules.get(_MODULE), sys.modules.get(_ATTENTION)
    named = ((masking, (_FOUND, _JOINED, _MASKS, _CAUSAL, _WINDOWED)), (attention, (_SHARED,)))
    if not all(hasattr(module, name) for module, names in named for name in names):
        yield None
        return
    shared = getattr(attention, _SHARED)
    if not isinstance(shared, _Sharing):  # never undone, since a recomputed block asks after the model's forward
        setattr(attention, _SHARED, _Sharing(shared))
    found, joined, windowed = (getattr(masking, name) for name in (_FOUND, _JOINED, _WINDOWED))
    masks = getattr(masking, _MASKS)._global_mapping
    dense, finder = masks["sdpa"], None
    try:
        if type(model).__module__.startswith("transformers.models."):
            unpacked = _UNPACKED.setdefault(model, set())
            setattr(masking, _FOUND, finder := _FindsDocuments(found, unpacked, are_given))
        setattr(masking, _JOINED, functools.partial(_mask_within_documents, joined, getattr(masking, _CAUSAL)))
        setattr(masking, _WINDOWED, lambda window: _Window(windowed(window), window))
        masks["sdpa"] = functools.partial(_mask, dense)
        yield finder
    finally:
        masks["sdpa"] = dense
        setattr(masking, _WINDOWED, windowed)
        setattr(masking, _JOINED, joined)
        setattr(masking, _FOUND, found)


def check_documents(model: nn.Module, given: Mapping[str, Any], finder: _FindsDocuments | None) -> None:
    """Refuse packed documents in a model of transformers that mixes them, as its traced forward has shown.

    Raises:
        ModelError: it has recurrent layers, as its class says, or nothing has asked the positions where documents begin.
    """
    positions = given.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or given.get("attention_mask") is not None:
        return
    if positions.is_meta:
        stateful = [part for part in model.modules() if getattr(part, "_is_stateful", False)]
        _MIXES[model] = bool(stateful) or (finder is not None and not finder.traced)
    elif _MIXES.get(model) and bool((positions.diff(dim=-1) != 1).any()):
        raise ModelError(
            "packed-documents",
            f"position_ids begin again within a sample, and do not separate packed documents in {type(model).__name__}, which makes no "
            "attention mask of them. Use one document in each sample, without position_ids",
        )


@dataclass(frozen=True, eq=False)
class _FindsDocuments:
    """Transformers' function that returns the document of each token, None where no documents are packed.

    A graph is made again where a field that it reads has changed, so it reads none that grows.
    """

    asked: Callable[[Tensor], Tensor | None]
    unpacked: set[torch.Size]
    are_given: bool
    traced: list[torch.Size] = field(default_factory=list)
    """The shapes of positions of which a traced forward has asked."""

    def __call__(self, positions: Tensor) -> Tensor | None:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self.asked)(positions) if self.are_given else None
        # Whether transformers built one row for any number of samples [samples, tokens]; traces see the same each time.
        is_one_row = False
        if positions.dim() == 2 and not positions.is_meta:
            base = positions._base
            is_one_row = positions.stride(0) == 0 if len(positions) > 1 else base is not None and base.dim() == 1
        if is_one_row and positions.shape in self.unpacked:
            return None
        documents = self.asked(positions)
        if positions.is_meta:
            self.traced.append(positions.shape)
        if is_one_row and documents is None:
            self.unpacked.add(positions.shape)
        return documents


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
    tensor: Tensor | None = dense(**asked)
    return tensor


_MORE = ("q_offset", "kv_offset", "use_vmap")
"""Further arguments of a mask; 0, False or None where it stands for documents and nothing else."""
