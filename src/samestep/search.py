"""The verb `plan`: every layout of a number of devices, which fit, which is fastest, and why not the others.

Three tiers, so that thousands of layouts take a second:

    rules       the strategies' own refusals, once for each combination of degrees
    bounds      memory that no layout of these words can do without, and a step time that none can beat,
                    T >= F / (devices x peak FLOP/s) x (1 + recomputed share) x (1 + bubble of the schedule)
    the clock   whole bodies in the order of the bounds, until no bound is left that could still win; then the best of
                them op by op

What is thrown out keeps its reason: `needs 93 GiB of 80`, `tp=16 leaves the node`. Search by such bounds is branch and
bound (Land and Doig 1960); the bound is the roof of the roofline (Williams et al. 2009, doi:10.1145/1498765.1498785).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from samestep import clock, memory
from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory import MemoryUse
from samestep.model import ModelSpec
from samestep.prediction import PASSES, Prediction, predict
from samestep.program import BYTES_OF, COMPUTE_DTYPE, Step
from samestep.strategies import programs_of, refusal_of

MOST_PLAYED = 24
"""Layouts that the clock plays at most: the bounds have ordered them."""
MICROBATCHES = (1, 2, 4, 8, 16, 32)
"""Samples of a micro-batch that are tried, beside a rank's whole share."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A layout that fell out, by which rule, and why."""

    layout: Layout
    rule: str
    """refused, memory or slower."""
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


@dataclass(slots=True)
class _Totals:
    """Sums over a model that the bounds are made of."""

    flops: float
    block_flops: float
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
            flops=model.forward_flops,
            block_flops=sum(layer.forward_flops for layer in blocks),
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
    totals = _Totals.of(model)
    rejections: list[Rejection] = []
    bounds: list[_Bound] = []
    considered = 0
    for degrees in _degrees(devices, totals, hardware, rejections):
        if reason := _refusal(model, job, degrees, hardware):
            rejections.append(Rejection(degrees, "refused", reason))
            considered += 1
            continue
        for layout in _switched(degrees, job):
            considered += 1
            bound = _bound(layout, totals, job, hardware, states_per_param)
            if bound.memory_bytes > hardware.memory_bytes:
                reason = f"needs at least {_gib(bound.memory_bytes)} GiB of {_gib(hardware.memory_bytes)}"
                rejections.append(Rejection(layout, "memory", reason))
            else:
                bounds.append(bound)
    best = _played(bounds, model, job, hardware, states_per_param, top, rejections)
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


def _played(
    bounds: Sequence[_Bound],
    model: ModelSpec,
    job: Job,
    hardware: Hardware,
    states_per_param: int,
    top: int,
    rejections: list[Rejection],
) -> list[Prediction]:
    """Play layouts in the order of their bounds until none is left that could be among the fastest."""
    best: list[tuple[float, Layout]] = []
    played = 0
    for index, bound in enumerate(sorted(bounds, key=lambda bound: bound.step_s)):
        last_s = best[top - 1][0] if len(best) >= top else float("inf")
        if bound.step_s >= last_s or played >= MOST_PLAYED:
            left = sorted(bounds, key=lambda bound: bound.step_s)[index:]
            rejections.extend(Rejection(b.layout, "slower", f"at least {b.step_s:.4g} s a step") for b in left)
            break
        try:
            found = _quickly(model, job, bound.layout, hardware, states_per_param)
        except LayoutError as error:
            rejections.append(Rejection(bound.layout, "refused", str(error)))
            continue
        if isinstance(found, str):
            rejections.append(Rejection(bound.layout, "memory", found))
            continue
        played += 1
        best = sorted([*best, (found, bound.layout)], key=lambda one: one[0])
    rejections.extend(Rejection(layout, "slower", f"about {step_s:.4g} s a step") for step_s, layout in best[top:])
    whole = [predict(model, job, layout, hardware, states_per_param) for _, layout in best[:top]]
    return sorted((one for one in whole if one.fits), key=lambda one: one.step_s)


def _quickly(model: ModelSpec, job: Job, layout: Layout, hardware: Hardware, states_per_param: int) -> float | str:
    """Return about how long a step takes, from whole bodies on the clock, or why the layout does not fit.

    Memory is that of few micro-batches: a pipeline that is full holds no more.
    """
    share = -(-job.train.global_batch // layout.dp)
    size = min(layout.microbatch or share, share)
    few = min(-(-share // size), 2 * layout.pp * layout.virtual_stages + 1)
    for program in programs_of(model, _with_batch(job, few * size * layout.dp), layout, hardware.devices_per_node):
        use = memory.during_step(program, states_per_param)
        if use.total > hardware.memory_bytes:
            return _needs(use, hardware)
    return clock.step_s(programs_of(model, job, layout, hardware.devices_per_node), hardware)


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


# -- bounds ----------------------------------------------------------------------------------------


def _bound(layout: Layout, totals: _Totals, job: Job, hardware: Hardware, states_per_param: int) -> _Bound:
    """Bound step time and memory from below: no communication, stages of equal size, nothing but what must be held."""
    dtype = COMPUTE_DTYPE[job.numerics.precision]
    share = -(-job.train.global_batch // layout.dp)
    size = min(layout.microbatch or share, share)
    microbatches = -(-share // size)
    again = totals.block_flops if layout.recompute == "full" else 0.0
    flops = (PASSES * totals.flops + again) * share * layout.dp
    bubble = (layout.pp - 1) / microbatches / layout.virtual_stages
    step_s = flops / layout.world_size / hardware.flops_per_s[dtype] * (1 + bubble)
    numel = (totals.cut_numel / layout.tp + totals.whole_numel) / layout.pp
    dealt = (totals.dealt_cut_numel / layout.tp + totals.dealt_whole_numel) / layout.pp
    numel -= dealt * (1 - 1 / layout.ep)
    kept = {"none": totals.saved, "selective": totals.saved_selective, "full": totals.inputs}[layout.recompute]
    in_flight = min(layout.pp, microbatches) / layout.pp
    activations = kept * size * in_flight * BYTES_OF[dtype] / layout.tp
    return _Bound(layout, step_s, numel * _bytes_per_param(layout, dtype, states_per_param) + activations)


def _bytes_per_param(layout: Layout, dtype: str, states_per_param: int) -> float:
    """Bytes of weights, gradients, masters and states, by what of them is cut over `dp_shard` (`memory.py`)."""
    size = BYTES_OF[dtype]
    master = max(size, 4)
    kept = master * (states_per_param + (master > size))
    shards = layout.dp_shard
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
