"""The `Job`: WHAT is computed, that is model, data, loss, optimizer, learning rate, batch, steps, seed and numerics.

Everything here may change the result, except `[run]`, `[checkpoint]`, `[layout]`, `model.stages` and `model.offload`. A job is read from a TOML file
with `job_files.load`, or written in Python: `Job(train={"global_batch": 32})`. All mistakes in it are reported at once. Its tables, with
their keys and ranges, are in `job_tables` and `optimizer_tables`; the rules between keys stand here, each a function that returns the mistake of a job
that breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import tomli_w
from pydantic import Field, field_validator, model_validator

from samestep.errors import JobError, did_you_mean, short_repr
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

if TYPE_CHECKING:
    from samestep.job_keys import JobKeys


_ONE_MODEL = {"compression": "none", "replicas": 1, "exchange_every": 1}
OF_SEVERAL = tuple(f"numerics.{key}" for key in _ONE_MODEL)
"""Keys that say how several ranks train, and nothing about the model that they have trained."""


class Job(Table):
    """One whole training run: the tables of a job file."""

    model: ModelTable = ModelTable()
    data: DataTable = DataTable()
    train: TrainTable = TrainTable()
    optimizer: OptimizerTable = OptimizerTable()
    schedule: ScheduleTable = ScheduleTable()
    numerics: NumericsTable = NumericsTable()
    layout: dict[str, Any] = Field(default_factory=dict)
    """Layout options and their values. If it is empty, the command line gives the layout."""
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
                "argument-type",
                f"a job is made of tables by their names, and {short_repr(source)} has none. Use Job(train={{...}}), and Job(**tables)",
            )
        super().__init__(source, **dict[str, Any](tables))

    @field_validator("layout", mode="before")
    @classmethod
    def _layout_is_one(cls, layout: Any) -> Any:
        """Return the table of a layout, which may be a line of text or a `Layout`, such as `layout = "dp=2 zero=3"`."""
        if isinstance(layout, dict):
            Layout(**layout)
            return layout
        return (layout if isinstance(layout, Layout) else Layout(layout)).options

    @model_validator(mode="after")
    def _values_agree(self) -> Job:
        for rule in _RULES:
            if error := rule(self):
                raise error
        return self

    @property
    def evaluated_sets(self) -> tuple[str, ...]:
        """The names of what is evaluated: the part of the data that is held out, if there is one, and the sets besides."""
        held_out = (HELD_OUT,) if self.data.held_out else ()
        return (*held_out, *self.data.held_out_sets) if self.train.evaluate_samples else ()

    @property
    def judge(self) -> str | None:
        """The one of `evaluated_sets` whose loss is the run's; None where nothing is evaluated."""
        return self.train.monitor or next(iter(self.evaluated_sets), None) if self.evaluated_sets else None

    @property
    def of_one_model(self) -> Job:
        """The job without `numerics.replicas`, as one rank evaluates what several have trained."""
        return self.model_copy(update={"numerics": self.numerics.model_copy(update=_ONE_MODEL)})

    def with_modules(self, *, stages: Sequence[str] | None = None, offload: Sequence[str] | None = None) -> Job:
        """Return the job with other names of modules in these keys of its model; None leaves a key as it is.

        Raises:
            JobError: one name is given, and no list.
        """
        named = {"stages": stages, "offload": offload}
        for key, names in named.items():
            if isinstance(names, str):
                text = f"{key}={names!r} is one name, and a list is read. Use {key}=[{names!r}]"
                raise JobError("argument-type", text)
        changes = {key: tuple(names) for key, names in named.items() if names is not None}
        return self.model_copy(update={"model": self.model.model_copy(update=changes)})

    def set_keys(self, *tables: str) -> set[str]:
        """Return the keys of these tables whose values are not the default, in two parts, such as `optimizer.lr`."""
        values = self.model_dump(exclude_defaults=True, include=set(tables))
        return {f"{table}.{key}" for table, keys in values.items() for key in keys}

    def to_toml(self, *, with_folder: bool = False, is_short: bool = False) -> str:
        """Return the resolved job as TOML: every key with its value, or with `is_short` the keys that are not the default.

        A file that is not written to the folder of the job file needs `run.folder` too, which `with_folder` adds; it is empty
        for a job that was read from no file.
        """
        tables = self.model_dump(mode="json", exclude={"run": {"folder"}}, exclude_defaults=is_short)
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


class _Tables(Protocol):
    """The tables of a job between whose keys there are rules."""

    data: DataTable
    train: TrainTable
    schedule: ScheduleTable
    numerics: NumericsTable
    checkpoint: CheckpointTable


def _warmup(job: _Tables) -> JobError | None:
    steps, warmup = job.train.steps, job.schedule.warmup_steps
    if warmup <= steps:
        return None
    return JobError(
        "schedule-too-long",
        f"schedule.warmup_steps = {warmup} is more than train.steps = {steps}. Use "
        f"at most {steps}, or more steps (--set schedule.warmup_steps=0 --set train.steps=...)",
    )


def _evaluations(job: _Tables) -> JobError | None:
    if job.train.evaluate_every or not (job.train.patience or job.checkpoint.keep_best):
        return None
    key = "train.patience" if job.train.patience else "checkpoint.keep_best"
    return JobError(
        "job-keys-conflict", f"{key} needs evaluations while the run trains. Set train.evaluate_every = 100"
    )


def _held_out_sets(job: _Tables) -> JobError | None:
    sets, judge = job.data.held_out_sets, job.train.monitor
    if HELD_OUT in sets:
        return JobError(
            "job-keys-conflict",
            f"data.held_out_sets.{HELD_OUT}: this is the name of the part of the data that is held out. Use another name",
        )
    if judge and judge not in (*sets, HELD_OUT):
        names = ", ".join(sets) if sets else "there are none"
        return JobError(
            "judged-by-unknown",
            f"train.monitor = {judge!r} is not a set of data.held_out_sets ({names}){did_you_mean(judge, list(sets))}",
        )
    if judge == HELD_OUT and not job.data.held_out:
        return JobError(
            "job-keys-conflict",
            f'train.monitor = "{HELD_OUT}" is the part of the data that is held out. Set data.held_out = 0.1',
        )
    return None


def _rollback(job: _Tables) -> JobError | None:
    if job.numerics.on_spike != "rollback" or job.checkpoint.every:
        return None
    return JobError(
        "job-keys-conflict",
        'numerics.on_spike = "rollback" goes back to a checkpoint, and checkpoint.every = 0 writes none before the end. Set '
        'checkpoint.every = 100, or numerics.on_spike = "skip"',
    )


def _averages(job: _Tables) -> JobError | None:
    if job.train.evaluate_ema and job.train.ema is None:
        return JobError(
            "job-keys-conflict", "train.evaluate_ema evaluates the averages of weights: train.ema = 0.999 makes them"
        )
    if job.train.ema is not None and job.numerics.exchange_every > 1:
        return JobError(
            "job-keys-conflict",
            f"train.ema averages the weights of every step, and numerics.exchange_every = {job.numerics.exchange_every} "
            "trains replicas separately, and their weights are equal only after an exchange. Use one of them alone",
        )
    return None


def _decay(job: _Tables) -> JobError | None:
    decay, left = job.schedule.decay_steps, job.train.steps - job.schedule.warmup_steps
    if decay <= left:
        return None
    return JobError(
        "schedule-too-long",
        f"schedule.decay_steps = {decay} is more than the {left} steps after warm-up. Use that many, or fewer",
    )


def _batch_norm_group(job: _Tables) -> JobError | None:
    coupled, batch = job.numerics.batch_norm_group, job.train.global_batch
    if coupled is None or not batch % coupled:
        return None
    near = max(n for n in range(1, min(coupled, batch) + 1) if batch % n == 0)
    return JobError(
        "batch-indivisible",
        f"numerics.batch_norm_group = {coupled} does not divide train.global_batch = {batch} into groups. Set "
        f"batch_norm_group = {near}",
    )


def _mixture(job: _Tables) -> JobError | None:
    if (job.data.source == "mixture") == bool(job.data.mixture):
        return None
    return JobError(
        "job-keys-conflict",
        f'data.source = "{job.data.source}" with {len(job.data.mixture)} sources in data.mixture. Set '
        'source = "mixture" and a table [data.mixture] with a line such as "text:PATH" = 0.5 for each source',
    )


def _replicas(job: _Tables) -> JobError | None:
    """Return why gradients cannot be compressed, or replicas cannot be trained independently, and what works; None if they can."""
    numerics, batch = job.numerics, job.train.global_batch
    kind, replicas = numerics.compression, numerics.replicas
    every, states = numerics.exchange_every, numerics.optimizer_states
    if kind == "none" and every == 1 and replicas > 1:
        return JobError(
            "replicas-unused",
            f"numerics.replicas = {replicas} sets how many gradients are compressed, and none is. Set replicas = 1, "
            'or numerics.compression = "int8", or numerics.exchange_every = 20',
        )
    if every > 1 and replicas == 1:
        return JobError(
            "replicas-missing",
            f"numerics.exchange_every = {every} is the number of steps that numerics.replicas take apart from each other. Set "
            "replicas = 2 or more, as many as the links are slow between",
        )
    if every > 1 and states != "float32":
        return JobError(
            "diloco-unsupported",
            f'numerics.optimizer_states = "{states}" is not proven with numerics.exchange_every = {every}. Use "float32"',
        )
    if kind != "none" and replicas == 1:
        return JobError(
            "replicas-missing",
            f'numerics.compression = "{kind}" compresses the gradients of numerics.replicas parts of a batch. Set '
            "replicas = 2 or more, as many as the links are slow between",
        )
    if replicas > 1 and numerics.batch_norm_group is not None:
        return JobError(
            "job-keys-conflict",
            f"numerics.batch_norm_group = {numerics.batch_norm_group} and numerics.replicas = {replicas} both set which "
            "samples belong together. Use one of them alone",
        )
    if batch % replicas:
        return JobError(
            "batch-indivisible",
            f"numerics.replicas = {replicas} does not divide train.global_batch = {batch} into equal parts. Set "
            f"global_batch = {-(-batch // replicas) * replicas}",
        )
    return None


_RULES: tuple[Callable[[_Tables], JobError | None], ...] = (
    _warmup,
    _evaluations,
    _held_out_sets,
    _rollback,
    _averages,
    _decay,
    _replicas,
    _batch_norm_group,
    _mixture,
)
"""All rules, in the order in which they are asked; each returns the mistake, with the values that work, or None."""
