"""Lower bounds of the memory of layouts: bytes of a rank, in closed form, without building their programs.

A bound never exceeds what `memory/memory_use.py` finds. It is taken first for all ways to split the data axis by the first stage, which
keeps most samples, then by every stage, then for each of these by its states alone, then for each layout. It adds up the states, each
divided by the axes that shard it; the activations of as many micro-batches as the schedule has in flight, with what stages have sent each
other of them, and what one backward computes again and works on; and under zero=2 the gathered weights. What a single layer gathers and
reduces in its backward is left out. Gradients that are in no bucket may be allocated only when the activations are freed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from samestep.layout import Layout, Recompute
from samestep.memory.memory_use import master_copy_bytes
from samestep.program.ops import BYTES_OF
from samestep.program.program import is_named
from samestep.program.step import StepSpec
from samestep.wings.plan.bounds.body_seconds import (
    InFlight,
    adds_up_all,
    in_flight,
    in_flight_between,
    larger_twin,
    smallest,
)
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.layer_kinds import Sizes, Units, least_updated, multiple, total


class Need(NamedTuple):
    """Least bytes of the stage that needs most."""

    states: float
    activations: float
    gathered: float

    gradients: float
    """The part of `states` that the backward allocates, so that it never coexists with all activations."""

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return max(self.states, self.states - self.gradients + self.activations + self.gathered)


class StageHeld(NamedTuple):
    """Sizes of a stage that depend neither on how the data axis is split nor on the ZeRO stage."""

    sizes: Sizes
    activations: float
    """Least bytes of activations at its peak."""
    adds_up: bool
    """Whether it has gradients of all its chunks at a time, before the last micro-batch's are reduced."""


def _adds_up_all(step: StepSpec, stage: int) -> bool:
    """Return whether a stage has gradients of all its chunks at a time, before the last micro-batch's are reduced."""
    words = step.layout
    return adds_up_all(words.schedule, stage, words.pp, step.num_microbatches, words.virtual_stages)


def _sent_bytes(sent: Sequence[int], flight: InFlight) -> int:
    """Return the bytes of a sample that stages have sent each other, given those of each chunk: none of micro-batches of which gradients of
    weights alone are left."""
    number: int = sum(map(operator.mul, flight.counts, sent))
    return max(0, number - flight.deferred * max(sent))


class _FirstStage(NamedTuple):
    """Least bytes of the first stage of a pipeline in any split of the data axis; those of a sample for each of its runs of layers."""

    states: float
    gradients: float
    """The part of `states` that the backward allocates."""
    activations: tuple[float, ...]
    works: tuple[float, ...]
    """Bytes with which the backward of a run begins."""
    sent: tuple[int, ...]
    """Bytes that a run has sent and received."""


class Needs:
    """Lower bounds of the memory of layouts of one model, job and machine."""

    def __init__(self, prices: Prices, states_per_param: int) -> None:
        self.prices, self.states_per_param = prices, states_per_param
        self._known_firsts: dict[tuple[object, ...], _FirstStage] = {}

    def _on_host(self, step: StepSpec) -> float:
        """Return at least the bytes of weights that may be on the host: no bound counts them."""
        if not step.offload:
            return 0.0
        named = (param for param in self.prices.model.params if is_named(step, param))
        return float(sum(param.numel for param in named) * BYTES_OF[step.master_dtype])

    def first_stage_bytes(self, step: StepSpec, schedule: Layout, recompute: Recompute) -> float:
        """Bound the memory, in bytes, of all layouts that differ only in the data axis by their first stage, which keeps most samples.

        Args:
            step: one of them with an unsplit data axis, under any schedule and recomputation.
            schedule: a layout with their schedule and virtual stages.
            recompute: what they compute again.
        """
        step, layout, chunks = smallest(step), step.layout, schedule.virtual_stages
        flight = in_flight(schedule.schedule, 0, layout.pp, step.num_microbatches, chunks)
        key = layout.cuts, layout.pp, layout.dp, layout.offload, chunks, recompute, step.splits_backward
        if key not in self._known_firsts:
            self._known_firsts[key] = self._first_stage(step, chunks, recompute)
        first = self._known_firsts[key]
        activations: float = sum(map(operator.mul, flight.counts, first.activations)) + _sent_bytes(first.sent, flight)
        if flight.next_chunk is not None:
            activations += first.works[flight.next_chunk]
        needed = max(first.states, first.states - first.gradients + step.microbatch_samples * activations)
        return max(0.0, needed - self._on_host(step))

    def _first_stage(self, step: StepSpec, virtual_stages: int, recompute: Recompute) -> _FirstStage:
        runs, pp = self.prices.runs(step, virtual_stages), step.layout.pp
        kinds, works = self.prices.sizes(step, recompute), self.prices.backward_sizes(step, recompute)
        lasts = [run[-1] for run in runs.kinds[::pp]]
        sizes = total([multiple(kinds[kind], number) for run in runs.counts[::pp] for kind, number in run])
        states, gradients = self._least_states(step, sizes, least_updated(step, sizes))
        return _FirstStage(
            states,
            gradients,
            tuple(sum(number * kinds[kind].activations for kind, number in run) for run in runs.counts[::pp]),
            tuple(max(kinds[last].again + works[last].working, works[last].loss) for last in lasts),
            self._sent(step, 0, virtual_stages),
        )

    def _sent(self, step: StepSpec, stage: int, virtual_stages: int) -> tuple[int, ...]:
        """Return the least bytes of a sample that each run of layers of a stage has sent and keeps until the gradient has come; in mixed
        precision also those that it was sent, until that gradient has gone back."""
        pp = step.layout.pp
        if pp == 1:
            return (0,)
        sent, last = self.prices.sent_bytes(step) // step.microbatch_samples, pp * virtual_stages - 1
        return tuple(sent * ((run < last) + (run > 0 and step.is_mixed)) for run in range(stage, last + 1, pp))

    def stages(self, step: StepSpec) -> tuple[StageHeld, ...]:
        """Return the sizes of each stage that is unlike the others, in any split of the data axis."""
        step = smallest(step)
        return tuple(
            StageHeld(self.prices.stage_sizes(step, stage), self._activations(step, stage), _adds_up_all(step, stage))
            for stage in self._unlike(step)
        )

    def _unlike(self, step: StepSpec) -> tuple[int, ...]:
        """Return the stages of which one holds most."""
        runs = self.prices.runs(step)
        return (*runs.unlike, *runs.latest) if step.splits_backward else runs.unlike

    def stages_bytes(self, step: StepSpec, stages: Sequence[StageHeld]) -> float:
        """Bound the memory, in bytes, of all layouts whose stages have these sizes."""
        needed = 0.0
        for sizes, activations, _ in stages:
            states, gradients = self._least_states(step, sizes, least_updated(step, sizes))
            needed = max(needed, states, states - gradients + activations)
        return max(0.0, needed - self._on_host(step))

    def split_need(self, step: StepSpec, stages: Sequence[StageHeld], split: Layout) -> Need:
        """Bound the memory of a split of the data axis by activations and states, of which pieces of experts alone are padded.

        Args:
            step: the step of its group, under zero=0.
            stages: the sizes of the group's stages.
            split: the layout.
        """
        every = (self.split_needs(step, stage, split) for stage in stages)
        return max(itertools.chain.from_iterable(every), key=lambda need: need.total)

    def split_needs(self, step: StepSpec, stage: StageHeld, split: Layout) -> tuple[Need, ...]:
        """Bound the memory of a stage in a split of the data axis, at each moment that may be its fullest."""
        sizes, activations, adds_up = stage
        master, on_host = BYTES_OF[step.master_dtype], self._on_host(step)
        shards, experts = split.num_shards, max(1, split.innermost_data_ranks // split.ep)
        if split.zero < 2:
            states = self._whole_states(step, sizes, split.zero, shards, experts)
            late = sizes.trained * master if split.dp_cp_size == 1 else 0.0  # in buckets they are always there
            return (Need(states - on_host, activations, 0.0, late),)
        padding = self.prices.expert_padding(step, experts)
        updated = (sizes.trained - sizes.expert_trained) / shards + sizes.expert_trained * padding / experts
        states, gradients = self._least_states(step, sizes, updated)
        of_own, of_experts = float(shards > 1), padding * (experts > 1)
        gathered = sizes.in_units * of_own + sizes.expert_in_units * of_experts if split.zero == 2 else 0.0
        need = Need(states - on_host, activations, gathered, gradients)
        if split.accumulate != "full" or not adds_up:
            return (need,)
        elements = sizes.units_trained * of_own + sizes.expert_units_trained * of_experts
        return need, Need(states - on_host - gradients + elements * master, 0.0, gathered, 0.0)

    def _least_states(self, step: StepSpec, sizes: Sizes, updated: float) -> tuple[float, float]:
        """Bytes of weights, gradients and states, cut over all data ranks, and of gradients alone; on one rank weights
        may be of two bytes."""
        master = BYTES_OF[step.master_dtype]
        if step.layout.offload:
            return min(2 * updated * master, sizes.weights + sizes.trained * master), sizes.trained * master
        return (
            2 * master + step.states.least_number(self.states_per_param) * step.states.least_bytes
        ) * updated, updated * master

    def need(self, step: StepSpec) -> Need:
        """Bound the memory of a layout, at the stage that needs most; among equal stages that is the first."""
        step = smallest(step)
        return max((self._need_of(step, stage) for stage in self._unlike(step)), key=lambda need: need.total)

    def _need_of(self, step: StepSpec, stage: int) -> Need:
        sizes, is_met_again = self.prices.stage_sizes(step, stage), self._is_met_again(step, stage)
        units = self.prices.stage_units(step, stage) if step.zero >= 2 else Units()
        always = (units.all_gathered if step.zero == 2 else 0.0) + (units.root if step.layout.pp == 1 else 0.0)
        states = self._states(step, sizes, units) + self.prices.model.buffer_bytes - self._on_host(step)
        late = 0.0 if is_met_again else self._late_gradients(step, sizes, units)
        need = Need(states, self._activations(step, stage), always, late)
        if step.zero >= 2 and step.layout.accumulate == "full" and _adds_up_all(step, stage):
            return max(need, self._accumulated(step, stage, states, units, always), key=lambda need: need.total)
        return need

    def _accumulated(self, step: StepSpec, stage: int, states: float, units: Units, always: float) -> Need:
        """Bound a stage that keeps whole gradients until the last micro-batch's backward, and only then shards."""
        layout, sizes = step.layout, self.prices.run_sizes(step)
        states += (units.all_scattered - units.local_trained) * BYTES_OF[step.master_dtype]
        counts = in_flight_between(layout.schedule, stage, layout.pp, step.num_microbatches, layout.virtual_stages)
        activations = sum(count * sizes[chunk * layout.pp + stage].activations for chunk, count in enumerate(counts))
        activations += sum(map(operator.mul, counts, self._sent(step, stage, layout.virtual_stages)))
        if any(counts):  # the backward of one of the chunks follows
            kinds, works = self.prices.sizes(step), self.prices.backward_sizes(step)
            lasts = [run[-1] for run in self.prices.runs(step).kinds[stage :: layout.pp]]
            activations += min(kinds[last].again + works[last].working for last in lasts)
        return Need(states, activations * step.microbatch_samples, always, 0.0)

    def _is_met_again(self, step: StepSpec, stage: int) -> bool:
        """Return whether a stage holds as much once more after a backward whose gradients stay until they are reduced."""
        layout = step.layout
        flight = in_flight(layout.schedule, stage, layout.pp, step.num_microbatches, layout.virtual_stages)
        _, num_larger = larger_twin(step)
        is_there = flight.again is not None and (flight.latest >= num_larger or flight.again < num_larger)
        return is_there and layout.accumulate == "sharded"

    def _late_gradients(self, step: StepSpec, sizes: Sizes, units: Units) -> float:
        """Bytes of gradients that may come only when the activations of a step's first backwards are gone."""
        if step.zero >= 2:
            return units.local_trained * BYTES_OF[step.master_dtype]
        return sizes.trained * BYTES_OF[step.master_dtype] if step.layout.dp_cp_size == 1 else 0.0

    def _activations(self, step: StepSpec, stage: int) -> float:
        """Bytes of activations at the backward at which a stage holds most; gathered weights and gradients of its layer come on top."""
        layout = step.layout
        flight = in_flight(layout.schedule, stage, layout.pp, step.num_microbatches, layout.virtual_stages)
        larger, rest = larger_twin(step)
        step = larger if flight.latest < rest else step
        sizes, samples = self.prices.run_sizes(step), step.microbatch_samples
        activations = sum(
            count * sizes[chunk * layout.pp + stage].activations for chunk, count in enumerate(flight.counts)
        )
        activations = samples * (activations + _sent_bytes(self._sent(step, stage, layout.virtual_stages), flight))
        if flight.next_chunk is None:
            return activations
        run = flight.next_chunk * layout.pp + stage
        runs, kinds, works = self.prices.runs(step), self.prices.sizes(step), self.prices.backward_sizes(step)
        if step.splits_backward:  # nothing is freed before the gradients of weights, what was computed again included
            first = works[runs.kinds[run][0]]
            most = max(samples * first.working, samples * first.boundaries + first.gradient)
            return activations + samples * sizes[run].again * (flight.deferred + 1) + most
        last, freed = runs.kinds[run][-1], 0.0
        # Without stages the last layer's weights are there since its forward.
        gathered = self.prices.units(step)[last].all_gathered if step.zero == 3 and layout.pp == 1 else 0.0
        fullest = samples * works[last].loss + works[last].loss_fixed + gathered
        for kind in runs.tails[run]:
            work = works[kind]
            most = max(samples * work.working, samples * work.boundaries + work.gradient)
            fullest = max(fullest, samples * kinds[kind].again - freed + most)
            freed += samples * kinds[kind].activations
        return activations + fullest

    def _states(self, step: StepSpec, sizes: Sizes, units: Units) -> float:
        if step.zero >= 2:
            master, states = BYTES_OF[step.master_dtype], step.states.least_number(self.states_per_param)
            state_bytes = 0 if step.layout.offload else states * step.states.least_bytes
            return units.local + units.local_trained * (master + state_bytes)
        return self._whole_states(step, sizes, step.zero, step.layout.num_shards, step.ranks.size("dp_expert"))

    def _whole_states(self, step: StepSpec, sizes: Sizes, zero: int, shards: int, experts: int) -> float:
        """Bytes of whole weights and gradients, and of states that are shared by the ranks of a shard under zero=1."""
        each = step.states.least_number(self.states_per_param) * step.states.least_bytes
        master, copy = BYTES_OF[step.master_dtype], master_copy_bytes(step)
        state_bytes = sizes.trained * each + sizes.apart * copy
        if zero == 1:
            of_experts = sizes.expert_trained * each + sizes.expert_apart * copy
            state_bytes = (state_bytes - of_experts) / shards + of_experts / experts
            state_bytes -= sizes.gaps * max(0, each + copy - master - BYTES_OF[step.compute_dtype])
        return sizes.weights + sizes.trained * master + (0.0 if step.layout.offload else state_bytes)
