"""The page of two steps side by side: which one takes longer, by how much each part differs, and what is known to differ."""

from __future__ import annotations

from html import escape

from samestep.explanation.differences import Differences, OneSide
from samestep.output.page.charts import Bar, bars, stacked
from samestep.output.page.page import Answer, Page, Section, table, words
from samestep.output.page.quantities import Quantity, duration, share
from samestep.simulation.prediction_page import row_kind, row_label


def page_of(found: Differences, *, small: bool = False) -> Page:
    """Return the page of a comparison; a small one has no record."""
    one, other = found.one, found.other
    more = other.step_s - one.step_s
    return Page(
        verb="explain",
        title=f"{share(abs(more) / (one.step_s or 1.0)).text} {'longer' if more > 0 else 'shorter'}: {duration(other.step_s).text} instead of {duration(one.step_s).text}",
        subject=f"{other.name} · compared with {one.name}",
        answers=[
            Answer("first", duration(one.step_s), None, one.name),
            Answer("second", duration(other.step_s), None, other.name),
            Answer("difference", _signed(more), None, "a step"),
        ],
        verdict=found.verdict,
        reasons=[f"known to differ: {cause}" for cause in found.causes],
        sections=[_parts(found), _steps(found), _sides(found)],
        record=None if small else found.to_record(),
    )


def _signed(seconds: float) -> Quantity:
    return Quantity(seconds, f"{'+' if seconds > 0 else '−'}{duration(abs(seconds)).text}" if seconds else "0 s")


def _parts(found: Differences) -> Section:
    """Return the parts of both, the largest difference first."""
    shown = [row for row in found.rows if max(row[2:]) > 1e-4 * max(found.one.step_s, found.other.step_s)]
    drawn = [Bar(row_label(name, axis), row_kind(name, axis), after, before) for name, axis, before, after in shown]
    rows = [
        (
            escape(row_label(name, axis)),
            duration(before).to_html(),
            duration(after).to_html(),
            _signed(after - before).to_html(),
        )
        for name, axis, before, after in shown
    ]
    body = bars(drawn, found.other.step_s, above="first") + table(("part", "first", "second", "difference"), rows)
    caption = "The slim bar is the first step, the thick one the second; shares are those of the second."
    return Section("Where they differ", body, caption)


def _steps(found: Differences) -> Section:
    """Return both steps as bars of their parts."""
    longest_s = max(found.one.step_s, found.other.step_s)
    lines, names = [], dict[str, str]()
    for label, side in (("first", found.one), ("second", found.other)):
        parts = [(row_label(*key), row_kind(*key), max(0.0, seconds)) for key, seconds in side.rows.items()]
        names |= {name: kind for name, kind, seconds in parts if seconds > 0.002 * longest_s}
        lines.append(stacked(label, parts, longest_s, duration(side.step_s)))
    legend = "".join(f'<span><i class="{kind}"></i>{escape(name)}</span>' for name, kind in names.items())
    return Section("Both steps", f'<ul class="bars">{"".join(lines)}</ul><p class="legend">{legend}</p>')


def _sides(found: Differences) -> Section:
    """Return what is compared, and the keys of the jobs that differ."""
    changed = {
        key: f"{value} and {found.other.keys[key]}"
        for key, value in found.one.keys.items()
        if key in found.other.keys and value != found.other.keys[key]
    }
    return Section(
        "What is compared", words({**_about("first", found.one), **_about("second", found.other), **changed})
    )


def _about(label: str, side: OneSide) -> dict[str, object]:
    return {label: side.name, f"{label}, layout": side.layout, f"{label}, machine": side.machine or side.predicted_for}
