"""The clock: the start and end of each op of every pipeline stage on given hardware, without torch or processes.

All ranks of a stage do the same at the same time, so one program stands for all of them, and thousands of devices are
played as fast as one; where devices are not equally fast (`hardware.device_spread`), all are as slow as the slowest. Streams run concurrently, each its ops in the order of issue:

    start of an op = the later of   the end of the op before it on its stream
                                    the ends of the latest earlier ops named in `after`, of any task

A step is played as one amid others: what zero=1 gathers behind the update of the step before it arrives beside its first
forwards (`Program.amid_steps`).

Compute waits only for the collectives that it names, and for those within a layer (`Op.is_exposed`), whose results the
next product needs. If communication does not overlap with compute (`hardware.overlap` is false), all ops of a stage are
one queue, NCCL's sends to other stages among them. If it does, it slows compute by `hardware.contention`, c: a compute op of T seconds that overlaps for t
seconds with collectives issued before it takes

    T + min(t, c T) (1 - 1/c)          both use the same memory and multiprocessors (arXiv:2507.03114)

Copies to and from the host slow nothing: no multiprocessor makes them, and the link takes a hundredth of the memory's bandwidth.

Ops in which several stages take part:

    send, recv      a recv ends when the neighbour's send of the same name and micro-batch ends; each direction is a
                    stream of its own, as each direction of a link is
    world, tie-...  ops of axes through several stages start when the last of these stages has come to them; those of a
                    tie have a stream of their own, because its first stage comes to them long after its last stage

Issuing is not waiting: a stage continues after an op whose end depends on another stage, until some op needs that end.

A name in `after` must have been issued, so a strategy that removes an op removes its name too. A wait for an op that
was never issued, or that no other stage ever sends, would never end on a real machine, so here it is an error.

Consecutive ops of a body on one queue that wait for nothing elsewhere are one *line*, which is played at once, because
the times within it do not depend on its start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.program.ops import COPY_STREAMS, BodyKey, Op, OpKind, Task, is_backward
from samestep.program.program import Program, amid_steps
from samestep.program.ranks import stages_of
from samestep.wings.plan.simulation.cost import PriceKey, price_key, seconds
from samestep.wings.plan.simulation.partition import COMPUTE, Line, LineSpan
from samestep.wings.plan.simulation.timeline import Timeline


def play(programs: Sequence[Program], hardware: Hardware) -> Timeline:
    """Return the timeline of a step, given the programs of all pipeline stages in order.

    Raises:
        RuntimeError: an op waits for one that was never issued; both are named.
        LayoutError: the stages deadlock; the op at which each waits is named.
        InputError: the hardware has no speed for the program's dtype.
    """
    return Score(programs, hardware).play(hardware)


class Score:
    """The programs of all pipeline stages divided into lines, to be played at several speeds.

    The lines are those of any machine that overlaps communication as `hardware` does, with the same library.
    """

    def __init__(self, programs: Sequence[Program], hardware: Hardware) -> None:
        self._programs = [amid_steps(program) for program in programs]
        self._lines = [
            _LinesOfStage(program, hardware, index, len(programs) > 1) for index, program in enumerate(self._programs)
        ]

    def play(self, hardware: Hardware) -> Timeline:
        """Return the timeline of the step at the speeds of `hardware`.

        Raises:
            LayoutError: the stages wait for each other forever.
        """
        return Timeline(tuple(run for stage in self._played(hardware, keeps_runs=True) for run in stage.runs))

    def step_s(self, hardware: Hardware) -> float:
        """Return the seconds of the step at the speeds of `hardware`: those of its timeline, which is not kept.

        Raises:
            LayoutError: the stages wait for each other forever.
        """
        return max(stage.end_s for stage in self._played(hardware, keeps_runs=False))

    def _played(self, hardware: Hardware, *, keeps_runs: bool) -> list[_PlayedStage]:
        """Return the stages after they have been played."""
        hardware = hardware.slowest_of(self._programs[0].step.layout.world_size)
        rendezvous = _StageMeeting()
        stages = [
            _PlayedStage(index, program, hardware, rendezvous, lines, len(self._programs), keeps_runs)
            for index, (program, lines) in enumerate(zip(self._programs, self._lines, strict=True))
        ]
        waiting = list(stages)
        while waiting:
            moved = False
            for stage in waiting:
                moved |= stage.advance()
            waiting = [stage for stage in waiting if not stage.done]
            if waiting and not moved:
                stuck = "; ".join(f"stage {stage.index} at {stage.at}" for stage in waiting)
                raise LayoutError("schedule-deadlock", f"the stages wait for each other forever: {stuck}")
        return stages


@dataclass(slots=True)
class _StageMeeting:
    """The times of ops in which several stages take part."""

    sent: dict[tuple[str, int, bool, int], tuple[float, float]] = field(default_factory=dict)
    """Start and end in seconds of each send, by owner, micro-batch, direction and receiving stage."""
    arrived: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)
    """Second at which each stage has come to the n-th op of an axis that they share: by axis and n."""


class _Segment(NamedTuple):
    """A line of a body with its dependencies on the rest of the program; op names are numbers."""

    queue: int
    took_s: float
    waits: tuple[int, ...]
    """Names of ops on other queues that it waits for."""
    awaited: tuple[tuple[int, int], ...]
    """Names for which other queues wait, and their positions in the line."""
    shared: Op | None
    """The line's only op, if another stage takes part in it; else None."""
    line: Line


class _Pending(NamedTuple):
    """An op that was issued and whose times depend on another stage."""

    times: Callable[[], tuple[float, float] | None]
    """Returns its start and end in seconds; None as long as they are unknown."""
    queue: int
    name: int
    run: int
    """Index of the span that waits for its times; of no use where spans are not kept."""
    op: Op
    task: str
    """Label of the op's task."""


class _Contention:
    """The collectives that overlap with compute, and by how much they slow it."""

    __slots__ = ("_contention", "_times")

    def __init__(self, contention: float) -> None:
        self._contention = contention
        self._times: list[tuple[float, float]] = []

    def join(self, start_s: float, end_s: float) -> None:
        """Add a collective that was issued."""
        if self._contention > 1.0 and end_s > start_s:
            self._times.append((start_s, end_s))

    def is_beside(self, start_s: float) -> bool:
        """Return whether a collective may overlap with a line that starts now; starts must not decrease."""
        if self._times:
            self._times = [times for times in self._times if times[1] > start_s]
        return bool(self._times)

    def slowed(self, start_s: float, line: Line) -> tuple[float, ...]:
        """Return when each op of a line ends, in seconds from the line's start."""
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


class _PlayedStage:
    """One stage while its program is played."""

    def __init__(
        self,
        index: int,
        program: Program,
        hardware: Hardware,
        rendezvous: _StageMeeting,
        lines: _LinesOfStage,
        count: int,
        keeps_runs: bool,
    ) -> None:
        self.index, self.at, self.done = index, "", False
        self.runs: list[LineSpan] = []
        self._keeps_runs = keeps_runs
        self._program = program
        self._rendezvous, self._count = rendezvous, count
        self._contention = hardware.contention
        self._computes = {lines.queues.get(name) for name in (COMPUTE, "")}
        self._slows_none = self._computes | {lines.queues.get(name) for name in COPY_STREAMS.values()}
        self._ended = [0.0] * len(lines.names)
        self._free = [0.0] * len(lines.queues)
        self._joined: dict[str, int] = {}
        self._pending: list[_Pending] = []
        self._played = 0
        self._steps = self._play(lines.priced(program, hardware, are_kept=keeps_runs))

    @property
    def end_s(self) -> float:
        """Second at which the last op ends of those whose times are known: each queue runs its ops in order."""
        return max(self._free, default=0.0)

    def advance(self) -> bool:
        """Play until the program ends or another stage has to come first; return whether anything was played."""
        played = self._played
        self.done = next(self._steps, True)
        return self.done or self._played > played

    def _play(self, parts: Mapping[BodyKey, Sequence[_Segment]]) -> Iterator[bool]:
        """Play the program line by line; yield False as long as the next line waits for another stage."""
        ended, free, runs, pending, keeps_runs = self._ended, self._free, self.runs, self._pending, self._keeps_runs
        contention = _Contention(self._contention)
        for task in self._program.tasks:
            label = f"{task.kind}{task.microbatch}"
            for queue, took_s, waits, awaited, shared, line in parts[task.body]:
                if pending:
                    yield from self._wait_for([op for op in pending if op.queue == queue or op.name in waits])
                start_s = free[queue]
                for name in waits:
                    start_s = max(start_s, ended[name])
                ends_s = line.ends_s
                if queue in self._computes and contention.is_beside(start_s):
                    ends_s = contention.slowed(start_s, line)
                    took_s = ends_s[-1]
                if keeps_runs:
                    runs.append(LineSpan(self.index, label, start_s, start_s + took_s, line, ends_s))
                self._played += 1
                if shared is not None and shared.kind is not OpKind.SEND:
                    times = self._times(shared, task, start_s, took_s)
                    op = _Pending(times, queue, awaited[0][0], len(runs) - 1, shared, label)
                    if not self._settle(op):
                        pending.append(op)
                    continue
                free[queue] = start_s + took_s
                for name, place in awaited:
                    ended[name] = start_s + ends_s[place]
                if shared is not None:
                    self._send(shared, task, start_s, took_s)
                elif queue not in self._slows_none:
                    contention.join(start_s, start_s + took_s)
        yield from self._wait_for(list(pending))

    def _wait_for(self, pending: Sequence[_Pending]) -> Iterator[bool]:
        """Yield False until the ends of these ops are known."""
        for op in pending:
            while not self._settle(op):
                self.at = f"{op.op.name} of task {op.task}"
                yield False
            self._pending.remove(op)

    def _settle(self, pending: _Pending) -> bool:
        """Enter the times of a pending op, if they are known; return whether they are."""
        times = pending.times()
        if times is None:
            return False
        start_s, end_s = times
        if self._keeps_runs:
            run = self.runs[pending.run]
            self.runs[pending.run] = LineSpan(run.stage, run.task, start_s, end_s, run.line, (end_s - start_s,))
        self._ended[pending.name] = self._free[pending.queue] = end_s
        self._played += 1
        return True

    def _send(self, op: Op, task: Task, start_s: float, op_s: float) -> None:
        """Enter the times of a send for the stage that receives it."""
        step = -1 if is_backward(task.body) else 1
        to = (self.index + step) % self._count
        self._rendezvous.sent[op.owner, task.microbatch, step < 0, to] = (start_s, start_s + op_s)

    def _times(self, op: Op, task: Task, start_s: float, op_s: float) -> Callable[[], tuple[float, float] | None]:
        """Return a function that returns start and end of an op as soon as they are known."""
        if op.kind is OpKind.RECV:
            key = (op.owner, task.microbatch, is_backward(task.body), self.index)
            return lambda: self._rendezvous.sent.get(key)
        return self._joint_times(op, start_s, op_s)

    def _joint_times(self, op: Op, start_s: float, op_s: float) -> Callable[[], tuple[float, float] | None]:
        """Return the same for an op that starts when the last of several stages has come to it."""
        axis = str(op.axis)
        number = self._joined[axis] = self._joined.get(axis, 0) + 1
        arrived = self._rendezvous.arrived.setdefault((axis, number), {})
        arrived[self.index] = start_s
        expected = len(stages_of(axis)) or self._count

        def times() -> tuple[float, float] | None:
            if len(arrived) < expected:
                return None
            last_s = max(arrived.values())
            return last_s, last_s + op_s

        return times


class _PlacedOp(NamedTuple):
    """An op with its queue and the number of its price."""

    op: Op
    price: int
    queue: str
    shared: bool
    """Whether another stage takes part in it."""


class _UnpricedLine(NamedTuple):
    """A line without its times: what `_Segment` has, and for each op its stream and name, and the number of its price."""

    queue: int
    waits: tuple[int, ...]
    awaited: tuple[tuple[int, int], ...]
    shared: Op | None
    ops: tuple[tuple[str, str], ...]
    prices: tuple[int, ...]
    is_of_one_stream: bool


class _LinesOfStage:
    """The bodies of a program, each divided into lines once."""

    def __init__(self, program: Program, hardware: Hardware, stage: int, has_others: bool) -> None:
        self._has_others = has_others
        self.queues: dict[str, int] = {}
        self.names: dict[str, int] = {}
        self._prices: dict[PriceKey, tuple[int, Op]] = {}
        """Number of each price, and an op that has it."""
        known: dict[int, _PlacedOp] = {}  # by the op's identity: bodies share most of theirs
        queued: dict[str, set[str]] = {}
        # By the identity of a body's ops too, because bodies at several positions in the step share them.
        bodies = {id(ops): [self._place(op, program, hardware, known) for op in ops] for ops in program.bodies.values()}
        for line in known.values():
            self.names.setdefault(line.op.name, len(self.names))
            queued.setdefault(line.op.name, set()).add(line.queue)
        _check_waits(program, stage)
        # On an op's own queue all earlier ops have ended.
        waits = {
            key: tuple(name for name in line.op.after if queued.get(name) != {line.queue})
            for key, line in known.items()
            if line.op.after
        }
        needed = {name for names in waits.values() for name in names}
        self._parts = {key: tuple(self._cut(ops, waits, needed)) for key, ops in bodies.items()}

    def priced(self, program: Program, hardware: Hardware, *, are_kept: bool) -> dict[BodyKey, tuple[_Segment, ...]]:
        """Return the lines of each body with their times on `hardware`; how long streams are busy in lines that are kept."""
        prices = [seconds(op, program, hardware) for _, op in self._prices.values()]
        parts = {key: tuple(_at_prices(line, prices, are_kept) for line in lines) for key, lines in self._parts.items()}
        return {body: parts[id(ops)] for body, ops in program.bodies.items()}

    def _place(self, op: Op, program: Program, hardware: Hardware, known: dict[int, _PlacedOp]) -> _PlacedOp:
        if id(op) not in known:
            is_message = op.kind in (OpKind.SEND, OpKind.RECV)
            shared = self._has_others and (
                is_message or (op.axis is not None and (op.axis == "world" or bool(stages_of(op.axis))))
            )
            price, _ = self._prices.setdefault(price_key(op, program), (len(self._prices), op))
            known[id(op)] = _PlacedOp(op, price, queue_of(op, hardware), shared)
        return known[id(op)]

    def _cut(
        self, ops: Sequence[_PlacedOp], waits: Mapping[int, tuple[str, ...]], needed: set[str]
    ) -> Iterator[_UnpricedLine]:
        """Yield the lines of a body; a new one begins with each change of queue, wait, or op shared with a stage."""
        start = 0
        for index, op in enumerate(ops):
            previous = ops[index - 1]
            if index and (op.queue != previous.queue or op.shared or previous.shared or waits.get(id(op.op))):
                yield self._part(ops[start:index], waits.get(id(ops[start].op), ()), needed)
                start = index
        if ops:
            yield self._part(ops[start:], waits.get(id(ops[start].op), ()), needed)

    def _part(self, ops: Sequence[_PlacedOp], waits: tuple[str, ...], needed: set[str]) -> _UnpricedLine:
        """Return the line of consecutive ops."""
        return _UnpricedLine(
            self.queues.setdefault(ops[0].queue, len(self.queues)),
            tuple(self.names[name] for name in waits),
            tuple((self.names[op.op.name], place) for place, op in enumerate(ops) if op.shared or op.op.name in needed),
            ops[0].op if ops[0].shared else None,
            tuple((op.op.stream, op.op.name) for op in ops),
            tuple(op.price for op in ops),
            len({op.op.stream for op in ops}) == 1,
        )


def _at_prices(line: _UnpricedLine, prices: Sequence[float], is_kept: bool) -> _Segment:
    """Return a line with its times."""
    ops_s = [prices[price] for price in line.prices]
    ends_s = tuple(itertools.accumulate(ops_s))
    busy_s: dict[str, float] = {}
    if is_kept and line.is_of_one_stream:
        busy_s[line.ops[0][0]] = ends_s[-1]
    elif is_kept:
        for (stream, _), op_s in zip(line.ops, ops_s, strict=True):
            busy_s[stream] = busy_s.get(stream, 0.0) + op_s
    return _Segment(line.queue, ends_s[-1], line.waits, line.awaited, line.shared, Line(line.ops, ends_s, busy_s))


def _check_waits(program: Program, stage: int) -> None:
    """Raise RuntimeError if an op waits for a name that no earlier op of the step has."""
    issued: set[str] = set()
    met: set[int] = set()
    for task in program.tasks:
        ops = program.bodies[task.body]
        if id(ops) in met:
            continue
        met.add(id(ops))
        for op in ops:
            if op.after and not issued.issuperset(op.after):
                awaited = next(name for name in op.after if name not in issued)
                label = f"{task.kind}{task.microbatch}"
                raise RuntimeError(
                    f"{op.name} of task {label} on stage {stage} waits for {awaited}, and no earlier op has that name"
                )
            issued.add(op.name)


def queue_of(op: Op, hardware: Hardware) -> str:
    """Return the name of the queue on which an op runs in order with others."""
    if op.kind is OpKind.SEND and not hardware.overlap and hardware.library == "nccl":
        return ""  # a kernel on the device, and the stage waits for it
    if op.kind in (OpKind.SEND, OpKind.RECV):
        return f"{op.axis} {op.kind}"
    if op.axis is not None and stages_of(op.axis):
        return op.axis
    if not hardware.overlap:
        return ""
    return COMPUTE if op.is_exposed else op.stream
