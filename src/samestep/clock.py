"""Plays a step: when each op of every pipeline stage starts and ends on given hardware. No torch, no processes.

The ranks of a stage do the same at the same time, so one program stands for all of them and thousands of devices cost
no more than one. Streams run their ops in the order of issue, beside each other:

    start of an op = the later of   the end of the op before it on its stream
                                    the ends of the latest earlier ops of the names in `after`, of any task

Compute waits for no collective it does not name, but those within a layer (`EXPOSED_AXES`): the next product needs
what comes. Where communication does not run beside compute (`hardware.overlap` is false) all ops of a stage are one queue; where it does,
compute beside it is slowed by `hardware.contention`, c: a compute op of T seconds, beside which collectives that were
issued before it run for t of them, takes

    T + min(t, c T) (1 - 1/c)          both want the same memory and multiprocessors (arXiv:2507.03114)

What stages do together:

    send, recv      a recv ends when the send of the same name and micro-batch on the neighbour does; each direction is a
                    stream of its own, as a link is
    world, tie      ops of axes that run through stages start when the last stage has come to them; those of a tie have a
                    stream of their own everywhere, since the first stage comes to them long after the last one

Issuing is not waiting: a stage plays on behind an op whose end another stage decides, until an op needs that end.

A name in `after` must have been issued: a strategy that leaves an op out leaves its name out too. A wait for what no
earlier op is, or for what no other stage ever sends, would never end on a real machine, so here it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from samestep import schedules
from samestep.cost import seconds
from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.program import EXPOSED_AXES, Kind, Op, Ops, Program, Task, TaskKind, is_backward
from samestep.timeline import COMPUTE, Span, Timeline

Prices = Mapping[str, tuple[tuple[Op, str, float, str, bool], ...]]
"""Of each body: its ops with their names, seconds and queues, and whether another stage takes part in them."""

_TOGETHER = ("world", "tie")
"""Axes that run through pipeline stages."""


def play(programs: Sequence[Program], hardware: Hardware) -> Timeline:
    """Play the programs of all pipeline stages, in their order, until each has ended.

    Raises:
        RuntimeError: an op waits for one that was never issued; both are named.
        LayoutError: stages wait for each other for ever; the op of each is named.
        SamestepError: the hardware has no speed for the program's dtype.
    """
    meetings = _Meetings()
    stages = [_Stage(index, program, hardware, meetings, len(programs)) for index, program in enumerate(programs)]
    waiting = list(stages)
    while waiting:
        moved = False
        for stage in waiting:
            moved |= stage.advance()
        waiting = [stage for stage in waiting if not stage.done]
        if waiting and not moved:
            stuck = "; ".join(f"stage {stage.index} at {stage.at}" for stage in waiting)
            raise LayoutError(f"the stages wait for each other for ever: {stuck}")
    return Timeline(tuple(span for stage in stages for span in stage.spans))


@dataclass(slots=True)
class _Meetings:
    """What stages know of each other."""

    sent: dict[tuple[str, int, bool, int], tuple[float, float]] = field(default_factory=dict)
    """Start and end of each send: (owner, micro-batch, is it backward's, receiving stage)."""
    arrived: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)
    """When each stage has come to the n-th op of an axis that they share."""


class _Parked(NamedTuple):
    """An op that was issued, and whose times another stage decides."""

    times: Callable[[], tuple[float, float] | None]
    queue: str
    span: int
    """Index of the span that waits for its times."""


class _Crowd:
    """Collectives that run beside compute, and how much they slow it."""

    __slots__ = ("_contention", "_times")

    def __init__(self, contention: float) -> None:
        self._contention = contention
        self._times: list[tuple[float, float]] = []

    def joined(self, queue: str, start_s: float, end_s: float) -> None:
        """Note an op that was issued; one of the compute queue is beside nothing."""
        if self._contention > 1.0 and queue not in ("", COMPUTE) and end_s > start_s:
            self._times.append((start_s, end_s))

    def slowed(self, start_s: float, op_s: float) -> float:
        """Return the seconds of a compute op; compute ops are asked for in their order."""
        if not self._times:
            return op_s
        self._times = [times for times in self._times if times[1] > start_s]
        most_s = self._contention * op_s
        beside_s = sum(
            min(end, start_s + most_s) - max(begin, start_s) for begin, end in self._times if begin < start_s + most_s
        )
        return op_s + min(beside_s, most_s) * (1 - 1 / self._contention)


class _Stage:
    """One stage on its way through its program."""

    def __init__(self, index: int, program: Program, hardware: Hardware, meetings: _Meetings, count: int) -> None:
        self.index, self.at, self.done = index, "", False
        self.spans: list[Span] = []
        self._program = program
        self._contention = hardware.contention
        self._meetings, self._count = meetings, count
        self._ended: dict[str, float] = {}
        self._free: dict[str, float] = {}
        self._met: dict[str, int] = {}
        self._parked: dict[str, _Parked] = {}
        self._played = 0
        self._steps = self._play(_prices(program, hardware))

    def advance(self) -> bool:
        """Play until the program ends or another stage has to come first; return whether anything was played."""
        before = self._played
        self.done = next(self._steps, True)
        return self.done or self._played > before

    def _play(self, prices: Prices) -> Iterator[bool]:
        """Play op by op; yield False while the next one has to wait for another stage."""
        ended, free, spans, stage, parked = self._ended, self._free, self.spans, self.index, self._parked
        crowd = _Crowd(self._contention)
        for task in self._program.stages[0]:
            label = f"{task.kind}{task.microbatch}"
            for op, name, op_s, queue, shared in prices[task.body]:
                if parked:
                    yield from self._wait_for([n for n, one in parked.items() if n in op.after or one.queue == queue])
                start_s = free.get(queue, 0.0)
                for awaited in op.after:
                    if awaited not in ended:
                        raise RuntimeError(
                            f"{name} of task {label} on stage {stage} waits for {awaited}, and no earlier op is that"
                        )
                    start_s = max(start_s, ended[awaited])
                end_s = start_s + (op_s if op.axis else crowd.slowed(start_s, op_s))
                spans.append(Span(stage, op.axis or COMPUTE, name, label, start_s, end_s))
                self._played += 1
                if shared and self._count > 1:
                    parked[name] = _Parked(self._times(op, task, start_s, op_s), queue, len(spans) - 1)
                    self._settle(name)
                else:
                    ended[name] = free[queue] = end_s
                    crowd.joined(queue, start_s, end_s)
        yield from self._wait_for(list(parked))

    def _wait_for(self, names: Sequence[str]) -> Iterator[bool]:
        """Yield False until the ends of these parked ops are known."""
        for name in names:
            while not self._settle(name):
                waiting = self.spans[self._parked[name].span]
                self.at = f"{waiting.name} of task {waiting.task}"
                yield False

    def _settle(self, name: str) -> bool:
        """Write down when a parked op ran, if the other stages have come to it."""
        times, queue, index = self._parked[name]
        found = times()
        if found is None:
            return False
        del self._parked[name]
        self.spans[index] = self.spans[index]._replace(start_s=found[0], end_s=found[1])
        self._ended[name] = self._free[queue] = found[1]
        self._played += 1
        return True

    def _times(self, op: Op, task: Task, start_s: float, op_s: float) -> Callable[[], tuple[float, float] | None]:
        """Return what tells start and end of an op as soon as they are known."""
        if op.kind is Kind.RECV:
            key = (op.owner, task.microbatch, is_backward(task.body), self.index)
            return lambda: self._meetings.sent.get(key)
        if op.kind is Kind.SEND:
            step = -1 if is_backward(task.body) else 1
            key = (op.owner, task.microbatch, step < 0, (self.index + step) % self._count)
            times = self._meetings.sent[key] = (start_s, start_s + op_s)
            return lambda: times
        return self._meeting(op, start_s, op_s)

    def _meeting(self, op: Op, start_s: float, op_s: float) -> Callable[[], tuple[float, float] | None]:
        axis = str(op.axis)
        number = self._met[axis] = self._met.get(axis, 0) + 1
        arrived = self._meetings.arrived.setdefault((axis, number), {})
        arrived[self.index] = start_s
        expected = 2 if axis == "tie" else self._count

        def times() -> tuple[float, float] | None:
            if len(arrived) < expected:
                return None
            last_s = max(arrived.values())
            return last_s, last_s + op_s

        return times


def _prices(program: Program, hardware: Hardware) -> Prices:
    """Price each body once."""

    def is_shared(op: Op) -> bool:
        return op.kind in (Kind.SEND, Kind.RECV) or op.axis in _TOGETHER

    return {
        body: tuple((op, op.name, seconds(op, program, hardware), _queue(op, hardware), is_shared(op)) for op in ops)
        for body, ops in program.bodies.items()
    }


def _queue(op: Op, hardware: Hardware) -> str:
    """Name the queue in which an op runs, one after the other."""
    if op.kind in (Kind.SEND, Kind.RECV):
        return f"{op.axis} {op.kind}"
    if op.axis == "tie":
        return op.axis
    if not hardware.overlap:
        return ""
    return COMPUTE if op.axis in EXPOSED_AXES else op.stream


# -- whole bodies ----------------------------------------------------------------------------------


class _Block(NamedTuple):
    """A body as one piece: until its compute ends, until all of it ends, when its result is sent, and what that takes."""

    compute_s: float
    all_s: float
    sent_at_s: float
    send_s: float


def step_s(programs: Sequence[Program], machine: Hardware) -> float:
    """Return the seconds of one step, sooner than `play` does: a body is played once, and then stands as one piece.

    Pieces follow the schedule's order on each stage and wait for those of other stages whose results are sent to them,
    one after the other.
    What a body leaves in flight on other streams (reductions behind the last backward) ends before the update starts.
    A single stage is played op by op.
    """
    if len(programs) == 1:
        return play(programs, machine).step_s
    blocks = [{key: _block(program, ops, machine) for key, ops in program.bodies.items()} for program in programs]
    return _lined_up(programs, lambda stage, task: blocks[stage][task.body])


def ideal_s(programs: Sequence[Program], seconds_of: Callable[[int, Task], float]) -> float:
    """Return the seconds of one step whose tasks, each of a stage, take what is said, and whose messages take nothing."""

    def block_of(stage: int, task: Task) -> _Block:
        taken_s = seconds_of(stage, task)
        return _Block(taken_s, taken_s, taken_s, 0.0)

    return _lined_up(programs, block_of)


def _lined_up(programs: Sequence[Program], block_of: Callable[[int, Task], _Block]) -> float:
    """Let tasks follow their schedules, each as one piece, and wait for what other stages send."""
    virtual = programs[0].step.layout.virtual_stages
    queues = [[task for task in program.stages[0] if task.kind is not TaskKind.UPDATE] for program in programs]
    position = [0] * len(programs)
    free, ends, links = ([0.0] * len(programs) for _ in range(3))
    done: dict[tuple[int, schedules.Action], tuple[float, float]] = {}
    moved = True
    while moved:
        moved = False
        for stage, tasks in enumerate(queues):
            while position[stage] < len(tasks):
                task = tasks[position[stage]]
                action = _action(task)
                needs = list(schedules.needs(action, stage, len(programs), virtual))
                if any(need not in done for need in needs):
                    break
                arrived = [done[need][need[0] != stage] for need in needs]
                block = block_of(stage, task)
                start_s = max(free[stage], *arrived) if arrived else free[stage]
                free[stage] = start_s + block.compute_s
                ends[stage] = max(ends[stage], start_s + block.all_s)
                if block.send_s:
                    links[stage] = max(links[stage], start_s + block.sent_at_s) + block.send_s
                done[stage, action] = (free[stage], links[stage] if block.send_s else free[stage])
                position[stage] += 1
                moved = True
    assert all(at == len(tasks) for at, tasks in zip(position, queues, strict=True)), "the schedule deadlocks"
    updates = (block_of(stage, program.stages[0][-1]).all_s for stage, program in enumerate(programs))
    return max(max(free), max(ends)) + max(updates)


def compute_s(program: Program, machine: Hardware) -> float:
    """Return what the forward and the backward of one micro-batch take on a rank that runs all layers."""
    bodies = dict.fromkeys(task.body for task in program.stages[0] if task.kind is not TaskKind.UPDATE)
    return sum(_block(program, program.bodies[body], machine).compute_s for body in bodies)


def _action(task: Task) -> schedules.Action:
    return schedules.Action(schedules.ActionKind(str(task.kind)), task.microbatch, task.chunk)


def _block(program: Program, ops: Ops, machine: Hardware) -> _Block:
    ended: dict[str, float] = {}
    free: dict[str, float] = {}
    sent_at_s = send_s = 0.0
    crowd = _Crowd(machine.contention)
    for op in ops:
        took_s = seconds(op, program, machine)
        if op.kind is Kind.SEND:
            sent_at_s, send_s = max((ended[name] for name in op.after if name in ended), default=0.0), took_s
            continue
        queue = _queue(op, machine)
        start_s = max([free.get(queue, 0.0), *(ended[name] for name in op.after if name in ended)])
        end_s = start_s + (took_s if op.axis else crowd.slowed(start_s, took_s))
        ended[op.name] = free[queue] = end_s
        crowd.joined(queue, start_s, end_s)
    all_s = max(free.values(), default=0.0)
    return _Block(free.get(COMPUTE if machine.overlap else "", all_s), all_s, sent_at_s, send_s)
