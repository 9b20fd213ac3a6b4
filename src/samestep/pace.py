"""The pace of a pipeline: its schedule played with whole bodies, and what a stage holds meanwhile.

Between `schedules.py`, which says in which order a stage runs, and the clock, which plays every op: here a body is a number
of seconds, so that thousands of layouts can be tried.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from samestep import schedules
from samestep.layout import Layout
from samestep.schedules import TaskKind


class Bodies(NamedTuple):
    """Seconds of a run's bodies, with what they wait for on their own rank."""

    first_s: float
    """The forward of the first micro-batch."""
    forward_s: float
    backward_s: float
    weight_s: float
    last_s: float
    """The body that leaves the last gradients: the last micro-batch's backward, or where it is split that of weights."""


class Times(NamedTuple):
    """At the earliest."""

    whole_s: tuple[float, ...]
    """When the body that leaves a run's last gradients starts, of each run."""
    ends_s: tuple[float, ...]
    """When compute ends, of each stage."""


class Held(NamedTuple):
    """The moment at which a stage has most micro-batches in flight."""

    counts: tuple[int, ...]
    """Of each chunk."""
    next_chunk: int
    """Whose backward follows."""
    latest: int
    """The last micro-batch of those that are or were in flight: none behind it has begun."""


@functools.lru_cache(maxsize=2**12)
def in_flight(schedule: schedules.Schedule, stage: int, num_stages: int, microbatches: int, chunks: int) -> Held:
    """Find the moment."""
    if num_stages == 1:
        return Held((1,), 0, 0)
    # Once these are full, more micro-batches change nothing; interleaved deals them into other rounds.
    is_bounded = schedule in ("1f1b", "zero-bubble")
    order = _order(
        schedule, stage, num_stages, min(microbatches, num_stages + 1) if is_bounded else microbatches, chunks
    )
    frees = TaskKind.WEIGHT if schedule == "zero-bubble" else TaskKind.BACKWARD
    counts = [0] * chunks
    best, most, next_chunk, is_new = tuple(counts), 0, 0, False
    latest = begun = 0
    for action in order:
        if action.kind is TaskKind.BACKWARD and is_new:
            next_chunk, is_new = action.chunk, False
        begun = max(begun, action.microbatch)
        counts[action.chunk] += (action.kind is TaskKind.FORWARD) - (action.kind is frees)
        if sum(counts) > most:
            best, most, is_new, latest = tuple(counts), sum(counts), True, begun
    return Held(best, next_chunk, latest)


def play_bodies(
    layout: Layout,
    m: int,
    bodies: Sequence[Bodies],
    sends_s: Sequence[float],
    larger: Sequence[Bodies] = (),
    num_larger: int = 0,
) -> Times:
    """Play bodies in the order of the schedule; each waits for what other stages send it, one after the other.

    The first `num_larger` of the m micro-batches have bodies of their own.
    """
    pp, chunks = layout.pp, layout.virtual_stages
    last = pp * chunks - 1
    orders = [_order(layout.schedule, stage, pp, m, chunks) for stage in range(pp)]
    reduces = TaskKind.WEIGHT if layout.schedule == "zero-bubble" else TaskKind.BACKWARD
    forward = [[0.0] * m] + [[-1.0] * m for _ in range(last)]  # when what a run is given has come; -1: not yet
    backward = [[-1.0] * m for _ in range(last)] + [[0.0] * m]
    free, links = [0.0] * pp, [0.0] * pp
    whole_s, at = [0.0] * (last + 1), [0] * pp
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            position, now, link, send_s = at[stage], free[stage], links[stage], sends_s[stage]
            for kind, microbatch, chunk in order[position:]:
                run = chunk * pp + stage
                body = larger[run] if microbatch < num_larger else bodies[run]
                if kind is TaskKind.WEIGHT:
                    came, took_s, to = 0.0, body.weight_s, None
                elif kind is TaskKind.FORWARD:
                    came, took_s = forward[run][microbatch], body.forward_s if microbatch else body.first_s
                    to = forward[run + 1] if run < last else None
                else:
                    came, took_s = backward[run][microbatch], body.backward_s
                    to = backward[run - 1] if run else None
                if came < 0.0:
                    break
                start_s = came if came > now else now
                if microbatch == m - 1 and kind is reduces:
                    whole_s[run], took_s = start_s, body.last_s
                now = start_s + took_s
                if to is not None:
                    link = (now if now > link else link) + send_s
                    to[microbatch] = link
                position += 1
            moved |= position > at[stage]
            at[stage], free[stage], links[stage] = position, now, link
    assert all(position == len(order) for position, order in zip(at, orders, strict=True)), "the schedule deadlocks"
    return Times(tuple(whole_s), tuple(free))


@functools.lru_cache(maxsize=2**10)
def _order(
    schedule: schedules.Schedule, stage: int, num_stages: int, microbatches: int, chunks: int
) -> schedules.Order:
    return schedules.order(schedule, stage, num_stages, microbatches, chunks)
