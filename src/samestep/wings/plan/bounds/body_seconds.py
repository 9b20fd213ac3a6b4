"""Lower bounds of the seconds of the bodies of a run of layers, and the order in which the stages of a pipeline run them.

Under zero=2 and 3 each layer's weights are gathered while the layer before it computes, and under zero=3 for the backward too; gradients
are scattered behind a layer's backward, in the same stream. So a body lasts as long as its compute, or as what its stream sends.

Activations are held from a micro-batch's forward to its backward, or to its weight-gradient task where the schedule splits the backward.
A stage runs one body after the other; a forward waits for that of the virtual stage before it, and a backward for that of the next one,
each with the seconds in which its result is sent. `play` plays this order with one time for each body, so it knows what sums do
not: that two neighbours wait for each other's messages in every turn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from samestep import schedules
from samestep.program.ops import BYTES_OF, SHARD_AXES, OpKind
from samestep.program.step import StepSpec
from samestep.schedules import SCHEDULES, Action, Order, TaskKind
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.layer_kinds import Seconds
from samestep.wings.plan.simulation.collectives import collective_s, group_of


class BodySeconds(NamedTuple):
    """Seconds of the bodies of a run of layers, with the gathers that they wait for."""

    first_s: float
    """The forward of the first micro-batch."""
    forward_s: float
    backward_s: float
    weight_s: float
    last_s: float
    """The body that completes the gradients: the last micro-batch's backward, or where that is split its weight-gradient task."""


class UnitTraffic(NamedTuple):
    """Communication of layers of one kind over an axis along which their weights are sharded: seconds of one layer."""

    kind: int
    number: int
    gather_s: float
    scatter_s: float
    reads: bool
    """Whether their backward reads the weights, so that they are gathered again for it."""


class BodyBounds:
    """Lower bounds of the seconds of bodies, of the steps of one model, job and machine."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.hardware = prices, prices.hardware
        self._known_traffic: dict[tuple[object, ...], UnitTraffic] = {}

    def sent_s(self, kind: OpKind, size_bytes: float, axis: str, ranks: int, step: StepSpec) -> float:
        """Return the seconds of a collective over `ranks` ranks of an axis."""
        if ranks == 1 or size_bytes <= 0:
            return 0.0
        group = group_of(axis, ranks, step, self.hardware)
        return collective_s(kind, int(size_bytes), group, self.hardware)

    def gathers(self, step: StepSpec) -> bool:
        """Return whether each layer's weights are gathered while others compute (zero=2 and 3)."""
        return step.zero >= 2 and self.hardware.overlap

    def of_runs(self, step: StepSpec) -> tuple[BodySeconds, ...]:
        """Bound the seconds of the bodies of each run; under zero=2 and 3 they wait for gathers."""
        runs, gathers = self.prices.runs(step), self.gathers(step)
        known: dict[object, BodySeconds] = {}
        for run, cost in zip(runs.counts, self.prices.run_seconds(step), strict=True):
            if run not in known:
                known[run] = self._gathering(step, run, cost) if gathers else self._plain(step, cost)
        return tuple(known[run] for run in runs.counts)

    def _plain(self, step: StepSpec, cost: Seconds) -> BodySeconds:
        forward_s, backward_s, weight_s = cost.forward_s, cost.backward_s, cost.weight_s
        return BodySeconds(forward_s, forward_s, backward_s, weight_s, weight_s if step.splits_backward else backward_s)

    def _gathering(self, step: StepSpec, run: tuple[tuple[int, int], ...], cost: Seconds) -> BodySeconds:
        """Bound bodies that gather and scatter one layer at a time, one layer ahead, in the stream of the data axis and in that
        of expert-sharded weights.

        A forward lasts as long as the gathers of all blocks but the first two, and the compute of a block before and after them.
        A backward lasts as long as the scatters of all blocks but the last two and the gathers of all but the first two, which
        alternate in one stream; each overlaps only with compute that was issued later.
        """
        kinds = self.prices.seconds(step)
        blocks = [(kind, number) for kind, number in run if self.prices.few.layers[kind].is_block]
        others_s = sum(kinds[kind].backward_s for kind, _ in run if not self.prices.few.layers[kind].is_block)
        forward_s, backward_s, last_s = cost.forward_s, cost.backward_s, cost.backward_s
        for axis in SHARD_AXES:
            parts = [part for kind, number in blocks if (part := self.part(step, kind, number, axis)).gather_s]
            if not parts or sum(part.number for part in parts) <= 2:
                continue
            gather_s, scatter_s = max(part.gather_s for part in parts), max(part.scatter_s for part in parts)
            gathered_s = sum(part.number * part.gather_s for part in parts) - 2 * gather_s
            times = [kinds[part.kind] for part in parts]
            forward_s = max(forward_s, gathered_s + 2 * min(kinds[kind].forward_s for kind, _ in blocks))
            if step.zero == 3 and all(part.scatter_s and part.reads for part in parts):
                turns_s = gathered_s + sum(part.number * part.scatter_s for part in parts) - 2 * scatter_s
                around_s = min(row.backward_s - row.behind_s for row in times) + min(row.backward_s for row in times)
                slowed_s = cost.backward_s + self.slowed_s(turns_s, cost.sent_backward_s)
                last_s = max(last_s, turns_s + around_s + others_s, slowed_s)
                # Where no scatter holds them up, gathers may have run beside the forward, and slowed nothing that was issued behind them.
                backward_s = max(backward_s, gathered_s + min(row.backward_s for row in times))
        plain_s = forward_s if step.zero == 3 else cost.forward_s
        if step.layout.accumulate == "sharded":
            backward_s = last_s
        return BodySeconds(forward_s, plain_s, backward_s, cost.weight_s, last_s)

    def part(self, step: StepSpec, kind: int, number: int, axis: str) -> UnitTraffic:
        """Return the communication of layers of one kind over one of the axes along which units are sharded."""
        layout = step.layout
        key = layout.cuts, layout.dp_replicate, layout.dp_shard, layout.zero, layout.pp, kind, axis
        if key not in self._known_traffic:
            self._known_traffic[key] = self._part(step, kind, axis)
        traffic = self._known_traffic[key]
        return traffic if number == 1 else traffic._replace(number=number)

    def _part(self, step: StepSpec, kind: int, axis: str) -> UnitTraffic:
        unit = self.prices.units(step)[kind]
        gathered, scattered = (
            (unit.expert_gathered, unit.expert_scattered) if axis == "dp_expert" else (unit.gathered, unit.scattered)
        )
        ranks = step.ranks.size(axis)
        gather_s = self.sent_s(OpKind.ALL_GATHER, gathered, axis, ranks, step)
        scatter_s = self.sent_s(OpKind.REDUCE_SCATTER, scattered * least_reduced_bytes(step), axis, ranks, step)
        return UnitTraffic(kind, 1, gather_s, scatter_s, self.prices.few.layers[kind].backward_reads_weights)

    def slowed_s(self, sent_s: float, exposed_s: float) -> float:
        """Return the seconds that `sent_s` seconds of communication over one axis add to compute.

        Each second of it slows the compute that overlaps with it, or overlaps with none and is waited for. Only the `exposed_s`
        seconds of communication in compute's own queue are not slowed.
        """
        return (1 - 1 / self.hardware.contention) * max(0.0, sent_s - exposed_s)


def least_reduced_bytes(step: StepSpec) -> int:
    """Return the fewest bytes that an element of a gradient is sent as over any data axis; 0 where codecs share it with others."""
    return BYTES_OF[step.master_dtype] if step.contributions is None else 0


class Reductions(NamedTuple):
    """The reductions of the gradients of a run of layers."""

    begin_s: float
    """Seconds from the start of the run's last backward until its first gradients are complete."""
    streams_s: tuple[float, ...]
    """Seconds of communication in each stream."""


def last_reduced_s(begun_s: Sequence[float], of_runs: Sequence[Reductions]) -> float:
    """Return the seconds after which the last gradients of a stage are reduced: those of its last run of layers come first."""
    ends_s = [0.0] * len(of_runs[0].streams_s)
    for last_s, layer_run in zip(reversed(begun_s), reversed(of_runs), strict=True):
        ends_s = [
            max(end_s, last_s + layer_run.begin_s) + took_s
            for end_s, took_s in zip(ends_s, layer_run.streams_s, strict=True)
        ]
    return max(ends_s)


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
    peak, most = InFlight((0,) * chunks, None, 0, 0, None), 0
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
                peak, most = InFlight(tuple(counts), None, begun, deferred, None), num_held
            continue
        goes_back = chunk if kind is TaskKind.BACKWARD else None
        if is_fullest:
            peak = peak._replace(next_chunk=goes_back)
        elif is_as_full and has_freed and chunks == 1 and peak.again is None and peak.next_chunk in (None, goes_back):
            peak = peak._replace(again=begun)
        is_fullest = is_as_full = False
        deferred += (kind is TaskKind.BACKWARD and splits) - (kind is TaskKind.WEIGHT)
        if kind is frees:
            counts[chunk] -= 1
            num_held -= 1
            has_freed = True
    return peak


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


@functools.lru_cache(maxsize=2**10)
def order_of(schedule: str, stage: int, num_stages: int, microbatches: int, chunks: int) -> schedules.Order:
    """Return the order of a stage."""
    return schedules.order(schedule, stage, num_stages, microbatches, chunks)


class RunSeconds(NamedTuple):
    """Least seconds of the bodies of a run of layers, micro-batch by micro-batch."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weight_s: Sequence[float]
    """Where the schedule splits the backward."""


def play(
    orders: Sequence[Order], runs: Sequence[RunSeconds], sends_s: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    """Return for each run when each micro-batch's gradients are complete, and for each stage when it ends, in seconds from the start.

    Args:
        orders: the actions of each stage.
        runs: the bodies of each run of layers: number i, i + p, ... are those of stage i of p.
        sends_s: seconds of a message between each stage and the next one, of the last to the first.
    """
    stages, last = len(orders), len(runs) - 1
    forwards = [[-1.0] * len(run.forward_s) for run in runs]
    backwards = [[-1.0] * len(run.forward_s) for run in runs]
    complete = [[-1.0] * len(run.forward_s) for run in runs]
    places, ends_s = [0] * stages, [0.0] * stages
    waiting = list(range(stages))
    while waiting:
        for stage in waiting:
            now, order, place = ends_s[stage], orders[stage], places[stage]
            while place < len(order):
                kind, index, chunk = order[place]
                run = chunk * stages + stage
                if kind is TaskKind.FORWARD:
                    if run:
                        arrived_s = forwards[run - 1][index]
                        if arrived_s < 0:
                            break
                        now = max(now, arrived_s + sends_s[stage - 1])
                    forwards[run][index] = now = now + runs[run].forward_s[index]
                elif kind is TaskKind.BACKWARD:
                    if run < last:
                        arrived_s = backwards[run + 1][index]
                        if arrived_s < 0:
                            break
                        now = max(now, arrived_s + sends_s[stage])
                    backwards[run][index] = complete[run][index] = now = now + runs[run].backward_s[index]
                else:
                    complete[run][index] = now = now + runs[run].weight_s[index]
                place += 1
            ends_s[stage], places[stage] = now, place
        waiting = [stage for stage in waiting if places[stage] < len(orders[stage])]
    return complete, ends_s


def smallest(step: StepSpec) -> StepSpec:
    """Return the step as if all its micro-batches were as small as the smallest.

    `samples` is set only where the micro-batches are not equal.
    """
    even, rest = divmod(step.rank_samples, step.num_microbatches)
    return step.but(samples=even) if rest and step.samples is None else step


def larger_twin(step: StepSpec) -> tuple[StepSpec, int]:
    """Return the step with micro-batches of one sample more than the smallest, which come first, and the number of those."""
    if step.samples is None:
        return step, 0
    return step.but(samples=step.samples + 1), step.rank_samples - step.num_microbatches * step.samples
