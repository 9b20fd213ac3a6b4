"""The `Job`: WHAT is computed, that is model, data, loss, optimizer, learning rate, batch, steps, seed and numerics.

Everything here may change the result, except `[run]`, `[checkpoint]`, `[layout]`, `model.stages` and `model.offload`. A job is read from a TOML file
with `load`, or written in Python: `Job(train={"global_batch": 32})`. All mistakes in it are reported at once. Its tables, with
their keys and ranges, are in `job_tables` and `optimizer_tables`; here are the rules between them.
"""

from __future__ import annotations

import glob
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Unpack, get_args

import tomli_w
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from samestep.errors import JobError, LayoutError, did_you_mean, short_repr
from samestep.job_keys import JobKeys
from samestep.job_rules import mistake_of_held_out_sets, mistake_of_replicas
from samestep.job_tables import (
    HELD_OUT,
    PRESET,
    CheckpointTable,
    DataTable,
    ModelTable,
    NumericsTable,
    RunTable,
    Table,
    TrainTable,
    types_in,
)
from samestep.layout import Layout
from samestep.optimizer_tables import OptimizerTable, ScheduleTable

_KEYS_OF_SOURCES = ("data.source", "data.held_out_sets.", "model.source")
_WORDS_OF_PATHS = ("text", "tokens", "jsonl", "parquet", "hf", "images")
"""The words of sources after which a path stands."""


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
            raise JobError(_mistakes(error, source)) from None

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
        if self.schedule.warmup_steps > self.train.steps:
            raise ValueError(
                f"schedule.warmup_steps = {self.schedule.warmup_steps} is more than train.steps = {self.train.steps}; "
                f"at most {self.train.steps} works, and so do more steps (--set schedule.warmup_steps=0 --set train.steps=...)"
            )
        if not self.train.evaluate_every and (self.train.patience or self.checkpoint.keep_best):
            key = "train.patience" if self.train.patience else "checkpoint.keep_best"
            raise ValueError(f"{key} needs evaluations while the run trains: train.evaluate_every = 100 works")
        has_sets = self.data.held_out_sets or self.train.judged_by
        if has_sets and (mistake := mistake_of_held_out_sets(self.data, self.train)):
            raise ValueError(mistake)
        if self.numerics.on_spike == "rollback" and not self.checkpoint.every:
            raise ValueError(
                'numerics.on_spike = "rollback" goes back to a checkpoint, and checkpoint.every = 0 writes none before the end: '
                'checkpoint.every = 100 works, and so does numerics.on_spike = "skip"'
            )
        if self.train.evaluate_ema and self.train.ema is None:
            raise ValueError("train.evaluate_ema evaluates the averages of weights: train.ema = 0.999 makes them")
        if self.train.ema is not None and self.numerics.exchange_every > 1:
            raise ValueError(
                f"train.ema averages the weights of every step, and numerics.exchange_every = {self.numerics.exchange_every} "
                "trains replicas apart, whose weights are one model only where they exchange: one of them alone works"
            )
        if self.schedule.decay_steps > self.train.steps - self.schedule.warmup_steps:
            raise ValueError(
                f"schedule.decay_steps = {self.schedule.decay_steps} is more than the "
                f"{self.train.steps - self.schedule.warmup_steps} steps after warm-up; that many work, or fewer"
            )
        numerics = self.numerics
        is_plain = (
            numerics.compression == "none"
            and numerics.replicas == numerics.exchange_every == numerics.exchange_parts == 1
        )
        if not (is_plain and not numerics.exchange_delay) and (
            mistake := mistake_of_replicas(numerics, self.train.global_batch)
        ):
            raise ValueError(mistake)
        coupled, batch = self.numerics.coupled_samples, self.train.global_batch
        if coupled is not None and batch % coupled:
            near = max(n for n in range(1, min(coupled, batch) + 1) if batch % n == 0)
            raise ValueError(
                f"numerics.coupled_samples = {coupled} does not divide train.global_batch = {batch} into groups: "
                f"coupled_samples = {near} works"
            )
        if (self.data.source == "mixture") != bool(self.data.mixture):
            raise ValueError(
                f'data.source = "{self.data.source}" with {len(self.data.mixture)} sources in data.mixture: '
                'source = "mixture" and a table [data.mixture] with a line such as "text:PATH" = 0.5 for each source work'
            )
        return self

    @property
    def model_folder(self) -> Path | None:
        """Folder of a pretrained model, which a separator in its name or its config.json tells from a family; else None."""
        name = self.model.source.removeprefix("hf:")
        if not name or name == self.model.source:
            return None
        place = self.place_of(name)
        is_path = any(mark in name for mark in "/\\") or name in (".", "..") or (place / "config.json").is_file()
        return place if is_path else None

    def place_of(self, path: str) -> Path:
        """Return where a path of the job is: in `run.folder`, or where there is none of this name, in the working directory."""
        given = Path(os.path.expanduser(path))
        if not path or self.run.folder is None or Path(self.run.folder) == Path.cwd():
            return given
        near = Path(self.run.folder) / given  # of an absolute path the path itself
        return given if not _exists(near) and _exists(given) else near

    @property
    def evaluated_sets(self) -> tuple[str, ...]:
        """The names of what is evaluated: the part of the data that is held out, if there is one, and the sets besides."""
        own = (HELD_OUT,) if self.data.held_out else ()
        return (*own, *self.data.held_out_sets) if self.train.evaluate_samples else ()

    @property
    def judge(self) -> str | None:
        """The one of `evaluated_sets` whose loss is the run's; None where nothing is evaluated."""
        return self.train.judged_by or next(iter(self.evaluated_sets), None) if self.evaluated_sets else None

    def with_stages(self, stages: Sequence[str] | None) -> Job:
        """Return the job with other names of modules with which stages may begin; None leaves them as they are.

        Raises:
            JobError: `stages` is one name and no list.
        """
        if stages is None:
            return self
        if isinstance(stages, str):
            raise JobError(f"stages={stages!r} is one name, and a list is read: stages=[{stages!r}] works")
        return self._with_model(stages=tuple(stages))

    def with_offload(self, offload: Sequence[str] | None) -> Job:
        """Return the job with other names of modules whose weights are in the host's memory; None leaves them as they are.

        Raises:
            JobError: `offload` is one name and no list.
        """
        if offload is None:
            return self
        if isinstance(offload, str):
            raise JobError(f"offload={offload!r} is one name, and a list is read: offload=[{offload!r}] works")
        return self._with_model(offload=tuple(offload))

    def _with_model(self, **changes: Any) -> Job:
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


def load(path: str | Path, settings: Sequence[str] = ()) -> Job:
    """Return the job of a file, with `settings` such as `train.steps=50`.

    Paths and modules in the file are looked for in its folder, and then in the working directory; paths in settings only in the
    working directory.

    Raises:
        JobError: the file cannot be read, or the job has mistakes; each is named with its file, its key and the rule.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise JobError(f"{short_repr(path)} is no path of a job file; samestep.load('job.toml') works")
    if isinstance(settings, str):
        raise JobError(f"settings = {settings!r} is one setting, and a list is read: settings = [{settings!r}] works")
    path = Path(path)
    tables = _read(path)
    folder, run = path.parent.resolve(), tables.setdefault("run", {})
    if isinstance(run, dict) and isinstance(given := run.setdefault("folder", str(folder)), str):
        run["folder"] = str(folder / Path(os.path.expanduser(given))) if given else None
    return _checked(path, tables, [_from_here(setting, folder) for setting in settings])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte-order mark
    except FileNotFoundError:
        near = [
            str(p) for p in (*path.parent.glob("*.toml"), *path.parent.glob("jobs/*.toml")) if p.stem != "pyproject"
        ]
        there = f"; there are {', '.join(sorted(near))}" if near else ""
        raise JobError(f"no job file at {path}{there}") from None
    except IsADirectoryError:
        of_run = f", as {path / 'job.toml'}; `--out {path} --resume` resumes this run"
        raise JobError(f"{path} is a folder; a job is a TOML file{of_run * (path / 'job.toml').exists()}") from None
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror or error}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # not TOML, not text, a number of over 4,300 digits, too many brackets
        raise JobError(f"{path} is not TOML: {error}") from None


def _checked(path: Path, tables: dict[str, Any], settings: Sequence[str]) -> Job:
    """Return the job of a file's tables with settings; a mistake is named with the file or the setting that it is in."""
    for setting in settings:
        set_key(tables, setting)

    def source(key: str) -> str:
        for setting in reversed(settings):
            names = {key, setting.partition("=")[0].strip()}
            if key and all(f"{name}.".startswith(f"{min(names, key=len)}.") for name in names):
                return f"--set {setting}"
        return str(path)

    return Job(source, **tables)  # not model_validate, which would wrap the JobError of __init__ in an error of its own


def default(settings: Sequence[str] = ()) -> Job:
    """Return the default job of samestep, with `settings` such as `train.steps=50`.

    Raises:
        JobError: the settings have mistakes; each is named.
    """
    given = {key.strip(): value.strip() for key, _, value in (setting.partition("=") for setting in settings)}
    # Fields of the default model mean nothing to another one, and a preset has its own sequence length, batch and precision.
    without = ["model.config"] * ("model.source" in given)
    if given.get("model.source", "").strip("\"'").startswith(PRESET):
        without += ["data.sequence_length", "train.global_batch", "numerics.precision"]
    with resources.as_file(resources.files("samestep") / "default_job.toml") as path:
        steps = given.get("train.steps", "")
        tables = _read(path)
        if steps.isdecimal() and len(steps) < 10 and int(steps) < tables["schedule"]["warmup_steps"]:
            without.append("schedule.warmup_steps")  # a run shorter than the default job's warm-up has none
        for key in without:
            table, _, name = key.partition(".")
            tables.get(table, {}).pop(name, None)
        return _checked(path, tables, settings)


def _from_here(setting: str, folder: Path) -> str:
    """Return a setting whose path is absolute where the job's folder has a file of this name, which is another one."""
    key, equals, text = setting.partition("=")
    word, mark, path = text.strip().strip("\"'").rpartition(":")
    is_path = word in _WORDS_OF_PATHS if key.strip().startswith(_KEYS_OF_SOURCES) else key.strip() == "data.tokenizer"
    if not (equals and is_path and path) or path == "bytes" or folder == Path.cwd():
        return setting
    is_name = word == "hf" and "/" not in path and not _exists(Path(path))  # of a family
    return setting if is_name or not _exists(folder / path) else f"{key}={word}{mark}{Path.cwd() / path}"


def _exists(path: Path) -> bool:
    """Return whether there is a file or a folder, or files of which the path is a prefix."""
    parent = path.parent
    return os.path.exists(path) or (os.path.isdir(parent) and any(parent.glob(f"{glob.escape(path.name)}.*")))


def set_key(tables: dict[str, Any], setting: str) -> None:
    """Write `key.path=value` into nested tables; a value that is not TOML is taken as text.

    Raises:
        JobError: the setting is not of that form, or names a table within a value.
    """
    key, equals, text = setting.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise JobError(f"--set {setting}: write key=value, as in --set train.steps=50")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if text.lstrip().startswith("="):
            raise JobError(
                f"--set {setting}: one '=' separates key and value, and text that begins with another needs quotes"
            ) from None
        value = text
    table: Any = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise JobError(f"--set {setting}: {part} is a value, not a table")
    table[parts[-1]] = value


def _mistakes(error: ValidationError, source: Callable[[str], str]) -> str:
    """Return all mistakes, one a line: the origin, the key, what was given and what would be right."""
    lines = []
    for mistake in error.errors(include_url=False):
        path = [str(part) for part in mistake["loc"]]
        key = ".".join(path)
        if mistake["type"] == "extra_forbidden":
            known = _keys_of(path[:-1])
            text = f"unknown key{did_you_mean(path[-1], known)}; the keys here are {', '.join(known)}"
        elif mistake["type"] == "value_error":
            text = re.sub(r"^Value error, ", "", mistake["msg"])
        else:
            text = f"{mistake['msg'][0].lower()}{mistake['msg'][1:]}, got {short_repr(mistake['input'])}"
        lines.append(f"{source(key)}: {key}: {text}" if key else f"{source(key)}: {text}")
    return "\n".join(lines)


def _keys_of(path: Sequence[str]) -> list[str]:
    """Return the names of the keys of the table at `path`."""
    table: Any = Job
    for part in (one for one in path if not one.isdecimal()):  # an entry of an array of tables
        field = table.model_fields.get(part)
        kinds = types_in(field.annotation) if field else ()
        table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            return []
    return list(table.model_fields)


def settings() -> tuple[str, ...]:
    """Return what `--set` takes as one begins to write it: each key with `=`, or with each of its values where they are words."""
    written = []
    for table, field in Job.model_fields.items():
        kinds = [kind for kind in types_in(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for name, key in (item for kind in kinds for item in kind.model_fields.items()):
            values = [*filter(lambda one: isinstance(one, str), get_args(key.annotation))]
            written += [f"{table}.{name}={value}" for value in values or ("",)]
    return tuple(written)


def _without_none(value: Any) -> Any:
    """Return the value without the keys that are None, which TOML cannot express."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
