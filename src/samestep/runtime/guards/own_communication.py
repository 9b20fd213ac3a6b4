"""Calls of torch.distributed in the user's own forward or loss, which would make the result depend on the number of ranks.

Code that was written for DDP gathers the features of a batch, adds up a count or divides by the number of ranks. Here the
layout does that: a loss is a sum and a count of its own samples. While what a step relies on is tried, the functions of
torch.distributed look who calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from samestep.errors import ModelError

_CALLS = (
    "get_rank", "get_world_size", "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_object", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "broadcast_object_list", "barrier", "send", "recv", "isend", "irecv",
)  # fmt: skip
_BETWEEN = ("torch.distributed", "torch.autograd", "torch.utils._contextlib", "contextlib", "functools")
"""Modules that pass a call on."""
_OURS = ("torch", "samestep")


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Refuse, inside, calls of torch.distributed by the user's code, which is `what` runs.

    Raises:
        ModelError: there is one.
    """
    before = {name: getattr(dist, name) for name in _CALLS}
    for name, function in before.items():
        setattr(dist, name, _watching(function, name, what))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _watching(function: Callable[..., Any], name: str, what: str) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        if _is_called_by_user():
            raise ModelError(
                f"{what} calls torch.distributed.{name}, so that the result would depend on the layout: it sees the samples of its "
                "own micro-batch, and the layout adds up sums and counts, so code without that works"
            )
        return function(*args, **named)

    return called


def _is_called_by_user() -> bool:
    """Return whether code of the user's calls, which is run for no sample that is read: data sets have a check of their own."""
    frame = sys._getframe(2)
    by_user = False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if by_user and module.startswith("samestep."):
            return not module.startswith("samestep.datasets.")
        if not by_user and not module.startswith(_BETWEEN):
            if module.partition(".")[0] in _OURS:
                return False
            by_user = True
        frame = frame.f_back  # type: ignore[assignment]
    return by_user
