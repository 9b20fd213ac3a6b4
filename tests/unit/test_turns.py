"""Rows that take turns: all turns together run each, and every turn runs each function and what no product of settings holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samestep.layout import Layout
from tests import conftest, covering, turns

ROOT = Path(__file__).parents[2]
LAYOUTS = ["dp=1", "dp=2 zero=3", "tp=2", "pp=2 microbatch=2", "dp=2 loss_chunk=5"]


class Item:
    """A test as pytest collects it, as far as `covering` and `turns` look at it."""

    def __init__(
        self, function: str, file: str = "parity/test_a.py", marks: tuple[str, ...] = (), **values: Any
    ) -> None:
        self.function, self.values, self.marks = function, values, marks
        self.nodeid = f"tests/{file}::{function}" + (f"[{'-'.join(map(str, values.values()))}]" if values else "")
        if values:
            self.callspec = SimpleNamespace(params=values)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks = (*self.marks, mark.name)


def ran(items: list[Item], number: int) -> list[Item]:
    """Return the tests that the turn of a number runs."""
    waiting: list[Any] = turns.out_of_turn(items, number)  # type: ignore[arg-type]
    return [item for item in items if item not in waiting]


def _rows() -> list[Item]:
    coded = [Item("coded", layout=LAYOUTS[number % 4], code=f"code {number}") for number in range(30)]
    given = [Item("given", name=name, is_exact=exact) for name in "abcdefgh" for exact in (True, False)]
    return coded + given + [Item("few", number=1), Item("chunked", layout=LAYOUTS[4]), Item("single")]


def test_all_turns_run_every_row_and_each_its_share() -> None:
    items = _rows()
    of_turns = [ran(items, number) for number in range(turns.TURNS)]
    assert {item.nodeid for one in of_turns for item in one} == {item.nodeid for item in items}
    assert ran(items, 29) == of_turns[29 % turns.TURNS]
    for one in of_turns:
        assert 30 // turns.TURNS <= sum(item.function == "coded" for item in one) <= 30 // turns.TURNS + 1
        assert 16 // turns.TURNS <= sum(item.function == "given" for item in one) <= 16 // turns.TURNS + 1


@pytest.mark.parametrize("number", range(turns.TURNS))
def test_every_turn_runs_each_function_each_of_few_values_and_each_setting_that_no_product_has(number: int) -> None:
    kept = ran(_rows(), number)
    assert {item.function for item in kept} == {"coded", "given", "few", "chunked", "single"}
    assert {item.values["is_exact"] for item in kept if item.function == "given"} == {True, False}
    assert any("loss_chunk" in item.values.get("layout", "") for item in kept)
    assert "loss_chunk" not in covering.FEATURES, "the setting above is one that the products lack"


def test_nightly_tests_take_no_turn_nor_do_those_that_run_in_every_one_nor_rows_of_other_files() -> None:
    others = [Item("fault", file="proof/test_faults.py", name=name) for name in "abcdef"]
    marked = [Item("fixed", marks=(mark,), name=name) for mark in ("every_turn", "nightly") for name in "abcdef"]
    assert ran(others + marked, 0) == others + marked


@pytest.mark.parametrize("turn", ["", *map(str, range(turns.TURNS))])
def test_rows_for_a_gpu_hold_nothing_where_there_is_none(turn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would stand for a function, or for the setting of a layout, that no row then runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    of_gpu = [Item("given", marks=("gpu",), layout=layout, model="llama") for layout in LAYOUTS]
    items: list[Any] = [*of_gpu, *(Item("given", layout=layout, model="llama") for layout in LAYOUTS[2:])]
    options: dict[str, Any] = {"--turn": turn or None, "--every-layout": False, "--shard": None}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    option = SimpleNamespace(keyword="")
    config: Any = SimpleNamespace(getoption=options.__getitem__, option=option, args=["tests"], hook=hook)
    conftest.pytest_collection_modifyitems(config, items)
    assert not any("gpu" in item.marks for item in items)
    words = " ".join(item.values["layout"] for item in items)
    assert "loss_chunk=5" in words, "what no product holds runs in every turn"
    assert bool(turn) or all(word in words for word in ("tp=2", "pp=2")), "and without turns every setting"


def test_what_products_are_for_holds_in_every_turn() -> None:
    """A setting that the products have is held by them alone, so their rows may not wait."""
    from tests.parity import test_products

    function: Any = test_products.test_features_compose
    assert {mark.name for mark in function.pytestmark} >= {"every_row", "every_turn"}
    layouts = [Layout(layout) for layout, _, _ in covering.rows(2, 4, alone=("model",))]
    for name in ("zero", "recompute", "schedule", "tp", "pp", "cp", "ep"):
        held = {getattr(layout, name) for layout in layouts}
        assert held >= set(covering.FEATURES[name]), f"the products lack a value of {name}"


def test_planted_faults_reverted_mends_goldens_and_seams_run_in_every_turn() -> None:
    every = ("seams", "golden", "docs", "proof/test_faults.py", "proof/test_reverted.py", "proof/test_reproductions.py")
    assert all((ROOT / "tests" / path).exists() for path in turns.DEAR)
    galleries = {"docs/test_ports.py", "docs/test_port_examples.py", "docs/test_rejected_code.py"}
    assert {path for path in turns.DEAR if path.startswith(every)} == galleries


def test_the_makefile_gives_make_test_a_turn() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ntest:")[2].partition("\n\n")[0]
    assert "--turn=$(TURN)" in recipe
