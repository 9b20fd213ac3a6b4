"""The public texts follow the rules of CONTRIBUTING.md, as far as docs/plain_english.py can tell."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def english() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("plain_english")


def test_no_public_text_has_a_listed_word_or_long_sentences(english: Any) -> None:
    assert english.refused() == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Where that is slow, wait.", "R1"),
        ("It says what is missing.", "R2"),
        ("The models of which one is the run's.", "R3"),
        ("pp=1 works, and so does tp=1.", "R4"),
        ("x = 3 is no number.", "R6"),
        ("It is seldom slower.", "R8"),
        ("Each verb has a page.", "words"),
    ],
)
def test_a_text_that_breaks_a_rule_is_found(text: str, rule: str, english: Any) -> None:
    (fault,) = english.faults(english.of_page(f"# Title\n\n{text}\n"))
    assert f"({rule};" in fault


@pytest.mark.parametrize("surface", ["errors", "messages"])
@pytest.mark.parametrize("text", ["tp=1 works", "a smaller batch works, or tp=2", "one version on all hosts works."])
def test_a_remedy_says_use_or_set(text: str, surface: str, english: Any) -> None:
    (fault,) = english.faults([("here", text)], surface)
    assert "(R5;" in fault


@pytest.mark.parametrize("text", ["Use `is no table` here.", "# What is rejected", "```\nseldom\n```", "What is it?"])
def test_code_and_headings_are_left_out(text: str, english: Any) -> None:
    assert english.faults(english.of_page(f"{text}\n")) == []


def test_long_sentences_are_counted(english: Any) -> None:
    text = "One two three four five. " + "Word " + "word " * 29 + "end.\n"
    assert english.mean_words(english.of_page(text)) == pytest.approx((5 + 31) / 2)
