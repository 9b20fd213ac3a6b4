"""A data set tried in the first step: a sample must be the same one whenever, and on whichever rank, it is read.

The samples of a step are a function of the seed and the step, and a layout only decides which rank reads which. Three
mistakes break this, and a few samples of the first batch, read more than once, show each:

    reading draws random numbers, as augmentation in `__getitem__` does    a sample that is read twice is another one
    samples are views of one buffer                                        a sample that is read alone is another one
    the data set is divided among the ranks already                        a sample is another one on another rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from samestep.runtime.first_state import digest
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.messages import gather_values

Integers = np.ndarray[Any, np.dtype[np.int64]]

_ALONE = 4
_TRIED = 8
"""A data set that flips every other image is found with 255 of 256 chances."""


class Reader(Protocol):
    """A reader of samples: the batch of a step."""

    def samples(self, indices: Sequence[int] | Integers) -> Any:
        """Read samples into tensors with the batch dimension first."""
        ...


def refusal(batch: Reader, mine: Integers, whole: Integers, world_size: int, *, is_split: bool) -> str:
    """Read some samples of the first batch more than once; return why the data set is refused, or nothing.

    `mine` are the indices of this rank's share, `whole` those of the global batch.

    Collective over the world: every rank calls it; if one does not, the others wait until the time limit.
    """
    drawn = _drawn(batch, mine[:_TRIED]) if len(mine) else ""
    if world_size == 1 and not is_split:
        return drawn
    tried = whole[:_ALONE]
    together = tree_leaves(batch.samples(tried))
    divided = _divided(whole, together, world_size)
    return drawn or (_shared(batch, tried, together) if is_split else "") or divided


def _drawn(batch: Reader, tried: Integers) -> str:
    """Read samples twice; return why the data set is refused, or nothing."""
    once, again = tree_leaves(batch.samples(tried)), tree_leaves(batch.samples(tried))
    pairs = list(zip(once, again, strict=False))
    rows = [row for row in range(len(tried)) if not all(_same(first, second, row) for first, second in pairs)]
    if len(once) == len(again) and not rows:
        return ""
    return (
        f"sample {tried[rows[0]] if rows else tried[0]} of the data set is another one when it is read again, so every "
        "layout would train on other samples, and a resumed run too: random numbers from a generator seeded by the "
        "index, as np.random.default_rng(index), work, and so do those of the generator that sample(index, generator) is given"
    )


def _shared(batch: Reader, tried: Integers, together: Sequence[Any]) -> str:
    """Read samples alone that were read together; return why the data set is refused where the batch is split, or nothing.

    Samples that are padded together have other shapes alone, which the canary looks at.
    """
    for row, index in enumerate(tried):
        pairs = list(zip(_tensors(batch.samples(tried[row : row + 1])), _tensors(together), strict=False))
        alike = all(
            one.shape[1:] == all_.shape[1:] and len(one) == 1 and len(all_) == len(tried) for one, all_ in pairs
        )
        if alike and not all(_same(one, all_[row : row + 1], 0) for one, all_ in pairs):
            return (
                f"sample {index} of the data set is another one when it is read alone than with other samples, and a layout "
                "decides which samples are read together: a sample that is a tensor of its own, and no view of a buffer that "
                "the next one overwrites, works"
            )
    return ""


def _divided(whole: Integers, together: Sequence[Any], world_size: int) -> str:
    """Compare the indices of the global batch, and samples of it, over all ranks; return why the data set is refused."""
    if world_size == 1:
        return ""
    with outside_step():
        others = gather_values([digest(whole.tolist()), digest(together)], world_size)
    other = next((rank for rank, theirs in enumerate(others) if theirs != others[0]), None)
    if other is None:
        return ""
    what = "other indices" if others[other][0] != others[0][0] else f"another sample {whole[0]}"
    return (
        f"rank {other} reads {what} of the data set than rank 0, so its ranks do not train on the samples of one device: the "
        "whole data set on every rank works, since a step reads only its rank's share of the batch"
    )


def _tensors(samples: Any) -> list[Tensor]:
    """Return the tensors of samples; words beside them are one for each sample, so their number changes with that."""
    return [leaf for leaf in tree_leaves(samples) if isinstance(leaf, Tensor)]


def _same(once: Any, again: Any, row: int) -> bool:
    if not (isinstance(once, Tensor) and isinstance(again, Tensor)):
        return isinstance(once, Tensor) == isinstance(again, Tensor) and (not isinstance(once, str) or once == again)
    if once.shape != again.shape or once.dtype != again.dtype:
        return False
    if row >= len(once) if once.dim() else True:
        return torch.equal(once, again)
    return torch.allclose(once[row], again[row], rtol=0.0, atol=0.0, equal_nan=True)
