"""The sums of a step that every run logs: seconds of each kind of task, of waits by axis, of data and of the host's other work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from samestep.program.recorded import RecordedStep

_TASKS = {"F": "forward_s", "B": "backward_s", "W": "backward_s", "U": "update_s"}


@dataclass(frozen=True, slots=True)
class StepSums:
    """The sums of one step on one rank, in seconds."""

    step: int = 0
    """The step, counted from 1; 0 before any is known."""
    values: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Return the sums under their names in trackers, in milliseconds."""
        return {f"time/{name[:-2]}_ms": value * 1e3 for name, value in self.values.items() if name.endswith("_s")}

    def to_record(self) -> dict[str, float]:
        """Return the sums as plain data for JSON, with the step that they are of."""
        return {"step": self.step, **{name: round(value, 9) for name, value in self.values.items()}}


def sums_of(step: RecordedStep, axes: Mapping[str, str]) -> StepSums:
    """Return the sums of a step; `axes` are those of owners."""
    found: dict[str, float] = {"sent": 0}
    tasks, recomputed, waits = [], [], []
    for form, name, begin, end, *more in step.events:
        if form == "task":
            tasks.append((_TASKS.get(name[:1], "host_s"), begin, end))
        elif form == "region" and name.startswith("recompute:"):
            recomputed.append(("recompute_s", begin, end))
        elif form == "region":
            waited = f"{name.partition(':')[0]}_s"
            found[waited] = found.get(waited, 0.0) + (end - begin) / 1e9
            waits.append((begin, end))
        elif form == "sent":
            found["sent"] += 1
        if form == "wait" or (form == "sent" and not more[2]):
            waited = f"wait_{axes.get(name, 'other')}_s"
            found[waited] = found.get(waited, 0.0) + (end - begin) / 1e9
            waits.append((begin, end))
    for name, begin, end in (*tasks, *recomputed):
        found[name] = found.get(name, 0.0) + (end - begin) / 1e9
    for name, seconds in _waited_inside(tasks, [*waits, *(one[1:] for one in recomputed)]):  # own work alone
        found[name] -= seconds
    for name, seconds in _waited_inside(recomputed, waits) if recomputed else ():
        found[name] -= seconds
    if step.ahead_ns:
        found["host_ahead_s"] = step.ahead_ns / 1e9
    found["cpu_s"] = step.cpu_ns / 1e9
    return StepSums(step.step, found)


def _waited_inside(tasks: list[tuple[str, int, int]], waits: list[tuple[int, int]]) -> Iterator[tuple[str, float]]:
    """Yield the seconds of each wait that are within a task, each instant once; tasks do not overlap, and waits may be nested."""
    tasks.sort(key=itemgetter(1))
    index = until = 0
    for begin, end in sorted(waits):
        begin, until = max(begin, until), max(until, end)
        while index < len(tasks) and tasks[index][2] <= begin:
            index += 1
        if index == len(tasks):
            return
        name, start, stop = tasks[index]
        inside = max(begin, start)
        if end > inside:
            yield name, (min(end, stop) - inside) / 1e9
