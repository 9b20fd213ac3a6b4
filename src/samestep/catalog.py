"""Model specs without torch: from a cache, or traced once by a subprocess.

A transformers model is a function of its family, its configuration and the versions of three packages, so its spec is
kept under a digest of these below `~/.cache/samestep`. A user's own code can change at any time: it is traced anew.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import xxhash

from samestep.errors import ModelError, SamestepError
from samestep.job import Job
from samestep.model import FORMAT_VERSION, ModelSpec


def model_spec(job: Job) -> ModelSpec:
    """Return the shape of a job's model; torch is imported in a subprocess, and only where no cache has it.

    Raises:
        SamestepError: the model cannot be built or traced; the text is the one `train` would give.
    """
    path = _cache_path(job)
    if path is not None and path.exists():
        try:
            return ModelSpec.from_json(path.read_text())
        except (ValueError, TypeError, KeyError):
            path.unlink()  # damaged, or written by another version under the same digest
    text = _trace_elsewhere(job)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{xxhash.xxh3_64_hexdigest(text.encode())}")
        draft.write_text(text)
        draft.replace(path)
    return ModelSpec.from_json(text)


def _cache_path(job: Job) -> Path | None:
    if not job.model.source.startswith("hf:"):
        return None
    versions = [f"{name} {_version(name)}" for name in ("samestep", "torch", "transformers")]
    # The sequence length shapes the sample that is traced; where samples come from does not.
    key = [FORMAT_VERSION, versions, job.model.model_dump(mode="json"), job.data.sequence_length]
    digest = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True).encode())
    return Path.home() / ".cache" / "samestep" / "specs" / f"{digest}.json"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _trace_elsewhere(job: Job) -> str:
    code = "import sys; from samestep.training import write_spec; write_spec(sys.stdin.read())"
    done = subprocess.run(
        [sys.executable, "-c", code], input=job.model_dump_json(), capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return done.stdout
    words = done.stderr.strip().splitlines() or ["no word"]
    if done.returncode == 2:
        raise SamestepError("\n".join(words))
    raise ModelError(f"tracing {job.model.source} failed: {words[-1]}")
