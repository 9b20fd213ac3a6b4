"""The page of a plan: the best layout as a prediction's page shows it, the others in a table, and why the rest fell out."""

from __future__ import annotations

from html import escape

from samestep.output.page import charts
from samestep.output.page.page import Answer, Page, Section, table
from samestep.output.page.quantities import Quantity, count, duration, share, size
from samestep.planning import ranking
from samestep.planning.search import Plan
from samestep.simulation import bound_by, prediction_page
from samestep.simulation.prediction import Prediction, intervals

_RULES = {
    "refused": ("refused by a rule", "world"),
    "memory": ("too large for the memory", "dp"),
    "slower": ("slower than those shown", "forward"),
    "unplayed": ("not played", "idle"),
}


def page_of(found: Plan, *, small: bool = False) -> Page:
    """Return the page of a plan; a small one has neither boxes to zoom into nor a record."""
    record = None if small else ranking.as_record(found)
    if not found.best:
        return Page(
            verb="plan",
            title=f"No layout of {found.devices:,} devices fits",
            subject=f"{found.job.model.source} · {found.hardware.name}",
            answers=[Answer("fits", "no", None, "", "bad")],
            verdict=found.nearest,
            sections=[_fallen(found)],
            notes=prediction_page.notes_of(found.labels),
            record=record,
        )
    best = found.best[0]
    return Page(
        verb="plan",
        title=prediction_page.title_of(best),
        subject=prediction_page.subject_of(best),
        answers=prediction_page.answers_of(best),
        verdict=f"The fastest layout is bound by {bound_by.binds(best)}",
        reasons=bound_by.reasons(best),
        tries=_tries(found),
        sections=[
            _compared(found),
            *prediction_page.figures_of(best, small=small),
            _fallen(found),
            prediction_page.described(found.job, best.layout, found.hardware),
        ],
        notes=[*prediction_page.notes_of(found.labels), *ranking.cautions(found.best)],
        record=record,
    )


def _tries(found: Plan) -> list[str]:
    """Return the safer layout and the savings of other numerics as commands."""
    best, safe = found.best[0], found.safe
    lines = []
    if safe is not None and safe is not best:
        lines.append(
            f'--layout "{safe.layout}": {safe.chance_to_fit:.0%} sure to fit, {safe.step_s / best.step_s:.3g} times as long'
        )
    return lines + [
        f"--set {saving.change}: {1 - saving.step_s / best.step_s:.0%} less; it may change results"
        for saving in found.other_numerics
    ]


def _compared(found: Plan) -> Section:
    """Return the table of the layouts that fit, the fastest first."""
    shown = [*found.best, *([found.safe] if found.safe and found.safe not in found.best else [])]
    ends = [end for one in shown for end in intervals()["time"].of(one.step_s)]
    head = (
        "layout",
        "step",
        "interval",
        f"{shown[0].unit}/s a device",
        "MFU",
        "peak",
        "fits",
        "bubble",
        "exposed",
    )
    rows = [_row(one, found, (min(ends), max(ends))) for one in shown]
    caption = f"The fastest of {found.considered:,} layouts; the line is the interval of the step on one scale."
    return Section("Layouts compared", table(head, rows), caption)


def _row(one: Prediction, found: Plan, scale: tuple[float, float]) -> tuple[str, ...]:
    mark = ranking.mark_of(found, one)
    low_s, high_s = intervals()["time"].of(one.step_s)
    return (
        f"<code>{escape(str(one.layout))}</code>{f' <em>{mark}</em>' if mark else ''}",
        duration(one.step_s).to_html(),
        charts.range_of(one.step_s, low_s, high_s, scale),
        count(one.tokens_per_s_per_device).to_html(),
        share(one.mfu).to_html(),
        size(one.peak.total).to_html(),
        Quantity(one.chance_to_fit, f"{one.chance_to_fit:.0%}").to_html(),
        share(one.bubble_fraction).to_html(),
        duration(one.exposed_comm_s).to_html(),
    )


def _fallen(found: Plan) -> Section:
    """Return how many layouts fell out by each rule, and an example of each reason."""
    counted = found.counts
    most = max(counted.values(), default=1)
    rows = "".join(
        charts.stacked(_RULES[rule][0], [(rule, _RULES[rule][1], number)], most, Quantity(number, f"{number:,}"))
        for rule, number in counted.most_common()
    )
    shown = "".join(
        f"<li><code>{escape(str(next(one.layouts())))}</code><small>{escape(one.reason)}</small></li>"
        for one in ranking.examples(found.fallen)
    )
    body = f'<ul class="bars">{rows}</ul><ul class="reasons">{shown}</ul>'
    return Section(
        "Why the others fell out", body, "Layouts by the rule that ended them, and one example of each reason."
    )
