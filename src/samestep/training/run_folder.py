"""The folder of a run: the name of a new one, and the one that `--resume` means. No torch."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from samestep.errors import CheckpointError, JobError

RUNS = Path("runs")
"""The parent folder of runs that are given no folder of their own."""
JOB = "job.toml"
"""The file of the resolved job in a run folder; with it alone the run can be repeated."""


def chosen(out: str | Path | None, resume: bool) -> Path:
    """Return the folder of a run that starts or resumes; a new run never writes into a folder that holds a run.

    Raises:
        CheckpointError: there is no run to resume.
        JobError: the folder is a file, or holds a run already.
    """
    folder = Path(out) if out is not None else newest() if resume else _new()
    if folder.exists() and not folder.is_dir():
        raise JobError(f"--out {folder} is a file; a run needs a folder")
    if resume and not (folder / JOB).exists():
        raise CheckpointError(f"{folder} holds no run to resume")
    if not resume and any((folder / name).exists() for name in (JOB, "metrics.jsonl", "checkpoints")):
        raise JobError(f"{folder} holds a run already: --resume resumes it, another --out starts a new one")
    return folder


def newest() -> Path:
    """Return the folder of the run below `runs` that was started or resumed last.

    Raises:
        CheckpointError: there is no run.
    """
    found = [(path.stat().st_mtime, path.parent) for path in RUNS.glob(f"*/{JOB}")]
    if not found:
        raise CheckpointError(f"there is no run below {RUNS}/ to resume; --out names another folder")
    return max(found)[1]


def _new() -> Path:
    """Return the path of a new folder, named by date and time so that the newest sorts last."""
    now = time.strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([now], (f"{now}-{number}" for number in itertools.count(2)))
    return next(folder for name in names if not (folder := RUNS / name).exists())


def make(folder: Path) -> None:
    """Create the folder of a run.

    Raises:
        JobError: the system does not allow it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"--out {folder} cannot be created: {error.strerror} ({error.filename})") from None
