"""`tests/frozen` and `tests/costs.py`: what is recorded, what counts as a difference, and what is merged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.output.results import VerbFailure
from tests import costs
from tests.frozen import chosen, recorder, table
from tests.frozen.table import Changes, Row

NOTHING = Changes([], {})
FROZEN = {
    "t.py::a[dp=2]": Row("dp=2", "equal", "1"),
    "t.py::b": Row("", "rejected: old, other", "1"),
    "t.py::c": Row("", "equal", "1"),
}


def test_what_comes_to_something_else_is_a_difference() -> None:
    now = FROZEN | {"t.py::a[dp=2]": Row("dp=2", "rejected: x", "2"), "t.py::new": Row("", "failed", "2")}
    assert table.differences(FROZEN, FROZEN, NOTHING) == []
    (line,) = table.differences(FROZEN, now, NOTHING)
    assert line == "t.py::a[dp=2]: rejected: x; frozen at 1: equal"
    assert table.differences(FROZEN, now, Changes([{"move": "11", "rows": "t.py::a*"}], {})) == []


def test_a_row_that_is_gone_is_a_difference_and_one_that_did_not_run_is_none() -> None:
    now = {"t.py::a[dp=2]": FROZEN["t.py::a[dp=2]"]}
    assert table.differences(FROZEN, now, NOTHING) == []
    lines = table.differences(FROZEN, now, NOTHING, lambda name: name.startswith("t.py"))
    assert [line.partition(":")[0] for line in lines] == ["t.py", "t.py"]
    assert all("there is no such row" in line for line in lines)


def test_rows_and_codes_may_be_renamed() -> None:
    now = {"u.py::b": Row("", "rejected: new", "2"), "u.py::c": Row("", "equal", "2")}
    renamed = {"t.py::*": "u.py::*", "code old": "code new", "code other": "code new"}
    assert table.differences(FROZEN, now, Changes([], renamed)) == []
    assert (
        "frozen at 1: rejected: new"
        in table.differences(FROZEN, {"u.py::b": Row("", "rejected: old", "2")}, Changes([], renamed))[0]
    )


def test_a_code_of_a_class_alone_may_become_any_code_and_not_equal() -> None:
    changed = Changes([], {"code old": "code *"})
    assert table.differences(FROZEN, {"t.py::b": Row("", "rejected: new", "2")}, changed) == []
    assert len(table.differences(FROZEN, {"t.py::b": Row("", "equal", "2")}, changed)) == 1


@pytest.mark.parametrize(("now", "count"), [("9, Python 5", 0), ("10, Python 4", 0), ("11, Python 2", 1)])
def test_a_step_may_make_fewer_calls_and_not_more(now: str, count: int) -> None:
    frozen = {"calls dp=2": Row("dp=2", "calls: ATen 10, Python 5", "1")}
    assert len(table.differences(frozen, {"calls dp=2": Row("dp=2", f"calls: ATen {now}", "2")}, NOTHING)) == count


def test_parts_of_a_run_are_merged(tmp_path: Path) -> None:
    path = tmp_path / table.ROWS.name
    path.write_text('{"given_up": [{"move": "1", "rows": "t.py::c"}], "renamed": {}, "rows": {}}')
    table.merge(FROZEN, path)
    table.merge({"t.py::c": Row("", "failed", "2")}, path)
    assert table.load(path) == FROZEN | {"t.py::c": Row("", "failed", "2")}
    assert '"move": "1"' in path.read_text()


def _within_samestep() -> Callable[[Callable[[], object]], None]:
    """Return a function that stands in a file of samestep, calls what it is given, and keeps its error."""
    text = "def call(function):\n    try:\n        function()\n    except Exception:\n        pass\n"
    names: dict[str, Callable[[Callable[[], object]], None]] = {}
    exec(compile(text, f"{recorder._OURS}of_a_test.py", "exec"), names)
    return names["call"]


def _refused() -> None:
    Layout("dp=none")


def _caught() -> None:
    with contextlib.suppress(LayoutError):
        _refused()


def test_errors_that_reach_a_test_are_recorded_and_those_within_samestep_are_not() -> None:
    codes = recorder.Codes()

    def of(function: Callable[[], object]) -> set[str]:
        codes.open()
        try:
            function()
        finally:
            recorded = codes.close()
        return recorded

    with pytest.raises(LayoutError) as refusal:
        _refused()
    assert of(_caught) == {refusal.value.code}
    assert of(lambda: _within_samestep()(_refused)) == set()
    assert of(lambda: VerbFailure(LayoutError("some-code", "what the command line prints"), 2).text) == {"some-code"}
    assert of(lambda: 1) == set()


def test_a_commit_chooses_what_a_gate_runs() -> None:
    names = {f"family {number}": ["dp=2", "tp=2", "cp=2"] for number in range(60)}
    one, other = (chosen.of_gate(names, seed, 24) for seed in ("1a", "2b"))
    assert one == chosen.of_gate(names, "1a", 24) != other
    assert len(one) == 24
    assert all(len({*layouts}) == chosen.LAYOUTS for layouts in one.values())


def test_every_room_of_the_table_of_rows_exists_and_finds_tests() -> None:
    source, tests = table.ROOT / "src" / "samestep", [str(path) for path in table.TESTS.rglob("test_*.py")]
    for room, begins in chosen.TESTS_OF.items():
        assert (source / room).is_dir(), room
        assert all(any(path.startswith(f"{table.TESTS}/{begin}") for path in tests) for begin in begins), room


def test_costs_of_parts_of_a_run_are_put_together(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for file, used_s in (
        ("tests/unit/test_turns.py", 2.0),
        ("tests/unit/test_frozen.py", 9.04),
        ("tests/gone.py", 1.0),
    ):
        costs.keep(file, used_s, 3, path)
    costs.keep("tests/unit/test_turns.py", 4.0, 3, path)
    kept = costs.load(path)
    assert {file: cost["processor_s"] for file, cost in kept.items() if "gone" not in file} == {
        "tests/unit/test_turns.py": 4.0,
        "tests/unit/test_frozen.py": 9.0,
    }
    lines = costs.dearest(kept, 1).splitlines()
    assert lines[0].split()[:2] == ["9.0", "s"]
    assert "together 13 s of processor time, 2 files" in lines[2]
