"""docs/your-first-hour.md: its files, its commands in their order, and what they print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests import small

pytestmark = pytest.mark.usefixtures("nothing_is_left_running")
PAGE = (Path(__file__).parents[2] / "docs" / "your-first-hour.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = dict(re.findall(r"\*\*([\w.]+)\*\*(?:(?!^```).)*?^```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for language, text in BLOCKS:
        if language == "diff":
            _mend(tmp_path / "first.py", text)
        elif not language:
            command, *lines = text.splitlines()
            said = _said(shlex.split(command)[1:], tmp_path / "said")
            assert [line for line in lines if not _is_said(line, said)] == [], said


def test_the_page_has_its_three_files_and_eight_commands() -> None:
    assert [*FILES] == ["first.py", "first.toml", "crash.py"]
    assert len([text for language, text in BLOCKS if not language]) == 8


def _mend(path: Path, difference: str) -> None:
    (old,), (new,) = ([line[1:] for line in difference.splitlines() if line[0] == sign] for sign in "-+")
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def _said(words: list[str], folder: Path) -> str:
    small.status_of(small.in_background(words, folder), 300.0)
    return (folder / "out").read_text(encoding="utf-8") + (folder / "err").read_text(encoding="utf-8")


def _is_said(line: str, said: str) -> bool:
    return re.search("^" + ".*".join(map(re.escape, line.split("..."))) + "$", said, re.MULTILINE) is not None
