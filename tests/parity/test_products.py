"""Every pair of features and each model, and in `make parity` every triple, models too, computes what one device computes and sends what it lists.

Nightly rows hold every pair of what stands with ranks that share sequences: exchanges by heads, ring and hybrid, axes, ZeRO stages, recompute,
windows, dropout, packed documents.

The layouts are those of a covering array (`tests/covering.py`): degrees of every axis, ZeRO stages, schedules, recompute,
accumulation, reductions, uneven micro-batches, models, precisions. Losses, norms, every gradient, every weight: to 1e-9 in float64, in bf16 to what one rounding does.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import covering, rounding
from tests.laboratory import Code, clipped, prove
from tests.models import MODELS, PackedTokens

MODELS["packed_llama"] = Code(MODELS["deep_llama"], data=PackedTokens, is_cut=True)
PAIRS, TRIPLES = (2, 4), (3, 8)
"""Features at once, and ranks that a layout may have."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen: list[Any] = [*covering.rows(*PAIRS, alone=("model",))]
    if metafunc.config.getoption("--every-layout"):
        more = [row for row in covering.rows(*TRIPLES) if row not in chosen]
        more += [row for row in covering.rows(2, 8, table="sequences") if row not in more]
        chosen += [pytest.param(*row, marks=pytest.mark.nightly) for row in more]
    metafunc.parametrize(("layout", "model", "precision"), chosen)


@pytest.mark.every_row
@pytest.mark.every_turn
def test_features_compose(layout: str, model: str, precision: str) -> None:
    if precision == "float64":
        prove(layout, model, clipped())
    else:
        rounding.prove(layout, model, precision)
