"""The interfaces of a step: its batch, and its observers, the one seam for proofs and for recorders of spans.

```
forward_backward   for each task:  with observer.running(task, samples): ...    forward, backward, weight gradients
                   in a forward:   observer.dropout_mode()
step               observer.agreed(scalars)                                     after the step's one all_reduce
                   observer.asked_to_record(step)                               where a signal has asked some rank for it
                   with observer.running(update, none): ...                     unless the step is skipped
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from samestep.program.ops import Task
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
    """The scalars of one step, each summed over all ranks."""

    loss_sum: float
    count: float
    """Tokens or samples that the loss counts."""
    norm_squared: float
    """Squared norm of the gradients as the backward left them: scaled by the loss scale over `nominal_count`."""
    stop: float
    """Number of ranks that were asked to stop."""
    replicas: tuple[ReplicaScalars, ...] = ()
    """Those of each replica, where replicas are trained apart; else one."""


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

    def asked_to_record(self, step: int) -> str:
        """Learn that some rank was asked to record steps; all ranks learn it of the same step, counted from 1. Return what will be
        recorded, as a line of the log."""
        return ""


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
