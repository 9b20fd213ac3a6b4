"""Finds every kind of error in the source, keeps `src/samestep/error_kinds.json`, and writes the table of docs/reference/errors.md.

A kind is a text with `…` where it says what was given. A new text gets a slug of its first words, once; a text that is reworded
keeps its slug, which is the one of the most similar text that is gone. So nothing has to be written by hand, and what is, a better
slug or a remedy, stays. `python docs/tables.py` calls `update`, and `tests/docs` fails where it has not been called.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from samestep import error_kinds, errors
from samestep.error_kinds import HOLE

ROOT = Path(__file__).parent.parent / "src" / "samestep"
CATALOG = ROOT / error_kinds.FILE
CLASSES = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.SamestepError)
}
REASONS = {
    "strategies": "LayoutError",
    "job.py": "JobError",
    "job_rules.py": "JobError",
    "job_tables.py": "JobError",
    "optimizer_tables.py": "JobError",
    "program/reduce_ways.py": "LayoutError",
}
"""Files and rooms whose functions return reasons, with which another file raises an error of this class."""
LEAST_LETTERS = 7
"""A text with fewer letters of its own has no kind but that of its class."""
ALIKE = 0.6
"""The similarity from which on a text counts as another one, reworded."""
_DROPPED = frozenset(
    re.split(
        " ",
        "a an the is are was were be been it its of to in on at by for and or as with that this which so has have had their they them "
        "these those there what where who one ones other others each given does do such from than but if then here",
    )
)


@cache
def _tree(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            child.parent = parent  # type: ignore[attr-defined]
    return tree


def _text(node: ast.expr) -> str:
    """Return the text that an expression makes, with a hole for each part that is not known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return HOLE


def _texts(node: ast.expr, path: Path, depth: int = 3) -> Iterator[str]:
    """Yield every text that an expression may make, by the variables and functions of its file that it names."""
    if isinstance(node, ast.IfExp):
        yield from _texts(node.body, path, depth)
        yield from _texts(node.orelse, path, depth)
        return
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _texts(value, path, depth)
        return
    text = _text(node)
    if _letters(text) >= LEAST_LETTERS:
        yield _closed(text)
    elif depth and isinstance(node, ast.Name):
        for value in _assigned(node, path):
            yield from _texts(value, path, depth - 1)
    elif depth and isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for function in ast.walk(_tree(path)):
            if isinstance(function, ast.FunctionDef) and function.name == name:
                for one in ast.walk(function):
                    if isinstance(one, ast.Return) and one.value is not None:
                        yield from _texts(one.value, path, depth - 1)


def _closed(text: str) -> str:
    return re.sub(f"{HOLE}+", HOLE, text)


def _letters(text: str) -> int:
    return sum(one.isalpha() for one in text)


def _assigned(name: ast.Name, path: Path) -> Iterator[ast.expr]:
    """Yield the values that are given to a variable: in the function around it, or else at the top of the file."""
    scope: ast.AST = name
    while not isinstance(scope, ast.FunctionDef | ast.Module):
        scope = scope.parent  # type: ignore[attr-defined]
    for within in (scope, _tree(path)):
        found = [
            one.value
            for one in ast.walk(within)
            if isinstance(one, ast.Assign | ast.AnnAssign | ast.NamedExpr)
            and one.value is not None
            and any(getattr(target, "id", "") == name.id for target in getattr(one, "targets", [getattr(one, "target", None)]))
        ]  # fmt: skip
        if found:
            yield from found
            return


def found() -> set[tuple[str, str]]:
    """Return the class and the text of every kind of error in the source, the general kind of each class among them."""
    kinds = {(name, HOLE) for name in CLASSES}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(_tree(path)):
            kinds |= set(_kinds_at(node, path))
    return kinds


def _kinds_at(node: ast.AST, path: Path) -> Iterator[tuple[str, str]]:
    place = path.relative_to(ROOT)
    room = place.parts[0] if place.parts[0] in REASONS else place.as_posix()
    if isinstance(node, ast.Call) and node.args:
        name = getattr(node.func, "id", "")
        if name in ("error", "kind") and path.name in ("errors.py", "imported.py", "messages.py", "skipped_steps.py"):
            name = "InputError" if path.name in ("errors.py", "imported.py") else "SamestepError"
        if name == "ValueError" and room in REASONS:
            yield from ((REASONS[room], _closed(HOLE + text)) for text in _texts(node.args[0], path))
        if name == "ArgumentTypeError":  # of which argparse makes the middle of a text
            yield from (("InputError", _closed(HOLE + text + HOLE)) for text in _texts(node.args[0], path))
        if name in CLASSES:
            more = HOLE if name == "UnprovenError" and len(node.args) > 1 else ""
            yield from ((name, _closed(text + more)) for text in _texts(node.args[0], path))
    is_text = isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] == ["text"]
    if (is_text or isinstance(node, ast.Return | ast.Yield)) and node.value is not None and room in REASONS:
        before = HOLE if REASONS[room] == "JobError" else ""
        for text in _texts(node.value, path, 0):
            if text.count(" ") >= 4 and text[0] not in "\n#":
                yield REASONS[room], _closed(before + text)


def update(*, write: bool = True) -> bool:
    """Bring the catalog up to the source; return whether it was behind."""
    old: dict[str, dict[str, str]] = json.loads(CATALOG.read_text(encoding="utf-8")) if CATALOG.exists() else {}
    slug_of = {(row["class"], row["text"]): slug for slug, row in old.items()}
    now = found()
    gone = {key: slug for key, slug in slug_of.items() if key not in now}
    kept = {slug: old[slug] for key, slug in slug_of.items() if key in now}
    for kind, text in sorted(now - slug_of.keys()):
        near = difflib.get_close_matches(text, [one for name, one in gone if name == kind], 1, ALIKE)
        slug = gone.pop((kind, near[0])) if near else _new_slug(kind, text, kept.keys() | old.keys())
        kept[slug] = {**old.get(slug, {}), "class": kind, "text": text}
    lines = ",\n".join(f"{json.dumps(slug)}: {json.dumps(kept[slug], ensure_ascii=False)}" for slug in sorted(kept))
    text = f"{{\n{lines}\n}}\n"
    is_behind = not CATALOG.exists() or text != CATALOG.read_text(encoding="utf-8")
    if is_behind and write:
        CATALOG.write_text(text, encoding="utf-8")
    return is_behind


def _new_slug(kind: str, text: str, taken: set[str]) -> str:
    """Return the first telling words of a text, as many as make it unlike all others."""
    if text == HOLE:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind).lower()
    words = re.findall(r"[a-z0-9]+(?:[_.'-][a-z0-9]+)*", text.replace(HOLE, " , ").lower())
    words = [re.sub(r"[^a-z0-9]+", "-", word) for word in words if word not in _DROPPED and len(word) > 1]
    for count in (*range(min(4, len(words)), len(words) + 1),):
        if (slug := "-".join(words[:count])) not in taken and slug:
            return slug
    slug = "-".join([kind.removesuffix("Error").lower(), *words[:4]])
    if slug not in taken:
        return slug
    return next(name for number in range(2, 99) if (name := f"{slug}-{number}") not in taken)


def table() -> str:
    """Return the kinds as tables, one for each class: the slug, the text, and what to do."""
    lines: list[str] = []
    kinds = error_kinds.kinds()
    for name in sorted({one.error for one in kinds}, key=list(vars(errors)).index):
        about = (vars(errors)[name].__doc__ or "").partition("\n")[0]
        lines += [f"\n### {name}\n", about, "", "| slug | text | remedy |", "| --- | --- | --- |"]
        for one in sorted((one for one in kinds if one.error == name), key=lambda one: one.slug):
            cells = [f'<a id="{one.slug}"></a>`{one.slug}`', *map(_cell, (one.text, one.remedy_for(one.text)))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
