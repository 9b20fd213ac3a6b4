"""The `Job`: WHAT is computed, that is model, data, loss, optimizer, learning rate, batch, steps, seed and numerics.

Everything here may change the result, except `[run]`, `[checkpoint]`, `[layout]`, `model.stages` and `model.offload`. A job is read from a TOML file
with `job_files.load`, or written in Python: `Job(train={"global_batch": 32})`. All mistakes in it are reported at once. Its tables, with
their keys and ranges, are in `job_tables` and `optimizer_tables`, the rules between them in `job_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from samestep.errors import JobError, LayoutError, short_repr
from samestep.job_keys import JobKeys
from samestep.job_rules import RULES, mistakes_in
from samestep.job_tables import (
    HELD_OUT,
    CheckpointTable,
    DataTable,
    ModelTable,
    NumericsTable,
    RunTable,
    Table,
    TrainTable,
)
from samestep.layout import Layout
from samestep.optimizer_tables import OptimizerTable, ScheduleTable


class Job(Table):
    """One whole training run: the tables of a job file."""

    model: ModelTable = ModelTable()
    data: DataTable = DataTable()
    train: TrainTable = TrainTable()
    optimizer: OptimizerTable = OptimizerTable()
    schedule: ScheduleTable = ScheduleTable()
    numerics: NumericsTable = NumericsTable()
    layout: dict[str, Any] = Field(default_factory=dict)
    """Layout words and their values; empty leaves the layout to the command line."""
    checkpoint: CheckpointTable = CheckpointTable()
    run: RunTable = RunTable()

    def __init__(self, source: Callable[[str], str] = lambda key: "job", /, **tables: Unpack[JobKeys]) -> None:
        """Check the tables; `source` returns, for a key, the origin that an error about the key begins with, such as a
        file.

        Raises:
            JobError: all mistakes in the tables, one a line.
        """
        if not callable(source):
            raise JobError(
                f"a job is made of tables by their names, and {short_repr(source)} has none: Job(train={{...}}) works, and Job(**tables)"
            )
        try:
            super().__init__(**dict[str, Any](tables))
        except ValidationError as error:
            raise JobError(mistakes_in(error, source, type(self))) from None

    @field_validator("layout")
    @classmethod
    def _layout_is_one(cls, words: dict[str, Any]) -> dict[str, Any]:
        try:
            Layout.of(words)
        except LayoutError as error:
            raise ValueError(str(error)) from None
        return words

    @model_validator(mode="after")
    def _values_agree(self) -> Job:
        for rule in RULES:
            if mistake := rule(self):
                raise ValueError(mistake)
        return self

    @property
    def evaluated_sets(self) -> tuple[str, ...]:
        """The names of what is evaluated: the part of the data that is held out, if there is one, and the sets besides."""
        own = (HELD_OUT,) if self.data.held_out else ()
        return (*own, *self.data.held_out_sets) if self.train.evaluate_samples else ()

    @property
    def judge(self) -> str | None:
        """The one of `evaluated_sets` whose loss is the run's; None where nothing is evaluated."""
        return self.train.judged_by or next(iter(self.evaluated_sets), None) if self.evaluated_sets else None

    def with_modules(self, *, stages: Sequence[str] | None = None, offload: Sequence[str] | None = None) -> Job:
        """Return the job with other names of modules in these keys of its model; None leaves a key as it is.

        Raises:
            JobError: one name is given, and no list.
        """
        if isinstance(stages, str):
            raise JobError(f"stages={stages!r} is one name, and a list is read: stages=[{stages!r}] works")
        if isinstance(offload, str):
            raise JobError(f"offload={offload!r} is one name, and a list is read: offload=[{offload!r}] works")
        named = {"stages": stages, "offload": offload}
        changes = {key: tuple(names) for key, names in named.items() if names is not None}
        return self.model_copy(update={"model": self.model.model_copy(update=changes)})

    def to_toml(self, *, with_folder: bool = False) -> str:
        """Return the resolved job as TOML: every key with its value, so that the file alone repeats the run.

        A file that is not written to the folder of the job file needs `run.folder` too, which `with_folder` adds; it is empty
        for a job that was read from no file.
        """
        tables = self.model_dump(mode="json", exclude={"run": {"folder"}})
        if with_folder:
            tables["run"]["folder"] = self.run.folder or ""
        return tomli_w.dumps(_without_none(tables))


def _without_none(value: Any) -> Any:
    """Return the value without the keys that are None, which TOML cannot express."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
