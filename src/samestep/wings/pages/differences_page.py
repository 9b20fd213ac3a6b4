"""The page of two steps side by side: which one takes longer, by how much each part differs, and what is known to differ."""

from __future__ import annotations

from html import escape

from samestep.output.text import Quantity, duration, share
from samestep.wings.explain.differences import Differences, OneSide
from samestep.wings.pages.charts import Bar, bars
from samestep.wings.pages.page import Answer, Page, Section, table, words
from samestep.wings.pages.prediction_page import row_kind
from samestep.wings.plan.simulation.partition import row_label


def page_of(differences: Differences, *, small: bool = False) -> Page:
    """Return the page of a comparison; a small one has no record."""
    one, other = differences.one, differences.other
    before, after = differences.compared
    ratio = share(abs(after.step_s - before.step_s) / (before.step_s or 1.0)).text
    more = other.step_s - one.step_s
    first, second = _names(differences)
    is_mixed = bool(before.predicted_for) != bool(after.predicted_for)
    kind = "Measured against predicted: " if is_mixed else "Predicted: " if before.predicted_for else ""
    return Page(
        verb="explain",
        title=f"{kind}{ratio} {'longer' if after.step_s > before.step_s else 'shorter'}, {duration(after.step_s).text} instead of {duration(before.step_s).text}",
        subject=f"{other.name} ({_kind(other)}) · compared with {one.name} ({_kind(one)})",
        answers=[
            Answer(first, duration(one.step_s), None, _kind(one)),
            Answer(second, duration(other.step_s), None, _kind(other)),
            Answer("difference", _signed(more), None, "per step"),
        ],
        verdict=differences.verdict,
        reasons=[f"known difference: {cause}" for cause in differences.causes],
        sections=[_parts(differences), _sides(differences)],
        record=None if small else differences.to_record(),
    )


def _names(differences: Differences) -> tuple[str, str]:
    """Return a name for each side; both are different."""
    name, other = differences.one.name, differences.other.name
    return (name, other) if name != other else ("first", "second")


def _kind(side: OneSide) -> str:
    return f"predicted for {side.predicted_for}" if side.predicted_for else "measured"


def _signed(seconds: float) -> Quantity:
    return Quantity(seconds, f"{'+' if seconds > 0 else '−'}{duration(abs(seconds)).text}" if seconds else "0 s")


def _parts(differences: Differences) -> Section:
    """Return the parts of both, the largest difference first."""
    shown = [
        row for row in differences.rows if max(row[2:]) > 1e-4 * max(differences.one.step_s, differences.other.step_s)
    ]
    drawn = [Bar(row_label(name, axis), row_kind(name, axis), new_s, old_s) for name, axis, old_s, new_s in shown]
    rows = [
        (
            escape(row_label(name, axis)),
            duration(old_s).to_html(),
            duration(new_s).to_html(),
            _signed(new_s - old_s).to_html(),
        )
        for name, axis, old_s, new_s in shown
    ]
    first, second = _names(differences)
    body = bars(drawn, differences.other.step_s, above=first) + table(("part", first, second, "difference"), rows)
    caption = f"The thin bar is {first}, the thick bar {second}. Shares are shares of {second}."
    return Section("Where they differ", body, caption)


def _sides(differences: Differences) -> Section:
    """Return both sides, and the keys of the jobs that differ."""
    first, second = _names(differences)
    changed = {
        key: f"{value} and {differences.other.keys[key]}"
        for key, value in differences.one.keys.items()
        if key in differences.other.keys and value != differences.other.keys[key]
    }
    sides = {**_about(first, differences.one), **_about(second, differences.other), **changed}
    return Section("Both sides", words(sides), is_folded=True)


def _about(label: str, side: OneSide) -> dict[str, object]:
    return {f"{label}, layout": side.layout, f"{label}, machine": side.machine or side.predicted_for}
