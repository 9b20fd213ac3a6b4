"""What no layout of given words can do without of time: seconds of a step, without building its program.

Search by such bounds is branch and bound (Land and Doig 1960): what is slower at best than what was found, or too large
at best (`planning/bounds/least_memory.py`), is never played. So a bound must never be above what the clock says, and the closer it is, the less
is played. Layers of one kind cost the same, so one of each kind is priced (`planning/bounds/layer_costs.py`).

Stage i of p has m micro-batches of f_i + b_i seconds, and starts and ends the later the more is before it:

    T >= m c / p, c = c_1 + ... + c_p, c_i = f_i + b_i    of all layouts with these degrees and this micro-batch
    T >= m c_i + c_1 + ... + c_(i-1)                      with several runs a stage, their first ones
    T >= the schedule, played with f, b and sends         where these do not throw the layout out
    T >= the same, with the last b of the first run slowed  by the reductions of its own gradients (`planning/bounds/step_time.py`)

Where micro-batches differ by a sample the larger ones, which come first, have an f and a b of their own.

What a stage sends over a data axis is a stream of its own: it takes as long as all of it, and longer than compute by what
comes before the first forward and behind the last backward. Gradients of a stage's last run are whole first, and their
reductions come first. Step scalars and update come on top.

Gradients that are reduced beside the last backward of a run of layers: how much longer that takes, at least.

The gradients of a layer are reduced from the end of its backward on, on a stream of their own, and what runs there slows
compute by the contention c (`simulation/clock.py`). Layers 1 to n, in the order of their backward, take T_k seconds of compute and E_k
of what compute's own queue sends; their gradients R_k seconds of the stream. Let j be the layer whose gradients the stream
began with when it last had nothing to do. What came before it ran beside compute or beside E, and all compute behind it
is slowed, so that whatever j is the run takes longer by no less than the least over j of

    (1 - 1/c) (R_1 + ... + R_(j-1) - E_1 - ... - E_j)   +   (c - 1) (T_(j+1) + ... + T_n)

Where compute waits within the run, each second beside the stream is one more second of the run, which is more than what it
takes from this. In a bucket that is not full yet some gradients wait for those of later layers: j is then the layer that
fills it, and from the R before it the seconds of one bucket are left out.

What a stage sends over the data axes, in seconds: of a kind of layer, of the gradients of a run of layers, and of all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from samestep.planning.bounds.layer_costs import Prices, larger_twin, least_updated, smallest
from samestep.planning.bounds.layer_kinds import Seconds, Sizes, total
from samestep.planning.bounds.pipeline_time import Bodies, Times, behind_last_backward, play_bodies
from samestep.program.buckets import bucket_bytes
from samestep.program.ops import BYTES_OF, SHARD_AXES, OpKind
from samestep.program.step import StepSpec
from samestep.schedules import DEFAULT
from samestep.simulation.collectives import collective_s, group_of
from samestep.simulation.cost import UPDATE_PASSES


class Reduced(NamedTuple):
    """The seconds that the last backward of a layer takes: of computing, of sending, and of reducing its gradients."""

    compute_s: float
    sent_s: float
    """Seconds of sending in compute's own queue."""
    reduced_s: float
    """Least seconds that its gradients take of a stream once they are all there."""


def longer_s(layers: Sequence[Reduced], waiting_s: float, contention: float) -> float:
    """Return how much longer the last backward takes beside the reductions of its own layers.

    Args:
        layers: in the order of their backward.
        waiting_s: of the stream, what may wait in a bucket.
        contention: factor by which a collective slows compute beside it.
    """
    slow, slower = 1 - 1 / contention, contention - 1
    behind_s = sum(layer.compute_s for layer in layers)
    sent_s, before_s = 0.0, -waiting_s
    least_s = float("inf")
    for layer in layers:
        behind_s -= layer.compute_s
        sent_s += layer.sent_s
        least_s = min(least_s, slow * max(0.0, before_s - sent_s) + slower * behind_s)
        before_s += layer.reduced_s
    return max(0.0, least_s)


class Reductions(NamedTuple):
    """The reductions of the gradients of a run of layers: when they can start, and how long they take."""

    behind_s: float
    """Seconds from the start of the run's last backward until its first gradients are whole."""
    streams_s: tuple[float, ...]
    """Seconds that they take of each stream."""


class Sending(NamedTuple):
    """Seconds that a stage sends over data axes."""

    first_s: float = 0.0
    """Before its first forward."""
    reduced_s: float = 0.0
    """From when the first gradients are whole."""
    behind_s: float = 0.0
    """Behind its last backward."""
    all_s: float = 0.0
    """In all, over one axis, or with all that it computes."""
    update_s: float = 0.0
    """The update, and what is gathered behind it."""
    left_s: float = 0.0
    """What is computed from when the first gradients are whole."""
    exposed_s: float = 0.0
    """The part of it that is sent in the queue of compute."""
    of_runs: tuple[Reductions, ...] = ()
    beside_s: float = 0.0
    """The part of `reduced_s` that is issued between the last backwards: the clock lets it slow those behind it."""


class LayerTraffic(NamedTuple):
    """The communication of layers of a kind over an axis along which they are cut: seconds of one layer."""

    kind: int
    number: int
    gather_s: float
    scatter_s: float
    reads: bool
    """Their backward reads the weights, so that they are gathered for it."""


class Bounds:
    """Bounds of the layouts of one model, job and machine, each given as its `Step`; what they share is worked out once."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.hardware = prices, prices.hardware
        self._known_times: dict[tuple[object, ...], Times] = {}

    def _sent_s(self, kind: OpKind, size_bytes: float, axis: str, ranks: int, step: StepSpec) -> float:
        if ranks == 1 or size_bytes <= 0:
            return 0.0
        group = group_of(axis, ranks, step, self.hardware)
        return collective_s(kind, int(size_bytes), group, self.hardware)

    def least_s(self, step: StepSpec) -> float:
        """Bound the step of all layouts of these degrees and this micro-batch: as if nothing were computed again and no
        backward were split, which takes no less."""
        step = smallest(step)
        if step.layout.recompute != "none" or step.splits_backward:
            step = replace(step, layout=replace(step.layout, recompute="none", schedule=DEFAULT))
        pp, whole, (larger, rest) = step.layout.pp, self.prices.whole_seconds(step), larger_twin(step)
        more = self.prices.whole_seconds(larger) if rest else whole
        busy_s = rest * (more.forward_s + more.backward_s)
        busy_s += (step.num_microbatches - rest) * (whole.forward_s + whole.backward_s)
        trained = self.prices.whole_sizes(step).trained
        return busy_s / pp + self._update_s(step, trained / (step.layout.dp * step.layout.cp) / pp, 0.0)

    def group_s(self, step: StepSpec) -> float:
        """Bound the step of all layouts that differ in how the data axis is split, and in ZeRO stage, alone."""
        step = smallest(step)
        stages = self.prices.runs(step).unlike
        updated = max(least_updated(step, self.prices.stage_sizes(step, stage)) for stage in stages)
        return max(self.closed_times(step).ends_s) + self._scalars_s(step) + self._update_s(step, updated, 0.0)

    def _scalars_s(self, step: StepSpec) -> float:
        return self._sent_s(
            OpKind.ALL_REDUCE, BYTES_OF["float64"] * step.num_scalars, "world", step.layout.world_size, step
        )

    def _bodies(self, step: StepSpec) -> tuple[Bodies, ...]:
        """Return the bodies of each run; under zero=2 and 3 they wait for gathers."""
        costs = self.prices.run_seconds(step)
        runs, gathers = self.prices.runs(step), self._gathers(step)
        known: dict[object, Bodies] = {}
        for run, cost in zip(runs.counts, costs, strict=True):
            if run not in known:
                known[run] = self._gathering(step, run, cost) if gathers else self._plain(step, cost)
        found = [known[run] for run in runs.counts]
        if self._waits(step) and not gathers:
            for at, one in enumerate(found):
                until_s = max(self._gathers_s(step, self.prices.stage_sizes(step, at % step.layout.pp)))
                gathered_s, sent_s = self._gathered_s(step, at), costs[at].sent_forward_s
                found[at] = one._replace(gathered_s=gathered_s, gathers_until_s=until_s, sent_s=sent_s)
        return tuple(found)

    def _gathered_s(self, step: StepSpec, run: int) -> float:
        """Bound when a run's first forward ends under zero=1: behind what its stage gathers up to it, and its last layer."""
        kinds, seconds = self.prices.runs(step).kinds[run], self.prices.seconds(step)
        blocks = [kind for kind in kinds if self.prices.few.layers[kind].is_block]
        gathers_s = self._gathers_s(
            step, total(self.prices.run_sizes(step)[run % step.layout.pp : run + 1 : step.layout.pp])
        )
        behind_s = (seconds[kinds[-1]].forward_s, seconds[blocks[-1]].forward_s if blocks else 0.0)
        return max(map(sum, zip(gathers_s, behind_s, strict=True)))

    def _plain(self, step: StepSpec, cost: Seconds) -> Bodies:
        forward_s, backward_s, weight_s = cost.forward_s, cost.backward_s, cost.weight_s
        return Bodies(forward_s, forward_s, backward_s, weight_s, weight_s if step.splits_backward else backward_s)

    def _gathering(self, step: StepSpec, run: tuple[tuple[int, int], ...], cost: Seconds) -> Bodies:
        """Bound bodies that gather and scatter a layer at a time, one layer ahead: along the data axis' stream, and that
        of what is expert-sharded.

        A forward lasts as long as the gathers of its blocks but the first two, with the blocks' compute only before and
        behind them; a backward as long as its blocks' scatters but the last two and gathers but the first two, which
        take turns. These all run beside what was issued behind them, or beside nothing.
        """
        kinds = self.prices.seconds(step)
        blocks = [(kind, number) for kind, number in run if self.prices.few.layers[kind].is_block]
        others_s = sum(kinds[kind].backward_s for kind, _ in run if not self.prices.few.layers[kind].is_block)
        forward_s, backward_s, last_s = cost.forward_s, cost.backward_s, cost.backward_s
        for axis in SHARD_AXES:
            parts = [part for kind, number in blocks if (part := self._part(step, kind, number, axis)).gather_s]
            if not parts or sum(part.number for part in parts) <= 2:
                continue
            gather_s, scatter_s = max(part.gather_s for part in parts), max(part.scatter_s for part in parts)
            gathered_s = sum(part.number * part.gather_s for part in parts) - 2 * gather_s
            mine = [kinds[part.kind] for part in parts]
            forward_s = max(forward_s, gathered_s + 2 * min(kinds[kind].forward_s for kind, _ in blocks))
            if step.zero == 3 and all(part.scatter_s and part.reads for part in parts):
                turns_s = gathered_s + sum(part.number * part.scatter_s for part in parts) - 2 * scatter_s
                around_s = min(one.backward_s - one.behind_s for one in mine) + min(one.backward_s for one in mine)
                slowed_s = cost.backward_s + self._slowed_s(turns_s, cost.sent_backward_s)
                last_s = max(last_s, turns_s + around_s + others_s, slowed_s)
                kept_s = cost.backward_s + self._slowed_s(gathered_s, cost.sent_backward_s)
                backward_s = max(backward_s, gathered_s + min(one.backward_s for one in mine), kept_s)
        plain_s = forward_s if step.zero == 3 else cost.forward_s
        if step.layout.accumulate == "sharded":
            backward_s = last_s
        return Bodies(forward_s, plain_s, backward_s, cost.weight_s, last_s)

    def _part(self, step: StepSpec, kind: int, number: int, axis: str) -> LayerTraffic:
        """Return what layers of a kind send over one of the axes along which units are cut."""
        one = self.prices.units(step)[kind]
        gathered, scattered = (
            (one.expert_gathered, one.expert_scattered) if axis == "dp_expert" else (one.gathered, one.scattered)
        )
        ranks = step.ranks.size(axis)
        gather_s = self._sent_s(OpKind.ALL_GATHER, gathered, axis, ranks, step)
        scatter_s = self._sent_s(OpKind.REDUCE_SCATTER, scattered * step.least_reduced_bytes, axis, ranks, step)
        return LayerTraffic(kind, number, gather_s, scatter_s, self.prices.few.layers[kind].backward_reads_weights)

    def _slowed_s(self, sent_s: float, exposed_s: float) -> float:
        """Return the seconds by which compute grows beside so many seconds of communication over one axis.

        Of what is sent no second costs nothing: it slows the compute beside it, or there is none beside it. Only what
        compute's own queue sends is not slowed.
        """
        return (1 - 1 / self.hardware.contention) * max(0.0, sent_s - exposed_s)

    def _once(self, step: StepSpec, bound: Callable[[StepSpec], Times]) -> Times:
        """Bound times once for all ways to split the data axis, where bodies do not gather."""
        if self._waits(step):
            return bound(step)
        layout, larger = step.layout, larger_twin(step)[1]
        key = (
            bound.__name__, *self.prices.key(step), step.num_microbatches, larger, layout.schedule, layout.pp,
            layout.virtual_stages,
        )  # fmt: skip
        if key not in self._known_times:
            self._known_times[key] = bound(step)
        return self._known_times[key]

    def _gathers(self, step: StepSpec) -> bool:
        return step.zero >= 2 and self.hardware.overlap

    def _waits(self, step: StepSpec) -> bool:
        """Return whether forwards wait for weights that are gathered beside them."""
        return step.zero >= 1 and self.hardware.overlap and not (step.zero == 1 and step.trains_apart)

    def closed_times(self, step: StepSpec) -> Times:
        """Bound when stages end by what is before them."""
        return self._once(smallest(step), self._closed_times)

    def _closed_times(self, step: StepSpec) -> Times:
        layout = step.layout
        m, pp, chunks = step.num_microbatches, layout.pp, layout.virtual_stages
        small, (larger, rest) = self._bodies(step), larger_twin(step)
        large = self._bodies(larger) if rest else small
        first = max(1, rest)
        busy = {
            (one, more): (
                more.first_s + (first - 1) * more.forward_s + (m - first) * one.forward_s,
                rest * (more.backward_s + more.weight_s) + (m - rest) * (one.backward_s + one.weight_s),
            )
            for one, more in set(zip(small, large, strict=True))
        }
        of_run = [busy[pair] for pair in zip(small, large, strict=True)]
        waited_s = max(0.0, large[0].gathered_s - large[0].first_s)  # by the first stage, which begins at once
        begins_s = [
            0.0,
            *itertools.accumulate((body.first_s for body in large[1 : pp - 1]), initial=large[0].first_s + waited_s),
        ]
        whole_s, ends_s = [0.0] * (pp * chunks), [0.0] * pp
        after_s = 0.0  # when the gradient of the last micro-batch comes that goes through all stages to the first one
        for stage in reversed(range(pp)):
            forward_s = backward_s = 0.0
            for run in range(stage, pp * chunks, pp):
                forward_s += of_run[run][0]
                backward_s += of_run[run][1]
            forward_s += begins_s[stage] if stage else waited_s
            end_s, last = forward_s + backward_s, small[stage]
            # What weights have left to do behind that gradient, where they have tasks of their own.
            left = behind_last_backward(layout.schedule, stage, pp, m, chunks) if step.splits_backward else ()
            left_s = sum((large if one.microbatch < rest else small)[one.chunk * pp + stage].weight_s for one in left)
            after_s = max(after_s + last.backward_s, end_s - left_s)
            ends_s[stage] = max(end_s, after_s + left_s)
            for run in range(stage, pp * chunks, pp):
                whole_s[run] = forward_s
            whole_s[stage] = max(forward_s, ends_s[stage] - last.last_s)
        return Times(tuple(whole_s), tuple(ends_s))

    def played_times(self, step: StepSpec) -> Times:
        """Play the schedule with whole bodies, and nothing sent over the data axes but what bodies wait for."""
        if step.layout.pp == 1:
            return self.closed_times(step)
        return self._once(smallest(step), self._played_times)

    def _played_times(self, step: StepSpec) -> Times:
        return self._play(step, self._bodies(step))

    def slowed_times(self, step: StepSpec) -> Times:
        """Play it with last backwards that are slowed by the reductions beside them."""
        step = smallest(step)
        bodies = self._bodies(step)
        if not self.hardware.overlap or self.hardware.contention == 1:
            return self.played_times(step)
        longer: dict[tuple[int, ...], float] = {}
        kinds = self.prices.runs(step).kinds
        beside = kinds[:1] if _reduces_behind_sends(step) else kinds
        for run in beside:
            if run not in longer:
                longer[run] = self._longer_s(step, run)
        slowed = tuple(
            body._replace(
                last_s=max(body.last_s, (cost.weight_s if step.splits_backward else cost.backward_s) + longer[run])
            )
            for body, cost, run in zip(bodies, self.prices.run_seconds(step), beside, strict=False)
        )
        bodies = (*slowed, *bodies[len(slowed) :])
        if step.layout.pp > 1:
            return self._play(step, bodies)
        times = self.closed_times(step)
        return Times(times.whole_s, (times.whole_s[0] + bodies[0].last_s,))

    def _play(self, step: StepSpec, bodies: Sequence[Bodies]) -> Times:
        layout = step.layout
        size, pp, (larger, rest) = self.prices.sent_bytes(step), layout.pp, larger_twin(step)
        sends_s = [self._sent_s(OpKind.SEND, size, "pp", pp, replace(step, stage=stage)) for stage in range(pp)]
        large = self._bodies(larger) if rest else bodies
        return play_bodies(layout, step.num_microbatches, bodies, sends_s, large, rest, self.hardware.contention)

    def _longer_s(self, step: StepSpec, run: tuple[int, ...]) -> float:
        """Return the seconds by which a run's last backward grows beside the reductions of its own gradients."""
        kinds = self.prices.seconds(step)
        found_s = 0.0
        for stream, waiting_s in self._streams(step):
            layers = []
            for kind in reversed(run):
                one = kinds[kind]
                backward_s, sent_s = (
                    (one.weight_s, 0.0) if step.splits_backward else (one.backward_s, one.sent_backward_s)
                )
                layers.append(Reduced(backward_s - sent_s, sent_s, stream[kind]))
            found_s = max(found_s, longer_s(layers, waiting_s, self.hardware.contention))
        return found_s

    def _streams(self, step: StepSpec) -> list[tuple[list[float], float]]:
        """Return of each stream that reduces gradients behind their backward what it takes for each kind of layer, and for
        what waits in a bucket."""
        layout, sent = step.layout, step.least_reduced_bytes
        count, replicas, shards = len(self.prices.few.layers), layout.num_replicas, layout.num_shards
        if step.zero >= 2:
            early = [self._replicated_s(step, one.reduced_early) for one in self.prices.units(step)]
            scatters = [
                [
                    self._part(step, kind, 1, axis).scatter_s * (self.prices.units(step)[kind].reduced_early > 0)
                    for kind in range(count)
                ]
                for axis in SHARD_AXES
            ]
            return [(one, 0.0) for one in (early, *scatters)]
        if layout.reduce == "hierarchical":
            return []  # its two streams wait for each other bucket by bucket, which is not bounded here
        of_shards, of_replicas = (
            (OpKind.REDUCE_SCATTER, "dp_shard", shards),
            (OpKind.ALL_REDUCE, "dp_replicate", replicas),
        )
        kind, axis, ranks = of_shards if step.zero else of_replicas
        found = []
        for part, (name, size) in enumerate(((axis, ranks), ("dp_expert", step.ranks.size("dp_expert")))):
            begun_s = self._sent_s(kind, 1, name, size, step)  # without any bytes; buckets may hold several layers
            waiting_s = self._sent_s(kind, (_full_numel(step, size) + 1) * sent, name, size, step)
            sent_s = [
                max(0.0, self._sent_s(kind, numel[part] * sent, name, size, step) - begun_s)
                for numel in self.prices.cut(step).early
            ]
            found.append((sent_s, max(0.0, waiting_s - begun_s)))
        return found

    def step_s(self, step: StepSpec, times: Times) -> float:
        """Bound the step of a layout whose stages come so far no sooner than that."""
        step = smallest(step)
        runs, pp = self.prices.runs(step), step.layout.pp
        sendings: dict[tuple[object, ...], Sending] = {}
        met_s = last_s = 0.0
        first_s: float | None = None
        for stage in range(pp):
            same = runs.kinds[stage::pp]
            if same not in sendings:
                sendings[same] = self._sending(step, stage)
            sends = sendings[same]
            first_s = sends.first_s if first_s is None else first_s  # all stages wait for the first one's first forward
            end_s = times.ends_s[stage]
            if self.hardware.overlap:
                whole_s = times.whole_s[stage::pp]
                slowed_s = whole_s[-1] + sends.left_s + self._slowed_s(sends.beside_s, sends.exposed_s)
                summed_s = self._summed_s(whole_s, sends.of_runs)
                met_s = max(met_s, first_s + end_s + sends.behind_s, summed_s, sends.all_s, slowed_s)
            elif pp == 1:
                met_s = end_s + sends.reduced_s + sends.all_s
            else:  # of several stages one may send while it waits for another
                mine = self.prices.stage_seconds(step, stage)
                busy_s = step.num_microbatches * (mine.forward_s + mine.backward_s + mine.weight_s)
                summed_s = self._summed_s(times.whole_s[stage::pp], sends.of_runs)
                met_s = max(met_s, end_s, summed_s, busy_s + sends.all_s)
            last_s = max(last_s, sends.update_s)
        return met_s + self._scalars_s(step) + last_s

    @staticmethod
    def _summed_s(whole_s: Sequence[float], of_runs: Sequence[Reductions]) -> float:
        """Return the seconds after which the last gradients of a stage are summed: those of its last run of layers come first."""
        ends_s = [0.0] * len(of_runs[0].streams_s)
        for begun_s, one in zip(reversed(whole_s), reversed(of_runs), strict=True):
            ends_s = [
                max(end_s, begun_s + one.behind_s) + took_s for end_s, took_s in zip(ends_s, one.streams_s, strict=True)
            ]
        return max(ends_s)

    def _sending(self, step: StepSpec, stage: int) -> Sending:
        """Return what a stage sends over the data axes."""
        took, mine = self.prices.stage_seconds(step, stage), self.prices.stage_sizes(step, stage)
        update_s = self._update_s(step, self._updated(step, mine), 0.0 if step.zero >= 2 else mine.apart)
        # What runs behind the first gradients that are whole: the last micro-batch's, of every run where they alternate.
        left_s = took.weight_s if step.splits_backward else took.backward_s
        sent_s = 0.0 if step.splits_backward else took.sent_backward_s
        if step.zero >= 2:
            sends = self._of_units(step, stage, took, update_s)
        else:
            sends = self._of_buckets(step, mine, update_s)
        of_runs = tuple(
            self._reductions(step, run)
            for run in range(stage, step.layout.pp * step.layout.virtual_stages, step.layout.pp)
        )
        return sends._replace(left_s=left_s, exposed_s=sent_s, of_runs=of_runs)

    def _reductions(self, step: StepSpec, run: int) -> Reductions:
        runs = self.prices.runs(step)
        first = self.prices.seconds(step)[runs.kinds[run][-1]]
        behind_s = first.weight_s if step.splits_backward else first.backward_s - first.behind_s
        if run and _reduces_behind_sends(step):
            behind_s = self.prices.run_seconds(step)[run].backward_s
        if step.zero < 2:
            streams_s = self._bucket_streams(step, self.prices.run_sizes(step)[run])
        else:
            each = (
                number * self._replicated_s(step, self.prices.units(step)[kind].held_trained)
                for kind, number in runs.counts[run]
            )
            streams_s = (sum(each),)
        return Reductions(behind_s, streams_s)

    def _of_buckets(self, step: StepSpec, mine: Sizes, update_s: float) -> Sending:
        streams_s = self._bucket_streams(step, mine)
        reduced_s, beside_s = max(streams_s), max(streams_s[:2])
        if not step.zero:
            return Sending(reduced_s=reduced_s, update_s=update_s, beside_s=beside_s)
        gathers_s = self._gathers_s(step, mine)
        if step.trains_apart:
            return Sending(reduced_s=reduced_s, update_s=update_s + max(gathers_s), beside_s=beside_s)
        # What the step before has updated is gathered first, and then gradients are reduced over the same axis.
        both_s = max(map(sum, zip(gathers_s, streams_s, strict=False)))
        all_s = both_s if self.hardware.overlap else max(gathers_s)
        return Sending(reduced_s=reduced_s, all_s=all_s, update_s=update_s, beside_s=beside_s)

    def _gathers_s(self, step: StepSpec, mine: Sizes) -> tuple[float, float]:
        """Seconds that zero=1 takes to gather weights: those that all ranks have, and those of experts."""
        master, compute = BYTES_OF[step.master_dtype], BYTES_OF[step.compute_dtype]
        sizes = (
            (mine.trained - mine.expert_trained, mine.apart - mine.expert_apart),
            (mine.expert_trained, mine.expert_apart),
        )
        size, expert_size = ((numel - part) * master + part * compute for numel, part in sizes)
        shards, own, of_experts = step.layout.num_shards, mine.block_trained - mine.expert_trained, mine.expert_trained
        holders = step.ranks.size("dp_expert")
        return (
            self._in_buckets_s(step, OpKind.ALL_GATHER, size, "dp_shard", shards, own),
            self._in_buckets_s(step, OpKind.ALL_GATHER, expert_size, "dp_expert", holders, of_experts),
        )

    def _bucket_streams(self, step: StepSpec, mine: Sizes) -> tuple[float, ...]:
        """Seconds that reductions take of each stream: of weights that all ranks have, of experts, of shards."""
        layout, sent = step.layout, step.least_reduced_bytes
        of_experts = mine.expert_trained
        whole, own = mine.trained - of_experts, mine.block_trained - of_experts
        replicas, shards, holders = layout.num_replicas, layout.num_shards, step.ranks.size("dp_expert")
        kind, borrows = OpKind.REDUCE_SCATTER if step.zero else OpKind.ALL_REDUCE, layout.borrows_data_ranks
        if layout.reduce == "hierarchical":
            inside, nodes = step.ranks.size("dp_intra"), step.ranks.size("dp_inter")
            both = (OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER)
            return (
                sum(self._in_buckets_s(step, one, whole * sent, "dp_intra", inside, own) for one in both),
                self._in_buckets_s(step, OpKind.ALL_REDUCE, whole * sent / inside, "dp_inter", nodes, own),
            )
        if step.zero == 0:
            return (
                self._in_buckets_s(step, kind, whole * sent, "dp_replicate", replicas, own),
                self._in_buckets_s(step, kind, of_experts * sent, "dp_expert", holders, of_experts) if borrows else 0.0,
            )
        return (
            self._in_buckets_s(step, kind, whole * sent, "dp_shard", shards, own),
            self._in_buckets_s(step, kind, of_experts * sent, "dp_expert", holders, of_experts) if borrows else 0.0,
            sum(
                self._in_buckets_s(step, OpKind.ALL_REDUCE, numel * sent / parts, "dp_replicate", replicas, in_blocks)
                for numel, parts, in_blocks in ((whole, shards, own), (of_experts, holders, of_experts))
            ),
        )

    def _in_buckets_s(self, step: StepSpec, kind: OpKind, size: float, axis: str, ranks: int, numel: float) -> float:
        """Send what buckets of so many elements hold: each is closed by the weight that fills it, maybe its first one."""
        cut, of_experts = self.prices.cut(step), axis == "dp_expert"
        full = _full_numel(step, step.ranks.size(axis) if of_experts else step.layout.num_shards)
        alone = of_experts and cut.least_of_experts >= full
        count = max(1, int(numel / (cut.largest if alone else full + cut.largest)))
        return count * self._sent_s(kind, size / count, axis, ranks, step)

    def _of_units(self, step: StepSpec, stage: int, mine: Seconds, update_s: float) -> Sending:
        layout, runs, m = step.layout, self.prices.runs(step), step.num_microbatches
        last, scattered = self.prices.kind_of[-1], m if layout.accumulate == "sharded" else 1
        all_s = scattered_s = 0.0
        for axis in SHARD_AXES:
            gathers_s = scatters_s = 0.0
            for run in runs.counts[stage :: layout.pp]:
                for kind, number in run:
                    part = self._part(step, kind, number, axis)
                    again = self.prices.few.layers[kind].is_block and part.reads and part.scatter_s > 0 and kind != last
                    gathers_s += number * part.gather_s * (m * (1 + again) if step.zero == 3 else 1)
                    scatters_s += number * part.scatter_s * scattered
            all_s, scattered_s = max(all_s, gathers_s + scatters_s), max(scattered_s, scatters_s)
        first = self._part(step, runs.kinds[stage][0], 1, "dp_shard")
        reduced_s = sum(
            number * self._replicated_s(step, self.prices.units(step)[kind].held_trained)
            for run in runs.counts[stage :: layout.pp]
            for kind, number in run
        )
        behind_s = first.scatter_s + self._replicated_s(
            step, self.prices.units(step)[first.kind].scattered / layout.num_shards
        )
        busy_s = m * (mine.forward_s + mine.backward_s + mine.weight_s)
        busy_s += self._slowed_s(scattered_s, m * (mine.sent_forward_s + mine.sent_backward_s))
        if self.hardware.overlap:
            all_s = max(all_s, first.gather_s + busy_s)
        return Sending(first.gather_s, reduced_s, behind_s, all_s, update_s, beside_s=reduced_s)

    def _replicated_s(self, step: StepSpec, numel: float) -> float:
        """Sum so many elements of gradients over the replicas."""
        size = numel * step.least_reduced_bytes
        return self._sent_s(OpKind.ALL_REDUCE, size, "dp_replicate", step.layout.num_replicas, step)

    @staticmethod
    def _updated(step: StepSpec, mine: Sizes) -> float:
        """Elements that the optimizer of a rank updates."""
        if not step.zero:
            return mine.trained
        whole, holders = mine.trained - mine.expert_trained, step.ranks.size("dp_expert")
        return whole / step.layout.num_shards + mine.expert_trained / holders

    def _update_s(self, step: StepSpec, numel: float, apart: float) -> float:
        moved = numel * UPDATE_PASSES * BYTES_OF[step.master_dtype]
        moved += apart / (step.layout.num_shards if step.zero else 1) * BYTES_OF[step.compute_dtype]
        return moved / self.hardware.memory_bytes_per_s / self.hardware.memory_efficiency + self.hardware.host_step_s


def _reduces_behind_sends(step: StepSpec) -> bool:
    """Return whether all runs but the first one reduce nothing beside their last backward, but behind what it sends."""
    return step.zero < 2 and not step.splits_backward


def _full_numel(step: StepSpec, num_shards: int) -> int:
    """Return the elements of gradients at which a bucket is closed that so many ranks divide."""
    return bucket_bytes(num_shards if step.zero else 1) // BYTES_OF[step.master_dtype]
