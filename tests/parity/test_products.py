"""Every pair of features, and in `make parity` every triple, computes what one device computes and sends what it lists.

The layouts are those of a covering array (`tests/covering.py`): degrees of every axis, ZeRO stages, schedules, recompute,
accumulation, reductions, uneven micro-batches, models. float64, 1e-9: losses, norms, every gradient, every weight.
"""

from __future__ import annotations

import pytest

from samestep.layout import Layout
from tests import covering
from tests.laboratory import assert_ledger, assert_same, job_of, observe
from tests.parity.test_data_axis import TOLERANCE, reference
from tests.pool import pool

PAIRS, TRIPLES = (2, 4), (3, 8)
"""Features at once, and ranks that a layout may have."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = covering.rows(*PAIRS)
    if metafunc.config.getoption("--every-layout"):
        chosen += tuple(row for row in covering.rows(*TRIPLES) if row not in chosen)
    metafunc.parametrize(("layout", "model"), chosen)


def test_features_compose(layout: str, model: str) -> None:
    steps = 3
    job = job_of("float64", steps, train={"global_batch": covering.BATCH}, optimizer={"clip_norm": 0.5})
    ranks = pool(Layout.parse(layout).world_size).run(observe, model, layout, job, True)
    assert_same(ranks, reference(model, "float64", covering.BATCH, True, steps), TOLERANCE)
    assert_ledger(ranks)
