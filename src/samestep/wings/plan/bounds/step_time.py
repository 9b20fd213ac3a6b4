"""Lower bounds of the step time of layouts, in seconds and in closed form, without building their programs.

A search by such bounds is branch and bound (Land and Doig 1960): a layout whose bound is above the best step time found, or whose least
memory is too large (`wings/plan/bounds/least_memory.py`), is never played. So a bound must never exceed what the clock finds, and the
closer it is, the fewer layouts are played. Layers of one kind cost the same, so one of each kind is priced
(`wings/plan/bounds/layer_costs.py`).

Stage i of p runs m micro-batches of f_i + b_i seconds, and cannot start before the first forwards of the stages before it:

    T >= n c / p, c the least seconds of a sample        for all layouts with these degrees, of n samples a rank
    T >= m c_i + c_1 + ... + c_(i-1), c_i = f_i + b_i    for all layouts with these degrees and this micro-batch; with several runs a
                                                         stage, c_1 ... are their first ones

Where micro-batches differ by a sample the larger ones, which come first, have an f and a b of their own.

The communication of a stage over a data axis is a stream: the step takes as long as all of it, and longer than compute by what precedes the
first forward and what follows the last backward. The gradients of a stage's last run are complete first, and their reductions come first.
The step's scalars and the update follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from samestep.layout import Layout
from samestep.program.ops import BYTES_OF, OpKind
from samestep.program.step import StepSpec
from samestep.schedules import DEFAULT, SCHEDULES
from samestep.wings.plan.bounds import body_seconds
from samestep.wings.plan.bounds.body_seconds import (
    BodyBounds,
    BodySeconds,
    RunSeconds,
    after_last_backward,
    larger_twin,
    last_reduced_s,
    order_of,
    smallest,
)
from samestep.wings.plan.bounds.data_traffic import DataTraffic, TrafficBounds
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.layer_kinds import Seconds, Sizes, least_updated, unlike_in_chunks
from samestep.wings.plan.simulation.collectives import collective_s, group_of
from samestep.wings.plan.simulation.cost import UPDATE_PASSES


class _Times(NamedTuple):
    """Lower bounds of times in a pipeline, in seconds from the start of the step."""

    last_s: tuple[float, ...]
    """Start of the body that completes a run's gradients, for each run."""
    ends_s: tuple[float, ...]
    """End of compute, for each stage."""


class Bounds:
    """Lower bounds of the step times of layouts of one model, job and machine; shared parts are computed once."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.hardware = prices, prices.hardware
        self.bodies = BodyBounds(prices)
        self.traffic = TrafficBounds(self.bodies)
        self._known_times: dict[tuple[object, ...], _Times] = {}
        self._known_plays: dict[tuple[object, ...], _Times] = {}
        self._known_samples: dict[tuple[object, ...], tuple[float, float, StepSpec]] = {}

    def degrees_s(
        self, degrees: Layout, steps: Callable[[Layout], Sequence[StepSpec]], less_cut: Layout | None = None
    ) -> float:
        """Bound the step time, in seconds, of all layouts with these degrees that compute as much again, or more.

        Args:
            degrees: they, with an unsplit data axis.
            steps: returns the steps of a layout with each choice of chunks, the first with none.
            less_cut: degrees that leave a sequence whole, or have a shorter ring, by which the others are bounded: ranks share the compute of
                a sample, and each also sends more of it, or around a longer ring as much, so together they take no less for it.
        """
        priced = less_cut or degrees
        key = priced.cuts, priced.recompute, priced.offload
        if key not in self._known_samples:
            some = unlike_in_chunks(steps(priced))
            sample_s = min(map(self.prices.sample_s, some))
            self._known_samples[key] = sample_s, self.prices.whole_trained(some[0]), some[0]
        sample_s, trained, step = self._known_samples[key]
        sample_s *= priced.cp / degrees.cp
        updated = trained / degrees.dp_cp_size / degrees.pp
        return -(-step.global_batch // degrees.dp) * sample_s / degrees.pp + self._update_s(step, updated, 0.0)

    def least_s(self, steps: Sequence[StepSpec], families: Sequence[Layout]) -> float:
        """Bound the step time, in seconds, of all layouts with these degrees, this micro-batch and one of these schedules that compute as much
        again, or more; `steps` as in `schedule_s`. Computed for no split backward, since that saves no time."""
        return min(self._least_s(step, families) for step in unlike_in_chunks(steps))

    def _least_s(self, step: StepSpec, families: Sequence[Layout]) -> float:
        step = smallest(step)
        if step.splits_backward:
            step = step.but(layout=step.layout.but(schedule=DEFAULT))
        pp, (larger, rest), m = step.layout.pp, larger_twin(step), step.num_microbatches
        kinds = self.prices.seconds(step)
        busy_s = [(m - rest) * (kind.forward_s + kind.backward_s) for kind in kinds]
        if rest:
            more = self.prices.seconds(larger)
            busy_s = [own_s + rest * (row.forward_s + row.backward_s) for own_s, row in zip(busy_s, more, strict=True)]
        busy_s[-1] -= self._saved_by_chunks_s(step)
        trained = self.prices.whole_trained(step)
        return self._slowest_s(step, families, busy_s, kinds) + self._update_s(
            step, trained / step.layout.dp_cp_size / pp, 0.0
        )

    def _slowest_s(
        self, step: StepSpec, families: Sequence[Layout], busy_s: Sequence[float], kinds: Sequence[Seconds]
    ) -> float:
        """Return the seconds of compute of the slowest stage, with what it waits at the ends of the best of some schedules: for the first
        forwards of the stages before it and, where no backward is split, for their last backwards.

        Args:
            step: a step with these degrees.
            families: the schedules.
            busy_s: seconds of one layer of each kind, of all micro-batches.
            kinds: those of a micro-batch.
        """
        least_s = float("inf")
        for chunks, splits in {
            (family.virtual_stages, SCHEDULES[family.schedule].splits_backward) for family in families
        }:
            waits_s = [kind.forward_s + (not splits) * kind.backward_s for kind in kinds]
            slowest_s = max(
                sum(number * busy_s[kind] for kind, number in layers)
                + sum(number * waits_s[kind] for kind, number in firsts)
                for layers, firsts in self.prices.runs(step, chunks).stages
            )
            least_s = min(least_s, slowest_s)
        return least_s

    def schedule_s(self, steps: Sequence[StepSpec]) -> float:
        """Bound the step time, in seconds, of all layouts that differ only in the data axis, chunks, and in that they compute more again.

        Args:
            steps: one of them with each choice of chunks, the first with none.
        """
        plain = map(smallest, unlike_in_chunks(steps))
        return min(max(self._times(step).ends_s) - self._saved_by_chunks_s(step) for step in plain)

    def _saved_by_chunks_s(self, step: StepSpec) -> float:
        """Return the most seconds by which chunks of the loss can make a step quicker."""
        larger, rest = larger_twin(step)
        more_s = rest * self.prices.saved_by_chunks_s(larger) if rest else 0.0
        return more_s + (step.num_microbatches - rest) * self.prices.saved_by_chunks_s(step)

    def group_s(self, step: StepSpec) -> float:
        """Bound the step time, in seconds, of all layouts that differ only in how the data axis is split and in the ZeRO stage."""
        step = smallest(step)
        stages = self.prices.runs(step).unlike
        updated = max(least_updated(step, self.prices.stage_sizes(step, stage)) for stage in stages)
        return max(self._times(step).ends_s) + self._scalars_s(step) + self._update_s(step, updated, 0.0)

    def sharded_s(self, step: StepSpec) -> float:
        """Bound the step time of one layout, in seconds, by what stages gather and scatter of their weights: one sends the average at least."""
        if step.zero < 2:
            return 0.0
        return self.traffic.streams_s(smallest(step), self.prices.numbers)[0] / step.layout.pp

    def step_s(self, step: StepSpec, *, plays: bool = False) -> float:
        """Bound the step time of one layout, in seconds; with `plays` by the pipeline's clock too."""
        step = smallest(step)
        times, runs, pp = self._times(step), self.prices.runs(step), step.layout.pp
        if plays and pp > 1:
            both = zip(times, self._played_times(step), strict=True)
            times = _Times(*(tuple(map(max, unplayed, played)) for unplayed, played in both))
        traffic: dict[tuple[object, ...], DataTraffic] = {}
        met_s = last_s = 0.0
        first_s: float | None = None
        for stage in range(pp):
            same = runs.kinds[stage::pp]
            if same not in traffic:
                sizes = self.prices.stage_sizes(step, stage)
                update_s = self._update_s(step, self._updated(step, sizes), 0.0 if step.zero >= 2 else sizes.apart)
                traffic[same] = self.traffic.of_stage(step, stage, update_s)
            sends = traffic[same]
            first_s = sends.first_s if first_s is None else first_s  # all stages wait for the first one's first forward
            end_s, begun_s = times.ends_s[stage], times.last_s[stage::pp]
            if self.hardware.overlap:
                slowed_s = begun_s[-1] + sends.left_s + self.bodies.slowed_s(sends.overlapped_s, sends.exposed_s)
                summed_s = last_reduced_s(begun_s, sends.of_runs)
                met_s = max(met_s, first_s + end_s + sends.after_s, summed_s, sends.all_s, slowed_s)
            elif pp == 1:
                met_s = end_s + sends.reduced_s + sends.all_s
            else:  # one of several stages may communicate while it waits for another
                seconds = self.prices.stage_seconds(step, stage)
                busy_s = step.num_microbatches * (seconds.forward_s + seconds.backward_s + seconds.weight_s)
                met_s = max(met_s, end_s, last_reduced_s(begun_s, sends.of_runs), busy_s + sends.all_s)
            last_s = max(last_s, sends.update_s)
        return met_s + self._scalars_s(step) + last_s

    def _scalars_s(self, step: StepSpec) -> float:
        return self.bodies.sent_s(
            OpKind.ALL_REDUCE, BYTES_OF["float64"] * step.num_scalars, "world", step.layout.world_size, step
        )

    def _update_s(self, step: StepSpec, numel: float, apart: float) -> float:
        master, hardware = BYTES_OF[step.master_dtype], self.hardware
        moved = numel * UPDATE_PASSES * master
        if step.layout.offload and hardware.host_bytes_per_s:  # each weight comes back in the smaller dtype at least
            sent_s = numel * (master + min(master, BYTES_OF[step.compute_dtype])) / hardware.host_bytes_per_s
            return sent_s + moved / hardware.host_update_bytes_per_s + hardware.host_step_s
        moved += apart / (step.layout.num_shards if step.zero else 1) * BYTES_OF[step.compute_dtype]
        return moved / self.hardware.memory_bytes_per_s / self.hardware.memory_efficiency + self.hardware.host_step_s

    # -- the pipeline --------------------------------------------------------------------------------------------------

    def _times(self, step: StepSpec) -> _Times:
        """Bound the times of a pipeline; once for all ways to split the data axis where forwards wait for no gather."""
        if self._waits(step):
            return self._new_times(step)
        if (key := self._key(step)) not in self._known_times:
            self._known_times[key] = self._new_times(step)
        return self._known_times[key]

    def _key(self, step: StepSpec) -> tuple[object, ...]:
        layout, larger = step.layout, larger_twin(step)[1]
        return (
            *self.prices.key(step),
            step.num_microbatches,
            larger,
            layout.schedule,
            layout.pp,
            layout.virtual_stages,
        )

    def _new_times(self, step: StepSpec) -> _Times:
        layout = step.layout
        m, pp, chunks = step.num_microbatches, layout.pp, layout.virtual_stages
        small, (larger, rest) = self.bodies.of_runs(step), larger_twin(step)
        large = self.bodies.of_runs(larger) if rest else small
        first = max(1, rest)
        busy = {
            (less, more): (
                more.first_s + (first - 1) * more.forward_s + (m - first) * less.forward_s,
                rest * (more.backward_s + more.weight_s) + (m - rest) * (less.backward_s + less.weight_s),
            )
            for less, more in set(zip(small, large, strict=True))
        }
        of_run = [busy[pair] for pair in zip(small, large, strict=True)]
        waited_s = max(0.0, self._first_forward_s(larger if rest else step) - large[0].first_s)
        begins_s = [
            0.0,
            *itertools.accumulate((body.first_s for body in large[1 : pp - 1]), initial=large[0].first_s + waited_s),
        ]
        last_s, ends_s = [0.0] * (pp * chunks), [0.0] * pp
        after_s = 0.0  # arrival of the last micro-batch's gradient, which passes through all stages to the first one
        for stage in reversed(range(pp)):
            runs = range(stage, pp * chunks, pp)
            forward_s = sum(of_run[run][0] for run in runs) + (begins_s[stage] if stage else waited_s)
            end_s, last = forward_s + sum(of_run[run][1] for run in runs), small[stage]
            # Deferred weight gradients that follow that gradient.
            left = after_last_backward(layout.schedule, stage, pp, m, chunks) if step.splits_backward else ()
            left_s = sum(
                (large if action.microbatch < rest else small)[action.chunk * pp + stage].weight_s for action in left
            )
            after_s = max(after_s + last.backward_s, end_s - left_s)
            ends_s[stage] = max(end_s, after_s + left_s)
            for run in runs:
                last_s[run] = forward_s
            last_s[stage] = max(forward_s, ends_s[stage] - last.last_s)
        return _Times(tuple(last_s), tuple(ends_s))

    def _played_times(self, step: StepSpec) -> _Times:
        """Bound the times of a pipeline by its clock, once for all ways to split the data axis where bodies wait for no gather."""
        layout, (larger, rest) = step.layout, larger_twin(step)
        split = (layout.dp_replicate, layout.zero, layout.accumulate) if self.bodies.gathers(step) else ()
        if (key := (*self._key(step), *split)) not in self._known_plays:
            pp, m, chunks = layout.pp, step.num_microbatches, layout.virtual_stages
            small = self.bodies.of_runs(step)
            large = self.bodies.of_runs(larger) if rest else small
            runs = [self._seconds_of(less, more, rest, m, step) for less, more in zip(small, large, strict=True)]
            orders = [order_of(layout.schedule, stage, pp, m, chunks) for stage in range(pp)]
            complete_s, ends_s = body_seconds.play(orders, runs, [self._send_s(step, stage) for stage in range(pp)])
            last_s = [ends[m - 1] - run.last_s for ends, run in zip(complete_s, small, strict=True)]
            self._known_plays[key] = _Times(tuple(last_s), tuple(ends_s))
        return self._known_plays[key]

    @staticmethod
    def _seconds_of(body_seconds: BodySeconds, more: BodySeconds, rest: int, m: int, step: StepSpec) -> RunSeconds:
        """Return the seconds of each micro-batch of a run, of which the first ones may have one sample more."""
        forward_s, backward_s, weight_s = (
            [getattr(more, name)] * rest + [getattr(body_seconds, name)] * (m - rest)
            for name in ("forward_s", "backward_s", "weight_s")
        )
        forward_s[0] = more.first_s
        (weight_s if step.splits_backward else backward_s)[m - 1] = body_seconds.last_s
        return RunSeconds(forward_s, backward_s, weight_s)

    def _send_s(self, step: StepSpec, stage: int) -> float:
        """Return the least seconds of a message from a stage to the next one."""
        group = group_of("pp", step.layout.pp, step.but(stage=stage), self.hardware)
        return collective_s(OpKind.SEND, self.prices.sent_bytes(step), group, self.hardware)

    def _waits(self, step: StepSpec) -> bool:
        """Return whether a forward may wait for an all_gather of weights that overlaps with it (zero >= 1)."""
        return step.zero >= 1 and self.hardware.overlap

    def _first_forward_s(self, step: StepSpec) -> float:
        """Bound the end of the first forward of the first run under zero=1: its gathers, and then its last layer."""
        if not self._waits(step) or self.bodies.gathers(step):
            return 0.0
        kinds, seconds = self.prices.runs(step).kinds[0], self.prices.seconds(step)
        blocks = [kind for kind in kinds if self.prices.few.layers[kind].is_block]
        gathers_s = self.traffic.gathers_s(step, self.prices.run_sizes(step)[0])
        after_s = (seconds[kinds[-1]].forward_s, seconds[blocks[-1]].forward_s if blocks else 0.0)
        return max(map(sum, zip(gathers_s, after_s, strict=True)))

    @staticmethod
    def _updated(step: StepSpec, sizes: Sizes) -> float:
        """Return the number of elements that the optimizer of a rank updates."""
        if not step.zero:
            return sizes.trained
        shared, holders = sizes.trained - sizes.expert_trained, step.ranks.size("dp_expert")
        return shared / step.layout.num_shards + sizes.expert_trained / holders
