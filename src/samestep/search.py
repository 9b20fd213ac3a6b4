"""The verb `plan`: every layout of a number of devices, which fit, which is fastest, and why not the others.

Three tiers, so that thousands of layouts take a second:

    rules       the strategies' own refusals, once for each combination of degrees
    bounds      memory that no layout of these words can do without, and a step time that none can beat
    the clock   whole bodies in the order of the bounds, until no bound is left that could still win, or the search has
                played `MOST_OPS`; then the best of them op by op

Search by such bounds is branch and bound (Land and Doig 1960). With m micro-batches on p stages, and c the time that one
of them takes through all layers (of this tp, size and recompute; tp's sums included), stage i works m c_i, and
starts and ends the later the more is before it:

    T >= m c_i + c_1 + ... + c_(i-1) for every i     so     T >= (c / m) m / (1 - (1 - 1/m)^p),  c = c_1 + ... + c_p

which is m c for one stage and c for one micro-batch, however the layers are cut. Stages of several runs of layers start
sooner: T >= m c / p. The update comes on top: 7 passes over the weights, at least p-fold cut.

What is thrown out keeps its reason: `needs 93 GiB of 80`, `tp=16 leaves the node`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from samestep import clock, memory
from samestep.cost import UPDATE_PASSES
from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory import MemoryUse
from samestep.model import ModelSpec
from samestep.prediction import Prediction, predict
from samestep.program import BYTES_OF, COMPUTE_DTYPE, Step
from samestep.strategies import program_of, programs_of, refusal_of

MOST_OPS = 60_000
"""Ops of bodies that the clock plays at most: every layout of a small search, some dozens of a large model's."""
SURE = 1.03
"""Whole bodies play pipelines to within this of ops one by one."""
MICROBATCHES = (1, 2, 4, 8, 16, 32)
"""Samples of a micro-batch that are tried, beside a rank's whole share."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A layout that fell out, by which rule, and why."""

    layout: Layout
    rule: str
    """refused, memory, slower, or unplayed: the search ended before it."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The layouts of a number of devices, best first, and what fell out."""

    best: tuple[Prediction, ...]
    rejections: tuple[Rejection, ...]
    considered: int
    """Layouts that were looked at."""
    seconds: float
    devices: int
    hardware: Hardware
    nearest: str = ""
    """Where nothing fits: what comes nearest."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """What no layout of these words can do without."""

    layout: Layout
    step_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sums over a model that the bounds of memory are made of."""

    cut_numel: float
    whole_numel: float
    dealt_cut_numel: float
    """The part of `cut_numel` that belongs to experts."""
    dealt_whole_numel: float
    experts: int
    """The greatest number that divides the experts of every layer that has some; 0 where none has."""
    saved: float
    saved_selective: float
    inputs: float
    blocks: int
    sequence: int
    """Tokens of a sample, where they can be cut between tensor-cut parts; else 0."""

    @classmethod
    def of(cls, model: ModelSpec) -> _Totals:
        trained = [param for param in model.params if param.trainable]
        blocks = [layer for layer in model.layers if layer.is_block]
        return cls(
            cut_numel=sum(param.numel for param in trained if param.cut is not None),
            whole_numel=sum(param.numel for param in trained if param.cut is None),
            dealt_cut_numel=sum(param.numel for param in trained if param.experts and param.cut is not None),
            dealt_whole_numel=sum(param.numel for param in trained if param.experts and param.cut is None),
            experts=math.gcd(*(param.experts for param in model.params if param.experts)),
            saved=sum(layer.saved_elements for layer in blocks),
            saved_selective=sum(layer.saved_selective_elements for layer in blocks),
            inputs=sum(layer.input_elements for layer in blocks),
            blocks=len(blocks),
            sequence=0 if model.sequence_refusal else model.sequence,
        )


class _Task:
    """What is searched for, and what its bounds have in common."""

    def __init__(self, model: ModelSpec, job: Job, hardware: Hardware, states_per_param: int) -> None:
        self.model, self.job, self.hardware, self.states_per_param = model, job, hardware, states_per_param
        self.totals = _Totals.of(model)
        self._compute_s: dict[Layout, float] = {}

    def compute_s(self, layout: Layout, samples: int) -> float:
        """Time of a micro-batch of so many samples through all layers, forward and backward."""
        alone = Layout(
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            recompute=layout.recompute,
            microbatch=samples,
        )
        if alone not in self._compute_s:
            program = program_of(self.model, _with_batch(self.job, samples), alone, self.hardware.devices_per_node)
            self._compute_s[alone] = clock.compute_s(program, self.hardware)
        return self._compute_s[alone]


def plan(
    model: ModelSpec, job: Job, hardware: Hardware, devices: int, *, top: int = 5, states_per_param: int = 2
) -> Plan:
    """Search every legal layout of `devices`; the global batch stays as the job says.

    Args:
        model: what is trained.
        job: batch, precision and optimizer.
        hardware: what it runs on.
        devices: how many; each is used.
        top: how many of the fastest are wanted.
        states_per_param: the optimizer's tensors of a weight's own shape.
    """
    began = time.perf_counter()
    task = _Task(model, job, hardware, states_per_param)
    rejections: list[Rejection] = []
    bounds: list[_Bound] = []
    considered = 0
    for degrees in _degrees(devices, task.totals, hardware, rejections):
        if reason := _refusal(model, job, degrees, hardware):
            rejections.append(Rejection(degrees, "refused", reason))
            considered += 1
            continue
        for layout in _switched(degrees, job):
            considered += 1
            bound = _bound(layout, task)
            if bound.memory_bytes > hardware.memory_bytes:
                reason = f"needs at least {_gib(bound.memory_bytes)} GiB of {_gib(hardware.memory_bytes)}"
                rejections.append(Rejection(layout, "memory", reason))
            else:
                bounds.append(bound)
    best = _played(bounds, task, top, rejections)
    nearest = "" if best else _nearest(rejections, hardware)
    return Plan(
        best=tuple(best),
        rejections=tuple(rejections),
        considered=considered,
        seconds=time.perf_counter() - began,
        devices=devices,
        hardware=hardware,
        nearest=nearest,
    )


def fewest(
    model: ModelSpec, job: Job, hardware: Hardware, most: int, *, top: int = 5, states_per_param: int = 2
) -> Plan:
    """Plan for the smallest number of devices that the job fits on: one, or a power of two up to `most`."""
    sizes = sorted({1 << power for power in range(most.bit_length()) if 1 << power <= most} | {most})
    for devices in sizes:
        found = plan(model, job, hardware, devices, top=top, states_per_param=states_per_param)
        if found.best:
            break
    return found


def _played(bounds: Sequence[_Bound], task: _Task, top: int, rejections: list[Rejection]) -> list[Prediction]:
    """Play layouts in the order of their bounds until none is left that could be among the fastest."""
    found: list[tuple[float, Layout]] = []
    ordered = sorted(bounds, key=lambda bound: bound.step_s)
    ops = 0
    for index, bound in enumerate(ordered):
        last_s = found[top - 1][0] if len(found) >= top else float("inf")
        if bound.step_s >= last_s * SURE or ops >= MOST_OPS:
            for left in ordered[index:]:
                rule = "slower" if left.step_s >= last_s else "unplayed"
                rejections.append(Rejection(left.layout, rule, f"at least {left.step_s:.4g} s a step"))
            break
        try:
            played = _quickly(bound.layout, task)
        except LayoutError as error:
            rejections.append(Rejection(bound.layout, "refused", str(error)))
            continue
        if isinstance(played, str):
            rejections.append(Rejection(bound.layout, "memory", played))
            continue
        ops += played.ops
        found = sorted([*found, (played.step_s, bound.layout)], key=lambda one: one[0])
    return _ranked(found, task, top, rejections)


def _ranked(
    found: Sequence[tuple[float, Layout]], task: _Task, top: int, rejections: list[Rejection]
) -> list[Prediction]:
    """Play the best op by op, and those that may be as fast; return them in order."""
    last_s = found[:top][-1][0] * SURE if found else 0.0
    kept = [
        (index < top or (layout.pp > 1 and step_s <= last_s), layout) for index, (step_s, layout) in enumerate(found)
    ]
    whole = [
        predict(task.model, task.job, layout, task.hardware, task.states_per_param)
        for is_near, layout in kept
        if is_near
    ]
    ranked = sorted((one for one in whole if one.fits), key=lambda one: one.step_s)
    steps = {layout: step_s for step_s, layout in found} | {one.layout: one.step_s for one in ranked}
    named = {one.layout for one in ranked[:top]}
    rejections.extend(
        Rejection(layout, "slower", f"about {steps[layout]:.4g} s a step") for _, layout in found if layout not in named
    )
    return ranked[:top]


@dataclass(frozen=True, slots=True)
class _Played:
    """About how long a step takes, and what playing it took."""

    step_s: float
    ops: int


def _quickly(layout: Layout, task: _Task) -> _Played | str:
    """Play whole bodies; return why the layout does not fit instead.

    Memory is that of few micro-batches: a pipeline that is full holds no more.
    """
    model, job, hardware = task.model, task.job, task.hardware
    share = -(-job.train.global_batch // layout.dp)
    size = min(layout.microbatch or share, share)
    most = 2 * layout.pp * layout.virtual_stages + 1
    programs = programs_of(model, job, layout, hardware.devices_per_node)
    few = programs
    if -(-share // size) > most:
        few = programs_of(model, _with_batch(job, most * size * layout.dp), layout, hardware.devices_per_node)
    for program in few:
        use = memory.during_step(program, task.states_per_param)
        if use.total > hardware.memory_bytes:
            return _needs(use, hardware)
    ops = sum(sum(map(len, program.bodies.values())) + len(program.stages[0]) for program in programs)
    return _Played(clock.step_s(programs, hardware), ops)


def _with_batch(job: Job, global_batch: int) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"global_batch": global_batch})})


def memory_reason(found: Prediction) -> str:
    """Say how far a layout is from fitting, and what takes most."""
    return _needs(found.peak, found.hardware)


def _needs(use: MemoryUse, hardware: Hardware) -> str:
    parts = sorted(use.parts().items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {_gib(size)}" for name, size in parts[:3] if size)
    return f"needs {_gib(use.total)} GiB of {_gib(hardware.memory_bytes)} at {use.peak_at}: {most}"


def explain_layout(
    model: ModelSpec, job: Job, hardware: Hardware, layout: Layout, found: Plan, states_per_param: int = 2
) -> str:
    """Say why one layout is not the best, or that it is: the answer to `--why`."""
    try:
        mine = predict(model, job, layout, hardware, states_per_param)
    except LayoutError as error:
        return f'"{layout}" cannot be: {error}{_near_words(layout, found)}'
    if not mine.fits:
        return f'"{layout}" does not fit: {memory_reason(mine)}{_near_words(layout, found)}'
    if not found.best:
        return f'"{layout}" fits: {mine.step_s:.4g} s a step'
    first = found.best[0]
    if mine.layout == first.layout or mine.step_s <= first.step_s:
        return f'"{layout}" is the fastest: {mine.step_s:.4g} s a step'
    costs = [
        ("exposed communication", mine.exposed_comm_s, first.exposed_comm_s),
        ("bubbles", mine.bubble_fraction * mine.step_s, first.bubble_fraction * first.step_s),
    ]
    more = [f"{name} {ours:.3g} s instead of {theirs:.3g} s" for name, ours, theirs in costs if ours > theirs]
    rest = "; " + ", ".join(more) if more else ""
    return f'"{layout}" takes {mine.step_s / first.step_s:.3g} times the step of "{first.layout}" ({mine.step_s:.4g} s){rest}'


def _near_words(layout: Layout, found: Plan) -> str:
    """Name the layout among the best that differs in the fewest words."""
    if not found.best:
        return f"; {found.nearest}" if found.nearest else ""

    def distance(other: Layout) -> int:
        return sum(getattr(layout, one.name) != getattr(other, one.name) for one in fields(Layout))

    near = min(found.best, key=lambda one: distance(one.layout))
    return f'; "{near.layout}" works'


# -- candidates ------------------------------------------------------------------------------------


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _degrees(devices: int, totals: _Totals, hardware: Hardware, rejections: list[Rejection]) -> Iterator[Layout]:
    """Yield every split of the devices over the axes, without switches; where a tensor cut can cut the sequence too, it
    does, which sends the same bytes and keeps less."""
    for tp in _divisors(devices):
        if tp > hardware.devices_per_node:
            reason = f"tp={tp} leaves the node of {hardware.devices_per_node} devices"
            rejections.append(Rejection(Layout(tp=tp, dp_replicate=devices // tp), "refused", reason))
            continue
        for pp in _divisors(devices // tp):
            if pp > max(1, totals.blocks):
                continue
            dp = devices // tp // pp
            base = Layout(tp=tp, pp=pp, sequence_parallel=tp > 1 and totals.sequence > 0 and totals.sequence % tp == 0)
            yield from _dealt(replace(base, dp_replicate=dp), dp, totals.experts)
            for shard in _shards(dp, tp, hardware):
                for zero in (1, 2, 3):
                    split = replace(base, dp_replicate=dp // shard, dp_shard=shard, zero=zero)
                    yield from _dealt(split, shard, totals.experts if zero == 1 else 0)


def _dealt(split: Layout, ranks: int, experts: int) -> Iterator[Layout]:
    """Yield a split, and the same with its experts dealt to every part of the innermost data axis."""
    yield split
    yield from (replace(split, ep=ep) for ep in _divisors(ranks)[1:] if experts and experts % ep == 0)


def _shards(dp: int, tp: int, hardware: Hardware) -> list[int]:
    """Shard over all of the data axis, or over the part of it that lies in a node."""
    inside = max(1, hardware.devices_per_node // tp)
    return sorted({dp, *([inside] if 1 < inside < dp and dp % inside == 0 else [])} - {1})


def _refusal(model: ModelSpec, job: Job, degrees: Layout, hardware: Hardware) -> str | None:
    """Ask the strategies once for each split; switches are asked for when they are played."""
    return refusal_of(Step.of(model, job, degrees, hardware.devices_per_node))


def _switched(degrees: Layout, job: Job) -> Iterator[Layout]:
    """Yield a split with every choice of micro-batch, schedule and recomputation."""
    share = -(-job.train.global_batch // degrees.dp)
    for microbatch in sorted({size for size in MICROBATCHES if size < share} | {share}):
        sized = replace(degrees, microbatch=microbatch if microbatch < share else None)
        for scheduled in _scheduled(sized):
            yield scheduled
            yield replace(scheduled, recompute="selective")
            yield replace(scheduled, recompute="full")


def _scheduled(layout: Layout) -> Iterator[Layout]:
    yield layout
    if layout.pp > 1:
        yield replace(layout, schedule="interleaved", virtual_stages=2)
        if layout.zero < 2:
            yield replace(layout, schedule="zero-bubble")


# -- bounds ----------------------------------------------------------------------------------------


def _bound(layout: Layout, task: _Task) -> _Bound:
    """Bound step time and memory from below (see above): nothing is sent over the data axis, only what must be is held."""
    job, hardware, totals = task.job, task.hardware, task.totals
    dtype = COMPUTE_DTYPE[job.numerics.precision]
    share = -(-job.train.global_batch // layout.dp)
    microbatches = -(-share // min(layout.microbatch or share, share))
    size = -(-share // microbatches)
    once_s = task.compute_s(layout, size)
    is_full = layout.virtual_stages > 1 or layout.schedule == "zero-bubble"  # as if no stage ever waited
    filling = layout.pp if is_full else microbatches * (1 - (1 - 1 / microbatches) ** layout.pp)
    numel = (totals.cut_numel / layout.tp + totals.whole_numel) / layout.pp
    dealt = (totals.dealt_cut_numel / layout.tp + totals.dealt_whole_numel) / layout.pp
    numel -= dealt * (1 - 1 / layout.ep)
    updated = numel * UPDATE_PASSES * max(BYTES_OF[dtype], 4) / layout.num_shards
    update_s = updated / hardware.memory_bytes_per_s / hardware.memory_efficiency + hardware.step_s
    kept = {"none": totals.saved, "selective": totals.saved_selective, "full": totals.inputs}[layout.recompute]
    activations = kept * size * min(layout.pp, microbatches) / layout.pp * BYTES_OF[dtype] / layout.tp / layout.cp
    held = numel * _bytes_per_param(layout, dtype, task.states_per_param) + activations
    return _Bound(layout, microbatches * once_s / filling + update_s, held)


def _bytes_per_param(layout: Layout, dtype: str, states_per_param: int) -> float:
    """Bytes of weights, gradients, masters and states, by what of them is cut over `dp_shard` (`memory.py`)."""
    size = BYTES_OF[dtype]
    master = max(size, 4)
    kept = master * (states_per_param + (master > size))
    shards = layout.num_shards
    if layout.zero < 2 or shards == 1:
        return size + master + (kept / shards if layout.zero == 1 else kept)
    return master * (2 + states_per_param) / shards


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}"


def _nearest(rejections: Sequence[Rejection], hardware: Hardware) -> str:
    """Say what comes nearest to fitting."""
    needs = [r for r in rejections if r.rule == "memory"]
    if not needs:
        return "no layout of these devices is legal"

    def gib(rejection: Rejection) -> float:
        return float(rejection.reason.split(" GiB")[0].split()[-1])

    near = min(needs, key=gib)
    return f'nothing fits; "{near.layout}" comes nearest: {near.reason}'


# -- the table -------------------------------------------------------------------------------------

_HEAD = ("layout", "step s", "tokens/s/device", "MFU", "GiB", "bubble", "exposed s")


def as_text(found: Plan) -> str:
    """Write the ranked table, what binds the best layout, and what the others fell out for."""
    lines = []
    if found.best:
        rows = [_HEAD, *map(_cells, found.best)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines += [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines.append(f"the best is bound by {binds(found.best[0])}")
    else:
        lines.append(found.nearest)
    rules = Counter(rejection.rule for rejection in found.rejections)
    counts = ", ".join(f"{count} {rule}" for rule, count in rules.most_common())
    lines.append(f"{found.considered} layouts of {found.devices} devices in {found.seconds:.2f} s: {counts}")
    lines += [f'  "{one.layout}" {one.reason}' for one in examples(found.rejections)]
    return "\n".join(lines)


def examples(rejections: Sequence[Rejection]) -> list[Rejection]:
    """Return one rejection for each kind of reason, with its numbers left out of account."""
    kinds: dict[str, Rejection] = {}
    for one in rejections:
        if one.rule != "slower":
            words = "".join(char for char in one.reason.split(":")[0] if not char.isdigit() and char != ".")
            kinds.setdefault(words, one)
    return list(kinds.values())[:8]


def binds(best: Prediction) -> str:
    """Say what takes most of the best layout's step."""
    busy = best.step_s * (1 - best.bubble_fraction) - best.exposed_comm_s
    parts = {
        "compute": busy,
        "bubbles": best.bubble_fraction * best.step_s,
        "exposed communication": best.exposed_comm_s,
    }
    name = max(parts, key=lambda part: parts[part])
    room = 1 - best.peak.total / best.hardware.memory_bytes
    return f"{name} ({parts[name] / best.step_s:.0%} of the step); {room:.0%} of the memory is free"


def _cells(one: Prediction) -> tuple[str, ...]:
    return (
        str(one.layout),
        f"{one.step_s:.4g}",
        f"{one.tokens_per_s_per_device:,.0f}",
        f"{one.mfu:.1%}",
        f"{one.peak.total / 2**30:.1f}",
        f"{one.bubble_fraction:.1%}",
        f"{one.exposed_comm_s:.3g}",
    )


def as_record(found: Plan) -> dict[str, object]:
    """Return plain data for JSON."""
    return {
        "devices": found.devices,
        "hardware": found.hardware.name,
        "considered": found.considered,
        "seconds": found.seconds,
        "best": [one.to_record() for one in found.best],
        "rejections": [{"layout": str(one.layout), "rule": one.rule, "reason": one.reason} for one in found.rejections],
        "nearest": found.nearest,
    }


def answers(best: Prediction, tokens: float | None, cost_per_hour: float | None) -> list[str]:
    """Say how long a training takes and what it costs, a line each.

    Args:
        best: the layout that it runs in.
        tokens: how many the whole training reads.
        cost_per_hour: of one device.
    """
    lines = []
    per_s = best.tokens_per_s_per_device * best.devices
    if tokens:
        days = tokens / per_s / 86_400
        lines.append(f"{tokens:.3g} tokens take {days:,.2f} days on {best.devices} devices")
        if cost_per_hour:
            lines.append(f"and cost {cost_per_hour * best.devices * days * 24:,.0f}")
    elif cost_per_hour:
        lines.append(f"a billion tokens cost {1e9 / per_s / 3600 * best.devices * cost_per_hour:,.2f}")
    return lines
