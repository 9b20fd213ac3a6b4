"""Lists the errors of the source by their codes, and writes the table of docs/reference/errors.md.

An error is made with its code and its text: `LayoutError("tp-indivisible", f"tp={tp} does not divide ...")`. A code stands where
the error is made, as a constant; an error that carries on another one's text has that one's code (`error.code`). `benchmarks/ratchet.py`
counts the codes, and docs/plain_english.py reads the texts.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent / "src" / "samestep"
HOLE = "…"
_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_BY_NAME = {
    "error": "InputError",
    "_error": "InputError",
    "kind": "SamestepError",
    "waived": "UnprovenError",
    "add": "UnprovenError",
}
"""Functions that are given a code and a text, and the class of the errors that they make."""
_MAKERS = (ast.ClassDef, ast.Call, ast.Assign)
"""The parts of a syntax tree that make errors."""


class Site(NamedTuple):
    """A place in the source that makes an error."""

    code: str
    error: str
    """The name of the public class."""
    text: str
    """The text, with `…` for each part that differs from case to case."""
    raised_in: str
    """The file below `src/samestep`."""


def sites(texts: Mapping[Path, str]) -> list[Site]:
    """Return the places of source files, by their paths in `src/samestep`, that make errors with codes."""
    nodes = {
        path.as_posix(): [node for node in ast.walk(ast.parse(text)) if isinstance(node, _MAKERS)]
        for path, text in texts.items()
    }
    bases = {
        node.name: node.bases[0].id
        for node in itertools.chain(*nodes.values())
        if isinstance(node, ast.ClassDef) and node.bases and isinstance(node.bases[0], ast.Name)
    }
    public = {
        node.name: ast.get_docstring(node)
        for node in ast.parse(texts[Path("errors.py")]).body
        if isinstance(node, ast.ClassDef)
    }
    return sorted({Site(*site, path) for path, of_file in nodes.items() for site in _of_nodes(of_file, bases, public)})


@functools.cache
def source() -> list[Site]:
    """Return the places of this checkout, which are looked for once in a process."""
    return sites({path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")})


def _of_nodes(
    nodes: Iterable[ast.AST], bases: Mapping[str, str], public: Mapping[str, object]
) -> Iterator[tuple[str, str, str]]:
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name in bases and _public_name(node.name, bases, public) in public:
            within = [
                one
                for one in ast.walk(node)
                if isinstance(one, ast.Call) and ast.unparse(one.func) == "super().__init__"
            ]
            yield from (site for one in within for site in _of_call(one.args, node.name, bases, public))
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            arguments = node.args[1:] if name in ("waived", "add") else node.args
            yield from _of_call(arguments, _BY_NAME.get(name, name), bases, public)
        elif isinstance(node, ast.Assign) and [
            getattr(name, "id", "") for name in getattr(node.targets[0], "elts", ())
        ] == ["code", "text"]:
            yield from _of_call(getattr(node.value, "elts", []), "JobError", bases, public)


def _public_name(name: str, bases: Mapping[str, str], public: Mapping[str, object]) -> str:
    """Return the name of the public class of an error, or of the last base of a class that is no error."""
    while name not in public and name in bases:
        name = bases[name]
    return name


def _of_call(
    arguments: list[ast.expr], name: str, bases: Mapping[str, str], public: Mapping[str, object]
) -> Iterator[tuple[str, str, str]]:
    """Yield code, class and text of a call that makes an error of a public class, or of one below it."""
    name = _public_name(name, bases, public)
    code = arguments[0] if arguments else None
    if name in public and len(arguments) > 1 and isinstance(code, ast.Constant) and _CODE.fullmatch(str(code.value)):
        yield str(code.value), name, re.sub(f"{HOLE}+", HOLE, text_of(arguments[1]))


def text_of(node: ast.expr) -> str:
    """Return the text that an expression makes, with a hole for each part that is not known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return HOLE


def table() -> str:
    """Return the codes as tables, one for each class: the code, the texts, and the files that raise them."""
    found = source()
    classes = [
        node
        for node in ast.parse((ROOT / "errors.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    lines: list[str] = []
    anchors = set[str]()
    for node in classes:
        codes: dict[str, list[Site]] = {}
        for site in found:
            if site.error == node.name:
                codes.setdefault(site.code, []).append(site)
        if not codes:
            continue
        about = (ast.get_docstring(node) or "").partition("\n")[0]
        lines += [f"\n### {node.name}\n", about, "", "| code | text | raised in |", "| --- | --- | --- |"]
        for code, raised in codes.items():
            anchor = "" if code in anchors else f'<a id="{code}"></a>'
            anchors.add(code)
            texts = dict.fromkeys(_cell(site.text) for site in raised)
            files = dict.fromkeys(f"`{site.raised_in}`" for site in raised)
            lines.append(f"| {anchor}`{code}` | {'<br>'.join(texts)} | {'<br>'.join(sorted(files))} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
