"""The manifest of a checkpoint: its form, its protection, and whether a job may resume from it.

`manifest.json` is written last, so a folder that has one was complete. It holds a digest of itself and of every file;
its step is that in the folder's name; and its files are names in that folder, which no path can leave. A digest
protects a manifest from accidents, and not from an author with intent, who can compute one. So a manifest without the
keys and kinds of values that are stated here, or with two statements about one weight that differ, is refused before
anything else reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from safetensors import SafetensorError, safe_open

from samestep import calls, rules
from samestep.errors import CheckpointError, short_repr, without_removed
from samestep.job import Job
from samestep.job_files import model_folder
from samestep.job_tables import MayChange
from samestep.models.weight_files import digest_of
from samestep.output import durable_files

_Size = Annotated[StrictInt, Field(ge=0, lt=2**63)]
_Tensor = Annotated[
    StrictStr,
    Field(pattern=r"(?s)^((value|average)/.+/\d+|(state|lost)/.+/\d+/[^/]+|(buffer|directions)/.+|kept/\d+/\d+)$"),
]
_Value = Annotated[StrictStr, Field(pattern=r"(?s)^state/.+/\d+/[^/]+$")]
_Shapes = dict[StrictStr, list[_Size]]


class _ManifestModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class Part(_ManifestModel):
    """The record of one rank's file in a manifest."""

    file: Annotated[StrictStr, Field(pattern=r"^rank-\d{4,}\.safetensors$")]
    digest: StrictStr
    tensors: list[_Tensor]
    plain: dict[_Value, StrictBool | StrictInt | StrictFloat | StrictStr | None]
    cuts: dict[StrictStr, tuple[_Size, list[tuple[_Size, _Size]]]]


class Group(_ManifestModel):
    """The options of a group of the optimizer's weights."""

    names: list[StrictStr]
    options: dict[StrictStr, Any]


class Record(_ManifestModel):
    """The state that one rank keeps besides tensors of weights."""

    rank: NonNegativeInt
    groups: list[Group]
    optimizer: dict[StrictStr, Any]
    classes: list[StrictStr] = []
    unsaved: list[StrictStr]
    attributes: list[tuple[StrictStr, StrictStr, Any]] = []
    extra: list[tuple[StrictStr, Any]] = []
    loss: list[tuple[StrictStr, StrictStr, Any]] = []


class StampedSource(_ManifestModel):
    """The stamp of one source of the data (`datasets/stamps.py`)."""

    kind: StrictStr
    name: StrictStr
    length: _Size = 0
    digests: dict[StrictStr, StrictStr] = {}
    files: _Size = 0
    bytes: _Size = 0
    names: StrictStr = ""
    content: StrictStr = ""


class Manifest(_ManifestModel):
    """The manifest of a checkpoint."""

    step: _Size
    layout: StrictStr
    changes: list[StrictStr] = []
    loss_scale: tuple[float, StrictInt] | None
    nominal_count: float | None = None
    losses: list[float] = []
    data: list[StampedSource] = []
    spikes: _Size = 0
    job: dict[StrictStr, dict[StrictStr, Any]]
    folder: StrictStr = ""
    shapes: _Shapes
    frozen: _Shapes = {}
    parts: list[Part]
    ranks: list[Record] = []


def contradiction(manifest: Mapping[str, Any]) -> str:
    """Return a contradiction between two statements of a manifest about a weight, as the end of a sentence; else an
    empty text."""
    trained, frozen = manifest["shapes"], manifest.get("frozen", {})
    for name in trained.keys() & frozen.keys():
        if trained[name] != frozen[name]:
            return f"{name} has the shape {trained[name]} as a trained weight and {frozen[name]} as a frozen one"
    shapes = {**frozen, **trained}
    for part in manifest["parts"]:
        for tensor in part["tensors"]:
            kind, _, rest = tensor.partition("/")
            if kind in ("value", "average", "state", "lost"):
                name = weight_of(rest.rsplit("/", 1 if kind in ("value", "average") else 2)[0])
                if name not in shapes:
                    return f"{part['file']} holds {name}, which has no shape"
        for name, (dim, intervals) in part["cuts"].items():
            shape = shapes.get(weight_of(name), [])
            if dim >= len(shape) or not all(start <= stop <= shape[dim] for start, stop in intervals):
                return f"{name} is cut outside of its shape {shape}"
    return ""


def weight_of(part: str) -> str:
    """Return the weight's name, given a name in the files of it or of a part of it."""
    match = re.fullmatch(r"(.*)@\d+of\d+", part)
    return match[1] if match else part


NAME = "manifest.json"
FORMAT_VERSION = 3
_LARGEST_BYTES = 1 << 30
_RESULT_KEYS = ("model", "data", "optimizer", "schedule", "numerics")
_OF_EXCHANGES = ("outer_lr", "outer_momentum")
"""Keys of numerics that say something of replicas that are trained apart alone."""
_MAY_CHANGE = (
    "numerics.on_nonfinite",
    "numerics.on_spike",
    "train.steps",
    "data.held_out_sets",
    "model.stages",
    "model.offload",
)
"""Keys that may differ on resuming: what is evaluated trains nothing, where stages begin changes no result, and a run that stopped on a non-finite step is told to change the others."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints below `folder`, oldest first."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(paths, key=lambda path: int(path.name[5:]))


@calls.checked
def latest(folder: str | Path) -> Path | None:
    """Return the newest checkpoint below `folder`, complete or damaged; None if there is no checkpoint.

    Raises:
        InputError: `folder` is the address of an object store.
    """
    durable_files.refuse_remote(Path(folder))
    paths = list_checkpoints(Path(folder))
    return paths[-1] if paths else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or another version wrote it.
    """
    path = folder / NAME
    try:
        manifest = durable_files.read_json(path, _LARGEST_BYTES)
        version = manifest["format_version"]
        is_whole = version != FORMAT_VERSION or manifest.pop("digest") == _digest(manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise CheckpointError("checkpoint-damaged", describe_damage(path))
    if version != FORMAT_VERSION:
        raise CheckpointError(
            "checkpoint-version", f"{folder} has format {version!r:.20}; this version reads {FORMAT_VERSION}"
        )
    try:
        Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            "checkpoint-damaged",
            f"{path} is not a manifest of a checkpoint: {key}: {first['msg'].lower()}, got {short_repr(first['input'])}",
        ) from None
    if wrong := contradiction(manifest):
        raise CheckpointError("checkpoint-damaged", f"{path} contradicts itself: {wrong}")
    named = re.fullmatch(r"step-(\d+)", folder.name)
    if named and int(named[1]) != manifest["step"]:
        raise CheckpointError(
            "checkpoint-damaged",
            f"{folder} holds the checkpoint of step {manifest['step']}, not of the step in its name; "
            f"step-{manifest['step']:06d} was its name",
        )
    return dict(manifest)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint, including its digest, and wait until it is on disk.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({"digest": _digest(manifest), **manifest}, indent=1)
    durable_files.write_new(folder / NAME, [text.encode()])


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest without the key `digest`, independent of the order of keys and of blanks."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def newest_whole(folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest checkpoint below `folder` that is whole, and each newer one with what is wrong with it."""
    wrong = []
    for path in reversed(list_checkpoints(folder)):
        try:
            check_digests(read_manifest(path), path)
        except CheckpointError as error:
            wrong.append((path, str(error)))
            continue
        return path, wrong
    return None, wrong


_SOURCE_OF_NO_MODEL = "hf:llama"
"""The `model.source` in older checkpoints of a model that was given in Python, whose job named none."""


def check_job(
    manifest: Mapping[str, Any], job: Job, folder: Path, *, may_change: Collection[str] = ()
) -> tuple[str, ...]:
    """Refuse the checkpoint of a job that computes something else, and return what the job changes, as texts.

    The keys that `may_change` may differ.

    Raises:
        CheckpointError: it names the keys that differ, and are not in `run.allow`.
    """
    now, defaults = job.model_dump(mode="json"), Job().model_dump(mode="json")
    # A key that is younger than the checkpoint had its default.
    saved = {table: {**defaults.get(table, {}), **without_removed(keys)} for table, keys in manifest["job"].items()}
    keys = [(table, key) for table in _RESULT_KEYS for key in sorted(saved.get(table, {}).keys() | now[table].keys())]
    keys += [("train", key) for key in ("seed", "global_batch", "loss", "steps", "ema")]
    changed = {
        f"{table}.{key}": (saved.get(table, {}).get(key), now[table].get(key))
        for table, key in keys
        if saved.get(table, {}).get(key) != now[table].get(key)
    }
    if now["model"]["source"] == "" and saved["model"]["source"] == _SOURCE_OF_NO_MODEL:
        changed.pop("model.source", None)
    if now["numerics"]["exchange_every"] == saved.get("numerics", {}).get("exchange_every") == 1:
        for key in _OF_EXCHANGES:  # without an effect, so that another default is no other job
            changed.pop(f"numerics.{key}", None)
    differs = [key for key in changed if key not in (*_MAY_CHANGE, *may_change, *job.run.allow)]
    if differs:
        may = [key for key in differs if key in get_args(MayChange)]
        works = f"; --allow {' '.join(may)} lets it change" if may and may == differs else ""
        raise CheckpointError(
            "checkpoint-other-job",
            f"{folder} was written by a job with another {', '.join(differs)}: resume with the job in its run folder{works}",
        )
    if reason := rules.refusal(manifest["job"]):
        raise CheckpointError("checkpoint-version", f"{folder} {reason}")
    if (source := model_folder(job)) and digest_of(source) != manifest.get("folder"):
        raise CheckpointError(
            "checkpoint-other-job",
            f"the configuration or the tensors in {source} have changed since {folder} was "
            "written: resume with the earlier ones",
        )
    return tuple(
        f"after step {manifest['step']}: {key} is {short_repr(new)}, which was {short_repr(old)}"
        for key, (old, new) in changed.items()
    )


def check_shapes(manifest: Mapping[str, Any], now: Mapping[str, list[int]], folder: Path) -> None:
    """Refuse weights whose shapes differ from those of this model, as after a change of the user's code.

    Raises:
        CheckpointError: it names the first weight that differs.
    """
    saved = manifest["shapes"]
    differs = [
        f"{name} {saved.get(name, 'missing')}, here {now.get(name, 'missing')}"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if differs:
        more = f", and {len(differs) - 1} more" if len(differs) > 1 else ""
        raise CheckpointError(
            "checkpoint-other-model",
            f"{folder} holds another model's weights: {differs[0]}{more}. Use the model that wrote it, or another folder",
        )


def check_digests(manifest: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of which a file is damaged.

    Raises:
        CheckpointError: it names the file.
    """
    for path in broken_files(manifest["parts"], folder):
        raise CheckpointError("checkpoint-damaged", describe_damage(path))


def broken_files(parts: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint that are missing or damaged."""
    for part in parts:
        path = folder / part["file"]
        try:
            is_whole = durable_files.digest_of(path) == part["digest"]
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError):
            is_whole = False
        if not is_whole:
            yield path


def describe_damage(path: Path) -> str:
    """Return a message that names the damaged file and says from where the run can go on."""
    step = path.parent
    known = list_checkpoints(step.parent)
    older = known[: known.index(step)] if step in known else []
    works = f"once {step} is removed, {older[-1].name} is the newest" if older else "there is no older one"
    return f"{path} is missing or damaged; {works}"
