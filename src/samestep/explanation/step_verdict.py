"""The verdict on a measured step: what it is bound by in one line, at most three reasons, and what to try.

Candidates are seconds of the step that one cause takes: waits that are charged to a rank belong to its cause, not to the axis on
which others met it. A rank is called a straggler only by its own processor time, which other load on the machine does not raise: in
most steps above that of the other ranks of its stage (`runtime/recording/stragglers.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.explanation.step_parts import MeasuredSteps, StepPart
from samestep.output.byte_sizes import readable
from samestep.runtime.recording.stragglers import WORTH, straggler_among
from samestep.simulation.partition import BUBBLE, IMBALANCE, TRANSFER, row_name

MOST_REASONS = 3
HAS_PROCESSOR = 0.7
"""Part of its work for which a rank has the processor where nothing else runs."""


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The resource that bounds a step."""

    kind: str
    """`compute`, `input`, `host`, `checkpoint`, `link`, `bubble`, `imbalance`, `straggler` or `load`."""
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


def verdict_of(found: MeasuredSteps, parts: Sequence[StepPart], tries: Sequence[str] = ()) -> StepVerdict:
    """Return the verdict on some steps, from the parts of the busiest rank and what was charged."""
    candidates = sorted(_candidates(found, parts), key=lambda one: -one.seconds)
    if (
        busy := _other_load(found, parts)
    ) is not None:  # then no time of a link or of compute is what it would be alone
        candidates = [busy, *(one for one in candidates if one.kind in ("compute", "input", "checkpoint"))]
    compute = next((one for one in candidates if one.kind == "compute"), None)
    others = [one for one in candidates if one.kind != "compute" and one.seconds >= WORTH * found.step_s]
    first = busy or next((one for one in others if one.kind == "straggler"), None)
    first = first or max(
        [*others, *([compute] if compute else [])],
        key=lambda one: one.seconds,
        default=_Candidate("compute", 0, "compute", ""),
    )
    reasons = [one.reason for one in (first, *others) if one.reason]
    if compute is not None and compute is not first:
        reasons.append(compute.reason)
    reasons = list(dict.fromkeys(reasons))[:MOST_REASONS]
    share = first.seconds / found.step_s if found.step_s else 0.0
    return StepVerdict(
        first.kind, f"{first.line}: {share:.0%} of a step of {_ms(found.step_s)}", tuple(reasons), tuple(tries)
    )


def straggler_of(found: MeasuredSteps) -> tuple[int, float] | None:
    """Return the rank whose own work takes longer than that of its peers in most steps, and by how many seconds; None if none does."""
    stages = {rank: record.head.stage for rank, record in found.records.items()}
    return straggler_among({rank: found.cpu_s[rank] for rank in stages}, stages, found.step_s)


def _candidates(found: MeasuredSteps, parts: Sequence[StepPart]) -> list[_Candidate]:
    rank = found.busiest
    caused: dict[str, float] = {}
    for charge in found.charges:
        kind = row_name(charge.doing.partition(":")[0])
        if charge.rank == rank or kind in ("data", "checkpoint", "host"):
            caused[kind] = max(caused.get(kind, 0.0), charge.seconds / max(1, charge.waiting))
    own = {
        kind: sum(part.measured_s for part in parts if part.name == kind)
        for kind in ("data", "host", "checkpoint", "watching")
    }
    made = [_straggler(found), *_links(found, parts), *_bubbles(parts)]
    computing = sum(part.measured_s for part in parts if part.name in ("compute", "recompute", "optimizer"))
    made.append(_Candidate("compute", computing, "compute", f"compute takes {_ms(computing)} on rank {rank}"))
    words = {
        "data": ("input", "waits for samples"),
        "checkpoint": ("checkpoint", "saves"),
        "host": ("host", "host work between tasks and steps"),
    }
    for kind, (name, text) in words.items():
        seconds = max([own[kind], *(s for row, s in caused.items() if row == kind)])
        late = next((one for one in found.charges if row_name(one.doing.partition(":")[0]) == kind), None)
        where = f"rank {late.rank} is waited for" if late else f"rank {rank}"
        made.append(_Candidate(name, seconds, name, f"{text}: {_ms(seconds)} a step ({where})"))
    return [one for one in made if one is not None and one.seconds > 0]


def _other_load(found: MeasuredSteps, parts: Sequence[StepPart]) -> _Candidate | None:
    """Return by how much other programs keep a rank's work from the processor, where they do for much of it; on a CPU alone."""
    rank = found.busiest
    own_s = sum(part.measured_s for part in parts if part.name in ("compute", "recompute", "optimizer"))
    had_s = statistics.median(found.cpu_s[rank])
    if found.records[rank].head.device != "cpu" or had_s >= HAS_PROCESSOR * own_s:
        return None
    reason = f"rank {rank} had the processor for {_ms(had_s)} of {_ms(own_s)} of work: other programs, or more ranks than cores, had the rest"
    return _Candidate("load", own_s - had_s, "other load on the machine", reason)


def _straggler(found: MeasuredSteps) -> _Candidate | None:
    late = straggler_of(found)
    if late is None:
        return None
    rank, more_s = late
    host = found.records[rank].head.host
    mine = [charge for charge in found.charges if charge.rank == rank]
    doing = f", in {mine[0].doing}" if mine else ""
    reason = f"rank {rank} works {_ms(more_s)} longer than its peers{doing}; others wait for it"
    return _Candidate("straggler", more_s, f"straggler rank {rank} on host {host}", reason)


def _links(found: MeasuredSteps, parts: Sequence[StepPart]) -> list[_Candidate]:
    sent, made = found.sent_bytes(found.busiest), []
    for part in parts:
        if part.name != TRANSFER or part.axis is None:
            continue
        size = sent.get(part.axis, 0)
        hidden = found.hidden[found.busiest].get(part.axis, 0.0)
        text = f"{part.axis} sends buffers of {readable(size)} a step, {_ms(part.measured_s)} of which no compute hides"
        if hidden:
            text += f" and {_ms(hidden)} of which compute may hide"
        if part.predicted_s is not None:
            text += f"; {_ms(part.predicted_s)} were predicted"
        made.append(_Candidate("link", part.measured_s, f"link of {part.axis}", text))
    return made


def _bubbles(parts: Sequence[StepPart]) -> list[_Candidate]:
    words = {BUBBLE: "the schedule leaves a stage idle", IMBALANCE: "another stage computes longer"}
    return [
        _Candidate(part.name, part.measured_s, part.name, f"{words[part.name]} for {_ms(part.measured_s)}")
        for part in parts
        if part.name in words
    ]


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
