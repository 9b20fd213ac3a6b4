"""Lists and dictionaries that a module is given and changes: an auxiliary loss that is appended, keys and values that are kept.

A change is written down as plain data, so that it can be made again where the module does not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Container = dict[Any, Any] | list[Any]


@dataclass(frozen=True, slots=True)
class Change:
    """The change that a module has made to one container among its arguments."""

    place: int
    """Number of the container, in the order of `containers_in`."""
    keys: tuple[Any, ...]
    """The keys that a dictionary has then, or the indices of a list."""
    items: dict[Any, Any]
    """The values that are new."""

    def make(self, containers: Sequence[Container], items: dict[Any, Any]) -> None:
        """Change the container alike, with these values in place of those that are new."""
        container = containers[self.place]
        for key in list(container) if isinstance(container, dict) else range(len(container) - 1, -1, -1):
            if key not in self.keys:
                del container[key]
        for key, value in items.items():
            if isinstance(container, list) and key >= len(container):
                container.append(value)
            else:
                container[key] = value


def containers_in(value: Any) -> list[Container]:
    """Return the lists and dictionaries in nested ones and in tuples, each once."""
    found: dict[int, Container] = {}
    for one in _walk(value, found):
        found[id(one)] = one
    return list(found.values())


def _walk(value: Any, found: dict[int, Container]) -> Iterator[Container]:
    if isinstance(value, dict | list):
        if id(value) in found:
            return
        yield value
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _walk(item, found)


Contents = list[dict[Any, Any]]


def contents_of(containers: Sequence[Container]) -> Contents:
    """Return what containers hold now, to be compared later."""
    return [_items(container) for container in containers]


def changes_of(containers: Sequence[Container], before: Contents) -> tuple[Change, ...]:
    """Return how containers have changed."""
    found = []
    for place, (container, old) in enumerate(zip(containers, before, strict=True)):
        now = _items(container)
        items = {key: value for key, value in now.items() if key not in old or old[key] is not value}
        if items or now.keys() != old.keys():
            found.append(Change(place, tuple(now), items))
    return tuple(found)


def _items(container: Container) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))
