"""The pace of a pipeline: its schedule played with whole bodies, and what a stage holds meanwhile.

Between `schedules.py`, which says in which order a stage runs, and the clock, which plays every op: here a body is a number
of seconds, so that thousands of layouts can be tried.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from samestep import schedules
from samestep.layout import Layout
from samestep.schedules import SCHEDULES, Action, TaskKind


class Bodies(NamedTuple):
    """Seconds of a run's bodies, with what they wait for on their own rank."""

    first_s: float
    """The forward of the first micro-batch."""
    forward_s: float
    backward_s: float
    weight_s: float
    last_s: float
    """The body that leaves the last gradients: the last micro-batch's backward, or where it is split that of weights."""
    gathered_s: float = 0.0
    """When the forward of the first micro-batch ends at the earliest, from the start of the step."""
    gathers_until_s: float = 0.0
    """Until when a stage gathers weights, from the start of the step."""
    sent_s: float = 0.0
    """The part of a forward that is sent, which is not slowed by what is gathered beside it."""

    def longer_s(self, start_s: float, contention: float) -> float:
        """Return by how much a forward that starts then is slowed at least by what is gathered beside it."""
        beside_s = self.gathers_until_s - start_s - self.sent_s
        if beside_s <= 0.0:
            return 0.0
        return min((contention - 1) * (self.forward_s - self.sent_s), beside_s * (1 - 1 / contention))


class Times(NamedTuple):
    """The earliest times of a pipeline, in seconds from the start of the step."""

    whole_s: tuple[float, ...]
    """When the body that leaves a run's last gradients starts, of each run."""
    ends_s: tuple[float, ...]
    """When compute ends, of each stage."""


class InFlight(NamedTuple):
    """The moment at which a stage has most micro-batches in flight."""

    counts: tuple[int, ...]
    """Of each chunk."""
    next_chunk: int | None
    """The chunk whose backward follows; None where some activations are freed before."""
    latest: int
    """The last micro-batch of those that are or were in flight: none behind it has begun."""
    again: int | None
    """The same once more when as many are in flight behind a backward; None where they never are, and with several chunks,
    whose shares of what is in flight change from round to round."""


@functools.lru_cache(maxsize=2**12)
def in_flight(schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int) -> InFlight:
    """Return the moment at which a stage has most micro-batches in flight, in whatever order it runs."""
    if num_stages == 1:
        return InFlight((1,), 0, 0, 1 if microbatches > 1 else None)
    frees = TaskKind.WEIGHT if SCHEDULES[schedule].splits_backward else TaskKind.BACKWARD
    counts, num_held, begun = [0] * chunks, 0, 0
    found, most = InFlight((0,) * chunks, None, 0, None), 0
    has_freed = False
    at: InFlight | None = None  # the moment of the last forward, if it is the fullest so far or as full as that
    for kind, microbatch, chunk in _order(schedule, stage, num_stages, microbatches, chunks):
        if kind is TaskKind.FORWARD:
            begun = max(begun, microbatch)
            counts[chunk] += 1
            num_held += 1
            at = InFlight(tuple(counts), None, begun, None) if num_held >= most else None
            if at and num_held > most:
                found, most = at, num_held
            continue
        goes_back = chunk if kind is TaskKind.BACKWARD else None
        if at is found:
            found = found._replace(next_chunk=goes_back)
        elif at and has_freed and chunks == 1 and found.again is None and found.next_chunk in (None, goes_back):
            found = found._replace(again=at.latest)
        at = None
        if kind is frees:
            counts[chunk] -= 1
            num_held -= 1
            has_freed = True
    return found


@functools.lru_cache(maxsize=2**12)
def in_flight_between(schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return how many micro-batches of each chunk are in flight where they are most, from when every chunk has gone
    backward to the backward of the last micro-batch."""
    counts, most, gone_back = [0] * chunks, (0,) * chunks, set[int]()
    for kind, microbatch, chunk in _order(schedule, stage, num_stages, microbatches, chunks):
        if kind is TaskKind.BACKWARD:
            if microbatch == microbatches - 1:
                break
            gone_back.add(chunk)
        counts[chunk] += (kind is TaskKind.FORWARD) - (kind is TaskKind.BACKWARD)
        if len(gone_back) == chunks and sum(counts) > sum(most):
            most = tuple(counts)
    return most


def play_bodies(
    layout: Layout,
    m: int,
    bodies: Sequence[Bodies],
    sends_s: Sequence[float],
    larger: Sequence[Bodies] = (),
    num_larger: int = 0,
    contention: float = 1.0,
) -> Times:
    """Play bodies in the order of the schedule; each waits for what other stages send it, one after the other.

    Forwards are slowed by `contention` as long as their stage gathers. The first `num_larger` of the m micro-batches have bodies of their own.
    """
    pp, chunks = layout.pp, layout.virtual_stages
    last = pp * chunks - 1
    orders = [_order(layout.schedule, stage, pp, m, chunks) for stage in range(pp)]
    reduces = TaskKind.WEIGHT if SCHEDULES[layout.schedule].splits_backward else TaskKind.BACKWARD
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
                if kind is TaskKind.FORWARD and start_s < body.gathers_until_s:
                    now += body.longer_s(start_s, contention)
                    now = max(now, body.gathered_s) if microbatch == 0 else now
                if to is not None:
                    link = (now if now > link else link) + send_s
                    to[microbatch] = link
                position += 1
            moved |= position > at[stage]
            at[stage], free[stage], links[stage] = position, now, link
    assert all(position == len(order) for position, order in zip(at, orders, strict=True)), "the schedule deadlocks"
    return Times(tuple(whole_s), tuple(free))


@functools.lru_cache(maxsize=2**12)
def behind_last_backward(
    schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int
) -> tuple[Action, ...]:
    """Return what a stage runs behind its last backward: gradients of weights that have been put off."""
    order = _order(schedule, stage, num_stages, microbatches, chunks)
    behind = itertools.takewhile(lambda action: action.kind is not TaskKind.BACKWARD, reversed(order))
    return tuple(behind)[::-1]


@functools.lru_cache(maxsize=2**10)
def _order(schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int) -> schedules.Order:
    return schedules.order(schedule, stage, num_stages, microbatches, chunks)
