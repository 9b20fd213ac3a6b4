"""Calls of torch.distributed by the user's code inside a step, which are refused until its loss is tried.

Code that was written for DDP gathers the features of a batch, adds up a count or divides by the number of ranks. Here the
layout does that: a loss is a sum and a count of its own samples. So the functions of torch.distributed look who calls them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from samestep.building.torch_seams import Replaced
from samestep.errors import ModelError

_CALLS = (
    "get_rank", "get_world_size", "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_object", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "broadcast_object_list", "barrier", "send", "recv", "isend", "irecv",
)  # fmt: skip
_BETWEEN = ("torch.distributed", "torch.autograd", "torch.utils._contextlib", "contextlib", "functools")
"""Modules that pass a call on."""
_OURS = ("torch", "samestep")
_READERS = ("samestep.datasets.", "samestep.runtime.microbatches")
"""Modules that read samples, whose code has another check."""


def refuse_collectives() -> Replaced:
    """Refuse, inside, calls of torch.distributed by the user's code.

    Raises:
        ModelError: there is one.
    """
    return Replaced(*((dist, name, functools.partial(_refusing, name)) for name in _CALLS))


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_call, function, name)


def _call(function: Callable[..., Any], name: str, *args: Any, **named: Any) -> Any:
    if caller := _calling_user():
        raise ModelError(
            "own-collective",
            f"{caller} calls torch.distributed.{name}, so that the result would depend on the layout: it sees the samples of its "
            "own micro-batch, and the layout adds up sums and counts. Remove the call",
        )
    return function(*args, **named)


def _calling_user() -> str:
    """Return the name of the function of the user that makes this call outside of a data set; empty if none does."""
    frame, name = sys._getframe(2), ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if name and module.startswith("samestep."):
            return "" if module.startswith(_READERS) else name
        if not name and not module.startswith(_BETWEEN):
            if module.partition(".")[0] in _OURS:
                return ""
            name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
        frame = frame.f_back  # type: ignore[assignment]
    return name
