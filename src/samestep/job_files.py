"""Jobs as text: a TOML file, `--set key=value`, and the default job.

Paths and modules that a file names are looked for in its folder first; those of a setting in the working directory alone.
"""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from samestep.errors import JobError, short_repr, types_in
from samestep.job import Job
from samestep.job_tables import PRESET

_KEYS_OF_SOURCES = ("data.source", "data.held_out_sets.", "model.source")
_WORDS_OF_PATHS = ("text", "tokens", "jsonl", "parquet", "hf", "images")
"""The words of sources after which a path stands."""


def load(path: str | Path, settings: Sequence[str] | None = None) -> Job:
    """Return the job of a file, with `settings` such as `train.steps=50`.

    Paths and modules in the file are looked for in its folder, and then in the working directory; paths in settings only in the
    working directory.

    Raises:
        JobError: the file cannot be read, or the job has mistakes; each is named with its file, its key and the rule.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise JobError("argument-type", f"{short_repr(path)} is not the path of a job file, such as 'job.toml'")
    if isinstance(settings, str):
        raise JobError(
            "argument-type",
            f"settings = {settings!r} is one setting, and a list is read. Set settings = [{settings!r}]",
        )
    path = Path(path)
    tables = _read(path)
    folder, run = path.parent.resolve(), tables.setdefault("run", {})
    if isinstance(run, dict) and isinstance(folder_text := run.setdefault("folder", str(folder)), str):
        run["folder"] = str(folder / Path(os.path.expanduser(folder_text))) if folder_text else None
    return _checked(path, tables, [_from_here(setting, folder) for setting in settings or ()])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte-order mark
    except FileNotFoundError:
        near = [
            str(p) for p in (*path.parent.glob("*.toml"), *path.parent.glob("jobs/*.toml")) if p.stem != "pyproject"
        ]
        there = f"; there are {', '.join(sorted(near))}" if near else ""
        raise JobError("job-file-missing", f"no job file at {path}{there}") from None
    except IsADirectoryError:
        of_run = f", as {path / 'job.toml'}; `--out {path} --resume` resumes this run"
        more = of_run if (path / "job.toml").exists() else ". Use run.load to continue a checkpoint"
        raise JobError("job-file-missing", f"{path} is a folder; a job is a TOML file{more}") from None
    except OSError as error:
        raise JobError("job-file-unreadable", f"{path} cannot be read: {error.strerror or error}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # not TOML, not text, a number of over 4,300 digits, too many brackets
        raise JobError("job-file-unreadable", f"{path} is not TOML: {error}") from None


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
    values = {key.strip(): value.strip() for key, _, value in (setting.partition("=") for setting in settings)}
    # Fields of the default model mean nothing to another one, and a preset has its own sequence length, batch and precision.
    without = ["model.config"] * ("model.source" in values)
    if values.get("model.source", "").strip("\"'").startswith(PRESET):
        without += ["data.sequence_length", "train.global_batch", "numerics.precision"]
    with resources.as_file(resources.files("samestep") / "default_job.toml") as path:
        steps = values.get("train.steps", "")
        tables = _read(path)
        if steps.isdecimal() and len(steps) < 10 and int(steps) < tables["schedule"]["warmup_steps"]:
            without += [
                "schedule.warmup_steps",
                "train.sample_tokens",
            ]  # so short a run has no warm-up, and writes noise
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
    is_name = word == "hf" and "/" not in path and not exists(Path(path))  # of a family
    return setting if is_name or not exists(folder / path) else f"{key}={word}{mark}{Path.cwd() / path}"


def set_key(tables: dict[str, Any], setting: str) -> None:
    """Write `key.path=value` into nested tables; a value that is not TOML is taken as text.

    Raises:
        JobError: the setting is not of that form, or names a table within a value.
    """
    key, equals, text = setting.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise JobError("set-syntax", f"--set {setting}: write key=value, as in --set train.steps=50")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if text.lstrip().startswith("="):
            raise JobError(
                "set-syntax",
                f"--set {setting}: one '=' separates key and value, and text that begins with another needs quotes",
            ) from None
        value = text
    table: Any = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise JobError("set-syntax", f"--set {setting}: {part} is a value, not a table")
    table[parts[-1]] = value


def settings() -> tuple[str, ...]:
    """Return what `--set` takes as one begins to write it: each key with `=`, or with each of its values where they are words."""
    written = []
    for table, field in Job.model_fields.items():
        kinds = [kind for kind in types_in(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for name, key in (item for kind in kinds for item in kind.model_fields.items()):
            values = [*filter(lambda text: isinstance(text, str), get_args(key.annotation))]
            written += [f"{table}.{name}={value}" for value in values or ("",)]
    return tuple(written)


def model_folder(job: Job) -> Path | None:
    """Return the folder of a pretrained model, which a separator in its name or its config.json tells from a family; else None."""
    name = job.model.source.removeprefix("hf:")
    if not name or name == job.model.source:
        return None
    place = place_of(job, name)
    is_path = any(mark in name for mark in "/\\") or name in (".", "..") or (place / "config.json").is_file()
    return place if is_path else None


def place_of(job: Job, path: str) -> Path:
    """Return where a path of a job is: in `run.folder`, or where there is none of this name, in the working directory."""
    place = Path(os.path.expanduser(path))
    if not path or job.run.folder is None or Path(job.run.folder) == Path.cwd():
        return place
    near = Path(job.run.folder) / place  # of an absolute path the path itself
    return place if not exists(near) and exists(place) else near


def exists(path: Path) -> bool:
    """Return whether there is a file or a folder, or files of which the path is a prefix."""
    parent = path.parent
    return os.path.exists(path) or (os.path.isdir(parent) and any(parent.glob(f"{glob.escape(path.name)}.*")))
