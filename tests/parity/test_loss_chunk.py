"""Logits in chunks of tokens: every layout computes what one device computes with whole logits, and sends what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep import losses
from samestep.building.chunked_cross_entropy import LOGITS, Chunking, Elementwise, Head, row_losses
from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.layout import Layout
from tests.laboratory import clipped, make_run, prove, source_of
from tests.models import Tokens
from tests.pool import pool


def weighed(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Smoothed labels, a weight for each token, the squared log-sum-exp (z-loss, arXiv:2204.02311), and the entropy."""
    logits, labels = outputs.transpose(1, 2), batch["labels"]
    each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    is_counted = labels != -100
    weights = 1.0 + 0.1 * labels
    squares = torch.logsumexp(outputs, -1) ** 2
    bonus = losses.token_entropy(outputs)
    return ((each + 1e-2 * squares - 0.1 * bonus) * weights * is_counted).sum(), is_counted.sum()


def of_policy(outputs: Any, batch: Any) -> tuple[Tensor, int, Any]:
    """A ratio of probabilities of labels, clipped, with the entropy as a value (PPO)."""
    logits = getattr(outputs, "logits", outputs).float() / 1.3
    log_probs, entropy = losses.token_log_probs(logits, batch["labels"]), losses.token_entropy(logits)
    ratio = (log_probs - log_probs.detach() * 1.01).exp()
    gain = torch.minimum(ratio * batch["labels"], ratio.clamp(0.9, 1.1) * batch["labels"])
    return -gain.sum() - 0.01 * entropy.sum(), gain.numel(), {"entropy": (entropy.detach().sum(), entropy.numel())}


def of_probabilities(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    shares = outputs.softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None])
    return -shares.sum(), torch.tensor(batch["labels"].numel())


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=2 zero=3 loss_chunk=5 microbatch=2", "capped"),
        ("pp=2 loss_chunk=7 microbatch=4", "plain"),
        ("tp=2 loss_chunk=5", "llama_even"),
    ],
)
def test_a_loss_of_ones_own_is_computed_from_chunks(layout: str, model: str) -> None:
    loss = f"tests.parity.test_loss_chunk:{'weighed' if model in ('capped', 'plain') else 'of_policy'}"
    prove(layout, model, clipped(loss=loss))


def test_log_probabilities_and_entropy_of_a_cut_head_are_those_of_whole_logits() -> None:
    """Numbers of each row and all their gradients, in chunks and over ranks, against torch's own on whole logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    weight, labels = torch.randn(8, 5, generator=generator, dtype=torch.float64), torch.arange(7)
    factors = torch.randn(3, 7, generator=generator, dtype=torch.float64)

    def gradients(rows: Any) -> list[Tensor]:
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        found = rows(*leaves)
        return [*found, *torch.autograd.grad((factors * torch.stack(found)).sum(), leaves)]

    def whole(h: Tensor, w: Tensor) -> list[Tensor]:
        logits = (h @ w.T).tanh()
        return [
            -losses.token_log_probs(logits, labels),
            logits.logsumexp(-1),
            logits.logsumexp(-1) - losses.token_entropy(logits),
        ]

    head = Head(Chunking(3), (Elementwise(torch.tanh, (LOGITS,), {}, writes=False),))
    wanted = gradients(whole)
    for own, other in zip(
        gradients(lambda h, w: row_losses(head, h, w, None, (), labels, has_means=True)), wanted, strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_a_loss_that_needs_whole_logits_is_refused_by_name() -> None:
    job = clipped(loss="tests.parity.test_loss_chunk:of_probabilities")
    batch = next(batches(Tokens(), job))
    with pytest.raises(LayoutError, match=r"_softmax needs them at once. Use a layout without loss_chunk"):
        make_run(0, 1, "plain", "dp=1 loss_chunk=5", job).step(batch)


def held_out(rank: int, world: int, model: str, layout: str) -> tuple[float, Tensor]:
    """The loss of a forward without gradients, and the logits of some samples, after a step."""
    run = make_run(rank, world, model, layout, clipped())
    batch = next(batches(Tokens(), clipped()))
    run.step(batch)
    outputs = run.outputs({"input_ids": Tokens().input_ids[:2], "labels": Tokens().labels[:2]})
    return run.evaluate(batch)["loss"], getattr(outputs, "logits", outputs)


@pytest.mark.parametrize("layout", ["tp=2 loss_chunk=5", "pp=2 loss_chunk=5"])
def test_held_out_losses_and_outputs_are_those_of_one_device(layout: str) -> None:
    source_of("llama_even", Layout(layout), clipped())  # which the ranks inherit
    loss, logits = held_out(0, 1, "llama_even", "dp=1")
    for ours, whole in pool(2).run(held_out, "llama_even", layout):
        assert ours == pytest.approx(loss, rel=1e-9)
        assert torch.allclose(whole, logits, rtol=1e-9, atol=1e-9)
