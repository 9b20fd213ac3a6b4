"""One meaning a word: class names and file names are used once, packages say what they hold, the glossary names what exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.program.ranks import Ranks

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "samestep"
Trees = dict[Path, ast.Module]
TWINS = (Path("strategies"), Path("runtime/axes"))
"""Folders of which files of one name are two sides of one strategy: what it says, and what torch does."""
EVERY_AXIS = Layout("dp_replicate=2 dp_shard=2 cp=2 tp=2 pp=2 ep=2")


@pytest.fixture(scope="module")
def trees() -> Trees:
    """The source, parsed; millions of objects, which no later test need keep."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def defined(tree: ast.Module) -> set[str]:
    """Return the names of classes, functions, fields and constants of a file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def exists(name: str, names: set[str]) -> bool:
    """Return whether a name in code font is among those that the source defines, an axis or a layout word, or a file."""
    if name in names or name in Ranks.of(EVERY_AXIS).axes or (ROOT / name).is_file():
        return True
    try:
        Layout(name)
    except LayoutError:
        return False
    return True


def test_a_class_name_has_one_meaning(trees: Trees) -> None:
    homes = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_file_name_has_one_meaning(trees: Trees) -> None:
    homes = defaultdict(list)
    for path in trees:
        if not path.stem.startswith("__"):
            homes[path.stem].append(path.parent)
    assert {stem: folders for stem, folders in homes.items() if len(folders) > 1 and {*folders} != {*TWINS}} == {}


@pytest.mark.parametrize(
    "package", sorted(str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("__init__.py"))
)
def test_a_package_says_what_it_holds(package: str, trees: Trees) -> None:
    assert ast.get_docstring(trees[Path(package, "__init__.py")])


def test_the_names_of_the_glossary_exist(trees: Trees) -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    names = sorted({*re.findall(r"`([^`\n]+)`", text)})
    assert len(names) > 50
    of_source = set[str]().union(*map(defined, trees.values()))
    assert [name for name in names if not exists(name, of_source)] == []
    assert not exists("StepSpecification", of_source)  # what was renamed is found


def test_a_noun_of_the_glossary_is_defined_once() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!noun |---)([^|]+) \|", text, re.MULTILINE)
    nouns = [noun.strip() for row in rows for noun in row.split(",")]
    assert sorted(nouns) == sorted({*nouns})
    assert {"dispatch", "boundary", "replicated", "predicted", "exposed", "bubble"} <= {*nouns}
