"""Code that people write is equal to one device in every layout, or refused by name before it trains."""

from __future__ import annotations

import pytest

from tests.proof.reproductions import EITHER, EQUAL, REPRODUCTIONS, Outcome, Reproduction, outcome

EVERY = ("every layout",)
PENDING: dict[str, tuple[str, ...]] = {}
"""Cases that are still wrong, with their layouts."""


def _cases() -> list[object]:
    return [
        pytest.param(case, layout, marks=_marks(case, layout), id=f"{case.name} under {layout}")
        for case in REPRODUCTIONS
        for layout in case.layouts
    ]


def _marks(case: Reproduction, layout: str) -> list[pytest.MarkDecorator]:
    pending = PENDING.get(case.name, ())
    if pending != EVERY and layout not in pending:
        return []
    return [pytest.mark.xfail(strict=True, reason=f"item {case.item}: {case.cause or 'legal code'}")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "layout"), _cases())
def test_code_of_a_user_is_equal_or_refused_by_name(case, layout):
    found = outcome(case, layout)
    assert found.fits(case), f"{found.kind}: {found.text}"


def test_a_refusal_counts_only_by_name_and_where_the_code_is_not_legal():
    wrong = REPRODUCTIONS[0]
    legal = next(case for case in REPRODUCTIONS if case.must == EQUAL)
    assert wrong.must == EITHER
    assert Outcome("refused", f"{wrong.names[0]} is read by a later stage").fits(wrong)
    assert not Outcome("refused", "something else").fits(wrong)
    assert not Outcome("refused", "blocks").fits(legal)
    assert not Outcome("different").fits(wrong)
    assert not Outcome("failed", wrong.names[0]).fits(wrong)


def test_what_is_pending_names_cases():
    layouts = {case.name: case.layouts for case in REPRODUCTIONS}
    assert PENDING.keys() <= layouts.keys()
    assert all(pending == EVERY or {*pending} <= {*layouts[name]} for name, pending in PENDING.items())
    assert len(layouts) == len(REPRODUCTIONS)
