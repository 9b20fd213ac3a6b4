"""The stack shows who asks something of a weight: samestep, the forward of a module, or the loop of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn


class Asker(Enum):
    """The code that asks something of a weight."""

    RUN = "the code of samestep"
    MODULE = "the forward of a module of the run"
    LOOP = "the loop, by itself or by a function of torch"


_CALL = nn.Module._call_impl.__code__
_WEIGHTS = (
    "samestep.runtime.weights.weights_in_loops",
    "samestep.runtime.weights.unit_order",
    "samestep.runtime.axes.pipeline.other_stages",
    __name__,
)
"""Modules whose code a weight, or a hook of a module, calls itself when it is asked."""


def asker(modules: Mapping[int, str]) -> tuple[Asker, str]:
    """Return who asks, and of `modules`, paths by identity, the one that the loop has called if a forward asks."""
    frame, called, nearest = sys._getframe(1), "", ""
    while frame is not None:
        if frame.f_code is _CALL and id(frame.f_locals["self"]) in modules:
            called = modules[id(frame.f_locals["self"])] or "."
        module = str(frame.f_globals.get("__name__", ""))
        if not nearest and module not in _WEIGHTS and module.partition(".")[0] != "torch":
            nearest = module
        frame = frame.f_back  # type: ignore[assignment]
    if called:
        return Asker.MODULE, called
    return (Asker.RUN if nearest.startswith("samestep.") else Asker.LOOP), ""


def name_of(func: Any) -> str:
    """Return the name of an operation, or of an attribute that is read or set, without underscores at either end."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(func.__self__, "__name__", name)
    return str(name).removeprefix("_foreach").strip("_")
