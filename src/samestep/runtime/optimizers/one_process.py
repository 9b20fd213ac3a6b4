"""The surroundings of an optimizer's code: those of one process, since every update is that of one device.

Code that divides its work among ranks, as distributed forms of Muon do, asks torch.distributed for them. Here gradients are summed
already, and the layout divides the update; so the code finds no process group, as where none was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from samestep.errors import ModelError

_LEFT: list[dist.ProcessGroup] = []
"""The process groups that code finds none of at present, the innermost last."""


@contextmanager
def rejoined() -> Iterator[None]:
    """Let code find the process group again inside, which `alone` has hidden around it: a closure sends what a step sends."""
    if not _LEFT:
        yield
        return
    dist.group.WORLD = _LEFT[-1]
    try:
        yield
    finally:
        dist.group.WORLD = None


class alone:  # noqa: N801  # a context, entered in every update: a generator takes twice as many calls
    """Let code find no process group inside, as in one process: an update is that of one device, on gradients that are summed.

    Raises:
        ModelError: the code asks for a rank or sends something without one.
    """

    __slots__ = ("_is_left", "_what")

    def __init__(self, what: str) -> None:
        """Name the code."""
        self._what, self._is_left = what, False

    def __enter__(self) -> None:
        """Hide the process group of all ranks, if there is one."""
        found = dist.group.WORLD if dist.is_available() else None
        if found is not None:
            dist.group.WORLD = None
            _LEFT.append(found)
            self._is_left = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Let the process group be found again, and explain an error that its absence has caused."""
        if self._is_left:
            dist.group.WORLD = _LEFT.pop()
        if isinstance(error, ValueError | RuntimeError) and "process group" in str(error):
            raise ModelError(
                "own-collective",
                f"{self._what} asks torch.distributed for ranks or sends something itself, and here every update is made as in one process, "
                "on gradients that are summed already. Use its form for one process, or a question for "
                "dist.is_initialized() first",
            ) from error
