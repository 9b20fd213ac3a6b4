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
    launched_s = found.launch_wait_s
    if (
        not found.hardware.runs_ahead
    ):  # there what launches take is a part of every op, of which a smaller part belongs to compute
        part = _launch_fraction(found)
        launched_s = busy * part if part > 0.5 else 0.0
    parts = {
        "launches of small kernels": launched_s,
        "compute": max(busy - launched_s, 0.0),
        "bubbles": found.bubble_fraction * found.step_s,
        "exposed communication": found.exposed_comm_s,
    }
    name = max(parts, key=lambda part: parts[part])
    free = 1 - found.peak.total / found.hardware.memory_bytes
    return f"{name} ({parts[name] / found.step_s:.0%} of the step); {free:.0%} of the memory is free"


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


HOST_BOUND = 0.1
"""Part of a step that the device waits for launches from which on a step is called bound by its host."""


def host_summary(found: Prediction) -> list[str]:
    """Return a line if the host binds a step: if its device often waits for launches."""
    part = found.launch_wait_s / found.step_s if found.step_s else 0.0
    if part < HOST_BOUND:
        return []
    more = "larger micro-batches launch less" + (
        ', and so does run.compile = "blocks"' if found.job.run.compile == "none" else ""
    )
    return [
        f"host-bound: the device waits {duration(found.launch_wait_s).text} for launches, {part:.0%} of the step; {more}"
    ]


def _launch_fraction(one: Prediction) -> float:
    """Return the fraction of compute that is not arithmetic and memory traffic: launches, shortest kernels, the host's work."""
    hardware = one.hardware.slowest_of(one.devices)
    at_once = replace(hardware, kernel_launch_s=0.0, kernel_s=0.0, host_step_s=0.0, fsdp_unit_s=0.0)
    spent_s = work_s = 0.0
    for program in one.programs:
        for body, times in Counter(task.body for task in program.tasks).items():
            for op in program.bodies[body]:
                if op.axis is None:
                    spent_s += times * cost.seconds(op, program, hardware)
                    work_s += times * cost.seconds(op, program, at_once)
    return 1 - work_s / spent_s if spent_s else 0.0
