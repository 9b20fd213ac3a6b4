"""Logits in chunks of tokens: every layout computes what one device computes with whole logits, and sends what it says."""

from __future__ import annotations

import pytest

from tests.laboratory import combinations, prove

MODELS = ["llama_even", "llama_tied", "gpt2_even", "attentive", "plain"]
LAYOUTS = [
    "dp=1 loss_chunk=5",
    "dp=2 loss_chunk=7 microbatch=2",
    "dp=2 zero=1 loss_chunk=5 recompute=full",
    "dp=2 zero=2 loss_chunk=5 microbatch=3",
    "dp=2 zero=3 loss_chunk=100",
]
CUTS = [
    "tp=2 loss_chunk=5",
    "tp=2 loss_chunk=5 microbatch=3 recompute=selective",
    "dp=2 tp=2 zero=3 loss_chunk=9 microbatch=2",
]


@pytest.mark.parametrize(("layout", "model"), combinations(LAYOUTS, MODELS) + combinations(CUTS, MODELS[:4]))
def test_chunks_compute_what_one_device_computes(layout: str, model: str) -> None:
    prove(layout, model)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("tp=2 sequence_parallel loss_chunk=5", "deep_llama"),
        ("tp=2 loss_chunk=5", "llama"),  # a vocabulary that stays whole
        ("pp=2 loss_chunk=5 microbatch=2", "deep_llama"),
        ("pp=2 loss_chunk=5 microbatch=2 schedule=zero-bubble", "deep_tied"),
        ("pp=2 loss_chunk=5 microbatch=2 schedule=interleaved virtual_stages=2", "deep_gpt2"),
        ("dp=2 pp=2 zero=3 loss_chunk=5 microbatch=2", "deep_llama"),
        ("cp=2 loss_chunk=5", "deep_llama"),
        ("tp=2 pp=2 loss_chunk=3 microbatch=2", "deep_gemma"),
    ],
)
def test_chunks_on_every_axis(layout: str, model: str) -> None:
    prove(layout, model)
