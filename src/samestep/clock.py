"""Plays a program: when each op starts and ends on given hardware. No torch, no processes.

The ranks of a stage do the same at the same time, so one list of ops stands for all of them and thousands of devices
cost no more than one. Streams run their ops in the order of issue, beside each other:

    start of an op = the later of   the end of the op before it on its stream
                                    the ends of the latest earlier ops of the names in `after`, of any task

Compute waits for no collective it does not name. Where communication does not run beside compute
(`hardware.overlap` is false) all ops of a stage are one queue.

A name in `after` must have been issued: a strategy that leaves an op out leaves its name out too. A wait for what no
earlier op is would never end on a real machine, so here it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from samestep.cost import seconds
from samestep.hardware import Hardware
from samestep.program import Op, Program
from samestep.timeline import Span, Timeline

Prices = Mapping[str, tuple[tuple[Op, str, float], ...]]
"""Of each body: its ops with their names and seconds."""


def play(program: Program, hardware: Hardware) -> Timeline:
    """Start every op as soon as its stream is free and what it waits for has ended.

    Raises:
        RuntimeError: an op waits for one that was never issued; both are named.
        SamestepError: the hardware has no speed for the program's dtype.
    """
    prices = {
        body: tuple((op, op.name, seconds(op, program, hardware)) for op in ops) for body, ops in program.bodies.items()
    }
    stages = range(len(program.stages))
    return Timeline(tuple(span for stage in stages for span in _play_stage(program, prices, stage, hardware.overlap)))


def _play_stage(program: Program, prices: Prices, stage: int, overlap: bool) -> Iterator[Span]:
    ended: dict[str, float] = {}
    free: dict[str, float] = {}
    for task in program.stages[stage]:
        label = f"{task.kind}{task.microbatch}"
        for op, name, op_s in prices[task.body]:
            queue = op.stream if overlap else ""
            start_s = free.get(queue, 0.0)
            for awaited in op.after:
                if awaited not in ended:
                    raise RuntimeError(
                        f"{name} of task {label} on stage {stage} waits for {awaited}, and no earlier op is that"
                    )
                start_s = max(start_s, ended[awaited])
            ended[name] = free[queue] = end_s = start_s + op_s
            yield Span(stage=stage, stream=op.stream, name=name, task=label, start_s=start_s, end_s=end_s)
