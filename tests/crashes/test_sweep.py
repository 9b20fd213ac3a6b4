"""A sample of `make crashes`: each case is noticed, loses at most the steps since its checkpoint, and is right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.network_namespaces import lacking, network
from tests import small
from tests.crashes import network_faults, outcomes, run_faults, stored_faults, sweep
from tests.crashes.outcomes import Outcome, Sums

_LACKING = lacking()


def _assert_good(found: list[Outcome], most_lost: int) -> None:
    for one in found:
        assert one.is_good, one
        assert one.steps_lost <= most_lost, one


@pytest.mark.usefixtures("stop_signals")
def test_a_sample_of_harm_to_runs(tmp_path: Path) -> None:
    losses = run_faults.undisturbed(tmp_path)
    kinds = ("failing call", "damaged, then resumed")  # deaths in a save: `test_saving.py` and `test_training.py`
    try:
        found = [run_faults.case(kind, random.Random(f"0 {kind} 1"), losses, tmp_path) for kind in kinds]
    finally:
        small.end_background()
    _assert_good(found, 2)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> stored_faults.Stored:
    return stored_faults.Stored.made(tmp_path_factory.mktemp("stored"), ("dp=1", "dp=2 zero=3"))


def test_a_sample_of_harm_to_checkpoints(stored: stored_faults.Stored) -> None:
    kinds = ("failing save", "damaged")
    found = [stored_faults.case(kind, random.Random(f"{number}"), stored) for kind in kinds for number in range(10)]
    _assert_good(found, 1)
    assert len({one.what for one in found}) > 15, "they differ"


def test_a_load_that_leaves_something_out_is_found(
    stored: stored_faults.Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = stored.folder / "0" / "step-000002"
    stored.loads(newest)
    assert stored.is_equal("dp=1", 2)
    assert not stored.is_equal("dp=1", 1)
    monkeypatch.setattr(stored_faults.checkpoint, "load", lambda run, path: None)
    stored.loads(newest)
    assert not stored.is_equal("dp=1", 2)


def test_sums_add_up(tmp_path: Path) -> None:
    record, good = tmp_path / "rows.json", Outcome("dp=2: flip", True, True, 1, 0.25, False)
    for number in range(3):
        known = outcomes.read(record)
        known.setdefault("damaged", Sums()).add(good if number else Outcome("a", True, True, 0, 3.0, True), f"{number}")
        outcomes.write(record, known)
    assert outcomes.table(outcomes.read(record)).splitlines()[-2:] == [
        "| damaged | 3 | 3 | 3 | 2 | 0.25 | 3 | 1 |",
        "| all | 3 | 3 | 3 | 2 | 0.25 | 3 | 1 |",
    ]
    assert outcomes.read(record)["damaged"].bad == ["0: a"]


def test_every_kind_has_an_aim() -> None:
    assert {*stored_faults.KINDS, *run_faults.HARMS, *network_faults.FAULTS} == sweep.AIMS.keys()


@pytest.mark.nightly
@pytest.mark.usefixtures("stop_signals")
@pytest.mark.skipif(bool(_LACKING), reason=_LACKING or "hosts can be made here")
def test_a_sample_of_faults_between_hosts(tmp_path: Path) -> None:
    losses = network_faults.undisturbed(tmp_path)
    with network(2) as hosts:
        try:
            found = [
                network_faults.case(fault, random.Random(fault), hosts, losses, tmp_path)
                for fault in network_faults.FAULTS
            ]
        finally:
            small.end_background()
    _assert_good(found, 10)
