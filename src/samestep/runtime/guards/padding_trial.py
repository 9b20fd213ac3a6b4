"""The trial of padding: two samples of different sizes, padded to one, must have the loss that they have alone.

    (sum, count) of [long, short padded]    =    (sum, count) of [long]  +  (sum, count) of [short]

The size to which a sample is padded is that of the longest one that is read with it, which a layout changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from samestep.runtime.guards.deviation import ALLOWANCE_FACTOR, PERTURBED_FORWARDS, relative_deviation
from samestep.runtime.step_observer import Indices

LossOf = Callable[[Indices, tuple[float, int] | None], Tensor | None]
"""Returns the sum and the count of the loss of samples that are read together, and None where there is none: on a stage that does
not end the model, or where the model fails. A relative rounding shakes every module, with a seed of its signs."""
_TRIED = 4
"""Of so many samples of each group the sizes are compared."""


def of_two_sizes(groups: Iterable[Indices], shapes_of: Callable[[list[int]], list[torch.Size]]) -> Indices | None:
    """Return two samples that are larger together than one of them alone, of the first of each group; None if there are none.

    `shapes_of` returns the shapes of samples that are read together, without the dimension of the samples.
    """
    tried = dict.fromkeys(index for group in groups for index in group[:_TRIED].tolist())
    sized = sorted((sum(math.prod(shape) for shape in shapes_of([index])), index) for index in tried)
    (least, small), (most, large) = sized[0], sized[-1]
    if least == most or shapes_of([small, large]) == shapes_of([small]):
        return None
    return np.array([large, small], dtype=np.int64)


def misfit(pair: Indices, loss_of: LossOf, largest: Callable[[float], float], allowed: float, *, is_idle: bool) -> str:
    """Return why the loss of a pair of samples is not the sum of theirs alone; empty if it is, up to roundings.

    Collective over the world: every rank calls it, and one that has no such pair runs as many forwards (`is_idle`); if one does
    not, the others wait until the time limit. `largest` returns the largest of all ranks' values.
    """
    both, one, other = (loss_of(part, None) for part in (pair, pair[:1], pair[1:]))
    apart = None if one is None or other is None else one + other
    deviation = largest(0.0 if is_idle or both is None or apart is None else relative_deviation(both, apart))
    if deviation <= allowed:
        return ""
    rounding = allowed / ALLOWANCE_FACTOR
    shaken = [loss_of(pair, (rounding, seed)) for seed in range(PERTURBED_FORWARDS)]
    measured = [relative_deviation(both, loss) for loss in shaken if both is not None and loss is not None]
    if deviation <= ALLOWANCE_FACTOR * max(largest(max(measured, default=0.0)), rounding):
        return ""
    return (
        f"samples {pair[0]} and {pair[1]} have different sizes, and padded to one size their loss and count differ by "
        f"{deviation:.1e} from the sum of theirs alone: what they are padded with counts, and how long a sample is padded "
        "depends on the samples that are read with it, which a layout changes; a forward and a loss that mask the padding "
        "work, samples of one size, and one rank with the whole batch as its micro-batch"
    )
