"""A second trial of a loss that cannot be tried on outputs alone: forward and loss of parts of a batch, each read by itself.

The trial of `loss_trial.py` divides outputs and a batch along their samples. Neither a batch whose tensors have rows of several samples, as
the boxes of all images in one, can be divided so, nor the graph of a loss that takes gradients through the model. Here a few samples are
read and run as one part and as two, A and B, and the sums and counts of their losses must add up:

    loss(read(AB)) = loss(read(A)) + loss(read(B))

It runs where every rank that refuses a step refuses it for such a loss, at the end of the step's backward, and on all ranks alike: what
passes is no reason to refuse. It needs float32 or float64, since a coupled loss may differ by less than 16 bits round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from samestep.independence.roundings import LEAST_MEAN, LIMITS_OF_SUMS
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.guards.repeat import FAILURES, Repeat
from samestep.runtime.ledger import outside_step
from samestep.runtime.step_batch import Indices, StepBatch

_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class PartsTrial:
    """The trial of one step's loss."""

    held: Assembly
    batch: StepBatch
    seed: int

    def passes(self) -> bool:
        """Return whether the sums and counts of this rank's samples add up.

        Collective over the world, see [Note: collective calls].
        """
        held = self.held
        allowed = LIMITS_OF_SUMS.get(DTYPES[held.parallel.program.step.compute_dtype])
        again = Repeat(held, self.batch, held.objective.loss, self.seed, lambda: None)
        few = again.few(_SAMPLES)
        half = len(few) // 2
        with outside_step():
            found = [self._amounts(again, part) for part in (few, few[:half], few[half:])]
        held.weights.store.calls.end_forward_only()
        if allowed is None or any(one is None for one in found):
            return False
        whole, first, second = cast("list[Tensor]", found)
        if not len(whole) == len(first) == len(second):  # a term that counts nothing may be left out
            return False
        scale = torch.stack([whole.abs(), first.abs(), second.abs()]).amax(0)
        scale[::2] = scale[::2].maximum(LEAST_MEAN * scale[1::2])  # each sum is in front of its count
        return bool(((whole - first - second).abs() <= allowed * scale).all())

    def _amounts(self, again: Repeat, indices: Indices) -> Tensor | None:
        """Return the sums and counts of the loss of some samples; none on other stages than the last; None where it fails."""
        try:
            _, losses = again.run(indices, again.read(indices), num_losses=1)
        except FAILURES:
            return None
        return losses[0] if losses else torch.zeros(0, dtype=torch.float64)
