"""Tensor parallelism, alone and with every data-axis layout, computes what one device computes, and sends what it says.

float64, 1e-9; perturbed norms and biases, uneven counts of tokens, clipping. Each case holds the ledger too. The rows of
known silent errors: tied embeddings cut apart, norms of heads without a summed gradient, biases of row cuts added tp
times, a norm that counts replicated weights tp times.
"""

from __future__ import annotations

import pytest

from samestep.errors import LayoutError
from samestep.layout import Layout
from tests.laboratory import assert_same, job_of, observe
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
    even = "microbatch=3" not in layout  # 8 samples in 3, 3 and 2: the program lists the largest micro-batch
    assert_same(ranks, reference(model, "float64", 8, True), TOLERANCE)
    for seen in ranks:
        assert not even or seen.ledger == seen.predicted


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


def test_a_module_without_a_plan_is_refused() -> None:
    with pytest.raises(LayoutError, match="plain cannot be cut, it has no tensor_plan"):
        pool(2).run(observe, "plain", "tp=2", _job())
