"""What the laws are tried on: no axis and no schedule is left out of the draws."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from samestep.schedules import SCHEDULES
from tests.laws.models import AXES, LAW, PIPELINES, Case, cases


def test_each_axis_is_in_at_least_5_of_25_cases() -> None:
    drawn: Counter[str] = Counter()

    @LAW
    @given(cases())
    def count(case: Case) -> None:
        drawn.update(["case", *(axis for axis in AXES if getattr(case.layout, axis) > 1)])

    count()
    assert drawn["case"] == LAW.max_examples == 25
    assert all(drawn[axis] >= 5 for axis in AXES), drawn


def test_each_schedule_is_drawn() -> None:
    drawn: set[str] = set()

    @LAW
    @given(PIPELINES)
    def note(case: Case) -> None:
        assert case.layout.pp == 2
        drawn.add(case.layout.schedule)

    note()
    assert drawn == set(SCHEDULES)
