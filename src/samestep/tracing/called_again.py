"""Modules that a forward of several samples calls several times, as code does that takes samples one by one or in chunks.

A trace of one sample sees one call of each. Weights that are gathered for the forward must stay gathered from the first call of
such a module to the last one, and their gradients are whole when the backward of the first call is over:

```
for sample in batch:                    one sample       a b
    outputs.append(b(a(sample)))        three            a b a b a b        a group: a and b
```
Modules whose calls alternate are a *group*: none of their backwards is over before that of the last one starts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from samestep.tracing.forward import ValueOf
from samestep.tracing.watched_forward import outputs_on_meta

Groups = tuple[tuple[str, ...], ...]
"""The paths of the modules of each group, in the order of their first calls."""


@dataclass(slots=True)
class _Span:
    """The calls of a module in one forward."""

    first: int
    """The event at which its first call starts, counted over all starts and ends of calls."""
    last: int = 0
    """The event at which its last call ends."""
    count: int = 0


@contextmanager
def record_calls(module: nn.Module) -> Iterator[Mapping[str, _Span]]:
    """Record the calls of all modules below a model in a forward inside."""
    spans: dict[str, _Span] = {}
    events = 0

    def enter(path: str, *_: object) -> None:
        nonlocal events
        events += 1
        spans.setdefault(path, _Span(events)).count += 1

    def leave(path: str, *_: object) -> None:
        nonlocal events
        events += 1
        spans[path].last = events

    with ExitStack() as hooks:
        for path, part in module.named_modules():
            if path and any(True for _ in part.parameters()):
                hooks.enter_context(part.register_forward_pre_hook(functools.partial(enter, path)))
                hooks.enter_context(part.register_forward_hook(functools.partial(leave, path)))
        yield spans


def groups_of(spans: Mapping[str, _Span]) -> Groups:
    """Return the groups of modules that are called several times, in the order in which they are called first."""
    again = sorted(((span.first, span.last, path) for path, span in spans.items() if span.count > 1))
    found: list[list[str]] = []
    end = 0
    for first, last, path in again:
        if first > end:
            found.append([])
        found[-1].append(path)
        end = max(end, last)
    return tuple(map(tuple, found))


def called_again(
    module: nn.Module, sample: Any, num_samples: int, value_of: ValueOf | None, *, keeps_all: bool
) -> Groups:
    """Return the groups of a forward of so many copies of a sample on the meta device; none where it cannot be traced.

    `keeps_all` follows the values of all tensors, for models whose code looks at them.
    """
    with record_calls(module) as spans, suppress(Exception):  # of the user's own code, which a run meets again
        outputs_on_meta(module, sample, num_samples, value_of, keeps_all)
        return groups_of(spans)
    return ()


def joined(one: Groups, other: Groups) -> Groups:
    """Return the groups of two forwards, joined where they have a module in common."""
    found: list[list[str]] = []
    for group in (*one, *other):
        alike = [known for known in found if not {*known}.isdisjoint(group)]
        found = [known for known in found if known not in alike]
        found.append([*dict.fromkeys(path for part in (*alike, group) for path in part)])
    return tuple(map(tuple, found))
