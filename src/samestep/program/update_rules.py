"""Facts about torch's optimizers, without torch: the states that each keeps of a weight, and those that need it whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from samestep.errors import JobError, did_you_mean
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec

_STATES = {
    "adadelta": 2, "adafactor": 0, "adagrad": 1, "adam": 2, "adamax": 2, "adamw": 2, "asgd": 1, "muon": 1, "nadam": 2,
    "radam": 2, "rmsprop": 1, "rprop": 2, "sgd": 0,
}  # fmt: skip
"""Number of tensors of a weight's shape that each usable class of torch.optim keeps."""
_MORE_STATES = {"adam": ("amsgrad",), "adamw": ("amsgrad",), "rmsprop": ("momentum", "centered"), "sgd": ("momentum",)}
"""Options of these classes that add one such tensor each."""

UPDATED_WHOLE = ("adafactor", "muon")
"""Classes that update a weight whole: `runtime/optimizers/update_rule.py` says why."""


def states_per_param(job: Job) -> int:
    """Return the number of tensors of a matrix's shape that the optimizer keeps; 2, as Adam's, for a function of the user.

    Raises:
        JobError: torch.optim has no such class, or none that can be used.
    """
    return _states_of_any(job.optimizer.name, job.optimizer.options, "optimizer.name")


def own_states(model: ModelSpec, job: Job) -> dict[str, int]:
    """Return that number for each trained weight whose group in the job names another class, or options.

    Raises:
        JobError: torch.optim has no such class, or none that can be used.
    """
    table, counts = job.optimizer, {}
    for number, group in enumerate(table.groups, 1):
        if group.name is not None or group.options:
            options = {**({} if group.name else table.options), **group.options}
            counts[number] = _states_of_any(group.name or table.name, options, f"optimizer.groups.{number - 1}.name")
    if not counts:
        return {}
    numbers = {param.name: table.group_number(param.name) for param in model.params if param.trainable}
    return {name: counts[number] for name, number in numbers.items() if number in counts}


def _states_of_any(name: str, options: Mapping[str, Any], key: str) -> int:
    if ":" in name:
        return 2
    kind = name.lower()
    if kind not in _STATES:
        hint = did_you_mean(kind, _STATES)
        raise JobError(f"{key} = {name!r} is none of {', '.join(_STATES)}{hint}, nor module:function")
    return _STATES[kind] + sum(bool(options.get(option)) for option in _MORE_STATES.get(kind, ()))


def with_whole_updates(model: ModelSpec, job: Job, layout: Layout) -> ModelSpec:
    """Return a model, its weights marked of which the layout leaves a rank a part, and which the job's optimizer updates whole."""
    table = job.optimizer
    classes = [table.name, *(group.name or table.name for group in table.groups)]
    numbers = [number for number, name in enumerate(classes) if name.lower() in UPDATED_WHOLE]
    if not numbers:
        return model

    def marked(param: ParamSpec) -> ParamSpec:
        is_whole = param.trainable and param.numel > 0 and table.group_number(param.name) in numbers
        return replace(param, is_updated_whole=True) if is_whole and parts_of(param, layout) else param

    return replace(model, params=tuple(map(marked, model.params)))


def parts_of(param: ParamSpec, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the largest and the smallest part of a weight that a rank updates; none if all are whole."""
    shape = list(param.shape)
    if param.numel == 1:
        return ()
    if param.cut is not None and layout.tp > 1:
        shape[param.cut.dim] = -(-shape[param.cut.dim] // layout.tp)
    if param.experts and layout.ep > 1:
        shape[0] = -(-shape[0] // layout.ep)
    ranks = layout.num_shards
    if ranks > 1 and layout.zero == 1:
        numel = math.prod(shape)
        return tuple(dict.fromkeys([(-(-numel // ranks),), (1,)]))
    if ranks > 1 and shape:
        rows = -(-shape[0] // ranks)
        last = shape[0] - rows * ((shape[0] - 1) // rows)
        return tuple(dict.fromkeys([(rows, *shape[1:]), (last, *shape[1:])]))
    return (tuple(shape),) if tuple(shape) != param.shape else ()


LARGEST_CHUNK = 2**24
"""Elements of a chunk of an update, unless a single piece has more."""
SMALLEST_CHUNK = 2**20
"""Elements below which an update is not divided further: each chunk adds kernel launches."""


def update_chunks(numels: Sequence[int]) -> list[range]:
    """Return the indices of the pieces that are updated together: runs of pieces with about an eighth of all elements."""
    limit = min(max(sum(numels) // 8, SMALLEST_CHUNK), LARGEST_CHUNK)
    chunks: list[range] = []
    size = 0
    for index, numel in enumerate(numels):
        if chunks and size + numel <= limit:
            chunks[-1], size = range(chunks[-1].start, index + 1), size + numel
        else:
            chunks.append(range(index, index + 1))
            size = numel
    return chunks
