"""The charts of the documents are drawn from the data of today, and every picture is used and has a text in its place."""

from __future__ import annotations

import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests import small

ROOT = Path(__file__).parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_charts_are_fresh(tmp_path: Path) -> None:
    status, said, complaints = small.script(ROOT / "docs" / "pictures.py", ["--check"], tmp_path)
    assert (status, said.strip()) == (0, ""), complaints


@pytest.mark.parametrize("path", [path for path in PICTURES if path.suffix == ".svg"], ids=lambda path: path.name)
def test_a_chart_is_well_formed_and_loads_nothing(path: Path) -> None:
    root = xml.etree.ElementTree.parse(path).getroot()
    assert [one.text for one in root if one.tag.endswith("title")]
    assert not re.search(r"(href|src)=", path.read_text(encoding="utf-8"))


def test_every_picture_is_shown_with_a_text() -> None:
    shown = [
        found for page in PAGES for found in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", page.read_text(encoding="utf-8"))
    ]
    assert {Path(path).name for _, path in shown} == {path.name for path in PICTURES}
    assert all(len(words) > 20 for words, _ in shown)
