"""The predicted memory of a rank over a step: what `memory.py` finds op by op, at the times that the clock gives to the ops.

    bytes   ▁▂▃▄▅▆▇█▇▆▅▄▃▂▁▁      weights and states below, activations between the first forward and the last backward above
    time    F0 F1 F2 B0 B1 B2 U

An op of a collective that was moved to another place of the step (`Program.amid_steps`) has the time of the op before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from samestep.simulation import memory
from samestep.simulation.memory import MemoryUse
from samestep.simulation.prediction import Prediction
from samestep.simulation.spans import COMPUTE


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """The bytes that a rank holds from one time of a step on, by part."""

    time_s: float
    task: str
    held: MemoryUse


def memory_over_step(found: Prediction, stage: int) -> list[MemoryMoment]:
    """Return what a rank of one stage holds at each op of a step, in the order of time."""
    times: dict[tuple[str, str], float] = {}
    for span in found.timeline.spans_of(stage):
        times.setdefault((span.task, span.name), span.start_s)
    last_s = max((span.start_s for span in found.timeline.spans_of(stage) if span.stream == COMPUTE), default=0.0)
    moments: list[MemoryMoment] = []
    now_s = 0.0
    for task, held in memory.over_step(found.programs[stage], found.states_per_param):
        label = f"{task.kind}{task.microbatch}"
        at_s = times.get((label, held.peak_at), last_s if held.peak_at == "update:optimizer" else now_s)
        now_s = max(now_s, at_s)
        held = replace(held, overhead=found.hardware.reserved_bytes)
        if moments and moments[-1].time_s == now_s and moments[-1].held.total >= held.total:
            continue
        moments.append(MemoryMoment(now_s, label, held))
    return moments
