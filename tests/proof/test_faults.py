"""Every deliberate fault is caught and called by its name; no clean layout raises an alarm."""

from __future__ import annotations

import pytest
import torch.distributed.distributed_c10d as dist

from tests.covering import daily
from tests.proof import reverted  # noqa: F401  # which enters its own wrongs
from tests.proof.faults import FAULTS, prove
from tests.proof.planting import PLANTED, CheckedPatch
from tests.proof.silent import SILENT

MEASURED = {row.faults[0]: row for row in SILENT if row.faults and row.gradients is not None}

OTHERS = [name for name in FAULTS if name not in MEASURED]
_AXES = ("dp", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


def _axes_of(layout: str) -> str:
    return " ".join(word for word in layout.split() if word.partition("=")[0] in _AXES) or "dp=1"


KINDS = daily((FAULTS[name].cause, _axes_of(FAULTS[name].layout), FAULTS[name].own_precision) for name in OTHERS)
"""By default each cause, each axis and each kind of precision is that of a fault, beside the measured ones."""
MARKS = {name: kind.marks for name, kind in zip(OTHERS, KINDS, strict=True)}
ROWS = [
    pytest.param(name, FAULTS[name].code, FAULTS[name].layout, id=name, marks=MARKS.get(name, ()))
    for name in (*MEASURED, *OTHERS)
]
"""They name their models and layouts, so that all are traced before the first rank is forked."""


@pytest.mark.every_row
@pytest.mark.parametrize(("name", "model", "layout"), ROWS)
def test_a_fault_is_caught_and_called_by_its_name(name, model, layout):
    fault = FAULTS[name]
    verdict = prove(model, layout, name, fault.own_precision, **fault.job)
    assert not verdict.proven, verdict.to_text()
    assert verdict.cause is fault.cause, verdict.to_text()
    assert verdict.explanation
    if name in MEASURED:
        errors = {check.what: check.error for check in verdict.checks}
        assert errors["loss"] == pytest.approx(MEASURED[name].loss, rel=0.1, abs=1e-12)
        assert errors["gradients"] == pytest.approx(MEASURED[name].gradients, rel=0.1)


@pytest.mark.parametrize("name", PLANTED)
def test_each_wrong_can_stand_where_it_is_put(name, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "new_group", lambda *_: None)
    with CheckedPatch.context() as patch:
        PLANTED[name].install(patch)
