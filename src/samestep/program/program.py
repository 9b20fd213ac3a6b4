"""One optimizer step as plain data: what every rank of every pipeline stage computes, sends and waits for.

[Note: one step, four readers]  `plan` prices a program, `simulate` plays it on a clock, `train` carries it out,
`verify` proves it. Because there is one program, a prediction can be checked: the collectives that torch really sent
must equal those listed here (the ledger).

A `Program` is the list of tasks of one pipeline stage; a task (the forward of micro-batch 3, say) points at a body, a
list of ops written once and shared by all tasks that do the same. Ops are *driven* (issued by our interpreter) or
*implied* (issued by FSDP2 inside a driven op). Buckets and units are decided here, without torch; the runtime obeys.

```
stage 0:  F.first ─ B.first ─ F.last ─ B.last ─ U             tasks
                                        │
          B.last = backward:layers.1, reduce:bucket.0, ...     a body: ops in the order in which they are issued
```
Ops of one stream run in order: compute is one stream, each axis another. An op also waits for the latest earlier
ops of the names in `after`, and compute for all that was issued before it over an axis of `EXPOSED_AXES`: these exchanges
stand within a layer, whose compute is one op. All else runs beside compute: gathers ahead of need, reductions behind the
backward, messages between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from samestep.program.bodies import BodyKey, ends_step
from samestep.program.buckets import Bucket
from samestep.program.ops import LedgerRow, Op, Ops, Task, ledger_key
from samestep.program.step import StepSpec
from samestep.program.units import Unit
from samestep.schedules import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One step on one pipeline stage: its tasks, the bodies they point at, and the geometry the runtime obeys."""

    step: StepSpec
    bodies: Mapping[BodyKey, Ops]
    tasks: tuple[Task, ...] = ()
    """In the order in which they run; the last one is the update."""
    buckets: tuple[Bucket, ...] = ()
    units: tuple[Unit, ...] = ()
    chunks: tuple[range, ...] = ()
    """Layers of each virtual stage of this rank; empty where one rank runs all layers."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Ranks in a group of each axis that the program sends over."""

    def with_bodies(self, rewrite: Callable[[BodyKey, Ops], Ops], **changes: Any) -> Program:
        """Return the program with each body rewritten, and other fields changed."""
        bodies = {key: rewrite(key, ops) for key, ops in self.bodies.items()}
        return replace(self, bodies=bodies, **changes)

    def ops(self) -> Iterator[tuple[Task, Op]]:
        """Yield every op of the step with its task, in the order of issue."""
        for task in self.tasks:
            for op in self.bodies[task.body]:
                yield task, op

    def ledger(self, group_of: Callable[[str], str] = str) -> dict[str, list[LedgerRow]]:
        """List what each group sends, in order of issue, and what it receives; how these lists interleave is timing.

        `group_of` names the group that serves an axis: two axes over the same ranks share one.
        """
        rows: dict[str, list[LedgerRow]] = {}
        for _, op in self.ops():
            if op.axis is not None:
                row = LedgerRow(str(op.kind), op.dtype, op.size_bytes, op.owner)
                rows.setdefault(ledger_key(group_of(op.axis), row), []).append(row)
        return rows


def ends_gradients(body: BodyKey, step: StepSpec) -> bool:
    """Whether the body leaves the last gradients of a step."""
    kind = TaskKind.WEIGHT if step.splits_backward else TaskKind.BACKWARD
    return ends_step(body) and body.kind is kind
