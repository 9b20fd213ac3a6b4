"""The page of a proof: whether a layout computes what one device computes, and each check with its error and its allowance."""

from __future__ import annotations

import math
from html import escape

from samestep.output.text import Quantity, count, duration
from samestep.proof.verdict import Check, Verdict
from samestep.wings.pages.page import Answer, Page, Section, table


def page_of(verdict: Verdict, *, small: bool = False) -> Page:
    """Return the page of a proof; a small one has no record."""
    worst = max((check.error for check in verdict.checks), default=0.0)
    compared = sum(check.compared for check in verdict.checks)
    return Page(
        verb="verify",
        title="The same result as one device" if verdict.proven else f"Differs: {verdict.cause}",
        subject=f'{verdict.job} · "{verdict.layout}" · {verdict.steps} steps in {verdict.precision}',
        answers=[
            Answer("proven", "yes" if verdict.proven else "no", None, "", "good" if verdict.proven else "bad"),
            Answer("largest error", _power(worst)),
            Answer("compared", count(compared), None, "tensors, outputs and numbers"),
            Answer("took", duration(verdict.seconds)),
        ],
        verdict=verdict.to_line().partition("  ")[2].strip() if verdict.proven else verdict.explanation,
        sections=[
            Section(
                "Checks",
                table(("check", "error", "allowed", "compared", ""), [_row(check) for check in verdict.checks]),
            )
        ],
        notes=verdict.notes,
        record=None if small else verdict.to_record(),
    )


def _row(check: Check) -> tuple[str, ...]:
    result = "passed" if check.passed else f"differs: {check.where}"
    return (
        escape(check.what),
        _power(check.error).to_html(),
        _power(check.allowance).to_html(),
        Quantity(check.compared, f"{check.compared:,}").to_html(),
        escape(result),
    )


def _power(error: float) -> Quantity:
    return Quantity(error if math.isfinite(error) else math.inf, f"{error:.1e}")
