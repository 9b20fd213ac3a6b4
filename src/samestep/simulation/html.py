"""A prediction as one HTML file: pipeline stages and streams as rows, ops as boxes.

The file loads nothing and runs no script, so it can be sent, kept and opened anywhere. The SVG title of a box, which
browsers show beside the pointer, gives its op, task and times.

    stage 0 compute  ┌─F0─┬─F1─┐      ┌──B0──┐┌──B1──┐
            pp           └s0┘└s1┘
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape

from samestep.output.byte_sizes import readable
from samestep.simulation.prediction import Prediction
from samestep.simulation.spans import COMPUTE, Span
from samestep.simulation.timeline import Timeline

MOST_BOXES = 20_000
"""Number of ops above which one box is drawn for each task: more would be slow, and too small to see."""
_WIDTH, _ROW, _GAP, _MARGIN = 1400, 18, 4, 160
_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#59a14f",
    "weight": "#8cd17d",
    "recompute": "#b6992d",
    "update": "#79706e",
    "outer": "#d7b5a6",
    "send": "#d37295",
    "recv": "#fabfd2",
    "all_reduce": "#e15759",
    "all_gather": "#f28e2b",
    "reduce_scatter": "#b07aa1",
    "reduce": "#9c755f",
    "broadcast": "#bab0ac",
    "all_to_all": "#edc948",
    "task": "#86bcb6",
}
"""Colour of each kind of op; `task` stands for several ops."""


def to_html(found: Prediction) -> str:
    """Return a prediction as one self-contained HTML page."""
    timeline = found.timeline
    title = f"{found.layout} on {found.hardware.name}"
    rows = [(stage, stream) for stage in timeline.stages for stream in timeline.streams(stage)]
    height = len(rows) * (_ROW + _GAP) + 40
    spans = timeline.spans if len(timeline.spans) <= MOST_BOXES else tuple(_tasks(timeline))
    drawn = {kind for span in spans if (kind := _kind(span))}
    keys = "".join(f'<span class="{kind}">{kind}</span>' for kind in _COLOURS if kind in drawn)
    style = "".join(f"rect.{k},span.{k}{{fill:{colour};background:{colour}}}" for k, colour in _COLOURS.items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>body{{font:14px sans-serif;margin:24px}}"
        "text{font:12px sans-serif}rect{stroke:#fff;stroke-width:.3}p span{padding:2px 8px;margin-right:6px;color:#000}"
        f"svg{{width:100%;min-width:{_WIDTH}px}}{style}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(_summary(found))}</p>\n<p>{keys}</p>\n"
        f'<svg viewBox="0 0 {_MARGIN + _WIDTH} {height}" role="img">\n'
        f"{''.join(_boxes(timeline, rows, spans))}{_axis(timeline.step_s, height)}</svg>\n"
        f"<pre>{escape(json.dumps(found.to_record(), indent=1))}</pre>\n</body></html>\n"
    )


def _summary(found: Prediction) -> str:
    return (
        f"{found.step_s:.4g} s a step of {found.tokens:,} {found.unit} on {found.devices} devices; MFU {found.mfu:.1%}, "
        f"bubbles {found.bubble_fraction:.1%}, exposed communication {found.exposed_comm_s:.3g} s, "
        f"peak {readable(found.peak.total)} at {found.peak.peak_at}"
    )


def _boxes(timeline: Timeline, rows: list[tuple[int, str]], spans: tuple[Span, ...]) -> Iterator[str]:
    place = {row: index * (_ROW + _GAP) for index, row in enumerate(rows)}
    scale = _WIDTH / (timeline.step_s or 1.0)
    for (stage, stream), y in place.items():
        name = f"stage {stage} {stream}" if stream == COMPUTE else stream
        busy = timeline.busy_s(stage, stream) / (timeline.step_s or 1.0)
        yield f'<text x="{_MARGIN - 6}" y="{y + 13}" text-anchor="end">{escape(name)} {busy:.0%}</text>\n'
    for span in spans:
        took_s = span.end_s - span.start_s
        if took_s <= 0:
            continue
        title = (
            f"{span.name} of {span.task}: {span.start_s * 1e3:.4g} to {span.end_s * 1e3:.4g} ms, {took_s * 1e3:.4g} ms"
        )
        yield (
            f'<rect class="{_kind(span)}" x="{_MARGIN + span.start_s * scale:.2f}" y="{place[span.stage, span.stream]}" '
            f'width="{took_s * scale:.2f}" height="{_ROW}"><title>{escape(title)}</title></rect>\n'
        )


def _axis(step_s: float, height: int) -> str:
    ticks = (
        f'<text x="{_MARGIN + part * _WIDTH / 10}" y="{height - 8}" text-anchor="middle">{part * step_s * 100:.4g} ms</text>'
        for part in range(11)
    )
    return "".join(ticks) + "\n"


def _kind(span: Span) -> str:
    kind = span.name.partition(":")[0]
    return kind if kind in _COLOURS else "task"


def _tasks(timeline: Timeline) -> Iterator[Span]:
    """Yield one span for consecutive ops of one task on one stream."""
    open_spans: dict[tuple[int, str], Span] = {}
    for span in timeline.spans:
        key = (span.stage, span.stream)
        last = open_spans.get(key)
        if last is not None and last.task == span.task:
            open_spans[key] = last._replace(end_s=span.end_s, name=last.name if _same(last, span) else "several ops")
            continue
        if last is not None:
            yield last
        open_spans[key] = span
    yield from open_spans.values()


def _same(one: Span, other: Span) -> bool:
    return one.name.partition(":")[0] == other.name.partition(":")[0]
