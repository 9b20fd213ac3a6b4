"""A plan in words: the ranked table, why one layout is not the best, how long a training takes and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.layout import Layout
from samestep.memory.memory_use import memory_summary
from samestep.output.text import align_columns, digits, gib
from samestep.wings.plan.open_groups import Fallen, nearest
from samestep.wings.plan.search import MOST_PLAYED, Plan
from samestep.wings.plan.simulation import simulate
from samestep.wings.plan.simulation.accuracy import describe_accuracy
from samestep.wings.plan.simulation.simulate import Prediction, binds, predict, unpriced

_HEAD = ("", "step s", "{}/s/device", "MFU", "GiB", "fits", "bubble", "exposed s")
_OUTCOMES = {"refused": "not supported", "memory": "out of memory", "slower": "slower", "unplayed": "not simulated"}
"""The words for each rule by which a layout is left out."""


def as_text(plan: Plan) -> str:
    """Write the ranked table, the bottleneck of the recommended layout, and the reasons against the others."""
    lines = []
    if plan.best:
        best = recommended(plan)
        lines += _table(plan)
        lines.append(_fits(plan))
        lines += simulate.memory_lines(best)
        lines.append(f"bottleneck: {binds(best)}")
        lines += unpriced(best.job)
        lines += cautions(plan.best)
        if plan.best[0].layout.offload:
            rate = f"{plan.hardware.host_update_bytes_per_s / 1e9:.3g} GB/s per device"
            lines.append(
                f"nothing fits without offload. The optimizer step on the CPUs is predicted at {rate} (host_update_bytes_per_s)"
            )
    else:
        lines.append(plan.nearest)
    lines += _describe_kept_free(plan.hardware)
    rules = plan.counts
    counts = ", ".join(f"{count:,} {_OUTCOMES[rule]}" for rule, count in rules.most_common())
    lines.append(
        f"searched {plan.considered:,} layouts of {plan.devices} device{'s' * (plan.devices > 1)} in {plan.seconds:.2f} s: {counts}"
    )
    if rules["unplayed"]:
        lines.append(
            f"the search ended after it had simulated {MOST_PLAYED} layouts: one of the others may be faster than those shown"
        )
    lines.append(f"model: {plan.labels['model']}; profile {plan.hardware.name}: {plan.labels['hardware']}")
    lines += describe_accuracy(plan.hardware, plan.devices)
    rejected = [f'  "{next(group.layouts())}" {group.reason}' for group in examples(plan.fallen)]
    lines += ["rejected layouts, one for each reason:", *rejected] if rejected else []
    return "\n".join(lines)


def _table(plan: Plan) -> list[str]:
    """Return the table of the layouts to show; a long layout goes on below in its column."""
    head = (*(title.format(plan.best[0].unit) for title in _HEAD), "layout")
    rows = [head, *((mark_of(plan, row), *_cells(row), str(row.layout)) for row in in_order(plan))]
    return align_columns(rows, left=(0, len(_HEAD)), wraps=True).splitlines()


SAFE = 0.9
"""The probability to fit from which a layout is shown as one that fits."""


def mark_of(plan: Plan, prediction: Prediction) -> str:
    """Return the label of a row of the table."""
    return ", ".join(["recommended"] * (prediction is recommended(plan)) + ["fastest"] * (prediction is plan.best[0]))


def recommended(plan: Plan) -> Prediction:
    """Return the layout to take: the fastest one that is likely to fit, or else the one that is most likely to."""
    return plan.safe or plan.best[0]


def in_order(plan: Plan) -> list[Prediction]:
    """Return the layouts to show: the recommended one, then the fastest ones."""
    best = recommended(plan)
    return [best, *(prediction for prediction in plan.best if prediction is not best)]


def _fits(plan: Plan) -> str:
    """Return a line on the recommended layout: how likely it fits, and the time that it costs over the fastest one."""
    first, best = plan.best[0], recommended(plan)
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


_NUMBERS = dict.fromkeys(map(ord, "0123456789."))
"""Deletes the characters of numbers, in `str.translate`."""


def examples(fallen: Sequence[Fallen]) -> list[Fallen]:
    """Return one for each of the first kinds of reason."""
    return [of_kind[0] for of_kind in _by_kind(fallen) if of_kind[0].rule != "slower"][:8]


def _by_kind(fallen: Sequence[Fallen]) -> list[list[Fallen]]:
    """Divide rejected layouts by rule and reason; reasons that differ only in numbers are one."""
    kinds: dict[tuple[str, str], list[Fallen]] = {}
    for layouts in fallen:
        kinds.setdefault((layouts.rule, layouts.reason.partition(":")[0].translate(_NUMBERS)), []).append(layouts)
    return list(kinds.values())


def _cells(prediction: Prediction) -> tuple[str, ...]:
    return (
        f"{prediction.step_s:.4g}",
        f"{prediction.tokens_per_s_per_device:,.0f}",
        f"{prediction.mfu:.1%}",
        gib(prediction.peak.total),
        f"{prediction.chance_to_fit:.0%}",
        f"{prediction.bubble_fraction:.1%}",
        f"{prediction.exposed_comm_s:.3g}",
    )


def as_record(plan: Plan) -> dict[str, object]:
    """Return plain data for JSON; of the layouts that fell out, which may be millions, the number for each kind of reason and an example."""
    reasons = [
        {
            "rule": first.rule,
            "count": sum(group.num_layouts for group in (first, *more)),
            "layout": str(next(first.layouts())),
            "reason": first.reason,
        }
        for first, *more in _by_kind(plan.fallen)
    ]
    record: dict[str, object] = {
        "devices": plan.devices,
        "hardware": plan.hardware.name,
        "considered": plan.considered,
        "seconds": plan.seconds,
        "best": [prediction.to_record() for prediction in plan.best],
        "safe": plan.safe.to_record() if plan.safe else None,
        "rejections": {"counts": dict(plan.counts), "reasons": reasons},
        "nearest": plan.nearest,
        "labels": dict(plan.labels),
    }
    if plan.best:
        record["other_numerics"] = [saving.to_record() for saving in plan.other_numerics]
    return record


def answers(plan: Plan, tokens: float | None, cost_per_hour: float | None) -> list[str]:
    """Return lines with the time and the cost of a training in the best layout and in the safe one; none where nothing fits.

    Args:
        plan: what was planned.
        tokens: how many the whole training reads.
        cost_per_hour: of one device.
    """
    if not plan.best:
        return []
    best = plan.best[0]
    if not tokens and not cost_per_hour:
        return []
    shown = [best, *([plan.safe] if plan.safe not in (None, best) else [])]
    return [f"{mark_of(plan, prediction)}: {_long(prediction, tokens or 1e9, cost_per_hour)}" for prediction in shown]


def _long(prediction: Prediction, tokens: float, cost_per_hour: float | None) -> str:
    """Return how long one layout takes for so many tokens, with the interval of the record, the hours of devices and their cost."""
    seconds = tokens / prediction.tokens_per_s_per_device / prediction.devices
    low, high = prediction.intervals["time"].of(seconds)
    unit, size = ("days", 86_400) if seconds >= 2 * 86_400 else ("hours", 3_600)
    hours = prediction.devices * seconds / 3_600
    cost = f", {digits(hours * cost_per_hour)} at {cost_per_hour:g} each" if cost_per_hour else ""
    took = f"{digits(seconds / size)} {unit} ({digits(low / size)} to {digits(high / size)})"
    number, name = (tokens / 1e12, "trillion") if tokens >= 1e12 else (tokens / 1e9, "billion")
    return f"{number:,.4g} {name} {prediction.unit} in {took}, {digits(hours)} device hours{cost}"


def other_numerics(plan: Plan) -> list[str]:
    """Return a line for each change of numerics that would save seconds in the best layout."""
    return [f"other numerics, which may change results: {saving.to_line()}" for saving in plan.other_numerics]


def why_not(plan: Plan, layout: Layout) -> str:
    """Return why one layout is not the best, or that it is: the answer to `--why`."""

    def near() -> str:
        if not plan.best:
            return f". {plan.nearest}"
        works = nearest(plan.model, plan.job, plan.hardware, layout, plan.devices, plan.states_per_param)
        return f'. Use "{works.layout}", {works.step_s:.4g} s per step' if works else ""

    try:
        prediction = predict(plan.model, plan.job, layout, plan.hardware, plan.states_per_param)
    except LayoutError as error:
        return f'"{layout}" is not supported: {error}{near()}'
    if not prediction.fits:
        return f'"{layout}" does not fit: {memory_summary(prediction.peak, prediction.hardware)}{near()}'
    if not plan.best:
        return f'"{layout}" fits: {prediction.step_s:.4g} s per step'
    first = plan.best[0]
    if prediction.devices != plan.devices:
        return f'"{layout}" has {prediction.devices} devices, {prediction.step_s:.4g} s per step; this plan is for {plan.devices}'
    if prediction.layout == first.layout or prediction.step_s <= first.step_s:
        return f'"{layout}" is the fastest: {prediction.step_s:.4g} s per step'
    costs = [
        ("exposed communication", prediction.exposed_comm_s, first.exposed_comm_s),
        ("bubbles", prediction.bubble_fraction * prediction.step_s, first.bubble_fraction * first.step_s),
    ]
    more = [f"{name} {ours:.3g} s instead of {theirs:.3g} s" for name, ours, theirs in costs if ours > theirs]
    rest = "; " + ", ".join(more) if more else ""
    return f'"{layout}" takes {prediction.step_s / first.step_s:.3g} times the step of "{first.layout}" ({prediction.step_s:.4g} s){rest}'
