"""Each key of a job is read by a run in a loop of one's own, or is rejected there by its name."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from pydantic.fields import FieldInfo
from torch import Tensor, nn

import samestep
from samestep.errors import JobError
from samestep.job import Job
from samestep.job_tables import LoraTable, Table
from samestep.layout import Layout
from samestep.optimizer_tables import GroupTable
from samestep.runtime.run import _READ_IN_A_LOOP
from tests.parts import Points
from tests.pool import Pool

TABLES = [name for name in Job.model_fields if name != "layout"]
KEYS = [(table, key) for table in TABLES for key in getattr(Job(), table).__class__.model_fields]
UNREAD = [
    (table, key)
    for table, key in KEYS
    if table not in ("numerics", "schedule") and f"{table}.{key}" not in _READ_IN_A_LOOP
]
OF_INDUCTOR = {"run.compile_mode"}
CONSTANT = {"numerics.rules"}
VALUES: dict[str, Any] = {
    "lora": LoraTable(targets=("a",)), "groups": (GroupTable(match=("a",)),), "held_out_sets": {"a": "digits"},
    "image_mean": (0.25,), "image_std": (0.25,),
}  # fmt: skip
"""Values of keys whose values have keys or numbers of their own."""


def _another(key: str, field: FieldInfo) -> Any:
    """Return a value of a key that is not its default."""
    if key in VALUES:
        return VALUES[key]
    types = (
        [field.annotation, *get_args(field.annotation)]
        if isinstance(field.annotation, UnionType)
        else [field.annotation]
    )
    for kind in types:
        if get_origin(kind) is Literal:
            return next(choice for choice in get_args(kind) if choice != field.default)
    if isinstance(field.default, bool):
        return not field.default
    for kind, value in ((dict, {"a": 1}), (tuple, ("a",)), (str, "another"), (float, 0.25), (int, 7)):
        if any(kind in (of, get_origin(of)) for of in types):
            return value
    return 1


@pytest.mark.parametrize(("table", "key"), UNREAD, ids=lambda word: word)
def test_a_key_that_a_loop_does_not_read_is_rejected_by_its_name(table: str, key: str) -> None:
    """No rule between keys is asked: a key alone is set."""
    whole = getattr(Job(), table)
    changed = whole.model_copy(update={key: _another(key, type(whole).model_fields[key])})
    job = Job().model_copy(update={table: changed})
    with pytest.raises(JobError, match=rf"^parallelize does not read {table}\.{key} of the job\. (Use|Remove) "):
        samestep.parallelize(_Net, "mse", torch.optim.SGD, job=job)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


RUNS: list[dict[str, Any]] = [
    {"train": {"ema": 0.9}, "optimizer": {"clip_norm": 1.0}, "numerics": {"on_spike": "skip"}},
    {"numerics": {"compression": "powersgd", "replicas": 2}, "schedule": {"name": "wsd", "decay_steps": 1}},
    {"numerics": {"exchange_every": 2, "replicas": 2}, "schedule": {"name": "polynomial", "power": 2.0}},
    {"numerics": {"precision": "fp16"}},
]
"""Jobs that together read every key that a run in a loop may read."""


def read_in_a_loop(rank: int, world: int, folder: str) -> set[str]:
    names = {type(getattr(Job(), table)): table for table in TABLES}
    reads: set[str] = set()
    get = Table.__getattribute__

    def noting(self: Table, name: str) -> Any:
        if type(self) in names and Path(sys._getframe(1).f_code.co_filename).stem not in (
            "job",
            "job_tables",
            "optimizer_tables",
        ):
            reads.add(f"{names[type(self)]}.{name}")
        return get(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "__getattribute__", noting)
        for number, tables in enumerate(RUNS):
            place = Path(folder, str(number))
            train = {"global_batch": 4, "steps": 2, "watch_every": 1, **tables.get("train", {})}
            job = Job(**{**tables, "train": train, "run": {"device": "cpu"}})  # type: ignore[typeddict-item]
            sgd = functools.partial(torch.optim.SGD, lr=0.1)
            run = samestep.parallelize(_Net, "mse", sgd, layout=f"dp={world}", job=job)
            samestep.track(run, "progress", folder=place)
            for batch in samestep.batches(Points(), job):
                run.step(batch)
            run.save(place)
            run.load(place)
    return reads


def test_each_other_key_is_read(pool2: Pool, tmp_path: Path) -> None:
    reads, _ = pool2.run(read_in_a_loop, str(tmp_path))
    known = {f"{table}.{key}" for table, key in set(KEYS) - set(UNREAD)}
    assert known - reads - OF_INDUCTOR - CONSTANT == set()


def test_a_layout_of_the_job_is_that_of_the_run() -> None:
    layout = "dp=1 microbatch=2"
    run = samestep.parallelize(_Net, "mse", torch.optim.SGD, job=Job(layout=layout))
    assert run.layout == Layout(layout)
    assert samestep.parallelize(_Net, "mse", torch.optim.SGD, layout="dp=1", job=Job(layout=layout)).layout == Layout()
