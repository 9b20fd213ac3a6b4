"""The part of a predicted step that binds it, and the others that are worth a word."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from samestep.output.byte_sizes import readable
from samestep.output.page.quantities import duration
from samestep.program.ops import COPY_STREAMS
from samestep.simulation import cost
from samestep.simulation.partition import BUBBLE, IMBALANCE, TRANSFER
from samestep.simulation.prediction import Prediction

WORTH = 0.03
"""Part of a step from which on a row is worth a word."""
MOST_REASONS = 3
_WORDS = {
    BUBBLE: "the schedule leaves a stage idle",
    IMBALANCE: "another stage computes longer",
    "recompute": "forwards run again in backwards",
    "optimizer": "the update",
}


def binds(found: Prediction) -> str:
    """Return the name of the part that takes most of a predicted step, and its share."""
    busy = found.step_s * (1 - found.bubble_fraction) - found.exposed_comm_s
    launched = _launch_fraction(found)
    parts = {
        "launches of small kernels": busy * launched if launched > 0.5 else 0.0,  # a smaller part belongs to compute
        "compute": busy if launched <= 0.5 else busy * (1 - launched),
        "bubbles": found.bubble_fraction * found.step_s,
        "exposed communication": found.exposed_comm_s,
    }
    name = max(parts, key=lambda part: parts[part])
    needed = found.peak.total / found.hardware.memory_bytes
    memory = f"{1 - needed:.0%} of the memory is free" if needed <= 1 else f"{needed - 1:.0%} of the memory is missing"
    return f"{name} ({parts[name] / found.step_s:.0%} of the step); {memory}"


def reasons(found: Prediction) -> list[str]:
    """Return what else takes time on the stage that computes longest, the largest first, with the bytes of each axis."""
    sent: dict[str, int] = defaultdict(int)
    rows = [row for row in found.parts if row.seconds >= WORTH * found.step_s and row.name != "compute"]
    program = found.programs[rows[0].stage] if rows else None
    for _, op in program.ops() if program else ():
        sent[op.stream] += op.size_bytes
    lines = []
    for row in sorted(rows, key=lambda row: -row.seconds)[:MOST_REASONS]:
        took = f"{duration(row.seconds).text}, {row.seconds / found.step_s:.0%} of the step"
        if row.name == TRANSFER and row.axis is not None:
            who = "the link to the host" if row.axis in COPY_STREAMS.values() else row.axis
            lines.append(f"{who} sends buffers of {readable(sent[row.axis])} a step, and no compute hides {took}")
        else:
            lines.append(f"{row.name}: {_WORDS.get(row.name, row.name)} for {took}")
    return lines


def _launch_fraction(one: Prediction) -> float:
    """Return the fraction of compute that is not arithmetic and memory traffic: launches, shortest kernels, the host's work."""
    at_once = replace(one.hardware, kernel_launch_s=0.0, kernel_s=0.0, host_step_s=0.0, fsdp_unit_s=0.0)
    spent_s = work_s = 0.0
    for program in one.programs:
        for body, times in Counter(task.body for task in program.tasks).items():
            for op in program.bodies[body]:
                if op.axis is None:
                    spent_s += times * cost.seconds(op, program, one.hardware)
                    work_s += times * cost.seconds(op, program, at_once)
    return 1 - work_s / spent_s if spent_s else 0.0
