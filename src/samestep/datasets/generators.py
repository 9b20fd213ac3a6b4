"""The random generators that code draws from without being given one: torch's, numpy's and Python's, and those that an object holds.

Code that runs while they are in place draws numbers that follow from one seed. Where they stood before, they stand afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samestep.datasets.process_states import note_changes

_State = tuple[Any, ...]


def seeded(key: int) -> torch.Generator:
    """Return a generator of torch's with a seed of 64 bits."""
    return torch.Generator().manual_seed(key)


@dataclass(slots=True)
class Generators:
    """States of the generators of the process on the host, and of those that an object holds as attributes."""

    state: _State
    held: tuple[Any, ...] = ()
    """The generators that the object holds."""

    @classmethod
    def seeded_by(cls, key: int, held_by: Any = None) -> Generators:
        """Return the states that follow from a key of 64 bits."""
        held = tuple(_held_by(held_by)) if held_by is not None else ()
        before = _states(held)
        try:
            _seed(key, held)
            return cls(_states(held), held)
        finally:
            _restore(before, held)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which the generators have these states, which move as they are drawn from."""
        before = _states(self.held)
        _restore(self.state, self.held)
        try:
            yield
        finally:
            self.state = _states(self.held)
            _restore(before, self.held)


@contextmanager
def drawing_from(key: int) -> Iterator[None]:
    """Return a context in which the generators of the process begin at a seed of 64 bits; afterwards they stand where they stood."""
    before = _states(())
    _seed(key, ())
    try:
        yield
    finally:
        _restore(before, ())


def plain_states(states: _State) -> list[Any]:
    """Return the states of the generators of the process as numbers, text and tensors, which a file can hold."""
    name, keys, *rest = states[2]
    return [states[0], states[1], (name, keys.astype(np.int64), *rest)]


def states_of_plain(stored: list[Any]) -> _State:
    """Return the states that `plain_states` gave."""
    name, keys, *rest = stored[2]
    return stored[0], stored[1], (name, np.asarray(keys).astype(np.uint32), *rest)


def _seed(key: int, held: tuple[Any, ...]) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    for number, one in enumerate(held):
        own = key + number + 1 & 2**64 - 1
        if isinstance(one, torch.Generator):
            one.manual_seed(own)
        elif isinstance(one, random.Random):
            one.seed(own)
        elif isinstance(one, np.random.RandomState):
            one.seed([own & 0xFFFFFFFF, own >> 32])
        else:
            one.bit_generator.state = type(one.bit_generator)(own).state


def _states(held: tuple[Any, ...]) -> _State:
    process = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    return (*process, *(_state_of(one) for one in held))


def _state_of(one: Any) -> Any:
    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, random.Random):
        return one.getstate()
    return one.get_state() if isinstance(one, np.random.RandomState) else one.bit_generator.state


def _restore(states: _State, held: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    note_changes()
    for one, state in zip(held, states[3:], strict=True):
        if isinstance(one, torch.Generator):
            one.set_state(state)
        elif isinstance(one, random.Random):
            one.setstate(state)
        elif isinstance(one, np.random.RandomState):
            one.set_state(state)
        else:
            one.bit_generator.state = state


def _held_by(owner: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the generators that an object holds as attributes, and those of the samplers that it holds."""
    for value in vars(owner).values() if hasattr(owner, "__dict__") else ():
        if isinstance(value, torch.Generator | random.Random | np.random.RandomState | np.random.Generator):
            yield value
        elif depth and isinstance(value, torch.utils.data.Sampler):
            yield from _held_by(value, depth - 1)
