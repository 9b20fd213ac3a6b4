"""The verdict on a measured step: what it is bound by in one line, at most three reasons, and what to try.

Candidates are seconds of the step that one cause takes: waits that are charged to a rank belong to its cause, not to the axis on
which others met it. A rank is called a straggler only by its own processor time, which other load on the machine does not raise: in
most steps above that of the other ranks of its stage (`runtime/recording/sums.py`). What other load may explain is no link's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.output.text import readable
from samestep.program.ops import COPY_STREAMS
from samestep.runtime.recording.sums import WORTH, straggler_among
from samestep.wings.explain.step_parts import MeasuredSteps, StepPart
from samestep.wings.plan.simulation.partition import BUBBLE, IMBALANCE, TRANSFER, row_label, row_name

MOST_REASONS = 3
HAS_PROCESSOR = 0.7
"""Part of its work for which a rank has the processor where nothing else runs."""
_OWN = ("compute", "recompute", "optimizer")
"""Rows of a rank's own work."""
SENDERS = 0.3
"""Part of a transfer for which a thread that sends had no processor, from which on it says nothing of the link."""
UNBALANCED = 0.1
"""Part of a step that equal stages would save, from which on the stages are what bounds it."""


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The resource that bounds a step."""

    kind: str
    """`compute`, `input`, `host`, `checkpoint`, `watching`, `link`, `bubble`, `imbalance`, `straggler` or `load`."""
    line: str
    reasons: tuple[str, ...]
    tries: tuple[str, ...] = ()
    """What to try, as words of a command, with the predicted gain."""

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {"kind": self.kind, "line": self.line, "reasons": list(self.reasons), "try": list(self.tries)}


@dataclass(frozen=True, slots=True)
class _Candidate:
    kind: str
    seconds: float
    line: str
    reason: str


def verdict_of(steps: MeasuredSteps, parts: Sequence[StepPart], tries: Sequence[str] = ()) -> StepVerdict:
    """Return the verdict on some steps, from the parts of the busiest rank and what was charged."""
    away = _away(steps, parts)
    candidates = sorted(_candidates(steps, parts, away), key=lambda candidate: -candidate.seconds)
    is_loaded = away is not None and away.kind == "load"
    if away is not None and is_loaded:
        candidates = _beyond_load(candidates, away.seconds, is_counted=steps.queued_for(steps.busiest) is not None)
    compute = next((candidate for candidate in candidates if candidate.kind == "compute"), None)
    others = [
        candidate
        for candidate in candidates
        if candidate.kind != "compute" and (candidate.kind == "load" or candidate.seconds >= WORTH * steps.step_s)
    ]
    first = None if is_loaded else next((candidate for candidate in others if _goes_first(candidate, steps)), None)
    first = first or max(
        [*others, *([compute] if compute and not is_loaded else [])],
        key=lambda candidate: candidate.seconds,
        default=compute or _Candidate("compute", 0, "compute", ""),
    )
    reasons = [candidate.reason for candidate in (first, *others) if candidate.reason]
    if compute is not None and compute is not first:
        reasons.append(compute.reason)
    reasons = list(dict.fromkeys(reasons))[:MOST_REASONS]
    share = first.seconds / steps.step_s if steps.step_s else 0.0
    return StepVerdict(
        first.kind, f"{first.line}: {share:.0%} of a step of {_ms(steps.step_s)}", tuple(reasons), tuple(tries)
    )


def _beyond_load(candidates: Sequence[_Candidate], load_s: float, *, is_counted: bool) -> list[_Candidate]:
    """Return the candidates that other load cannot explain: it makes ranks wait for each other, and what they send late.

    A link stays where the system has counted for how long the ranks were queued, and it takes much longer than that.
    """
    least_s = {
        "straggler": load_s,
        "link": 2 * load_s if is_counted else math.inf,
        BUBBLE: math.inf,
        IMBALANCE: math.inf,
    }
    return [candidate for candidate in candidates if candidate.seconds > least_s.get(candidate.kind, 0.0)]


def straggler_of(steps: MeasuredSteps) -> tuple[int, float] | None:
    """Return the rank whose work, without waits, takes longer than that of its peers in most steps, and by how many seconds; None if none does."""
    stages = {rank: record.head.stage for rank, record in steps.records.items()}
    return straggler_among({rank: steps.cpu_s[rank] for rank in stages}, stages, steps.step_s)


def _candidates(measured_steps: MeasuredSteps, parts: Sequence[StepPart], away: _Candidate | None) -> list[_Candidate]:
    rank = measured_steps.busiest
    caused: dict[str, float] = {}
    for charge in measured_steps.charges:
        kind = row_name(charge.doing.partition(":")[0])
        if charge.rank == rank or kind in ("data", "checkpoint", "host"):
            caused[kind] = max(caused.get(kind, 0.0), charge.seconds / max(1, charge.waiting))
    seconds_here = {
        kind: sum(part.measured_s for part in parts if part.name == kind)
        for kind in ("data", "host", "checkpoint", "watching")
    }
    pool = [_straggler(measured_steps), *_links(measured_steps, parts), *_bubbles(parts), _imbalance(measured_steps)]
    computing = sum(part.measured_s for part in parts if part.name in _OWN)
    if away is not None:
        pool.append(away)
        computing = min(computing, statistics.median(measured_steps.cpu_s[rank]))  # for so long it had a processor
    on_cpu = " of CPU time" if away is not None else ""
    pool.append(_Candidate("compute", computing, "compute", f"compute takes {_ms(computing)}{on_cpu} on rank {rank}"))
    words = {
        "data": ("input", "waits for samples"),
        "checkpoint": ("checkpoint", "saves"),
        "host": ("host", "CPU work between tasks and steps"),
        "watching": ("watching", "self-checks (train.watch_every)"),
    }
    for kind, (name, text) in words.items():
        seconds = max([seconds_here[kind], *(s for row, s in caused.items() if row == kind)])
        late = next((c for c in measured_steps.charges if row_name(c.doing.partition(":")[0]) == kind), None)
        where = f"rank {late.rank} is waited for" if late else f"rank {rank}"
        pool.append(_Candidate(name, seconds, row_label(name, None), f"{text}: {_ms(seconds)} per step ({where})"))
    return [candidate for candidate in pool if candidate is not None and candidate.seconds > 0]


def _away(measured_steps: MeasuredSteps, parts: Sequence[StepPart]) -> _Candidate | None:
    """Return for how long the busiest rank had no processor during its work, and why, where that is much of it; only on a CPU.

    Either other programs had it (`load`), or the rank slept or read (`host`). Where the system does not say, it is load.
    """
    rank = measured_steps.busiest
    own_s = sum(part.measured_s for part in parts if part.name in _OWN)
    had_s = statistics.median(measured_steps.cpu_s[rank])
    if measured_steps.records[rank].head.device != "cpu" or had_s >= HAS_PROCESSOR * own_s:
        return None
    queued_s = measured_steps.queued_for(rank)
    if queued_s is None or queued_s >= (own_s - had_s) / 2:
        waited_s = max(own_s - had_s, queued_s or 0.0)
        reason = f"rank {rank} waited {_ms(waited_s)} for a CPU, and had a CPU for {_ms(had_s)} of {_ms(own_s)} of work: other programs, or more ranks than cores"
        return _Candidate("load", waited_s, "other load on the machine", reason)
    asleep_s = own_s - had_s - queued_s
    doing = next((f" in {charge.doing}" for charge in measured_steps.charges if charge.rank == rank), "")
    reason = f"rank {rank} sleeps or reads for {_ms(asleep_s)} of its own {_ms(own_s)}, although a CPU is free{doing}"
    return _Candidate("host", asleep_s, row_label("host", None), reason)


def _straggler(measured_steps: MeasuredSteps) -> _Candidate | None:
    late = straggler_of(measured_steps)
    if late is None:
        return None
    rank, more_s = late
    host = measured_steps.records[rank].head.host
    charges = [charge for charge in measured_steps.charges if charge.rank == rank]
    doing = f", in {charges[0].doing}" if charges else ""
    reason = f"rank {rank} works {_ms(more_s)} longer than its peers{doing}; others wait for it"
    return _Candidate("straggler", more_s, f"straggler rank {rank} on host {host}", reason)


def _links(measured_steps: MeasuredSteps, parts: Sequence[StepPart]) -> list[_Candidate]:
    """Return the links by the seconds that nothing else explains: what ranks without a processor send comes late on any link."""
    sent, made, late = measured_steps.sent_bytes(measured_steps.busiest), list[_Candidate](), list[_Candidate]()
    queued = [
        measured_steps.queued_for(rank)
        for rank, record in measured_steps.records.items()
        if record.head.device == "cpu"
    ]
    queued_s = max((seconds for seconds in queued if seconds is not None), default=0.0)
    senders_s = max(statistics.median(measured_steps.others_queued_s[rank]) for rank in measured_steps.records)
    for part in parts:
        if part.name != TRANSFER or part.axis is None:
            continue
        size = sent.get(part.axis, 0)
        hidden = measured_steps.hidden[measured_steps.busiest].get(part.axis, 0.0)
        what = f"{part.axis} sends buffers of {readable(size)} per step"
        if part.axis in COPY_STREAMS.values():
            what = f"activation offloading copies inputs of blocks {part.axis}"
        text = f"{what}; {_ms(part.measured_s)} are exposed"
        if hidden:
            text += f", and compute may hide {_ms(hidden)}"
        if part.predicted_s is not None:
            text += f"; {_ms(part.predicted_s)} were predicted"
        if (wire := measured_steps.wire_bytes(measured_steps.busiest, part.axis)) and part.measured_s + hidden > 0:
            text += (
                f"; the link carries {readable(round(wire / (part.measured_s + hidden)))}/s{' or more' * bool(hidden)}"
            )
        is_host = (
            measured_steps.records[measured_steps.busiest].head.device == "cpu"
            and part.measured_s >= WORTH * measured_steps.step_s
        )
        if is_host and senders_s >= SENDERS * part.measured_s:
            text = f"threads that send waited for a CPU for up to {_ms(senders_s)} per step, of {_ms(part.measured_s)} on {part.axis}"
            late.append(_Candidate("load", min(senders_s, part.measured_s), "other load on the machine", text))
            continue
        made.append(_Candidate("link", part.measured_s - queued_s, f"link of {part.axis}", text))
    return [*made, *sorted(late, key=lambda candidate: -candidate.seconds)[:1]]


def _bubbles(parts: Sequence[StepPart]) -> list[_Candidate]:
    return [
        _Candidate(BUBBLE, part.measured_s, BUBBLE, f"the schedule leaves a stage idle for {_ms(part.measured_s)}")
        for part in parts
        if part.name == BUBBLE
    ]


def _imbalance(measured_steps: MeasuredSteps) -> _Candidate | None:
    """Return what the step would save if all stages of the pipeline worked equally long."""
    each: dict[int, list[float]] = {}
    for rank, record in measured_steps.records.items():
        seconds = sum(measured_steps.rows[rank].get((name, None), 0.0) for name in _OWN)
        each.setdefault(record.head.stage, []).append(seconds)
    if len(each) == 1:
        return None
    stages = {stage: statistics.fmean(seconds) for stage, seconds in each.items()}
    longest, mean_s = max(stages, key=lambda stage: stages[stage]), statistics.fmean(stages.values())
    reason = f"stage {longest} works for {_ms(stages[longest])}, and the mean of the stages is {_ms(mean_s)}; the others wait for it"
    return _Candidate(IMBALANCE, stages[longest] - mean_s, f"imbalance, stage {longest} works longest", reason)


def _goes_first(candidate: _Candidate, measured_steps: MeasuredSteps) -> bool:
    """Return whether a candidate is what to mend, even where the ranks compute for longer than it takes."""
    return candidate.kind == "straggler" or (
        candidate.kind == IMBALANCE and candidate.seconds >= UNBALANCED * measured_steps.step_s
    )


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
