"""A data set tried in the first step: a sample must be the same one whenever, and on whichever rank, it is read.

The samples of a step are a function of the seed and the step, and a layout only decides which rank reads which. Three
mistakes break this, and a few samples of the first batch, read more than once, show each:

    reading draws random numbers, as augmentation in `__getitem__` does    a sample that is read twice is another one
    samples are views of one buffer                                        a sample that is read alone is another one
    the data set is divided among the ranks already                        a sample is another one on another rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from samestep.datasets.values import num_samples, rows_of
from samestep.runtime.guards.repeat import NamedSamples
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import Indices
from samestep.state.fingerprints import digest
from samestep.trees import have_same_values, tensors_in, tree_leaves

_ALONE = 4
_TRIED = 8
"""A data set that flips every other image is found with 255 of 256 chances."""


def data_refusal(named: NamedSamples, world_size: int, *, is_split: bool) -> str:
    """Read some samples of the first batch more than once; return why the data set is refused, or nothing.

    Collective over the world, see [Note: collective calls].
    """
    drawn = _check_repeated_reads(named, named.mine[:_TRIED]) if len(named.mine) else ""
    if world_size == 1 and not is_split:
        return drawn
    whole = named.everyone
    tried = whole[:_ALONE]
    together = named.read(tried)
    divided = _check_division(whole, tree_leaves(together), world_size)
    return drawn or (_check_single_reads(named, tried, together) if is_split else "") or divided


def _check_repeated_reads(named: NamedSamples, tried: Indices) -> str:
    """Read samples twice; return why the data set is refused, or nothing."""
    once, again = named.read(tried), named.read(tried)
    if _are_same(once, again):
        return ""
    count = num_samples(once)
    by_rows = range(len(tried)) if count == len(tried) == num_samples(again) else ()
    rows = [
        row for row in by_rows if not _are_same(rows_of(once, [row], len(tried)), rows_of(again, [row], len(tried)))
    ]
    return (
        f"sample {tried[rows[0]] if rows else tried[0]} of the data set is another one when it is read again, so every "
        "layout would train on other samples, and a resumed run too. Use random numbers from a generator seeded by the "
        "index, as np.random.default_rng(index), or those of the generator that sample(index, generator) is given, and a file "
        "that is opened where it is read, and not before processes share it"
    )


def _check_single_reads(named: NamedSamples, tried: Indices, together: Any) -> str:
    """Read samples alone that were read together; return why the data set is refused where the batch is split, or nothing.

    Samples that are padded together have other shapes alone, which the canary looks at.
    """
    if num_samples(together) != len(tried):
        return ""
    # Twice each: what is computed of a batch, as weights of its classes, may be the same of one sample and of a few.
    twice = named.read(np.repeat(tried, 2))
    twice = twice if num_samples(twice) == 2 * len(tried) else together
    for row, index in enumerate(tried):
        alone, part = named.read(tried[row : row + 1]), rows_of(together, [row], len(tried))
        again = rows_of(twice, [2 * row], 2 * len(tried)) if twice is not together else part
        shapes = [[leaf.shape for leaf in tensors_in(one)] for one in (alone, part, again)]
        if shapes.count(shapes[0]) == len(shapes) and not (_are_same(alone, part) and _are_same(alone, again)):
            return (
                f"sample {index} of the data set is another one when it is read alone than with other samples, and a layout "
                "decides which samples are read together. Return samples that are tensors of their own, and not views of a buffer that "
                "the next one overwrites. Compute values of a whole batch in the batch that run.step(batch) is given"
            )
    return ""


def _check_division(whole: Indices, together: Sequence[Any], world_size: int) -> str:
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
        f"rank {other} reads {what} of the data set than rank 0, so its ranks do not train on the samples of one device. Use the "
        "whole data set on every rank, since a step reads only its rank's share of the batch"
    )


def _are_same(once: Any, again: Any) -> bool:
    """Return whether two nested values hold equal tensors and words, where NaN equals NaN."""
    ones, others = tree_leaves(once), tree_leaves(again)
    return len(ones) == len(others) and all(map(_is_same, ones, others))


def _is_same(once: Any, again: Any) -> bool:
    if not (isinstance(once, Tensor) and isinstance(again, Tensor)):
        return isinstance(once, Tensor) == isinstance(again, Tensor) and (not isinstance(once, str) or once == again)
    return have_same_values(once, again)
