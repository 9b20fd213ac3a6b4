"""Generators of random numbers: the states of any of them, compared and put back; and code that draws from one seed.

Code draws without being given a generator from torch's, Python's and numpy's of the process, and from those that an object holds.
While code runs `in_place` or `drawing_from` a key, it draws numbers that follow from one seed; where the generators stood before, they
stand afterwards.

The states of the process are compared several times in every step. numpy takes 21 us to hand out its own, so the 625 words of its
Mersenne twister are read at the address that it publishes (`BitGenerator.ctypes`), and it is asked where it holds another kind.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Classes of generators, as a module or a variable may hold one."""
_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
_NUMPY: np.random.RandomState = np.random.random.__self__  # type: ignore[attr-defined]
_WORDS_OF_PYTHON = random.Random.__base__.getstate  # type: ignore[union-attr]
_STATE = 624
"""Words of the state of a Mersenne twister; one more says how many of them are used."""
State = tuple[Any, ...]


# -- states ----------------------------------------------------------------------------------------


def state_of(generator: Any) -> Any:
    """Return the state of a generator; two are equal if nothing was drawn between."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if generator is _NUMPY:
        return _WORDS.state()
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def put_back(generator: Any, state: Any) -> None:
    """Set a generator to a state that `state_of` gave."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(state, bytes):
        generator.set_state(_legacy(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    else:
        generator.bit_generator.state = _arrays(state)
    if generator is _NUMPY:
        _WORDS.known = None


def of_process() -> tuple[Any, Any, Any]:
    """Return the generators of the process on the host: torch's, Python's and numpy's."""
    return torch.default_generator, _PYTHON, _NUMPY


def states_of(generators: Iterable[Any] = ()) -> State:
    """Return the states of the generators of the process on the host, and of some `generators`."""
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    # As `getstate` gives it, without a call of Python: this is done several times in every step.
    of_python = _PYTHON.VERSION, _WORDS_OF_PYTHON(_PYTHON), _PYTHON.gauss_next  # type: ignore[attr-defined]
    of_process = of_torch, of_python, _WORDS.state()
    return (*of_process, *map(state_of, generators)) if generators else of_process


def put_all_back(states: State, generators: Iterable[Any] = ()) -> None:
    """Set the generators to the states that `states_of` gave for the same ones."""
    for generator, state in zip((*of_process(), *generators), states, strict=True):
        put_back(generator, state)


class _Words:
    """The words of numpy's generator, and the normal number that it has drawn and not given, which is in no word."""

    def __init__(self) -> None:
        self._owner: object = None
        self._words: ctypes.Array[ctypes.c_uint32] | None = None
        self.known: bytes | None = None
        """Words with which it held no such number: a draw that makes one moves the words. None where numpy has to be asked, as
        after a state was set."""

    def state(self) -> Any:
        """Return the state: words, or what numpy gives where it holds a number, or has a generator of another kind."""
        owner = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if owner is not self._owner:
            self._owner, self.known, self._words = owner, None, None
            if type(owner) is np.random.MT19937:
                self._words = (ctypes.c_uint32 * (_STATE + 1)).from_address(owner.ctypes.state_address)
        now = None if self._words is None else bytes(self._words)
        if now is None or self.known != now:
            state = _NUMPY.get_state(legacy=False)
            if now is None or state["has_gauss"]:
                return _plain(state)
            self.known = now
        return now


_WORDS = _Words()


def _legacy(state: Any) -> tuple[Any, ...]:
    """Return the tuple that numpy gives and takes as the state of a Mersenne twister."""
    if isinstance(state, bytes):
        words = np.frombuffer(state, np.uint32)
        return "MT19937", words[:_STATE], int(words[_STATE]), 0, 0.0
    arrays = _arrays(state)
    return arrays["bit_generator"], arrays["state"]["key"], arrays["state"]["pos"], arrays["has_gauss"], arrays["gauss"]


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a generator of numpy's with its arrays as bytes and types, so that two can be compared."""
    return {
        name: (value.tobytes(), value.dtype.str)
        if isinstance(value, np.ndarray)
        else _plain(value)
        if isinstance(value, dict)
        else value
        for name, value in state.items()
    }


def _arrays(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.frombuffer(*value)
        if isinstance(value, tuple)
        else _arrays(value)
        if isinstance(value, dict)
        else value
        for name, value in state.items()
    }


# -- drawing from a seed ---------------------------------------------------------------------------


def seeded(key: int) -> torch.Generator:
    """Return a generator of torch's with a seed of 64 bits."""
    return torch.Generator().manual_seed(key)


@dataclass(slots=True)
class Generators:
    """States of the generators of the process on the host, and of those that an object holds as attributes."""

    state: State
    held: tuple[Any, ...] = ()
    """The generators that the object holds."""

    @classmethod
    def seeded_by(cls, key: int, held_by: Any = None, own: Sequence[Any] = ()) -> Generators:
        """Return the states that follow from a key of 64 bits; a `torch.Generator` that is held has its own, or that in `own`."""
        generators = tuple(generators_in(held_by)) if held_by is not None else ()
        states = states_of(generators)
        try:
            _seed(key, generators)
            seeded_states = states_of(generators)
        finally:
            put_all_back(states, generators)
        both = zip(generators, own or states[3:], seeded_states[3:], strict=True)
        states_of_held = [now if isinstance(generator, torch.Generator) else drawn for generator, now, drawn in both]
        return cls((*seeded_states[:3], *states_of_held), generators)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which the generators have these states, which move as they are drawn from."""
        states = states_of(self.held)
        put_all_back(self.state, self.held)
        try:
            yield
        finally:
            self.state = states_of(self.held)
            put_all_back(states, self.held)


@contextmanager
def drawing_from(key: int) -> Iterator[None]:
    """Return a context in which the generators of the process begin at a seed of 64 bits; afterwards they stand where they stood."""
    states = states_of()
    _seed(key, ())
    try:
        yield
    finally:
        put_all_back(states)


def plain_states(states: State) -> list[Any]:
    """Return the states of the generators of the process as numbers, text and tensors, which a file can hold."""
    of_torch, of_python, of_numpy = states[:3]
    name, keys, *rest = _legacy(of_numpy)
    return [torch.frombuffer(bytearray(of_torch), dtype=torch.uint8), of_python, (name, keys.astype(np.int64), *rest)]


def states_of_plain(stored: list[Any]) -> State:
    """Return the states that `plain_states` gave."""
    of_torch, of_python, (name, keys, *rest) = stored
    random_state = np.random.RandomState()
    random_state.set_state((name, np.asarray(keys).astype(np.uint32), *rest))
    return of_torch.numpy().tobytes(), of_python, _plain(random_state.get_state(legacy=False))


def _seed(key: int, generators: tuple[Any, ...]) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    for number, generator in enumerate(generators):
        seed = key + number + 1 & 2**64 - 1
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        elif isinstance(generator, np.random.RandomState):
            generator.seed([seed & 0xFFFFFFFF, seed >> 32])
        else:
            generator.bit_generator.state = type(generator.bit_generator)(seed).state


def generators_in(owner: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the generators that an object holds as attributes, and those of the samplers that it holds."""
    for value in vars(owner).values() if hasattr(owner, "__dict__") else ():
        if isinstance(value, GENERATORS):
            yield value
        elif depth and isinstance(value, torch.utils.data.Sampler):
            yield from generators_in(value, depth - 1)
