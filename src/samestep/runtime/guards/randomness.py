"""Random numbers within a step: the process-wide generators must stay where they are.

A layout gives every rank another part of the work, so numbers that a forward, a loss, a backward or an optimizer draws
from a generator of the process (torch on the CPU or the GPU, numpy, Python's `random`) belong to other samples and
weights in every layout, and no checkpoint holds the generators. samestep's own dropout draws from none of them. So
their states are compared before and after each of these calls, at every step; reading samples is left out.

A whole comparison copies the states, 10 KB, in about 4 us. It is made for the first micro-batch of a step; for the
others only the positions within the states are compared, in about 2 us. A position is the same again only after exactly
a multiple of 624 numbers.
"""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

_TORCH_BYTES = 5056
_TORCH_POSITION = slice(8, 24)
_WORDS = 624
_MT_BYTES = 4 * (_WORDS + 1)


def _python_state() -> Callable[[int], object]:
    """Return a function that returns the state of `random`, or its first bytes, which hold the position.

    CPython keeps it behind the object's head: the position, then the words. Elsewhere `random.getstate` is called, which
    takes 12 us.
    """
    shared = random.random.__self__  # type: ignore[attr-defined]
    address, size = id(shared) + object.__basicsize__, _MT_BYTES
    if _random.Random.__basicsize__ >= object.__basicsize__ + size:
        held = np.frombuffer(ctypes.string_at(address, size), dtype=np.uint32)
        words = random.getstate()[1]
        if held[0] == words[-1] and tuple(held[1:].tolist()) == words[:-1]:
            return lambda length: ctypes.string_at(address, min(size, length))
    return lambda length: random.getstate()


_python = _python_state()


def _numpy(length: int) -> object:
    """Return the state of numpy's generator: the words, then the position."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is np.random.MT19937:
        address = bits.ctypes.state_address
        return (
            ctypes.string_at(address, _MT_BYTES) if length >= _MT_BYTES else ctypes.string_at(address + 4 * _WORDS, 4)
        )
    return repr(bits.state)


def states_of(device: torch.device, *, whole: bool = True) -> tuple[object, ...]:
    """Return the states of the process-wide generators, or only their positions; equal if nothing was drawn between."""
    held = torch.default_generator.get_state()
    start, stop = (0, _TORCH_BYTES) if whole else (_TORCH_POSITION.start, _TORCH_POSITION.stop)
    size = min(stop, held.numel()) - start
    states = [ctypes.string_at(held.data_ptr() + start, size), _python(_MT_BYTES if whole else 4)]
    states.append(_numpy(_MT_BYTES if whole else 4))
    if device.type == "cuda":
        own = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        states += [own.get_offset(), own.initial_seed()]
    return tuple(states)


_NAMES = (
    "torch's generator of the CPU",
    "Python's `random`",
    "numpy's global generator",
    *["torch's generator of the GPU"] * 2,
)


class GeneratorWatch:
    """The comparison of the generators around the calls of one rank's steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._whole = True
        self._seen: tuple[object, ...] = ()

    def settle(self, *, whole: bool = False) -> None:
        """Take the present states as those before the next call; `whole` compares more than the positions."""
        self._whole = whole
        self._seen = states_of(self._device, whole=whole)

    def moved(self) -> str:
        """Return the name of a generator that has moved since the states were taken, or nothing; and take them anew."""
        now = states_of(self._device, whole=self._whole)
        before, self._seen = self._seen, now
        if now == before:
            return ""
        return next(name for name, old, new in zip(_NAMES, before, now, strict=False) if old != new)


def first_module_that_draws(model: nn.Module, run: Callable[[], object], device: torch.device) -> str:
    """Run a forward again; return the path of the innermost module in which a generator moves, or nothing."""
    found: list[str] = []
    entered: list[tuple[object, ...]] = []
    handles = []

    def enter(module: nn.Module, args: object) -> None:
        entered.append(states_of(device))

    def leave(path: str, module: nn.Module, args: object, output: object) -> None:
        if entered.pop() != states_of(device):
            found.append(path or "the model itself")

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(lambda *given, path=path: leave(path, *given)))
        with torch.no_grad():
            run()
    except Exception:  # the name is additional: a forward that does not run twice is reported without it
        return found[0] if found else ""
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def refusal(who: str, generator: str) -> str:
    """Return why a call that moved a generator is refused."""
    return (
        f"{who} draws random numbers from {generator}, so every layout would draw others, and a resumed run too; nn.Dropout, "
        "torch.nn.functional.dropout* and the dropout_p of attention work, and so do numbers that the data set draws "
        "from a generator seeded by the sample's index"
    )
