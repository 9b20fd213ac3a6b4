"""Measured steps, read from a CSV file of any framework's results, or from the folders of runs.

A line of a CSV file is one step: what was computed, in which layout, and how long it took. Values are between commas, semicolons or
tabs, as the head has them; empty lines, and those that begin with `#`, are passed over. Lines of one job and layout are one step.

| column | meaning |
| --- | --- |
| `layout` | layout words, such as `dp=8 zero=3 microbatch=2`; or a column for each word (`dp`, `tp`, `zero`, ...) |
| `step_s` | seconds of a step; or one of `tokens_per_s`, `tokens_per_s_per_device`, `tflops_per_device` |
| `devices` | the number of devices, which must be that of the layout's ranks |
| `model`, `global_batch`, `precision`, `sequence_length` | short for `model.source`, `train.global_batch`, ...; the first three are needed |
| `hardware` | the machine, which is the same in all lines |
| any key of a job, such as `model.source` | its value in this line; what is missing is the job's |
| anything else | ignored, and said |
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from samestep import job_files as jobs
from samestep.errors import InputError, did_you_mean
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import catalog
from samestep.models.published import as_published
from samestep.models.spec import ModelSpec

_SHORT = {
    "model": "model.source",
    "global_batch": "train.global_batch",
    "sequence_length": "data.sequence_length",
    "precision": "numerics.precision",
}
_NEEDED = ("model", "global_batch", "precision")
"""Columns without which a line says nothing: no default of a job is what was measured elsewhere."""
_SPEEDS = ("step_s", "tokens_per_s", "tokens_per_s_per_device", "tflops_per_device")
_WORDS = ("dp", *(field.name for field in fields(Layout)))
_KNOWN = ("layout", "devices", "hardware", *_SPEEDS, *_SHORT, *_WORDS)
_FIRST_STEPS = 2
"""Steps of a run that are left out: they build graphs and buffers."""
MOST_ROWS = 1000
_AGREE = 1.5
"""Ratio of the slowest to the fastest of several measurements of one step above which they are not the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One measured step: the job and the layout, and its seconds."""

    origin: str
    """The line of the file, or the folder, as an error names it."""
    job: Job
    model: ModelSpec
    layout: Layout
    step_s: float
    hardware: str = ""
    """The name of the machine, if the line says it."""

    @property
    def configuration(self) -> str:
        """All that a prediction reads of it, as text: steps with the same text are predicted alike."""
        keys = self.job.model_dump_json(include={"model", "numerics", "optimizer"})
        return f"{self.layout} of {self.job.train.global_batch} samples of {self.model.length}: {keys}"


def read_steps(paths: Sequence[Path], job: Job | None) -> tuple[list[TimedStep], list[str]]:
    """Return the measured steps of CSV files and run folders, and a line for each column that was ignored.

    Raises:
        InputError: a file cannot be read, or a line cannot be a measured step; all such lines are named.
    """
    steps: list[TimedStep] = []
    said: list[str] = []
    mistakes: list[str] = []
    for path in paths:
        if path.is_dir():
            steps.append(_of_run(path))
            continue
        rows, ignored = _rows_of(path)
        said += ignored
        for number, row in rows:
            origin = f"{path}:{number}"
            try:
                steps.append(_step_of(origin, row, job))
            except InputError as error:
                mistakes.append(f"{origin}: {error}")
    if mistakes:
        raise InputError("measured-steps", "\n".join(mistakes))
    _refuse_machines(steps)
    merged = _merged(steps)
    if len(merged) < len(steps):
        said.append(
            f"{len(steps)} measurements are {len(merged)} steps: measurements of one job and layout become their median"
        )
    return merged, [*said, *_assumed_lengths(merged)]


def _refuse_machines(steps: Sequence[TimedStep]) -> None:
    """Refuse steps of several machines: one profile is refitted."""
    first = {step.hardware: step.origin for step in reversed(steps) if step.hardware}
    if len(first) > 1:
        names = ", ".join(f"{name} ({origin})" for name, origin in first.items())
        raise InputError("measured-steps", f"the steps are of several machines: {names}. Use a file for each of them")


def _merged(steps: Sequence[TimedStep]) -> list[TimedStep]:
    """Return the steps with the median of those that are predicted alike, so that none is fitted and tested at once.

    Raises:
        InputError: two of these are too far apart to be the same step.
    """
    alike: dict[str, list[TimedStep]] = {}
    for measured in steps:
        alike.setdefault(measured.configuration, []).append(measured)
    timed_steps, mistakes = list[TimedStep](), list[str]()
    for same in alike.values():
        fast, slow = min(same, key=lambda step: step.step_s), max(same, key=lambda step: step.step_s)
        if slow.step_s > _AGREE * fast.step_s:
            mistakes.append(
                f"{fast.origin} and {slow.origin} are the same job and layout, and take {fast.step_s:.4g} and {slow.step_s:.4g} s. "
                "Remove the wrong one, or add a column for their difference"
            )
        others = f" and {len(same) - 1} more" if len(same) > 1 else ""
        middle, machine = statistics.median(step.step_s for step in same), max(step.hardware for step in same)
        timed_steps.append(replace(same[0], origin=f"{same[0].origin}{others}", step_s=middle, hardware=machine))
    if mistakes:
        raise InputError("measured-steps", "\n".join(mistakes))
    return timed_steps


def _assumed_lengths(steps: Sequence[TimedStep]) -> list[str]:
    """Return a line for each model whose steps do not say how long a sample is."""
    silent = [step for step in steps if step.model.length and "sequence_length" not in step.job.data.model_fields_set]
    lengths = dict.fromkeys((step.job.model.source, step.model.length) for step in silent)
    return [f"no sequence_length is given for {source}: {length:,} tokens are taken" for source, length in lengths]


def _rows_of(path: Path) -> tuple[list[tuple[int, dict[str, str]]], list[str]]:
    """Return the lines of a CSV file with their numbers, and what is said of columns that mean nothing here."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise InputError("measured-steps", f"{path} cannot be read as text: {error}") from None
    text = "\n".join("" if line.startswith("#") else line for line in lines)
    table = text.lstrip("\n")
    delimiter = max(",;\t", key=table.partition("\n")[0].count)
    reader = csv.DictReader(io.StringIO(table), strict=True, delimiter=delimiter)
    try:
        head = [name.strip() for name in reader.fieldnames or []]
        reader.fieldnames = head
        rows = [(reader.line_num + len(text) - len(table), row) for row in reader]
    except csv.Error as error:
        raise InputError("measured-steps", f"{path} is not a CSV file: {error}") from None
    if not any(name in head for name in _SPEEDS):
        raise InputError(
            "measured-steps",
            f"{path} has no column of a measured speed, which is one of {', '.join(_SPEEDS)}; its columns are {', '.join(head)}",
        )
    ignored = [name for name in head if name not in _KNOWN and "." not in name]
    for name in ignored:
        if hint := did_you_mean(name, _KNOWN):
            raise InputError(
                "measured-steps",
                f"{path}: column {name!r} means nothing here{hint}; a column of another name is ignored",
            )
    if len(rows) > MOST_ROWS:
        raise InputError("measured-steps", f"{path} has {len(rows)} lines; {MOST_ROWS} are read at most")
    return rows, [f"{path}: columns that mean nothing here are ignored: {', '.join(ignored)}"] if ignored else []


def _step_of(origin: str, row: Mapping[Any, Any], job: Job | None) -> TimedStep:
    """Return the measured step of one line."""
    if None in row or any(value is None for value in row.values()):
        raise InputError("measured-steps", "it has more or fewer values than the file has columns")
    cells = {str(name): str(value).strip() for name, value in row.items() if str(value).strip()}
    _refuse_unsaid(cells, job)
    settings = [f"{_SHORT.get(name, name)}={value}" for name, value in cells.items() if name in _SHORT or "." in name]
    if job is None:
        row_job, _ = as_published(jobs.default(settings))
    else:
        tables = job.model_dump(exclude_unset=True)
        for setting in settings:
            jobs.set_key(tables, setting)
        row_job, _ = as_published(Job(**tables))
    layout = _layout_of(cells)
    if "devices" in cells and cells["devices"] != str(layout.world_size):
        raise InputError(
            "devices-and-ranks",
            f"devices = {cells['devices']}, and layout {str(layout)!r} has {layout.world_size} ranks",
        )
    model = catalog.model_spec(row_job)
    step_s = _seconds_of(cells, row_job, model, layout)
    hardware = cells.get("hardware", "")
    return TimedStep(origin=origin, job=row_job, model=model, layout=layout, step_s=step_s, hardware=hardware)


def _refuse_unsaid(cells: Mapping[str, str], job: Job | None) -> None:
    """Refuse a line that leaves to a default what nobody but its author knows."""
    names = {_SHORT.get(name, name) for name in cells}
    for column in _NEEDED:
        table, _, key = _SHORT[column].partition(".")
        if _SHORT[column] not in names and (job is None or key not in getattr(job, table).model_fields_set):
            raise InputError(
                "measured-steps", f"no {column}. Use a column `{column}`, or a job (--job, --set) with {_SHORT[column]}"
            )


def _layout_of(cells: Mapping[str, str]) -> Layout:
    words = {name: cells[name] for name in _WORDS if name in cells}
    if "layout" in cells and words:
        raise InputError("command-options", f"layout and {next(iter(words))} both set the layout. Use one of them")
    if "layout" in cells:
        return Layout(cells["layout"])
    if not words:
        raise InputError(
            "measured-steps",
            "no layout. Use a column `layout` with a line such as dp=8 zero=3, or a column for each word",
        )
    return Layout(**words)


def _seconds_of(cells: Mapping[str, str], job: Job, model: ModelSpec, layout: Layout) -> float:
    """Return the seconds of a step, from whatever says how fast it was."""
    speeds = [name for name in _SPEEDS if name in cells]
    if len(speeds) != 1:
        raise InputError(
            "measured-steps",
            f"{' and '.join(speeds) + ' say' if speeds else 'nothing says'} how long a step took. Use one of {', '.join(_SPEEDS)}",
        )
    name = speeds[0]
    try:
        value = float(cells[name])
    except ValueError:
        raise InputError("measured-steps", f"{name} = {cells[name]!r} must be a number, such as 1234.5") from None
    if not 0 < value < math.inf:
        raise InputError("measured-steps", f"{name} = {cells[name]} must be a speed above 0")
    if name == "step_s":
        return value
    samples, devices = job.train.global_batch, layout.world_size
    if name == "tflops_per_device":
        return 3 * model.forward_flops * samples / (value * 1e12 * devices)
    if not model.length:
        raise InputError("measured-steps", f"{name}: a sample of this model is not a sequence of tokens. Use step_s")
    per_s = value * devices if name == "tokens_per_s_per_device" else value
    return model.length * samples / per_s


def _of_run(folder: Path) -> TimedStep:
    """Return the median step of a run, without its first ones."""
    try:
        job = jobs.load(folder / "job.toml")
        layout = Layout((folder / "layout.txt").read_text(encoding="utf-8").strip())
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        times = [float(json.loads(line)["step_s"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "measured-steps",
            f"{folder} is not a folder of a run with measured steps (job.toml, layout.txt, metrics.jsonl): {error}",
        ) from None
    if len(times) <= _FIRST_STEPS:
        raise InputError(
            "measured-steps",
            f"{folder} has {len(times)} measured steps, and the first {_FIRST_STEPS} are left out. Use more steps",
        )
    return TimedStep(
        origin=str(folder),
        job=job,
        model=catalog.model_spec(job),
        layout=layout,
        step_s=statistics.median(times[_FIRST_STEPS:]),
    )
