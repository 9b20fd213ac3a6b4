"""The loggers of each step's numbers besides the run folder: TensorBoard, wandb, mlflow, and functions of the user.

Each tracker is given every logged step once, on rank 0, with its report and with its scalars under the names of
`scalars_of` (`train/loss`, `perf/mfu`, ...). A run that resumes continues the entry of its tracker: the number that wandb
or mlflow gave the entry is kept in the run folder.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samestep.datasets.imported import import_function
from samestep.errors import JobError, SamestepError, failures_of
from samestep.job import Job
from samestep.output.durable_files import write_whole
from samestep.runtime.step_report import StepReport

SERVICES = ("wandb", "mlflow")
"""Trackers that `run.report` names by a word."""
TENSORBOARD = "tensorboard"
_LIBRARIES = {TENSORBOARD: "tensorboardX"}
"""The libraries of trackers whose word is another name."""
_ENTRIES = "trackers.json"
"""The file of a run folder that holds the number of each service's entry."""


class Tracker:
    """A logger of the numbers of each logged step."""

    def add(self, report: StepReport, scalars: Mapping[str, float]) -> None:
        """Receive one step."""
        raise NotImplementedError

    def flush(self) -> None:
        """Return once all added steps are stored, where the tracker can confirm that."""

    def close(self) -> None:
        """End the entry of this run."""


Logger = str | Callable[[StepReport], object]
"""A service or a `module:function` by its word, or a function of a report."""


def check(job: Job) -> None:
    """Refuse a word of `run.report` that names neither an installed tracker nor a function.

    Raises:
        JobError: a tracker is not installed, or there is no such function.
    """
    for word in job.run.report:
        check_receiver(word, job.run.folder, f'run.report = "{word}"')


def check_receiver(logger: Logger, folder: str | None, where: str) -> None:
    """Refuse a logger that is neither an installed tracker nor a function; `where` is how the text begins.

    Raises:
        JobError: a tracker is not installed, or there is no such function.
    """
    if not isinstance(logger, str):
        return
    if logger not in _STARTS:
        _function_of(logger, folder)
    elif importlib.util.find_spec(_LIBRARIES.get(logger, logger)) is None:
        library = _LIBRARIES.get(logger, logger)
        raise JobError("package-missing", f"{where}: {library} is not installed here. Use pip install {library}")


def open_trackers(job: Job, folder: Path, first_step: int) -> list[Tracker]:
    """Return the trackers of a run: TensorBoard where tensorboardX is installed, and those that the job names.

    Raises:
        JobError: a tracker that the job names cannot be started.
    """
    has_tensorboard = importlib.util.find_spec(_LIBRARIES[TENSORBOARD]) is not None
    words = dict.fromkeys([*([TENSORBOARD] if has_tensorboard else []), *job.run.report])
    return [open_receiver(word, job, folder, first_step, f'run.report = "{word}"') for word in words]


def open_receiver(logger: Logger, job: Job, folder: Path, first_step: int, where: str) -> Tracker:
    """Return the tracker of a logger; `where` is how the text of an error begins.

    Raises:
        JobError: it cannot be started.
    """
    if not isinstance(logger, str):
        return _Function(where, logger)
    try:
        if logger in _STARTS:
            return _Service(where, _STARTS[logger](job, folder, first_step))
        return _Function(where, _function_of(logger, job.run.folder))
    except SamestepError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _Service(where, _NotStarted(error))
        raise JobError("tracker-failed", f"{where} cannot be started: {type(error).__name__}: {error}") from error
    except Exception as error:  # no account, no network, a folder that cannot be written
        raise JobError("tracker-failed", f"{where} cannot be started: {type(error).__name__}: {error}") from error


def _function_of(word: str, folder: str | None) -> Callable[..., Any]:
    return import_function(word, "run.report", JobError, folder)


class _TensorBoard(Tracker):
    """A file of TensorBoard events, one event a step with all its scalars.

    It is written by this thread: the thread of tensorboardX's own `SummaryWriter` ends if the disk is full, and whoever waits
    for its queue then waits for ever.
    """

    def __init__(self, job: Job, folder: Path, first_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # noqa: PLC0415 - an extra
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415
        from tensorboardX.proto.summary_pb2 import Summary  # noqa: PLC0415

        (folder / TENSORBOARD).mkdir(parents=True, exist_ok=True)
        self._writer: Any = EventsWriter(str(folder / TENSORBOARD / "events"))
        self._event: Any = Event
        self._summary: Any = Summary
        # Readers drop the events from this step on, which an earlier part of the run has written.
        self._write(first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, report: StepReport, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(report.step, summary=self._summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb(Tracker):
    def __init__(self, job: Job, folder: Path, first_step: int) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore] # noqa: PLC0415 - not a dependency

        entry = _entry_of(folder, "wandb") or secrets.token_hex(8)
        self._run: Any = wandb.init(
            id=entry, name=folder.name, dir=str(folder), config=job.model_dump(mode="json"), resume="allow"
        )
        _keep_entry(folder, "wandb", entry)

    def add(self, report: StepReport, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=report.step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow(Tracker):
    def __init__(self, job: Job, folder: Path, first_step: int) -> None:
        import mlflow  # type: ignore[import-not-found, unused-ignore] # noqa: PLC0415 - not a dependency

        self._mlflow: Any = mlflow
        entry = _entry_of(folder, "mlflow")
        started = mlflow.start_run(run_id=entry) if entry else mlflow.start_run(run_name=folder.name)
        if not entry:
            tables = job.model_dump(mode="json")
            for table, row in tables.items():  # a request has at most 100
                mlflow.log_params({f"{table}.{key}": value for key, value in row.items()})
        _keep_entry(folder, "mlflow", started.info.run_id)

    def add(self, report: StepReport, scalars: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_mlflow_name(name): value for name, value in scalars.items()}, step=report.step)

    def close(self) -> None:
        self._mlflow.end_run()


def _mlflow_name(name: str) -> str:
    """Return the name of a number as mlflow takes it: in one folder, since a folder may not be named as a number is."""
    folder, slash, rest = name.partition("/")
    return re.sub(r"[^\w .:/-]", "_", f"{folder}{slash}{rest.replace('/', '.')}")


_STARTS: Mapping[str, Callable[[Job, Path, int], Tracker]] = {
    TENSORBOARD: _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow
}  # fmt: skip


class _Service(Tracker):
    """A tracker of a library's, whose failures cost its numbers and not the run."""

    def __init__(self, where: str, tracker: Tracker) -> None:
        self._where, self._tracker, self._has_failed = where, tracker, False

    def add(self, report: StepReport, scalars: Mapping[str, float]) -> None:
        with self._failing(f"does not take the numbers of step {report.step}"):
            self._tracker.add(report, scalars)

    def flush(self) -> None:
        with self._failing("does not store its numbers"):
            self._tracker.flush()

    def close(self) -> None:
        with self._failing("does not end its entry"):
            self._tracker.close()

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Say once what the library fails to do: its server, its disk or its account may come back."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                warnings.warn(f"{self._where} {what} ({reason}), and the run continues", stacklevel=4)
            self._has_failed = True


class _NotStarted(Tracker):
    """A tracker for which the disk had no room: a log never stops a run."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def add(self, report: StepReport, scalars: Mapping[str, float]) -> None:
        raise self._error


class _Function(Tracker):
    """A function of the user's, called with each report."""

    def __init__(self, where: str, function: Callable[[StepReport], object]) -> None:
        self._where, self._function = where, function

    def add(self, report: StepReport, scalars: Mapping[str, float]) -> None:
        with failures_of(f"step {report.step}: {self._where}", JobError):
            self._function(report)


def _entry_of(folder: Path, service: str) -> str | None:
    path = folder / _ENTRIES
    return json.loads(path.read_text(encoding="utf-8")).get(service) if path.exists() else None


def _keep_entry(folder: Path, service: str, entry: str) -> None:
    path = folder / _ENTRIES
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_whole(path, json.dumps({**entries, service: entry}) + "\n")
