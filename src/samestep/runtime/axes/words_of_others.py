"""Words of a batch under a loss over all samples: each rank has those of its samples alone."""

from __future__ import annotations

from typing import Any

from samestep.errors import JobError


class _Words:
    """The words of all samples; a rank has those of its samples alone, so that a loss which reads them is refused."""

    def _refuse(self, *_: Any) -> Any:
        raise JobError(
            "the loss over the whole batch reads words of the batch, of which each rank has those of its own samples: numbers in "
            "their place work, such as their classes"
        )

    __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __getattr__ = _refuse


def without_words(value: Any) -> Any:
    """Return a nested value with lists of words replaced by ones that cannot be read."""
    if isinstance(value, dict):
        return {name: without_words(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        is_words = bool(value) and all(isinstance(one, str) for one in value)
        return _Words() if is_words else type(value)(map(without_words, value))
    return value
