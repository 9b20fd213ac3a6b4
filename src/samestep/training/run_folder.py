"""The folder of a run: a new one's name, the one that `--resume` selects, and the lock that excludes other runs. No
torch.

Another user may have prepared the folder. Links of another user in it are refused, since the run would write to the
files that they point to; the lock can be opened by its owner alone, since whoever can read it could hold it.

The result of a run, as `train` returns it, is its `summary.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep import wings
from samestep.errors import CheckpointError, JobError
from samestep.output import durable_files, process_limits

RUNS = Path("runs")
"""The parent folder of runs that are given no folder of their own."""
JOB = "job.toml"
"""The file of the resolved job in a run folder; with it alone the run can be repeated."""
LOG = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"
"""The file of a run's result, written when the run is done or was stopped."""
_LOCK = ".lock"
_LOCK_GRACE_S = 1.0
"""Seconds within which the workers of a killed run end too, and release its lock."""


def choose_folder(out: str | Path | None, resume: bool, auto_resume: bool = False) -> Path:
    """Return the folder of a run that starts or resumes; a new run never writes into a folder that holds a run.

    With `auto_resume` it may hold one or not.

    Raises:
        CheckpointError: there is no run to resume.
        JobError: the folder is a file, or holds a run already.
    """
    if auto_resume and out is None:
        raise JobError(
            "run-folder-missing",
            "--auto-resume starts the run in a folder, or continues it: --out DIR names the folder",
        )
    folder = Path(out) if out is not None else newest() if resume else _new()
    durable_files.refuse_remote(folder)
    if folder.exists() and not folder.is_dir():
        raise JobError("run-folder-unwritable", f"--out {folder} is a file; a run needs a folder")
    if resume and not (folder / JOB).exists():
        raise CheckpointError("run-folder-missing", f"{folder} holds no run to resume")
    if not resume and not auto_resume:
        refuse_used(folder)
    return folder


def with_way_on(text: str, folder: Path) -> str:
    """Return why a run has failed, with how it goes on from its newest checkpoint, if it has one."""
    steps = [int(path.name[5:]) for path in (folder / CHECKPOINTS).glob("step-*") if path.name[5:].isdecimal()]
    if not steps:
        return text
    first, mark, rest = text.partition("\n")
    return f"{first}; --resume --out {folder} continues from step {max(steps)}{mark}{rest}"


def refuse_used(folder: Path) -> None:
    """Refuse a folder that holds a run.

    Raises:
        JobError: it does.
    """
    if any((folder / name).exists() for name in (JOB, LOG, CHECKPOINTS)):
        raise JobError(
            "run-folder-taken", f"{folder} holds a run already: --resume resumes it, another --out starts a new one"
        )


def newest(purpose: str = "to resume") -> Path:
    """Return the folder of the run below `runs` that was started or resumed last.

    Raises:
        CheckpointError: there is no run.
    """
    runs = [(path.stat().st_mtime, path.parent) for path in RUNS.glob(f"*/{JOB}")]
    if not runs:
        raise CheckpointError(
            "run-folder-missing",
            f"there is no run below {RUNS}/ {purpose}. Use {'--out DIR' if purpose == 'to resume' else 'the path of a run folder'}",
        )
    return max(runs)[1]


def _new() -> Path:
    """Return the path of a new folder, named by date and time so that the newest sorts last."""
    now = time.strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([now], (f"{now}-{number}" for number in itertools.count(2)))
    return next(folder for name in names if not (folder := RUNS / name).exists())


@contextlib.contextmanager
def claim_folder(folder: Path, *, is_new: bool) -> Iterator[None]:
    """Create the folder of a run and exclude other runs from it; a new folder of a run that takes no step is removed
    again.

    Raises:
        JobError: another run is in it, or the system does not allow it.
    """
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_links_of_others(folder)
        lock = _lock_folder(folder)
    except OSError as error:
        raise JobError(
            "run-folder-unwritable", f"--out {folder} cannot be created: {error.strerror} ({error.filename})"
        ) from None
    try:
        if is_new:
            refuse_used(folder)  # a run that began and ended since it was chosen
        yield
    finally:
        if is_new and not _holds_steps(folder):
            _forget(folder)
        (folder / _LOCK).unlink(missing_ok=True)
        os.close(lock)
        if not existed:
            with contextlib.suppress(OSError):  # unless something is in it
                folder.rmdir()


def set_aside(damaged: Iterable[Path]) -> None:
    """Rename checkpoints that are damaged, so that the newest one is whole."""
    for path in damaged:
        path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))


def _refuse_links_of_others(folder: Path) -> None:
    """Refuse links in a folder that belong to another user, and warn where the folder itself does.

    Raises:
        JobError: there is such a link.
    """
    for path in (folder, *folder.iterdir()):
        owner = path.lstat().st_uid
        if owner == os.geteuid():
            continue
        if path.is_symlink():
            raise JobError("run-folder-unwritable", f"{path} is a link of user {owner}. Use a folder of your own")
        if path == folder:
            warnings.warn(f"{folder} belongs to user {owner}, who can change the files of this run", stacklevel=2)


def _lock_folder(folder: Path) -> int:
    """Return the descriptor of a folder's lock, which the system releases when this process and its workers have ended.

    Raises:
        JobError: another process holds it.
    """
    path, end = folder / _LOCK, time.monotonic() + _LOCK_GRACE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | process_limits.O_CLOEXEC | process_limits.O_NOFOLLOW, 0o600)
        try:
            process_limits.lock(descriptor, waits=False)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                break  # else the run before has removed the file that was opened
        except BlockingIOError:
            if time.monotonic() > end:
                raise JobError(
                    "run-folder-taken", f"{folder} is in use by {_holder(path)}: another --out starts another run"
                ) from None
        os.close(descriptor)
        time.sleep(0.05)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "at": time.time_ns()}).encode())
    return descriptor


def lock_of(folder: Path) -> str:
    """Return the text of a folder's lock, which no other folder has; empty where it is not locked."""
    try:
        return (folder / _LOCK).read_text(encoding="utf-8")
    except OSError:
        return ""


def _holder(path: Path) -> str:
    """Return who holds a lock, as text."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _holds_steps(folder: Path) -> bool:
    """Return whether a run has left a step in its log, or a checkpoint."""
    log = folder / LOG
    return (log.exists() and log.stat().st_size > 0) or any((folder / CHECKPOINTS).glob("step-*"))


def _forget(folder: Path) -> None:
    """Remove the files of a run that took no step."""
    for name in (JOB, "layout.txt", LOG, "trackers.json"):
        (folder / name).unlink(missing_ok=True)
    for name in ("tensorboard", CHECKPOINTS):
        shutil.rmtree(folder / name, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run: its folder, its steps and its losses."""

    folder: Path
    steps: int
    """The number of steps taken in all, including those before a resume."""
    loss: float | None
    """The training loss of the last step, a mean over counted tokens; None where it was not finite."""
    held_out_loss: float | None
    """The mean loss over the held-out samples, of several sets the one that decides (`train.monitor`); None where nothing is
    held out or the run was stopped."""
    held_out_accuracy: float | None
    """The fraction of the held-out samples whose class is found; None where a sample has no class."""
    stopped: bool
    """Whether the run was asked to stop before its last step."""
    proof: str = ""
    """When and how the layout was proven to give one device's result, or that it is not proven."""
    waived: tuple[str, ...] = ()
    """The refusals that the run met and `run.allow` waived."""
    tried: tuple[str, ...] = ()
    """What a trial has passed and no rule shows, such as an operation of a library."""
    remarks: tuple[str, ...] = ()
    """Tensors that the folder of `model.source` lacks, which were made as in a new model, and those that it has besides."""
    started_from: str = ""
    """The weights of another run or folder from which it started, as `--init-from` says."""
    changes: tuple[str, ...] = ()
    """What resumes have changed of the job and its layout, and after which steps."""
    held_out_losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The mean loss of each held-out set, by name; `held_out` is the part of the data that is held out."""
    goodput: float = 1.0
    """The part of the run's time, over all its starts, in which it took steps that count."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds by what they were spent on, as `training/run_log.py` names it."""
    stop_signal: int = 0
    """The signal that stopped it, with whose status the command ends; 0 without one, and under torchrun."""

    def to_record(self) -> dict[str, Any]:
        """Return it as plain data, but for its path."""
        return dataclasses.asdict(self)

    def _repr_html_(self) -> str | None:
        return wings.in_notebook("summary_page", self)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.to_record(), indent=1, default=str)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Summary:
        """Return it from what `to_json` wrote."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**{**values, "folder": Path(record["folder"])})
