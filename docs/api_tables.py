"""The tables of docs/python-api.md, from the signatures and docstrings of what is public."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import samestep
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport

LONGEST = 24
"""The most characters of a default that are shown."""


def functions() -> str:
    """Every public function and class of `samestep`, but its errors."""
    return _table("name", ((_name(name), getattr(samestep, name)) for name in public_names()))


def errors() -> str:
    """Every public error."""
    kinds = [name for name in samestep.__all__ if _is_error(getattr(samestep, name))]
    return "\n".join(
        ["| error | when |", "| --- | --- |", *(f"| `{name}` | {_text(getattr(samestep, name))} |" for name in kinds)]
    )


def run_methods() -> str:
    """Every method and property of a run."""
    return _table("of a run", ((f"run.{name}", getattr(Run, name)) for name in public_methods()))


def report_fields() -> str:
    """Every field of a StepReport."""
    lines = ["| field | type | what it is |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | `{kind}` | {text} |" for name, kind, text in fields_of(StepReport))])


def public_names() -> list[str]:
    return [name for name in samestep.__all__ if not _is_error(getattr(samestep, name))]


def public_methods() -> list[str]:
    return [*dict.fromkeys(name for kind in Run.__mro__[:-1] for name in vars(kind) if not name.startswith("_"))]


def fields_of(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type and the text behind each field of a dataclass."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield ast.unparse(one.target), ast.unparse(one.annotation).replace("|", "\\|"), " ".join(str(text).split())


def _table(word: str, rows: Iterator[tuple[str, Any]]) -> str:
    lines = [f"| {word} | what it does |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}{_arguments(value)}` | {_text(value)} |" for name, value in rows)])


def _name(name: str) -> str:
    return f"samestep.{name}"


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _arguments(value: Any) -> str:
    """Return the names of a function's arguments with their defaults, without types."""
    if isinstance(value, property):
        return ""
    found = []
    for one in inspect.signature(value).parameters.values():
        short = one.default if len(repr(one.default)) <= LONGEST else _Dots()
        if one.name != "self":
            found.append(one.replace(annotation=inspect.Parameter.empty, default=short))
    return str(inspect.Signature(found)).replace("|", "\\|")


class _Dots:
    """A default that is not shown."""

    def __repr__(self) -> str:
        return "..."


def _text(value: Any) -> str:
    """Return the paragraphs of a docstring in front of its sections, as one line."""
    doc = inspect.getdoc(value.fget if isinstance(value, property) else value) or ""
    doc = re.split(r"\n(?:Args|Returns|Raises|Yields):\n|\n\nCollective over|\n```", doc)[0]
    return " ".join(doc.split()).replace("|", "\\|").replace("<", "&lt;")


TABLES: dict[str, Callable[[], str]] = {
    "api_functions": functions,
    "api_errors": errors,
    "api_run": run_methods,
    "api_report": report_fields,
}
