"""The ways to split the data axis as the first stage of a pipeline sees them: what room each leaves for activations, and how long it sends.

A split that shards weights has room where others have none, and gathers them for every micro-batch. So the quickest step of some degrees
is no quicker than the quickest split that has room with what is in flight:

    T >= min over splits of (a + m b) / p    a seconds are sent once a step by all p stages, b for each of m micro-batches

Bytes count alone here, on links without latencies: what stages send on average, one of them sends at least. Splits that the rules refuse are
among the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from samestep.layout import Layout, Recompute
from samestep.planning.bounds.body_seconds import least_reduced_bytes
from samestep.planning.bounds.layer_costs import Prices, without_fixed_costs
from samestep.planning.bounds.layer_kinds import Sizes
from samestep.planning.bounds.least_memory import FirstStage, Needs
from samestep.program.ops import BYTES_OF, OpKind
from samestep.program.step import StepSpec
from samestep.simulation.collectives import collective_s, group_of

_MANY = 2**50
"""Bytes by which the rate of a link is found."""


class Quickest(NamedTuple):
    """The quickest recomputation with which the first stage may have room."""

    recompute: Recompute
    least_bytes: float
    """Least bytes of the first stage; of any recomputation where none leaves room."""
    sent_s: float
    """Least seconds of communication over the data axes, of splits that have room; infinite where none has."""


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

    def of_one_in(self, stages: int) -> _Streams:
        """Return what one of so many stages sends on average."""
        return _Streams._make(one / stages for one in self)


class DataSplits:
    """Lower bounds of what layouts of one model, job and machine send over the data axes, by what their memory has room for."""

    def __init__(self, prices: Prices, needs: Needs, splits: Callable[[Layout], Iterable[Layout]]) -> None:
        self.prices, self.needs, self._splits = prices, needs, splits
        self._ideal = without_fixed_costs(prices.hardware)
        self._known_ways: dict[tuple[object, ...], list[_Way]] = {}
        self._known_sent: dict[tuple[object, ...], tuple[_Sent, _Sent]] = {}
        self._known_streams: dict[tuple[object, ...], list[_Streams]] = {}
        self._known_seconds: dict[tuple[object, ...], list[tuple[float, int]]] = {}
        self._known_held: dict[tuple[object, ...], list[tuple[float, float]]] = {}

    def quickest(
        self,
        steps: Sequence[StepSpec],
        schedules: Sequence[tuple[str, int]],
        recomputations: Sequence[Recompute],
        room_bytes: float,
        enough_s: float = 0.0,
    ) -> Quickest:
        """Return the quickest recomputation with which the first stage may have room in some split of the data axis.

        Args:
            steps: steps with an unsplit data axis, which differ in chunks alone.
            schedules: the schedules of each of them, with their virtual stages.
            recomputations: what each of them may compute again, the quickest first.
            room_bytes: what a rank may hold.
            enough_s: seconds of communication below which it does not matter how few they are.
        """
        firsts: list[tuple[StepSpec, FirstStage, list[tuple[float, float]]]] = []
        all_of_them = itertools.product(steps, schedules)
        least_bytes = sent_s = float("inf")
        for recompute in recomputations:
            for number in itertools.count():
                if number == len(firsts):
                    if (more := next(all_of_them, None)) is None:
                        break
                    step, schedule = more
                    first = self.needs.first_stage(step, *schedule)
                    firsts.append((step, first, self._held(step, schedule[1], first.weights)))
                found = self._least(*firsts[number], recompute, room_bytes)
                least_bytes, sent_s = min(least_bytes, found.least_bytes), min(sent_s, found.sent_s)
                if sent_s <= enough_s:
                    break
            if sent_s < float("inf"):
                return Quickest(recompute, least_bytes, sent_s)
        return Quickest(recomputations[-1], least_bytes, float("inf"))

    def _least(
        self,
        step: StepSpec,
        first: FirstStage,
        held: list[tuple[float, float]],
        recompute: Recompute,
        room_bytes: float,
    ) -> Quickest:
        """Return the same of one first stage and one recomputation.

        Args:
            step: the step.
            first: what the stage keeps of its activations.
            held: what it holds in each split.
            recompute: what it computes again.
            room_bytes: what a rank may hold.
        """
        kept = first.kept(self.prices.sizes(step, recompute))
        for sent_s, number in self._seconds(step):
            states, others = held[number]
            if (least_bytes := max(states, others + kept)) <= room_bytes:
                return Quickest(recompute, least_bytes, sent_s)
        return Quickest(recompute, min(max(states, others + kept) for states, others in held), float("inf"))

    def _held(self, step: StepSpec, virtual_stages: int, weights: Sizes) -> list[tuple[float, float]]:
        """Return for each split the bytes of states that a stage with these weights holds at least, and of those, with gathered weights,
        beside all activations."""
        layout = step.layout
        key = layout.cuts[:-2], layout.pp, virtual_stages, layout.dp, layout.offload
        if key not in self._known_held:
            held: list[tuple[float, float]] = []
            for way in self._ways(step):
                need, *more = self.needs.split_needs(step, weights, 0.0, way.split)
                others = need.states - need.gradients + need.gathered
                held.append((max(need.states, *(one.total for one in more)) if more else need.states, others))
            self._known_held[key] = held
        return self._known_held[key]

    def _ways(self, step: StepSpec) -> list[_Way]:
        layout = step.layout
        key = layout.tp, layout.cp, layout.ep, layout.pp, layout.dp
        if key not in self._known_ways:
            every = self._splits(layout)
            self._known_ways[key] = [self._way(step.but(layout=split), split) for split in every]
        return self._known_ways[key]

    def _way(self, step: StepSpec, split: Layout) -> _Way:
        sent = least_reduced_bytes(step)

        def rate(kind: OpKind, axis: str) -> float:
            ranks = step.ranks.axes[axis].size if axis in step.ranks.axes else 1
            if ranks == 1:
                return 0.0
            return collective_s(kind, _MANY, group_of(axis, ranks, step, self._ideal), self._ideal) / _MANY

        if split.zero:
            of_replicas_s = rate(OpKind.ALL_REDUCE, "dp_replicate")
            return _Way(
                split, sent, rate(OpKind.ALL_GATHER, "dp_shard"), rate(OpKind.ALL_GATHER, "dp_expert"), of_replicas_s
            )
        shared_s = rate(OpKind.ALL_REDUCE, "dp_replicate")
        if split.reduce == "hierarchical":
            inside = step.ranks.axes["dp_intra"].size if "dp_intra" in step.ranks.axes else 1
            shared_s = max(2 * rate(OpKind.ALL_GATHER, "dp_intra"), rate(OpKind.ALL_REDUCE, "dp_inter") / inside)
        experts_s = rate(OpKind.ALL_REDUCE, "dp_expert") if split.borrows_data_ranks else 0.0
        return _Way(split, sent, shared_s, experts_s, 0.0)

    def _seconds(self, step: StepSpec) -> list[tuple[float, int]]:
        """Return the least seconds of communication of each split, the quickest first, with their numbers."""
        layout, m = step.layout, step.num_microbatches
        key = layout.cuts[:-2], layout.pp, layout.dp, m
        if key not in self._known_seconds:
            if key[:-1] not in self._known_streams:
                sent, pp = self._sent(step), layout.pp
                self._known_streams[key[:-1]] = [
                    self._streams(way, *sent, step).of_one_in(pp) for way in self._ways(step)
                ]
            took_s = [
                max(own_s + m * own_each_s, experts_s + m * experts_each_s, replicas_s)
                for own_s, own_each_s, experts_s, experts_each_s, replicas_s in self._known_streams[key[:-1]]
            ]
            self._known_seconds[key] = sorted(zip(took_s, itertools.count(), strict=False))
        return self._known_seconds[key]

    def _streams(self, way: _Way, own: _Sent, experts: _Sent, step: StepSpec) -> _Streams:
        """Return the least seconds of communication of all stages."""
        split, size, overlaps = way.split, way.element_bytes, self.prices.hardware.overlap
        parts = ((own, way.shared_s), (experts, way.experts_s))
        if not split.zero:
            first_s, second_s = (part.trained * size * rate_s for part, rate_s in parts)
            return _Streams(first_s, 0.0, second_s, 0.0, 0.0)
        holders = max(1, split.num_shards // split.ep)
        replicas_s = (own.trained / split.num_shards + experts.trained / holders) * size * way.replicas_s
        once_s, each_s = [0.0, 0.0], [0.0, 0.0]
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
                one = Sizes._make((*(0.0,) * first, *self.prices.cut(step).weights[kind]))
                reads = layer.is_block and layer.backward_reads_weights and kind != self.prices.kind_of[-1]
                parts = (
                    (one.trained - one.expert_trained, one.apart - one.expert_apart, one.in_units, one.units_trained),
                    (one.expert_trained, one.expert_apart, one.expert_in_units, one.expert_units_trained),
                )
                for total, (trained, apart, gathered, scattered) in zip(sums, parts, strict=True):
                    masters = (trained - apart) * master + apart * compute
                    again = gathered if reads and scattered else 0.0
                    for place, size in enumerate((trained, masters, gathered, again, scattered)):
                        total[place] += number * size
            self._known_sent[key] = _Sent._make(sums[0]), _Sent._make(sums[1])
        return self._known_sent[key]
