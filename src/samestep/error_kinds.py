"""Kinds of errors: each rule by which samestep refuses, or a run fails, has a slug that stays when its text is reworded.

`error_kinds.json` holds a line for each kind: its slug, the class of the error, and its text with `…` where it says what was given.
An error is of the kind whose text it has; of several, of the one with the most letters of its own. The file is read only once an
error is shown. `docs/error_kind_table.py` keeps it, and docs/reference/errors.md lists it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

FILE = "error_kinds.json"
HOLE = "…"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """A rule by which something is refused or fails."""

    slug: str
    error: str
    """The name of the class, one of `samestep.errors`."""
    text: str
    """The text, with `…` for each part that differs from case to case."""
    remedy: str
    """What to do about it, where the text does not end with that."""

    @property
    def weight(self) -> int:
        """The number of characters that its text always has."""
        return len(self.text) - self.text.count(HOLE)

    def has(self, text: str) -> bool:
        """Return whether a text is of this kind."""
        first, *others = self.text.split(HOLE)
        if not others:
            return text == first
        *middle, last = others
        if not text.startswith(first):
            return False
        place = len(first)
        for part in middle:
            place = text.find(part, place)
            if place < 0:
                return False
            place += len(part)
        return text.endswith(last) and place <= len(text) - len(last)

    def remedy_for(self, text: str) -> str:
        """Return the remedy for an error of this kind: that of the kind, else the last clause of the error's text, else that of its class."""
        if self.remedy:
            return self.remedy
        for mark in ("; ", ": "):
            rule, _, works = text.rpartition(mark)
            if rule and works:
                return works
        general = (one.remedy for one in kinds() if one.error == self.error and one.text == HOLE)
        return next(general, "") or text


@cache
def kinds() -> tuple[ErrorKind, ...]:
    """Return all kinds."""
    rows = json.loads((files("samestep") / FILE).read_text(encoding="utf-8"))
    return tuple(ErrorKind(slug, row["class"], row["text"], row.get("remedy", "")) for slug, row in rows.items())


def kind_of(classes: Collection[str], text: str) -> ErrorKind:
    """Return the kind of an error, by the names of its classes, the most special one first, and its text."""
    order = [*classes]
    able = [one for one in kinds() if one.error in order and (one.has(text) or one.has(text.partition("\n")[0]))]
    return max(able, key=lambda one: (one.weight, -order.index(one.error)))
