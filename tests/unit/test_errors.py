"""The tree of errors: the drawing in the head of `errors` is the classes, and the exit status follows from them."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import samestep
from samestep import cli, error_kinds, errors

ROOT = Path(__file__).parents[2]

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__ and issubclass(kind, Exception)
}


def _drawn() -> dict[str, tuple[str, ...]]:
    """Each class of the drawing with its bases: the class above it that stands further left, and what is in brackets."""
    found: dict[str, tuple[str, ...]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").split("```")[1].strip().splitlines():
        drawn = re.match(r"(?P<branch>[│├└─ ]*)(?P<name>\w+)(?: \((?P<base>\w+)\))?", line)
        assert drawn, line
        depth = len(drawn["branch"])
        above = [(left, name) for left, name in above if left < depth]
        found[drawn["name"]] = (*(name for _, name in above[-1:]), *filter(None, [drawn["base"]]))
        above.append((depth, drawn["name"]))
    return found


def test_the_drawn_tree_is_the_classes() -> None:
    assert _drawn() == {name: tuple(base.__name__ for base in kind.__bases__) for name, kind in CLASSES.items()}


def test_every_error_is_public() -> None:
    assert {name for name in samestep.__all__ if name.endswith("Error")} == set(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"SamestepError"}))
def test_the_exit_status_says_whether_the_input_or_the_run_was_at_fault(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = CLASSES[name]
    assert issubclass(kind, errors.InputError) != issubclass(kind, errors.RunError)

    def failing(_: object) -> int:
        raise kind("what happened")

    monkeypatch.setattr(cli, "_env", failing)
    assert cli.main(["env"]) == (2 if issubclass(kind, ValueError) else 1)
    slug = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()  # no rule has this text, and so it is of the class alone
    assert capsys.readouterr().err == f"samestep: what happened [{slug}]\n"


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, dict[str, str]]]:
    """The lines of the catalog, a slug that stands twice included."""
    return json.loads((Path(error_kinds.__file__).parent / error_kinds.FILE).read_text(), object_pairs_hook=_pairs)


def _pairs(found: list[tuple[str, object]]) -> object:
    return dict(found) if {name for name, _ in found} <= {"class", "text", "remedy"} else found


def test_a_slug_names_one_rule_and_every_rule_has_a_remedy(rows: list[tuple[str, dict[str, str]]]) -> None:
    slugs = [slug for slug, _ in rows]
    assert len({*slugs}) == len(slugs)
    assert [slug for slug in slugs if not re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", slug)] == []
    assert [one.slug for one in error_kinds.kinds() if not one.remedy_for(one.text).strip()] == []


def test_a_text_is_of_its_own_rule() -> None:
    """Whatever stands in its holes: no other rule takes it."""
    wrong = []
    for one in error_kinds.kinds():
        for given in ("x", "model.source = 'a; b' (c)", "3"):
            error = CLASSES[one.error]("")
            error.args = (one.text.replace(error_kinds.HOLE, given),)
            if error.slug != one.slug:
                wrong.append((one.slug, error.slug, given))
    assert wrong == []


def test_every_error_of_the_source_has_a_slug_and_stands_on_the_page(written: ModuleType) -> None:
    assert not written.update(write=False), "python docs/tables.py gives new errors their slugs"
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert [slug for slug in json.loads(written.CATALOG.read_text()) if f"`{slug}`" not in page] == []


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("error_kind_table")


def test_a_text_that_is_reworded_keeps_its_slug(
    written: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    monkeypatch.setattr(written, "ROOT", source)
    monkeypatch.setattr(written, "CATALOG", source / "kinds.json")

    def slugs_of(*lines: str) -> dict[str, str]:
        (source / "code.py").write_text("\n".join(lines))
        written._tree.cache_clear()
        written.update()
        found = json.loads(written.CATALOG.read_text())
        return {row["text"]: slug for slug, row in found.items() if row["text"] != error_kinds.HOLE}

    first = slugs_of('raise JobError(f"{key} = {value} divides nothing here; {near} works")')
    assert [*first] == ["… = … divides nothing here; … works"]
    again = slugs_of(
        'raise JobError(f"{key}={value} divides nothing at all; {near} works")', "def f():", "    return 1"
    )
    assert [*again.values()] == [*first.values()]
    other = slugs_of(
        'raise JobError(f"{key}={value} divides nothing at all; {near} works")',
        'raise DataError("no rows in this file")',
    )
    assert {*again.items()} < {*other.items()}
    told = slugs_of("def reason():", '    return f"there are no rows in {file}"', "raise DataError(reason())")
    assert "there are no rows in …" in told


@pytest.mark.parametrize(
    ("text", "kind", "remedy"),
    [
        ("tp=7 does not divide the 12 groups of a.b; tp=6 does", errors.LayoutError, "tp=6 does"),
        ("no job file at x.toml", errors.JobError, "name a file that exists"),
        ("worker 3 said\nmany lines", errors.WorkerError, "mend what the worker"),
        ("of somebody else's code", type("TheirError", (errors.DataError,), {}), "mend the data"),
    ],
)
def test_an_error_says_what_to_do(text: str, kind: type[errors.SamestepError], remedy: str) -> None:
    error = kind(text)
    assert error.kind.remedy_for(text).startswith(remedy)
    assert errors.of_words(*errors.to_words(error)).slug == error.slug  # also when it comes from another process
