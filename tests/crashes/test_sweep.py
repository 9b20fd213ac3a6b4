"""A sample of `make crashes`: three cases, of which each is noticed, loses at most the steps since its checkpoint, and is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import small
from tests.crashes import sweep


@pytest.mark.usefixtures("stop_signals")
def test_a_sample_of_the_sweep(tmp_path: Path) -> None:
    losses = sweep.undisturbed(tmp_path)
    try:
        found = [sweep.case(0, number, losses, tmp_path) for number in (2, 3, 8)]
    finally:
        small.end_background()
    assert {one.kind for one in found} == {"killed", "disk", "damaged"}
    for one in found:
        assert one.noticed, one
        assert one.recovered, one
        assert not one.wrong, one
        assert one.steps_lost <= 1, one
    assert sweep.table(found).splitlines()[-1].split()[1] == "3"
