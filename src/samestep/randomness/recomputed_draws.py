"""Draws of checkpointed forwards: a recomputation counts the calls of modules from where its forward did, and so draws the same."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from samestep.randomness.counted_draws import RunningForward
from samestep.randomness.mode import DropoutMode, active_mode


class _Recompute:
    """A context that restores the counts that a mode had when this object was created."""

    def __init__(self, mode: DropoutMode) -> None:
        self._mode = mode
        self._then = mode._snapshot()
        self._now: list[tuple[list[RunningForward], dict[str, int]]] = []

    def __enter__(self) -> None:
        mode = self._mode
        self._now.append((mode._frames, mode._entries))
        frames, entries = self._then
        # Copies: with retain_graph the same block is recomputed several times.
        mode._frames, mode._entries = [dataclasses.replace(frame) for frame in frames], dict(entries)
        mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._mode._frames, self._mode._entries = self._now.pop()


def recompute_contexts(model: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a checkpointed forward and of its recomputation, which then draws the same masks.

    They are for `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which calls it in the
    forward. The recomputation activates the mode of that forward by itself, on whatever thread the backward runs.
    """
    mode = active_mode(model)
    return nullcontext(), nullcontext() if mode is None else _Recompute(mode)
