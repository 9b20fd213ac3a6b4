"""The interfaces of a step: its batch, its scalars, and its observers, the one seam for proofs and profilers.

```
forward_backward   for each task:  with observer.running(task, samples): ...    forward, backward, weight gradients
                   in a forward:   observer.dropout_mode()
step               observer.agreed(scalars)                                     after the step's one all_reduce
                   with observer.running(update, none): ...                     unless the step is skipped
```

The scalars of a step, which its one all_reduce sums over all ranks, are written and read here: float64, as many as `StepSpec.num_scalars`.

    each replica: loss, count, norm_squared, and a number for each weight of `StepSpec.unsure`      ops.REPLICA_SCALARS
                  and the sum and the count of each named term and value of the loss                `StepSpec.num_reported`
    the step:     stop, save and record, wrote_unseen, refuses, unused_changed                     ops.StepFlag
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from samestep.program.ops import FLAG_PLACES, FLAG_SLOTS, REPLICA_SCALARS, StepFlag, Task
from samestep.randomness.dropout_state import MakeMode as MakeMode

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class ReplicaScalars:
    """The scalars of one replica in one step, each summed over its ranks."""

    loss_sum: float
    count: float
    norm_squared: float


@dataclass(frozen=True, slots=True)
class StepScalars:
    """The scalars of one step, each summed over all ranks, as the host has read them."""

    loss_sum: float
    """The sum of the loss over the step."""
    count: float
    """Tokens or samples that the loss counts."""
    norm_squared: float
    """Squared norm of the gradients as the backward left them: scaled by the loss scale over `nominal_count`."""
    replicas: tuple[ReplicaScalars, ...]
    """Those of each replica, where replicas are trained apart; else one."""
    flags: Mapping[StepFlag, float]
    """The number of ranks that raise each flag."""
    uses: list[Sequence[float]]
    """The number of ranks that gave a gradient to each weight with a number in the scalars, by replica."""
    reported: Sequence[float] = ()
    """The sum and the count of each named term and value of the loss, over all replicas."""

    def guarded(self, least: float) -> StepScalars:
        """Return the scalars with at least so large a count, as a loss has guarded it against zero."""
        replicas = tuple([replace(replica, count=max(replica.count, least)) for replica in self.replicas])
        return replace(self, count=sum(replica.count for replica in replicas), replicas=replicas)

    @classmethod
    def of(cls, numbers: Sequence[float], num_uses: int, num_reported: int = 0) -> StepScalars:
        """Return the scalars in the numbers of a step; each replica has `num_uses` numbers of weights, and `num_reported` to report."""
        sums, width = numbers[:-FLAG_SLOTS], len(REPLICA_SCALARS)
        each, uses = width + num_uses + num_reported, slice(width, width + num_uses)
        parts = [sums[start : start + each] for start in range(0, len(sums), each)]
        replicas = tuple([ReplicaScalars(*part[:width]) for part in parts])
        loss_sum, count, norm_squared, *columns = map(sum, zip(*parts, strict=True))
        slots, shared = numbers[-FLAG_SLOTS:], FLAG_PLACES[StepFlag.RECORD][1]
        flags: dict[StepFlag, float] = {flag: slots[flag] for flag in _IN_SLOTS}
        flags[StepFlag.RECORD], flags[StepFlag.SAVE] = slots[StepFlag.SAVE] // shared, slots[StepFlag.SAVE] % shared
        return cls(loss_sum, count, norm_squared, replicas, flags, [part[uses] for part in parts], columns[num_uses:])


class StepObserver:
    """Observes the steps of a run, on each rank separately. Every method of this base class does nothing."""

    is_proof = False
    """Whether it compares the steps with those of another run, so that the run need not try samples again."""

    hears_scalars = False
    """Whether it reads a step's scalars before the update, for which the host must then wait."""

    def __init_subclass__(cls) -> None:
        cls.hears_scalars = cls.agreed is not StepObserver.agreed

    def running(self, task: Task, samples: Indices) -> AbstractContextManager[None]:
        """Return the context in which a task runs; `samples` are those of its micro-batch, none for the update."""
        return _NOTHING

    def dropout_mode(self) -> MakeMode | None:
        """Return a factory of the dropout mode of the next training forward; None leaves dropout to the run."""
        return None

    def agreed(self, scalars: StepScalars) -> None:
        """Receive the step's scalars, equal on all ranks, before the weights are updated."""


Indices = np.ndarray[Any, np.dtype[np.int64]]
"""Global indices of samples."""


class StepBatch(Protocol):
    """The global batch of one step, as `datasets.Batch` implements it: every rank reads only its part."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        ...

    @property
    def num_samples(self) -> int:
        """The number of samples of all ranks."""
        ...

    def shares(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Indices]:
        """Return the sample indices of each micro-batch of a rank; a micro-batch may be empty."""
        ...

    def samples(self, indices: Sequence[int] | Indices) -> Any:
        """Read samples into tensors with the batch dimension first."""
        ...

    def read_ahead(self, rank: int, num_ranks: int, num_microbatches: int, *, pin: bool = False) -> None:
        """Begin to read a rank's micro-batches before they are asked for; `pin` puts them where a GPU copies from."""
        ...

    def before_next(self, function: Callable[[], None]) -> None:
        """Call a function before the next batch of the stream."""
        ...

    def end_stream(self) -> None:
        """End the stream of batches after this one, since the ranks agreed to stop."""
        ...


def flag_slots(raised: Mapping[StepFlag, bool | Tensor], device: torch.device) -> Tensor:
    """Return one rank's flags in their slots (float64): filled on the device, since a copy would hold the host."""
    slots = torch.zeros(FLAG_SLOTS, dtype=torch.float64, device=device)
    for flag, value in raised.items():
        slot, unit = FLAG_PLACES[flag]
        if isinstance(value, Tensor):
            slots[slot].add_(value, alpha=unit)
        elif value:
            slots[slot].add_(unit)
    return slots


_IN_SLOTS = [flag for flag in StepFlag if flag not in (StepFlag.RECORD, StepFlag.SAVE)]
"""The flags that have a slot each."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The loss and the gradient norm of a step, as they follow on the host from its summed scalars."""

    loss: float
    norm: float
    """Of replicas that are trained apart, the root mean square of their norms."""
    is_masked: bool
    """Whether nothing counts, and nothing else is unusual."""
    scales: Sequence[float | None]
    """The factor on each replica's gradients before clipping; None where its part counts nothing, and so has no update."""
    norms: Sequence[float]
    """The norm of each replica's gradients."""

    @classmethod
    def of(cls, scalars: StepScalars, numerator: float) -> StepNumbers:
        """Return the numbers of a step whose gradients are scaled by the count over `numerator`."""
        scales = [numerator / replica.count if replica.count else None for replica in scalars.replicas]
        norms = [
            math.sqrt(replica.norm_squared) * (scale or 0.0)
            for replica, scale in zip(scalars.replicas, scales, strict=True)
        ]
        loss = scalars.loss_sum / scalars.count if scalars.count else math.nan
        norm = math.hypot(*norms) / math.sqrt(len(norms))
        is_masked = not scalars.count and math.isfinite(scalars.loss_sum) and math.isfinite(norm)
        return cls(loss, norm, is_masked, scales, norms)

    @property
    def are_finite(self) -> bool:
        """Whether loss and norm are."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)
