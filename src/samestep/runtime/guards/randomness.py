"""Random numbers within a step: the process-wide generators must stay where they are.

A layout gives every rank another part of the work, so numbers that a forward, a loss, a backward or an optimizer draws
from a generator of the process (torch on the CPU or the GPU, numpy, Python's `random`) belong to other samples and
weights in every layout, and no checkpoint holds the generators. samestep's own dropout draws from none of them. So
their states are compared before and after each of these calls, at every step; reading samples is left out.

Reading the states takes 25 us, and several times that where other code has filled the caches. So they are read once before all forwards
and backwards of a step and once after them, and around the update. To name the module that draws, its forward runs once more.
Generators that a module or a variable of the code holds are compared too, wherever there are any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from samestep.datasets.generators import states_of
from samestep.state.snapshot import Snapshot

_NAMES = ("torch's generator of the CPU", "Python's `random`", "numpy's global generator")
_OF_GPU = ["torch's generator of the GPU"] * 2


def _generator_of(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _states(of_gpu: torch.Generator | None, generators: Sequence[Any]) -> tuple[object, ...]:
    states = states_of(generators)
    return states if of_gpu is None else (*states, of_gpu.get_offset(), of_gpu.initial_seed())


def _attention_moves(device: torch.device) -> bool:
    """Return whether attention without dropout moves the generator of this GPU, as some kernels did that draw nothing."""
    generator = _generator_of(device)
    offset = generator.get_offset()
    query = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    return bool(generator.get_offset() != offset)


class GeneratorWatch:
    """The comparison of the generators around the forwards and backwards of one rank's steps, and around its updates."""

    def __init__(self, device: torch.device) -> None:
        """Watch the generators of the process."""
        is_seen = device.type == "cuda" and not _attention_moves(device)
        self._of_gpu = _generator_of(device) if is_seen else None
        self._named: dict[int, tuple[str, Any]] = {}
        """The generators that code holds, with their names, by identity."""
        self._states: Callable[[], tuple[object, ...]] = states_of
        """Returns marks of the states of all generators; equal if nothing was drawn between."""
        self._seen: tuple[object, ...] | None = None
        """The states that the generators must keep; None while other code runs, which may draw."""

    def watch(self, code: nn.Module | Callable[..., Any]) -> list[str]:
        """Watch the generators that a model or a loss holds, or that its code reaches, too; return the names of iterators."""
        snapshot = Snapshot(code, weights=False)
        for name, generator in snapshot.named_generators:
            self._named.setdefault(id(generator), (f"the generator {name}", generator))
        generators = [generator for _, generator in self._named.values()]
        if generators or self._of_gpu is not None:
            self._states = functools.partial(_states, self._of_gpu, generators)
        self.leave()
        return snapshot.iterators

    def leave(self) -> None:
        """Let code run that may draw, until the states are taken next."""
        self._seen = None

    def settle(self) -> None:
        """Take the present states as those before the next call, unless those before a call that has ended stand for them."""
        if self._seen is None:
            self._seen = self._states()

    def moved(self) -> str:
        """Return the name of a generator that has moved since the states were taken, or nothing; and take them anew."""
        if self._seen is None:
            return ""
        now = self._states()
        last, self._seen = self._seen, now
        if now == last:
            return ""
        names = (*_NAMES, *(name for name, _ in self._named.values()), *_OF_GPU)
        return next(name for name, old, new in zip(names, last, now, strict=False) if old != new)

    def first_module_that_draws(self, model: nn.Module, run: Callable[[], object]) -> str:
        """Run a forward again; return the path of the innermost module in which a generator moves, or nothing."""
        paths: list[str] = []
        entered: list[tuple[object, ...]] = []
        handles = []

        def enter(module: nn.Module, args: object) -> None:
            entered.append(self._states())

        def leave(path: str, module: nn.Module, args: object, output: object) -> None:
            if entered.pop() != self._states():
                paths.append(path or "the model itself")

        try:
            for path, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(enter, prepend=True))
                handles.append(module.register_forward_hook(functools.partial(leave, path)))
            with torch.no_grad(), suppress(Exception):  # a forward that does not run twice is reported without the name
                run()
        finally:
            for handle in handles:
                handle.remove()
        self._seen = self._states()
        return paths[0] if paths else ""


def refusal(who: str, generator: str) -> str:
    """Return why a call that moved a generator is refused."""
    return (
        f"{who} draws random numbers from {generator}, so every layout would draw others, and a resumed run too. Use torch in a forward: "
        "torch.rand(()) < 0.5, nn.Dropout, or dropout_p of attention. Use a generator seeded by the sample's index in a data set"
    )
