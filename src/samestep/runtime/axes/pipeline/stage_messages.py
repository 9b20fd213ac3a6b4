"""The messages between the stages of a pipeline: activations in one direction, their gradients in the other.

Sends leave while the stage goes on computing, and receives are posted ahead of need: gloo moves bytes only once both
ends have asked for them. A *link* is all messages of one direction, forward or backward, between two neighbours, or around
the end of the axis between the last stage and the first. Each has a process group of its own: NCCL runs the messages of a
rank in one group one after the other, and would wait forever for a receive that was posted ahead of a send. That both
ends of a link issue its messages in one order, and never wait in a circle, is checked before the first step.

A buffer that was sent is kept until a message comes back that its receiver can only have sent after receiving it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep import schedules
from samestep.errors import LayoutError
from samestep.program.program import Program
from samestep.runtime.axes.forward_only import is_forward_only
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.schedules import Action, Message, TaskKind, link_of
from samestep.strategies.pipeline import crossings_at

_FIRST_TAG = 2**29

Pending = list[tuple[dist.Work, Tensor]]
"""Sends or receives under way, with their tensors."""


class Awaited(NamedTuple):
    """A tensor that one rank sends to another: its name in the program, its shape and its dtype."""

    owner: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _MessageQueue:
    """The messages that one link still has to deliver in this step, and the receives that are posted already."""

    due: list[Action] = field(default_factory=list)
    """Actions of this stage that wait for a message; the next one last."""
    posted: dict[Action, Pending] = field(default_factory=dict)


class Messages:
    """The messages between this rank and the ranks before and after it on the axis, in one step."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self._program, self._mesh = program, mesh
        self._arrivals = _arrivals_of(program)
        self._links: dict[str, _MessageQueue] = {}
        self._sent: dict[Action, Pending] = {}
        """Sends under way, by the action that made the tensors."""
        model = program.step.model
        self._most = max(len(crossings_at(model, boundary)) for boundary in range(1, len(model.layers)))

    def begin_step(self) -> None:
        """Set the messages of the step."""
        self._links = {}
        for action in reversed(self._arrivals):
            if self._is_passed(action):
                self._links.setdefault(self._link_of(action), _MessageQueue()).due.append(action)

    def send(self, action: Action, tensors: Sequence[Tensor], awaited: Sequence[Awaited]) -> None:
        """Send the tensors of an action, which the other end expects in these shapes and dtypes.

        Raises:
            LayoutError: they have others, so that the other end would take their bits for other numbers.
        """
        boundary, step = self._boundary(action, sends=True)
        pending: Pending = []
        for index, (tensor, message) in enumerate(zip(tensors, awaited, strict=True)):
            if tuple(tensor.shape) != message.shape or tensor.dtype != message.dtype:
                raise LayoutError(
                    "pp-shapes-vary",
                    f"{message.owner} is {_describe_tensor(tensor.shape, tensor.dtype)}, and in the trace was "
                    f"{_describe_tensor(message.shape, message.dtype)}, so the next stage of the pipeline cannot take it. Use pp=1",
                )
            sendable = tensor.contiguous()
            with owned(message.owner, "send") as issue:
                group = self._mesh.links[self._link_of(action, sends=True)]
                work = issue.sent(
                    dist.isend(sendable, self._peer(step), group=group, tag=self._tag(boundary, action, index))
                )
            assert work is not None
            pending.append((work, sendable))
        self._sent[action] = pending

    def receive(self, action: Action, awaited: Sequence[Awaited]) -> list[Tensor]:
        """Wait for the message of an action, and release the tensors that its sender has received by then."""
        link = _MessageQueue() if is_forward_only() else self._links.get(self._link_of(action), _MessageQueue())
        if link.due and link.due[-1] == action:
            link.due.pop()
        pending = link.posted.pop(action) if action in link.posted else self._post(action, awaited)
        shapes, posted = [message.shape for message in awaited], [tuple(into.shape) for _, into in pending]
        assert shapes == posted, f"{action} is given {shapes}, and {posted} was awaited"
        for work, _ in pending:
            work.wait()
        for sent in () if is_forward_only() else self._arrivals[action]:
            self._release(sent)
        return [into for _, into in pending]

    def post_ahead(self, awaited_by: Callable[[Action], Sequence[Awaited] | None]) -> None:
        """Post the next receive of each link, where its shapes are known."""
        if is_forward_only():
            return
        for link in self._links.values():
            action = link.due[-1] if link.due else None
            if action is not None and action not in link.posted and (awaited := awaited_by(action)) is not None:
                link.posted[action] = self._post(action, awaited)

    def finish(self) -> None:
        """Wait until every send has completed, which it does once the neighbour has received it."""
        for action in list(self._sent):
            self._release(action)

    def _post(self, action: Action, awaited: Sequence[Awaited]) -> Pending:
        boundary, step = self._boundary(action, sends=False)
        group = self._mesh.links[self._link_of(action)]
        pending: Pending = []
        for index, message in enumerate(awaited):
            into = torch.empty(message.shape, dtype=message.dtype, device=self._mesh.device)
            with owned(message.owner, "recv") as issue:
                work = issue.sent(
                    dist.irecv(into, self._peer(step), group=group, tag=self._tag(boundary, action, index))
                )
            assert work is not None
            pending.append((work, into))
        return pending

    def _release(self, action: Action) -> None:
        """Free the tensors that an action has sent, once their sends have completed."""
        for work, _ in self._sent.pop(action, ()):
            work.wait()

    def _is_passed(self, action: Action) -> bool:
        """Return whether the message of an action has any tensor: where nothing takes a gradient, none goes back."""
        boundary, _ = self._boundary(action, sends=False)
        crossings = crossings_at(self._program.step.model, boundary)
        return action.kind is TaskKind.FORWARD or any(crossing.takes_gradient for crossing in crossings)

    def _boundary(self, action: Action, *, sends: bool) -> tuple[int, int]:
        """Return the layer before which an action's message passes, and the direction to the other rank: 1 or -1."""
        layers = self._program.chunks[action.chunk]
        is_forward = action.kind is TaskKind.FORWARD
        return (layers.stop, 1) if sends == is_forward else (layers.start, -1)

    def _link_of(self, action: Action, *, sends: bool = False) -> str:
        """Return the name of the link of an action's message, which is that of its process group."""
        _, step = self._boundary(action, sends=sends)
        pp, stage = self._program.step.layout.pp, self._program.step.stage
        other = (stage + step) % pp
        return link_of(Message(stage, other, action) if sends else Message(other, stage, action), pp)

    def _peer(self, step: int) -> int:
        """Return the global rank of the next or previous rank on the axis, around its end."""
        ranks = self._mesh.members("pp")
        return ranks[(ranks.index(self._mesh.rank) + step) % len(ranks)]

    def _tag(self, boundary: int, action: Action, index: int) -> int:
        # gloo counts its collectives by the same tags, from 0: higher ones, or a send would be taken for a collective.
        backward = action.kind is TaskKind.BACKWARD
        number = (action.microbatch * len(self._program.step.model.layers) + boundary) * 2 + backward
        return _FIRST_TAG + number * self._most + index


def _describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} of {str(dtype).removeprefix('torch.')}"


def _arrivals_of(program: Program) -> dict[Action, list[Action]]:
    """Return this stage's actions that need a message, with the sends that must have arrived by then.

    The sender of the message has executed its own order up to it, and so has received everything this needed.

    Raises:
        LayoutError: the messages of the schedule would wait in a circle.
    """
    layout, stage, count = program.step.layout, program.step.stage, program.step.num_microbatches
    chunks = layout.virtual_stages
    orders = [schedules.order(layout.schedule, s, layout.pp, count, chunks) for s in range(layout.pp)]
    schedules.check(orders, chunks)
    known: dict[int, int] = {}  # by sender: how far it must have come in its order
    arrivals: dict[Action, list[Action]] = {}
    for action in orders[stage]:
        for sender, needed in schedules.needs(action, stage, layout.pp, chunks):
            if sender != stage:
                first, after = known.get(sender, 0), orders[sender].index(needed) + 1
                known[sender] = max(first, after)
                passed = [
                    sent
                    for theirs in orders[sender][first:after]
                    for owner, sent in schedules.needs(theirs, sender, layout.pp, chunks)
                    if owner == stage
                ]
                arrivals[action] = passed
    return arrivals
