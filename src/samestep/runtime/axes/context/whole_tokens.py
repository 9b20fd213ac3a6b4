"""Whole sequences of what a model predicts, under context parallelism, for a loss over all samples of the step.

Each rank of `cp` has the rows of its own tokens, and a loss over the whole batch is given those of all, in their order. It is computed
by every rank, which goes back through the rows of its own tokens; what a step does anyway, to sum the gradients of the ranks of `cp`,
gives the gradient of all. What has no rows of tokens is the same on all of them, and its gradient enters with the first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samestep.building.loss import prediction_of
from samestep.errors import JobError
from samestep.program.program import Program
from samestep.program.ring_visits import SlicePlacement
from samestep.runtime.axes.context.own_rows import rows_of
from samestep.runtime.axes.context.whole_parts import gather_tokens
from samestep.runtime.processes.mesh import Mesh
from samestep.strategies.context import placement_of
from samestep.trees import tensors_in

DIM = 1
"""The dimension of tokens in a prediction."""


class TokenRanks:
    """The ranks that have other tokens of the same samples."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self._step, self._degree = program.step, program.step.layout.cp
        self._group = mesh.groups.get("cp") if self._degree > 1 else None
        self.index = mesh.index("cp") if self._degree > 1 else 0

    @property
    def send(self) -> bool:
        """Whether there are several."""
        return self._degree > 1

    def sliced(self, outputs: Any) -> int | None:
        """Return the index of the tensor of which this rank has the rows of its tokens; None where each rank has whole sequences."""
        if not self.send:
            return None
        prediction = prediction_of(outputs)
        return next(index for index, one in enumerate(tensors_in(outputs)) if one is prediction)

    def check(self, index: int, tensor: Tensor) -> None:
        """Refuse a tensor with a row for each sample that is not the prediction: which of its tokens a rank has is not known.

        Raises:
            JobError: always; all ranks raise it.
        """
        raise JobError(
            f"cp={self._degree} gathers the rows of tokens of the prediction, and the loss over the whole batch also reads output "
            f"{index} {list(tensor.shape)}: cp=1 works"
        )

    def whole(self, mine: Tensor, owner: str) -> Tensor:
        """Return the rows of all tokens [B, T, ...] from those of this rank's [B, T/N, ...].

        Collective over `cp`, see [Note: collective calls].
        """
        assert self._group is not None
        placement = self._placement(self._degree * mine.shape[DIM])
        return gather_tokens(mine, self._group, owner, placement=placement, dim=DIM)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Return the rows of this rank's tokens along a dimension."""
        return rows_of(whole, self._placement(whole.shape[dim]).runs(self.index), dim)

    def _placement(self, length: int) -> SlicePlacement:
        return placement_of(self._step.model, self._step.layout, length, self._step.ranks_per_node)
