"""Every pair of features of code, and each with every layout, computes what a plain loop computes: losses, averages, weights and buffers.

Rows that draw masks are held against one device, and so are norms that plain torch counts twice in a forward that code repeats.
Of a failing row the features are printed without which it does not fail. Each commit runs every feature; the pairs take turns.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity import code_array
from tests.parity.code_array import Row
from tests.parity.code_features import layout_of, train_in_layout, train_plainly
from tests.plain import Trained, assert_trained
from tests.pool import pool


def _numbers() -> list[Any]:
    rows = code_array.rows()
    daily = code_array.each_setting(rows)
    return [
        pytest.param(number, marks=pytest.mark.every_turn if number in daily else ()) for number in range(len(rows))
    ]


@functools.cache
def _on_one_device(row: str, folder: str) -> Trained:
    of_row: Row = json.loads(row)
    counts_twice = of_row["checkpoint"] == "own" and of_row["norm"] == "batch"
    if of_row["dropout"] == "none" and not counts_twice:
        return train_plainly(of_row)
    trained: Trained = pool(1).run(train_in_layout, of_row, "dp=1", folder)[0]
    return trained


def prove(row: Row, folder: Path) -> None:
    """Hold the ranks of a row against one device."""
    layout = layout_of(row)
    expected = _on_one_device(json.dumps({**row, "layout": "", "recompute": "", "offload": ""}), str(folder / "alone"))
    ranks = pool(layout.world_size).run(train_in_layout, row, str(layout), str(folder / "ranks"))
    assert_trained(ranks, expected, 1e-7, 1e-9, 1e-10)


@pytest.mark.parametrize("number", _numbers())
def test_features_of_code_compose(number: int, tmp_path: Path) -> None:
    row, tries = code_array.rows()[number], itertools.count()

    def fails(smaller: Row) -> bool:
        try:
            prove(smaller, tmp_path / str(next(tries)))
        except Exception:
            return True
        return False

    try:
        prove(row, tmp_path)
    except Exception as error:
        error.add_note(f"It fails with these features alone: {code_array.smallest(row, fails)}")
        raise


@pytest.mark.parametrize(
    ("checkpoint", "layout"),
    [("checkpoint", "dp=2 zero=3"), ("recompute", "dp=2 zero=3"), ("recompute", "dp=1 microbatch=3")],
)
def test_looking_at_the_end_of_a_loss_repeats_no_forward(checkpoint: str, layout: str, tmp_path: Path) -> None:
    """The last operations of a loss of the model may have saved tensors that a checkpoint computes again, once."""
    repeated = {"checkpoint": "own"} if checkpoint == "checkpoint" else {"recompute": "selective"}
    row = {**code_array.PLAIN, **repeated, "buffer": "scale", "loss": "of the model", "layout": layout, "norm": "none"}
    prove(row, tmp_path)


def test_the_rows_hold_every_pair() -> None:
    rows = code_array.rows()
    pairs = {pair for row in rows for pair in code_array.pairs_of(row)}
    assert pairs == set(code_array.every_pair())
    daily = code_array.each_setting(rows)
    every = {(factor, setting) for factor, settings in code_array.FACTORS.items() for setting in settings}
    assert {setting for number in daily for setting in rows[number].items()} == every


def test_a_failing_row_is_reduced_to_its_pair() -> None:
    row = code_array.rows()[-1]
    wrong = dict(itertools.islice(code_array.features_of(row).items(), 2))
    assert code_array.smallest(row, lambda smaller: wrong.items() <= smaller.items()) == wrong
