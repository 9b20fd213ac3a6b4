"""Programs between two steps: exchanges of replicas after an update, and weights that arrive while the next forwards run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samestep.program.exchange_times import ExchangeEvent, ExchangeTimes
from samestep.program.ops import UPDATE_BODY, BodyKey, Op, OpKind, Ops, Task, is_forward, starts_step
from samestep.program.program import Program


def ending_with(program: Program, events: Sequence[ExchangeEvent]) -> Program:
    """Return the program of a step, with the collectives of `events` issued after its update."""
    return program.with_update(lambda _: _update_with(program, events))


def _update_with(program: Program, events: Sequence[ExchangeEvent]) -> Ops:
    sent = [op for phase, part in events if program.exchanges for op in program.exchanges[part][phase]]
    return (*program.bodies[UPDATE_BODY], *sent)


def hiding(program: Program, part: int | None) -> Program:
    """Return the program of the steps that hide an exchange: the step after which it starts, up to the step after which it ends.

    If `part` is None, the program is that of as many steps without an exchange.
    """
    step = program.step
    times = ExchangeTimes(every=step.sharing.delay + 2, parts=1, delay=step.sharing.delay, last=0)
    bodies, tasks = dict(program.bodies), list[Task]()
    for index in range(times.delay + 1):
        events = [] if part is None else [event._replace(part=part) for event in times.behind(times.every + index)]
        key = UPDATE_BODY._replace(chunk=index)
        bodies[key] = _update_with(program, events)
        shift = index * step.num_microbatches
        tasks += [task._replace(microbatch=task.microbatch + shift) for task in program.tasks[:-1]]
        tasks.append(Task(key, 0))
    return replace(program, bodies=bodies, tasks=tuple(tasks))


def amid_steps(program: Program) -> Program:
    """Return the program as it runs between other steps.

    The weights that zero=1 gathers after the update of the step before arrive while the first forwards run, each layer's
    before its forward begins.
    """
    names = {f"{OpKind.ALL_GATHER}:{bucket.name}" for bucket in program.buckets}

    def is_late(op: Op) -> bool:
        return op.name in names and f"{OpKind.UPDATE}:optimizer" in op.after

    late = [op for op in program.bodies[UPDATE_BODY] if is_late(op)]
    if not late or program.step.sharing.trains_apart:
        return program
    params = {param.name: param for param in program.step.model.params}
    readers: dict[int, list[str]] = {}
    for bucket in program.buckets:
        members = [params[member.name] for member in bucket.members]
        for layer in {layer for one in members for layer in (one.layer, *(use.layer for use in one.uses))}:
            readers.setdefault(layer, []).append(f"{OpKind.ALL_GATHER}:{bucket.name}")
    gathered = {op.name for op in late}

    def rewrite(key: BodyKey, ops: Ops) -> Ops:
        if key == UPDATE_BODY:
            return tuple(op for op in ops if not is_late(op))
        if is_forward(key) and starts_step(key):
            ops = tuple(
                op.but(after=(*op.after, *(name for name in readers.get(op.layer, ()) if name in gathered)))
                if op.kind is OpKind.FORWARD and op.layer is not None
                else op
                for op in ops
            )
        return (*(op.but(after=()) for op in late), *ops) if key == program.tasks[0].body else ops

    return program.with_bodies(rewrite)
