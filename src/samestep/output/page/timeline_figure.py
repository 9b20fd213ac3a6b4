"""The timeline of a step: one lane for each stage (or rank) and stream, drawn twice from the same boxes.

Python draws the step as a whole, in `COLUMNS` columns a lane, each in the colour of the kind that takes most of its time: this is
what is printed, and what is seen without a script. The boxes themselves are packed (times in ticks, counted from the end of the
box before, deflated), and the script of the page draws from them at any zoom: tasks where an op would be less than a few pixels
wide, ops with their names where there is room.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import NamedTuple

from samestep.output.page.quantities import SECONDS, Quantity, tick_labels, ticks

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


@dataclass(frozen=True, slots=True)
class TimelineFigure:
    """The lanes of a step on one axis of time."""

    lanes: Sequence[Lane]
    step_s: float

    def to_html(self, *, small: bool = False) -> str:
        """Return the figure; a small one has no boxes to zoom into."""
        groups = "".join(self._group(name, [*lanes]) for name, lanes in groupby(self.lanes, lambda lane: lane.group))
        packed = "" if small else f'<script type="application/octet-stream" class="boxes">{self.packed()}</script>'
        controls = "" if small else _CONTROLS
        return (
            f'<div class="timeline" tabindex="0" role="group" aria-label="Timeline of one step">{controls}{groups}'
            f'<div class="axis"><span></span><div class="ticks">{self._axis()}</div></div>{packed}</div>{_legend(self.lanes)}'
        )

    def packed(self) -> str:
        """Return the boxes of all lanes as base64 of deflated JSON."""
        lanes = _fewer(self.lanes, self.step_s)
        unit_s = (self.step_s or 1.0) / _TICKS
        names: dict[tuple[str, str], int] = {}
        tasks: dict[str, int] = {}
        rows = []
        for lane in lanes:
            row, before = [], 0
            for box in lane.boxes:
                start, end = round(box.start_s / unit_s), round(box.end_s / unit_s)
                name = names.setdefault((box.name, box.kind), len(names))
                row += [name, tasks.setdefault(box.task, len(tasks)), start - before, end - start]
                before = end
            rows.append(row)
        data = {"unit_s": unit_s, "names": [*names], "tasks": [*tasks], "lanes": rows}
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
    '<button data-do="all">whole step</button><output aria-live="polite">Drag to move, Ctrl and wheel or + − to zoom, ↑ ↓ , . to go through ops</output></div>'
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
    paths = {kind: "".join(f"M{at} .5h{width}" for at, width in found) for kind, found in runs.items()}
    return "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in paths.items())


def _fewer(lanes: Sequence[Lane], step_s: float) -> Sequence[Lane]:
    """Return lanes of at most `MOST_BOXES` boxes: as they are, or by tasks, or with what is close together as one box."""
    if sum(len(lane.boxes) for lane in lanes) <= MOST_BOXES:
        return lanes
    lanes = [replace(lane, boxes=_joined(lane.boxes, 0.0)) for lane in lanes]
    near_s = step_s / 8000
    while sum(len(lane.boxes) for lane in lanes) > MOST_BOXES:
        lanes = [replace(lane, boxes=_joined(lane.boxes, near_s)) for lane in lanes]
        near_s *= 2
    return lanes


def _joined(boxes: Sequence[Box], near_s: float) -> list[Box]:
    """Return one box for consecutive ops of one task; and for what follows within `near_s`, is of one kind or as short as that."""
    found: list[Box] = []
    for box in boxes:
        last = found[-1] if found else None
        if last is not None and last.kind == box.kind and last.task == box.task:
            found[-1] = last._replace(end_s=box.end_s, name=box.kind)
        elif (
            last is not None
            and box.start_s - last.end_s < near_s
            and (last.kind == box.kind or box.end_s - box.start_s < near_s)
        ):
            found[-1] = last._replace(end_s=max(last.end_s, box.end_s), name=last.kind, task="")
        else:
            found.append(box)
    return found


def _legend(lanes: Sequence[Lane]) -> str:
    kinds = dict.fromkeys(box.kind for lane in lanes for box in lane.boxes)
    keys = "".join(f'<span><i class="{kind}"></i>{kind}</span>' for kind in kinds)
    return f'<p class="legend">{keys}</p>'


def most_groups(num_lanes: float) -> int:
    """Return how many stages or ranks a page draws, given the mean number of lanes of one."""
    return max(2, int(min(MOST_GROUPS, MOST_LANES / max(1.0, num_lanes))))


def some_of(indices: Sequence[int], wanted: Sequence[int] = (), most: int = MOST_GROUPS) -> list[int]:
    """Return at most `most` of the indices: those that are wanted, the first, the last, and others at equal distances."""
    if len(indices) <= most:
        return [*indices]
    kept = {*wanted}
    spread = [indices[round(place * (len(indices) - 1) / (most - 1))] for place in range(most)]
    for index in (spread[0], spread[-1], *spread):
        if len(kept) < most:
            kept.add(index)
    return sorted(kept)
