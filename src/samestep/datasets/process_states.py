"""The states of the generators of the process on the host: torch's, Python's and numpy's, read so that two can be compared.

They are compared several times in every step, and the libraries take 70 us to hand out all three: Python makes 625 numbers and
numpy a dict. Both keep a Mersenne twister of 625 words in one place for their whole life, numpy's at an address that it publishes
(`BitGenerator.ctypes`), so these words are copied instead, which takes 2 us with torch's. Where the words are not found at their
place, as in an interpreter other than CPython, the libraries are asked.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import numpy as np
import torch

_Words = ctypes.Array[ctypes.c_uint32]
_STATE = 624
"""Words of the state of a Mersenne twister; one more says how many of them are used."""
_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
_NUMPY: np.random.RandomState = np.random.random.__self__  # type: ignore[attr-defined]


def _words_at(address: int) -> _Words:
    return (ctypes.c_uint32 * (_STATE + 1)).from_address(address)


def _python_words() -> _Words | None:
    """Return the words of Python's generator, the number of used ones first; None where they do not follow the object's head."""
    if sys.implementation.name != "cpython" or type(_PYTHON).__basicsize__ < object.__basicsize__ + 4 * (_STATE + 1):
        return None
    scratch = random.Random(1)
    for one in (_PYTHON, scratch):
        words = _words_at(id(one) + object.__basicsize__)
        if (*words[1:], words[0]) != one.getstate()[1]:
            return None
    scratch.random()
    return _words_at(id(_PYTHON) + object.__basicsize__) if (*words[1:], words[0]) == scratch.getstate()[1] else None


UNKNOWN = b"", True
"""That numpy has to be asked whether it holds a normal number: no state has these words."""


class _NumpyWords:
    """The words of numpy's generator, and the normal number that it has drawn and not given, which is in no word."""

    def __init__(self) -> None:
        self._owner: object = None
        self._words: _Words | None = None
        self.known: tuple[bytes, bool] = UNKNOWN
        """The words when numpy was asked last, and whether it then held such a number: a draw that makes one moves the words."""

    def state(self) -> Any:
        """Return the state: words, or what numpy gives where it holds a number, or has a generator of another kind."""
        owner = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if owner is not self._owner:
            is_twister = type(owner) is np.random.MT19937
            self._owner, self.known = owner, UNKNOWN
            self._words = _words_at(owner.ctypes.state_address) if is_twister else None
        if self._words is None:
            return _plain(_NUMPY.get_state(legacy=False))
        now = bytes(self._words)
        if self.known == (now, False):
            return now
        state = _NUMPY.get_state(legacy=False)
        self.known = now, bool(state["has_gauss"])
        return _plain(state) if self.known[1] else now


_PYTHON_WORDS = _python_words()
_NUMPY_WORDS = _NumpyWords()


def states_of_process() -> tuple[Any, Any, Any]:
    """Return the states of torch's, Python's and numpy's generator, which are equal if nothing was drawn between."""
    of_python = _PYTHON.getstate() if _PYTHON_WORDS is None else (bytes(_PYTHON_WORDS), _PYTHON.gauss_next)  # type: ignore[attr-defined]
    return torch.default_generator.get_state().numpy().tobytes(), of_python, _NUMPY_WORDS.state()


def put_back(before: tuple[Any, Any, Any]) -> None:
    """Set the generators to the states that `states_of_process` gave."""
    of_torch, of_python, of_numpy = before
    torch.default_generator.set_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    if _PYTHON_WORDS is not None:
        used, *words = np.frombuffer(of_python[0], np.uint32).tolist()
        of_python = _PYTHON.VERSION, (*words, used), of_python[1]
    _PYTHON.setstate(of_python)
    if isinstance(of_numpy, bytes):
        words = np.frombuffer(of_numpy, np.uint32)
        np.random.set_state(("MT19937", words[:_STATE], int(words[_STATE]), 0, 0.0))
    else:
        _NUMPY.set_state(_arrays(of_numpy))
    note_changes()


def note_changes() -> None:
    """Ask numpy at the next look: after a state was set, equal words do not say that it holds no normal number."""
    _NUMPY_WORDS.known = UNKNOWN


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a generator of numpy's with its arrays as bytes and types, so that two can be compared."""
    return {
        name: (one.tobytes(), one.dtype.str)
        if isinstance(one, np.ndarray)
        else _plain(one)
        if isinstance(one, dict)
        else one
        for name, one in state.items()
    }


def _arrays(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.frombuffer(*one) if isinstance(one, tuple) else _arrays(one) if isinstance(one, dict) else one
        for name, one in state.items()
    }
