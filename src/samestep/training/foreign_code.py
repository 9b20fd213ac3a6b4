"""Functions that only a checkpoint or a run folder names are not run.

A job names functions as `module:function`, and the job in a manifest or in a run folder may be anybody's: it can name
`subprocess:getoutput`. Such a function runs only where the caller names it too: in the job that they give, in a job of
a run that they started before (`train` notes its functions, each with the file of its module), or by `--allow code`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from samestep.datasets import imported
from samestep.datasets.source import SOURCES
from samestep.errors import CheckpointError
from samestep.job import Job

ALLOW = "code"
"""The word of `--allow` that runs functions that only a checkpoint names."""
_FORM = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
_SCHEMES = {name.partition(":")[0] for name in SOURCES if name != "module:function"} | {"hf", "preset"}
_NO_CODE = (("model", "config"), ("train", "prompt"))
"""Tables and keys of a job whose texts are never imported."""


def code_of(job: Job) -> tuple[str, ...]:
    """Return the words of a job that name functions, in the order of its keys."""
    return tuple(dict.fromkeys(_code_in(job.model_dump(mode="json"), ())))


def note(job: Job) -> None:
    """Note the functions that the caller's job names; their modules have been imported.

    Where the home folder cannot be written, nothing is noted, and `--allow code` is needed later.
    """
    for word in code_of(job):
        if file := _file_of(word, job.run.folder):
            place = _note_path(word, file)
            with contextlib.suppress(OSError, RuntimeError):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(f"{word}\n{file}\n", encoding="utf-8")


def refuse(job: Job, origin: Path, own: Job | None = None) -> None:
    """Refuse a job, found in a checkpoint or a run folder, that names a function which the caller has not named.

    Args:
        job: the job that was found.
        origin: where.
        own: the caller's job, if there is one.

    Raises:
        CheckpointError: it does; the text names the function.
    """
    said = code_of(own) if own is not None else ()
    for word in code_of(job):
        if word not in said and not _is_noted(word, job.run.folder):
            raise CheckpointError(
                "code-untrusted",
                f"{origin} names the function {word}, which no run of yours has named: --allow {ALLOW} runs it, "
                f"if you trust who wrote this folder",
            )


def _code_in(value: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """Yield the texts in a job's tables that may name functions."""
    if keys in _NO_CODE:
        return
    if isinstance(value, str):
        if _FORM.fullmatch(value) and value.partition(":")[0] not in _SCHEMES:
            yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _code_in(key, ())
            yield from _code_in(item, (*keys, key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _code_in(item, keys)


def _is_noted(word: str, folder: str | None) -> bool:
    file = _file_of(word, folder)
    try:
        return bool(file) and _note_path(word, file).is_file()
    except (OSError, RuntimeError):
        return False


def _note_path(word: str, file: str) -> Path:
    return Path.home() / ".cache" / "samestep" / "code" / xxhash.xxh3_128_hexdigest(f"{word}\n{file}".encode())


def _file_of(word: str, folder: str | None) -> str:
    """Return the file of the outermost package of a function, without running it; empty where there is none."""
    root = word.partition(":")[0].partition(".")[0]
    if root in sys.modules:
        file = getattr(sys.modules[root], "__file__", None)
        return str(Path(file).resolve()) if file else ""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = imported.spec_of(root, folder)
        if spec is not None and spec.origin:
            return str(Path(spec.origin).resolve())
    return ""
