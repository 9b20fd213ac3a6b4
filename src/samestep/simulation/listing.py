"""A prediction as text: its programs, its timeline, whether it fits in memory, and its numbers as JSON."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from samestep.program.ops import COPIES, Op
from samestep.program.program import Program
from samestep.simulation.bound_by import binds
from samestep.simulation.memory import allocator_summary, memory_summary
from samestep.simulation.prediction import Prediction, unpriced

MOST_LINES = 60
"""Number of lines above which a program is only summarised by default, so that the rest stays on the screen."""


def as_text(found: Prediction, *, whole: bool = False) -> str:
    """Return a prediction as text; a long program is shortened to its tasks unless the `whole` is asked for."""
    lines = program_text(found).splitlines()
    if not whole and len(lines) - len(found.programs) * (len(found.programs) > 1) > MOST_LINES:
        lines = [*_tasks(found.programs)]
    fits = "fits" if found.fits else "does not fit"
    chance = f"; by the record of predictions it fits with a chance of {found.chance_to_fit:.0%}"
    return "\n".join(
        [
            *lines,
            found.timeline.to_text(100),
            f"bound by {binds(found)}",
            *unpriced(found.job),
            *allocator_summary(found.peak, found.reserved_bytes, found.hardware),
            f'"{found.layout}" {fits}: {memory_summary(found.peak, found.hardware)}{chance}',
            _compact(found.to_record()),
        ]
    )


def program_text(found: Prediction) -> str:
    """Return the tasks and bodies of every stage as text, one line for each op."""
    several = len(found.programs) > 1
    stages = enumerate(found.programs)
    return "\n".join(
        line for stage, program in stages for line in (*[f"stage {stage}"][:several], *_list_program(program))
    )


def _list_program(program: Program) -> Iterator[str]:
    """Yield the lines of a program: its tasks, and the ops of each body."""
    tasks = " ".join(f"{task.body}[{task.microbatch}]" for task in program.tasks)
    yield f'program of "{program.step.layout}": {tasks}'
    for key, ops in program.bodies.items():
        yield f"  {key}"
        yield from map(_line, ops)
    for part, phases in enumerate(program.exchanges):
        for phase, ops in phases.items():
            yield f"  exchange of part {part}, every {program.step.sharing.every} steps: {phase}"
            yield from map(_line, ops)


def _line(op: Op) -> str:
    size = f"{op.flops:>12,} FLOPs"
    if op.axis or op.kind in COPIES:
        size = f"{op.size_bytes:>12,} B {op.dtype} over {op.axis}" if op.axis else f"{op.size_bytes:>12,} B {op.stream}"
    return f"    {op.name:<40} {size}{'  (by FSDP2)' if op.implied else ''}"


def _tasks(programs: Sequence[Program]) -> Iterator[str]:
    """Yield the lines of a summary: how often each body runs and its numbers of ops; equal stages are listed once."""
    num_ops = sum(len(program.bodies[task.body]) for program in programs for task in program.tasks)
    yield f'program of "{programs[0].step.layout}": {num_ops:,} ops; --program lists them'
    first = 0
    for tasks, alike in itertools.groupby(map(_tasks_of, programs)):
        count = len([*alike])
        if len(programs) > 1:
            yield f"stage {first}" if count == 1 else f"stages {first} to {first + count - 1}, each"
        yield from tasks
        first += count


def _tasks_of(program: Program) -> list[str]:
    """Return a line for each body of a program: its key, how often it runs, and its number of ops of each kind."""
    lines = []
    for body, times in Counter(task.body for task in program.tasks).items():
        kinds = Counter(str(op.kind) for op in program.bodies[body])
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        lines.append(f"  {body!s:<12} {'once' if times == 1 else f'{times:,} times':>10}: {counts}")
    return lines


def _compact(record: Mapping[str, object]) -> str:
    """Return JSON with a line for each key, and for each table of a list."""
    lines = []
    for key, value in record.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"
