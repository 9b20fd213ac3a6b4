"""The ways to split the data axis as the first stage of a pipeline sees them: what room each leaves for activations, and how long it sends.

A split that shards weights has room where others have none, and gathers them for every micro-batch. So the quickest step of some degrees
is no quicker than the quickest split that has room, first for its states alone, then with what is in flight:

    T >= min over splits of (a + m b) / p    a seconds are sent once a step by all p stages, b for each of m micro-batches

Bytes count alone here, on links without latencies: what stages send on average, one of them sends at least. Splits that the rules refuse are
among the others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from samestep.hardware import without_fixed_costs
from samestep.layout import Layout, Recompute
from samestep.program.exchange_times import SUMMED
from samestep.program.ops import BYTES_OF, OpKind
from samestep.program.step import StepSpec
from samestep.wings.plan.bounds.body_seconds import InFlight, adds_up_all, in_flight, least_reduced_bytes, smallest
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.layer_kinds import Sizes
from samestep.wings.plan.bounds.least_memory import Needs, StageHeld
from samestep.wings.plan.candidate_groups import Split, split_of
from samestep.wings.plan.simulation.collectives import collective_s, group_of

_Held = tuple[list[tuple[float, float]], float]
_FirstStage = tuple[Callable[[Recompute], float], _Held, list[tuple[float, int]]]
_MANY = 2**50
"""Bytes by which the rate of a link is found."""


class _Way(NamedTuple):
    """A split of the data axis, with the seconds that a byte takes over its axes."""

    split: Layout
    element_bytes: int
    """Least bytes of a gradient's element."""
    shared_s: float
    """A gather, or a reduction, over the ranks that share a weight."""
    experts_s: float
    """Over those that share an expert-sharded one."""
    replicas_s: float


class _Sent(NamedTuple):
    """Elements and bytes of the weights of all layers, of which experts are the other part."""

    trained: float
    """Elements."""
    master: float
    """Bytes of masters that zero=1 gathers."""
    gathered: float
    """Bytes that zero=2 and 3 gather with their layers."""
    again: float
    """Those that zero=3 gathers again for the backward, where gradients are sent at all."""
    scattered: float
    """Elements of their gradients."""


class _Streams(NamedTuple):
    """Least seconds of communication over the data axes: of weights that every rank has once a step and in each micro-batch, of
    expert-sharded ones likewise, and of what replicas add up."""

    own_s: float
    own_each_s: float
    experts_s: float
    experts_each_s: float
    replicas_s: float


class DataSplits:
    """Lower bounds of what layouts of one model, job and machine send over the data axes, by what their memory has room for."""

    def __init__(self, prices: Prices, needs: Needs, splits: Callable[[Layout], Iterable[Layout]]) -> None:
        self.prices, self.needs, self._splits = prices, needs, splits
        self._ideal = without_fixed_costs(prices.hardware)
        self._known_ways: dict[tuple[object, ...], list[_Way]] = {}
        self._known_sent: dict[tuple[object, ...], tuple[_Sent, _Sent]] = {}
        self._known_streams: dict[tuple[object, ...], list[_Streams]] = {}
        self._known_seconds: dict[tuple[object, ...], list[tuple[float, int]]] = {}
        self._known_held: dict[tuple[object, ...], _Held] = {}

    def first_with_room(
        self,
        steps: Sequence[StepSpec],
        schedules: Sequence[tuple[str, int]],
        recomputations: Sequence[Recompute],
        room_bytes: float,
    ) -> tuple[Recompute, float] | None:
        """Return the first recomputation with which the first stage may have room in some split of the data axis, with the least seconds of
        communication of such splits under the first step and schedule that have any; None if there is none.

        Args:
            steps: steps with an unsplit data axis, which differ in chunks alone.
            schedules: the schedules of each of them, with their virtual stages.
            recomputations: what each of them may compute again.
            room_bytes: what a rank may hold.
        """
        firsts = self._firsts(steps, schedules)
        for recompute, (kept_of, (sizes, least_others), seconds) in itertools.product(recomputations, firsts):
            activations = kept_of(recompute)
            if least_others + activations > room_bytes:
                continue
            for took_s, number in seconds:
                states, others = sizes[number]
                if states <= room_bytes and others + activations <= room_bytes:
                    return recompute, took_s
        return None

    def least_s(self, step: StepSpec, schedules: Sequence[tuple[str, int]], room_bytes: float) -> float:
        """Return the least seconds of communication of the splits in which the states of the first stage alone leave room; infinite if
        there are none. Arguments as in `first_with_room`."""
        every = [self._held(step, *schedule)[0] for schedule in schedules]
        return next(
            (
                took_s
                for took_s, number in self._seconds(step)
                if any(max(sizes[number]) <= room_bytes for sizes in every)
            ),
            float("inf"),
        )

    def each_s(self, step: StepSpec) -> dict[Split, float]:
        """Return the least seconds of communication of a step in each split of the data axis."""
        ways = self._ways(step)
        return {split_of(ways[number].split): took_s for took_s, number in self._seconds(step)}

    def least_bytes(
        self, steps: Sequence[StepSpec], schedules: Sequence[tuple[str, int]], recomputations: Sequence[Recompute]
    ) -> float:
        """Return the least bytes of the first stage in any split of the data axis; arguments as in `first_with_room`."""
        return min(
            max(states, others + kept_of(recompute))
            for kept_of, (sizes, _), _ in self._firsts(steps, schedules)
            for recompute in recomputations
            for states, others in sizes
        )

    def _firsts(self, steps: Sequence[StepSpec], schedules: Sequence[tuple[str, int]]) -> list[_FirstStage]:
        """Return first stages, which keep activations of most samples: the least bytes of these for what is computed again, those of the
        rest, and the seconds of communication."""
        firsts: list[_FirstStage] = []
        for step in steps:
            samples, took = smallest(step).microbatch_samples, self._seconds(step)
            for schedule, chunks in schedules:
                flight = in_flight(schedule, 0, step.layout.pp, step.num_microbatches, chunks)
                kept_of = functools.partial(self._kept, step, chunks, flight, samples)
                firsts.append((kept_of, self._held(step, schedule, chunks), took))
        return firsts

    def _kept(self, step: StepSpec, chunks: int, flight: InFlight, samples: int, recompute: Recompute) -> float:
        """Return the least bytes of activations of a first stage at its fullest."""
        return samples * self.needs.first_kept(step, chunks, flight, recompute)

    def _held(self, step: StepSpec, schedule: str, virtual_stages: int) -> _Held:
        """Return the least bytes of what the first stage holds in each split: all states, and the part of them that is there with all
        activations, with gathered weights. Then the least of these parts."""
        layout = step.layout
        adds_up = adds_up_all(schedule, 0, layout.pp, step.num_microbatches, virtual_stages)
        key = layout.cuts[:-2], layout.pp, virtual_stages, layout.dp, layout.offload, adds_up
        if key not in self._known_held:
            sizes: list[tuple[float, float]] = []
            stage = StageHeld(self.needs.first_weights(step, virtual_stages), 0.0, adds_up)
            for way in self._ways(step):
                need, *more = self.needs.split_needs(step, stage, way.split)
                states = max(need.states, *(other.total for other in more)) if more else need.states
                sizes.append((states, need.states - need.gradients + need.gathered))
            self._known_held[key] = sizes, min(others for _, others in sizes)
        return self._known_held[key]

    def _ways(self, step: StepSpec) -> list[_Way]:
        layout = step.layout
        key = layout.tp, layout.cp, layout.ep, layout.pp, layout.dp
        if key not in self._known_ways:
            ways: list[_Way] = []
            known: dict[tuple[object, ...], tuple[float, float, float]] = {}
            is_plain, element_bytes = step.sharing is SUMMED, BYTES_OF[step.master_dtype]
            for split in self._splits(layout):
                alike = split.dp_replicate, split.dp_shard, split.zero > 0, split.reduce
                if alike not in known:
                    known[alike] = self._rates(step.but(layout=split), split)
                sent = element_bytes if is_plain else least_reduced_bytes(step.but(layout=split))
                ways.append(_Way(split, sent, *known[alike]))
            self._known_ways[key] = ways
        return self._known_ways[key]

    def _rates(self, step: StepSpec, split: Layout) -> tuple[float, float, float]:
        """Return the seconds of a byte over the ranks that share a weight, over those that share an expert-sharded one, and over replicas."""

        def rate(kind: OpKind, axis: str) -> float:
            ranks = step.ranks.axes[axis].size if axis in step.ranks.axes else 1
            if ranks == 1:
                return 0.0
            return collective_s(kind, _MANY, group_of(axis, ranks, step, self._ideal), self._ideal) / _MANY

        if split.zero:
            gathers_s, of_experts_s = rate(OpKind.ALL_GATHER, "dp_shard"), rate(OpKind.ALL_GATHER, "dp_expert")
            return gathers_s, of_experts_s, rate(OpKind.ALL_REDUCE, "dp_replicate")
        shared_s = rate(OpKind.ALL_REDUCE, "dp_replicate")
        if split.reduce == "hierarchical":
            inside = step.ranks.axes["dp_intra"].size if "dp_intra" in step.ranks.axes else 1
            shared_s = max(2 * rate(OpKind.ALL_GATHER, "dp_intra"), rate(OpKind.ALL_REDUCE, "dp_inter") / inside)
        experts_s = rate(OpKind.ALL_REDUCE, "dp_expert") if split.borrows_data_ranks else 0.0
        return shared_s, experts_s, 0.0

    def _seconds(self, step: StepSpec) -> list[tuple[float, int]]:
        """Return the least seconds of communication of each split, the quickest first, with their numbers."""
        layout, m = step.layout, step.num_microbatches
        key = layout.cuts[:-2], layout.pp, layout.dp, m
        if key not in self._known_seconds:
            if key[:-1] not in self._known_streams:
                sent = self._sent(step)
                self._known_streams[key[:-1]] = [self._streams(way, *sent, step) for way in self._ways(step)]
            took_s = [
                max(own_s + m * own_each_s, experts_s + m * experts_each_s, replicas_s) / layout.pp
                for own_s, own_each_s, experts_s, experts_each_s, replicas_s in self._known_streams[key[:-1]]
            ]
            self._known_seconds[key] = sorted(zip(took_s, itertools.count(), strict=False))
        return self._known_seconds[key]

    def _streams(self, way: _Way, shared: _Sent, experts: _Sent, step: StepSpec) -> _Streams:
        """Return the least seconds of communication of all stages."""
        split, size, overlaps = way.split, way.element_bytes, self.prices.hardware.overlap
        parts = ((shared, way.shared_s), (experts, way.experts_s))
        if not split.zero:
            first_s, second_s = (part.trained * size * rate_s for part, rate_s in parts)
            return _Streams(first_s, 0.0, second_s, 0.0, 0.0)
        holders = max(1, split.num_shards // split.ep)
        replicas_s = (shared.trained / split.num_shards + experts.trained / holders) * size * way.replicas_s
        once_s, each_s = [0.0, 0.0], [0.0, 0.0]
        if split.zero >= 2:
            parts = ((shared, way.shared_s), (experts, way.experts_s * self.prices.expert_padding(step, holders)))
        for number, (part, rate_s) in enumerate(parts):
            gathers_s, scatters_s = rate_s * part.gathered, rate_s * part.scattered * size
            if split.zero == 1:
                gathers_s, scatters_s = rate_s * part.master, rate_s * part.trained * size
                together_s = gathers_s + scatters_s if overlaps and not step.sharing.trains_apart else 0.0
                once_s[number] = max(together_s, gathers_s, scatters_s)
                continue
            if split.zero == 3:
                each_s[number] = gathers_s + rate_s * part.again * bool(size)
            else:
                once_s[number] = gathers_s
            (each_s if split.accumulate == "sharded" else once_s)[number] += scatters_s
        return _Streams(once_s[0], each_s[0], once_s[1], each_s[1], replicas_s)

    def _sent(self, step: StepSpec) -> tuple[_Sent, _Sent]:
        """Return what is sent of the weights that every rank has, and of expert-sharded ones."""
        key = step.layout.cuts[:-2]
        if key not in self._known_sent:
            first = Sizes._fields.index("weights")
            sums = [[0.0] * 5, [0.0] * 5]
            master, compute = BYTES_OF[step.master_dtype], BYTES_OF[step.compute_dtype]
            for kind, number in self.prices.numbers:
                layer = self.prices.few.layers[kind]
                row = Sizes._make((*(0.0,) * first, *self.prices.cut(step).weights[kind]))
                reads = layer.is_block and layer.backward_reads_weights and kind != self.prices.kind_of[-1]
                parts = (
                    (row.trained - row.expert_trained, row.apart - row.expert_apart, row.in_units, row.units_trained),
                    (row.expert_trained, row.expert_apart, row.expert_in_units, row.expert_units_trained),
                )
                for total, (trained, apart, gathered, scattered) in zip(sums, parts, strict=True):
                    masters = (trained - apart) * master + apart * compute
                    again = gathered if reads and scattered else 0.0
                    for place, size in enumerate((trained, masters, gathered, again, scattered)):
                        total[place] += number * size
            self._known_sent[key] = _Sent._make(sums[0]), _Sent._make(sums[1])
        return self._known_sent[key]
