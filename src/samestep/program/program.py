"""The `Program` of one optimizer step on one pipeline stage, and the ledger of its collectives.

[Note: one step, five readers]  `plan` prices a program, `simulate` plays it on a clock, `train` carries it out, `verify`
proves it, and `explain` compares its predicted times with measured ones. Because all read the same program, a prediction can be
checked: the collectives that torch recorded must equal those listed here. That comparison is the ledger.

A program is the list of tasks of one stage. A task (`ops.py`) points at a body, a list of ops (`ops.py`). The
strategies write the bodies and decide buckets and units (`buckets.py`) without torch; the runtime follows them and
decides nothing anew.

```
stage 0:  F.first ─ B.first ─ F.last ─ B.last ─ U             tasks
                                        │
          B.last = backward:layers.1, reduce:bucket.0, ...     a body: ops in the order in which they are issued
```
Ops of one stream run in order: compute is one stream, and each axis is another. An op also waits for the latest earlier
ops named in its `after`. Compute waits for every exposed op issued before it (`Op.is_exposed`), because those collectives
lie within a layer, whose compute is a single op. All other communication overlaps with compute: prefetched gathers,
reductions during backward, messages between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from samestep.program.buckets import Bucket
from samestep.program.exchange_times import Phase
from samestep.program.followed_weights import FollowedWeights
from samestep.program.host_modules import HostModule
from samestep.program.ops import UPDATE_BODY, BodyKey, Op, OpKind, Ops, Task
from samestep.program.owners import Owners
from samestep.program.step import StepSpec
from samestep.program.units import Unit


class LedgerRow(NamedTuple):
    """One collective as the program predicts it or as torch recorded it: kind, dtype, bytes and owner."""

    kind: str
    dtype: str
    size_bytes: int
    owner: str


def ledger_key(group: str, row: LedgerRow) -> str:
    """Return the key of the ledger's list that a row belongs to: its group, or for a receive its group and owner.

    Each owner's receives have a list of their own, because they are posted early, as soon as a buffer is free.
    """
    return f"{group} recv {row.owner}" if row.kind == OpKind.RECV else group


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One step on one pipeline stage: its tasks, the bodies they point at, and the buckets and units of the runtime."""

    step: StepSpec
    bodies: Mapping[BodyKey, Ops]
    """Ops of each body, in order of issue."""
    tasks: tuple[Task, ...] = ()
    """Tasks in the order in which they run; the last one is the update."""
    buckets: tuple[Bucket, ...] = ()
    units: tuple[Unit, ...] = ()
    owners: tuple[Owners, ...] = ()
    """Who updates the weights that ZeRO shards and their optimizer needs whole."""
    chunks: tuple[range, ...] = ()
    """Layers of each virtual stage (chunk) of this rank; empty where one rank runs all layers."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Number of ranks in a group of each axis that the program communicates over."""
    host_modules: tuple[HostModule, ...] = ()
    """Modules whose weights are copied to the device for each of their calls."""
    followed: tuple[FollowedWeights, ...] = ()
    """The weights that stages send each other after a step, since models on other stages follow them."""
    exchanges: tuple[Mapping[Phase, Ops], ...] = ()
    """Ops that exchange each part of the weights of independently trained replicas, by the phases of `exchange_times.py`: codes
    or sums of the moves of weights, and under zero=1 the weights, which are gathered once more."""

    def with_bodies(self, rewrite: Callable[[BodyKey, Ops], Ops], **changes: Any) -> Program:
        """Return the program with `rewrite` applied to each body, and other fields changed."""
        bodies = {key: rewrite(key, ops) for key, ops in self.bodies.items()}
        return replace(self, bodies=bodies, **changes)

    def with_update(self, rewrite: Callable[[Ops], Ops], **changes: Any) -> Program:
        """Return the program with `rewrite` applied to the body of the update, and other fields changed."""
        return replace(self, bodies={**self.bodies, UPDATE_BODY: rewrite(self.bodies[UPDATE_BODY])}, **changes)

    def tasks_of(self, index: int) -> tuple[Task, ...]:
        """Return the forwards and backwards of one of the replicas that this rank trains; all, where it trains one."""
        if self.step.replicas_each == 1:
            return self.tasks[:-1]
        size = self.step.num_microbatches // self.step.replicas_each
        return tuple(task for task in self.tasks[:-1] if task.microbatch // size == index)

    def ops(self) -> Iterator[tuple[Task, Op]]:
        """Yield every op of the step with its task, in the order of issue."""
        for task in self.tasks:
            for op in self.bodies[task.body]:
                yield task, op

    def ledger(self, group_of: Callable[[str], str] = str) -> dict[str, list[LedgerRow]]:
        """Return the predicted collectives of each group, in order of issue.

        Lists of different groups may interleave in any way. `group_of` returns the name of the group that serves an
        axis, since two axes over the same ranks share one group.
        """
        rows: dict[str, list[LedgerRow]] = {}
        for _, op in self.ops():
            if op.axis is not None:
                row = LedgerRow(str(op.kind), op.dtype, op.size_bytes, op.owner)
                rows.setdefault(ledger_key(group_of(op.axis), row), []).append(row)
        return rows
