"""The surroundings of a taped build: answers about devices, reads of values, and the random state of the process.

The tape (`building/tape.py`) sees operations alone. Code also asks a tensor for its device, moves it to devices that are
absent here, and reads its values in C++: `surface` answers as if every tensor were real and on the CPU. A tensor that the
code itself asked for on the meta device is said to be there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep import trees as pytree
from samestep.building.tape import Tape
from samestep.building.torch_seams import DisableTorchFunction, FunctionMode, Replaced

_META = torch.device("meta")
_CPU = torch.device("cpu")

_TENSOR: Any = Tensor  # attributes are read by descriptor, which the type checker does not know
_DISGUISE = {_TENSOR.is_meta.__get__: False, _TENSOR.is_cpu.__get__: True, _TENSOR.device.__get__: _CPU}
_MOVES = frozenset({Tensor.cuda, Tensor.pin_memory})
_NUMPY = frozenset({_TENSOR.numpy, _TENSOR.__array__})
_READS: frozenset[Any] = frozenset({Tensor.tolist, Tensor.__format__}) | _NUMPY
_FROM_DATA: frozenset[Any] = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})


def surface(tape: Tape) -> FunctionMode:
    """Return a function mode for calls that bypass the dispatcher: questions about devices, absent devices, reads in C++."""
    return FunctionMode(_Surface(tape))


class _Surface:
    """Carries out the calls of `surface`."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` as if all tensors were real and on the CPU."""
        kwargs = dict(kwargs)
        if func in _DISGUISE and args[0].is_meta and not self._tape.is_placeless(args[0]):
            return _DISGUISE[func]
        if func in _MOVES and not self._tape.is_placeless(args[0]):
            return args[0]
        asks_for_meta = _is_meta(kwargs.get("device")) or (func is Tensor.to and any(map(_is_meta, args[1:])))
        if kwargs.get("device") is not None:  # on meta, torch.tensor(data) would lose its data here already
            out = kwargs.get("out")
            kwargs["device"] = _META if isinstance(out, Tensor) and out.is_meta else _CPU
        kwargs.pop("pin_memory", None)
        if func is Tensor.to:
            args = (args[0], *(_CPU if is_device(arg) else arg for arg in args[1:]))
        if func in _READS:
            with self._tape.paused():
                outcome = func(self._tape.read(args[0]), *args[1:], **kwargs)
            if func in _NUMPY:
                outcome.flags.writeable = False  # a write to a copy would be lost silently
            return outcome
        if func in _FROM_DATA:  # a list of tensors is read in C++
            args = tuple(
                pytree.tree_map_only(Tensor, self._tape.read, arg) if isinstance(arg, list | tuple) else arg
                for arg in args
            )
        if self._moves_nothing(func, args, kwargs, asks_for_meta):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")  # the text of torch's error
        made = func(*args, **kwargs)
        if asks_for_meta and not (func is Tensor.to and made is args[0]):
            self._tape.mark_placeless(made)
        return made

    def _moves_nothing(self, func: Any, args: tuple[Any, ...], kwargs: Any, asks_for_meta: bool) -> bool:
        """Return whether a call moves a tensor without values off the meta device, to which torch raises an error."""
        if func in _MOVES or func is Tensor.cpu:
            return self._tape.is_placeless(args[0])
        moves = func is Tensor.to and (kwargs.get("device") is not None or any(map(is_device, args[1:])))
        return moves and not asks_for_meta and self._tape.is_placeless(args[0])


def is_move(func: Any) -> bool:
    """Return whether a function moves a tensor to a device that may be absent here."""
    return func in _MOVES


def is_device(arg: Any) -> bool:
    """Return whether a positional argument of `Tensor.to` is a device."""
    return isinstance(arg, torch.device | str) or (isinstance(arg, int) and not isinstance(arg, bool))


def _is_meta(arg: Any) -> bool:
    """Return whether an argument names the meta device."""
    return (isinstance(arg, str) and arg.startswith("meta")) or (isinstance(arg, torch.device) and arg.type == "meta")


def whole_truncated_normal(tape: Tape) -> Replaced:
    """Tape `trunc_normal_` as one operation: it redraws until its numbers fit, which only a replay can decide."""

    def taping(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def taped(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if len(args) > 4 or kwargs.get("generator") is not None:  # whose numbers are constants
                with tape.paused(), DisableTorchFunction():
                    drawn = tape.lift(original(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs))
                with torch.no_grad():
                    return tensor.copy_(drawn)
            kwargs.pop("generator", None)
            with DisableTorchFunction():
                tape.record(original, (tensor, *args), kwargs, None, tensor, overwrites=True, random=True)
            return tensor

        return taped

    return Replaced((nn.init, "_no_grad_trunc_normal_", taping))


@contextmanager
def process_randomness(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch for the draws of a build function, and restore their states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
