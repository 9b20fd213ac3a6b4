"""The page of a plan: the recommended layout as a prediction's page shows it, the others in a table, and the rejected ones."""

from __future__ import annotations

from html import escape

from samestep.output.text import Quantity, count, duration, share, size
from samestep.wings.pages import charts, prediction_page
from samestep.wings.pages.page import Answer, Page, Section, table
from samestep.wings.plan import ranking
from samestep.wings.plan.search import Plan
from samestep.wings.plan.simulation import simulate
from samestep.wings.plan.simulation.simulate import Prediction

_RULES = {
    "refused": ("not supported", "world"),
    "memory": ("out of memory", "dp"),
    "slower": ("slower", "forward"),
    "unplayed": ("not simulated", "idle"),
}


def page_of(plan: Plan, *, small: bool = False) -> Page:
    """Return the page of a plan; a small one has neither boxes to zoom into nor a record."""
    record = None if small else ranking.as_record(plan)
    if not plan.best:
        return Page(
            verb="plan",
            title=f"No layout of {plan.devices:,} devices fits",
            subject=f"{plan.job.model.source} · {plan.hardware.name}",
            answers=[Answer("fits", "no", None, "", "bad")],
            verdict=plan.nearest,
            sections=[_fallen(plan)],
            notes=prediction_page.notes_of(plan.labels, plan.hardware, plan.devices),
            record=record,
        )
    best = ranking.recommended(plan)
    return Page(
        verb="plan",
        title=prediction_page.title_of(best),
        subject=prediction_page.subject_of(best),
        answers=prediction_page.answers_of(best),
        verdict=f"The recommended layout is bound by {simulate.binds(best)}",
        reasons=simulate.reasons(best),
        tries=_tries(plan),
        sections=[
            _compared(plan),
            *prediction_page.figures_of(best, small=small),
            _fallen(plan),
            prediction_page.described(plan.job, best.layout, plan.hardware),
        ],
        notes=[*prediction_page.notes_of(plan.labels, plan.hardware, plan.devices), *ranking.cautions(plan.best)],
        record=record,
    )


def _tries(plan: Plan) -> list[str]:
    """Return the fastest layout, if another one is recommended, and the savings of other numerics as commands."""
    best, first = ranking.recommended(plan), plan.best[0]
    lines = []
    if first is not best:
        lines.append(
            f'--layout "{first.layout}": the fastest, {1 - first.step_s / best.step_s:.1%} less time, {first.chance_to_fit:.0%} likely to fit'
        )
    return lines + [
        f"--set {saving.change}: {1 - saving.step_s / best.step_s:.0%} less; it may change results"
        for saving in plan.other_numerics
    ]


def _compared(plan: Plan) -> Section:
    """Return the table of the layouts that fit, the fastest first."""
    shown = ranking.in_order(plan)
    ends = [end for prediction in shown for end in prediction.intervals["time"].of(prediction.step_s)]
    head = ("layout", "step", "interval", f"{shown[0].unit}/s/device", "MFU", "peak", "fits", "bubble", "exposed")
    rows = [_row(prediction, plan, (min(ends), max(ends))) for prediction in shown]
    caption = f"The fastest of {plan.considered:,} layouts, the recommended one first. The line is the interval of the step time. Exposed: communication that no computation hides, as a share of the step."
    return Section("Layouts compared", table(head, rows), caption)


def _row(prediction: Prediction, plan: Plan, scale: tuple[float, float]) -> tuple[str, ...]:
    mark = ranking.mark_of(plan, prediction)
    low_s, high_s = prediction.intervals["time"].of(prediction.step_s)
    return (
        f"<code>{escape(str(prediction.layout))}</code>{f' <em>{mark}</em>' if mark else ''}",
        duration(prediction.step_s).to_html(),
        charts.range_of(prediction.step_s, low_s, high_s, scale),
        count(prediction.tokens_per_s_per_device).to_html(),
        share(prediction.mfu).to_html(),
        size(prediction.peak.total).to_html(),
        Quantity(prediction.chance_to_fit, f"{prediction.chance_to_fit:.0%}").to_html(),
        share(prediction.bubble_fraction).to_html(),
        share(prediction.exposed_comm_s / prediction.step_s).to_html(),
    )


def _fallen(plan: Plan) -> Section:
    """Return how many layouts each rule rejected, and an example of each reason."""
    counted = plan.counts
    most = max(counted.values(), default=1)
    rows = "".join(
        charts.stacked(_RULES[rule][0], [(rule, _RULES[rule][1], number)], most, Quantity(number, f"{number:,}"))
        for rule, number in counted.most_common()
    )
    shown = "".join(
        f"<li><code>{escape(str(next(example.layouts())))}</code><small>{escape(example.reason)}</small></li>"
        for example in ranking.examples(plan.fallen)
    )
    body = f'<ul class="bars">{rows}</ul><ul class="reasons">{shown}</ul>'
    return Section(
        "Rejected layouts", body, "The number of layouts that each rule rejected, and one example of each reason."
    )
