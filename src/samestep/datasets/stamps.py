"""The stamp of a run's data, by which a resume notices that it would read other samples.

    files      their names below the source, their sizes, and content: all of up to 64 MiB, and of more the head, the
               tail and 256 blocks at places that a seed draws, of all files one after another
    texts      those that come with Python, and the tokenizer's folder: all of them
    samples    of a data set in Python: its length, and up to 256 samples, those that the run reads first in front, as many as
               half a second allows; none where a sample reads differently twice

The path of a source is left out, so that data in a new place has the same stamp. A stamp is plain data for a manifest.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from samestep.datasets.batch import Dataset
from samestep.datasets.files import sorted_files
from samestep.datasets.order import sample_indices
from samestep.datasets.reading import read_samples
from samestep.datasets.source import Mixture
from samestep.datasets.tokens import stdlib, topics
from samestep.errors import DataError
from samestep.job import Job
from samestep.job_files import place_of
from samestep.trees import tree_leaves

Stamp = list[dict[str, Any]]
"""An item for each source, in order, and one for the tokenizer."""
WHOLE_BYTES = 2**26
"""The size of a source up to which all of it is read."""
_BLOCK_BYTES, _NUM_BLOCKS = 2**16, 256
_MOST_SAMPLES, _MOST_SECONDS = 256, 0.5
_OF_FILES = ("text", "tokens", "jsonl", "parquet", "hf", "images")
_SUFFIXES = {"jsonl": (".jsonl", ".json", ".ndjson"), "parquet": (".parquet", ".pq")}


def of_job(job: Job, dataset: Dataset) -> Stamp:
    """Return the stamp of a job's data; `dataset` is the part of it that is trained on."""
    data = job.data
    each = dataset.parts if isinstance(dataset, Mixture) else (dataset,)
    parts = dict(zip(data.mixture or (data.source,), each, strict=True))
    stamp = [_of_source(source, part, job) for source, part in parts.items()]
    if data.is_text and data.tokenizer != "bytes":
        folder = place_of(job, data.tokenizer)
        files = sorted(file for file in folder.iterdir() if file.is_file())
        stamp.append({"kind": "tokenizer", "name": data.tokenizer, **_of_files(files, folder)})
    return stamp


def of_dataset(dataset: Dataset, seed: int) -> Stamp:
    """Return the stamp of a data set in Python whose samples a run with a seed reads."""
    return [{"kind": "samples", "name": type(dataset).__name__, **_of_samples(dataset, seed)}]


def difference(saved: Stamp, now: Stamp) -> str:
    """Return the difference between the data now and that of a stamp in a checkpoint, as text; empty where there is
    none."""
    for earlier, after in itertools.zip_longest(saved, now):
        if earlier is None or after is None:
            return f"the data has {len(now)} parts, and had {len(saved)}"
        name = after["name"]
        if earlier["kind"] != after["kind"]:
            return f"{name} is data of another kind: {after['kind']}, and had {earlier['kind']}"
        reason = _other_samples(earlier, after) if earlier["kind"] == "samples" else _other_files(earlier, after)
        if reason:
            return f"{name} {reason}"
    return ""


def _other_samples(earlier: dict[str, Any], after: dict[str, Any]) -> str:
    if earlier["length"] != after["length"]:
        return f"has {after['length']:,} samples, and had {earlier['length']:,}"
    both = earlier["digests"].keys() & after["digests"].keys()
    other = sorted(int(index) for index in both if earlier["digests"][index] != after["digests"][index])
    return f"has another sample {other[0]} than it had" if other else ""


def _other_files(earlier: dict[str, Any], after: dict[str, Any]) -> str:
    if earlier["bytes"] != after["bytes"] or earlier["files"] != after["files"]:
        return f"has {after['bytes']:,} bytes in {after['files']:,} files, and had {earlier['bytes']:,} in {earlier['files']:,}"
    if earlier["names"] != after["names"]:
        return "has files of other names or sizes than it had"
    return "has the size that it had, and other content" if earlier["content"] != after["content"] else ""


# -- one source ------------------------------------------------------------------------------------


def _of_source(source: str, dataset: Dataset, job: Job) -> dict[str, Any]:
    word, _, path = source.partition(":")
    if word in _OF_FILES:
        place = place_of(job, path)
        return {"kind": word, "name": source, **_of_files(_files_at(word, place), place)}
    if word in ("topics", "stdlib"):
        return {"kind": word, "name": source, **_of_texts(topics() if word == "topics" else stdlib())}
    return {"kind": "samples", "name": source, **_of_samples(dataset, job.train.seed)}


def _files_at(word: str, place: Path) -> list[Path]:
    """Return the files of a source: one, those below a folder, or those whose names begin as a prefix says."""
    if place.is_file():
        return [place]
    if word == "hf" and (place / "train").is_dir():
        place = place / "train"
    files = sorted_files(place, "*") if place.is_dir() else sorted(place.parent.glob(f"{place.name}.*"))
    known = _SUFFIXES.get(word, ("",))
    return [
        file
        for file in files
        if not file.name.startswith(".") and any(suffix in file.name.lower() for suffix in known) and file.is_file()
    ]


def _of_files(files: Sequence[Path], root: Path) -> dict[str, Any]:
    sizes = [file.stat().st_size for file in files]
    names, content, total = xxhash.xxh3_128(), xxhash.xxh3_128(), sum(sizes)
    for file, size in zip(files, sizes, strict=True):
        name = file.relative_to(root).as_posix() if file.is_relative_to(root) and file != root else file.suffix
        names.update(f"{name}\n{size}\n".encode())
    for index, first, length in _blocks(sizes, total):
        with files[index].open("rb") as opened:
            opened.seek(first)
            while piece := opened.read(min(length, 2**24)):
                content.update(piece)
                length -= len(piece)
    return {"files": len(files), "bytes": total, "names": names.hexdigest(), "content": content.hexdigest()}


def _blocks(sizes: Sequence[int], total: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of files that are read: the index of a file, the first byte, and the number of bytes."""
    if total <= WHOLE_BYTES:
        yield from ((index, 0, size) for index, size in enumerate(sizes))
        return
    drawn = np.random.default_rng(total % 2**32).integers(0, total - _BLOCK_BYTES, _NUM_BLOCKS)
    ends = np.cumsum(sizes)
    for place in sorted({0, total - _BLOCK_BYTES, *drawn.tolist()}):
        index = int(np.searchsorted(ends, place, side="right"))
        first = place - int(ends[index]) + sizes[index]
        yield index, first, min(_BLOCK_BYTES, sizes[index] - first)


def _of_texts(texts: Iterable[str]) -> dict[str, Any]:
    content, count, size = xxhash.xxh3_128(), 0, 0
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        content.update(encoded)
        count, size = count + 1, size + len(encoded)
    return {"files": count, "bytes": size, "names": "", "content": content.hexdigest()}


# -- a data set in Python --------------------------------------------------------------------------


def _of_samples(dataset: Dataset, seed: int) -> dict[str, Any]:
    length, began = len(dataset), time.monotonic()
    first = sample_indices(0, min(length, _MOST_SAMPLES), length, seed).tolist()
    digests: dict[str, str] = {}
    for index in dict.fromkeys([*first[:1], length - 1, 0, *first[1:]]):
        try:
            digest, again = (digest_of(read_samples(dataset, [index])) for _ in range(2))
        except DataError:  # it is reported where a step reads it
            continue
        if digest != again:  # samples that are changed at random
            return {"length": length, "digests": {}}
        digests[str(index)] = digest
        if len(digests) == _MOST_SAMPLES or time.monotonic() - began > _MOST_SECONDS:
            break
    return {"length": length, "digests": digests}


def digest_of(samples: Any) -> str:
    """Return a text that tells samples from others."""
    digest = xxhash.xxh3_64()
    for leaf in tree_leaves(samples):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {list(leaf.shape)}\n".encode())
            digest.update(leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
