"""The page of a proof: whether a layout computes what one device computes, and each check with its error and its allowance."""

from __future__ import annotations

import math
from html import escape

from samestep.output.page.page import Answer, Page, Section, table
from samestep.output.page.quantities import Quantity, count, duration
from samestep.proof.verdict import Check, Verdict


def page_of(found: Verdict, *, small: bool = False) -> Page:
    """Return the page of a proof; a small one has no record."""
    worst = max((check.error for check in found.checks), default=0.0)
    compared = sum(check.compared for check in found.checks)
    return Page(
        verb="verify",
        title="The same result as one device" if found.proven else f"Differs: {found.cause}",
        subject=f'{found.job} · "{found.layout}" · {found.steps} steps in {found.precision}',
        answers=[
            Answer("proven", "yes" if found.proven else "no", None, "", "good" if found.proven else "bad"),
            Answer("largest error", _power(worst)),
            Answer("compared", count(compared), None, "tensors, outputs and numbers"),
            Answer("took", duration(found.seconds)),
        ],
        verdict=found.to_line().partition("  ")[2].strip() if found.proven else found.explanation,
        sections=[
            Section("Checks", table(("check", "error", "allowed", "compared", ""), [_row(one) for one in found.checks]))
        ],
        notes=found.notes,
        record=None if small else found.to_record(),
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
