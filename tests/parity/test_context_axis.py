"""Slices of sequences, alone and with every other axis, compute what one device computes, and send what they say.

float64, 1e-9; perturbed norms and biases, uneven counts of tokens, clipping. Each case holds the ledger too. The rows of
known silent errors: positions that begin anew in every slice, labels shifted within a slice, a mask of the slice instead
of the document, gradients that leave the other slices out, a loss that is a mean of means of slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.building.model import call_model
from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.memory import live_bytes
from tests.laboratory import clipped, job_of, make_run, program_traced_in, prove
from tests.models import VOCABULARY, Tokens
from tests.parity.axes import MODELS as MODELS_OF_ALL
from tests.pool import pool


def held_out(rank: int, world: int, model: str, layout: str) -> tuple[float, Tensor]:
    """The loss of a forward without gradients, and logits of an odd number of tokens."""
    run = make_run(rank, world, model, layout, clipped())
    batch = next(batches(Tokens(), clipped()))
    loss = run.evaluate(batch)["loss"]
    outputs = run.outputs({"input_ids": Tokens().input_ids[:2, :7], "labels": Tokens().labels[:2, :7]})
    return loss, getattr(outputs, "logits", outputs)


@pytest.mark.parametrize("model", ["llama", "fused recurrence"])
def test_forwards_without_gradients_agree(model: str) -> None:
    loss, logits = held_out(0, 1, model, "dp=1")
    for ours, whole in pool(2).run(held_out, model, "cp=2"):
        assert ours == pytest.approx(loss, rel=1e-9)
        assert torch.allclose(whole, logits, rtol=1e-9, atol=1e-9)


def saved_bytes(rank: int, world: int, layout: str) -> tuple[int, int]:
    """Bytes that the autograd of one forward keeps of blocks and head, and what the program says."""
    job = job_of("float64", 1, train={"global_batch": 4})
    run = make_run(rank, world, "attentive", layout, job)
    batch = next(batches(Tokens(), job))
    run.prepare(batch.samples([0]))
    weights = {param.untyped_storage()._cdata for param in run.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and tensor.is_floating_point():
            kept[storage._cdata] = storage.nbytes()
        return tensor

    samples = batch.samples(range(4))
    slicing = run.assembly.parallel.slicing
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), slicing.of(samples):
        outputs = call_model(run.model, samples)
    said = sum(live_bytes.saved_bytes(run.program.step, layer)[1] for layer in run.program.step.model.layers)
    del outputs
    return sum(kept.values()), said


def test_a_slice_keeps_its_part_of_the_activations() -> None:
    whole, _ = saved_bytes(0, 1, "dp=1")
    for ours, ours_said in pool(2).run(saved_bytes, "cp=2"):
        assert ours / whole == pytest.approx(0.5, abs=0.03)
        assert ours == pytest.approx(ours_said, rel=0.01)


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        (
            "plain",
            "cp=2",
            "cp=2 slices sequences: blocks.0 mixes tokens by cumsum, and only attention is exchanged. Use cp=1",
        ),
        (
            "gpt2",
            "cp=4 exchange=heads",
            "cp=4 does not divide the 12 tokens and 2 heads into slices of 2 tokens or more. Use cp=2, or exchange=ring",
        ),
        (
            "gpt2",
            "tp=2 cp=2 exchange=heads",
            "does not divide the 12 tokens and 1 heads that tp=2 leaves a rank .*. Use cp=1, or exchange=ring",
        ),
        ("gpt2", "cp=5", "cp=5 does not divide the 12 tokens into slices of 2 tokens or more. Use cp=4 or 6"),
        ("squared", "tp=2 cp=2 sequence_parallel", "attn computes all tokens on every rank of cp=2. Use tp=2 alone"),
    ],
)
def test_what_cannot_be_sliced_is_refused(model: str, layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        program_traced_in(layout, model)


class Limited(torch.autograd.Function):
    """Its backward limits each element, or where asked the norm of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_all: bool) -> Tensor:
        ctx.of_all = of_all
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / (1 + gradient.norm()) if ctx.of_all else gradient.clamp(-1e-3, 1e-3), None


class Before(nn.Module):
    """Code before two blocks, and between them."""

    def __init__(self, before: Callable[[Tensor], Tensor], between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.before, self.between = before, between

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.before(self.embed(input_ids))
        for block in self.blocks:
            x = self.between(x, block(x))
        return self.head(x)


def written(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1.0
    x.add_(y)
    return x


def kept(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1.0
    x += y
    return x


BEFORE = {
    "a limit of each element": lambda: Before(lambda x: Limited.apply(x, False), kept),
    "a limit of all": lambda: Before(lambda x: Limited.apply(x, True), kept),
    "written in place": lambda: Before(lambda x: x, written),
}
MODELS_OF_ALL |= BEFORE


def test_code_before_the_blocks_that_keeps_tokens_apart_is_equal() -> None:
    prove("cp=2", "a limit of each element")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("a limit of all", "the model itself by the gradient of Limited mixes tokens"),
        ("written in place", "a full tensor is read after a write in place into slices of it"),
    ],
)
def test_code_beside_the_blocks_that_needs_whole_sequences_is_refused(model: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        program_traced_in("cp=2", model)
