"""The page of an explained run: one HTML file without a script or another file, readable on a phone, in dark mode and printed.

verdict, why, what to try
one bar a rank: the rows of its step, measured; one of the prediction        ▇▇▇▇▇▇▇▇▒▒▒░░
the table of parts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from samestep.explanation.explain import Explained
from samestep.explanation.step_parts import StepPart, parts_of

_COLOURS = {
    "compute": "#4c78a8",
    "recompute": "#b6992d",
    "transfer": "#e15759",
    "wait": "#f28e2b",
    "bubble": "#bab0ac",
    "imbalance": "#9c755f",
    "optimizer": "#59a14f",
    "data": "#b07aa1",
    "host": "#79706e",
    "checkpoint": "#d37295",
    "watching": "#86bcb6",
    "rest": "#888888",
}
_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;padding:16px;max-width:1100px}"
    "h1{font-size:1.4em;margin:0 0 .2em}svg{width:100%;height:28px;display:block}table{border-collapse:collapse}"
    "div.wide{overflow-x:auto}td,th{padding:2px 12px 2px 0;text-align:right;font-variant-numeric:tabular-nums}"
    "td:first-child,th:first-child{text-align:left}.key{display:inline-block;margin-right:14px}"
    ".key i{display:inline-block;width:.8em;height:.8em;margin-right:4px}p,ul{margin:.4em 0}code{white-space:pre-wrap}"
)
_WIDTH = 1000
MOST_BARS = 64
"""The number of ranks above which only the first ones have a bar."""


def to_html(found: Explained) -> str:
    """Return an explained run as one self-contained HTML page."""
    title = f"{found.layout}: where the time went"
    names = dict.fromkeys(part.name for rank in found.found.records for part in parts_of(found.found, rank, None)[0])
    keys = "".join(
        f'<span class="key"><i style="background:{_COLOURS[name]}"></i>{name}</span>' for name in (*names, "rest")
    )
    tries = "".join(f"<li><code>{escape(one)}</code></li>" for one in found.verdict.tries)
    reasons = "".join(f"<li>{escape(one)}</li>" for one in found.verdict.reasons)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(found.verdict.line)}</h1>\n<p>{escape(title)}, {len(found.found.steps)} steps</p>\n"
        f"<ul>{reasons}</ul>\n{f'<p>To try:</p><ul>{tries}</ul>' if tries else ''}\n<p>{keys}</p>\n"
        f"{''.join(_bars(found))}{_table(found)}</body></html>\n"
    )


def _bars(found: Explained) -> Iterator[str]:
    longest_s = max(found.step_s, found.predicted.step_s if found.predicted else 0.0)
    for rank in sorted(found.found.records)[:MOST_BARS]:
        parts, rest_s = parts_of(found.found, rank, None)
        host = found.found.records[rank].head.host
        rest = StepPart("rest", None, rest_s, None)
        yield _bar(
            f"rank {rank} on {host}", [(part.label, part.name, part.measured_s) for part in (*parts, rest)], longest_s
        )
    if found.predicted is not None:
        said = [(part.label, part.name, part.predicted_s or 0.0) for part in found.parts]
        yield _bar(f"predicted, stage of rank {found.found.busiest}", said, longest_s)


def _bar(label: str, parts: Sequence[tuple[str, str, float]], longest_s: float) -> str:
    """Return one bar, whose parts are named where a pointer rests on them."""
    drawn, now = [], 0.0
    for name, kind, seconds in parts:
        width = _WIDTH * seconds / longest_s
        if width > 0.2:
            title = escape(f"{name}: {seconds * 1e3:,.4g} ms")
            drawn.append(
                f'<rect x="{now:.1f}" width="{width:.1f}" height="24" fill="{_COLOURS[kind]}"><title>{title}</title></rect>'
            )
        now += width
    whole = sum(seconds for *_, seconds in parts)
    return (
        f"<p>{escape(label)}: {whole * 1e3:,.4g} ms</p>"
        f'<svg viewBox="0 0 {_WIDTH} 24" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>\n'
    )


def _table(found: Explained) -> str:
    rows = ["<tr><th>part</th><th>measured ms</th><th>predicted ms</th></tr>"]
    for part in (*found.parts, StepPart("rest", None, found.rest_s, None)):
        said = "" if part.predicted_s is None else f"{part.predicted_s * 1e3:,.3f}"
        rows.append(f"<tr><td>{escape(part.label)}</td><td>{part.measured_s * 1e3:,.3f}</td><td>{said}</td></tr>")
    return f'<div class="wide"><table>{"".join(rows)}</table></div>\n'
