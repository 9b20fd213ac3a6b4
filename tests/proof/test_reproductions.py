"""Code that people write is equal to one device in every layout, or refused by name before it trains."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests import traced
from tests.covering import daily
from tests.pool import close_all
from tests.proof.reproductions import EITHER, EQUAL, OUTCOMES, REPRODUCTIONS, Outcome, outcome

ROWS = [(case, layout) for case in REPRODUCTIONS for layout in case.layouts]
KINDS = daily(((case.cause, case.item, case.must, case.against), layout) for case, layout in ROWS)
"""By default each cause with what its code must come to, and each setting of a layout, is that of a case."""
CASES = [
    pytest.param(case, layout, id=f"{case.name} under {layout}", marks=kind.marks)
    for (case, layout), kind in zip(ROWS, KINDS, strict=True)
]
KNOWN = json.loads(OUTCOMES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _a_case_is_examined_once() -> Iterator[None]:
    """Ranks read what one device, or the first of them, has found out; they are forked behind this, and end with it."""
    close_all()
    with traced.alike_once():
        yield
    close_all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.every_row
@pytest.mark.parametrize(("case", "layout"), CASES)
def test_code_of_a_user_is_equal_or_refused_by_name(case, layout):
    found = outcome(case, layout)
    assert found.fits(case), f"{found.kind}: {found.text}"
    assert found.kind == KNOWN[case.name][layout], f"the table says otherwise: {found.text}"


def test_a_refusal_counts_only_by_name_and_where_the_code_is_not_legal():
    wrong = next(case for case in REPRODUCTIONS if case.must == EITHER)
    legal = next(case for case in REPRODUCTIONS if case.must == EQUAL)
    assert Outcome("refused", f"{wrong.names[0]} is read by a later stage").fits(wrong)
    assert not Outcome("refused", "something else").fits(wrong)
    assert not Outcome("refused", "something").fits(legal)
    assert not Outcome("different").fits(wrong)
    assert not Outcome("failed", wrong.names[0]).fits(wrong)
