"""Lower bounds of the seconds of the bodies of a run of layers, in which weights may be gathered and gradients scattered.

Under zero=2 and 3 each layer's weights are gathered while the layer before it computes, and under zero=3 for the backward too; gradients
are scattered behind a layer's backward, in the same stream. So a body lasts as long as its compute, or as what its stream sends,
or as the chain of both where one waits for the other:

    backward    ... B 2 | RS 2, AG 1' | B 1 | RS 1, AG 0' | B 0        AG': weights of experts that no earlier unit prefetches
    turn        ... B 0 | RS 0, AG 0 | F 0 ...                         a forward follows a backward at once
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from samestep.planning.bounds.layer_costs import Prices
from samestep.planning.bounds.layer_kinds import Seconds
from samestep.planning.bounds.pipeline_order import forwards_after_backwards
from samestep.program.ops import BYTES_OF, SHARD_AXES, OpKind
from samestep.program.step import StepSpec
from samestep.simulation.collectives import collective_s, group_of


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
        for run, kinds, cost in zip(runs.counts, runs.kinds, self.prices.run_seconds(step), strict=True):
            if kinds not in known:
                known[kinds] = self._gathering(step, run, kinds, cost) if gathers else self._plain(step, cost)
        return tuple(known[kinds] for kinds in runs.kinds)

    def _plain(self, step: StepSpec, cost: Seconds) -> BodySeconds:
        forward_s, backward_s, weight_s = cost.forward_s, cost.backward_s, cost.weight_s
        return BodySeconds(forward_s, forward_s, backward_s, weight_s, weight_s if step.splits_backward else backward_s)

    def _gathering(
        self, step: StepSpec, run: tuple[tuple[int, int], ...], order: Sequence[int], cost: Seconds
    ) -> BodySeconds:
        """Bound bodies that gather and scatter one layer at a time, one layer ahead, in the stream of the data axis and in that
        of expert-sharded weights.

        A forward lasts as long as the gathers of all blocks but the first two, and the compute of a block before and after them.
        A backward lasts as long as the scatters of all blocks but the last two and the gathers of all but the first two, which
        alternate in one stream; each overlaps only with compute that was issued later. What of a block's experts is not prefetched is
        gathered behind the scatters of the block before it, when nothing is left to compute.
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
            mine = [kinds[part.kind] for part in parts]
            forward_s = max(forward_s, gathered_s + 2 * min(kinds[kind].forward_s for kind, _ in blocks))
            if step.zero == 3 and all(part.scatter_s and part.reads for part in parts):
                turns_s = gathered_s + sum(part.number * part.scatter_s for part in parts) - 2 * scatter_s
                around_s = min(one.backward_s - one.behind_s for one in mine) + min(one.backward_s for one in mine)
                slowed_s = cost.backward_s + self.slowed_s(turns_s, cost.sent_backward_s)
                last_s = max(last_s, turns_s + around_s + others_s, slowed_s)
                # Where no scatter holds them up, gathers may have run beside the forward, and slowed nothing that was issued behind them.
                backward_s = max(backward_s, gathered_s + min(one.backward_s for one in mine))
        if step.zero == 3:
            last_s = max(last_s, cost.backward_s + self._awaited_s(step, order))
        plain_s = forward_s if step.zero == 3 else cost.forward_s
        if step.layout.accumulate == "sharded":
            backward_s = last_s
        return BodySeconds(forward_s, plain_s, backward_s, cost.weight_s, last_s)

    def _awaited_s(self, step: StepSpec, order: Sequence[int]) -> float:
        """Return the seconds in which a backward that scatters its gradients has nothing to compute between two blocks.

        Args:
            step: the step.
            order: kind of each layer, in the order of the forward.
        """
        units, ranks = self.prices.units(step), step.ranks.size("dp_expert")
        if not any(units[kind].expert_awaited for kind in order):
            return 0.0
        took_s: dict[tuple[int, int], float] = {}
        for kind, later in set(itertools.pairwise(order)):
            awaited, is_read = units[kind].expert_awaited, self.prices.few.layers[kind].backward_reads_weights
            if not awaited or not units[later].expert_awaited or not is_read:
                continue
            sent = units[later].expert_scattered * least_reduced_bytes(step)
            scatter_s = self.sent_s(OpKind.REDUCE_SCATTER, sent, "dp_expert", ranks, step)
            gather_s = self.sent_s(OpKind.ALL_GATHER, awaited, "dp_expert", ranks, step)
            behind_s = self.prices.seconds(step)[later].behind_s
            took_s[kind, later] = max(0.0, scatter_s + gather_s - behind_s)
        return sum(took_s.get(pair, 0.0) for pair in itertools.pairwise(order))

    def turns_s(self, step: StepSpec, runs: Sequence[int]) -> float:
        """Return the seconds that a stage waits in all between a backward and the forward that follows it at once.

        The first layer's weights are gathered behind its gradients' scatter, which follows the backward.
        """
        if step.zero < 3 or step.layout.accumulate == "full" or not self.hardware.overlap:
            return 0.0
        layout, seconds = step.layout, self.prices.seconds(step)
        kinds = {self.prices.runs(step).kinds[run][0] for run in runs}
        behind_s = max(seconds[kind].behind_s for kind in kinds)
        wait_s = 0.0
        for axis in SHARD_AXES:
            parts = [self.part(step, kind, 1, axis) for kind in kinds]
            both_s = min(part.gather_s for part in parts) + min(part.scatter_s for part in parts)
            wait_s = max(wait_s, both_s - behind_s)
        stage = runs[0]
        return (
            wait_s
            * forwards_after_backwards(layout.schedule, stage, layout.pp, step.num_microbatches, layout.virtual_stages)
            if wait_s
            else 0.0
        )

    def part(self, step: StepSpec, kind: int, number: int, axis: str) -> UnitTraffic:
        """Return the communication of layers of one kind over one of the axes along which units are sharded."""
        layout = step.layout
        key = layout.cuts, layout.dp_replicate, layout.dp_shard, layout.zero, layout.pp, kind, axis
        if key not in self._known_traffic:
            self._known_traffic[key] = self._part(step, kind, axis)
        found = self._known_traffic[key]
        return found if number == 1 else found._replace(number=number)

    def _part(self, step: StepSpec, kind: int, axis: str) -> UnitTraffic:
        one = self.prices.units(step)[kind]
        gathered, scattered = (
            (one.expert_gathered, one.expert_scattered) if axis == "dp_expert" else (one.gathered, one.scattered)
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
