"""Mixtures of experts compute in every layout, with their experts dealt or not, what one device computes.

float64, 1e-9; uneven counts of tokens, clipping, and routes that leave experts of some ranks without rows. Each case holds
the ledger too: an exchange is compared by what all ranks of its group send. The models: Mixtral; Qwen2-MoE, with an expert
that all tokens share; Qwen3-MoE, a layer of which has no experts; a user's own with a plan.
"""

from __future__ import annotations

from typing import Any

import pytest

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.examination.examine import Source, examine
from samestep.layout import Layout
from samestep.strategies import program_of
from tests.covering import daily
from tests.laboratory import clipped, combinations, job_of, make_run, observe, prove, prove_ledger, reference
from tests.models import MODELS, Tokens
from tests.pool import pool

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "own_experts"]
LAYOUTS = [
    "dp=2 zero=3 microbatch=2",
    "tp=2 recompute=full microbatch=4",
    "dp=2 ep=2",
    "dp=2 ep=2 zero=1 microbatch=2",
    "dp=2 ep=2 zero=1 recompute=selective",
    "dp=4 ep=4 zero=1",
    "dp=4 ep=2 reduce=root microbatch=1",
    "dp=2 tp=2 ep=2 zero=1 recompute=full",
    "dp=4 ep=2 zero=3 microbatch=1 recompute=full",
    "dp=4 ep=2 zero=2 microbatch=1 accumulate=full",
    "dp_replicate=2 dp_shard=2 ep=2 zero=3 microbatch=2",
    "dp=2 cp=2 ep=4 zero=1 microbatch=2",
]
"""Beside the products of `test_products.py`."""
MORE = [
    "dp=2 zero=2 recompute=full",
    "dp=2 ep=2 microbatch=1 recompute=full",
    "dp=4 ep=4 microbatch=1",
    "dp_replicate=2 dp_shard=2 zero=1 ep=2 microbatch=2",
]
"""In `make parity` alone."""


def nightly(layouts: list[str], models: list[str]) -> list[Any]:
    """Every layout with every model, in `make parity`."""
    return [pytest.param(layout, model, marks=pytest.mark.nightly) for layout in layouts for model in models]


@pytest.mark.parametrize(
    ("layout", "model"),
    [*daily(combinations(LAYOUTS, FAMILIES), beside_products=True), *nightly(MORE, FAMILIES)],
)
def test_experts_compute_what_one_device_computes(layout: str, model: str) -> None:
    if "tp=2" in layout and model == "own_experts":
        pytest.skip("it has no plan for tensor cuts")
    prove(layout, model)


WITH_PLANS = ["mixtral", "qwen2_moe", "qwen3_moe"]
BETWEEN = [
    "tp=2 sequence_parallel",
    "tp=2 sequence_parallel recompute=full microbatch=3",
    "dp=2 tp=2 sequence_parallel ep=2 zero=3 recompute=selective",
]
MORE_BETWEEN = [
    "dp=2 tp=2 sequence_parallel ep=2 zero=1 microbatch=2",
    "dp=2 tp=2 sequence_parallel zero=2 microbatch=2",
]


@pytest.mark.parametrize(
    ("layout", "model"), [*daily(combinations(BETWEEN, WITH_PLANS)), *nightly(MORE_BETWEEN, WITH_PLANS)]
)
def test_experts_compute_rows_of_a_rank_s_own_tokens(layout: str, model: str) -> None:
    prove(layout, model)


def test_experts_are_divided_with_the_sequence() -> None:
    """Under tp alone every rank repeats the rows of all tokens."""
    source = Source(MODELS["mixtral"], loss_of(clipped()), optimizer_of(clipped()), "mixtral")
    example = next(batches(Tokens(), clipped())).samples([0])
    spec = examine(source, clipped(), example, Layout.parse("tp=2 sequence_parallel")).spec
    whole, alone, cut = (
        program_of(spec, clipped(), Layout.parse(words)).step.model.layers[1]
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


def test_experts_without_rows_take_part() -> None:
    """All tokens choose the same two of eight experts: three of four ranks compute nothing, and nobody waits."""
    prove("dp=4 ep=4 microbatch=1", "crowded_experts")


@pytest.mark.parametrize(
    ("model", "layout", "batch"),
    [
        ("mixtral", "dp=4 ep=2 zero=1 microbatch=1", 7),
        pytest.param("mixtral", "dp=4 ep=4 microbatch=1", 5, marks=pytest.mark.nightly),
        ("mixtral_balanced", "dp=4 ep=2", 3),
    ],
)
def test_uneven_batches_are_legal(model: str, layout: str, batch: int) -> None:
    prove(layout, model, job_of("float64", 3, train={"global_batch": batch}))


@pytest.mark.parametrize(
    ("layout", "model", "says"),
    [
        ("dp=2 ep=2", "llama", r"ep=2: llama has no experts .*ep=1 works"),
        ("dp=2 ep=4", "mixtral", r"ep=4 borrows data ranks, and does not divide dp_replicate=2; ep=2 works"),
        ("dp=1 cp=2 ep=4", "mixtral", r"ep=4 borrows data ranks, and does not divide dp_replicate x cp=2; ep=2 works"),
        ("dp=2 ep=2 reduce=hierarchical", "mixtral", r"experts differ with ep=2: reduce=ring works"),
        ("tp=2 sequence_parallel", "mixtral_balanced", r"counted from whole samples, .* tp=2 alone works"),
        ("dp=2 ep=2", "three_experts", r"ep=2 does not divide the 3 experts of blocks.0.experts.up; only ep=1 works"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(layout: str, model: str, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        pool(2).run(observe, model, layout, clipped())


WITH_BALANCE = ["mixtral_balanced", "qwen3_moe_balanced"]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *daily(
            combinations(["dp=2 ep=2 zero=1", "dp=2 zero=3 recompute=full", "tp=2"], WITH_BALANCE), beside_products=True
        ),
        *nightly(["dp=2", "dp=2 tp=2 ep=2 recompute=selective"], WITH_BALANCE),
    ],
)
def test_the_loss_that_balances_experts_is_one_of_the_whole_batch(layout: str, model: str) -> None:
    prove(layout, model)


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
    with pytest.raises(LayoutError, match=r"microbatch=1: the loss that balances .*: microbatch=4 works"):
        pool(2).run(observe, "mixtral_balanced", "dp=2 microbatch=1", clipped())
    with pytest.raises(LayoutError, match=r"pp=2: the loss that balances .*: pp=1 works"):
        pool(2).run(observe, "mixtral_balanced", "pp=2", clipped())


FROZEN = [
    "mixtral_behind_a_frozen_front",
    "mixtral_with_its_last_queries",
    "qwen3_moe_with_its_first_router",
    "own_experts_behind_a_frozen_front",
]
BEHIND_FROZEN = [
    "dp=2 ep=2 zero=3",
    "dp=2 ep=2 zero=3 microbatch=2 recompute=full",
    "dp=2 ep=2 zero=2",
    "dp=2 ep=2 zero=1 recompute=selective",
    "dp=4 ep=2 zero=3",
    "dp=2 cp=2 ep=2 zero=3",
    "dp=2 tp=2 ep=2 zero=3",
]


@pytest.mark.parametrize(
    ("layout", "model"), [*daily(combinations(BEHIND_FROZEN[:4], FROZEN)), *nightly(BEHIND_FROZEN, FROZEN)]
)
def test_no_backward_runs_in_the_experts_of_a_frozen_front(layout: str, model: str) -> None:
    if "tp=2" in layout and model.startswith("own_experts"):
        pytest.skip("it has no plan for tensor cuts")
    prove(layout, model)
