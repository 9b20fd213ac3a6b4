"""Random numbers within a step: the process-wide generators must stay where they are.

A layout gives every rank another part of the work, so numbers that a forward, a loss, a backward or an optimizer draws
from a generator of the process (torch on the CPU or the GPU, numpy, Python's `random`) belong to other samples and
weights in every layout, and no checkpoint holds the generators. samestep's own dropout draws from none of them. So
their states are compared before and after each of these calls, at every step; reading samples is left out.

A whole comparison copies the states, 8 KB, in about 2 us. It is made for the first micro-batch of a step; for the
others only the positions within the states are compared, in about 1 us: a position is the same again only after exactly
a multiple of 624 numbers. The states are read where the libraries keep them, since to ask for them takes up to 70 us.
Generators that a module or a variable of the code holds are compared too, wherever there are any.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from samestep.state.snapshot import Snapshot, state_of_generator

_WORDS = 624
_MT_BYTES = 4 * (_WORDS + 1)
_TORCH_BYTES, _TORCH_START, _TORCH_WORDS, _TORCH_HEAD = 5056, 8, 24, 256
"""Bytes of the state of torch's generator, where the position and the words stand in it, and where in the object at most."""
_TORCH_FRONT, _TORCH_REST = 12, 24
"""Bytes of the position in front of the words, and of the normal numbers behind them."""


class _TorchState(NamedTuple):
    """The layout in memory of the state of torch's generator of the CPU."""

    address: int
    """Where it begins: (left, is seeded, next), the words, and the normal numbers that are left over."""
    left: ctypes.c_uint32
    next: ctypes.c_uint32


def _torch_state() -> _TorchState | None:
    """Return where the object behind Python's keeps the words and, in front of them, the position; None if not found."""
    own = torch.default_generator
    if type(own).__basicsize__ < object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p):
        return None
    address = ctypes.c_void_p.from_address(id(own) + object.__basicsize__).value
    if address is None:
        return None
    state = own.get_state().numpy()
    words = state[_TORCH_WORDS : _TORCH_WORDS + 8 * _WORDS].view(np.uint64).astype(np.uint32).tobytes()
    found = ctypes.string_at(address, _TORCH_HEAD + 4 * _WORDS).find(words) - _TORCH_FRONT
    if found < 0:
        return None
    start = address + found
    left, following = (ctypes.c_uint32.from_address(start + at) for at in (0, 8))
    known = state[_TORCH_START : _TORCH_START + 16].view(np.uint32)
    return _TorchState(start, left, following) if (left.value, following.value) == (known[0], known[2]) else None


_TORCH = _torch_state()


def _python_address() -> int | None:
    """Return the address of the state of `random`: the position, then the words; None if it is not known.

    CPython keeps it behind the object's head.
    """
    shared = random.random.__self__  # type: ignore[attr-defined]
    address = id(shared) + object.__basicsize__
    if _random.Random.__basicsize__ >= object.__basicsize__ + _MT_BYTES:
        held = np.frombuffer(ctypes.string_at(address, _MT_BYTES), dtype=np.uint32)
        words = random.getstate()[1]
        if held[0] == words[-1] and tuple(held[1:].tolist()) == words[:-1]:
            return address
    return None


_PYTHON = _python_address()
_PYTHON_POSITION = None if _PYTHON is None else ctypes.c_uint32.from_address(_PYTHON)


def _python(whole: bool) -> object:
    """Return the state of `random`, or its position."""
    if _PYTHON is None or _PYTHON_POSITION is None:
        return random.getstate()
    return ctypes.string_at(_PYTHON, _MT_BYTES) if whole else _PYTHON_POSITION.value


@functools.lru_cache(maxsize=1)
def _numpy_address(bits: object) -> tuple[int, ctypes.c_int]:
    """Return where numpy's generator keeps its state, words and then the position, and its position."""
    address = bits.ctypes.state_address  # type: ignore[attr-defined]
    return address, ctypes.c_int.from_address(address + 4 * _WORDS)


def _numpy(whole: bool) -> object:
    """Return the state of numpy's generator, or its position."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is not np.random.MT19937:
        return repr(bits.state)
    address, position = _numpy_address(bits)
    return ctypes.string_at(address, _MT_BYTES) if whole else position.value


def _torch(whole: bool) -> object:
    """Return the state of torch's generator of the CPU, or its position."""
    if _TORCH is not None:
        if whole:
            raw = ctypes.string_at(_TORCH.address, _TORCH_FRONT + 4 * _WORDS + _TORCH_REST)
            return raw[:-_TORCH_REST], raw[-_TORCH_REST + 4], raw[-_TORCH_REST + 20]  # whether numbers are left over
        return _TORCH.left.value, _TORCH.next.value
    held = torch.default_generator.get_state()
    return ctypes.string_at(held.data_ptr(), _TORCH_BYTES)


def states_of(device: torch.device, *, whole: bool = True) -> tuple[object, ...]:
    """Return the states of the process-wide generators, or only their positions; equal if nothing was drawn between."""
    states = (_torch(whole), _python(whole), _numpy(whole))
    if device.type != "cuda":
        return states
    of_gpu = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return (*states, of_gpu.get_offset(), of_gpu.initial_seed())


_NAMES = (
    "torch's generator of the CPU",
    "Python's `random`",
    "numpy's global generator",
    *["torch's generator of the GPU"] * 2,
)


def _attention_moves(device: torch.device) -> bool:
    """Return whether attention without dropout moves the generator of this GPU, as some kernels did that draw nothing."""
    own = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    before = own.get_offset()
    query = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    return bool(own.get_offset() != before)


class GeneratorWatch:
    """The comparison of the generators around the calls of one rank's steps."""

    def __init__(self, device: torch.device, own: Sequence[tuple[str, Any]] = ()) -> None:
        """Watch the generators of the process, and those of the model's or the loss's own, with their names."""
        is_blind = device.type == "cuda" and _attention_moves(device)
        self._device = torch.device("cpu") if is_blind else device
        self._own = tuple(generator for _, generator in own)
        self._names = (*_NAMES[: 3 if self._device.type != "cuda" else 5], *(name for name, _ in own))
        self._whole = True
        self._seen: tuple[object, ...] = ()

    def settle(self, *, whole: bool = False) -> None:
        """Take the present states as those before the next call; `whole` compares more than the positions."""
        self._whole = whole
        self._seen = self._states()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Leave out samples that are read inside a call, as a pipeline's stage reads ahead."""
        before = self._states()
        yield
        if before == self._seen:
            self.settle(whole=self._whole)

    def moved(self) -> str:
        """Return the name of a generator that has moved since the states were taken, or nothing; and take them anew."""
        now = self._states()
        before, self._seen = self._seen, now
        if now == before:
            return ""
        return next(name for name, old, new in zip(self._names, before, now, strict=True) if old != new)

    def _states(self) -> tuple[object, ...]:
        states = states_of(self._device, whole=self._whole)
        return (*states, *(state_of_generator(own)[0] for own in self._own)) if self._own else states


def own_generators(*roots: nn.Module | Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the generators that a model or a loss holds, or that its code reaches, with their names."""
    found: dict[int, tuple[str, Any]] = {}
    for root in roots:
        for name, generator in Snapshot(root, weights=False).named_generators:
            found.setdefault(id(generator), (f"the generator {name}", generator))
    return list(found.values())


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
