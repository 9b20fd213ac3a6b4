"""Words in a batch: lists with a text for each sample, such as names of files, beside the tensors that are cut and joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Trees = tuple[Any, Any, Any]
"""Outputs and batch of the whole, of its first and of its second half."""


def of_parts(tree: Any, size: int, taken: int) -> Trees:
    """Return outputs and batch of `size` samples with the words of the first `taken`, and of the halves of these.

    One sample has no halves: the whole is the sample twice.
    """
    half = taken // 2
    parts = (range(taken), range(half), range(half, taken)) if size > 1 else ([0, 0], [0], [0])

    def of(rows: Sequence[int]) -> Any:
        return _changed(tree, tree, lambda words, _: [words[row] for row in rows] if len(words) == size else words)

    whole, first, second = map(of, parts)
    return whole, first, second


def joined(first: Any, second: Any, sizes: tuple[int, int]) -> Any:
    """Return the second of two micro-batches of `sizes` samples, with the words of both."""

    def both(words: list[str], others: Any) -> list[str]:
        return [*others, *words] if (len(others), len(words)) == sizes else words

    return _changed(second, first, both)


def _changed(value: Any, beside: Any, change: Callable[[list[str], Any], list[str]]) -> Any:
    """Return nested tuples, lists and dicts with other words; `beside` is nested alike."""
    if isinstance(value, dict) and isinstance(beside, dict):
        if type(value) is not dict:  # a class of a library, which holds tensors alone
            return value
        return {key: _changed(item, beside.get(key), change) for key, item in value.items()}
    if not isinstance(value, tuple | list) or not isinstance(beside, tuple | list):
        return value
    if value and all(isinstance(item, str) for item in value):
        return type(value)(change([*value], beside))
    if len(value) != len(beside):
        return value
    items = [_changed(item, other, change) for item, other in zip(value, beside, strict=True)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
