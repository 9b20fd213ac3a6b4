"""The figures of a page, which stretch with it: bars, stacked areas, curves and ranges, and the timeline of a step. Figures are SVG, and
their words are HTML, which never stretches.

A timeline has one lane for each stage (or rank) and stream, and is drawn twice from the same boxes. Python draws the step as a whole, in
`COLUMNS` columns a lane, each in the colour of the kind that takes most of its time: this is what is printed, and what is seen without a
script. The boxes themselves are packed (times in ticks, counted from the end of the box before, deflated), and the script of the page
draws from them at any zoom: tasks where an op would be less than a few pixels wide, ops with their names where there is room.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import NamedTuple

from samestep.output.text import BYTES, SECONDS, Quantity, digits, duration, share, size, tick_labels, ticks
from samestep.wings.plan.simulation.partition import row_label

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
    """Return one line per part, the largest first: its name, its bar (predicted above measured), its seconds and its share of the step.

    `above` is the word for what is drawn above, if it is another step.
    """
    longest_s = max((value for row in rows for value in (row.measured_s, row.predicted_s) if value), default=0.0) or 1.0
    unit_s, unit = next(((unit_size, name) for unit_size, name in SECONDS if longest_s >= unit_size), SECONDS[-1])
    places = max(0, 3 - math.floor(math.log10(longest_s / unit_s)))

    def said_s(seconds: float) -> str:
        return Quantity(seconds, f"{seconds / unit_s:,.{places}f} {unit}").to_html()

    lines = []
    shown_rows = [row for row in rows if max(row.measured_s or 0.0, row.predicted_s or 0.0) > 1e-6 * longest_s]
    for row in sorted(
        shown_rows, key=lambda row: -(row.measured_s if row.measured_s is not None else row.predicted_s or 0.0)
    ):
        both = row.measured_s is not None and row.predicted_s is not None
        shown = row.measured_s if row.measured_s is not None else row.predicted_s or 0.0
        drawn = []
        if row.predicted_s is not None:
            drawn.append(_bar(row.kind + " predicted" * both, row.predicted_s / longest_s, 0, 4 if both else 14))
        if row.measured_s is not None:
            drawn.append(_bar(row.kind, row.measured_s / longest_s, 5 if both else 0, 9 if both else 14))
        said = f"<small>{above} {said_s(row.predicted_s or 0.0)}</small>" if both else ""
        lines.append(
            f'<li><span>{escape(row.label)}</span><svg height="14" role="presentation">{"".join(drawn)}</svg>'
            f"<span>{said_s(shown)} <em>{share(shown / (step_s or 1.0)).to_html()}</em>{said}</span></li>"
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


def each_rank(parts: Mapping[int, Sequence[tuple[str, str, float]]], longest_s: float) -> str:
    """Return one bar for each rank: the labels, kinds and seconds of the parts of its step."""
    rows = (
        stacked(f"rank {rank}", shown, longest_s, duration(sum(seconds for *_, seconds in shown)))
        for rank, shown in parts.items()
    )
    every = (part for shown in parts.values() for part in shown)
    kinds = {label: kind for label, kind, seconds in every if seconds > 0.002 * longest_s}
    return f'<ul class="bars">{"".join(rows)}</ul>{legend(kinds)}'


def legend(kinds: Mapping[str, str]) -> str:
    """Return the keys of a figure: the kinds, which give colours, of some labels."""
    keys = "".join(f'<span><i class="{kind}"></i>{escape(label)}</span>' for label, kind in kinds.items())
    return f'<p class="legend">{keys}</p>'


def left_out(drawn: Sequence[int], every: Sequence[int], unit: str) -> str:
    """Return a sentence for a caption if not all ranks or stages are drawn; else nothing."""
    return "" if len(drawn) == len(every) else f" {len(drawn)} of {len(every)} {unit} are drawn."


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
    base_bytes: float = 0.0
    """Bytes that are always there and are not drawn, such as the libraries of a process."""


def memory(curve: MemoryCurve, step_s: float, said: MemoryCurve | None = None, said_step_s: float = 0.0) -> str:
    """Return stacked areas over the step, with the capacity as a line.

    `said` is the prediction of a measured curve: its total is a line over its own step, which is drawn as long as the other one.
    """
    highest = max(float(curve.peak.value) - curve.base_bytes, float(said.peak.value) if said else 0.0)
    top = max(highest, curve.capacity_bytes or 0.0) if (curve.capacity_bytes or 0) < 8 * highest else highest
    top *= 1.06
    columns, paths = _columns(curve, step_s), []
    below = [0.0] * len(columns)
    for name, values in curve.parts.items():
        above = [under + (values[place] if place >= 0 else 0) for under, place in zip(below, columns, strict=True)]
        if max(values, default=0) > 0.002 * top:
            paths.append(
                f'<path class="{name.replace(" ", "-")}" d="{_area(below, above, top)}"><title>{escape(name)}</title></path>'
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
    base = f"; {size(curve.base_bytes).to_html()} of the process are not drawn" if curve.base_bytes else ""
    return (
        f'<div class="memory"><h3>{escape(curve.label)}</h3><p>peak {curve.peak.to_html()}{of}{predicted}<br/><small>at <code>{escape(curve.peak_at)}</code>{base}</small></p>'
        f'<div class="plot"><div class="marks">{marks}</div><svg viewBox="0 0 {_POINTS} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Memory of {escape(curve.label)} over the step">{"".join(paths)}{limit}</svg></div></div>'
    )


def _unit(top: float) -> float:
    return next((factor for factor, _ in BYTES if top >= factor), 1.0)


def _columns(curve: MemoryCurve, step_s: float) -> list[int]:
    """Return, for each column, the index of the largest total among the times that fall into it, or else of the last before it."""
    totals = [sum(values) for values in zip(*curve.parts.values(), strict=True)]
    columns, ends = [-1] * _POINTS, [-1] * _POINTS
    scale = _POINTS / (step_s or 1.0)
    for index, time_s in enumerate(curve.times_s):
        ends[column := min(max(int(time_s * scale), 0), _POINTS - 1)] = index
        if columns[column] < 0 or totals[index] > totals[columns[column]]:
            columns[column] = index
    last = min(range(len(curve.times_s)), key=lambda index: curve.times_s[index], default=-1)
    for column in range(_POINTS):
        if columns[column] < 0:
            columns[column] = last
        last = ends[column] if ends[column] >= 0 else last
    return columns


def _area(below: Sequence[float], above: Sequence[float], top: float) -> str:
    """Return the path between two lines, with a point only where one of them changes."""
    up, down = _steps(above, top), _steps(below, top)
    return f"M{'L'.join(up)}L{'L'.join(reversed(down))}Z"


def _steps(values: Sequence[float], top: float) -> list[str]:
    points, previous = [], ""
    for column, value in enumerate(values):
        y = f"{100 * (1 - value / top):.1f}"
        if y != previous:
            points += [f"{column} {previous}"] if previous else []
            points.append(f"{column} {y}")
            previous = y
    return [*points, f"{len(values)} {previous}"]


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
    thinned: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        thinned.setdefault(int(point[0]), []).append(point)
    return [
        point
        for column in thinned.values()
        for point in sorted({min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])})
    ]


def range_of(value: float, low: float, high: float, scale: tuple[float, float]) -> str:
    """Return a value as a dot on the line of its interval, on a scale from one value to another."""
    left, right, dot = (3 + 94 * (value_ - scale[0]) / ((scale[1] - scale[0]) or 1.0) for value_ in (low, high, value))
    return (
        '<svg class="range" height="14" role="presentation">'
        f'<line x1="{left:.1f}%" x2="{right:.1f}%" y1="7" y2="7"/><circle cx="{dot:.1f}%" cy="7" r="3.5"/></svg>'
    )


COLUMNS = 500
"""Columns in which a whole step is drawn."""
MOST_BOXES = 30_000
"""Number of boxes above which a page keeps tasks, or what is close together, and no ops."""
MOST_LANES = 64
"""Number of lanes that are drawn at most, unless two stages or ranks have more."""
MOST_GROUPS = 16
"""Number of stages or ranks that are drawn at most."""
_TICKS = 1 << 22
"""Ticks of a step in the packed boxes: the resolution to which one can zoom."""


class Box(NamedTuple):
    """One op in a lane, in seconds from the start of the step."""

    start_s: float
    end_s: float
    kind: str
    """Kind of the op, which gives its colour."""
    name: str
    task: str
    amount: float = 0
    """FLOPs of a computation, or bytes of the buffer of a collective or message; 0 if they are not known."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream of a stage or rank."""

    group: str
    """Name of the stage or rank."""
    name: str
    boxes: Sequence[Box]
    """Boxes in the order of their starts."""
    is_predicted: bool = False
    """Whether it is the prediction that is drawn above a measured lane."""
    team: str = ""
    """Name that lanes have in common if their operations meet: the ranks of a collective, or the ends of a message."""


@dataclass(frozen=True, slots=True)
class TimelineFigure:
    """The lanes of a step on one axis of time."""

    lanes: Sequence[Lane]
    step_s: float
    most_boxes: int = MOST_BOXES

    def to_html(self, *, small: bool = False) -> str:
        """Return the figure; a small one has no boxes to zoom into."""
        groups = "".join(self._group(name, [*lanes]) for name, lanes in groupby(self.lanes, lambda lane: lane.group))
        packed = "" if small else f'<script type="application/octet-stream" class="boxes">{self.packed()}</script>'
        controls = "" if small else _CONTROLS
        return (
            f'<div class="timeline" tabindex="0" role="group" aria-label="Timeline of one step">{controls}{groups}'
            f'<div class="axis"><span></span><div class="ticks">{self._axis()}</div></div>{_legend(self.lanes)}{packed}</div>'
        )

    def packed(self) -> str:
        """Return the boxes of all lanes as base64 of deflated JSON."""
        lanes = _fewer(self.lanes, self.step_s, self.most_boxes)
        unit_s = (self.step_s or 1.0) / _TICKS
        names: dict[tuple[str, str, float], int] = {}
        tasks: dict[str, int] = {}
        rows = []
        for lane in lanes:
            row, last_end = [], 0
            for box in lane.boxes:
                start, end = round(box.start_s / unit_s), round(box.end_s / unit_s)
                name = names.setdefault((box.name, box.kind, box.amount), len(names))
                row += [name, tasks.setdefault(box.task, len(tasks)), start - last_end, end - start]
                last_end = end
            rows.append(row)
        data = {
            "unit_s": unit_s,
            "names": [*names],
            "tasks": [*tasks],
            "lanes": rows,
            "teams": [lane.team for lane in lanes],
        }
        return base64.b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)).decode()

    def _group(self, name: str, lanes: Sequence[Lane]) -> str:
        rows, above = [], ""
        measured = {lane.name for lane in lanes if not lane.is_predicted}
        for lane in lanes:
            if lane.is_predicted and lane.name in measured:
                above = self._drawn(lane)
            else:
                rows.append(self._lane(lane, above))
                above = ""
        return f'<div class="group"><b>{escape(name)}</b><div class="rows">{"".join(rows)}</div></div>'

    def _lane(self, lane: Lane, above: str) -> str:
        """Return a lane; `above` is the predicted one of the same stream."""
        busy = sum(box.end_s - box.start_s for box in lane.boxes) / (self.step_s or 1.0)
        value = Quantity(busy, f"{min(busy, 1):.0%}").to_html()
        return f'<div class="lane"><span>{escape(lane.name)}{value}</span><div>{above}{self._drawn(lane)}</div></div>'

    def _drawn(self, lane: Lane) -> str:
        mark, word = (' class="predicted"', ", predicted") if lane.is_predicted else ("", "")
        return (
            f'<svg{mark} viewBox="0 0 {COLUMNS} 1" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(f"{lane.group}, {lane.name}{word}")}">{_paths(lane.boxes, self.step_s)}</svg>'
        )

    def _axis(self) -> str:
        at = ticks(self.step_s, 8)
        labels = tick_labels(at, SECONDS) if len(at) > 1 else ["0"]
        return "".join(
            f'<i style="left:{100 * value / (self.step_s or 1):.2f}%">{label}</i>'
            for value, label in zip(at, labels, strict=True)
        )


_CONTROLS = (
    '<div class="controls"><button data-do="in" aria-label="Zoom in">+</button><button data-do="out" aria-label="Zoom out">−</button>'
    '<button data-do="left" aria-label="Earlier">←</button><button data-do="right" aria-label="Later">→</button>'
    '<button data-do="all">full step</button><input type="search" placeholder="find an operation" aria-label="Find an operation"/>'
    '<output aria-live="polite">Drag to move, with Shift to measure. Ctrl and wheel, a double click, or + − to zoom. Click an operation to keep its details.</output></div>'
)


def _paths(boxes: Sequence[Box], step_s: float) -> str:
    """Return a path for each kind: the runs of columns of which it takes most; a column that is mostly idle is left empty."""
    most, kinds = [0.0] * COLUMNS, [""] * COLUMNS
    scale = COLUMNS / (step_s or 1.0)
    for box in boxes:
        start, end = box.start_s * scale, min(box.end_s * scale, COLUMNS)
        for column in range(int(start), min(int(end) + 1, COLUMNS)):
            covered = min(end, column + 1) - max(start, column)
            if covered > most[column]:
                most[column], kinds[column] = covered, box.kind
    runs: dict[str, list[tuple[int, int]]] = {}
    first = 0
    for kind, columns in groupby(kind if part > 0.25 else "" for part, kind in zip(most, kinds, strict=True)):
        length = len([*columns])
        if kind:
            runs.setdefault(kind, []).append((first, length))
        first += length
    paths = {kind: "".join(f"M{at} .5h{width}" for at, width in squares) for kind, squares in runs.items()}
    return "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in paths.items())


def _fewer(lanes: Sequence[Lane], step_s: float, most: int) -> Sequence[Lane]:
    """Return lanes of at most `most` boxes: unchanged, or by tasks, or with close ones joined to one box."""
    if sum(len(lane.boxes) for lane in lanes) <= most:
        return lanes
    lanes = [replace(lane, boxes=_joined(lane.boxes, 0.0)) for lane in lanes]
    near_s = step_s / 8000
    while sum(len(lane.boxes) for lane in lanes) > most:
        lanes = [replace(lane, boxes=_joined(lane.boxes, near_s)) for lane in lanes]
        near_s *= 2
    return lanes


def _joined(boxes: Sequence[Box], near_s: float) -> list[Box]:
    """Return one box for consecutive ops of one task; and for what follows within `near_s`, is of one kind or as short as that."""
    joined: list[Box] = []
    for box in boxes:
        last = joined[-1] if joined else None
        if last is not None and last.kind == box.kind and last.task == box.task:
            joined[-1] = last._replace(end_s=box.end_s, name=box.kind, amount=0)
        elif (
            last is not None
            and box.start_s - last.end_s < near_s
            and (last.kind == box.kind or box.end_s - box.start_s < near_s)
        ):
            joined[-1] = last._replace(end_s=max(last.end_s, box.end_s), name=last.kind, task="", amount=0)
        else:
            joined.append(box)
    return joined


def _legend(lanes: Sequence[Lane]) -> str:
    kinds = dict.fromkeys(box.kind for lane in lanes for box in lane.boxes)
    keys = "".join(
        f'<button class="key" data-kind="{kind}" aria-pressed="true"><i class="{kind}"></i>{row_label(kind, None)}</button>'
        for kind in kinds
    )
    return f'<p class="legend">{keys}</p>'


def of_steps(figures: Mapping[int, tuple[float, str]]) -> str:
    """Return the figures of several steps, each with its seconds: the last one is shown, and the script makes a button for each."""
    return "".join(
        f'<div class="of-step" data-step="{step}" data-seconds="{seconds:.6g}"{" hidden" * (step != max(figures))}>{figure}</div>'
        for step, (seconds, figure) in figures.items()
    )


def most_groups(num_lanes: float) -> int:
    """Return how many stages or ranks a page draws, given the mean number of lanes of one."""
    return max(2, int(min(MOST_GROUPS, MOST_LANES / max(1.0, num_lanes))))


def some_of(indices: Sequence[int], wanted: Sequence[int] = (), most: int = MOST_GROUPS) -> list[int]:
    """Return at most `most` of the indices: those that are wanted, the first, the last, and others at equal distances."""
    if len(indices) <= most:
        return [*indices]
    spread = [indices[round(place * (len(indices) - 1) / (most - 1))] for place in range(most)]
    return sorted([*dict.fromkeys([*wanted, spread[0], spread[-1], *spread])][:most])
