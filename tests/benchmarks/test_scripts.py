"""benchmarks/scripts.py: ports of single-device scripts are equal to them where the table says so, and a fault is found."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import script_table, scripts
from benchmarks.script_kinds.kind import DP1, DP2

DAILY = ("DETR", "Muon and AdamW", "BYOL", "accuracy in the log", "Transformer-XL, whole")
CLAIMED = [
    (name, layout)
    for name, row in script_table.kept().items()
    for layout, (word, _) in row.items()
    if word == script_table.EQUAL
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if name in DAILY and layout == DP2 else pytest.mark.nightly)
        for name, layout in CLAIMED
    ],
)
def test_a_port_is_equal_where_the_table_says_so(name: str, layout: str) -> None:
    found = list(scripts.rows([name], [layout]))
    assert found == [(name, layout, script_table.EQUAL, "")]


def test_every_kind_has_a_row_and_none_is_wrong() -> None:
    kept = script_table.kept()
    assert list(kept) == list(scripts.KINDS)
    for name, row in kept.items():
        assert list(row) == list(scripts.KINDS[name].layouts)
        assert all(word != script_table.WRONG for word, _ in row.values()), name


def test_a_loss_or_a_weight_that_differs_is_wrong() -> None:
    result = scripts.plain(scripts.KINDS["mean as the loss"])
    assert scripts.compared(result, result) == (script_table.EQUAL, "")
    other = result._replace(losses=[*result.losses[:-1], result.losses[-1] + 1e-6])
    assert scripts.compared(other, result)[1].startswith("loss 4 is")
    name = next(iter(result.weights))
    moved = result.weights | {name: result.weights[name] + 1e-4 * torch.ones_like(result.weights[name])}
    assert scripts.compared(result._replace(weights=moved), result)[1].startswith(f"{name} differs by")


def test_a_port_that_trains_otherwise_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = scripts.KINDS["mean as the loss"]
    other = scripts.KINDS["clipping by value"].plain
    monkeypatch.setitem(scripts.KINDS, kind.name, dataclasses.replace(kind, plain=other))
    ((_, _, word, why),) = scripts.rows([kind.name], [DP1])
    assert word == script_table.WRONG
    assert "instead of" in why
