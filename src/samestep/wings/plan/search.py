"""The verb `plan`: of all layouts of a number of devices, those that fit, the fastest of them, and why the others fell out.

Three tiers, so that millions of layouts take a few seconds:

    bounds      least step time (`wings/plan/bounds/step_time.py`) and least memory (`wings/plan/bounds/least_memory.py`), both in closed form:
                first the time of all layouts with these degrees (of a cut sequence, of one that is cut less), then for each micro-batch,
                then for each schedule, then for each choice of chunks and recomputation, then for each split of the data axis;
                a time is that of the quickest recomputation of which the memory is not known to be too large;
                at last that of the pipeline's clock, body by body (`wings/plan/bounds/body_seconds.py`)
    rules       the strategies' own refusals, once for each schedule and kind of split, and again for each layout before it is played
    the clock   op by op, in the order of the bounds, until the least bound left is above the last of the best

A part is bounded, and its rules are asked, only once the bound of the whole is the least that is left. What stays closed is counted, and
listed only where somebody asks, as layouts that are slower; of some the rules would have refused a part.

So the best layouts are found, unless the search ends after `MOST_PLAYED` played layouts; then it says so. Every layout that is thrown out
keeps its reason: `needs 93 GiB of 80`, `tp=16 leaves the node`. `wings/plan/ranking.py` prints the result.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from samestep import wings
from samestep.enumeration import candidates
from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout, Recompute
from samestep.memory.memory_use import memory_of, memory_summary
from samestep.models.spec import ModelSpec
from samestep.output.text import gib
from samestep.program.step import StepSpec
from samestep.strategies import ProgramBuilder, refusal_of
from samestep.wings.plan import open_groups
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.least_memory import Need, Needs, StageHeld
from samestep.wings.plan.bounds.step_time import Bounds
from samestep.wings.plan.open_groups import CandidateGroup, Fallen, Groups, Split, ThinnedList, WholeGroup
from samestep.wings.plan.other_numerics import Saving
from samestep.wings.plan.simulation.simulate import Prediction, labels, predict_programs

MOST_PLAYED = 200
"""Layouts that the clock plays at most."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layouts of a number of devices, best first, and the rejected ones."""

    best: tuple[Prediction, ...]
    fallen: tuple[Fallen, ...]
    """Rejected layouts, in groups."""
    played: int
    """Layouts that the simulator has timed."""
    seconds: float
    devices: int
    hardware: Hardware
    labels: Mapping[str, str]
    """The origins of the numbers, by subject."""
    model: ModelSpec
    job: Job
    states_per_param: int
    """Tensors that the optimizer keeps of each weight."""
    nearest: str = ""
    """The layout that comes nearest to fitting, as text; empty if one fits."""
    safe: Prediction | None = None
    """The fastest of the layouts that are likely to fit; None if there was no search for it, or if the best layout is the likeliest."""
    other_numerics: tuple[Saving, ...] = ()
    """Savings of other numerics in the best layout; only the job chooses them."""

    def _repr_html_(self) -> str | None:
        return wings.in_notebook("plan_page", self)

    @cached_property
    def considered(self) -> int:
        """The number of layouts that were looked at, by themselves or in a group."""
        return len(self.best) + self.counts.total()

    @cached_property
    def counts(self) -> Counter[str]:
        """The numbers of layouts that fell out, by rule."""
        counts: Counter[str] = Counter()
        for group in self.fallen:
            counts[group.rule] += group.num_layouts
        return counts

    @cached_property
    def rejections(self) -> tuple[open_groups.Rejection, ...]:
        """Every layout that fell out."""
        return tuple(
            open_groups.Rejection(layout, row.rule, row.reason) for row in self.fallen for layout in row.layouts()
        )


class _Part(NamedTuple):
    """Layouts that were bounded as a whole, in the search's queue."""

    bound_s: float
    """No layout among them is quicker."""
    number: int
    """Tie-break: parts are looked at in the order in which they came."""
    groups: Groups
    look: Callable[[float], None]
    """Bounds their parts, or plays the layout, given `bound_s`."""


class _Search:
    """A best-first search for the fastest layouts of so many devices that fit."""

    def __init__(
        self, model: ModelSpec, job: Job, hardware: Hardware, devices: int, top: int, states_per_param: int
    ) -> None:
        self.model, self.job, self.hardware, self.top = model, job, hardware, top
        self.devices, self.states_per_param = devices, states_per_param
        self.prices = Prices(model, job, hardware.slowest_of(devices))
        self.bounds, self.needs = Bounds(self.prices), Needs(self.prices, states_per_param)
        self.builder = ProgramBuilder(model, job, job.run.ranks_per_node or hardware.devices_per_node)
        self._room_bytes = hardware.room_bytes - hardware.reserved_bytes
        self.thinned = ThinnedList(model, job, hardware)
        self.rules = open_groups.ScheduleRules(self.builder, self.thinned)
        self._recomputations = candidates.recomputations(model)
        self.best: list[Prediction] = []
        self.fallen: list[Fallen] = []
        self._too_large: dict[tuple[Layout, object], tuple[str, float]] = {}
        """The reason and the bytes of layouts of which a stage without a head does not fit, by their other words."""
        self._whole_losses: dict[tuple[Layout, bool], float] = {}
        """Seconds of a step of layouts that fit without chunks of the loss, by whether they cut it by vocabulary."""
        self.played = 0
        self._open: list[_Part] = []
        self._number = itertools.count()

    def run(self, *, offload: bool = False) -> None:
        """Search every layout."""
        for degrees in candidates.degrees(self.devices, self.model, thin=self.hardware):
            if degrees.tp > self.hardware.devices_per_node:
                reason = f"tp={degrees.tp} leaves the node of {self.hardware.devices_per_node} devices"
                self._throw_out(degrees, "refused", reason)
            else:
                self._open_degrees(degrees.but(offload=offload))
        while self._open and self._open[0].bound_s < self._limit_s() and self.played < MOST_PLAYED:
            part = heapq.heappop(self._open)
            part.look(part.bound_s)
        self._close()

    def _put(self, bound_s: float, groups: Groups, look: Callable[[float], None]) -> None:
        heapq.heappush(self._open, _Part(bound_s, next(self._number), groups, look))

    def _open_degrees(self, degrees: Layout) -> None:
        """Bound degrees that some split of the data axis may have."""
        refused: list[tuple[Layout, LayoutError]] = []
        for plain in candidates.splits(degrees):
            error = refusal_of(self.builder.step(plain))
            if error is None:
                less_cut = candidates.less_cut(degrees, self.model, self.hardware.devices_per_node)
                self._open_cut(WholeGroup(self.thinned, degrees), less_cut, 0.0)
                return
            refused.append((plain, error))
        for plain, error in refused:
            self._throw_out(plain, "refused", str(error))

    def _open_cut(self, group: WholeGroup, less_cut: Sequence[Layout], bound_s: float) -> None:
        """Bound all layouts with these degrees by the next ones that cut a sequence no more than they do, the last of which they are."""
        by, *better = less_cut
        bound_s = max(bound_s, self.bounds.degrees_s(group.degrees, self._in_chunks, by))
        look = (
            functools.partial(self._open_cut, group, better) if better else functools.partial(self._open_sizes, group)
        )
        self._put(bound_s, (group,), look)

    def _in_chunks(self, sized: Layout) -> list[StepSpec]:
        """Return the step with each choice of chunks, the first with none."""
        return [self.builder.step(sized.but(**words)) for words in candidates.chunk_words(sized, self.model)]

    def _open_sizes(self, group: WholeGroup, bound_s: float) -> None:
        """Bound the layouts with these degrees and each micro-batch."""
        for sized in self.thinned.sizes(group.degrees):
            self._open_size(group._replace(sized=sized), sized, bound_s)

    def _open_size(self, group: WholeGroup, sized: Layout, bound_s: float) -> None:
        """Bound all layouts with these degrees and this micro-batch by the quickest recomputation that may leave room."""
        schedules = self.rules.schedules(group.degrees)
        if recompute := self._quickest_with_room(sized, schedules, self._recomputations, (group,)):
            sized = sized.but(recompute=recompute)
            least_s = self.bounds.least_s(self._in_chunks(sized), schedules)
            self._put(max(bound_s, least_s), (group,), functools.partial(self._open_schedules, group, sized))

    def _quickest_with_room(
        self, sized: Layout, schedules: Sequence[Layout], recomputations: Sequence[Recompute], groups: Groups
    ) -> Recompute | None:
        """Return the first recomputation with which the first stage may have room; if there is none, the groups fall out."""
        words = candidates.chunk_words(sized, self.model)
        # Chunks of the loss do not change a first stage without the head.
        steps = [self.builder.step(sized.but(**cut)) for cut in words if sized.pp == 1 or cut["loss_chunk"] is None]
        least_bytes = float("inf")
        for recompute, step, schedule in itertools.product(recomputations, steps, schedules):
            needed_bytes = self.needs.first_stage_bytes(step, schedule, recompute)
            if needed_bytes <= self._room_bytes:
                return recompute
            least_bytes = min(least_bytes, needed_bytes)
        self._throw_out_large(groups, sized, least_bytes)
        return None

    def _open_schedules(self, group: WholeGroup, sized: Layout, bound_s: float) -> None:
        """Bound the layouts of each schedule that the rules allow by the quickest recomputation that may leave room under it; those that
        the rules refuse fall out."""
        legal = self.rules.schedules(group.degrees)
        splits = self.thinned.splits(group.degrees, sized.microbatch)
        slower = self._recomputations[self._recomputations.index(sized.recompute) :]
        for schedule, words in itertools.groupby(self.thinned.variants(sized), open_groups.schedule_of):
            family = group.degrees.but(**schedule._asdict())
            groups = tuple(CandidateGroup(sized, word, splits) for word in words)
            if family not in legal:
                self._allowed(family, groups)
                continue
            family_of_size = family.but(microbatch=sized.microbatch)
            if recompute := self._quickest_with_room(family_of_size, (family,), slower, groups):
                least_s = self.bounds.schedule_s(self._in_chunks(family_of_size.but(recompute=recompute)))
                self._put(max(bound_s, least_s), groups, functools.partial(self._open_schedule, family, groups))

    def _open_schedule(self, family: Layout, groups: Sequence[CandidateGroup], bound_s: float) -> None:
        """Bound the layouts of a schedule with each choice of chunks."""
        for _chunk, alike in itertools.groupby(self._allowed(family, groups), open_groups.chunk_of):
            self._open_chain(tuple(alike), bound_s)

    def _allowed(self, family: Layout, groups: Sequence[CandidateGroup]) -> tuple[CandidateGroup, ...]:
        """Return the groups of a schedule without the splits of the data axis that the rules refuse, which fall out."""
        of_reason = self.rules.by_reason(family, groups[0].splits)
        legal = of_reason.pop(None, ())
        for reason, some in of_reason.items():
            refused = tuple(group._replace(splits=some) for group in groups)
            self.fallen.append(Fallen(refused, "refused", str(reason)))
        return tuple(group._replace(splits=legal) for group in groups) if legal else ()

    def _throw_out(self, layout: Layout, rule: str, reason: str, needed_bytes: float = 0.0) -> None:
        self.fallen.append(Fallen((CandidateGroup.of(layout),), rule, reason, needed_bytes))

    def _limit_s(self) -> float:
        """Return the seconds of a step that a layout has to stay below."""
        return self.best[-1].step_s if len(self.best) == self.top else float("inf")

    def _open_chain(self, groups: tuple[CandidateGroup, ...], bound_s: float) -> None:
        """Bound groups that differ only in what is computed again, the quickest first, by the first of them that may have room."""
        for number, group in enumerate(groups):
            step = self.builder.step(group.base)
            stages = self.needs.stages(step)
            if (needed := self.needs.stages_bytes(step, stages)) > self._room_bytes:
                self._throw_out_large((group,), group.sized, needed)
                continue
            chain = groups[number:]
            look = functools.partial(self._open_splits, chain, step, stages)
            self._put(max(bound_s, self.bounds.group_s(step)), chain, look)
            return

    def _throw_out_large(self, groups: Groups, sized: Layout, needed: float) -> None:
        """Throw out layouts of which each needs so many bytes or more, without those of the hardware."""
        needed += self.hardware.reserved_bytes
        reason = f"needs at least {gib(needed)} GiB of {gib(self.hardware.room_bytes)}"
        self.fallen.append(Fallen(groups, "memory", f"{reason}{open_groups.whole_batch(sized, self.job)}", needed))

    def _open_splits(
        self, chain: tuple[CandidateGroup, ...], step: StepSpec, stages: Sequence[StageHeld], bound_s: float
    ) -> None:
        """Bound each layout of a chain's first group whose states leave room, first by what it gathers, and the rest of the chain."""
        group, too_large = chain[0], list[tuple[Split, Need]]()
        for split, layout in zip(group.splits, group.layouts(), strict=True):
            need = self.needs.split_need(step, stages, layout)
            if need.total > self._room_bytes:
                too_large.append((split, need))
            elif (sent_s := self.bounds.sharded_s(self.builder.step(layout))) <= bound_s:
                self._open_layout(layout, bound_s)
            else:
                self._put(sent_s, (CandidateGroup.of(layout),), functools.partial(self._open_layout, layout))
        if too_large:
            least = min((need for _, need in too_large), key=lambda need: need.total)
            self._too_large_by(least, group._replace(splits=tuple(split for split, _ in too_large)))
        self._open_chain(chain[1:], bound_s)

    def _open_layout(self, layout: Layout, bound_s: float) -> None:
        step = self.builder.step(layout)
        if (need := self.needs.need(step)).total > self._room_bytes:
            self._too_large_by(need, CandidateGroup.of(layout))
            return
        if error := refusal_of(step):
            self._throw_out(layout, "refused", str(error))
            return
        self._put_layout(max(bound_s, self.bounds.step_s(step)), layout)

    def _put_layout(self, bound_s: float, layout: Layout) -> None:
        self._put(bound_s, (CandidateGroup.of(layout),), functools.partial(self._play, layout))

    def _too_large_by(self, need: Need, group: CandidateGroup) -> None:
        """Throw out layouts of which each needs so much or more."""
        needed = need.total + self.hardware.reserved_bytes
        reason = f"{open_groups.at_least(need, needed, self.hardware)}{open_groups.whole_batch(group.sized, self.job)}"
        self.fallen.append(Fallen((group,), "memory", reason, needed))

    def _play(self, layout: Layout, bound_s: float) -> None:
        """Play a layout, unless the pipeline's clock finds that others come first."""
        step, without_chunks = self.builder.step(layout), layout.but(loss_chunk=None)
        unchunked = without_chunks, step.cuts_loss  # of which chunks only save memory
        if layout.loss_chunk and (whole_s := self._whole_losses.get(unchunked)) is not None:
            self._throw_out(layout, "slower", f"fits in {whole_s:.4g} s per step without chunks of the loss")
            return
        # The stages without a head hold the same with chunks of the loss and without.
        rest = (without_chunks, self.prices.runs(step).counts)
        if (known := self._too_large.get(rest)) is not None:
            self._throw_out(layout, "memory", *known)
            return
        least_s = self.bounds.step_s(step, plays=True)
        if least_s > bound_s and self._open and least_s > self._open[0].bound_s:
            self._put_layout(least_s, layout)
            return
        self.played += 1
        try:
            programs = self.builder.programs(layout)
        except LayoutError as error:
            self._throw_out(layout, "refused", str(error))
            return
        uses = memory_of(programs, self.hardware, self.states_per_param)
        use = max(uses, key=lambda use: use.total)
        if use.total > self.hardware.room_bytes:
            known = memory_summary(use, self.hardware), use.total
            if use is not uses[-1]:
                self._too_large[rest] = known
            self._throw_out(layout, "memory", *known)
            return
        prediction = predict_programs(programs, self.model, self.job, self.hardware, uses, self.states_per_param)
        if not layout.loss_chunk:
            self._whole_losses[unchunked] = prediction.step_s
        self.best = sorted([*self.best, prediction], key=lambda played: played.step_s)
        for left in self.best[self.top :]:
            self._throw_out(left.layout, "slower", f"{left.step_s:.4g} s per step")
        del self.best[self.top :]

    def _close(self) -> None:
        """Throw out the layouts that were never played, each with its reason."""
        limit_s = self._limit_s()
        for part in self._open:
            rule = "slower" if part.bound_s >= limit_s else "unplayed"
            self.fallen.append(Fallen(part.groups, rule, f"at least {part.bound_s:.4g} s per step"))


def plan(
    model: ModelSpec,
    job: Job,
    hardware: Hardware,
    devices: int,
    *,
    top: int = 5,
    states_per_param: int = 2,
    may_offload: bool = True,
) -> Plan:
    """Search every legal layout of `devices`; the global batch stays as the job says.

    Where nothing fits, the optimizer's states are tried on the host (`offload`), which is slower than any other update.

    Args:
        model: what is trained.
        job: batch, precision and optimizer.
        hardware: what it runs on.
        devices: how many; each is used.
        top: how many of the fastest are wanted.
        states_per_param: the optimizer's tensors of a weight's own shape.
        may_offload: try that at all.
    """
    began = time.perf_counter()
    search = _Search(model, job, hardware, devices, top, states_per_param)
    with _pause_collector():
        search.run()
        if may_offload and not search.best and any(group.rule == "memory" for group in search.fallen):
            search.run(offload=True)
    nearest = "" if search.best else open_groups.nearest_to_fitting(search.fallen)
    if may_offload and not search.best and (more := _enough(model, job, hardware, devices, states_per_param)):
        nearest += f"; {more} devices would do"
    return Plan(
        best=tuple(search.best),
        fallen=tuple(search.fallen),
        played=search.played,
        seconds=time.perf_counter() - began,
        devices=devices,
        hardware=hardware,
        labels=labels(job, hardware),
        model=model,
        job=job,
        states_per_param=states_per_param,
        nearest=nearest,
    )


def _enough(model: ModelSpec, job: Job, hardware: Hardware, devices: int, states_per_param: int) -> int | None:
    """Return the least of 2, 4, ..., 64 times `devices` on which a job fits that does not fit on `devices`; None if none."""
    sizes = (devices << doubled for doubled in range(1, 7))
    few = functools.partial(plan, model, job, hardware, top=1, states_per_param=states_per_param, may_offload=False)
    return next((size for size in sizes if few(size).best), None)


@contextlib.contextmanager
def _pause_collector() -> Iterator[None]:
    """Pause the garbage collector: all objects of a search live as long as it does, and scanning them takes a third of the time.

    Behind it they count as old, so that the next collection of new objects does not scan them either.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on and not gc.get_freeze_count():  # what somebody else has frozen stays so
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()


def fewest(
    model: ModelSpec, job: Job, hardware: Hardware, most: int, *, top: int = 5, states_per_param: int = 2
) -> Plan:
    """Plan for the smallest number of devices that the job fits on: any number within a node, beyond it whole nodes."""

    def on(devices: int) -> Plan:
        return plan(
            model, job, hardware, devices, top=top, states_per_param=states_per_param, may_offload=devices == most
        )

    node, too_few = hardware.devices_per_node, 0
    for power in sorted({*(1 << exponent for exponent in range((most - 1).bit_length())), most}):
        planned = on(power)
        if planned.best or power == most:
            break
        too_few = power
    for devices in range(too_few + 1, power):
        if (devices <= node or devices % node == 0) and (fewer := on(devices)).best:
            return fewer
    return planned
