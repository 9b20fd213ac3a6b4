"""examples/plain: each file has the losses of samestep in the layout beside it, and is short enough to be read at once."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.pool import pool

FOLDER = Path(__file__).parents[2] / "examples" / "plain"
PAGE = (Path(__file__).parents[2] / "docs" / "plain-versions.md").read_text(encoding="utf-8")
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "tiny")


class Run(NamedTuple):
    """A call of `main`: a function that trains on each rank, and the layout that does the same."""

    train: Callable[[int, int], list[float]]
    layout: str
    ranks: int
    numerics: dict[str, Any]


def runs_of(file: str) -> list[Run]:
    """Return the runs of a file, without starting any."""
    found: list[Run] = []
    sys.path.insert(0, str(FOLDER))
    try:
        tiny = importlib.import_module("tiny")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                tiny, "main", lambda train, layout, ranks=2, **keys: found.append(Run(train, layout, ranks, keys))
            )
            runpy.run_path(str(FOLDER / f"{file}.py"), run_name="__main__")
    finally:
        sys.path.remove(str(FOLDER))
    return found


def _on_a_rank(rank: int, world: int, file: str, index: int) -> tuple[list[float], list[float]]:
    run = runs_of(file)[index]
    by_samestep = sys.modules["tiny"].by_samestep
    return run.train(rank, world), by_samestep(run.layout, run.numerics)


@pytest.fixture(autouse=True)
def _modules_are_removed() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("tiny", *FILES):
            del sys.modules[name]


def test_there_are_ten_files() -> None:
    assert len(FILES) == 10


@pytest.mark.parametrize("file", [*FILES, "tiny"])
def test_a_file_is_short_and_begins_with_its_mathematics(file: str) -> None:
    text = (FOLDER / f"{file}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert file == "tiny" or len(text.split('"""')[1].splitlines()) >= 8


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[pytest.mark.nightly] * (file == "three_d")) for file in FILES]
)
def test_a_file_has_the_losses_of_its_layout(file: str) -> None:
    runs = runs_of(file)
    assert runs
    for index, run in enumerate(runs):
        for plain, same in pool(run.ranks).run(_on_a_rank, file, index):
            assert len(plain) >= 3
            assert plain == pytest.approx(same, rel=1e-9)
        assert f"`{run.layout}`" in PAGE
        assert f"examples/plain/{file}.py" in PAGE


def test_a_wrong_layout_is_noticed() -> None:
    (run,) = runs_of("int8_all_reduce")
    assert run.numerics == {"compression": "int8", "replicas": 2}
    plain, same = pool(2).run(_uncoded)[0]
    assert plain[1:] != pytest.approx(same[1:], rel=1e-9)


def _uncoded(rank: int, world: int) -> tuple[list[float], list[float]]:
    (run,) = runs_of("int8_all_reduce")
    return run.train(rank, world), sys.modules["tiny"].by_samestep(run.layout, {})
