"""The ratchet of `benchmarks/structure.py`: figures may fall, and rise only where a line says what was removed for it."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import entered
import ratchet
import structure


def _state(raises: Any = (), raised: Any = (), **ceilings: int) -> ratchet.State:
    return {"ceilings": ceilings, "counts": {}, "raises": [*raises], "raised": [*raised]}


def _raise(figure: str, to: int, removed: str = "the old way went for it") -> dict[str, Any]:
    return {"figure": figure, "to": to, "removed": removed}


def _complaints(now: ratchet.Figures, state: ratchet.State, *versions: ratchet.State) -> str:
    return "\n".join(ratchet.complaints(now, state, [*versions]))


def test_a_figure_may_fall_and_not_rise() -> None:
    state = _state(files=10, modes=3)
    assert _complaints({"files": 9, "modes": 3}, state) == ""
    assert "files: 11, and the ceiling is 10" in _complaints({"files": 11, "modes": 3}, state)
    assert "a new room" in _complaints({"files": 10, "a new room": 1}, state)


def test_a_raise_says_what_was_removed_and_is_kept() -> None:
    state = ratchet.let_rise({"files": 12}, _state(files=10), "two files of lanes went")
    assert _complaints({"files": 12}, state) == ""
    assert "files: 13, and the ceiling is 12" in _complaints({"files": 13}, state)
    written = ratchet.lowered({"files": 11}, state)
    assert written == _state(files=11, raised=[_raise("files", 11, "two files of lanes went")])
    assert "does not say what was removed" in _complaints({}, _state(raises=[_raise("files", 11, "needed")]))
    with pytest.raises(SystemExit, match="files: 13, and the ceiling is 12"):
        ratchet.lowered({"files": 13}, state)


def test_a_ceiling_that_was_edited_is_found_in_the_history() -> None:
    older = _state(files=10)
    assert "rose to 11" in _complaints({"files": 11}, _state(files=11), older)
    assert _complaints({"files": 11}, _state(files=11, raised=[_raise("files", 11)]), older) == ""
    assert "rose to 11" in _complaints({"files": 9}, _state(files=9), _state(files=11), older)


def test_modes_and_names_by_origin_are_counted() -> None:
    text = "class A(TorchFunctionMode):\n    pass\nclass B(A, C[int]):\n    pass\nclass D(Module):\n    pass\n"
    assert ratchet.modes({Path("a.py"): text}) == {"A", "B"}
    bound = structure._bound(
        ast.parse("def f(given, spec):\n    found = [one for one in given]\n    self.kept = found")
    )
    assert sorted(bound) == ["found", "given", "one", "spec"]


def test_the_main_path_is_what_a_step_enters_often() -> None:
    step = {f"runtime/run.py:{line} f": 1 for line in range(4)} | {f"trees.py:{line} g": 1 for line in range(3)}
    assert entered.files_of_main_path(step) == {"runtime/run.py", *entered.ALWAYS}


def test_the_file_has_what_is_published() -> None:
    state = json.loads(ratchet.KEPT.read_text(encoding="utf-8"))
    assert {"raw lines", "names by origin", "functions entered: step 2", "lines of the core"} <= state["counts"].keys()
    assert {"files", "error codes", "modes", "lines in runtime/"} <= state["ceilings"].keys()
