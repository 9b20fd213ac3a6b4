"""Lower bounds of the communication of a stage over the data axes, in seconds: buckets of zero=0 and 1, units of zero=2 and 3.

Each axis is a stream: gathers and reductions over it follow each other, and run beside compute, which they slow. Gradients of zero=0 and 1 are
reduced in buckets, behind the backward of the last micro-batch; those of zero=2 and 3 with their layer, in each micro-batch unless they accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samestep.program.buckets import bucket_bytes
from samestep.program.ops import BYTES_OF, SHARD_AXES, OpKind
from samestep.program.step import StepSpec
from samestep.wings.plan.bounds.body_seconds import BodyBounds, Reductions, least_reduced_bytes
from samestep.wings.plan.bounds.layer_kinds import Seconds, Sizes


class DataTraffic(NamedTuple):
    """Seconds of communication of a stage over the data axes."""

    first_s: float = 0.0
    """Gather before the first forward."""
    reduced_s: float = 0.0
    """Reductions, which cannot begin before the first gradients are complete."""
    after_s: float = 0.0
    """Reductions that follow the last backward."""
    all_s: float = 0.0
    """All communication over one axis, or compute with all communication that it must wait for."""
    update_s: float = 0.0
    """The optimizer's update, and the gathers that follow it."""
    left_s: float = 0.0
    """Compute that remains when the first gradients are complete."""
    exposed_s: float = 0.0
    """The part of `left_s` that is communication in compute's own queue."""
    of_runs: tuple[Reductions, ...] = ()
    overlapped_s: float = 0.0
    """The part of `reduced_s` that is issued between the last backwards, and so slows those that follow."""


class TrafficBounds:
    """Lower bounds of the communication over the data axes, of the steps of one model, job and machine."""

    def __init__(self, bodies: BodyBounds) -> None:
        self.bodies, self.prices, self.hardware = bodies, bodies.prices, bodies.hardware

    def of_stage(self, step: StepSpec, stage: int, update_s: float) -> DataTraffic:
        """Return the communication of a stage over the data axes, given the seconds of its update."""
        took, sizes = self.prices.stage_seconds(step, stage), self.prices.stage_sizes(step, stage)
        # Compute after the first complete gradients: the last micro-batch, of every run where runs alternate.
        left_s = took.weight_s if step.splits_backward else took.backward_s
        sent_s = 0.0 if step.splits_backward else took.sent_backward_s
        if step.zero >= 2:
            sends = self._of_units(step, stage, took, update_s)
        else:
            sends = self._of_buckets(step, sizes, update_s)
        of_runs = tuple(
            self._reductions(step, run)
            for run in range(stage, step.layout.pp * step.layout.virtual_stages, step.layout.pp)
        )
        return sends._replace(left_s=left_s, exposed_s=sent_s, of_runs=of_runs)

    def _reductions(self, step: StepSpec, run: int) -> Reductions:
        runs = self.prices.runs(step)
        first = self.prices.seconds(step)[runs.kinds[run][-1]]
        begin_s = first.weight_s if step.splits_backward else first.backward_s - first.behind_s
        # All runs but the first reduce buckets behind what their last backward sends.
        if run and step.zero < 2 and not step.splits_backward:
            begin_s = self.prices.run_seconds(step)[run].backward_s
        if step.zero < 2:
            streams_s = self._bucket_streams(step, self.prices.run_sizes(step)[run])
        else:
            each = (
                number * self._replicated_s(step, self.prices.units(step)[kind].local_trained)
                for kind, number in runs.counts[run]
            )
            streams_s = (sum(each),)
        return Reductions(begin_s, streams_s)

    def _of_buckets(self, step: StepSpec, sizes: Sizes, update_s: float) -> DataTraffic:
        streams_s = self._bucket_streams(step, sizes)
        reduced_s, overlapped_s = max(streams_s), max(streams_s[:2])
        if not step.zero:
            return DataTraffic(reduced_s=reduced_s, update_s=update_s, overlapped_s=overlapped_s)
        gathers_s = self.gathers_s(step, sizes)
        # The weights of the step before are gathered first; then gradients are reduced over the same axis.
        both_s = max(map(sum, zip(gathers_s, streams_s, strict=False)))
        all_s = both_s if self.hardware.overlap else max(gathers_s)
        return DataTraffic(reduced_s=reduced_s, all_s=all_s, update_s=update_s, overlapped_s=overlapped_s)

    def gathers_s(self, step: StepSpec, run: Sizes) -> tuple[float, float]:
        """Return the seconds of the gathers of zero=1: of weights that every rank has, and of expert-sharded ones."""
        master, compute = BYTES_OF[step.master_dtype], BYTES_OF[step.compute_dtype]
        sizes = (
            (run.trained - run.expert_trained, run.apart - run.expert_apart),
            (run.expert_trained, run.expert_apart),
        )
        size, expert_size = ((numel - part) * master + part * compute for numel, part in sizes)
        shards, inner, of_experts = step.layout.num_shards, run.block_trained - run.expert_trained, run.expert_trained
        holders = step.ranks.size("dp_expert")
        return (
            self._in_buckets_s(step, OpKind.ALL_GATHER, size, "dp_shard", shards, inner),
            self._in_buckets_s(step, OpKind.ALL_GATHER, expert_size, "dp_expert", holders, of_experts),
        )

    def _bucket_streams(self, step: StepSpec, sizes: Sizes) -> tuple[float, ...]:
        """Return the seconds of reductions in each stream: of weights that every rank has, of expert-sharded ones, of shards."""
        layout, sent = step.layout, least_reduced_bytes(step)
        of_experts = sizes.expert_trained
        total, shared_in_blocks = sizes.trained - of_experts, sizes.block_trained - of_experts
        replicas, shards, holders = layout.num_replicas, layout.num_shards, step.ranks.size("dp_expert")
        kind, borrows = OpKind.REDUCE_SCATTER if step.zero else OpKind.ALL_REDUCE, layout.borrows_data_ranks
        if layout.reduce == "hierarchical":
            inside, nodes = step.ranks.size("dp_intra"), step.ranks.size("dp_inter")
            both = (OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER)
            return (
                sum(
                    self._in_buckets_s(step, bucket_group, total * sent, "dp_intra", inside, shared_in_blocks)
                    for bucket_group in both
                ),
                self._in_buckets_s(step, OpKind.ALL_REDUCE, total * sent / inside, "dp_inter", nodes, shared_in_blocks),
            )
        if step.zero == 0:
            return (
                self._in_buckets_s(step, kind, total * sent, "dp_replicate", replicas, shared_in_blocks),
                self._in_buckets_s(step, kind, of_experts * sent, "dp_expert", holders, of_experts) if borrows else 0.0,
            )
        return (
            self._in_buckets_s(step, kind, total * sent, "dp_shard", shards, shared_in_blocks),
            self._in_buckets_s(step, kind, of_experts * sent, "dp_expert", holders, of_experts) if borrows else 0.0,
            sum(
                self._in_buckets_s(step, OpKind.ALL_REDUCE, numel * sent / parts, "dp_replicate", replicas, in_blocks)
                for numel, parts, in_blocks in ((total, shards, shared_in_blocks), (of_experts, holders, of_experts))
            ),
        )

    def _in_buckets_s(self, step: StepSpec, kind: OpKind, size: float, axis: str, ranks: int, numel: float) -> float:
        """Return the seconds of `size` bytes sent in buckets that together hold `numel` elements.

        A bucket is closed by the weight that fills it, which may be its first.
        """
        cut, of_experts = self.prices.cut(step), axis == "dp_expert"
        parts = step.ranks.size(axis) if of_experts else step.layout.num_shards
        full = bucket_bytes(parts if step.zero else 1) // BYTES_OF[step.master_dtype]
        alone = of_experts and cut.least_of_experts >= full
        count = max(1, int(numel / (cut.largest if alone else full + cut.largest)))
        return count * self.bodies.sent_s(kind, size / count, axis, ranks, step)

    def _of_units(self, step: StepSpec, stage: int, seconds: Seconds, update_s: float) -> DataTraffic:
        layout, runs, m = step.layout, self.prices.runs(step), step.num_microbatches
        counts = [count for run in runs.counts[stage :: layout.pp] for count in run]
        all_s, scattered_s = self.streams_s(step, counts)
        first = self.bodies.part(step, runs.kinds[stage][0], 1, "dp_shard")
        reduced_s = sum(
            number * self._replicated_s(step, self.prices.units(step)[kind].local_trained) for kind, number in counts
        )
        after_s = first.scatter_s + self._replicated_s(
            step, self.prices.units(step)[first.kind].scattered / layout.num_shards
        )
        busy_s = m * (seconds.forward_s + seconds.backward_s + seconds.weight_s)
        busy_s += self.bodies.slowed_s(scattered_s, m * (seconds.sent_forward_s + seconds.sent_backward_s))
        if self.hardware.overlap:
            all_s = max(all_s, first.gather_s + busy_s)
        return DataTraffic(first.gather_s, reduced_s, after_s, all_s, update_s, overlapped_s=reduced_s)

    def streams_s(self, step: StepSpec, counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Return the seconds of the gathers and scatters of a step, and those of its scatters, in the stream that takes longest.

        Args:
            step: the step, under zero=2 or 3.
            counts: the number of layers of each kind.
        """
        m, last = step.num_microbatches, self.prices.kind_of[-1]
        scatters = m if step.layout.accumulate == "sharded" else 1
        all_s = scattered_s = 0.0
        for axis in SHARD_AXES:
            gathers_s = scatters_s = 0.0
            for kind, number in counts:
                part = self.bodies.part(step, kind, number, axis)
                again = self.prices.few.layers[kind].is_block and part.reads and part.scatter_s > 0 and kind != last
                gathers_s += number * part.gather_s * (m * (1 + again) if step.zero == 3 else 1)
                scatters_s += number * part.scatter_s * scatters
            all_s, scattered_s = max(all_s, gathers_s + scatters_s), max(scattered_s, scatters_s)
        return all_s, scattered_s

    def _replicated_s(self, step: StepSpec, numel: float) -> float:
        """Return the seconds of the all_reduce of `numel` elements of gradients over the replicas."""
        size = numel * least_reduced_bytes(step)
        return self.bodies.sent_s(OpKind.ALL_REDUCE, size, "dp_replicate", step.layout.num_replicas, step)
