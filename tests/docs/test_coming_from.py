"""docs/coming-from.md: each difference, applied, is a script that trains, and what it replaces is Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import small

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def blocks(language: str, page: Path = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def side(difference: str, sign: str) -> str:
    return "".join(line[1:] for line in difference.splitlines(keepends=True) if line[0] in (" ", sign))


def test_there_is_one_difference_for_each_trainer() -> None:
    headings = re.findall(r"^## From (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["DataParallel", "DDP", "FSDP2", "Accelerate", "Trainer"]
    assert len(blocks("diff")) == len(headings)


@pytest.mark.parametrize("index", range(5))
def test_what_comes_instead_trains(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    difference = blocks("diff")[index]
    ast.parse(side(difference, "-"))
    assert losses(side(difference, "+"), tmp_path, monkeypatch)


def losses(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the numbers that rank 0 of a script prints beside `my_project.py`."""
    (tmp_path / "my_project.py").write_text(blocks("python")[0], encoding="utf-8")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    status, said, complaints = small.script(tmp_path / "script.py", (), tmp_path / "said")
    assert status == 0, said + complaints
    return re.findall(r"\d\.\d+", small.of_rank_0(said))


def test_the_recipe_of_freezing_freezes_and_thaws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = blocks("python")[1]
    assert "batch.step >= 2" in recipe
    found = {
        rule: losses(recipe.replace("batch.step >= 2", rule), tmp_path, monkeypatch)
        for rule in ("batch.step >= 2", "False")
    }
    assert found["batch.step >= 2"][:3] == found["False"][:3]
    assert found["batch.step >= 2"][3:] != found["False"][3:]


SCRIPTS = [text for text in blocks("python", PAGE.with_name("optimizers.md")) if "samestep.launch" in text]


@pytest.mark.parametrize("index", range(len(SCRIPTS)))
def test_scripts_that_take_steps_in_parts_train(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(losses(SCRIPTS[index], tmp_path, monkeypatch)) >= 4
