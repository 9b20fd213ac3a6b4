"""The `ModelSpec` of a job's model without importing torch: from a preset, a cache, or a subprocess that traces it.

A transformers model is a function of its family, its configuration, the versions of two packages and this package's own
code, so its spec is cached under a digest of these in `~/.cache/samestep`. A user's own code can change at any time, so it
is traced each time.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import xxhash

from samestep.errors import ModelError, did_you_mean, of_words
from samestep.job import Job
from samestep.job_paths import model_folder
from samestep.job_tables import PRESET
from samestep.models import presets
from samestep.models.adapted_spec import add_adapters
from samestep.models.kept_scores import with_kept_scores
from samestep.models.spec import ModelSpec
from samestep.models.spec_json import FORMAT_VERSION, from_json
from samestep.models.weight_files import digest_of


def model_spec(job: Job) -> ModelSpec:
    """Return the shape of a job's model, with the scores of its attentions where `run.attention` is math.

    If no cache has it, a subprocess with torch traces it. `preset:NAME` needs neither: `model.config` overrides fields of the preset's decoder, and the sequence length is the
    job's, or the preset's if the job does not give one.

    Raises:
        InputError: the model cannot be built or traced; the text is the one `train` would give.
    """
    model = _own_spec(job)
    return with_kept_scores(model, job.numerics.precision in ("bf16", "fp16")) if job.run.attention == "math" else model


def _own_spec(job: Job) -> ModelSpec:
    """Return the shape of a job's model, of a preset, from a cache, or traced."""
    if job.model.preset is not None:
        length = job.data.sequence_length if "sequence_length" in job.data.model_fields_set else None
        found = presets.preset(job.model.preset, length, job.model.config)
        return found if job.model.lora is None else add_adapters(found, job.model.lora)
    if ":" not in job.model.source:
        words = [f"{PRESET}{name}" for name in presets.PRESETS]
        if hint := did_you_mean(job.model.source.lower(), words):
            raise ModelError(f"model.source = {job.model.source!r} is not of the form hf:FAMILY or preset:NAME{hint}")
    path = _cache_path(job)
    if path is not None:
        # A file that is missing, damaged, or of another format under the same digest: the model is traced.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return from_json(path.read_text(encoding="utf-8"))
    text = _trace_elsewhere(job)
    if path is not None:
        with contextlib.suppress(OSError):  # a home folder that cannot be written to costs only the time of tracing
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{xxhash.xxh3_64_hexdigest(text.encode())}")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
    return from_json(text)


def _cache_path(job: Job) -> Path | None:
    """Return the path at which the spec of a job's model is cached; None if it is traced each time.

    Raises:
        ModelError: the folder of the model lacks its configuration or its weights.
    """
    # Others are traced on a sample of their data, and a tokenizer may be another one the next time.
    if not job.model.takes_tokens or isinstance(job.model.resize_embeddings, str):
        return None
    versions = [f"{name} {_version(name)}" for name in ("torch", "transformers")]
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    code = xxhash.xxh3_64_hexdigest(b"".join(file.read_bytes() for file in sources))
    # The sequence length shapes the sample that is traced; where samples come from does not.
    key = [FORMAT_VERSION, versions, code, job.model.model_dump(mode="json"), job.data.sequence_length]
    if (folder := model_folder(job)) is not None:
        key.append(digest_of(folder))
    digest = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True).encode())
    try:
        return Path.home() / ".cache" / "samestep" / "specs" / f"{digest}.json"
    except RuntimeError:  # there is no home
        return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


FIRST_WORD_S = 2.0
"""The seconds after which a person at a terminal sees the reason for the wait."""
LONG_S = 60.0
"""The seconds after which a file or another program gets the reason too, and everybody a second time."""


def _trace_elsewhere(job: Job) -> str:
    code = "import sys; from samestep.training.workload import write_spec; write_spec(sys.stdin.read())"
    started = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with started as process:
        try:
            said, complaint = _await_trace(process, job)
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return said
    if process.returncode == 2 and said.strip():
        name, given = json.loads(said)
        raise of_words(name, given)
    words = complaint.strip().splitlines() or ["no message"]
    raise ModelError(f"tracing {job.model.source} failed: {words[-1]}")


def _await_trace(process: subprocess.Popen[str], job: Job) -> tuple[str, str]:
    """Send a job to a process that traces its model, and return what it writes; say what takes so long meanwhile."""
    waited_s, given = 0.0, job.model_dump_json()
    while True:
        pause_s = FIRST_WORD_S if not waited_s and sys.stderr.isatty() else LONG_S
        try:
            return process.communicate(None if waited_s else given, timeout=pause_s)
        except subprocess.TimeoutExpired:
            waited_s += pause_s
            print(
                f"samestep: tracing {job.model.source}, {waited_s:.0f} s so far: a large model takes a minute or two, and is kept "
                "for the next time",
                file=sys.stderr,
            )
