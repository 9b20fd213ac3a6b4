"""Compressed gradients: every layout with the same `numerics.replicas` computes what one device computes, code by code.

In float64 sums differ by 1e-16 between layouts, far less than a quantisation step, so that nearly every code is the same
and the limit is that of uncompressed layouts.
"""

from __future__ import annotations

import pytest

from samestep.job import Job
from tests.laboratory import TOLERANCE, assert_ledger, assert_same, job_of, observe, on_ranks, reference

MODEL = "wide_llama"
NIGHTLY = pytest.mark.nightly


def compressed(codec: str = "int8", replicas: int = 2, precision: str = "float64", steps: int = 3) -> Job:
    numerics = {"compression": codec, "replicas": replicas}
    return job_of(precision, steps, numerics=numerics, optimizer={"clip_norm": 0.5}, train={"watch_every": 0})


LAYOUTS = [
    "dp=2",
    "dp=2 microbatch=2",
    "dp=2 zero=1",
    "dp_replicate=2 dp_shard=2 zero=1",
    "dp_replicate=2 dp_shard=2 zero=2 microbatch=1",
    "dp_replicate=2 dp_shard=2 zero=3",
    "dp=2 tp=2",
    "dp=2 tp=2 sequence_parallel",
    "dp=2 pp=2 microbatch=1",
    "dp=2 cp=2",
    "dp_replicate=2 dp_shard=2 zero=3 tp=2",
]


def test_it_rounds() -> None:
    plain, coded = (reference(MODEL, job).losses for job in (compressed("none", 1), compressed()))
    apart = [abs(a - b) for a, b in zip(plain, coded, strict=True)]
    assert apart[0] < 1e-12
    assert 1e-7 < apart[2] < 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_codes_of_one_device(layout: str) -> None:
    job = compressed()
    ranks = on_ranks(layout, observe, MODEL, job, True)
    assert_ledger(ranks, layout)
    assert_same(ranks, reference(MODEL, job), TOLERANCE)
