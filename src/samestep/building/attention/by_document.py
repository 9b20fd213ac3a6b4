"""Attention within packed documents: document by document, or by variable length.

    tokens          d0 d0 d0 d0 d1 d1 d2 d2 d2
    attention       ■
                    ■ ■              each document is attended alone, by the kernel of causal attention: no pair of
                    ■ ■ ■            tokens of different documents is computed, and no mask is read or kept
                    ■ ■ ■ ■
                            ■
                            ■ ■
                                ■ ...

On GPUs one kernel of variable length (`torch.nn.attention.varlen`) computes all documents, however many there are. Its offsets
come from lengths that the host knows.

Legend: B samples, A heads, T tokens, D features of a head; N documents of all samples, whose tokens stand one after another in q_tad [B T, A, D].
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.building.attention.attention_spec import AttentionSpec
from samestep.building.attention.fused import variable_length


def dense_mask(documents: Tensor, *, causal: bool) -> Tensor:
    """Return which tokens share a document, bool [B, 1, T, T]; of causal attentions, those that see each other."""
    tokens = torch.arange(documents.shape[1], device=documents.device)
    alike = documents[:, None, :, None] == documents[:, None, None, :]
    return alike & (tokens[:, None] >= tokens) if causal else alike


def lengths_of(documents: Tensor) -> list[list[int]]:
    """Return the number of tokens of each document, by sample; the host waits for `documents`, int64 [B, T]."""
    return [row.unique_consecutive(return_counts=True)[1].tolist() for row in documents.cpu()]


def attend_each(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the outputs of attentions within each document, the heads of a token adjacent in memory."""
    assert spec.documents is not None
    lengths_of_all = lengths_of(spec.documents) if spec.lengths is None else spec.lengths
    shared = query.shape[1] != key.shape[1]
    outputs = []
    for *sample, lengths in zip(query.split(1), key.split(1), value.split(1), lengths_of_all, strict=True):
        for q, k, v in zip(*(one.split(lengths, 2) for one in sample), strict=True):
            output = F.scaled_dot_product_attention(q, k, v, is_causal=spec.causal, scale=spec.scale, enable_gqa=shared)
            outputs.append(output.squeeze(0).transpose(0, 1))
    joined = torch.cat(outputs).unflatten(0, (query.shape[0], -1))
    return joined.transpose(1, 2)


def attend_by_length(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exps of attentions within each document, by one kernel for all of them."""
    assert spec.lengths is not None
    lengths = [*itertools.chain.from_iterable(spec.lengths)]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    offsets = (ends.pin_memory() if query.is_cuda else ends).to(query.device, non_blocking=True)
    q_tad, k_tad, v_tad = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    window = -1 if spec.window is None else spec.window - 1
    scale = query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    output, log_sum_exp = variable_length(
        q_tad, k_tad, v_tad, offsets, max(lengths), scale, (window, 0 if spec.causal else window)
    )
    rows = (query.shape[0], query.shape[2])
    return output.unflatten(0, rows).transpose(1, 2), log_sum_exp.unflatten(1, rows).transpose(0, 1)
