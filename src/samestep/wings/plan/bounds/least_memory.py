"""Lower bounds of the memory of layouts: bytes of a rank, in closed form, without building their programs.

A bound never exceeds what `memory/memory_use.py` finds. It is taken first for all ways to split the data axis by the first stage, which
keeps most samples, then by every stage, then for each of these by its states alone, then for each layout. It adds up the states, each
divided by the axes that shard it; the activations of as many micro-batches as the schedule has in flight, with what stages have sent each
other of them, and what one backward computes again and works on; and the gathered weights and gradients of one layer with those reduced
just before, or under zero=2 all weights. Gradients that are in no bucket may be allocated only when the activations are freed.
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
from samestep.wings.plan.bounds.layer_kinds import BackwardSizes, Sizes, Units, least_updated, multiple, total


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


class _AtBackward(NamedTuple):
    """Bytes of a layer's units while it goes backward."""

    gathered: float = 0.0
    """Its weights, and prefetched ones."""
    gradients: float = 0.0
    """Its gradients, all of which exist at its end."""
    sent: float = 0.0
    """Gradients of its unit that is reduced last, which are held until the next one is reduced."""


def _at_backward(
    sizes: Sizes, works: BackwardSizes, units: _AtBackward | None, samples: int, freed: float, sent: float
) -> list[tuple[float, float]]:
    """Return the bytes of activations and of units at the moments of a layer's backward that may be its fullest: where it works on most,
    where the gradient of its largest weight is there, and at its end.

    Gradients of weights that are in no unit, or in one that is not known, come one after the other.
    """
    again = samples * sizes.again - freed
    if units is None:
        most = max(samples * works.working, samples * works.boundaries + works.gradient)
        return [(again + most, 0.0)]
    gathered = units.gathered + sent
    return [
        (again + samples * works.working, gathered + works.gradient),
        (samples * (works.left - sizes.activations) - freed, gathered + units.gradients),
    ]


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
            StageHeld(
                self.prices.stage_sizes(step, stage),
                self._activations(step, stage, None)[0],
                _adds_up_all(step, stage),
            )
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
        of_units = self.prices.units(step) if step.zero >= 2 else None
        units = self.prices.stage_units(step, stage) if of_units else Units()
        # The micro-batch before has left the gradients that it reduced last.
        sent = self.prices.reduced_last_bytes(step) if of_units and is_met_again and step.layout.pp == 1 else 0.0
        activations, unit = self._activations(step, stage, of_units, sent)
        always = (units.all_gathered if step.zero == 2 else 0.0) + (units.root if step.layout.pp == 1 else 0.0)
        states = self._states(step, sizes, units) + self.prices.model.buffer_bytes - self._on_host(step)
        late = 0.0 if is_met_again else self._late_gradients(step, sizes, units)
        need = Need(states, activations, unit + always, late)
        if of_units and step.layout.accumulate == "full" and _adds_up_all(step, stage):
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

    def _activations(
        self, step: StepSpec, stage: int, of_units: Sequence[Units] | None, sent: float = 0.0
    ) -> tuple[float, float]:
        """Bytes of activations, and of units, at the backward at which a stage holds most.

        Args:
            step: the step.
            stage: its number.
            of_units: the units of a layer of each kind; None where it has none, or they are not known.
            sent: bytes of gradients that were reduced last before it.
        """
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
            return activations, 0.0
        run = flight.next_chunk * layout.pp + stage
        runs, kinds, works = self.prices.runs(step), self.prices.sizes(step), self.prices.backward_sizes(step)
        if step.splits_backward:  # nothing is freed before the gradients of weights, what was computed again included
            first = works[runs.kinds[run][0]]
            most = max(samples * first.working, samples * first.boundaries + first.gradient)
            return activations + samples * sizes[run].again * (flight.deferred + 1) + most, 0.0
        fullest = self._at_loss(step, of_units, runs.kinds[run][-1], sent)
        freed = 0.0
        for kind in runs.tails[run]:
            units = self._units_at(step, of_units, kind, runs.counts[run], 2)
            fullest = max(fullest, *_at_backward(kinds[kind], works[kind], units, samples, freed, sent), key=sum)
            freed += samples * kinds[kind].activations
            sent = units.sent if units and units.sent else sent
        blocks = self._blocks(runs.counts[run]) if of_units else []
        if sum(number for _, number in blocks) > 1:
            # The block before the last one is any of them; the last one's gradients are kept as long as its backward.
            each = []
            for kind, _ in blocks:
                units = self._units_at(step, of_units, kind, runs.counts[run], 3)
                each.append(max(_at_backward(kinds[kind], works[kind], units, samples, freed, sent), key=sum))
            fullest = max(fullest, min(each, key=sum), key=sum)
        return activations + fullest[0], fullest[1]

    def _at_loss(self, step: StepSpec, of_units: Sequence[Units] | None, kind: int, sent: float) -> tuple[float, float]:
        """Bytes of activations and of units at the backward of the loss that may follow a run's last layer, of this kind.

        Without stages the last layer's weights are there since its forward.
        """
        works = self.prices.backward_sizes(step)[kind]
        gathered = of_units[kind].all_gathered if of_units and step.zero == 3 and step.layout.pp == 1 else 0.0
        return step.microbatch_samples * works.loss + works.loss_fixed, gathered + sent

    def _units_at(
        self, step: StepSpec, of_units: Sequence[Units] | None, kind: int, run: tuple[tuple[int, int], ...], blocks: int
    ) -> _AtBackward | None:
        """Bytes of a layer's units in its backward; of a block that has another to be gathered ahead of its `blocks`."""
        if of_units is None:
            return None
        unit, layer, master = of_units[kind], self.prices.few.layers[kind], BYTES_OF[step.master_dtype]
        parts = [part for part in (unit.scattered, unit.expert_scattered) if part > 0]
        if step.zero == 2 or not layer.backward_reads_weights or not parts:
            return _AtBackward(0.0, unit.all_scattered * master, min(parts, default=0.0) * master)
        ahead = self._ahead(of_units, run, blocks) if layer.is_block else 0.0
        return _AtBackward(unit.all_gathered + ahead, unit.all_scattered * master, min(parts) * master)

    def _ahead(self, of_units: Sequence[Units], run: tuple[tuple[int, int], ...], least: int) -> float:
        """Bytes of the block that is gathered while another one goes backward, where there are so many; of its experts it
        may be a part."""
        blocks = self._blocks(run)
        if sum(number for _, number in blocks) < least:
            return 0.0
        trained = all(
            of_units[kind].scattered and self.prices.few.layers[kind].backward_reads_weights for kind, _ in blocks
        )
        return min(of_units[kind].gathered for kind, _ in blocks) if trained else 0.0

    def _blocks(self, run: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
        """Kinds of the blocks of a run, and how many there are of each."""
        return [(kind, number) for kind, number in run if self.prices.few.layers[kind].is_block]

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
