"""The table of torch's own optimizers, without torch: the states that each keeps of a weight, those that need it whole, and states in 8 bits.

States in 8 bits share a scale by blocks: runs of elements of the flattened whole weight that divide its rows, so a cut between rows cuts
no block. A vector, such as a bias or the weight of a norm, has float32 states: it has few elements, and its rows are single numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from samestep.errors import JobError, did_you_mean
from samestep.job import Job
from samestep.job_tables import OptimizerStates
from samestep.layout import Layout
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec


class TorchRule(NamedTuple):
    """The rule of one class of torch.optim, which updates every weight by itself."""

    states: int
    """Number of tensors of a weight's shape that it keeps."""
    more: tuple[str, ...] = ()
    """Options that add one such tensor each."""
    whole: str = ""
    """The operation in which elements of a weight influence each other, so that it is updated whole; empty if there is none."""


TORCH_RULES = {
    "adadelta": TorchRule(2),
    "adafactor": TorchRule(0, whole="a mean over its elements"),
    "adagrad": TorchRule(1),
    "adam": TorchRule(2, ("amsgrad",)),
    "adamax": TorchRule(2),
    "adamw": TorchRule(2, ("amsgrad",)),
    "asgd": TorchRule(1),
    "muon": TorchRule(1, whole="a product of matrices"),
    "nadam": TorchRule(2),
    "radam": TorchRule(2),
    "rmsprop": TorchRule(1, ("momentum", "centered")),
    "rprop": TorchRule(2),
    "sgd": TorchRule(0, ("momentum",)),
}
"""Each usable class of torch.optim, by its name in small letters. `tests/unit/test_update.py` holds it against a trial."""

UPDATED_WHOLE = tuple(name for name, rule in TORCH_RULES.items() if rule.whole)
LARGEST_BLOCK = 256
SCALE_BYTES = 4
"""Bytes of the scale of a block."""
_SIZES = (LARGEST_BLOCK, 128, 64, 32, 16)


def states_per_param(job: Job) -> int:
    """Return the number of tensors of a matrix's shape that the optimizer keeps; 2, as Adam's, for a function of the user.

    Raises:
        JobError: torch.optim has no such class, or none that can be used.
    """
    return _states_of_any(job.optimizer.name, job.optimizer.options, "optimizer.name")


def _own_states(model: ModelSpec, job: Job) -> dict[str, int]:
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
    if kind not in TORCH_RULES:
        hint = did_you_mean(kind, TORCH_RULES)
        raise JobError(
            "none-nor-module-function",
            f"{key} = {name!r} must be one of {', '.join(TORCH_RULES)}{hint}, or module:function",
        )
    rule = TORCH_RULES[kind]
    return rule.states + sum(bool(options.get(option)) for option in rule.more)


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


def block_of(shape: Sequence[int]) -> int:
    """Return the elements of a block of a whole weight's 8-bit states; 0 where its states are float32.

    The largest power of two up to 256 of which a row has a multiple of four, so that rows can be cut too; otherwise the
    largest that divides a row.
    """
    row = math.prod(shape[1:]) if len(shape) > 1 else 0
    return next((size for times in (4, 1) for size in _SIZES if row and row % (times * size) == 0), 0)


@dataclass(frozen=True, kw_only=True)
class HeldStates:
    """The form in which the states of an optimizer are held between two updates, and the number of them for each weight."""

    precision: OptimizerStates = "float32"
    wide_bytes: int = 4
    """Bytes of an element as the optimizer computes with it."""
    blocks: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Elements of a block of each weight's 8-bit states; 0 for a weight whose states are float32."""
    own: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Number of states of each weight whose group in the job has another optimizer."""

    @classmethod
    def of(cls, model: ModelSpec, job: Job, wide_bytes: int) -> HeldStates:
        """Return how a job holds the states of a model's weights."""
        kind = job.numerics.optimizer_states
        blocks = {param.name: block_of(param.shape) for param in model.params} if kind == "8bit" else {}
        return cls(precision=kind, wide_bytes=wide_bytes, blocks=blocks, own=_own_states(model, job))

    @property
    def are_packed(self) -> bool:
        """Whether they are held in fewer bits than the optimizer computes with."""
        return self.precision != "float32"

    @property
    def alignment(self) -> int:
        """The elements by which a rank's part of a weight begins with a block."""
        return LARGEST_BLOCK if self.precision == "8bit" else 1

    @property
    def least_bytes(self) -> int:
        """The fewest bytes that one element of a state takes."""
        return 1 if self.are_packed else self.wide_bytes

    def bytes_of(self, param: ParamSpec, numel: int) -> int:
        """Return the bytes of one state for `numel` elements of a weight."""
        block = self.blocks.get(param.name, 0)
        return numel + numel // block * SCALE_BYTES if block else numel * self.wide_bytes

    def number(self, param: ParamSpec, states_per_param: int) -> int:
        """Return the number of a weight's states: `states_per_param`, unless its group has another optimizer."""
        return self.own.get(param.name, states_per_param)

    def least_number(self, states_per_param: int) -> int:
        """Return the smallest number of states that a weight has."""
        return min(states_per_param, *self.own.values()) if self.own else states_per_param
