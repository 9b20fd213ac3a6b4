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

from contextlib import suppress
from typing import Any

from torch import nn

from samestep.tracing.forward import ForwardTracer, ValueOf
from samestep.tracing.module_inputs import ForwardCalls
from samestep.tracing.watched_forward import watch_forward

Groups = tuple[tuple[str, ...], ...]
"""The paths of the modules of each group, in the order of their first calls."""


def groups_of(model: nn.Module, modules: ForwardCalls) -> Groups:
    """Return the groups of modules with weights that a forward has called several times, in the order of their first calls."""
    weighted = [path for path, part in model.named_modules() if path and any(True for _ in part.parameters())]
    calls = [(modules.of[path], path) for path in weighted if len(modules.of.get(path, ())) > 1]
    groups: list[list[str]] = []
    end = 0
    for first, last, path in sorted((some[0].entered, max(call.left for call in some), path) for some, path in calls):
        if first > end:
            groups.append([])
        groups[-1].append(path)
        end = max(end, last)
    return tuple(map(tuple, groups))


def called_again(
    module: nn.Module, sample: Any, num_samples: int, value_of: ValueOf | None, *, keeps_all: bool
) -> Groups:
    """Return the groups of a forward of so many copies of a sample on the meta device; none where it cannot be traced.

    `keeps_all` follows the values of all tensors, for models whose code looks at them.
    """
    watch = ForwardTracer(module, {}, keeps_all=keeps_all)
    with suppress(Exception):  # of the user's own code, which a run meets again
        watch_forward(module, sample, num_samples, watch, value_of)
        return groups_of(module, watch.modules)
    return ()


def joined(groups: Groups, other: Groups) -> Groups:
    """Return the groups of two forwards, joined where they have a module in common."""
    merged: list[list[str]] = []
    for group in (*groups, *other):
        alike = [known for known in merged if not {*known}.isdisjoint(group)]
        merged = [known for known in merged if known not in alike]
        merged.append([*dict.fromkeys(path for part in (*alike, group) for path in part)])
    return tuple(map(tuple, merged))
