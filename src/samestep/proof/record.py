"""The record of a proof, kept in a cache and in run folders, so that every run can say whether its layout is proven.

A proof holds for one key: the job without what changes no step (its number of steps, its paths, its settings of this
machine), the layout, the versions of the packages, and the contents of samestep's files and of the user's.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash

from samestep.datasets.imported import installed_folders, own_sources
from samestep.job import Job
from samestep.job_files import model_folder
from samestep.layout import Layout
from samestep.models.weight_files import digest_of
from samestep.output.durable_files import write_whole
from samestep.output.text import installed_version
from samestep.proof.verdict import Verdict

FILE = "proof.json"
"""The file of the proof in a run folder."""
_VERSIONS = ("torch", "samestep", "transformers")
_LEFT_OUT = {
    "train": {"steps", "evaluate_samples", "prompt", "sample_tokens", "sample_temperature", "watch_every", "record"},
    "data": {"held_out"},
    "layout": True,
    "checkpoint": True,
    "run": True,
}
"""Keys of a job that concern a run, and none of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRecord:
    """One proof of one layout."""

    key: str
    """The digest of everything that the proof holds for."""
    when: str
    """The local time at which it ended."""
    layout: str
    steps: int
    precision: str
    """float64, or the job's own precision where the model cannot run in float64."""
    notes: tuple[str, ...]
    """Restrictions, such as a model with fewer layers."""

    def to_line(self) -> str:
        """Return one line for the summary of a run."""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"proven on {self.when}: {self.steps} steps in {self.precision} are equal to one device{notes}"


NOT_PROVEN = "not verified yet: `samestep verify` and `samestep train --prove` compare this layout with one device"


def record_of(job: Job, verdict: Verdict) -> ProofRecord:
    """Return the record of a verdict that found no difference."""
    assert verdict.proven
    layout = Layout(verdict.layout)
    when = time.strftime("%Y-%m-%d %H:%M")
    precision, notes = verdict.precision, verdict.notes
    key = key_of(job, layout)
    return ProofRecord(key=key, when=when, layout=str(layout), steps=verdict.steps, precision=precision, notes=notes)


def keep(record: ProofRecord, folder: Path | None = None) -> None:
    """Write a record into the cache, and into a run folder where one is given."""
    text = json.dumps(asdict(record), indent=1) + "\n"
    if folder is not None:
        write_whole(folder / FILE, text)
    with contextlib.suppress(OSError, RuntimeError):  # without a writable home folder there is no cache
        path = _cache_path(record.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def find_record(job: Job, layout: Layout, folder: Path) -> ProofRecord | None:
    """Return the record that holds for a job and a layout, from the run folder or the cache; None if there is none.

    The modules of the user's functions must have been imported: their files are a part of the key.
    """
    key = key_of(job, layout)
    with contextlib.suppress(RuntimeError):
        for path in (folder / FILE, _cache_path(key)):
            # A file that is missing, damaged or of another form proves nothing.
            with contextlib.suppress(OSError, ValueError, TypeError):
                record = ProofRecord(**json.loads(path.read_text(encoding="utf-8")))
                if record.key == key:
                    return replace(record, notes=tuple(record.notes))
    return None


def _cache_path(key: str) -> Path:
    return Path.home() / ".cache" / "samestep" / "proofs" / f"{key}.json"


# -- what a proof holds for ------------------------------------------------------------------------


def key_of(job: Job, layout: Layout) -> str:
    """Return the digest of everything that a proof of a job in a layout holds for."""
    tables = job.model_dump(mode="json", exclude=_LEFT_OUT)  # type: ignore[arg-type]
    data = tables["data"]
    kind, colon, _ = job.data.source.partition(":")
    if colon and kind in ("text", "tokens", "jsonl", "hf"):
        data["source"] = kind
    data["tokenizer"] = Path(job.data.tokenizer).name
    if (folder := model_folder(job)) is not None:  # a proof holds wherever the folder is
        tables["model"]["source"] = digest_of(folder)
    versions = {name: installed_version(name) for name in _VERSIONS}
    files = sorted(xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in _files_of(job))
    run = job.run
    compiled = (run.compile, run.compile_backend, run.compile_mode) if run.compile != "none" else ""
    parts = [tables, str(layout), compiled, versions, own_sources(), files]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _files_of(job: Job) -> list[Path]:
    """Return the files that may contain the user's functions: their packages, or their module and its neighbours."""
    sources = (job.model.source, job.data.source, job.train.loss, job.optimizer.name)
    roots = {source.partition(":")[0].partition(".")[0] for source in sources if ":" in source}
    paths: set[Path] = set()
    for root in roots:
        file = getattr(sys.modules.get(root), "__file__", None)
        if file is None:  # `hf:` and the like name no module
            continue
        home, is_package = Path(file).resolve().parent, Path(file).name == "__init__.py"
        beside = home.parent if is_package else home
        paths |= {*home.rglob("*.py")} if is_package else {Path(file).resolve()}
        if not any(beside.is_relative_to(folder) for folder in installed_folders()):
            paths |= {*beside.glob("*.py")}
    return sorted(paths)
