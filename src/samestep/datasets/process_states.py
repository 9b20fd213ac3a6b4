"""The states of the generators of the process on the host: torch's, Python's and numpy's, read so that two can be compared.

They are compared several times in every step, and the libraries take 70 us to hand out all three: Python makes 625 numbers and
numpy a dict. Both keep a Mersenne twister of 625 words in one place for their whole life, numpy's at an address that it publishes
(`BitGenerator.ctypes`), so these words are copied instead, which takes 2 us with torch's. Where the words are not found at their
place, as in an interpreter other than CPython, the libraries are asked.

Within a step, where 13 KB a look would be read and written from outside the processor's cache, a few words of each state stand
for it: the number of used words, which a draw counts up, and the first words, which are made anew once all are used.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_Words = ctypes.Array[ctypes.c_uint32]
_STATE = 624
"""Words of the state of a Mersenne twister; one more says how many of them are used."""
_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
_NUMPY: np.random.RandomState = np.random.random.__self__  # type: ignore[attr-defined]


_FEW = 4
"""Words of a state that stand for it, besides the number of used ones."""
_ENDS = 64
"""Bytes at either end of torch's state that stand for it: a seed, counts and words; the normal numbers drawn and not given."""


def _words_at(address: int, number: int = _STATE + 1) -> _Words:
    return (ctypes.c_uint32 * number).from_address(address)


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
    """Words of numpy's generator, and the normal number that it has drawn and not given, which is in no word."""

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        """Read the runs of words at these places: the first word and the number of words of each."""
        self._places = places
        self._owner: object = None
        self._words: list[_Words] | None = None
        self.known: tuple[bytes, bool] = UNKNOWN
        """The words when numpy was asked last, and whether it then held such a number: a draw that makes one moves the words."""

    def state(self) -> Any:
        """Return the state: words, or what numpy gives where it holds a number, or has a generator of another kind."""
        owner = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if owner is not self._owner:
            is_twister = type(owner) is np.random.MT19937
            self._owner, self.known = owner, UNKNOWN
            at = owner.ctypes.state_address if is_twister else 0
            self._words = [_words_at(at + 4 * first, number) for first, number in self._places] if is_twister else None
        if self._words is None:
            return _plain(_NUMPY.get_state(legacy=False))
        now = b"".join(self._words)
        if self.known == (now, False):
            return now
        state = _NUMPY.get_state(legacy=False)
        self.known = now, bool(state["has_gauss"])
        return _plain(state) if self.known[1] else now


_PYTHON_WORDS = _python_words()
_PYTHON_FEW = None if _PYTHON_WORDS is None else _words_at(ctypes.addressof(_PYTHON_WORDS), 1 + _FEW)
_NUMPY_WORDS, _NUMPY_FEW = _NumpyWords([(0, _STATE + 1)]), _NumpyWords([(0, _FEW), (_STATE, 1)])


def marks_of_process() -> tuple[Any, Any, Any]:
    """Return a few words of each of the states that `states_of_process` gives, which are equal if nothing was drawn between."""
    of_python = _PYTHON.getstate() if _PYTHON_FEW is None else (bytes(_PYTHON_FEW), _PYTHON.gauss_next)  # type: ignore[attr-defined]
    of_torch = torch.default_generator.get_state().numpy()
    return of_torch[:_ENDS].tobytes() + of_torch[-_ENDS:].tobytes(), of_python, _NUMPY_FEW.state()


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
    _NUMPY_WORDS.known = _NUMPY_FEW.known = UNKNOWN


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
