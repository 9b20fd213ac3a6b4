"""The right way of what is silently wrong elsewhere (`tests/proof/silent.py`), in the layout of the fault that it shows in.

float64, 1e-9, and the ledger. That the usual way would not pass is what the faults prove, by the same tolerance.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samestep.program import buckets
from tests.covering import daily
from tests.laboratory import clipped, observe, prove
from tests.pool import pool
from tests.proof.faults import FAULTS
from tests.proof.silent import PARITY, SILENT

NIGHTLY = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
CASES = sorted(
    {(FAULTS[name].code, FAULTS[name].layout) for row in SILENT for name in row.faults if PARITY in row.tests}
)


@pytest.mark.parametrize(("model", "layout"), daily(CASES))
def test_the_right_way_computes_what_one_device_computes(model: str, layout: str) -> None:
    prove(layout, model)


def test_every_row_names_tests_and_faults_that_exist() -> None:
    for row in SILENT:
        assert row.tests, row.what
        for test in row.tests:
            path, _, name = test.partition("::")
            assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), test
        for name in row.faults:
            assert name in FAULTS


@pytest.mark.parametrize(
    "layout", ["tp=2 sequence_parallel", pytest.param("dp=2 tp=2 zero=3 recompute=full", marks=NIGHTLY)]
)
def test_learned_activations_are_summed_in_every_layout(layout: str) -> None:
    prove(layout, "apertus")


@pytest.mark.parametrize(
    "layout", ["tp=2 microbatch=4", pytest.param("tp=2 zero=2 dp=2 recompute=full", marks=NIGHTLY)]
)
def test_whole_weights_on_cut_tensors_need_no_word_in_a_plan(layout: str) -> None:
    prove(layout, "unsaid")


def test_a_weight_behind_a_cut_head_meets_whole_logits() -> None:
    prove("tp=2", "used_behind_the_head")


@pytest.mark.parametrize("model", ["used_both_ways", "used_by_another"])
def test_a_weight_whose_gradient_would_be_neither_whole_nor_a_part_meets_whole_outputs(model: str) -> None:
    prove("tp=2", model)


def weights(rank: int, world: int, bucket_bytes: int) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "bucket_bytes", lambda num_shards: bucket_bytes)
        seen = observe(rank, world, "plain", "dp=3", clipped("float32"))
    return torch.cat([tensor.flatten() for _, _, _, tensor in seen.weights])


def test_other_buckets_would_show_in_the_bits() -> None:
    """So equal bits of a resumed run mean equal buckets."""
    usual, again, other = (pool(3).run(weights, size) for size in (buckets.BUCKET_BYTES, buckets.BUCKET_BYTES, 1000))
    assert torch.equal(usual[0], again[0])
    assert not torch.equal(usual[0], other[0])
    assert torch.allclose(usual[0], other[0], rtol=1e-4, atol=1e-6)
