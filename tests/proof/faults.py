"""Deliberate faults of the classes that were found in the wild, each put into the runtime for the length of one run.

A fault is a function of a monkeypatch; it runs on every rank of the layout, never on the one device that it is held
against. They are in `batch_faults.py`, `cut_faults.py` and `part_faults.py`. docs/reference/verify-causes.md lists them; `test_faults.py` proves
every row of it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.datasets import Batch
from samestep.job import Job
from samestep.layout import Layout
from samestep.proof import sides, verify
from samestep.proof.verdict import Verdict
from samestep.runtime.processes.join import RankInfo
from tests.laboratory import job_of, on_ranks, source_of
from tests.models import Tokens
from tests.proof import batch_faults, cut_faults, part_faults
from tests.proof.planting import of_kind

__all__ = ["FAULTS", "batch_faults", "cut_faults", "part_faults", "prove", "subject"]
FAULTS = of_kind("fault")


# -- carrying it out -------------------------------------------------------------------------------


def subject(model: str, layout: str, job: Job, folder: Path) -> sides.Subject:
    example = Batch(0, [0], Tokens()).samples([0])  # type: ignore[arg-type]
    where = Layout(layout)
    return sides.Subject(source_of(model, where, job), Tokens(), example, job, where, folder)


def on_a_rank(rank: int, world: int, model: str, layout: str, job: Job, folder: Path, name: str) -> None:
    """Run one rank of the layout with a fault in it."""
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if name:
            FAULTS[name].install(patch)
        sides.in_layout(place, subject(model, layout, job, folder))


ONE = RankInfo(0, 0, 1, 1, torch.device("cpu"))
_REFERENCES: dict[Any, Path] = {}
_KEPT = tempfile.TemporaryDirectory(prefix="samestep-references-")


def prove(model: str, layout: str, name: str = "", own_precision: bool = False, **tables: Any) -> Verdict:
    """Hold a layout with a fault in it against one device, on warm ranks; each is proven once in a session."""
    key = (model, layout, name, own_precision, repr(tables))
    if key not in _VERDICTS:
        _VERDICTS[key] = _proven(model, layout, name, own_precision, **tables)
    return _VERDICTS[key]


_VERDICTS: dict[Any, Verdict] = {}


def _proven(model: str, layout: str, name: str, own_precision: bool, **tables: Any) -> Verdict:
    numerics, train = tables.get("numerics", {}), {"watch_every": 100, **tables.pop("train", {})}
    job = job_of(numerics.get("precision", "float32" if own_precision else "float64"), 3, train=train, **tables)
    if not own_precision:
        job = verify._proving(job, 3)
    folder = Path(tempfile.mkdtemp(prefix="samestep-fault-"))
    try:
        _reference(model, job, own_precision, folder)
        on_ranks(layout, on_a_rank, model, job, folder, name)
        judged = sides.judge_rounding if own_precision else sides.judge
        checks, cause, explanation = judged(ONE, subject(model, layout, job, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Verdict(
        layout=layout, job=model, steps=3, precision="float64", checks=checks, cause=cause, explanation=explanation
    )


def _reference(model: str, job: Job, own_precision: bool, folder: Path) -> None:
    """Put what one device computes into a folder; it is computed once for each model and job."""
    key = (model, job.to_toml(), own_precision)
    if key not in _REFERENCES:
        kept = _REFERENCES[key] = Path(_KEPT.name, str(len(_REFERENCES)))
        kept.mkdir()
        work = sides.measure_rounding if own_precision else sides.one_device
        work(ONE, subject(model, "dp=1", job, kept))
    for file in _REFERENCES[key].iterdir():
        shutil.copy(file, folder)
