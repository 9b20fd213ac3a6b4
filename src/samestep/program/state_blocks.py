"""The states of an optimizer as a step holds them: how many a weight has, their bytes, and the blocks that share a scale in 8 bits.

A block is a run of elements of the flattened whole weight that divides its rows, so a cut between rows cuts no block.
A vector, such as a bias or the weight of a norm, has float32 states: it has few elements, and its rows are single numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from samestep.job import Job
from samestep.job_tables import OptimizerStates
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec
from samestep.program.update_rules import own_states

LARGEST_BLOCK = 256
SCALE_BYTES = 4
"""Bytes of the scale of a block."""
_SIZES = (LARGEST_BLOCK, 128, 64, 32, 16)


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
        return cls(precision=kind, wide_bytes=wide_bytes, blocks=blocks, own=own_states(model, job))

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
        return {"bf16": 2, "8bit": 1}.get(self.precision, self.wide_bytes)

    def bytes_of(self, param: ParamSpec, numel: int) -> int:
        """Return the bytes of one state for `numel` elements of a weight."""
        if self.precision == "bf16":
            return 2 * numel
        block = self.blocks.get(param.name, 0)
        return numel + numel // block * SCALE_BYTES if block else numel * self.wide_bytes

    def number(self, param: ParamSpec, states_per_param: int) -> int:
        """Return the number of a weight's states: `states_per_param`, unless its group has another optimizer."""
        return self.own.get(param.name, states_per_param)

    def least_number(self, states_per_param: int) -> int:
        """Return the smallest number of states that a weight has."""
        return min(states_per_param, *self.own.values()) if self.own else states_per_param
