"""Autocast on the meta device: torch has none there, and code asks for that of the device that its tensors are on.

    with torch.autocast(x.device.type, enabled=False): ...

In a trace such code enters, and asks for, the autocast of the host. It casts no tensor of the meta device, as no autocast of another
device does; dtypes that a forward really has are found by its first step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.amp import autocast_mode

_ASKED = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
"""Functions of torch whose first argument is the type of a device."""


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Let code that runs inside use autocast of the meta device."""
    enter = autocast_mode.autocast.__init__

    @functools.wraps(enter)
    def entered(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            if device_type == "meta":  # another device may take dtypes that the host does not
                warnings.simplefilter("ignore")
            enter(self, _of_host(device_type), *args, **kwargs)

    available = _asking(torch.amp.is_autocast_available)
    replaced = [
        *((torch, name, _asking(getattr(torch, name))) for name in _ASKED),
        *((module, "is_autocast_available", available) for module in (torch.amp, autocast_mode)),
        (autocast_mode.autocast, "__init__", entered),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, stand_in)
        yield


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_type") == "meta":
            kwargs["device_type"] = "cpu"
        return function(*map(_of_host, args[:1]), *args[1:], **kwargs)

    return asked


def _of_host(device_type: Any) -> Any:
    return "cpu" if device_type == "meta" else device_type
