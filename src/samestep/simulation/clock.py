"""Plays a step: when each op of every pipeline stage starts and ends on given hardware. No torch, no processes.

The ranks of a stage do the same at the same time, so one program stands for all of them and thousands of devices cost
no more than one. Streams run their ops in the order of issue, beside each other:

    start of an op = the later of   the end of the op before it on its stream
                                    the ends of the latest earlier ops of the names in `after`, of any task

Compute waits for no collective that it does not name, but for those within a layer (`Op.is_exposed`): the next
product needs what comes. Where communication does not run beside compute (`hardware.overlap` is false) all ops of a stage
are one queue; where it does, compute beside it is slowed by `hardware.contention`, c: a compute op of T seconds, beside
which collectives that were issued before it run for t of them, takes

    T + min(t, c T) (1 - 1/c)          both want the same memory and multiprocessors (arXiv:2507.03114)

What stages do together:

    send, recv      a recv ends when the send of the same name and micro-batch on the neighbour does; each direction is a
                    stream of its own, as a link is
    world, tie      ops of axes that run through stages start when the last stage has come to them; those of a tie have a
                    stream of their own everywhere, since the first stage comes to them long after the last one

Issuing is not waiting: a stage plays on behind an op whose end another stage decides, until an op needs that end.

A name in `after` must have been issued: a strategy that leaves an op out leaves its name out too. A wait for what no
earlier op is, or for what no other stage ever sends, would never end on a real machine, so here it is an error.

Of a body only what other queues take part in is played op by op: ops that follow each other on one queue, and wait for
nothing elsewhere, are one *line*, whose inner times are the same whenever it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.program.bodies import BodyKey, is_backward
from samestep.program.ops import Kind, Op, Task
from samestep.program.program import Program
from samestep.simulation.cost import seconds
from samestep.simulation.timeline import COMPUTE, Line, LineSpan, Timeline

_TOGETHER = ("world", "tie")
"""Axes that run through pipeline stages."""


def play(programs: Sequence[Program], hardware: Hardware) -> Timeline:
    """Play the programs of all pipeline stages, in their order, until each has ended.

    Raises:
        RuntimeError: an op waits for one that was never issued; both are named.
        LayoutError: stages wait for each other for ever; the op of each is named.
        InputError: the hardware has no speed for the program's dtype.
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
    return Timeline(tuple(run for stage in stages for run in stage.runs))


@dataclass(slots=True)
class _Meetings:
    """What stages know of each other."""

    sent: dict[tuple[str, int, bool, int], tuple[float, float]] = field(default_factory=dict)
    """Start and end of each send: (owner, micro-batch, is it backward's, receiving stage)."""
    arrived: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)
    """When each stage has come to the n-th op of an axis that they share."""


class _Segment(NamedTuple):
    """A line of a body, and what it has to do with the rest of the program. Names are numbered."""

    queue: int
    took_s: float
    waits: tuple[int, ...]
    """Names that ops of other queues have."""
    awaited: tuple[tuple[int, int], ...]
    """Names that other queues wait for, and their places in the line."""
    shared: Op | None
    """The op, if it is one that another stage takes part in."""
    line: Line


class _Parked(NamedTuple):
    """An op that was issued, and whose times another stage decides."""

    times: Callable[[], tuple[float, float] | None]
    queue: int
    name: int
    run: int
    """Index of the run that waits for its times."""


class _Crowd:
    """Collectives that run beside compute, and how much they slow it."""

    __slots__ = ("_contention", "_times")

    def __init__(self, contention: float) -> None:
        self._contention = contention
        self._times: list[tuple[float, float]] = []

    def join(self, start_s: float, end_s: float) -> None:
        """Note a collective that was issued."""
        if self._contention > 1.0 and end_s > start_s:
            self._times.append((start_s, end_s))

    def is_beside(self, start_s: float) -> bool:
        """Whether something may run beside what is issued now; lines are asked for in their order."""
        if self._times:
            self._times = [times for times in self._times if times[1] > start_s]
        return bool(self._times)

    def slowed(self, start_s: float, line: Line) -> tuple[float, ...]:
        """Return when the ops of a line end that starts now."""
        ends_s = []
        now = start_s
        for (stream, _), before_s, end_s in zip(line.ops, (0.0, *line.ends_s), line.ends_s, strict=False):
            op_s = end_s - before_s
            if stream == COMPUTE:
                until = now + self._contention * op_s
                beside_s = sum(
                    min(end, until) - max(begin, now) for begin, end in self._times if begin < until and end > now
                )
                op_s += min(beside_s, until - now) * (1 - 1 / self._contention)
            now += op_s
            ends_s.append(now - start_s)
        return tuple(ends_s)


class _Stage:
    """One stage on its way through its program."""

    def __init__(self, index: int, program: Program, hardware: Hardware, meetings: _Meetings, count: int) -> None:
        self.index, self.at, self.done = index, "", False
        self.runs: list[LineSpan] = []
        self._program = program
        self._meetings, self._count = meetings, count
        self._contention = hardware.contention
        lines = _Lines(program, hardware, index, count > 1)
        self._computes = {lines.queues.get(name) for name in (COMPUTE, "")}
        self._ended = [0.0] * len(lines.names)
        self._free = [0.0] * len(lines.queues)
        self._met: dict[str, int] = {}
        self._parked: list[_Parked] = []
        self._played = 0
        self._steps = self._play(lines.parts)

    def advance(self) -> bool:
        """Play until the program ends or another stage has to come first; return whether anything was played."""
        before = self._played
        self.done = next(self._steps, True)
        return self.done or self._played > before

    def _play(self, parts: Mapping[BodyKey, Sequence[_Segment]]) -> Iterator[bool]:
        """Play line by line; yield False while the next one has to wait for another stage."""
        ended, free, runs, parked = self._ended, self._free, self.runs, self._parked
        crowd = _Crowd(self._contention)
        for task in self._program.tasks:
            label = f"{task.kind}{task.microbatch}"
            for queue, took_s, waits, awaited, shared, line in parts[task.body]:
                if parked:
                    yield from self._wait_for([one for one in parked if one.queue == queue or one.name in waits])
                start_s = free[queue]
                for name in waits:
                    start_s = max(start_s, ended[name])
                ends_s = line.ends_s
                if queue in self._computes and crowd.is_beside(start_s):
                    ends_s = crowd.slowed(start_s, line)
                    took_s = ends_s[-1]
                runs.append(LineSpan(self.index, label, start_s, start_s + took_s, line, ends_s))
                self._played += 1
                if shared is None:
                    free[queue] = start_s + took_s
                    for name, place in awaited:
                        ended[name] = start_s + ends_s[place]
                    if queue not in self._computes:
                        crowd.join(start_s, start_s + took_s)
                else:
                    times = self._times(shared, task, start_s, took_s)
                    parked.append(_Parked(times, queue, awaited[0][0], len(runs) - 1))
                    self._settle(parked[-1])
        yield from self._wait_for(list(parked))

    def _wait_for(self, parked: Sequence[_Parked]) -> Iterator[bool]:
        """Yield False until the ends of these ops are known."""
        for one in parked:
            while not self._settle(one):
                waiting = self.runs[one.run]
                self.at = f"{waiting.line.ops[0][1]} of task {waiting.task}"
                yield False

    def _settle(self, one: _Parked) -> bool:
        """Write down when a parked op ran, if the other stages have come to it."""
        found = one.times()
        if found is None:
            return False
        self._parked.remove(one)
        took_s = (found[1] - found[0],)
        self.runs[one.run] = self.runs[one.run]._replace(start_s=found[0], end_s=found[1], ends_s=took_s)
        self._ended[one.name] = self._free[one.queue] = found[1]
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


class _Priced(NamedTuple):
    """An op with what the clock needs to know of it."""

    op: Op
    took_s: float
    queue: str
    shared: bool
    """Another stage takes part in it."""


class _Lines:
    """The bodies of a program, each priced and cut into lines once."""

    def __init__(self, program: Program, hardware: Hardware, stage: int, has_others: bool) -> None:
        self._program, self._hardware, self._has_others = program, hardware, has_others
        self.queues: dict[str, int] = {}
        self.names: dict[str, int] = {}
        known: dict[int, _Priced] = {}  # by the op's identity: bodies share most of theirs
        queued: dict[str, set[str]] = {}
        # By the identity of a body's ops too: tasks at other places in the step share them.
        bodies = {id(ops): [self._price(op, known) for op in ops] for ops in program.bodies.values()}
        for one in known.values():
            self.names.setdefault(one.op.name, len(self.names))
            queued.setdefault(one.op.name, set()).add(one.queue)
        _check_waits(program, stage)
        # On its own queue all that is before an op has ended.
        waits = {
            key: tuple(name for name in one.op.after if queued.get(name) != {one.queue})
            for key, one in known.items()
            if one.op.after
        }
        needed = {name for names in waits.values() for name in names}
        parts = {key: tuple(self._cut(ops, waits, needed)) for key, ops in bodies.items()}
        self.parts = {body: parts[id(ops)] for body, ops in program.bodies.items()}

    def _price(self, op: Op, known: dict[int, _Priced]) -> _Priced:
        if id(op) not in known:
            shared = self._has_others and (op.kind in (Kind.SEND, Kind.RECV) or op.axis in _TOGETHER)
            took_s = seconds(op, self._program, self._hardware)
            known[id(op)] = _Priced(op, took_s, queue_of(op, self._hardware), shared)
        return known[id(op)]

    def _cut(
        self, ops: Sequence[_Priced], waits: Mapping[int, tuple[str, ...]], needed: set[str]
    ) -> Iterator[_Segment]:
        """Let a line begin at each op that another queue or stage has a part in, or that changes the queue."""
        start = 0
        for index, one in enumerate(ops):
            before = ops[index - 1]
            if index and (one.queue != before.queue or one.shared or before.shared or waits.get(id(one.op))):
                yield self._part(ops[start:index], waits.get(id(ops[start].op), ()), needed)
                start = index
        if ops:
            yield self._part(ops[start:], waits.get(id(ops[start].op), ()), needed)

    def _part(self, ops: Sequence[_Priced], waits: tuple[str, ...], needed: set[str]) -> _Segment:
        names, ends_s, awaited = [], [], []
        busy_s: dict[str, float] = {}
        took_s = 0.0
        for op, op_s, _, shared in ops:
            stream = op.axis or COMPUTE
            busy_s[stream] = busy_s.get(stream, 0.0) + op_s
            took_s += op_s
            names.append((stream, op.name))
            ends_s.append(took_s)
            if shared or op.name in needed:
                awaited.append((self.names[op.name], len(names) - 1))
        return _Segment(
            self.queues.setdefault(ops[0].queue, len(self.queues)),
            took_s,
            tuple(self.names[name] for name in waits),
            tuple(awaited),
            ops[0].op if ops[0].shared else None,
            Line(tuple(names), tuple(ends_s), busy_s),
        )


def _check_waits(program: Program, stage: int) -> None:
    """Refuse a wait for what no earlier op of the step is."""
    issued: set[str] = set()
    met: set[int] = set()
    for task in program.tasks:
        ops = program.bodies[task.body]
        if id(ops) in met:
            continue
        met.add(id(ops))
        for op in ops:
            for awaited in op.after:
                if awaited not in issued:
                    label = f"{task.kind}{task.microbatch}"
                    raise RuntimeError(
                        f"{op.name} of task {label} on stage {stage} waits for {awaited}, and no earlier op is that"
                    )
            issued.add(op.name)


def queue_of(op: Op, hardware: Hardware) -> str:
    """Name the queue in which an op runs, one after the other."""
    if op.kind in (Kind.SEND, Kind.RECV):
        return f"{op.axis} {op.kind}"
    if op.axis == "tie":
        return op.axis
    if not hardware.overlap:
        return ""
    return COMPUTE if op.is_exposed else op.stream
