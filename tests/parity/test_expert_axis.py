"""Mixtures of experts compute in every layout, with their experts dealt or not, what one device computes.

float64, 1e-9; uneven counts of tokens, clipping, and routes that leave experts of some ranks without rows. Each case holds
the ledger too: an exchange is compared by what all ranks of its group send. The models: Mixtral; Qwen2-MoE, with an expert
that all tokens share; Qwen3-MoE, a layer of which has no experts; a user's own with a plan.
"""

from __future__ import annotations

import pytest

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.examination.examine import Source, examine
from samestep.layout import Layout
from samestep.strategies import program_of
from tests.laboratory import clipped, combinations, job_of, make_run, observe, prove_ledger, reference
from tests.models import MODELS, Tokens
from tests.parity.axes import FAMILIES, nightly
from tests.pool import pool


def test_experts_are_divided_with_the_sequence() -> None:
    """Under tp alone every rank repeats the rows of all tokens."""
    source = Source(MODELS["mixtral"], loss_of(clipped()), optimizer_of(clipped()), "mixtral")
    example = next(batches(Tokens(), clipped())).samples([0])
    spec = examine(source, clipped(), example, Layout("tp=2 sequence_parallel")).spec
    whole, alone, cut = (
        program_of(spec, clipped(), Layout(words)).step.model.layers[1]
        for words in ("dp=1", "tp=2", "tp=2 sequence_parallel")
    )
    (rows,), (halves,) = whole.dispatches, cut.dispatches
    assert alone.dispatches == (rows,)
    assert (halves.rows, halves.width) == (rows.rows // 2, rows.width)
    flops = {
        name: sum(p.flops for p in layer.products if p.groups > 1)
        for name, layer in (("whole", whole), ("alone", alone), ("cut", cut))
    }
    assert flops == {"whole": flops["whole"], "alone": flops["whole"], "cut": flops["whole"] // 2}
    assert cut.forward_flops == sum(product.flops for product in cut.products)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *combinations(["dp=2 ep=2 recompute=full"], FAMILIES),
        *nightly(["dp=2 ep=2 zero=3 microbatch=2"], FAMILIES[:1]),
        *nightly(["dp=2 zero=3", "dp=4 ep=2"], FAMILIES),
    ],
)
def test_the_ledger_holds_in_mixed_precision(layout: str, model: str) -> None:
    ranks = prove_ledger(layout, model)
    assert ranks[0].losses == pytest.approx(reference(model, clipped("bf16")).losses, rel=2e-3)


@pytest.mark.parametrize(
    ("layout", "model", "says"),
    [
        ("dp=2 ep=2", "llama", r"ep=2: llama has no experts .*Use .*ep=1"),
        ("dp=2 ep=4", "mixtral", r"ep=4 borrows data ranks, and does not divide dp_replicate=2. Use ep=2"),
        ("dp=2 ep=2 reduce=hierarchical", "mixtral", r"experts differ with ep=2. Use reduce=ring"),
        ("tp=2 sequence_parallel", "mixtral_balanced", r"counted from whole samples, .*Use .*tp=2 alone"),
        ("dp=2 ep=2", "three_experts", r"ep=2 does not divide the 3 experts of blocks.0.experts.up. Use ep=1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(layout: str, model: str, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        pool(2).run(observe, model, layout, clipped())


def test_the_loss_that_balances_experts_is_that_of_transformers() -> None:
    balanced, without = (
        observe(0, 1, model, "dp=1", job_of("float32", 1)).losses[0] for model in ("mixtral_balanced", "mixtral")
    )
    run = make_run(0, 1, "mixtral_balanced", "dp=1", job_of("float32", 1))
    batch = next(iter(batches(Tokens(), run.job)))
    samples = batch.samples(batch.indices)
    run.prepare(samples)
    theirs = run.model(samples["input_ids"]).aux_loss.item()
    assert balanced - without == pytest.approx(0.1 * theirs, rel=1e-5)


def test_a_part_of_a_batch_cannot_be_balanced() -> None:
    with pytest.raises(LayoutError, match=r"microbatch=1: the loss that balances .*. Use microbatch=4"):
        pool(2).run(observe, "mixtral_balanced", "dp=2 microbatch=1", clipped())
    with pytest.raises(LayoutError, match=r"pp=2: the loss that balances .*. Use pp=1"):
        pool(2).run(observe, "mixtral_balanced", "pp=2", clipped())
