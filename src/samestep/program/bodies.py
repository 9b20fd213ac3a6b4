"""Tasks of a program, and the keys of the bodies that they point at.

A task is one entry of a stage's schedule: a forward, a backward, a weight gradient or the update, for one micro-batch.
Its body is the list of ops that it runs. Tasks that do the same point at one body, which is written and priced once:

```
task    F micro-batch 0   B micro-batch 0   F 1        B 1        F 2       B 2       U
body    F.first           B.first           F.middle   B.middle   F.last    B.last    U
```
First and last micro-batches have bodies of their own, because weights are gathered before the first one and gradients
are reduced behind the last one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from samestep.schedules import Action, TaskKind

Position = Literal["only", "first", "middle", "last"]
"""Position of a micro-batch in its step."""


class BodyKey(NamedTuple):
    """The key of a body in its program; `str` writes it as `F.first`, `B.0.of3.last` or `U`."""

    kind: TaskKind
    chunk: int | None = None
    """Index of the virtual stage (chunk) on its rank; None where one rank runs all layers, and in the update; where several
    steps are played one after the other, the index of an update's step."""
    size: int | None = None
    """Samples of the micro-batch if it is smaller than the step's largest; None for the largest."""
    position: Position | None = None
    """Position of the micro-batch in the step; None before the program has tasks, and in the update."""

    def __str__(self) -> str:
        size = None if self.size is None else f"of{self.size}"
        return ".".join(str(part) for part in (self.kind, self.chunk, size, self.position) if part is not None)


UPDATE_BODY = BodyKey(TaskKind.UPDATE)
"""Key of the body with the optimizer's update and the collectives just before and after it."""


class Task(NamedTuple):
    """One entry of a program: a body, and the micro-batch for which it runs."""

    body: BodyKey
    microbatch: int

    @property
    def kind(self) -> TaskKind:
        """The kind of task: forward, backward, weight gradient, update, or a forward for its outputs alone."""
        return self.body.kind

    @property
    def chunk(self) -> int:
        """Index of the virtual stage (chunk) on its rank; 0 where a rank has one."""
        return self.body.chunk or 0

    @property
    def action(self) -> Action:
        """The entry of the stage's schedule that it carries out."""
        return Action(self.kind, self.microbatch, self.chunk)


def position(microbatch: int, num_microbatches: int) -> Position:
    """Return the position of a micro-batch in its step."""
    if num_microbatches == 1:
        return "only"
    if microbatch == 0:
        return "first"
    return "last" if microbatch == num_microbatches - 1 else "middle"


def starts_step(body: BodyKey) -> bool:
    """Return whether the body belongs to the first micro-batch of a step."""
    return body.position in ("only", "first")


def ends_step(body: BodyKey) -> bool:
    """Return whether the body belongs to the last micro-batch of a step."""
    return body.position in ("only", "last")


def is_backward(body: BodyKey) -> bool:
    """Return whether the body is that of a backward task."""
    return body.kind is TaskKind.BACKWARD


def is_forward(body: BodyKey) -> bool:
    """Return whether the body is that of a forward task, whether a backward follows it or not."""
    return body.kind in (TaskKind.FORWARD, TaskKind.OUTPUTS)
