"""docs/python-api.md has everything that is public: functions, methods of a run, fields of a report; its examples run."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "python-api.md").read_text(encoding="utf-8")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS)
    yield importlib.import_module("api_tables")
    sys.modules.pop("api_tables", None)


def test_nothing_public_is_missing() -> None:
    shown = set(re.findall(r"^\| `(?:samestep\.|run\.)?(\w+)", TEXT, re.MULTILINE))
    methods = {name for name in vars(Run) if not name.startswith("_")}
    fields = {field.name for field in dataclasses.fields(StepReport)}
    assert not (set(samestep.__all__) | methods | fields) - shown


def test_every_row_says_what_it_is(tables: Any) -> None:
    for table in tables.TABLES.values():
        for line in table().splitlines()[2:]:
            *_, text = re.split(r"(?<!\\) \| ", line.removesuffix(" |"))
            assert re.match(r"[A-Z`].*\w", text), line


def test_fields_have_the_types_of_the_report(tables: Any) -> None:
    found = {name: kind for name, kind, _ in tables.fields_of(StepReport)}
    assert found["loss"] == "float"
    assert found["reserved_bytes"] == r"int \| None"
