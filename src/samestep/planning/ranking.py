"""A plan in words: the ranked table, why one layout is not the best, how long a training takes and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.layout import Layout
from samestep.output.byte_sizes import gib
from samestep.output.text_table import align_columns
from samestep.planning.nearest_layout import nearest
from samestep.planning.rejections import Fallen
from samestep.planning.search import MOST_PLAYED, Plan
from samestep.simulation.bound_by import binds
from samestep.simulation.memory import allocator_summary, memory_summary
from samestep.simulation.prediction import Prediction, intervals, predict, unpriced

_HEAD = ("layout", "step s", "{}/s/device", "MFU", "GiB", "fits", "bubble", "exposed s", "")
_OUTCOMES = {
    "refused": "refused",
    "memory": "too large for the memory",
    "slower": "slower than those shown",
    "unplayed": "not played",
}
"""The words for each rule by which a layout is left out."""


def as_text(found: Plan) -> str:
    """Write the ranked table, what binds the best layout, and what the others fell out for."""
    lines = []
    if found.best:
        shown = [*found.best, *([found.safe] if found.safe and found.safe not in found.best else [])]
        rows = [(*_cells(one), mark_of(found, one)) for one in shown]
        head = tuple(title.format(found.best[0].unit) for title in _HEAD)
        lines.append(align_columns([head, *rows], left=(0, len(head) - 1)))
        lines.append(_fits(found))
        lines += allocator_summary(found.best[0].peak, found.best[0].reserved_bytes, found.hardware)
        lines.append(f"the best is bound by {binds(found.best[0])}")
        lines += unpriced(found.best[0].job)
        lines += cautions(found.best)
        if found.best[0].layout.offload:
            rate = f"{found.hardware.host_update_bytes_per_s / 1e9:.3g} GB/s a device"
            lines.append(
                f"nothing fits without offload; the update on the host is predicted at {rate} (host_update_bytes_per_s)"
            )
    else:
        lines.append(found.nearest)
    lines += _describe_kept_free(found.hardware)
    rules = found.counts
    counts = ", ".join(f"{count} {_OUTCOMES[rule]}" for rule, count in rules.most_common())
    lines.append(
        f"{found.considered} layouts of {found.devices} device{'s' * (found.devices > 1)} in {found.seconds:.2f} s: {counts}"
    )
    if rules["unplayed"]:
        lines.append(
            f"the search ended after {MOST_PLAYED} layouts were played: one that was not played may be faster than those shown"
        )
    lines.append(f"model: {found.labels['model']}; figures of {found.hardware.name}: {found.labels['hardware']}")
    lines.append(describe_accuracy())
    lines += [f'  "{next(one.layouts())}" {one.reason}' for one in examples(found.fallen)]
    return "\n".join(lines)


SAFE = 0.9
"""The chance to fit from which on a layout is called safe, and not only safer than the fastest one."""


def mark_of(found: Plan, one: Prediction) -> str:
    """Return the label of a row of the table."""
    is_safe = one is found.safe and one.chance_to_fit >= SAFE
    words = ["fastest"] * (one is found.best[0]) + ["safe"] * is_safe
    return ", ".join([*words, *["safer"] * (one is found.safe and len(words) == 0)])


def _fits(found: Plan) -> str:
    """Return a line on how surely the fastest layout fits, and which one to take where that is not sure."""
    first, safe = found.best[0], found.safe
    text = f"the fastest fits with a chance of {first.chance_to_fit:.0%}, by the record of predictions"
    if safe is None or safe is first:
        return text
    slower = f"{safe.step_s / first.step_s:.3g} times its seconds"
    return f'{text}; "{safe.layout}" with {safe.chance_to_fit:.0%}, in {slower}: take it where nothing was tried yet'


def _describe_kept_free(machine: Hardware) -> list[str]:
    """Return a line on the memory that is kept free, if any is."""
    if not machine.kept_free:
        return []
    room, memory = gib(machine.room_bytes), gib(machine.memory_bytes)
    return [
        f"{machine.kept_free:.3g} of the memory is kept free: a layout may need {room} of {memory} GiB (--keep-free)"
    ]


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


def describe_accuracy() -> str:
    """Return a line on how far predictions have been from what was measured."""
    time, memory = intervals()["time"], intervals()["memory"]
    return (
        f"8 in 10 of {time.rows:,} published steps took {time.low:.2f} to {time.high:.2f} times their predicted time, and 8 in 10 of "
        f"{memory.rows:,} runs {memory.low:.2f} to {memory.high:.2f} times their predicted memory (docs/foresight.md)"
    )


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
        str(one.layout),
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
    """Return lines with the days and the cost of a training in the best layout; none where nothing fits.

    Args:
        found: what was planned.
        tokens: how many the whole training reads.
        cost_per_hour: of one device.
    """
    if not found.best:
        return []
    best, lines = found.best[0], []
    per_s = best.tokens_per_s_per_device * best.devices
    if tokens:
        days = tokens / per_s / 86_400
        lines.append(
            f"{tokens:.3g} {best.unit} take {days:,.2f} days on {best.devices} device{'s' * (best.devices > 1)}"
        )
        if cost_per_hour:
            lines.append(
                f"this costs {cost_per_hour * best.devices * days * 24:,.0f}, at {cost_per_hour:g} for an hour of one device"
            )
    elif cost_per_hour:
        lines.append(f"a billion {best.unit} cost {1e9 / per_s / 3600 * best.devices * cost_per_hour:,.2f}")
    return lines


def other_numerics(found: Plan) -> list[str]:
    """Return a line for each change of numerics that would save seconds in the best layout."""
    return [f"other numerics, which may change results: {saving.to_line()}" for saving in found.other_numerics]


def why_not(found: Plan, layout: Layout) -> str:
    """Return why one layout is not the best, or that it is: the answer to `--why`."""

    def near() -> str:
        if not found.best:
            return f"; {found.nearest}"
        works = nearest(found.model, found.job, found.hardware, layout, found.devices, found.states_per_param)
        return f'; "{works.layout}" works, {works.step_s:.4g} s a step' if works else ""

    try:
        mine = predict(found.model, found.job, layout, found.hardware, found.states_per_param)
    except LayoutError as error:
        return f'"{layout}" is refused: {error}{near()}'
    if not mine.fits:
        return f'"{layout}" does not fit: {memory_summary(mine.peak, mine.hardware)}{near()}'
    if not found.best:
        return f'"{layout}" fits: {mine.step_s:.4g} s a step'
    first = found.best[0]
    if mine.devices != found.devices:
        return f'"{layout}" is a layout of {mine.devices} devices, {mine.step_s:.4g} s a step; this plan is for {found.devices}'
    if mine.layout == first.layout or mine.step_s <= first.step_s:
        return f'"{layout}" is the fastest: {mine.step_s:.4g} s a step'
    costs = [
        ("exposed communication", mine.exposed_comm_s, first.exposed_comm_s),
        ("bubbles", mine.bubble_fraction * mine.step_s, first.bubble_fraction * first.step_s),
    ]
    more = [f"{name} {ours:.3g} s instead of {theirs:.3g} s" for name, ours, theirs in costs if ours > theirs]
    rest = "; " + ", ".join(more) if more else ""
    return f'"{layout}" takes {mine.step_s / first.step_s:.3g} times the step of "{first.layout}" ({mine.step_s:.4g} s){rest}'
