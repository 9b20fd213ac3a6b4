"""A model's spec as JSON text, and back: every field is read as the type that its class declares."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from pydantic import TypeAdapter

from samestep.models.spec import ModelSpec

FORMAT_VERSION = 20


def to_json(model: ModelSpec) -> str:
    """Return a spec as JSON, with its format version."""
    return json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(model)})


def from_json(text: str) -> ModelSpec:
    """Return the spec that `to_json` wrote.

    Raises:
        ValueError: the text is of another format version, or a field has another type.
    """
    fields: dict[str, Any] = json.loads(text)
    version = fields.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(f"a model spec of format {version}; this version reads {FORMAT_VERSION}")
    return _reader().validate_python(fields)


@functools.cache
def _reader() -> TypeAdapter[ModelSpec]:
    return TypeAdapter(ModelSpec)
