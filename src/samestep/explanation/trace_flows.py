"""Arrows of a Chrome trace: from the rank that entered a collective last to those that waited, and from each send to its receive.

    rank 0  ▕── all_reduce ──▏◂─┐        `ph: s` on the lane of the last rank, `ph: f` on the lanes of the others
    rank 1         ▕ all_reduce ▏

Source: the Trace Event Format of Chrome, flow events; one with `bp: e` ends at the slice that holds its time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from samestep.explanation.measured_step import MeasuredStep, SentByRank

Slice = tuple[int, str, float]
"""The rank, the stream and the begin in seconds of one slice of a trace."""


def flows_of(step: MeasuredStep, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the arrows between the slices of a step; `events` are those of its trace, which name the threads."""
    threads = {(one["pid"], one["args"]["name"]): one["tid"] for one in events if one["name"] == "thread_name"}
    meetings: dict[Any, list[tuple[SentByRank, Slice]]] = defaultdict(list)
    for (rank, stream, _, end_s), sent in step.spans_of_sent.items():
        begin_s = max(0.0, min((sent.starts - step.begins[rank]) / 1e9, end_s))
        meetings[sent.queue, sent.op.owner, sent.op.task, sent.starts].append((sent, (rank, stream, begin_s)))
    found: list[dict[str, Any]] = []
    for number, met in enumerate(meetings.values()):
        first = next((at for sent, at in met if _is_source(sent)), None)
        ends = [at for _, at in met if at != first]
        if first is not None:
            phases = [("s", first), *(("f", at) for at in ends)] if ends else []
            found += [_arrow(phase, number, at, threads[at[:2]]) for phase, at in phases]
    return found


def _is_source(sent: SentByRank) -> bool:
    return sent.op.kind == "send" or (sent.op.kind != "recv" and sent.late == sent.rank)


def _arrow(phase: str, number: int, at: Slice, tid: int) -> dict[str, Any]:
    rank, _, begin_s = at
    arrow = {"ph": phase, "id": number, "name": "last to enter", "cat": "waits", "pid": rank, "tid": tid}
    return {**arrow, "ts": begin_s * 1e6, **({"bp": "e"} if phase == "f" else {})}
