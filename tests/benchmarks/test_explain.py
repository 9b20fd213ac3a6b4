"""The benchmark of `explain`: its delays come and go in steps that alternate, and each of its parts has a row of the right kind."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import explain_delays
import explain_tables
import planted_delays
from planted_delays import Delay, Plan


def test_delays_come_one_after_the_other_and_neighbours_are_not_looked_at() -> None:
    plan = Plan([Delay(place="block", pairs=3), Delay(place="data", half=10, pairs=2)], "")
    for index, delay in enumerate(plan.delays):
        on, off = (plan.steps_of(index, planted=planted) for planted in (True, False))
        assert {plan.delay_of(step) for step in on} == {delay}
        assert {plan.delay_of(step) for step in off} == {None}
        assert len(on) == len(off) == delay.half // 2 * delay.pairs
        # the step before one that is looked at is like it
        assert {plan.delay_of(step - 1) for step in on} == {delay}
        assert {plan.delay_of(step - 1) for step in off} == {None}
        assert max(*on, *off) < plan.num_steps
    assert plan.delay_of(planted_delays.WARM_STEPS) is None
    assert plan.delay_of(plan.num_steps) is None


def test_every_place_is_one_that_is_planted_and_every_case_has_a_row() -> None:
    cases = [case for scenario in explain_delays.SCENARIOS for case in scenario.cases]
    assert {case.delay.place for case in cases} == {*planted_delays.PLACES}
    assert len(
        {(case.name, scenario.layout) for scenario in explain_delays.SCENARIOS for case in scenario.cases}
    ) == len(cases)


def test_what_is_not_as_it_should_be_is_named() -> None:
    case = explain_delays.SCENARIOS[0].cases[0]
    right = {
        "truth_s": 0.2,
        "moved_s": 0.19,
        "waits_s": 0.21,
        "other": ("host of rank 0", 0.004, 0.001),
        "charge": (1, case.cause, 0.2),
        "kind": "straggler",
    }
    assert [*explain_delays._faults(case, 0.1, once=False, **right)] == []
    harmed = {
        "row": {"moved_s": 0.15},
        "waits": {"waits_s": 0.25},
        "elsewhere": {"other": ("data of rank 1", -0.006, 0.001)},
        "cause": {"charge": (0, case.cause, 0.2)},
        "verdict": {"kind": "link"},
    }
    for fault, change in harmed.items():
        assert [*explain_delays._faults(case, 0.1, once=False, **{**right, **change})] == [fault]
    assert [*explain_delays._faults(case, 0.1, once=True, **right)] == ["verdict"]  # once is no straggler
    assert not [
        *explain_delays._faults(dataclasses.replace(case, cause=""), 0.1, once=False, **{**right, "charge": None})
    ]


def test_the_noise_of_a_median_is_that_of_samples_of_a_normal_distribution() -> None:
    draw = random.Random(0)
    samples = [[draw.gauss(100, 5) for _ in range(25)] for _ in range(400)]
    seen = statistics.stdev(statistics.median(values) for values in samples)
    said = statistics.fmean(explain_delays.error_of_median(values) for values in samples)
    assert said == pytest.approx(seen, rel=0.1)
    assert explain_delays.error_of_median([3.0]) == 0


@pytest.mark.parametrize("part", ["planted", "clean_runs", "layout_rows", "recorder_cost", "slower_with_more_machines"])
def test_kept_rows_make_a_table(part: str) -> None:
    assert "Measured on " in getattr(explain_tables, part)()
    kept = json.loads(explain_tables.ROWS.read_text())
    assert {name: bool(found["rows"]) for name, found in kept.items()} == dict.fromkeys(kept, True)
