"""Planted wrongs, carried out: each is put into the runtime for the length of one run, and `verify` says what comes of it.

A wrong is a function of a monkeypatch. It runs on every rank of the layout; on the one device that this is held against it runs only where its
row says so. The faults, of the classes that were found in the wild, are in `batch_faults.py`, `cut_faults.py` and `part_faults.py`; the mends that
are taken away in `reverted.py`. docs/reference/verify-causes.md lists them; `test_faults.py` and `test_reverted.py` prove every row.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
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
from tests.laboratory import job_of, on_ranks, seeded, source_of
from tests.models import Tokens
from tests.pool import pool
from tests.proof import batch_faults, cut_faults, part_faults
from tests.proof.planting import PLANTED, of_kind
from tests.proof.reproductions import CASES

__all__ = ["FAULTS", "batch_faults", "cut_faults", "part_faults", "prove", "prove_case", "subject"]
FAULTS = of_kind("fault")
ONE = RankInfo(0, 0, 1, 1, torch.device("cpu"))


# -- carrying it out -------------------------------------------------------------------------------


def subject(code: str, layout: str, job: Job, folder: Path) -> sides.Subject:
    """Return what is proven: a model of `MODELS`, or a case that is traced as the patches of this process let it be."""
    where = Layout(layout)
    if code in CASES:
        case = CASES[code]
        source, samples, example = verify._prepare_inputs(
            job, where, case.build, case.loss, case.optimizer, case.data()
        )
        return sides.Subject(source, samples, example, job, where, folder)
    example = Batch(0, [0], Tokens()).samples([0])  # type: ignore[arg-type]
    return sides.Subject(source_of(code, where, job), Tokens(), example, job, where, folder)


@contextlib.contextmanager
def _planted(name: str, code: str, rank: int) -> Iterator[None]:
    """Put a wrong into the runtime, if one is named; cases draw random numbers as processes that are started apart do."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "None of the inputs have requires_grad"
        )  # as torch evaluates a reentrant checkpoint
        if name:
            PLANTED[name].install(patch)
        with seeded(rank) if code in CASES else contextlib.nullcontext():
            yield


def on_a_rank(rank: int, world: int, code: str, layout: str, job: Job, folder: Path, name: str) -> None:
    """Run one rank of the layout with a wrong in it."""
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    with _planted(name, code, rank):
        sides.in_layout(place, subject(code, layout, job, folder))


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="samestep-fault-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_REFERENCES: dict[Any, Path] = {}
_KEPT = tempfile.TemporaryDirectory(prefix="samestep-references-")
_VERDICTS: dict[Any, Verdict] = {}


def prove(model: str, layout: str, name: str = "", own_precision: bool = False, **tables: Any) -> Verdict:
    """Hold a layout with a fault in it against one device, on warm ranks; each is proven once in a session."""
    key = (model, layout, name, own_precision, repr(tables))
    if key not in _VERDICTS:
        _VERDICTS[key] = _proven(model, layout, name, own_precision, **tables)
    return _VERDICTS[key]


def _proven(model: str, layout: str, name: str, own_precision: bool, **tables: Any) -> Verdict:
    numerics, train = tables.get("numerics", {}), {"watch_every": 100, **tables.pop("train", {})}
    job = job_of(numerics.get("precision", "float32" if own_precision else "float64"), 3, train=train, **tables)
    if not own_precision:
        job = verify._proving(job, 3)
    with _temporary() as folder:
        _reference(model, job, own_precision, folder)
        on_ranks(layout, on_a_rank, model, job, folder, name)
        judged = sides.judge_rounding if own_precision else sides.judge
        return _verdict(model, layout, job, judged(ONE, subject(model, layout, job, folder)))


def prove_case(name: str, is_mended: bool = False) -> Verdict:
    """Hold the layout of a mend, which is taken away unless `is_mended`, against one device and a plain torch loop."""
    row = PLANTED[name]
    case = CASES[row.code]
    run = Job(run={"device": "cpu", "allow": row.allow}).run
    job = verify._proving(case.job.model_copy(update={"run": run}), row.steps)
    wrong = "" if is_mended else name
    of_one_device = wrong if row.one_device or row.is_refused else ""
    with _temporary() as folder:
        with _planted(of_one_device, row.code, 0):
            sides.one_device(ONE, subject(row.code, row.layout, job, folder))
        pool(Layout(row.layout).world_size).run(on_a_rank, row.code, row.layout, job, folder, wrong)
        with _planted(of_one_device, row.code, 0):
            return _verdict(row.code, row.layout, job, sides.judge(ONE, subject(row.code, row.layout, job, folder)))


def _verdict(code: str, layout: str, job: Job, judged: tuple[Any, ...]) -> Verdict:
    checks, cause, explanation = judged
    return Verdict(
        layout=layout, job=code, steps=job.train.steps, precision="float64", checks=checks, cause=cause, explanation=explanation
    )  # fmt: skip


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
