"""Tensor parallelism, alone and with every data-axis layout, computes what one device computes, and sends what it says.

float64, 1e-9; perturbed norms and biases, uneven counts of tokens, clipping. Each case holds the ledger too. The rows of
known silent errors: tied embeddings cut apart, norms of heads without a summed gradient, biases of row cuts added tp
times, a norm that counts replicated weights tp times.
"""

from __future__ import annotations

import pytest

from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.strategies import program_of
from tests.laboratory import assert_same, job_of, make_run, observe
from tests.models import Tokens
from tests.parity.test_data_axis import TOLERANCE, combinations, reference
from tests.pool import pool

MODELS = ["llama_even", "llama_tied", "qwen3", "gpt2_even", "attentive", "llama"]
LAYOUTS = [
    "tp=2",
    "tp=2 microbatch=3",
    "tp=2 recompute=full",
    "tp=2 recompute=selective microbatch=4",
    "tp=2 offload",
    "dp=2 tp=2",
    "dp=2 tp=2 microbatch=1 reduce=root",
    "dp=2 tp=2 zero=1 microbatch=2",
    "dp=2 tp=2 zero=2 microbatch=2",
    "dp=2 tp=2 zero=3 recompute=full",
    "dp=2 tp=2 zero=3 microbatch=2 accumulate=full",
]
SEQUENCES = ["deep_llama", "deep_qwen3", "deep_gpt2", "deep_gemma", "deep_tied", "parted"]
CUT_SEQUENCES = [
    "tp=2 sequence_parallel",
    "tp=2 sequence_parallel recompute=full microbatch=4",
    "tp=2 sequence_parallel recompute=selective",
    "dp=2 tp=2 sequence_parallel zero=1 microbatch=2",
    "dp=2 tp=2 sequence_parallel zero=3 recompute=full",
    "dp=2 tp=2 sequence_parallel zero=2 microbatch=2 accumulate=full",
    "tp=2 pp=2 sequence_parallel microbatch=4 schedule=interleaved virtual_stages=2",
]


def _job(precision: str = "float64", steps: int = 5):
    return job_of(precision, steps, train={"global_batch": 8}, optimizer={"clip_norm": 0.5})


@pytest.mark.parametrize(("layout", "model"), combinations(LAYOUTS, MODELS, always=()))
def test_a_tensor_cut_computes_what_one_device_computes(layout: str, model: str) -> None:
    ranks = pool(4 if "dp=2" in layout else 2).run(observe, model, layout, _job(), True)
    assert_same(ranks, reference(model, "float64", 8, True), TOLERANCE)
    assert all(seen.ledger == seen.predicted for seen in ranks)


@pytest.mark.parametrize(("layout", "model"), combinations(CUT_SEQUENCES, SEQUENCES, always=()))
def test_a_cut_sequence_computes_what_one_device_computes(layout: str, model: str) -> None:
    ranks = pool(Layout.parse(layout).world_size).run(observe, model, layout, _job(), True)
    assert_same(ranks, reference(model, "float64", 8, True), TOLERANCE)
    assert all(seen.ledger == seen.predicted for seen in ranks)


@pytest.mark.parametrize("model", ["deep_gpt2", "parted"])
def test_the_ledger_of_a_cut_sequence_holds_in_mixed_precision(model: str) -> None:
    for seen in pool(2).run(observe, model, "tp=2 sequence_parallel", _job("bf16", 2), True):
        assert seen.ledger == seen.predicted


def test_masks_of_a_cut_sequence_are_those_of_one_device() -> None:
    ranks = pool(2).run(observe, "dropping_gpt2", "tp=2 sequence_parallel", _job())
    assert_same(ranks, reference("dropping_gpt2", "float64", 8, True), TOLERANCE)


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        ("parted", "dp=2 sequence_parallel", "tp=1 cuts none: tp=2 works"),
        (
            "attentive",
            "tp=2 sequence_parallel",
            "blocks.0.q is cut in the block's own code: put attention and MLP into",
        ),
    ],
)
def test_a_sequence_that_cannot_be_cut_is_refused(model: str, layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        pool(2).run(observe, model, layout, _job())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["tp=2 recompute=full", "dp=2 tp=2 zero=3 microbatch=2"])
def test_the_ledger_holds_in_mixed_precision(layout: str, model: str) -> None:
    for seen in pool(4 if "dp=2" in layout else 2).run(observe, model, layout, _job("bf16", 2), True):
        assert seen.ledger == seen.predicted


@pytest.mark.parametrize("model", ["llama_even", "gpt2_even", "attentive"])
def test_four_ranks_cut_one_model(model: str) -> None:
    if model == "gpt2_even":
        with pytest.raises(LayoutError, match=r"tp=4 does not divide the 2 groups of .*c_attn.*; tp=2 does"):
            pool(4).run(observe, model, "tp=4", _job())
        return
    ranks = pool(4).run(observe, model, "tp=4", _job(), True)
    assert_same(ranks, reference(model, "float64", 8, True), TOLERANCE)
    assert all(seen.ledger == seen.predicted for seen in ranks)


SHARED = [
    "tp=4",
    "tp=4 sequence_parallel recompute=selective",
    "tp=4 recompute=full microbatch=4",
]
SHARED_BY_EIGHT = ["tp=4 cp=2", "dp=2 tp=4 zero=3 microbatch=2", "dp=2 tp=4 zero=1", "tp=4 pp=2 microbatch=2"]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *combinations(SHARED, ["qwen2", "qwen3", "llama_tied"], always=()),
        *(pytest.param(layout, "deep_qwen3", marks=pytest.mark.nightly) for layout in SHARED_BY_EIGHT),
    ],
)
def test_ranks_share_heads_of_keys_and_values(layout: str, model: str) -> None:
    """Four query heads on four ranks, two heads of keys and values: two ranks compute on each of these."""
    ranks = pool(Layout.parse(layout).world_size).run(observe, model, layout, _job(), True)
    assert_same(ranks, reference(model, "float64", 8, True), TOLERANCE)
    assert all(seen.ledger == seen.predicted for seen in ranks)


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_the_ledger_of_shared_heads_holds_in_mixed_precision(model: str) -> None:
    for seen in pool(4).run(observe, model, "tp=4", _job("bf16", 2), True):
        assert seen.ledger == seen.predicted


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("tp=4 pp=2 schedule=zero-bubble", "zero-bubble computes later: tp=2 works, and so does schedule=1f1b"),
        ("tp=8", "tp=8 does not divide the 4 groups of .*q_proj.weight; tp=2 or 4 does"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(layout: str, text: str) -> None:
    run = make_run(0, 1, "deep_llama", "dp=1", _job())
    run.prepare(next(batches(Tokens(), _job())).samples([0]))
    with pytest.raises(LayoutError, match=text):
        program_of(run.made.spec, _job(), Layout.parse(layout))


def test_a_module_without_a_plan_is_refused() -> None:
    with pytest.raises(LayoutError, match="plain cannot be cut, it has no tensor_plan"):
        pool(2).run(observe, "plain", "tp=2", _job())
