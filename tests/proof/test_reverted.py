"""Every mend of the reviews' causes, taken away, is missed: `verify` finds what comes of it, by its name."""

from __future__ import annotations

import pytest

from samestep.layout import Layout
from tests.pool import pool
from tests.proof.faults import FAULTS, prove_case
from tests.proof.planting import PLANTED, of_kind
from tests.proof.reproductions import CASES, EQUAL, REFUSED, outcome
from tests.proof.reverted import end, resume

REVERTED, RESUMED, BROKEN, MISSED = map(of_kind, ("reverted", "resumed", "broken", "missed"))
ALWAYS = {
    "a_contrastive_loss_is_waived",
    "later_parts_of_a_tuple_are_dropped",
    "dropout_takes_the_first_dimension_for_the_samples",
    "arguments_of_experts_are_taken_in_the_order_of_the_call",
}
"""The cheapest row of each kind; the others run at night."""
CAUSES = {*(f"A{number}" for number in range(1, 25)), "B", "C", *(f"D{number}" for number in range(1, 10))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly) for name in REVERTED]
)
def test_a_mend_that_is_taken_away_is_missed_by_name(name):
    verdict = prove_case(name)
    assert verdict.cause is REVERTED[name].cause, verdict.to_text()
    assert verdict.explanation


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, row in REVERTED.items() if not row.allow and not row.is_refused])
def test_nothing_is_found_while_the_mend_stands(name):
    verdict = prove_case(name, is_mended=True)
    assert verdict.cause is None, verdict.to_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RESUMED)
def test_what_a_checkpoint_forgets_changes_a_resumed_run(name):
    world = Layout(RESUMED[name].layout).world_size

    def difference(is_mended: bool) -> float:
        return max(pool(world).run(resume, name, is_mended) if world > 1 else [resume(0, 1, name, is_mended)])

    assert difference(is_mended=False) > 1e-6
    assert difference(is_mended=True) < 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly) for name in BROKEN]
)
def test_a_run_without_a_mend_ends_in_its_error(name):
    with pytest.raises(Exception, match=BROKEN[name].text):
        pool(Layout(BROKEN[name].layout).world_size).run(end, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MISSED)
def test_a_refusal_that_is_taken_away_is_missed_by_its_case(name, monkeypatch):
    row = MISSED[name]
    case = CASES[row.code]
    refused = outcome(case, row.layout)
    assert refused.kind == REFUSED
    assert row.text in refused.text
    row.install(monkeypatch)
    found = outcome(case, row.layout)
    assert found.kind == EQUAL, found.text
    assert not found.fits(case)


def test_every_cause_of_the_reviews_has_a_row():
    rows = (REVERTED, RESUMED, BROKEN, MISSED)
    assert {cause for kind in rows for row in kind.values() for cause in row.mends} >= CAUSES
    assert len(PLANTED) == len(FAULTS) + sum(map(len, rows))
