"""What `make test` leaves to the night: of a file's tests with layouts those that hold nothing which the others lack."""

from __future__ import annotations

import itertools
from typing import Any

from samestep.layout import Layout
from tests import covering
from tests.parity.axes import ROWS
from tests.unit.test_turns import Item

LAYOUTS = ["dp=1", "dp=1 microbatch=4", "dp=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=2", "dp=4 zero=3"]


def left(items: list[Item]) -> list[Item]:
    """Return the tests that run by default."""
    needless: list[Any] = covering.needless(items)  # type: ignore[arg-type]
    return [item for item in items if item not in needless]


def test_each_function_each_value_and_each_setting_of_a_layout_is_left() -> None:
    crossed = [Item("crossed", layout=layout, model=model) for layout in LAYOUTS for model in "abcdefgh"]
    other = [Item("other", layout=layout) for layout in LAYOUTS]
    kept = left(crossed + other)
    assert {item.function for item in kept} == {"crossed", "other"}
    assert {item.values["model"] for item in kept if item.function == "crossed"} == set("abcdefgh")
    assert {item.values["layout"] for item in kept} >= {"dp=2 zero=3", "tp=2", "pp=2 microbatch=2"}
    assert len(kept) == 9, "each model once, and the other function once"
    used = [item.values["layout"] for item in kept]
    assert "dp=1" not in used, "it proves least"
    assert used.count("dp=4 zero=3") == 1, "it costs most"


def test_the_layouts_of_equal_rows_are_used_in_turn() -> None:
    items = [Item("crossed", layout=layout, model=model) for model in range(12) for layout in LAYOUTS[1:4]]
    counts = [sum(item.values["layout"] == layout for item in left(items)) for layout in LAYOUTS[1:4]]
    assert sorted(counts) == [4, 4, 4]


def test_what_a_layout_leads_from_and_to_are_held_each() -> None:
    pairs = itertools.permutations(["dp=2", "tp=2", "pp=2 microbatch=2", "dp=2 zero=3"], 2)
    kept = left([Item("resumed", before=before, after=after) for before, after in pairs])
    for place in ("before", "after"):
        assert {item.values[place] for item in kept} >= {"tp=2", "pp=2 microbatch=2", "dp=2 zero=3"}


def test_tests_without_a_layout_or_with_marks_of_their_own_stay_as_they_are() -> None:
    plain = [Item("plain", number=number) for number in range(5)] + [Item("alone")]
    nightly = [Item("nightly", marks=("nightly",), layout=layout) for layout in LAYOUTS]
    every = [Item("every", marks=("every_row",), layout=layout) for layout in LAYOUTS]
    assert left(plain + nightly + every) == plain + nightly + every
    some = [Item("some", layout="tp=2")]
    assert left(nightly + some) == nightly + some, "nightly tests hold nothing"


def test_of_the_rows_of_axes_those_are_left_that_hold_a_pair_which_no_product_and_no_other_row_holds() -> None:
    free = [row.values if hasattr(row, "marks") else row for rows in ROWS.values() for row in rows if not marks_of(row)]
    kept = covering.beyond_products(free)
    assert len(kept) < len(set(free)), "none was needless"
    products = covering.rows(2, 4, alone=("model",))
    held = {pair for layout, model, _ in products for pair in covering.pairs_of(Layout(layout), model)}
    of_all, of_kept = (
        held | {pair for layout, model in cases for pair in covering.pairs_of(Layout(layout), model)}
        for cases in (free, kept)
    )
    assert of_kept == of_all


def test_a_pair_of_settings_a_model_that_is_cut_and_a_number_of_ranks_are_held_each() -> None:
    alone = ("dp=2 loss_chunk=5 zero=3", "of its own")
    assert covering.beyond_products([alone]) == {alone}
    same = [("dp=2 zero=3", "of its own"), ("dp=1 loss_chunk=5", "of its own")]
    assert covering.beyond_products([alone, *same]) == {alone, same[1]}, "the last has another number of ranks"
    cut = ("tp=2", "of its own")
    assert covering.beyond_products([alone, cut]) == {alone, cut}
    wide = ("dp=8", "of its own")
    assert covering.beyond_products([alone, wide]) == {alone, wide}


def marks_of(row: Any) -> Any:
    return getattr(row, "marks", ())
