"""A plan in words: the ranked table, why one layout is not the best, how long a training takes and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.layout import Layout
from samestep.memory.memory_use import allocator_summary, memory_summary
from samestep.output.text import align_columns, digits, gib
from samestep.wings.plan.open_groups import Fallen, nearest
from samestep.wings.plan.search import MOST_PLAYED, Plan
from samestep.wings.plan.simulation.simulate import Prediction, binds, class_of, intervals, predict, unpriced

_HEAD = ("", "step s", "{}/s/device", "MFU", "GiB", "fits", "bubble", "exposed s")
_OUTCOMES = {
    "refused": "not supported",
    "memory": "out of memory",
    "slower": "slower",
    "unplayed": "not simulated",
}
"""The words for each rule by which a layout is left out."""


def as_text(found: Plan) -> str:
    """Write the ranked table, the bottleneck of the recommended layout, and the reasons against the others."""
    lines = []
    if found.best:
        best = recommended(found)
        lines += _table(found)
        lines.append(_fits(found))
        lines += allocator_summary(best.peak, best.reserved_bytes, found.hardware)
        lines.append(f"bottleneck: {binds(best)}")
        lines += unpriced(best.job)
        lines += cautions(found.best)
        if found.best[0].layout.offload:
            ranks = found.devices // len(found.best[0].memory)
            rate = f"{found.hardware.host_update_bytes_per_s / 1e9:.3g} GB/s per device"
            lines.append(
                f"nothing fits without offload. The optimizer step on the CPUs is predicted at {rate} (host_update_bytes_per_s), and needs "
                f"{gib(sum(use.host for use in found.best[0].memory) * ranks)} GiB of CPU memory"
            )
    else:
        lines.append(found.nearest)
    lines += _describe_kept_free(found.hardware)
    rules = found.counts
    counts = ", ".join(f"{count:,} {_OUTCOMES[rule]}" for rule, count in rules.most_common())
    lines.append(
        f"searched {found.considered:,} layouts of {found.devices} device{'s' * (found.devices > 1)} in {found.seconds:.2f} s: {counts}"
    )
    if rules["unplayed"]:
        lines.append(
            f"the search ended after it had simulated {MOST_PLAYED} layouts: one of the others may be faster than those shown"
        )
    lines.append(
        f"model: {found.labels['model']}; numbers of the hardware profile {found.hardware.name}: {found.labels['hardware']}"
    )
    lines += describe_accuracy(found.hardware, found.devices)
    rejected = [f'  "{next(one.layouts())}" {one.reason}' for one in examples(found.fallen)]
    lines += ["rejected layouts, one for each reason:", *rejected] if rejected else []
    return "\n".join(lines)


def _table(found: Plan) -> list[str]:
    """Return the table of the layouts to show; a long layout goes on below in its column."""
    head = (*(title.format(found.best[0].unit) for title in _HEAD), "layout")
    rows = [head, *((mark_of(found, one), *_cells(one), str(one.layout)) for one in in_order(found))]
    return align_columns(rows, left=(0, len(_HEAD))).splitlines()


SAFE = 0.9
"""The probability to fit from which a layout is shown as one that fits."""


def mark_of(found: Plan, one: Prediction) -> str:
    """Return the label of a row of the table."""
    return ", ".join(["recommended"] * (one is recommended(found)) + ["fastest"] * (one is found.best[0]))


def recommended(found: Plan) -> Prediction:
    """Return the layout to take: the fastest one that is likely to fit, or else the one that is most likely to."""
    return found.safe or found.best[0]


def in_order(found: Plan) -> list[Prediction]:
    """Return the layouts to show: the recommended one, then the fastest ones."""
    best = recommended(found)
    return [best, *(one for one in found.best if one is not best)]


def _fits(found: Plan) -> str:
    """Return a line on the recommended layout: how likely it fits, and the time that it costs over the fastest one."""
    first, best = found.best[0], recommended(found)
    text = f'recommended: "{best.layout}", {best.chance_to_fit:.0%} likely to fit, by the errors of past predictions'
    if best is first:
        return text
    return f"{text}. The fastest takes {1 - first.step_s / best.step_s:.1%} less time, but is {first.chance_to_fit:.0%} likely to fit"


def _describe_kept_free(machine: Hardware) -> list[str]:
    """Return a line on the memory that is kept free, if any is."""
    if not machine.kept_free:
        return []
    room, memory = gib(machine.room_bytes), gib(machine.memory_bytes)
    return [f"memory limit: {room} of {memory} GiB per device (--keep-free {machine.kept_free:.3g})"]


def cautions(best: Sequence[Prediction]) -> list[str]:
    """Return a line on data ranks of the best layout without work, if there are any."""
    first, lines = best[0], []
    samples, ranks = first.programs[0].step.global_batch, first.layout.dp
    if samples < ranks:
        lines.append(
            f"train.global_batch={samples} leaves {ranks - samples} of its {ranks} data ranks without samples: "
            f"{first.devices // ranks * samples} devices would take as long"
        )
    return lines


POOR = 1.8
"""The upper end of an interval over its lower one from which on the record is called poor."""
_KINDS = {"cards": "cards on PCIe", "few": "parts of a node", "nodes": "nodes"}


def describe_accuracy(machine: Hardware, devices: int) -> list[str]:
    """Return a line on how far predictions for such machines have been from what was measured, and one where that is far."""
    kind = class_of(machine, devices)
    time, memory = intervals(kind)["time"], intervals(kind)["memory"]
    lines = [
        f"accuracy: 80% of {time.rows:,} published steps of {_KINDS[kind]} took {time.low:.2f} to {time.high:.2f} times the predicted time, "
        f"and 80% of {memory.rows:,} runs needed {memory.low:.2f} to {memory.high:.2f} times the predicted memory (docs/foresight.md)"
    ]
    if time.high / time.low >= POOR:
        lines.append(
            f"predictions for {_KINDS[kind]} are inaccurate: measure this machine before you rely on the seconds (samestep measure)"
        )
    return lines


_NUMBERS = dict.fromkeys(map(ord, "0123456789."))
"""Deletes the characters of numbers, in `str.translate`."""


def examples(fallen: Sequence[Fallen]) -> list[Fallen]:
    """Return one for each of the first kinds of reason."""
    return [of_kind[0] for of_kind in _by_kind(fallen) if of_kind[0].rule != "slower"][:8]


def _by_kind(fallen: Sequence[Fallen]) -> list[list[Fallen]]:
    """Divide them by rule and reason, with its numbers left out of account."""
    kinds: dict[tuple[str, str], list[Fallen]] = {}
    for one in fallen:
        kinds.setdefault((one.rule, one.reason.partition(":")[0].translate(_NUMBERS)), []).append(one)
    return list(kinds.values())


def _cells(one: Prediction) -> tuple[str, ...]:
    return (
        f"{one.step_s:.4g}",
        f"{one.tokens_per_s_per_device:,.0f}",
        f"{one.mfu:.1%}",
        gib(one.peak.total),
        f"{one.chance_to_fit:.0%}",
        f"{one.bubble_fraction:.1%}",
        f"{one.exposed_comm_s:.3g}",
    )


def as_record(found: Plan) -> dict[str, object]:
    """Return plain data for JSON; of the layouts that fell out, which may be millions, the number for each kind of reason and an example."""
    reasons = [
        {
            "rule": first.rule,
            "count": sum(one.num_layouts for one in (first, *more)),
            "layout": str(next(first.layouts())),
            "reason": first.reason,
        }
        for first, *more in _by_kind(found.fallen)
    ]
    record: dict[str, object] = {
        "devices": found.devices,
        "hardware": found.hardware.name,
        "considered": found.considered,
        "seconds": found.seconds,
        "best": [one.to_record() for one in found.best],
        "safe": found.safe.to_record() if found.safe else None,
        "rejections": {"counts": dict(found.counts), "reasons": reasons},
        "nearest": found.nearest,
        "labels": dict(found.labels),
    }
    if found.best:
        record["other_numerics"] = [saving.to_record() for saving in found.other_numerics]
    return record


def answers(found: Plan, tokens: float | None, cost_per_hour: float | None) -> list[str]:
    """Return lines with the time and the cost of a training in the best layout and in the safe one; none where nothing fits.

    Args:
        found: what was planned.
        tokens: how many the whole training reads.
        cost_per_hour: of one device.
    """
    if not found.best:
        return []
    best = found.best[0]
    if not tokens and not cost_per_hour:
        return []
    shown = [best, *([found.safe] if found.safe not in (None, best) else [])]
    return [f"{mark_of(found, one)}: {_long(one, tokens or 1e9, cost_per_hour)}" for one in shown]


def _long(one: Prediction, tokens: float, cost_per_hour: float | None) -> str:
    """Return how long one layout takes for so many tokens, with the interval of the record, the hours of devices and their cost."""
    seconds = tokens / one.tokens_per_s_per_device / one.devices
    low, high = one.intervals["time"].of(seconds)
    unit, size = ("days", 86_400) if seconds >= 2 * 86_400 else ("hours", 3_600)
    hours = one.devices * seconds / 3_600
    cost = f", {digits(hours * cost_per_hour)} at {cost_per_hour:g} each" if cost_per_hour else ""
    took = f"{digits(seconds / size)} {unit} ({digits(low / size)} to {digits(high / size)})"
    number, name = (tokens / 1e12, "trillion") if tokens >= 1e12 else (tokens / 1e9, "billion")
    return f"{number:,.4g} {name} {one.unit} in {took}, {digits(hours)} device hours{cost}"


def other_numerics(found: Plan) -> list[str]:
    """Return a line for each change of numerics that would save seconds in the best layout."""
    return [f"other numerics, which may change results: {saving.to_line()}" for saving in found.other_numerics]


def why_not(found: Plan, layout: Layout) -> str:
    """Return why one layout is not the best, or that it is: the answer to `--why`."""

    def near() -> str:
        if not found.best:
            return f". {found.nearest}"
        works = nearest(found.model, found.job, found.hardware, layout, found.devices, found.states_per_param)
        return f'. Use "{works.layout}", {works.step_s:.4g} s per step' if works else ""

    try:
        mine = predict(found.model, found.job, layout, found.hardware, found.states_per_param)
    except LayoutError as error:
        return f'"{layout}" is not supported: {error}{near()}'
    if not mine.fits:
        return f'"{layout}" does not fit: {memory_summary(mine.peak, mine.hardware)}{near()}'
    if not found.best:
        return f'"{layout}" fits: {mine.step_s:.4g} s per step'
    first = found.best[0]
    if mine.devices != found.devices:
        return f'"{layout}" has {mine.devices} devices, {mine.step_s:.4g} s per step; this plan is for {found.devices}'
    if mine.layout == first.layout or mine.step_s <= first.step_s:
        return f'"{layout}" is the fastest: {mine.step_s:.4g} s per step'
    costs = [
        ("exposed communication", mine.exposed_comm_s, first.exposed_comm_s),
        ("bubbles", mine.bubble_fraction * mine.step_s, first.bubble_fraction * first.step_s),
    ]
    more = [f"{name} {ours:.3g} s instead of {theirs:.3g} s" for name, ours, theirs in costs if ours > theirs]
    rest = "; " + ", ".join(more) if more else ""
    return f'"{layout}" takes {mine.step_s / first.step_s:.3g} times the step of "{first.layout}" ({mine.step_s:.4g} s){rest}'
