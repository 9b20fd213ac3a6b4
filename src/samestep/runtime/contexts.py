"""Contexts that are classes, entered in every step: one of a generator takes the host twice as many calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class AtEnd:
    """A context at whose end a function is called; after an exception too, unless `always` is false."""

    __slots__ = ("_always", "_end")

    def __init__(self, end: Callable[[], object], *, always: bool = True) -> None:
        self._end, self._always = end, always

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._always or kind is None:
            self._end()


class Anew(AbstractContextManager[None]):
    """A context that can be entered again, as that of a recomputation is where a backward keeps its graph."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
