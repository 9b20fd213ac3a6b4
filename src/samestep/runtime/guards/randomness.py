"""Random numbers within a step: the process-wide generators must stay where they are.

A layout gives every rank another part of the work, so numbers that a forward, a loss, a backward or an optimizer draws
from a generator of the process (torch on the CPU or the GPU, numpy, Python's `random`) belong to other samples and
weights in every layout, and no checkpoint holds the generators. samestep's own dropout draws from none of them. So
their states are compared before and after each of these calls, at every step; reading samples is left out.

Reading the states takes 25 us, and several times that where other code has filled the caches. In the first steps of a run and in
watched ones they are read around each call, up to four times a micro-batch and twice an update; in the others once before all forwards
and backwards of a step and once after them, and after the update: the step is refused all the same, and for the name of the module its
forward runs once more. Generators that a module or a variable of the code holds are compared too, wherever there are any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from samestep.datasets.generators import states_of
from samestep.state.snapshot import Snapshot


def _states(device: torch.device, own: Sequence[Any] = ()) -> tuple[object, ...]:
    """Return marks of the states of the process-wide and the given generators; equal if nothing was drawn between."""
    states = states_of(own)
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
        """Watch the generators of the process, and the named ones that the model or the loss holds."""
        is_blind = device.type == "cuda" and _attention_moves(device)
        self._device = torch.device("cpu") if is_blind else device
        self._own = tuple(generator for _, generator in own)
        self._names = (*_NAMES[:3], *(name for name, _ in own), *_NAMES[3:])
        self._seen: tuple[object, ...] | None = None
        """The states that the generators must keep; None while other code runs, which may draw."""
        self.is_close = True
        """Whether they are compared around each call, and not around all forwards and backwards of a step at once."""
        is_plain = self._device.type != "cuda" and not self._own
        self._states = states_of if is_plain else functools.partial(_states, self._device, self._own)

    def leave(self) -> None:
        """Let code run that may draw, until the states are taken next."""
        self._seen = None

    def settle(self, *, anew: bool = False) -> None:
        """Take the present states as those before the next call, unless those before a call that has ended stand for them."""
        if anew or self.is_close or self._seen is None:
            self._seen = self._states()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Leave out samples that are read inside a call, as a pipeline's stage reads ahead; where single calls are not compared, the
        generators stand after it where they stood (`datasets/reading.py`).
        """
        before = self._states() if self.is_close else None
        yield
        if before is not None and before == self._seen:
            self._seen = self._states()

    def moved(self, *, ends: bool = False) -> str:
        """Return the name of a generator that has moved since the states were taken, or nothing; and take them anew.

        With `ends` all calls before have ended, around none of which they were compared where the watch is not close.
        """
        if self._seen is None or not (ends or self.is_close):
            return ""
        now = self._states()
        before, self._seen = self._seen, now
        if now == before:
            return ""
        return next(name for name, old, new in zip(self._names, before, now, strict=False) if old != new)


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
        entered.append(_states(device))

    def leave(path: str, module: nn.Module, args: object, output: object) -> None:
        if entered.pop() != _states(device):
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
        f"{who} draws random numbers from {generator}, so every layout would draw others, and a resumed run too. Use numbers of torch in "
        "a forward, such as torch.rand(()) < 0.5 in place of random.random() < 0.5, nn.Dropout, torch.nn.functional.dropout* and the "
        "dropout_p of attention, or numbers that the data set draws from a generator seeded by the sample's index"
    )
