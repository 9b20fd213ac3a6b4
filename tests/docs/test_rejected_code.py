"""docs/rejected-code.md: each quoted error stands in the source, what is crossed out is refused with it, and what comes instead trains."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.errors import InputError
from tests.docs.test_coming_from import side

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rejected-code.md").read_text(encoding="utf-8")
SCRIPT = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
REFUSALS = re.findall(r"^`([^`\n]+)`\n(?:(?!^`)[^\n]*\n)*^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
"""Each error with the lines that meet it and mend it."""
TABLE = re.findall(r"^\| (`.*?`) \| ", PAGE.partition("## Layouts, jobs and resumes")[2], re.MULTILINE)
QUOTED = [error for error, _ in REFUSALS] + [error for row in TABLE for error in re.findall(r"`([^`]+)`", row)]


def _texts() -> Iterator[str]:
    """Yield every text in the source, with a line break in the place of each value that it is filled with."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)


@pytest.fixture(scope="module")
def texts() -> str:
    return "\n".join(_texts())


def missing(error: str, texts: str) -> list[str]:
    """Return the parts of an error, between its elided values, that stand in no text."""
    return [part for part in error.split("...") if part.strip(" ,:;") and part.strip() not in texts]


def test_there_are_twenty_refusals_or_more() -> None:
    assert len(REFUSALS) >= 16
    assert len(QUOTED) >= 20
    assert PAGE.count("\n### ") == len(REFUSALS) == PAGE.count("```diff")


@pytest.mark.parametrize("error", QUOTED)
def test_a_quoted_error_stands_in_the_source(error: str, texts: str) -> None:
    assert missing(error, texts) == []


def test_words_that_no_error_has_are_found(texts: str) -> None:
    assert missing("the loss ... gave back ...", texts) == [" gave back "]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(len(REFUSALS)))
def test_the_code_is_refused_with_this_error_and_mended(index: int) -> None:
    error, difference = REFUSALS[index]
    with pytest.raises(InputError, match=".*".join(map(re.escape, error.split("...")))):
        _run(difference, "-")
    _run(difference, "+")


def _run(difference: str, sign: str) -> None:
    """Run the page's script with the lines of one side."""
    exec(compile(f"{SCRIPT}\n{side(difference, sign)}\ntrain()\n", "rejected-code.md", "exec"), {"__name__": "page"})
