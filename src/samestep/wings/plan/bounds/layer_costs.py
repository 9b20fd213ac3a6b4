"""Seconds and sizes of layers on a rank, for the bounds of a search: computed once for all layouts that share them.

One layer of each kind (`wings/plan/bounds/layer_kinds.py`) goes through the strategies that stand before the pipeline, and
`wings/plan/simulation/cost.py` prices what they make of it: the program of `COUNTED` samples, from which those of any number follow, since
each sample adds the same FLOPs and bytes. A run of layers, what a stage has between two boundaries, is then a sum over its kinds. Of a
layout matters here how it cuts layers (tp, cp, ep), how large a micro-batch is, what is computed again, and where runs are cut; sizes need
no program, so that what does not fit is never priced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from samestep.hardware import Hardware, without_fixed_costs
from samestep.job import Job
from samestep.layout import Recompute
from samestep.memory.live_bytes import gradient_bytes, saved_bytes
from samestep.models.spec import ModelSpec
from samestep.program.ops import BYTES_OF, BodyKey, Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.schedules import DEFAULT, TaskKind
from samestep.strategies import ProgramBuilder
from samestep.strategies.pipeline import balance_chunks, deferred_gradients, elements_sent_before, starts
from samestep.wings.plan.bounds.layer_kinds import (
    BackwardSizes,
    Parts,
    Seconds,
    Sizes,
    Units,
    least_sent,
    multiple,
    one_of_each,
    quicker,
    total,
    units,
    weights,
)
from samestep.wings.plan.simulation.clock import queue_of
from samestep.wings.plan.simulation.collectives import GroupShape, collective_s, group_of
from samestep.wings.plan.simulation.cost import exposed_s, seconds, work_of
from samestep.wings.plan.simulation.partition import COMPUTE

ALIGNED = 64
"""Rows to a multiple of which every product has its full rate."""
COUNTED = 2**60
"""Samples of a program whose numbers are read as two digits to this base: what each sample adds, and what an op has once."""
DOWN = 1 - 1e-12
"""Leaves out what sums of seconds gain by rounding."""


_Counts = tuple[tuple[int, int], ...]
"""The number of layers of each kind."""


class Chunks(NamedTuple):
    """The runs of layers of a pipeline, in the order of the layers: number i, i + pp, ... are those of stage i."""

    counts: tuple[_Counts, ...]
    kinds: tuple[tuple[int, ...], ...]
    """Kind of each layer."""
    tails: tuple[tuple[int, ...], ...]
    """Kinds of the last layers, from the end to the last block."""
    stages: tuple[tuple[_Counts, _Counts], ...]
    """The layers of stages that are unlike each other, the last of equal ones, each with those of the first runs of the stages before it."""
    unlike: tuple[int, ...]
    """The first of each set of equal stages, which holds most activations, and the last stage."""
    latest: tuple[int, ...]
    """The last of each such set of several stages, which defers most gradients of weights where a backward is split."""


class _RankLayers(NamedTuple):
    """A layer of each kind as a rank has it."""

    step: StepSpec
    """With the model of a rank, and what it holds of each weight."""
    weights: tuple[tuple[float, ...], ...]
    """The fields of `Sizes` that describe weights."""
    gradients: tuple[tuple[int, ...], ...]
    """The bytes of the gradients of each kind's weights."""
    largest: int
    """Elements of the largest weight of a block."""
    least_of_experts: int
    """Elements of the smallest expert-sharded weight of a block; 0 if there is none."""
    expert_rows: frozenset[int]
    """Rows of the expert-sharded weights."""
    sent: int
    """Least number of elements of a sample that are sent between two blocks."""
    flops: tuple[int, ...]
    """FLOPs of the forward of each kind, by which the layers are divided into runs."""


class _Alike(NamedTuple):
    """Ops that take as long, in this cut of the layers and in others: blocks differ only at their boundaries, and chunks of the loss
    change the head alone."""

    op: Op
    """One of them, for one sample."""
    flops: int
    """FLOPs that each further sample adds."""
    size_bytes: int
    """Bytes that each further sample adds."""
    program: Program
    """The program of one sample that has it, without its bodies."""


_Uses = Mapping[int, int]
"""The number of ops that are alike, for each sum to which their seconds are added: `_Sum`, times the layers, plus the layer."""


class _Sum(IntEnum):
    """What the seconds of ops are added up to: fields of `Seconds`."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2
    BEHIND = 3
    SENT_FORWARD = 4
    SENT_BACKWARD = 5


_SUMS = {TaskKind.FORWARD: _Sum.FORWARD, TaskKind.BACKWARD: _Sum.BACKWARD, TaskKind.WEIGHT: _Sum.WEIGHT}
_SENT = {TaskKind.FORWARD: _Sum.SENT_FORWARD, TaskKind.BACKWARD: _Sum.SENT_BACKWARD}


class Prices:
    """Seconds and sizes of layers, of the steps of one model, job and machine, whose devices are equally fast (`Hardware.slowest_of`)."""

    def __init__(self, model: ModelSpec, job: Job, hardware: Hardware) -> None:
        self.model, self.hardware = model, hardware
        self.few, self.kind_of = one_of_each(model)
        self._builder = ProgramBuilder(self.few, job, hardware.devices_per_node)
        self._ideal = without_fixed_costs(hardware)
        self.numbers = sorted(Counter(self.kind_of).items())
        self._known_cuts: dict[tuple[object, ...], _RankLayers] = {}
        self._known_parts: dict[tuple[object, ...], tuple[Mapping[str, int], dict[int, _Uses]]] = {}
        self._known_seconds: dict[tuple[object, ...], tuple[Seconds, ...]] = {}
        self._known_ops: dict[tuple[object, ...], float] = {}
        self._like: dict[object, int] = {}
        self._alike: list[_Alike] = []
        self._known_least: dict[tuple[object, ...], float] = {}
        self._known_samples: dict[tuple[object, ...], tuple[Seconds, ...]] = {}
        self._known_sizes: dict[tuple[object, ...], tuple[tuple[Sizes, ...], tuple[BackwardSizes, ...]]] = {}
        self._known_trained: dict[tuple[object, ...], float] = {}
        self._known_runs: dict[tuple[object, ...], Chunks] = {}
        self._known_stage_units: dict[tuple[object, ...], Units] = {}
        self._known_units: dict[tuple[object, ...], list[Units]] = {}
        self._known_run_seconds: dict[tuple[object, ...], tuple[Seconds, ...]] = {}
        self._known_run_sizes: dict[tuple[object, ...], tuple[Sizes, ...]] = {}

    # -- one layer of each kind ----------------------------------------------------------------------------------------

    def cut(self, step: StepSpec) -> _RankLayers:
        """Return one layer of each kind, cut as a rank holds it."""
        layout = step.layout
        key = layout.cuts
        if key not in self._known_cuts:
            counted = step.but(model=self.few, samples=COUNTED, layout=layout.but(recompute="none"))
            local = self._builder.before_stages(counted).step
            layers = local.model.layers
            blocks = [index for index, layer in enumerate(layers) if layer.is_block] or [0]
            indices = range(len(layers))
            params = [param for index in blocks for param in local.model.params_of(index)]
            of_experts = (param.numel for param in params if local.holding(param).is_expert_sharded)
            self._known_cuts[key] = _RankLayers(
                local,
                tuple(weights(local, index) for index in indices),
                tuple(tuple(gradient_bytes(local, index)) for index in indices),
                max((param.numel for param in params), default=0),
                min(of_experts, default=0),
                frozenset(p.rows for p in local.model.params if local.holding(p).is_expert_sharded and p.numel),
                least_sent(layers[blocks[0] : blocks[-1]], self.model),
                tuple(layer.forward_flops for layer in layers),
            )
        return self._known_cuts[key]

    def expert_padding(self, step: StepSpec, parts: int) -> float:
        """Return how many times as large expert-sharded weights are at least whose rows are padded to a multiple of so many ranks."""
        rows = self.cut(step).expert_rows if parts > 1 else frozenset[int]()
        return min((-(-row // parts) * parts / row for row in rows), default=1.0)

    @staticmethod
    def key(step: StepSpec) -> tuple[object, ...]:
        """Return the key of the words on which prices depend."""
        layout = step.layout
        return (layout.cuts, layout.recompute, step.microbatch_samples, step.splits_backward, step.samples)

    def seconds(self, step: StepSpec) -> tuple[Seconds, ...]:
        """Return the seconds of one layer of each kind."""
        key = self.key(step)
        if key not in self._known_seconds:
            times = self._priced(step)
            if step.samples is not None:  # more samples may even take less time: tiles are shared from some size on
                times = tuple(map(quicker, times, self._priced(step.but(samples=step.samples + 1))))
            self._known_seconds[key] = times
        return self._known_seconds[key]

    def sample_seconds(self, step: StepSpec, recompute: Recompute | None = None) -> tuple[Seconds, ...]:
        """Return the least seconds of one layer of each kind that a sample takes in a micro-batch of any size of this job.

        It is what one takes in the largest micro-batch on a machine without fixed costs: there the seconds of a sample never rise with
        the size of its micro-batch, and no op takes longer than on the machine itself (`without_fixed_costs`). Forward and backward alone.
        """
        key = step.layout.cuts, recompute or step.layout.recompute
        if key not in self._known_samples:
            count, many = len(self.few.layers), self._many(step)
            step = step.but(samples=many, layout=step.layout.but(schedule=DEFAULT, recompute=key[1]))
            axes, parts = self._of_compute(step)
            groups = {axis: group_of(axis, size, step, self.hardware) for axis, size in axes.items()}
            sums = [0.0] * (len(_Sum) * count)
            for like, uses in parts.items():
                axis = self._alike[like].op.axis
                op_s = self._least_op_s(like, None if axis is None else groups[axis], many, step) / many
                for place, number in uses.items():
                    sums[place] += number * op_s
            backward = _Sum.BACKWARD * count
            self._known_samples[key] = tuple(
                Seconds(sums[layer] * DOWN, sums[backward + layer] * DOWN) for layer in range(count)
            )
        return self._known_samples[key]

    def _many(self, step: StepSpec) -> int:
        """Return a number of samples that no micro-batch exceeds, whose tokens fill tiles and chunks, and are shared by experts without rest."""
        products = [product for layer in self.cut(step).step.model.layers for product in layer.products]
        multiple_of = math.lcm(
            ALIGNED, *(product.groups for product in products), *(product.chunk_rows or 1 for product in products)
        )
        return -(-step.global_batch // multiple_of) * multiple_of

    def _least_op_s(self, like: int, group: GroupShape | None, many: int, step: StepSpec) -> float:
        """Return the least seconds of an op with so many samples."""
        op, flops, size_bytes, program = self._alike[like]
        key = like, group, many
        if key in self._known_least:
            return self._known_least[key]
        flops, size_bytes = min(op.flops, flops) * many, min(op.size_bytes, size_bytes) * many
        if group is None:
            program = replace(program, step=step.cut_like(program.step))
            took_s = seconds(op.but(flops=flops), program, self._ideal)
        else:
            took_s = collective_s(op.kind, size_bytes, group, self._ideal)
            if op.beside and self.hardware.overlap:  # the least of what is left beside products of any length
                took_s *= 1 - 1 / self.hardware.contention
        self._known_least[key] = took_s
        return took_s

    def sample_s(self, step: StepSpec) -> float:
        """Return the least seconds of all layers, forward and backward, that a sample takes in a micro-batch of any size."""
        sums = self._whole(self.sample_seconds(step))
        return sums.forward_s + sums.backward_s

    def saved_by_chunks_s(self, step: StepSpec) -> float:
        """Return the most seconds by which chunks of the loss can make a micro-batch quicker, in which the head has other tiles."""
        head, least = self.seconds(step)[-1], self.sample_seconds(step, "none")[-1]
        took_s = head.forward_s + head.backward_s + head.weight_s
        return max(0.0, took_s - step.microbatch_samples * (least.forward_s + least.backward_s))

    def _priced(self, step: StepSpec) -> tuple[Seconds, ...]:
        axes, parts = self._of_compute(step)
        more, count = step.microbatch_samples - 1, len(self.few.layers)
        sums = [0.0] * (len(_Sum) * count)
        groups = {axis: group_of(axis, size, step, self.hardware) for axis, size in axes.items()}
        alike = more, step.splits_backward
        for like, uses in parts.items():
            op = self._alike[like].op
            group = None if op.axis is None else groups[op.axis]
            key = like, group, alike, step.layout.recompute if op.kind is OpKind.RECOMPUTE else None
            op_s = self._known_ops.get(key)
            if op_s is None:
                op_s = self._known_ops[key] = self._op_s(like, group, more, step)
            for place, number in uses.items():
                sums[place] += number * op_s
        fields = (sums[part * count : (part + 1) * count] for part in _Sum)
        return tuple(map(Seconds, *fields))

    def _op_s(self, like: int, group: GroupShape | None, more: int, step: StepSpec) -> float:
        """Return the seconds of an op with `more` samples than one."""
        op, flops, size_bytes, program = self._alike[like]
        step = step.cut_like(program.step)
        if group is None:
            return seconds(op.but(flops=op.flops + more * flops), replace(program, step=step), self.hardware)
        alone_s = collective_s(op.kind, op.size_bytes + more * size_bytes, group, self.hardware)
        return exposed_s(op, alone_s, step, self.hardware)

    def _of_compute(self, step: StepSpec) -> tuple[Mapping[str, int], dict[int, _Uses]]:
        """Return the axes of the model, and the ops that run in the queue of compute: those that are alike, by their number."""
        layout = step.layout
        key = (layout.cuts, layout.recompute, step.splits_backward)
        if key not in self._known_parts:
            program = self._builder.before_stages(step.but(model=self.few, samples=COUNTED))
            bodies = {kind: program.bodies[BodyKey(kind)] for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)}
            if step.splits_backward:
                bodies[TaskKind.WEIGHT] = tuple(deferred_gradients(bodies[TaskKind.BACKWARD], program.step))
            self._known_parts[key] = program.axes, self._parts(program, bodies)
        return self._known_parts[key]

    def _parts(self, program: Program, bodies: Mapping[TaskKind, Ops]) -> dict[int, _Uses]:
        bare, count = replace(program, bodies={}), len(self.few.layers)
        counts: dict[int, Counter[int]] = {}
        for body, ops in bodies.items():
            layer = 0
            numbers: dict[tuple[int, int], int | None] = {}  # hops around a ring are the same op again and again
            behind: dict[int, list[int]] = {}  # what follows the last gradients of each layer
            for op in ops:
                layer = layer if op.layer is None else op.layer
                like = numbers.get(key := (id(op), layer), -1)
                if like == -1:
                    # An axis of a strategy behind the pipeline is not known yet.
                    is_mine = op.axis is None or op.axis in program.axes
                    is_mine = is_mine and queue_of(op, self.hardware) in (COMPUTE, "")
                    like = numbers[key] = self._number_of(op, layer, bare) if is_mine else None
                    if like is not None:
                        counts.setdefault(like, Counter())
                if like is None:
                    continue
                uses = counts[like]
                uses[_SUMS[body] * count + layer] += 1
                if op.axis is not None and body in _SENT:
                    uses[_SENT[body] * count + layer] += 1
                if op.kind is OpKind.BACKWARD:
                    behind[layer] = []
                else:
                    behind.setdefault(layer, []).append(like)
            for of_layer, followers in behind.items() if body is TaskKind.BACKWARD else ():
                for like in followers:
                    counts[like][_Sum.BEHIND * count + of_layer] += 1
        return {like: dict(uses) for like, uses in counts.items()}

    def _number_of(self, op: Op, layer: int, program: Program) -> int:
        """Return the number of the ops that are alike to one of a layer."""
        (flops, flops_once), (size_bytes, bytes_once) = divmod(op.flops, COUNTED), divmod(op.size_bytes, COUNTED)
        spec = program.step.model.layers[layer]
        sends = program.step.layout.sequence_parallel, program.step.layout.tp > 1, program.step.layout.ep > 1
        what = (work_of(spec), sends, op.layer is None) if op.axis is None else (op.axis, op.beside)
        named = (op.kind, op.dtype, flops, flops_once, size_bytes, bytes_once, what)
        number = self._like.setdefault(named, len(self._like))
        if number == len(self._alike):
            single = op.but(flops=flops + flops_once, size_bytes=size_bytes + bytes_once)
            self._alike.append(_Alike(single, flops, size_bytes, program))
        return number

    def sizes(self, step: StepSpec, recompute: Recompute | None = None) -> tuple[Sizes, ...]:
        """Return the sizes of one layer of each kind, under the recomputation of the step or another one."""
        return self._all_sizes(step, recompute)[0]

    def backward_sizes(self, step: StepSpec, recompute: Recompute | None = None) -> tuple[BackwardSizes, ...]:
        """Return what the backward of one layer of each kind works on, under the recomputation of the step or another one."""
        return self._all_sizes(step, recompute)[1]

    def _all_sizes(
        self, step: StepSpec, recompute: Recompute | None
    ) -> tuple[tuple[Sizes, ...], tuple[BackwardSizes, ...]]:
        layout = step.layout
        key = layout.cuts, recompute or layout.recompute, step.splits_backward
        if key not in self._known_sizes:
            layout = layout.but(recompute=key[1])
            cut, of_sample = self.cut(step), step.but(samples=1, layout=layout)
            may_leave = layout.recompute == "offload"
            saved = [saved_bytes(of_sample, layer, may_leave and layer.is_block) for layer in cut.step.model.layers]
            parts = zip(saved, cut.weights, strict=True)
            self._known_sizes[key] = (
                tuple(
                    Sizes._make((layer.after_forward, layer.in_backward - layer.after_forward, *weight_sizes))
                    for layer, weight_sizes in parts
                ),
                tuple(map(BackwardSizes.of, saved, cut.gradients)),
            )
        return self._known_sizes[key]

    def units(self, step: StepSpec) -> list[Units]:
        """Return the gathered and scattered weights of one layer of each kind."""
        layout = step.layout
        key = (layout.cuts, layout.num_shards)
        if key not in self._known_units:
            local = step.cut_like(self.cut(step).step)
            self._known_units[key] = [units(local, index) for index in range(len(local.model.layers))]
        return self._known_units[key]

    # -- all layers, and runs of them ----------------------------------------------------------------------------------

    def whole_trained(self, step: StepSpec) -> float:
        """Return the number of elements that are trained of all layers together."""
        key = step.layout.cuts
        if key not in self._known_trained:
            weights, trained = self.cut(step).weights, Sizes._fields.index("trained") - Sizes._fields.index("weights")
            self._known_trained[key] = sum(number * weights[kind][trained] for kind, number in self.numbers)
        return self._known_trained[key]

    def _whole(self, kinds: Sequence[Parts]) -> Parts:
        return total([multiple(kinds[kind], number) for kind, number in self.numbers])

    def runs(self, step: StepSpec, virtual_stages: int | None = None) -> Chunks:
        """Divide the layers into runs, balanced by the FLOPs that a rank computes of each layer; of the step's virtual stages or others."""
        flops, layout = self.cut(step).flops, step.layout
        key = flops, layout.pp, (chunks := virtual_stages or layout.virtual_stages)
        if key not in self._known_runs:
            costs = tuple(flops[kind] + 1 for kind in self.kind_of)
            where = layout.pp * chunks, layout.tp > 1
            runs = balance_chunks(costs, starts(self.model, *where), where[0], elements_sent_before(self.model, *where))
            kinds = tuple(tuple(self.kind_of[layer] for layer in run) for run in runs)
            known = {run: tuple(sorted(Counter(run).items())) for run in set(kinds)}
            counts = tuple(known[run] for run in kinds)
            last = layout.pp - 1
            unlike = {(counts[stage :: layout.pp], stage == last): stage for stage in reversed(range(layout.pp))}
            latest = {(counts[stage :: layout.pp], stage == last): stage for stage in range(layout.pp)}
            tails = {run: tuple(self._tail(run)) for run in known}
            stages, firsts = dict[object, tuple[_Counts, _Counts]](), Counter[int]()
            for stage in range(layout.pp):
                layers = Counter[int]()
                for run in counts[stage :: layout.pp]:
                    layers.update(dict(run))
                stages[tuple(layers.items())] = tuple(layers.items()), tuple(firsts.items())
                firsts.update(dict(counts[stage]))
            later = tuple(stage for stage in latest.values() if stage not in unlike.values())
            of_runs = counts, kinds, tuple(tails[run] for run in kinds)
            self._known_runs[key] = Chunks(*of_runs, tuple(stages.values()), tuple(unlike.values()), later)
        return self._known_runs[key]

    def _tail(self, run: Sequence[int]) -> Iterator[int]:
        for kind in reversed(run):
            yield kind
            if self.few.layers[kind].is_block:
                return

    def run_seconds(self, step: StepSpec) -> tuple[Seconds, ...]:
        """Add up the layers of each run."""
        key = (*self.key(step), step.layout.pp, step.layout.virtual_stages)
        if key not in self._known_run_seconds:
            self._known_run_seconds[key] = self._of_runs(step, self.seconds(step))
        return self._known_run_seconds[key]

    def run_sizes(self, step: StepSpec) -> tuple[Sizes, ...]:
        """Add up the layers of each run."""
        layout = step.layout
        key = (layout.cuts, layout.recompute, layout.pp, layout.virtual_stages, step.splits_backward)
        if key not in self._known_run_sizes:
            self._known_run_sizes[key] = self._of_runs(step, self.sizes(step))
        return self._known_run_sizes[key]

    def _of_runs(self, step: StepSpec, kinds: Sequence[Parts]) -> tuple[Parts, ...]:
        counts = self.runs(step).counts
        added = {run: total([multiple(kinds[kind], number) for kind, number in run]) for run in set(counts)}
        return tuple(added[run] for run in counts)

    def stage_seconds(self, step: StepSpec, stage: int) -> Seconds:
        """Add up the layers of a stage."""
        return total(self.run_seconds(step)[stage :: step.layout.pp])

    def stage_sizes(self, step: StepSpec, stage: int) -> Sizes:
        """Add up the layers of a stage."""
        return total(self.run_sizes(step)[stage :: step.layout.pp])

    def stage_units(self, step: StepSpec, stage: int) -> Units:
        """Add up what of a stage is gathered and scattered."""
        layout = step.layout
        key = (layout.cuts, layout.num_shards, layout.pp, layout.virtual_stages, stage)
        if key not in self._known_stage_units:
            kinds, runs = self.units(step), self.runs(step).counts[stage :: layout.pp]
            self._known_stage_units[key] = total(
                [multiple(kinds[kind], number) for run in runs for kind, number in run]
            )
        return self._known_stage_units[key]

    def sent_bytes(self, step: StepSpec) -> int:
        """Return the least number of bytes of a micro-batch that are sent between two stages."""
        return self.cut(step).sent * step.microbatch_samples * BYTES_OF[step.compute_dtype]
