"""Pipelines of any decoder, alone and in products with the other axes, compute what one device computes.

float64, 1e-9, and the ledger: sends, receives, and every sum. Among the models are the known silent errors: embeddings
tied across stages, and embeddings that the model scales before its blocks (Gemma, Granite).
"""

from __future__ import annotations

import pytest

from samestep.errors import LayoutError
from samestep.layout import Layout
from tests.laboratory import assert_same, job_of, observe
from tests.parity.test_data_axis import TOLERANCE, combinations, reference
from tests.pool import pool

MODELS = [
    "deep_llama",
    "deep_tied",
    "deep_qwen3",
    "deep_gemma",
    "deep_granite",
    "deep_gpt2",
    "deep_attentive",
]
ALONE = [
    "pp=2",
    "pp=2 microbatch=2",
    "pp=2 microbatch=2 schedule=gpipe",
    "pp=2 schedule=interleaved virtual_stages=2 microbatch=2",
    "pp=2 schedule=interleaved virtual_stages=2",
    "pp=4 microbatch=1",
    "pp=4 microbatch=2 recompute=full",
    "pp=2 microbatch=3",
    "pp=4 schedule=zero-bubble microbatch=1",
    "pp=2 schedule=zero-bubble microbatch=2 recompute=full",
]
WITH_DATA = [
    "dp=2 pp=2 microbatch=1",
    "dp=2 pp=2 microbatch=2 zero=1",
    "dp=2 pp=2 microbatch=1 schedule=interleaved virtual_stages=2 reduce=root",
    "dp=2 pp=2 microbatch=2 recompute=selective offload",
    "dp=2 pp=2 schedule=zero-bubble microbatch=1",
    "dp=2 pp=2 schedule=zero-bubble microbatch=2 zero=1 recompute=selective",
    "dp=2 pp=2 zero=2 microbatch=1",
    "dp=2 pp=2 zero=2 microbatch=1 accumulate=full schedule=interleaved virtual_stages=2",
    "dp=2 pp=2 zero=3 microbatch=1 schedule=gpipe recompute=full",
    "dp_replicate=2 dp_shard=2 pp=2 zero=3 microbatch=1 recompute=selective",
]
WITH_TENSOR = ["tp=2 pp=2 microbatch=2", "tp=2 pp=2 schedule=interleaved virtual_stages=2 microbatch=4 recompute=full"]
ALL_THREE = [
    "dp=2 tp=2 pp=2 microbatch=2",
    "dp=2 tp=2 pp=2 microbatch=1 zero=1 schedule=interleaved virtual_stages=2",
    "dp=2 tp=2 pp=2 microbatch=1 schedule=gpipe recompute=full reduce=root",
    "dp=2 tp=2 pp=2 sequence_parallel microbatch=1 schedule=zero-bubble offload",
    "dp=2 tp=2 pp=2 microbatch=1 zero=3 schedule=interleaved virtual_stages=2",
]


def _job(precision: str = "float64", steps: int = 5):
    return job_of(precision, steps, train={"global_batch": 8}, optimizer={"clip_norm": 0.5})


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *combinations(ALONE + WITH_DATA, MODELS, always=()),
        *combinations(WITH_TENSOR + ALL_THREE, MODELS, always=("deep_tied",)),
    ],
)
def test_a_pipeline_computes_what_one_device_computes(layout: str, model: str) -> None:
    ranks = pool(Layout.parse(layout).world_size).run(observe, model, layout, _job(), True)
    assert_same(ranks, reference(model, "float64", 8, True), TOLERANCE)
    for rank, seen in enumerate(ranks):
        assert seen.ledger == seen.predicted, f"rank {rank}"


@pytest.mark.parametrize(
    "layout",
    [
        "pp=2 microbatch=2",
        "tp=2 pp=2 microbatch=2",
        "dp=2 pp=2 zero=1 microbatch=2",
        "dp=2 pp=2 zero=3 microbatch=2",
        "dp=2 pp=2 schedule=zero-bubble microbatch=2",
    ],
)
@pytest.mark.parametrize("model", ["deep_tied", "deep_gpt2"])
def test_the_ledger_holds_in_mixed_precision(layout: str, model: str) -> None:
    for seen in pool(Layout.parse(layout).world_size).run(observe, model, layout, _job("bf16", 2), True):
        assert seen.ledger == seen.predicted


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        ("deep_llama", "pp=8", "makes 8 runs of layers of the 4 blocks of deep_llama: pp=4 works"),
        (
            "deep_llama",
            "pp=4 schedule=interleaved virtual_stages=2",
            "of the 4 blocks of deep_llama: schedule=1f1b works",
        ),
        ("deep_llama", "pp=2 virtual_stages=2", "needs schedule=interleaved"),
        ("deep_llama", "dp=2 pp=2 zero=3 schedule=zero-bubble", "zero=1 works, and so does schedule=1f1b"),
        ("deep_llama", "pp=2 schedule=zero-bubble virtual_stages=2", "needs schedule=interleaved"),
        ("deep_plain", "pp=2", "scale belongs to no layer"),
    ],
)
def test_what_cannot_be_is_refused(model: str, layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        pool(Layout.parse(layout).world_size).run(observe, model, layout, _job())
