"""A JSON object that is read as a stream, and an array in it item by item: a trace has gigabytes, of which little is needed.

The text is read in parts. A value that ends with the text read so far is decoded again with the next part, since it may go on;
and so is a number before `.` or `e`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json import JSONDecodeError
from typing import Any, TextIO

_PART = 1 << 20
"""Characters of a part; as many as are left of a value that does not end in one."""
_SPACE = " \t\n\r"
_OF_NUMBERS = ".eE+-0123456789"


def read_members(file: TextIO, array: str, take: Callable[[Any], None]) -> dict[str, Any]:
    """Return the members of an object; items of its member `array` are given to `take`, and that is an empty list.

    What is no object has no members.

    Raises:
        JSONDecodeError: the text is no JSON, or ends too early.
    """
    text = _Text(file)
    if text.next() != "{":
        text.value()
        return {}
    found: dict[str, Any] = {}
    for name in text.items("{", "}"):
        text.expect(":")
        if name == array and text.next() == "[":
            found[name] = []
            for item in text.items("[", "]"):
                take(item)
        else:
            found[name] = text.value()
    return found


class _Text:
    """The text of a file, as far as it has been read and not been decoded."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at = file, "", 0
        self._decode = json.JSONDecoder().raw_decode

    def _read(self) -> bool:
        """Read another part; return whether there was one."""
        left = self._text[self._at :]
        part = self._file.read(max(_PART, len(left)))
        self._text, self._at = left + part, 0
        return bool(part)

    def next(self) -> str:
        """Return the next character that is no space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._read():
                return ""

    def expect(self, mark: str) -> None:
        """Pass a character.

        Raises:
            JSONDecodeError: another one is next.
        """
        if self.next() != mark:
            raise JSONDecodeError(f"Expecting {mark!r}", self._text, self._at)
        self._at += 1

    def items(self, begin: str, end: str) -> Any:
        """Yield the items of an array, or the names of an object, whose values the caller reads."""
        self.expect(begin)
        while self.next() != end:
            yield self.value()
            if self.next() != end:
                self.expect(",")
        self.expect(end)

    def value(self) -> Any:
        """Return the next value.

        Raises:
            JSONDecodeError: there is none.
        """
        self.next()
        while True:
            try:
                found, end = self._decode(self._text, self._at)
            except JSONDecodeError:
                if not self._read():
                    raise
                continue
            may_go_on = end == len(self._text) or self._text[end] in _OF_NUMBERS
            if not (may_go_on and self._read()):
                self._at = end
                return found
