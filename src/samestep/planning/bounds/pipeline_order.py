"""Facts about the order in which a stage of a pipeline runs, before anything is priced: how many micro-batches are in flight
at most, and which weight-gradient tasks follow the last backward.

Activations are held from a micro-batch's forward to its backward, or to its weight-gradient task where the schedule splits the backward.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from samestep import schedules
from samestep.schedules import SCHEDULES, Action, TaskKind


class InFlight(NamedTuple):
    """The moment at which a stage has most micro-batches in flight."""

    counts: tuple[int, ...]
    """Micro-batches in flight in each chunk (virtual stage)."""
    next_chunk: int | None
    """The chunk whose backward follows; None where some activations are freed before that backward."""
    latest: int
    """Index of the last micro-batch whose forward has begun."""
    deferred: int
    """Number of them whose gradients of weights alone are left, where the schedule splits the backward."""
    again: int | None
    """The same index at the next moment with as many in flight, after a backward; None if there is none, and with several chunks,
    because the counts per chunk then change from round to round."""


@functools.lru_cache(maxsize=2**12)
def in_flight(schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int) -> InFlight:
    """Return the moment at which a stage has most micro-batches in flight, for any schedule."""
    if num_stages == 1:
        return InFlight((1,), 0, 0, 0, 1 if microbatches > 1 else None)
    splits = SCHEDULES[schedule].splits_backward
    frees = TaskKind.WEIGHT if splits else TaskKind.BACKWARD
    counts, num_held, begun, deferred = [0] * chunks, 0, 0, 0
    found, most = InFlight((0,) * chunks, None, 0, 0, None), 0
    has_freed = False
    # Whether the last action is a forward after which more are in flight than ever, or as many.
    is_fullest = is_as_full = False
    for kind, microbatch, chunk in order_of(schedule, stage, num_stages, microbatches, chunks):
        if kind is TaskKind.FORWARD:
            begun = max(begun, microbatch)
            counts[chunk] += 1
            num_held += 1
            is_fullest, is_as_full = num_held > most, num_held == most
            if is_fullest:
                found, most = InFlight(tuple(counts), None, begun, deferred, None), num_held
            continue
        goes_back = chunk if kind is TaskKind.BACKWARD else None
        if is_fullest:
            found = found._replace(next_chunk=goes_back)
        elif is_as_full and has_freed and chunks == 1 and found.again is None and found.next_chunk in (None, goes_back):
            found = found._replace(again=begun)
        is_fullest = is_as_full = False
        deferred += (kind is TaskKind.BACKWARD and splits) - (kind is TaskKind.WEIGHT)
        if kind is frees:
            counts[chunk] -= 1
            num_held -= 1
            has_freed = True
    return found


@functools.lru_cache(maxsize=2**12)
def in_flight_between(schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return the largest number of micro-batches in flight, for each chunk.

    Counted from the moment at which every chunk has run a backward until the first backward of the last micro-batch.
    """
    counts, most, gone_back = [0] * chunks, (0,) * chunks, set[int]()
    for kind, microbatch, chunk in order_of(schedule, stage, num_stages, microbatches, chunks):
        if kind is TaskKind.BACKWARD:
            if microbatch == microbatches - 1:
                break
            gone_back.add(chunk)
        counts[chunk] += (kind is TaskKind.FORWARD) - (kind is TaskKind.BACKWARD)
        if len(gone_back) == chunks and sum(counts) > sum(most):
            most = tuple(counts)
    return most


@functools.lru_cache(maxsize=2**12)
def adds_up_all(schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int) -> bool:
    """Return whether every chunk of a stage has run a backward before the first backward of the last micro-batch."""
    if chunks == 1:
        return microbatches > 1
    gone_back = set[int]()
    for kind, microbatch, chunk in order_of(schedule, stage, num_stages, microbatches, chunks):
        if kind is TaskKind.BACKWARD:
            if microbatch == microbatches - 1:
                return False
            gone_back.add(chunk)
            if len(gone_back) == chunks:
                return True
    return False


@functools.lru_cache(maxsize=2**12)
def after_last_backward(
    schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int
) -> tuple[Action, ...]:
    """Return the actions of a stage after its last backward: the weight-gradient tasks that the schedule defers."""
    order = order_of(schedule, stage, num_stages, microbatches, chunks)
    after = itertools.takewhile(lambda action: action.kind is not TaskKind.BACKWARD, reversed(order))
    return tuple(after)[::-1]


@functools.lru_cache(maxsize=2**12)
def forwards_after_backwards(schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int) -> int:
    """Return how many forwards of a stage follow a backward at once."""
    if num_stages == 1:
        return microbatches - 1
    kinds = [action.kind for action in order_of(schedule, stage, num_stages, microbatches, chunks)]
    turn = TaskKind.BACKWARD, TaskKind.FORWARD
    return sum(pair == turn for pair in itertools.pairwise(kinds))


@functools.lru_cache(maxsize=2**10)
def order_of(schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int) -> schedules.Order:
    """Return the order of a stage."""
    return schedules.order(schedule, stage, num_stages, microbatches, chunks)
