"""The documents: tables are what their commands print today, every example runs, and every name and command exists."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.arguments import spell_out
from samestep.cli import _parser, _split_at_script
from tests import small

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = (ROOT, ROOT / "src" / "samestep")
"""Paths in a document are below one of these, or below the document's own folder."""
WRITTEN = {".venv/bin/python", "results/single-gpu.csv", "benchmarks/rows/gpu.json"}
"""Paths that a command writes."""

STATUS = {"planted_bug.py": 1}
"""Examples that end with another status than 0: the proof fails, as it must."""

EXAMPLES = [
    pytest.param(path.name, marks=[pytest.mark.nightly] * (path.name == "planted_bug.py"))
    for path in sorted((ROOT / "examples").glob("*.py"))
]
"""By default `proof/test_verify.py` alone proves the planted bug, and its mending too."""

WORDS = {"techniques.py": ("experts", "batch-norm"), "own_plans.py": ("dp=2 tp=2 ep=2",)}
"""Arguments of examples of which one run would take long; `make parity` runs them without."""


def _run(folder: Path, path: str, *words: str, status: int = 0) -> str:
    ended, said, complaints = small.script(ROOT / path, words, folder)
    assert ended == status, said + complaints
    return said


def test_tables_are_fresh(tmp_path: Path) -> None:
    assert _run(tmp_path, "docs/tables.py", "--check") == ""


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: str, tmp_path: Path) -> None:
    assert "loss" in _run(tmp_path, f"examples/{example}", *WORDS.get(example, ()), status=STATUS.get(example, 0))


@pytest.mark.nightly
def test_own_plans_run_in_every_layout_of_the_example(tmp_path: Path) -> None:
    assert "loss" in _run(tmp_path, "examples/own_plans.py")


@pytest.mark.nightly
def test_every_technique_runs(tmp_path: Path) -> None:
    """The losses are those of one device, but for rounding in the job's precision."""
    lines = _run(tmp_path, "examples/techniques.py").splitlines()
    apart = {line.split()[0]: float(re.findall(r"at most (\S+) from", line)[0]) for line in lines}
    assert len(apart) >= 13
    assert {name: gap for name, gap in apart.items() if gap > (1e-2 if name == "mixed-precision" else 1e-5)} == {}


def _quoted(document: Path) -> set[str]:
    """Return the words of a document that stand in backticks, without its blocks of code."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {word for quoted in re.findall(r"`([^`\n]+)`", text) for word in quoted.split()}


def _named(document: Path, pattern: str) -> list[str]:
    return sorted(word for word in _quoted(document) if re.fullmatch(pattern, word))


def test_every_path_in_a_document_exists() -> None:
    for document in DOCUMENTS:
        reasons = re.findall(r"<!-- not run: (.*?) -->", document.read_text(encoding="utf-8"))
        paths = [
            *_named(document, r"[\w.-]+(/[\w.-]*)+|[\w-]+\.(py|md)"),
            *(path for reason in reasons for path in re.findall(r"tests/[\w./]*\w", reason)),
        ]
        homes = (*FOLDERS, document.parent)
        assert {path for path in paths if not any((home / path).exists() for home in homes)} <= WRITTEN, document


def test_every_link_in_a_document_leads_to_a_file_and_its_heading() -> None:
    for document in DOCUMENTS:
        links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", document.read_text(encoding="utf-8"))
        targets = [(document.parent / page if page else document, name) for page, name in links]
        wrong = [(page, name) for page, name in targets if not page.exists() or (name and name not in _headings(page))]
        assert not wrong, document


@functools.cache
def _headings(document: Path) -> set[str]:
    """Return the names under which GitHub finds the headings of a document."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_name_of_the_package_in_a_document_exists() -> None:
    for name in {name for document in DOCUMENTS for name in _named(document, r"samestep(\.\w+)+")}:
        found = importlib.import_module("samestep")
        for part in name.split(".")[1:]:
            found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")


def _commands() -> Iterator[str]:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)$(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if language not in ("", "bash", "console"):
                continue
            yield from re.findall(r"^(?:\.venv/bin/)?samestep \w.*$", block, re.MULTILINE)


def test_every_command_in_a_document_is_understood() -> None:
    parser = _parser()
    for command in set(_commands()):
        words, _, _ = command.partition(" > ")  # what a shell does with the output
        spelled = spell_out(shlex.split(words, comments=True)[1:])
        assert callable(parser.parse_args(_split_at_script(spelled)[0]).verb), command


def _techniques() -> tuple[tuple[str, str], ...]:
    sys.path.insert(0, str(ROOT / "docs"))
    return importlib.import_module("tables").TECHNIQUES


def test_every_technique_is_a_feature() -> None:
    features = " ".join((ROOT / "docs" / "features.md").read_text(encoding="utf-8").lower().split())
    assert [technique for technique, _ in _techniques() if technique.lower() not in features] == []


def _is_named_like(technique: str, file: str) -> bool:
    """Return whether a word of four letters or more of the file's name is a word of the technique, but for an ending."""
    words = re.findall(r"[a-z0-9]{4,}", technique.lower().replace("-", ""))
    of_file = re.findall(r"[a-z0-9]{4,}", Path(file).stem.replace("_", " "))
    return any(part in word or word in part for part in of_file for word in words)


def test_the_first_file_of_a_technique_is_named_like_it() -> None:
    assert [
        (name, files.split()[0]) for name, files in _techniques() if not _is_named_like(name, files.split()[0])
    ] == []
    assert not _is_named_like("gradient accumulation", "strategies/shard.py")
    assert not _is_named_like("watching", "runtime/guards/canary.py")


def test_the_rooms_of_the_architecture_are_the_packages() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "samestep").glob("*/__init__.py")}
    assert packages - {*re.findall(r"`(\w+)/`", text)} == set()
