"""Mistakes in the tables of a job as text: the origin, the key, what was given, and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from samestep.errors import did_you_mean, short_repr

_REMOVED = {
    'compression = "fp16"': 'compression = "bf16"',
    'compression = "int4"': 'compression = "int8"',
    'compression = "topk"': 'compression = "int8" or "powersgd"',
    'compile = "model"': 'compile = "blocks"',
    'compile_mode = "reduce-overhead"': 'compile_mode = "default"',
    'compile_mode = "max-autotune"': 'compile_mode = "max-autotune-no-cudagraphs"',
}
"""Words that jobs of earlier versions may have, and what to use in their place."""


def mistakes_in(error: ValidationError, source: Callable[[str], str], table: type[BaseModel]) -> tuple[str, str]:
    """Return the code of the first mistake in nested tables, and all mistakes, one a line: the origin, the key, what was given and what would be right."""
    lines, codes = [], []
    for mistake in error.errors(include_url=False):
        path = [str(part) for part in mistake["loc"]]
        key = ".".join(path)
        word = f'{path[-1]} = "{mistake["input"]}"' if path and isinstance(mistake["input"], str) else ""
        if (instead := _REMOVED.get(word)) is not None:
            code, text = "job-value-removed", f"{word} was removed in this version; use {instead}"
        elif mistake["type"] == "extra_forbidden":
            known = _keys_of(path[:-1], table)
            hint = did_you_mean(path[-1], known)
            code, text = "job-key-unknown", f"unknown key{hint}; the keys here are {', '.join(known)}"
        elif mistake["type"] == "value_error":
            code, text = mistake["ctx"]["error"].code, str(mistake["ctx"]["error"])
        else:
            code, text = (
                "job-value",
                f"{mistake['msg'][0].lower()}{mistake['msg'][1:]}, got {short_repr(mistake['input'])}",
            )
        codes.append(code)
        lines.append(f"{source(key)}: {key}: {text}" if key else f"{source(key)}: {text}")
    return codes[0], "\n".join(lines)


def _keys_of(path: Sequence[str], root: type[BaseModel]) -> list[str]:
    """Return the names of the keys of the table at `path`."""
    table: Any = root
    for part in (part for part in path if not part.isdecimal()):  # an entry of an array of tables
        field = table.model_fields.get(part)
        kinds = types_in(field.annotation) if field else ()
        table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            return []
    return list(table.model_fields)


def types_in(kind: Any) -> Iterator[Any]:
    """Yield a type and, recursively, its type arguments."""
    yield kind
    for part in get_args(kind):
        yield from types_in(part)
