"""docs/ports.md: each difference is a plain loop on one side and its port on two ranks on the other, and both print the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import small
from tests.docs.test_coming_from import side

PAGE = Path(__file__).parents[2] / "docs" / "ports.md"
KINDS = re.findall(r"^## ([^\n]+)\n.*?^```diff\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def numbers(script: str, folder: Path) -> list[float]:
    """Return the numbers that a script says beside `my_project.py`."""
    project = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert project is not None
    (folder / "my_project.py").write_text(project[1], encoding="utf-8")
    (folder / "script.py").write_text(script, encoding="utf-8")
    status, said, complaints = small.script(folder / "script.py", (), folder / "said")
    assert status == 0, said + complaints
    lines = [line for line in said.splitlines() if re.fullmatch(r"[-\d. e]+", line)]
    return [float(word) for line in lines for word in line.split()]


def test_every_kind_that_a_review_found_impossible_is_there() -> None:
    assert len(KINDS) >= 18


@pytest.mark.parametrize(("title", "difference"), [pytest.param(*kind, id=kind[0]) for kind in KINDS])
def test_both_sides_print_the_same(
    title: str, difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ported = numbers(side(difference, "+"), tmp_path)
    assert len(ported) >= 4
    if title != "Denoising diffusion":  # which draws other numbers
        one = sorted(set(ported))
        assert one == pytest.approx(sorted(set(numbers(side(difference, "-"), tmp_path))), rel=1e-9)
