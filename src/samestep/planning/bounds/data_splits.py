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


class DataSplits:
    """Lower bounds of what layouts of one model, job and machine send over the data axes, by what their memory has room for."""

    def __init__(self, prices: Prices, needs: Needs, splits: Callable[[Layout], Iterable[Layout]]) -> None:
        self.prices, self.needs, self._splits = prices, needs, splits
        self._ideal = without_fixed_costs(prices.hardware)
        self._known_ways: dict[tuple[object, ...], list[_Way]] = {}
        self._known_sent: dict[tuple[object, ...], tuple[_Sent, _Sent]] = {}
        self._known_seconds: dict[tuple[object, ...], list[tuple[float, int]]] = {}
        self._known_held: dict[tuple[object, ...], list[tuple[float, float]]] = {}

    def quickest(
        self, steps: Sequence[StepSpec], recomputations: Sequence[Recompute], room_bytes: float, enough_s: float
    ) -> Quickest:
        """Return the quickest recomputation with which the first stage of some step may have room in some split of the data axis.

        Args:
            steps: steps with an unsplit data axis.
            recomputations: what each of them may compute again, the quickest first.
            room_bytes: what a rank may hold.
            enough_s: seconds of communication below which it does not matter how few they are.
        """
        firsts: list[FirstStage] = []
        least_bytes = float("inf")
        for recompute in recomputations:
            sent_s = float("inf")
            for number, step in enumerate(steps):
                if number == len(firsts):
                    firsts.append(self.needs.first_stage(step))
                found = self._least(firsts[number], recompute, room_bytes)
                least_bytes, sent_s = min(least_bytes, found.least_bytes), min(sent_s, found.sent_s)
                if sent_s <= enough_s:
                    break
            if sent_s < float("inf"):
                return Quickest(recompute, least_bytes, sent_s)
        return Quickest(recomputations[-1], least_bytes, float("inf"))

    def _least(self, first: FirstStage, recompute: Recompute, room_bytes: float) -> Quickest:
        """Return the same of one stage and one recomputation."""
        kept = first.kept(self.prices.sizes(first.step, recompute))
        held = self._held(first.step, first.weights)
        for sent_s, number in self._seconds(first.step):
            states, others = held[number]
            if (least_bytes := max(states, others + kept)) <= room_bytes:
                return Quickest(recompute, least_bytes, sent_s)
        return Quickest(recompute, min(max(states, others + kept) for states, others in held), float("inf"))

    def _held(self, step: StepSpec, weights: Sizes) -> list[tuple[float, float]]:
        """Return for each split the bytes of states that a stage with these weights holds at least, and of those, with gathered weights,
        beside all activations."""
        layout = step.layout
        key = layout.cuts[:-2], layout.pp, layout.virtual_stages, layout.dp, layout.offload
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
            sent, pp = self._sent(step), layout.pp
            took_s = [self._sent_s(way, *sent, m, step) / pp for way in self._ways(step)]
            self._known_seconds[key] = sorted(zip(took_s, itertools.count()))
        return self._known_seconds[key]

    def _sent_s(self, way: _Way, mine: _Sent, experts: _Sent, m: int, step: StepSpec) -> float:
        """Return the least seconds of communication of all stages."""
        split, size = way.split, way.element_bytes
        both = ((mine, way.shared_s), (experts, way.experts_s))
        if not split.zero:
            return max(part.trained * size * rate_s for part, rate_s in both)
        holders = max(1, split.num_shards // split.ep)
        replicas_s = (mine.trained / split.num_shards + experts.trained / holders) * size * way.replicas_s
        if split.zero == 1:
            gathers_s, reductions_s = zip(
                *((part.master * rate_s, part.trained * size * rate_s) for part, rate_s in both), strict=True
            )
            if step.sharing.trains_apart:
                return max(gathers_s) + max(*reductions_s, replicas_s)
            if not self.prices.hardware.overlap:
                return max(*gathers_s, *reductions_s, replicas_s)
            return max(*map(sum, zip(gathers_s, reductions_s, strict=True)), replicas_s)
        scatters = m if split.accumulate == "sharded" else 1
        streams_s = (
            rate_s * (self._gathered(part, split, m, size) + part.scattered * size * scatters) for part, rate_s in both
        )
        return max(*streams_s, replicas_s)

    @staticmethod
    def _gathered(part: _Sent, split: Layout, m: int, element_bytes: int) -> float:
        return m * (part.gathered + part.again * bool(element_bytes)) if split.zero == 3 else part.gathered

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
