"""Charts that stretch with the page: bars, stacked areas, curves and ranges as SVG, with their words as HTML, which never stretches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from samestep.output.page.quantities import BYTES, Quantity, digits, duration, share, size, tick_labels, ticks

_POINTS = 400
"""Columns of an area or curve."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The seconds of one part of a step: measured, predicted, or both."""

    label: str
    kind: str
    """Name that gives its colour."""
    measured_s: float | None
    predicted_s: float | None


def bars(rows: Sequence[Bar], step_s: float, above: str = "predicted") -> str:
    """Return one line a part: its name, its bar (predicted above measured), its seconds and its share of the step.

    `above` is the word for what is drawn above, if it is another step.
    """
    longest_s = max((value for row in rows for value in (row.measured_s, row.predicted_s) if value), default=0.0) or 1.0
    lines = []
    for row in rows:
        both = row.measured_s is not None and row.predicted_s is not None
        shown = row.measured_s if row.measured_s is not None else row.predicted_s or 0.0
        drawn = []
        if row.predicted_s is not None:
            drawn.append(_bar(row.kind + " predicted" * both, row.predicted_s / longest_s, 0, 4 if both else 14))
        if row.measured_s is not None:
            drawn.append(_bar(row.kind, row.measured_s / longest_s, 5 if both else 0, 9 if both else 14))
        said = f"<small>{above} {duration(row.predicted_s or 0.0).to_html()}</small>" if both else ""
        lines.append(
            f'<li><span>{escape(row.label)}</span><svg height="14" role="presentation">{"".join(drawn)}</svg>'
            f"<span>{duration(shown).to_html()} <em>{share(shown / (step_s or 1.0)).to_html()}</em>{said}</span></li>"
        )
    return f'<ul class="bars">{"".join(lines)}</ul>'


def _bar(kind: str, part: float, top: int, height: int) -> str:
    return f'<rect class="{kind}" x="0" y="{top}" width="{max(part * 100, 0.2 if part else 0):.2f}%" height="{height}" rx="1.5"/>'


def stacked(label: str, parts: Sequence[tuple[str, str, float]], longest: float, total: Quantity) -> str:
    """Return one bar of parts, end to end, each with name, kind and amount."""
    drawn, now = [], 0.0
    for name, kind, amount in parts:
        width = 100 * amount / (longest or 1.0)
        if width > 0.05:
            title = f"<title>{escape(name)}: {digits(100 * amount / (total.value or 1.0))} %</title>"
            drawn.append(f'<rect class="{kind}" x="{now:.2f}%" width="{width:.2f}%" height="14">{title}</rect>')
        now += width
    return (
        f'<li><span>{escape(label)}</span><svg height="14" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'
        f"<span>{total.to_html()}</span></li>"
    )


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The bytes of a rank over a step, by part."""

    label: str
    parts: Mapping[str, Sequence[int]]
    """Bytes of each part at each time."""
    times_s: Sequence[float]
    """Seconds from the start of the step, from which on the bytes of the same place are held."""
    capacity_bytes: float | None
    peak: Quantity
    peak_at: str


def memory(curve: MemoryCurve, step_s: float, said: MemoryCurve | None = None, said_step_s: float = 0.0) -> str:
    """Return stacked areas over the step, with the capacity as a line.

    `said` is the prediction of a measured curve: its total is a line over its own step, which is drawn as long as the other one.
    """
    highest = max(float(curve.peak.value), float(said.peak.value) if said else 0.0)
    top = max(highest, curve.capacity_bytes or 0.0) if (curve.capacity_bytes or 0) < 8 * highest else highest
    top *= 1.06
    columns, paths = _columns(curve, step_s), []
    below = [0.0] * len(columns)
    for name, values in curve.parts.items():
        above = [under + (values[place] if place >= 0 else 0) for under, place in zip(below, columns, strict=True)]
        if max(values, default=0) > 0.002 * top:
            paths.append(
                f'<path class="{_word(name)}" d="{_area(below, above, top)}"><title>{escape(name)}</title></path>'
            )
        below = above
    if said is not None:
        totals = [sum(values) for values in zip(*said.parts.values(), strict=True)]
        line = _steps([totals[place] if place >= 0 else 0 for place in _columns(said, said_step_s)], top)
        paths.append(f'<path class="said" d="M{"L".join(line)}"><title>predicted</title></path>')
    limit = ""
    if curve.capacity_bytes and curve.capacity_bytes <= top:
        y = 100 * (1 - curve.capacity_bytes / top)
        limit = f'<line class="limit" x1="0" x2="{_POINTS}" y1="{y:.1f}" y2="{y:.1f}"/>'
    at = ticks(top / _unit(top), 4)
    labels = tick_labels([value * _unit(top) for value in at], BYTES) if len(at) > 1 else ["0"]
    marks = "".join(
        f'<i style="bottom:{100 * value * _unit(top) / top:.1f}%">{label}</i>'
        for value, label in zip(at, labels, strict=True)
    )
    of = f" of {size(curve.capacity_bytes).to_html()}" if curve.capacity_bytes else ""
    predicted = "" if said is None else f", {said.peak.to_html()} predicted"
    return (
        f'<div class="memory"><h3>{escape(curve.label)}</h3><p>peak {curve.peak.to_html()}{of}{predicted}<br/><small>at <code>{escape(curve.peak_at)}</code></small></p>'
        f'<div class="plot"><div class="marks">{marks}</div><svg viewBox="0 0 {_POINTS} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Memory of {escape(curve.label)} over the step">{"".join(paths)}{limit}</svg></div></div>'
    )


def _unit(top: float) -> float:
    return next((factor for factor, _ in BYTES if top >= factor), 1.0)


def _columns(curve: MemoryCurve, step_s: float) -> list[int]:
    """Return, for each column, the index of the largest total among the times that fall into it, or else of the last before it."""
    totals = [sum(values) for values in zip(*curve.parts.values(), strict=True)]
    found = [-1] * _POINTS
    scale = _POINTS / (step_s or 1.0)
    for index, time_s in enumerate(curve.times_s):
        column = min(max(int(time_s * scale), 0), _POINTS - 1)
        if found[column] < 0 or totals[index] > totals[found[column]]:
            found[column] = index
    ends = [-1] * _POINTS
    for index, time_s in enumerate(curve.times_s):
        ends[min(max(int(time_s * scale), 0), _POINTS - 1)] = index
    last = min(range(len(curve.times_s)), key=lambda index: curve.times_s[index], default=-1)
    for column in range(_POINTS):
        if found[column] < 0:
            found[column] = last
        last = ends[column] if ends[column] >= 0 else last
    return found


def _area(below: Sequence[float], above: Sequence[float], top: float) -> str:
    """Return the path between two lines, with a point only where one of them changes."""
    up, down = _steps(above, top), _steps(below, top)
    return f"M{'L'.join(up)}L{'L'.join(reversed(down))}Z"


def _steps(values: Sequence[float], top: float) -> list[str]:
    points, before = [], ""
    for column, value in enumerate(values):
        y = f"{100 * (1 - value / top):.1f}"
        if y != before:
            points += [f"{column} {before}"] if before else []
            points.append(f"{column} {y}")
            before = y
    return [*points, f"{len(values)} {before}"]


def curve(label: str, steps: Sequence[int], values: Sequence[float]) -> str:
    """Return one curve over the steps of a run; of many points a column keeps its least and its largest."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    low, high = low - 0.06 * span, high + 0.06 * span
    first, last = steps[0], steps[-1]
    width = max(last - first, 1)
    points = [
        (_POINTS * (step - first) / width, 100 * (high - value) / (high - low))
        for step, value in zip(steps, values, strict=True)
    ]
    if len(points) > 2 * _POINTS:
        points = _thinned(points)
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    newest = values[-1]
    return (
        f'<div class="curve"><h3>{escape(label)}</h3><p>{Quantity(newest, digits(newest)).to_html()} <small>in step {Quantity(last, str(last)).to_html()}, '
        f"from {Quantity(values[0], digits(values[0])).to_html()} in step {Quantity(first, str(first)).to_html()}</small></p>"
        f'<div class="plot"><div class="marks"><i style="bottom:4%">{digits(min(values))}</i><i style="bottom:92%">{digits(max(values))}</i></div>'
        f'<svg viewBox="0 0 {_POINTS} 100" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'<path class="drawn" d="M{path}"/></svg></div></div>'
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the least and the largest of each column, in the order in which they come."""
    found: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        found.setdefault(int(point[0]), []).append(point)
    return [
        point
        for column in found.values()
        for point in sorted({min(column, key=lambda one: one[1]), max(column, key=lambda one: one[1])})
    ]


def range_of(value: float, low: float, high: float, scale: tuple[float, float]) -> str:
    """Return a value as a dot on the line of its interval, on a scale from one value to another."""
    left, right, dot = (3 + 94 * (one - scale[0]) / ((scale[1] - scale[0]) or 1.0) for one in (low, high, value))
    return (
        '<svg class="range" height="14" role="presentation">'
        f'<line x1="{left:.1f}%" x2="{right:.1f}%" y1="7" y2="7"/><circle cx="{dot:.1f}%" cy="7" r="3.5"/></svg>'
    )


def _word(name: str) -> str:
    return name.replace(" ", "-")
