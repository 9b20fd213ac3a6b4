"""Play the programs of all pipeline stages against each other: seconds of the whole step.

A body is played once, op by op, and then stands as one block of compute; blocks follow the schedule's order on each
stage and wait for the blocks of other stages whose results are sent to them. What a body leaves in flight on other
streams (reductions behind the last backward) has to end before the update starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samestep import clock, schedules
from samestep.cost import seconds
from samestep.hardware import Hardware
from samestep.program import Kind, Ops, Program, Task, TaskKind


class Block(NamedTuple):
    """A body as one piece: until its compute ends, until all of it ends, and what sending its result takes."""

    compute_s: float
    all_s: float
    send_s: float


def step_s(programs: Sequence[Program], machine: Hardware) -> float:
    """Return the seconds of one step; a single stage is played op by op."""
    if len(programs) == 1:
        return clock.play(programs[0], machine).step_s
    blocks = [{key: _block(program, ops, machine) for key, ops in program.bodies.items()} for program in programs]
    virtual = programs[0].step.layout.virtual_stages
    queues = [[task for task in program.stages[0] if task.kind is not TaskKind.UPDATE] for program in programs]
    position, free, ends = [0] * len(programs), [0.0] * len(programs), [0.0] * len(programs)
    done: dict[tuple[int, schedules.Action], tuple[float, float]] = {}
    moved = True
    while moved:
        moved = False
        for stage, tasks in enumerate(queues):
            while position[stage] < len(tasks):
                task = tasks[position[stage]]
                action = _action(task)
                needs = list(schedules.needs(action, stage, len(programs), virtual))
                if any(need not in done for need in needs):
                    break
                arrived = [done[need][need[0] != stage] for need in needs]
                block = blocks[stage][task.body]
                start_s = max(free[stage], *arrived) if arrived else free[stage]
                free[stage] = start_s + block.compute_s
                ends[stage] = max(ends[stage], start_s + block.all_s)
                done[stage, action] = (free[stage], free[stage] + block.send_s)
                position[stage] += 1
                moved = True
    assert all(at == len(tasks) for at, tasks in zip(position, queues, strict=True)), "the schedule deadlocks"
    return max(max(free), max(ends)) + max(block[str(TaskKind.UPDATE)].all_s for block in blocks)


def _action(task: Task) -> schedules.Action:
    return schedules.Action(schedules.ActionKind(str(task.kind)), task.microbatch, task.chunk)


def _block(program: Program, ops: Ops, machine: Hardware) -> Block:
    ended: dict[str, float] = {}
    free: dict[str, float] = {}
    send_s = 0.0
    for op in ops:
        took_s = seconds(op, program, machine)
        if op.kind is Kind.SEND:
            send_s = took_s
            continue
        start_s = max([free.get(op.stream, 0.0), *(ended[name] for name in op.after if name in ended)])
        ended[op.name] = free[op.stream] = start_s + took_s
    all_s = max(free.values(), default=0.0)
    return Block(free.get("compute", all_s), all_s, send_s)
