"""Attention around a ring is that of one device: outputs and gradients, with masks, biases, documents, and heads that share keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from samestep.building.attention import AttentionCall, AttentionSpec, DocumentMask, formula
from samestep.building.attention.carriers import output_of
from samestep.program.ring_visits import SlicePlacement
from samestep.runtime.axes.context.ring_attention import Ring
from tests.pool import pool

BATCH, HEADS, WIDTH = 2, 4, 6
KINDS = ("full", "causal", "window", "padding", "bias", "bias of heads", "documents", "blind rows")


def mask_of(kind: str, length: int) -> Tensor | None:
    """A mask of the whole sequence; a bias takes a gradient."""
    tokens = torch.arange(length)
    distance = tokens[:, None] - tokens[None, :]
    if kind in ("full", "causal"):
        return None
    if kind == "window":
        return ((distance >= 0) & (distance < 3)).expand(BATCH, 1, -1, -1)
    if kind == "padding":
        return (tokens[None, :] < torch.tensor([[length], [length - 3]]))[:, None, None, :]
    if kind == "documents":
        documents = (tokens[None, :] > torch.tensor([[2], [length // 2]])).long()
        return DocumentMask.of(documents, None)
    if kind == "blind rows":
        return (distance >= 0) & (tokens[:, None] > 1)
    shape = (length, length) if kind == "bias" else (1, HEADS, 1, length)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()


def numbers(
    kind: str, length: int, kv_heads: int, wide: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, AttentionCall]:
    """Queries, keys and values of whole sequences, the gradient of the output, and the call."""
    draw = torch.Generator().manual_seed(3)
    shapes = [(HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, wide), (HEADS, wide)]
    *given, gradient = (
        torch.randn(BATCH, heads, length, size, dtype=torch.float64, generator=draw).to(dtype) for heads, size in shapes
    )
    for one in given:
        one.requires_grad_()
    call = AttentionCall(
        *given, mask_of(kind, length), is_causal=kind == "causal", scale=0.3, enable_gqa=kv_heads < HEADS
    )
    return given, gradient, call


def whole(*case: Any) -> list[Tensor]:
    """The output of one device, and the gradients of queries, keys, values and mask."""
    given, gradient, call = numbers(*case)
    mask = call.attn_mask.dense() if isinstance(call.attn_mask, DocumentMask) else call.attn_mask
    output = call._replace(attn_mask=mask).run(F.scaled_dot_product_attention)
    output.backward(gradient)
    return [
        output.detach(),
        *(one.grad for one in given),
        *([mask.grad] if mask is not None and mask.requires_grad else []),
    ]


def around(rank: int, world: int, may_split: bool, *case: Any) -> list[Tensor]:
    """This rank's part of the same, of the tokens that it holds; the part of a mask's gradient is a summand."""
    given, gradient, call = numbers(*case)
    placement = SlicePlacement.of(given[0].shape[2], world, may_split=may_split)
    mine = torch.cat([torch.arange(run.start, run.stop) for run in placement.runs(rank)])
    parts = [one.detach()[:, :, mine].requires_grad_() for one in given]
    group = dist.group.WORLD
    assert group is not None
    call = call._replace(query=parts[0], key=parts[1], value=parts[2])
    output = call.attend(across=Ring(placement, rank, group, "block.key_value"))
    output.backward(gradient[:, :, mine])
    found = [output.detach(), *(part.grad for part in parts)]
    if call.attn_mask is not None and call.attn_mask.requires_grad:
        found.append(call.attn_mask.grad)
    return found


def joined(parts: list[list[Tensor]], length: int, may_split: bool) -> list[Tensor]:
    """What the ranks have, as one device has it."""
    placement = SlicePlacement.of(length, len(parts), may_split=may_split)
    order = torch.tensor([token for rank in range(len(parts)) for run in placement.runs(rank) for token in run])
    tokens = [torch.cat([part[index] for part in parts], 2)[:, :, order.argsort()] for index in range(4)]
    return [*tokens, *([sum(part[4] for part in parts)] if len(parts[0]) > 4 else [])]


@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_is_the_attention_of_one_device(kind: str, may_split: bool) -> None:
    for kv_heads, wide in ((HEADS, WIDTH), (2, WIDTH), (1, 4)):
        case = kind, 12, kv_heads, wide, torch.float64
        found = joined(pool(3).run(around, may_split, *case), 12, may_split)
        for ours, theirs in zip(found, whole(*case), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_sums_of_half_precision_are_in_float32(kind: str) -> None:
    case = kind, 12, 2, WIDTH
    found = joined(pool(3).run(around, True, *case, torch.bfloat16), 12, True)
    for ours, theirs in zip(found, whole(*case, torch.float64), strict=True):
        assert ours.dtype is torch.bfloat16
        assert (ours.double() - theirs).abs().max() < 0.02 * theirs.abs().max()


def in_blocks(rank: int, world: int, *case: Any) -> list[Tensor]:
    before = formula.BLOCK_ELEMENTS, formula.LEAST_QUERIES
    formula.BLOCK_ELEMENTS, formula.LEAST_QUERIES = 3 * BATCH * HEADS * 4, 1
    try:
        return around(rank, world, False, *case)
    finally:
        formula.BLOCK_ELEMENTS, formula.LEAST_QUERIES = before


def test_scores_of_some_queries_at_a_time_are_those_of_all() -> None:
    case = "bias", 12, 2, WIDTH, torch.float64
    for ours, theirs in zip(joined(pool(3).run(in_blocks, *case), 12, False), whole(*case), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


FORMS = ("scaled", "of all", "documents")


def form_of(form: str, length: int) -> AttentionSpec:
    """A form of attention without a mask."""
    tokens = torch.arange(length)
    documents = (tokens[None, :] > torch.tensor([[2], [length // 2]])).long()
    return AttentionSpec(causal=form != "of all", documents=documents if form == "documents" else None, scale=0.4)


def of_form(rank: int, world: int, form: str, may_split: bool, dtype: torch.dtype) -> list[Tensor]:
    """This rank's output, and the gradients of its queries, keys and values."""
    given, gradient, _ = numbers("full", 12, 2, WIDTH, dtype)
    spec = form_of(form, 12)
    placement = SlicePlacement.of(12, world, may_split=may_split)
    mine = (
        torch.cat([torch.arange(run.start, run.stop) for run in placement.runs(rank)])
        if world > 1
        else torch.arange(12)
    )
    parts = [one.detach()[:, :, mine].requires_grad_() for one in given]
    group = dist.group.WORLD
    ring = None if group is None or world == 1 else Ring(placement, rank, group, "block.key_value")
    output = output_of(*parts, spec, ring)
    output.backward(gradient[:, :, mine])
    return [output.detach(), *(part.grad for part in parts)]


@pytest.mark.parametrize("form", FORMS)
def test_documents_around_a_ring_are_those_of_one_device(form: str) -> None:
    whole = of_form(0, 1, form, False, torch.float64)
    for may_split in (False, True):
        parts = pool(3).run(of_form, form, may_split, torch.float64)
        for ours, theirs in zip(joined(parts, 12, may_split), whole, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)
