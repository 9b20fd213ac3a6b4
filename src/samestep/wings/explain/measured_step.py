"""A measured step as a timeline: one lane a rank, its compute stream without gaps or overlaps, and what was sent on the axes.

The record of a rank (`program/recorded.py`) has nested events of its host. Every instant of the step belongs to the innermost one;
the waits of the host are gaps of the compute stream:

```
record     task B0 ├──────────────────────────────┤      backward layers.1 at |, layers.0 at :
           wait bucket.0          ├──────┤
lane       backward:layers.1 |~~~:~ gap ~│~~~~~~~~~~
dp                         sent ├──── all_reduce:bucket.0 ┤
```
A collective starts when its last rank has *entered* it: the later of its issue there, and of the end of the one before it in the same
group. It has ended by the time at which a wait for it returns, on any of its ranks. A message starts when both ends have asked for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from samestep.program.ops import COPY_STREAMS
from samestep.program.recorded import RankRecord, RecordedStep, SentOp
from samestep.wings.plan.simulation.partition import BUBBLE, COMPUTE, WAIT, Gap, Span, gaps, row_name
from samestep.wings.plan.simulation.timeline import Timeline

GAP = "gap "
"""What the name of a gap's row begins with, among names of ops."""
_OWN_ROW = ("watching", "checkpoint", "host")
"""Regions that own all that happens inside them: forwards that a check or an evaluation runs are no part of the step."""


@dataclass(slots=True)
class SentByRank:
    """One collective or message as one rank has seen it; times in nanoseconds of the common clock."""

    rank: int
    op: SentOp
    issued: int
    waited: tuple[int, int] | None
    """The begin and the end of the host's first wait for it; None if it has not waited in this step."""
    size_bytes: int | None = None
    """The bytes of the buffers that torch was given; None where they were not counted."""
    entered: int = 0
    starts: int = 0
    """When the last rank has entered it."""
    ends: int = 0
    late: int = -1
    """The rank that entered it last; -1 where no other one was seen."""
    members: tuple[int, ...] = ()
    """The ranks that were seen in it."""
    queue: tuple[Any, ...] = ()
    """The group or link that carries one op after the other."""


class Segment(NamedTuple):
    """A run of instants of a rank's host, in nanoseconds from the begin of its step; a gap has no name."""

    begin: int
    end: int
    name: str
    task: str


@dataclass(slots=True)
class MeasuredStep:
    """One step of all ranks on a common clock."""

    step: int
    timeline: Timeline
    """Times of a lane are seconds from the begin of that rank's step."""
    begins: Mapping[int, int]
    """Begin of each rank's step, in nanoseconds of the common clock."""
    sent: Mapping[int, Sequence[SentByRank]]
    lasted_s: Mapping[int, float]
    """Seconds from the begin of each rank's step to that of its next one."""
    cpu_s: Mapping[int, float]
    """Processor seconds of each rank's main thread."""
    queued_s: Mapping[int, float | None]
    """Seconds for which each rank's main thread wanted a processor and had none; None where the system does not say."""
    others_queued_s: Mapping[int, float]
    """The same of that other thread of each rank which waited most; 0 where the system does not say."""
    spans_of_sent: Mapping[tuple[int, str, str, float], SentByRank] = field(default_factory=dict)
    before: MeasuredStep | None = None
    """The step before, if it is recorded: what made a rank late may have been there."""
    gaps: Mapping[int, Sequence[Gap]] = field(init=False)
    """What is between the ops on each rank's compute stream."""

    def __post_init__(self) -> None:
        self.gaps = {rank: [*gaps(self.timeline, rank)] for rank in self.begins}

    def cause(self, gap: Gap) -> tuple[int, str] | None:
        """Return the rank for which a wait has waited, and the op or row that delayed it; None if no rank was late.

        It is what the late rank did longer than the waiting one since both were last in one collective. If that is a wait of its own,
        the cause of that wait is the cause.
        """
        return self._cause(gap, 8)

    def _cause(self, gap: Gap, depth: int) -> tuple[int, str] | None:
        rank, span = gap.stage, gap.closed_by
        collective = None if span is None else self.spans_of_sent.get((rank, span.stream, span.name, span.end_s))
        if collective is None or collective.late in (-1, rank):
            return None
        late, until = collective.late, collective.starts
        if gap.name == WAIT:
            since = self._last_met(rank, late, until)
            here, there = (self._did(rank_, since, until) for rank_ in (rank, late))
            more = {name: seconds - here.get(name, 0.0) for name, seconds in there.items()}
        else:  # stages do other things than their neighbours
            since = self.begins[rank] + round(gap.start_s * 1e9)
            more = self._did(late, since, until)
        name = max(more, key=lambda rank_: more[rank_], default="")
        if not name.startswith(GAP):
            return late, name
        row = name.removeprefix(GAP)
        waits = [
            (gap.end_s - gap.start_s, step, gap)
            for step in (self, self.before)
            if step is not None
            for gap in step.gaps[late]
            if f"{gap.name} {gap.axis}" == row
            and gap.name in (WAIT, BUBBLE)
            and since <= step.begins[late] + gap.start_s * 1e9 < until
        ]
        if not waits or not depth:
            return late, row
        _, step, longest = max(waits, key=lambda wait: wait[0])
        return step._cause(longest, depth - 1) or (late, row)

    def _last_met(self, rank: int, other: int, until: int) -> int:
        """Return the end of the last op in which two ranks took part, or the begin of the first step that is known."""
        ends = [sent.ends for sent in self.sent[rank] if other in sent.members and sent.starts < until]
        met = max([end for end in ends if end <= until], default=None)
        if met is None and self.before is not None:
            return self.before._last_met(rank, other, until)
        return min(self.begins[rank], self.begins[other]) if met is None else met

    def _did(self, rank: int, since: int, until: int) -> dict[str, float]:
        """Return the seconds of each op of a rank, and of each row of its gaps, between two times of the common clock."""
        seconds: dict[str, float] = defaultdict(float)
        first, last = ((time - self.begins[rank]) / 1e9 for time in (since, until))
        if first < 0 and self.before is None:
            seconds["the step before"] = -first
        elif first < 0 and self.before is not None:
            seconds.update(self.before._did(rank, since, self.begins[rank]))
        for span in self.timeline.spans_of(rank):
            if span.stream == COMPUTE and span.end_s > first and span.start_s < last:
                seconds[span.name] += min(span.end_s, last) - max(span.start_s, first)
        for gap in self.gaps[rank]:
            if gap.end_s > first and gap.start_s < last:
                seconds[f"{GAP}{gap.name} {gap.axis}"] += min(gap.end_s, last) - max(gap.start_s, first)
        return seconds


def measured_step(
    records: Mapping[int, RankRecord],
    number: int,
    offsets: Mapping[str, int],
    measured_step: MeasuredStep | None = None,
) -> MeasuredStep:
    """Return one step of all ranks; `offsets` are what is added to the nanoseconds of each clock, and `before` is the step before it."""
    steps = {rank: record.steps[number] for rank, record in records.items()}
    shift = {rank: offsets.get(record.head.clock, 0) for rank, record in records.items()}
    sent = {rank: sent_by(record, number, shift[rank]) for rank, record in records.items()}
    enter_all(records, sent)
    parts: list[Span] = []
    passed: set[Span] = set()
    known: dict[tuple[int, str, str, float], SentByRank] = {}
    for rank, step in steps.items():
        begin = step.begin_ns + shift[rank]
        blocked = [
            collective.waited
            for collective in sent[rank]
            if collective.waited is not None and collective.ends > collective.waited[0]
        ]
        waiting = [(start - begin, stop - begin) for start, stop in blocked]
        waited_for = _waited_for(sent[rank])
        for copy, gap in _copies(rank, step):
            parts.append(copy)
            passed.update((copy,) if gap is None else ())
            waiting += [] if gap is None else [gap]
        parts += [
            Span(rank, COMPUTE, segment.name, segment.task, segment.begin / 1e9, segment.end / 1e9)
            for segment in segments(step, waiting)
            if segment.name
        ]
        for collective in sent[rank]:
            start_s, end_s = ((time - begin) / 1e9 for time in (collective.starts, collective.ends))
            span = Span(
                rank,
                collective.op.axis,
                f"{collective.op.kind}:{collective.op.owner}",
                collective.op.task,
                max(0.0, min(start_s, end_s)),
                end_s,
            )
            if end_s > 0:
                parts.append(span)
                passed.update(() if id(collective) in waited_for else (span,))
                known[rank, span.stream, span.name, span.end_s] = collective
    lasted_s = {rank: (step.until_ns - step.begin_ns) / 1e9 for rank, step in steps.items()}
    return MeasuredStep(
        number,
        Timeline(tuple(parts), "rank", frozenset(passed)),
        {rank: step.begin_ns + shift[rank] for rank, step in steps.items()},
        sent,
        lasted_s,
        {rank: step.cpu_ns / 1e9 for rank, step in steps.items()},
        {rank: None if step.queued_ns is None else step.queued_ns / 1e9 for rank, step in steps.items()},
        {rank: (step.others_queued_ns or 0) / 1e9 for rank, step in steps.items()},
        known,
        measured_step,
    )


# -- copies between device and host ------------------------------------------------------------------------------------


def _copies(rank: int, step: RecordedStep) -> Iterator[tuple[Span, tuple[int, int] | None]]:
    """Yield the copies of inputs of layers, and for which instants the device has waited for each; None where it has not."""
    awaited: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for form, name, begin, end, *more in step.events:
        if form == "awaited":
            awaited[name, more[0]].append((begin, end))
    tasks = [(name, begin, end) for form, name, begin, end, *_ in step.events if form == "task"]
    for form, name, begin, end, *more in step.events:
        if form != "copy":
            continue
        waits = awaited[name, more[0]]
        start, stop = waits.pop(0) if waits else (end, end)
        has_waited = stop - start > _SHORT_NS and start < end
        task = next((task for task, first, last in tasks if first <= begin <= last), "")
        until = min(end, stop) if has_waited else end  # a gap is closed by what ends in it
        span = Span(rank, more[0], f"{_KINDS_OF_COPIES[more[0]]}:{name}", task, begin / 1e9, until / 1e9)
        yield span, (start, stop) if has_waited else None


_KINDS_OF_COPIES = {stream: str(kind) for kind, stream in COPY_STREAMS.items()}


# -- what was sent -----------------------------------------------------------------------------------------------------


def sent_by(record: RankRecord, number: int, shift: int) -> list[SentByRank]:
    """Return what a rank has sent in a step, in the order of issue; waits for what it issued in the step before are among it."""
    sent_by_ranks: list[SentByRank] = []
    for step_number in (number - 1, number):
        if step_number not in record.steps:
            continue
        issued = list(_issued(record, step_number, shift))
        waits = _waits(record, step_number, number, shift)
        for key, collective in issued:
            if collective.waited is None:
                collective.waited = waits.get(key)
            if step_number == number or (key in waits):
                sent_by_ranks.append(collective)
    return sent_by_ranks


def _issued(record: RankRecord, number: int, shift: int) -> Iterator[tuple[tuple[str, str, int], SentByRank]]:
    step, seen = record.steps[number], defaultdict[str, int](int)
    ops: dict[str, list[SentOp]] = defaultdict(list)
    for op in record.head.ops:
        ops[op.owner].append(op)
    for form, name, begin, end, *more in step.events:
        if form != "sent":
            continue
        index, kind, is_asynchronous, *size = more
        candidates = [op for op in ops.get(name, ()) if kind in ("", op.kind)]
        place = seen[f"{name} {kind}"]
        seen[f"{name} {kind}"] += 1
        op = (
            candidates[place]
            if place < len(candidates)
            else candidates[-1]
            if candidates
            else SentOp(name, kind or "collective", "other", 0, "")
        )
        base = step.begin_ns + shift
        waited = None if is_asynchronous else (base + begin, base + end)
        measured = size[0] if size else None
        yield (name, kind, index), SentByRank(record.head.rank, op, base + begin, waited, measured)


def _waits(record: RankRecord, issued_in: int, number: int, shift: int) -> dict[tuple[str, str, int], tuple[int, int]]:
    """Return the first wait, in step `number`, for each op that was issued in a step."""
    step, waits = record.steps[number], dict[tuple[str, str, int], tuple[int, int]]()
    for form, name, begin, end, *more in step.events:
        if form == "wait" and more[2] == issued_in:
            base = step.begin_ns + shift
            waits.setdefault((name, more[1], more[0]), (base + begin, base + end))
    return waits


def meetings_of(
    records: Mapping[int, RankRecord], sent: Mapping[int, Sequence[SentByRank]]
) -> dict[Any, list[SentByRank]]:
    """Return what the ranks have sent together: the same collective, or the two ends of a message, under one key."""
    meetings: dict[Any, list[SentByRank]] = defaultdict(list)
    counts: dict[Any, int] = defaultdict(int)
    for rank, ops in sent.items():
        head = records[rank].head
        for op in ops:
            if op.op.kind in ("send", "recv"):
                key = _message(op, head.stage, records)
            else:
                members = tuple(head.groups.get(op.op.axis, (rank,)))
                place = (members, op.op.axis, op.op.owner, op.op.kind)
                key = (*place, counts[rank, place])
                counts[rank, place] += 1
            meetings[key].append(op)
    return meetings


def enter_all(records: Mapping[int, RankRecord], sent: Mapping[int, Sequence[SentByRank]]) -> None:
    """Set when each op was entered, started and ended, from what all of its ranks have seen."""
    ended: dict[tuple[int, Any], int] = defaultdict(int)
    meetings = meetings_of(records, sent)
    for key, members in sorted(meetings.items(), key=lambda item: max(collective.issued for collective in item[1])):
        lane = (key[0], key[1])
        for member in members:
            member.entered = max(member.issued, ended[member.rank, lane])
        last = max(members, key=lambda member: member.entered)
        limits = [_limit(member) for member in members]
        known = [limit for limit in limits if limit is not None]
        ends = max(last.entered, min(known, default=last.entered))
        for member in members:
            member.starts, member.late = last.entered, last.rank if len(members) > 1 else -1
            member.members, member.queue = tuple(other.rank for other in members), lane
            member.ends = ends if member.waited is None or member.waited[0] >= ends else member.waited[1]
            ended[member.rank, lane] = ends


def _waited_for(sent: Sequence[SentByRank]) -> set[int]:
    """Return the ids of what a rank has waited for: itself, or what the same group or link carried after it."""
    ids: set[int] = set()
    lasting = [
        (collective, collective.waited)
        for collective in sent
        if collective.waited is not None and collective.ends > collective.waited[0]
    ]
    for last, (begin, end) in lasting:
        ahead = (
            collective for collective in sent if collective.queue == last.queue and collective.entered <= last.entered
        )
        ids.update(id(collective) for collective in ahead if begin < collective.ends <= end)
    return ids


def _limit(sent_by_rank: SentByRank) -> int | None:
    """Return a time by which an op has ended: the end of a wait for it, or the begin of one that did not last."""
    if sent_by_rank.waited is None:
        return None
    begin, end = sent_by_rank.waited
    return end if end - begin > _SHORT_NS else begin


_SHORT_NS = 30_000
"""A wait that returns within this found its op ended."""


def _message(sent_by_rank: SentByRank, stage: int, records: Mapping[int, RankRecord]) -> tuple[Any, ...]:
    """Return the key that both ends of a message share: the ranks of the pipeline, the sender's stage, and the task."""
    pipeline = tuple(records[sent_by_rank.rank].head.groups.get("pp", (sent_by_rank.rank,)))
    step = -1 if sent_by_rank.op.task.startswith("B") else 1
    sender = stage if sent_by_rank.op.kind == "send" else (stage - step) % max(1, len(pipeline))
    return pipeline, f"link {sender} {step}", sent_by_rank.op.owner, sent_by_rank.op.task


# -- what the host did -------------------------------------------------------------------------------------------------


def segments(step: RecordedStep, gaps: Iterable[tuple[int, int]]) -> Iterator[Segment]:
    """Yield the runs of instants of a rank's host from the begin of its step to that of the next one."""
    until, end = step.until_ns - step.begin_ns, step.end_ns - step.begin_ns
    regions = [(name, begin, stop) for form, name, begin, stop, *_ in step.events if form == "region"]
    nested = [*_base(step, end, until), *_of_tasks(step)]
    nested += [Segment(begin, stop, name if ":" in name else f"{name}:{name}", "") for name, begin, stop in regions]
    nested += [Segment(start, stop, "", "") for start, stop in gaps]
    yield from _innermost([span for span in nested if span.end > span.begin], until)


def _base(step: RecordedStep, end: int, until: int) -> Iterator[Segment]:
    """Yield what the host does around its tasks: before the first, after the last backward, and between two steps."""
    tasks = [event for event in step.events if event[0] == "task" and not event[1].startswith("U")]
    first = min((event[2] for event in tasks), default=0)
    last = max((event[3] for event in tasks), default=0)
    yield Segment(0, first, "host:begin of the step", "")
    yield Segment(first, last, "host:between tasks", "")
    yield Segment(last, end, "update:reductions and agreement", "")
    yield Segment(end, until, "host:between steps", "")


def _of_tasks(step: RecordedStep) -> Iterator[Segment]:
    tasks = [(name, begin, end) for form, name, begin, end, *_ in step.events if form == "task"]
    marks = [(begin, name) for form, name, begin, *_ in step.events if form == "backward"]
    for task, begin, end in tasks:
        if task.startswith("B"):
            yield Segment(begin, end, "backward:between layers", task)
            inside = [(time, name) for time, name in marks if begin <= time <= end]
            starts = [
                (time, name)
                for (time, name), previous in zip(inside, [("", ""), *inside], strict=False)
                if name != previous[1]
            ]
            for index, (time, name) in enumerate(starts):
                stop = starts[index + 1][0] if index + 1 < len(starts) else end
                yield Segment(begin if index == 0 else time, stop, f"backward:{name}", task)
        else:
            kind = {"F": "forward", "W": "weight", "U": "update"}.get(task[:1], "host")
            yield Segment(begin, end, f"{kind}:{'optimizer' if kind == 'update' else 'between layers'}", task)
    for form, name, begin, end, *_ in step.events:
        if form == "layer":
            task = next((task for task, start, stop in tasks if start <= begin <= stop), "")
            yield Segment(begin, end, f"{'forward' if task.startswith('F') else 'recompute'}:{name}", task)


def _innermost(nested: Sequence[Segment], until: int) -> Iterator[Segment]:
    """Yield the innermost of nested segments for each run of instants."""
    now, stack = 0, list[Segment]()
    for segment in sorted(nested, key=lambda span: (span.begin, -span.end)):
        while stack and stack[-1].end <= segment.begin:
            top = stack.pop()
            if top.end > now:
                yield top._replace(begin=now)
                now = top.end
        if segment.begin > now:
            if stack:
                yield stack[-1]._replace(begin=now, end=segment.begin)
            now = segment.begin
        outer = stack[-1] if stack else None
        if outer is not None:
            name = outer.name if _owns_all(outer.name) and not _owns_all(segment.name) else segment.name
            segment = segment._replace(end=min(segment.end, outer.end), name=name, task=segment.task or outer.task)
        stack.append(segment)
    while stack:
        top = stack.pop()
        if top.end > now:
            yield top._replace(begin=now)
            now = top.end


def _owns_all(name: str) -> bool:
    return row_name(name.partition(":")[0]) in _OWN_ROW and name not in _AROUND


_AROUND = ("host:begin of the step", "host:between tasks", "host:between steps")
