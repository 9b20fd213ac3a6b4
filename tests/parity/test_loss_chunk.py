"""Logits in chunks of tokens: every layout computes what one device computes with whole logits, and sends what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.layout import Layout
from tests.covering import daily
from tests.laboratory import clipped, combinations, make_run, prove, source_of
from tests.models import Tokens
from tests.pool import pool

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


@pytest.mark.parametrize(("layout", "model"), daily([*combinations(LAYOUTS, MODELS), *combinations(CUTS, MODELS[:4])]))
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


def weighed(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Smoothed labels, a weight for each token, and the squared log-sum-exp (z-loss, arXiv:2204.02311)."""
    logits, labels = outputs.transpose(1, 2), batch["labels"]
    each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    is_counted = labels != -100
    weights = 1.0 + 0.1 * labels
    squares = torch.logsumexp(outputs, -1) ** 2
    return ((each + 1e-2 * squares) * weights * is_counted).sum(), is_counted.sum()


def of_probabilities(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    shares = outputs.softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None])
    return -shares.sum(), torch.tensor(batch["labels"].numel())


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=1 loss_chunk=5", "capped"),
        ("dp=2 zero=3 loss_chunk=5 microbatch=2", "capped"),
        ("pp=2 loss_chunk=7 microbatch=4", "plain"),
    ],
)
def test_a_loss_of_ones_own_is_computed_from_chunks(layout: str, model: str) -> None:
    prove(layout, model, clipped(loss="tests.parity.test_loss_chunk:weighed"))


def test_a_loss_that_needs_whole_logits_is_refused_by_name() -> None:
    job = clipped(loss="tests.parity.test_loss_chunk:of_probabilities")
    batch = next(batches(Tokens(), job))
    with pytest.raises(LayoutError, match="_softmax needs them at once; a layout without loss_chunk works"):
        make_run(0, 1, "plain", "dp=1 loss_chunk=5", job).step(batch)


def held_out(rank: int, world: int, model: str, layout: str) -> tuple[float, Tensor]:
    """The loss of a forward without gradients, and the logits of some samples, after a step."""
    run = make_run(rank, world, model, layout, clipped())
    batch = next(batches(Tokens(), clipped()))
    run.step(batch)
    outputs = run.outputs({"input_ids": Tokens().input_ids[:2], "labels": Tokens().labels[:2]})
    return run.evaluate(batch)["loss"], getattr(outputs, "logits", outputs)


@pytest.mark.parametrize("layout", ["dp=2 zero=3 loss_chunk=5", "tp=2 loss_chunk=5", "pp=2 loss_chunk=5"])
def test_held_out_losses_and_outputs_are_those_of_one_device(layout: str) -> None:
    source_of("llama_even", Layout.parse(layout), clipped())  # which the ranks inherit
    loss, logits = held_out(0, 1, "llama_even", "dp=1")
    for ours, whole in pool(2).run(held_out, "llama_even", layout):
        assert ours == pytest.approx(loss, rel=1e-9)
        assert torch.allclose(whole, logits, rtol=1e-9, atol=1e-9)
