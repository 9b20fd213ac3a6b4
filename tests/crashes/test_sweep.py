"""A sample of `make crashes`: three cases, of which each is noticed, loses at most the steps since its checkpoint, and is right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.network_namespaces import lacking, network
from tests import small
from tests.crashes import network_faults, sweep

_LACKING = lacking()


@pytest.mark.usefixtures("stop_signals")
def test_a_sample_of_the_sweep(tmp_path: Path) -> None:
    losses = sweep.undisturbed(tmp_path)
    try:
        found = [
            sweep.case(kind, 0, number, losses, tmp_path)
            for kind, number in (("disk", 2), ("damaged", 3), ("killed", 8))
        ]
    finally:
        small.end_background()
    assert {one.kind for one in found} == {"killed", "disk", "damaged"}
    for one in found:
        assert one.noticed, one
        assert one.recovered, one
        assert not one.wrong, one
        assert one.steps_lost <= 1, one
    assert sweep.table(found).splitlines()[-1].split()[1] == "3"


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
    for one in found:
        assert one.noticed, one
        assert one.recovered, one
        assert not one.wrong, one
        assert one.steps_lost <= 10, one
