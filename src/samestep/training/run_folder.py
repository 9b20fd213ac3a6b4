"""The folder of a run: where a new one goes, and which one goes on. No torch."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from samestep.errors import CheckpointError, JobError

RUNS = Path("runs")
"""Where runs lie that are given no folder."""
JOB = "job.toml"
"""The job of a run, resolved: the file alone repeats the run."""


def chosen(out: str | Path | None, resume: bool) -> Path:
    """Return the folder of a run that is to start or to go on; a new run never writes into one that holds a run.

    Raises:
        CheckpointError: there is no run to go on with.
        JobError: the folder is a file, or holds a run already.
    """
    folder = Path(out) if out is not None else newest() if resume else _new()
    if folder.exists() and not folder.is_dir():
        raise JobError(f"--out {folder} is a file; a run needs a folder")
    if resume and not (folder / JOB).exists():
        raise CheckpointError(f"{folder} holds no run to go on with")
    if not resume and any((folder / name).exists() for name in (JOB, "metrics.jsonl", "checkpoints")):
        raise JobError(f"{folder} holds a run already: --resume goes on with it, another --out starts anew")
    return folder


def newest() -> Path:
    """Return the run below `runs` that was started or resumed last.

    Raises:
        CheckpointError: there is none.
    """
    found = [(path.stat().st_mtime, path.parent) for path in RUNS.glob(f"*/{JOB}")]
    if not found:
        raise CheckpointError(f"there is no run below {RUNS}/ to go on with; --out names another folder")
    return max(found)[1]


def _new() -> Path:
    """Name a new folder by the clock, so that the newest stands last."""
    now = time.strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([now], (f"{now}-{number}" for number in itertools.count(2)))
    return next(folder for name in names if not (folder := RUNS / name).exists())


def make(folder: Path) -> None:
    """Make the folder of a run.

    Raises:
        JobError: the system does not let us.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"--out {folder} cannot be made: {error.strerror} ({error.filename})") from None
