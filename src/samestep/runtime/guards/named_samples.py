"""The samples of a step, read again by their indices: a sample must be the same one whenever, and on whichever rank, it is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from samestep.datasets.values import num_samples, rows_of
from samestep.runtime import microbatches
from samestep.runtime.assembly import Assembly
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import Indices, StepBatch
from samestep.state.fingerprints import digest
from samestep.trees import have_same_values, tensors_in, tree_leaves

_READ_ALONE, _READ_TWICE = 4, 8
"""A data set that flips every other image is found with 255 of 256 chances."""
_TRIED = 4
"""Of so many samples of a group the sizes are compared."""


def have_same_leaves(first: Any, second: Any) -> bool:
    """Return whether two nested values hold equal tensors and words, where NaN equals NaN."""

    def is_same(leaf: Any, other: Any) -> bool:
        if isinstance(leaf, Tensor) and isinstance(other, Tensor):
            return have_same_values(leaf, other)
        return isinstance(leaf, Tensor) == isinstance(other, Tensor) and (not isinstance(leaf, str) or leaf == other)

    leaves, others = tree_leaves(first), tree_leaves(second)
    return len(leaves) == len(others) and all(map(is_same, leaves, others))


class NamedSamples:
    """The samples of one step, read again by their indices, as the step reads them."""

    def __init__(self, assembly: Assembly, batch: StepBatch) -> None:
        self.assembly, self.batch = assembly, batch
        mesh = assembly.parallel.mesh
        self.world_size = assembly.parallel.program.step.layout.world_size
        self.everyone: Indices = batch.shares(0, 1, 1)[0]
        """The indices of the samples of all ranks."""
        self.mine: Indices = batch.shares(*mesh.data_share, 1)[0]
        """The indices of this rank's samples; there may be none."""

    def of_microbatch(self, number: int) -> Indices:
        """Return the indices of the samples that run in one of this rank's micro-batches; at least one."""
        parallel = self.assembly.parallel
        share = self.batch.shares(*parallel.mesh.data_share, parallel.program.step.num_microbatches)[number]
        return share if len(share) else self.everyone[:1]

    def read(self, indices: list[int] | Indices) -> Any:
        """Return samples, read together."""
        return microbatches.read(self.assembly, self.batch, np.asarray(indices, dtype=np.int64))[0]

    def few(self, number: int, first: Indices | None = None) -> Indices:
        """Return so many samples and at least two: those of `first`, others of this rank, and then of other ranks; the same one twice if the
        step has no other.
        """
        groups = [self.mine, self.everyone] if first is None else [first, self.mine, self.everyone]
        indices = np.array([*dict.fromkeys(np.concatenate(groups).tolist())][: max(2, number)], dtype=np.int64)
        return indices if len(indices) > 1 else np.concatenate([indices, indices])

    def two_sizes(self, first: Indices) -> Indices | None:
        """Return two samples that are larger together than one of them alone, of the first of `first` and of all; None if there are none."""
        tried = dict.fromkeys([*first[:_TRIED].tolist(), *self.everyone[:_TRIED].tolist()])
        shapes = {index: [leaf.shape[1:] for leaf in tensors_in(self.read([index]))] for index in tried}
        sized = sorted((sum(map(math.prod, shapes[index])), index) for index in tried)
        (least, small), (most, large) = sized[0], sized[-1]
        if least == most or [leaf.shape[1:] for leaf in tensors_in(self.read([small, large]))] == shapes[small]:
            return None
        return np.array([large, small], dtype=np.int64)

    def refusal(self, *, is_split: bool) -> str:
        """Read some samples more than once; return why the data set is refused, or nothing: a sample must be the same one whenever, and on
        whichever rank, it is read.

        Collective over the world, see [Note: collective calls].
        """
        reason = self._differs_again(self.mine[:_READ_TWICE]) if len(self.mine) else ""
        if self.world_size == 1 and not is_split:
            return reason
        few = self.everyone[:_READ_ALONE]
        together = self.read(few)
        with outside_step():
            digests = gather_values([digest(self.everyone.tolist()), digest(tree_leaves(together))], self.world_size)
        other = next((rank for rank, pair in enumerate(digests) if pair != digests[0]), None)
        reason = reason or (self._differs_alone(few, together) if is_split else "")
        if reason or other is None:
            return reason
        what = "other indices" if digests[other][0] != digests[0][0] else f"another sample {few[0]}"
        return (
            f"rank {other} reads {what} of the data set than rank 0, so its ranks do not train on the samples of one device. Use the "
            "whole data set on every rank, since a step reads only its rank's share of the batch"
        )

    def _differs_again(self, few: Indices) -> str:
        """Read samples twice: reading may draw random numbers, as augmentation in `__getitem__` does."""
        first, second = self.read(few), self.read(few)
        if have_same_leaves(first, second):
            return ""
        is_by_row = num_samples(first) == len(few) == num_samples(second)
        rows = (
            row
            for row in range(len(few) if is_by_row else 0)
            if not have_same_leaves(*(rows_of(samples, [row], len(few)) for samples in (first, second)))
        )
        return (
            f"sample {few[next(rows, 0)]} of the data set is another one when it is read again, so every "
            "layout would train on other samples, and a resumed run too. Use random numbers from a generator seeded by the index, as "
            "np.random.default_rng(index), or from the generator of sample(index, generator). Open a file where it is read, after processes start"
        )

    def _differs_alone(self, few: Indices, together: Any) -> str:
        """Read samples alone that were read together: they may be views of one buffer. Those that are padded together have other shapes alone,
        which the canary looks at.
        """
        if num_samples(together) != len(few):
            return ""
        # Twice each: what is computed of a batch, as weights of its classes, may be the same of one sample and of a few.
        twice = self.read(np.repeat(few, 2))
        rows = [rows_of(together, [row], len(few)) for row in range(len(few))]
        is_by_row = num_samples(twice) == 2 * len(few)
        rows_again = [rows_of(twice, [2 * row], 2 * len(few)) for row in range(len(few))] if is_by_row else rows
        for index, row, again in zip(few, rows, rows_again, strict=True):
            alone = self.read([index])
            shapes = [[leaf.shape for leaf in tensors_in(samples)] for samples in (alone, row, again)]
            if shapes.count(shapes[0]) == 3 and not (have_same_leaves(alone, row) and have_same_leaves(alone, again)):
                return (
                    f"sample {index} of the data set is another one when it is read alone than with other samples, and a layout "
                    "decides which samples are read together. Return samples that are tensors of their own, and not views of a buffer that "
                    "the next one overwrites. Compute values of a whole batch in the batch that run.step(batch) is given"
                )
        return ""
