"""Paths in a job: those of a job file are relative to its folder, or else to the working directory."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from samestep.job import Job


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
    given = Path(os.path.expanduser(path))
    if not path or job.run.folder is None or Path(job.run.folder) == Path.cwd():
        return given
    near = Path(job.run.folder) / given  # of an absolute path the path itself
    return given if not exists(near) and exists(given) else near


def exists(path: Path) -> bool:
    """Return whether there is a file or a folder, or files of which the path is a prefix."""
    parent = path.parent
    return os.path.exists(path) or (os.path.isdir(parent) and any(parent.glob(f"{glob.escape(path.name)}.*")))
