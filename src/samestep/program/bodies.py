"""Keys of the bodies of a program: what a task does, on which chunk, with how many samples, and where in the step."""

from __future__ import annotations

from typing import Literal, NamedTuple

from samestep.schedules import Action, TaskKind

Position = Literal["only", "first", "middle", "last"]
"""Where a micro-batch stands in its step."""


class BodyKey(NamedTuple):
    """The name of a body in its program; `str` writes it as `F.first`, `B.0.of3.last` or `U`."""

    kind: TaskKind
    chunk: int | None = None
    """Index of the virtual stage on its rank; None where one rank runs all layers, and in the update."""
    size: int | None = None
    """Samples of the micro-batch where it is smaller than the step's largest; None for the largest."""
    position: Position | None = None
    """None before the program has tasks, and in the update."""

    def __str__(self) -> str:
        size = None if self.size is None else f"of{self.size}"
        return ".".join(str(part) for part in (self.kind, self.chunk, size, self.position) if part is not None)


UPDATE_BODY = BodyKey(TaskKind.UPDATE)
"""The body of the optimizer's update, and of what is sent just before and behind it."""


class Task(NamedTuple):
    """One entry of a program: a body, and the micro-batch for which it runs."""

    body: BodyKey
    microbatch: int

    @property
    def kind(self) -> TaskKind:
        """What it is."""
        return self.body.kind

    @property
    def chunk(self) -> int:
        """Index of the virtual stage on its rank."""
        return self.body.chunk or 0

    @property
    def action(self) -> Action:
        """The entry of the stage's schedule that it carries out."""
        return Action(self.kind, self.microbatch, self.chunk)


def position(microbatch: int, num_microbatches: int) -> Position:
    """Return where a micro-batch stands in its step."""
    if num_microbatches == 1:
        return "only"
    if microbatch == 0:
        return "first"
    return "last" if microbatch == num_microbatches - 1 else "middle"


def starts_step(body: BodyKey) -> bool:
    """Whether the body belongs to the first micro-batch of a step."""
    return body.position in ("only", "first")


def ends_step(body: BodyKey) -> bool:
    """Whether the body belongs to the last micro-batch of a step."""
    return body.position in ("only", "last")


def is_backward(body: BodyKey) -> bool:
    """Whether the body is one of a backward task."""
    return body.kind is TaskKind.BACKWARD


def is_forward(body: BodyKey) -> bool:
    """Whether the body is one of a forward task."""
    return body.kind is TaskKind.FORWARD
