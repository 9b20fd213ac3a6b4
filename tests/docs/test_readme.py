"""README.md: its diff is two scripts that train, its commands run, and each prints what stands below it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests import small
from tests.docs.test_coming_from import side

pytestmark = pytest.mark.usefixtures("nothing_is_left_running")
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
DIFF = re.findall(r"^```diff\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHOWN = re.findall(r"^\$ (.*)\n((?:(?!\$ |```).*\n)*)", README, re.MULTILINE)
"""Each command of the blocks of a console, with the lines below it."""
ELSEWHERE = {"pip install '.[hf]'": "unit/test_wheel.py", "make train": "unit/test_cli.py", "make test": ".ci/run"}
"""Commands of the block that installs, and what runs them."""
SMALL = 1e-9
"""Errors in float64 that are below this one are equal."""


@pytest.mark.parametrize(("command", "lines"), [pytest.param(*one, id=one[0].split("#")[0].strip()) for one in SHOWN])
def test_a_command_prints_what_the_readme_shows(
    command: str, lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)
    printed = _printed(words, tmp_path)
    assert [line for line in lines.splitlines() if not any(_is_like(line, one) for one in printed)] == [], printed


def _printed(words: list[str], folder: Path) -> list[str]:
    """Run a command, and return the lines that it prints."""
    if words[0] == "samestep":
        status = small.status_of(small.in_background(words[1:], folder / "said"), 300.0)
    else:
        for name, sign in (("plain.py", "-"), ("train.py", "+")):
            (folder / name).write_text(side(DIFF[0], sign), encoding="utf-8")
        status, *_ = small.script(folder / words[1], words[2:], folder / "said")
    said = (folder / "said" / "out").read_text(encoding="utf-8", errors="replace")
    assert status == 0, said + (folder / "said" / "err").read_text(encoding="utf-8")
    return said.splitlines()


def _is_like(shown: str, printed: str) -> bool:
    """Return whether a line is the one that is shown, but for roundings, and for what stands as three dots."""
    number = r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?"
    texts = [re.escape(text) for text in re.split(number, shown)]
    found = re.fullmatch(f"({number})".join(texts).replace(re.escape("..."), ".*"), printed)
    if found is None:
        return False
    pairs = zip(re.findall(number, shown), found.groups(), strict=True)
    return all(_are_equal(float(one.replace(",", "")), float(other.replace(",", ""))) for one, other in pairs)


def _are_equal(shown: float, printed: float) -> bool:
    return abs(shown - printed) <= 1e-4 * abs(shown) or max(abs(shown), abs(printed)) <= SMALL


def test_lines_that_differ_are_found() -> None:
    assert _is_like("step 32: loss 0.98918", "step 32: loss 0.98919")
    assert not _is_like("step 32: loss 0.98918", "step 32: loss 0.97918")
    assert not _is_like("step 32: loss 0.98918", "step 31: loss 0.98918")
    assert _is_like("  ok  error 1e-15 of 1e-09 ...", "  ok  error 0.0e+00 of 1.0e-09 allowed")


def test_every_command_runs_here_or_elsewhere() -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"diff", "console", "bash"}
    others = [
        line.split("#")[0].strip() for language, text in blocks if language == "bash" for line in text.splitlines()
    ]
    assert set(others) == set(ELSEWHERE)
    assert len(SHOWN) >= 8


def test_the_readme_fits_on_its_pages() -> None:
    assert len(README.splitlines()) <= 140
