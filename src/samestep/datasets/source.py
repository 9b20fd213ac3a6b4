"""The data sources that `data.source` may name, and the dataset that each one opens.

The user's dataset is `module:function`, a function without arguments that returns a map-style dataset; its module is
also searched in the working directory. Samples may be anything that torch's `default_collate` stacks: dicts or tuples
of tensors, arrays and numbers.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from samestep.datasets.batch import Dataset, check_map_style
from samestep.datasets.columns import Origin, Shards
from samestep.datasets.digits import digits_part
from samestep.datasets.documents import PackedDocuments, packed_part
from samestep.datasets.images import ImageFolder, class_names, images_part
from samestep.datasets.mixture import Mixture
from samestep.datasets.module_search import looked_in, make_importable
from samestep.datasets.reading import SampleDraw, read_samples
from samestep.datasets.rows import hf_rows, jsonl_rows, parquet_rows
from samestep.datasets.split import Split, name_of_part, part_of
from samestep.datasets.text import stdlib, text_tokens, tokens_of, topics
from samestep.datasets.token_files import looked_at
from samestep.datasets.tokenizers import open_tokenizer, tokenizer_key
from samestep.datasets.tokens import TokenStream, stream_part, tokens_part
from samestep.errors import DataError, did_you_mean, failures_of
from samestep.job import Job
from samestep.job_paths import place_of
from samestep.job_tables import HELD_OUT, DataTable


@dataclass(frozen=True, eq=False)
class DatasetSlice:
    """A contiguous range of the samples of another dataset."""

    dataset: Dataset
    part: range

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.dataset[self.part[index]]

    def read_drawn(
        self, indices: npt.NDArray[np.int64], draw: SampleDraw | None
    ) -> dict[str, Tensor] | tuple[Tensor, ...]:
        """Return samples as tensors with the batch dimension first."""
        here = None if draw is None else SampleDraw(draw.seed, draw.step)  # the whole batch is known by other indices
        return read_samples(self.dataset, indices + self.part.start, here)


def function_part(data: DataTable, split: Split, folder: str | None = None) -> DatasetSlice:
    """Return one part of the dataset that the user's function returns; its module is looked for in `folder` too.

    Raises:
        DataError: there is no such function, or it returns no map-style dataset.
    """
    source = data.source
    with failures_of(f"data.source: {source}", DataError):
        dataset = _function(source, folder)()
    check_map_style(dataset, f"{source} returned")
    part = DatasetSlice(dataset, part_of(len(dataset), data.held_out, split))
    if not len(part):
        raise DataError(f"{name_of_part(split, source)} has none of {len(dataset)} samples; more samples are needed")
    return part


def _function(source: str, folder: str | None) -> Any:
    """Import and return the function that `module:function` names."""
    name, _, attribute = source.partition(":")
    make_importable(name, folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists but imports one that does not: the error names it
        raise DataError(
            f"{source}: there is no module {name!r}, neither in {looked_in(folder)} nor among the installed ones"
        ) from None
    function = getattr(module, attribute, None)
    if callable(function):
        return function
    known = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
    raise DataError(f"{source}: {name} has no function {attribute!r}{did_you_mean(attribute, known)}")


SOURCES = {
    "topics": "the reference behind Python's help()",
    "stdlib": "the source code of Python's standard library",
    "text:PATH": "a text file or a folder of them",
    "tokens:PATH": "a file of token ids, a folder of them, or the prefix of Megatron's two files",
    "jsonl:PATH": "JSON lines with texts or conversations",
    "parquet:PATH": "Parquet files with texts or conversations",
    "hf:PATH": "a Hugging Face dataset saved with save_to_disk",
    "digits": "1,797 images of handwritten digits",
    "images:PATH": "a folder of images, one folder a class",
    "module:function": "a function of yours that returns a map-style dataset",
    "mixture": "several of these by their weights in data.mixture",
}

_TABLES = {"parquet": parquet_rows, "hf": hf_rows}


def open_dataset(job: Job, split: Split = "train", classes: Sequence[str] | None = None) -> Dataset:
    """Return one part of the dataset that `job.data.source` names; the two parts never overlap.

    Classes of images have the numbers that `classes` give them; without them, that of their names in order.

    Samples of text are dicts of int64 tensors `input_ids` and `labels`, both [sequence_length], where labels[t] is the
    token after input_ids[t], or -100 where it is not counted. Documents (`jsonl:`, `hf:`) also have `position_ids`, which
    restart with every document.

    Raises:
        DataError: the data is missing, badly formed, or too short for one sample.
    """
    data = job.data
    word, colon, rest = data.source.partition(":")
    rest = str(place_of(job, rest)) if rest and f"{word}:PATH" in SOURCES else rest
    match f"{word}{colon}":
        case "mixture":
            classes = classes if classes is not None else _classes(job)
            parts = {source: open_dataset(_of_part(job, source), split, classes) for source in data.mixture}
            return Mixture.of(parts, data.mixture)
        case "digits":
            return digits_part(data, split)
        case "images:":
            return images_part(rest, data, split, classes)
        case "topics" | "stdlib":
            texts = topics() if word == "topics" else stdlib()
            return stream_part(
                tokens_of(((text,) for text in texts), open_tokenizer(job), Origin(word, 0)), data, split
            )
        case "text:":
            return stream_part(text_tokens(rest, open_tokenizer(job), tokenizer_key(job)), data, split)
        case "tokens:":
            return tokens_part(rest, data, split)
        case "jsonl:" | "parquet:" | "hf:":
            rows = jsonl_rows(rest) if word == "jsonl" else _TABLES[word](rest, data.text_field)
            return packed_part(rows, open_tokenizer(job), tokenizer_key(job), data, split)
    if re.fullmatch(r"[\w.]+:\w+", data.source):
        return function_part(data, split, job.run.folder)
    words = {name.partition(":")[0]: name for name in SOURCES if name != "module:function"}
    meant = f" (did you mean {words[word]}?)" if word in words else did_you_mean(word, words)
    raise DataError(
        f"unknown data source {data.source!r}{meant}; the sources are "
        + "; ".join(f"{name} ({about})" for name, about in SOURCES.items())
    )


def open_held_out(job: Job) -> dict[str, Dataset]:
    """Return the datasets that a job evaluates, by name: the held-out part of its data, and the sets of
    `data.held_out_sets`.

    Raises:
        DataError: the data of one of them is missing, badly formed, or too short for one sample.
    """
    found: dict[str, Dataset] = {}
    for name in job.evaluated_sets:
        source = job.data.held_out_sets.get(name, job.data.source)
        split: Split = "held_out" if source in (job.data.source, *job.data.mixture) else "train"
        try:
            found[name] = open_dataset(of_held_out(job, name), split, _classes(job))
        except DataError as error:
            raise DataError(str(error) if name == HELD_OUT else f"data.held_out_sets.{name}: {error}") from None
    return found


def _classes(job: Job) -> tuple[str, ...] | None:
    """Return the names of the classes in the images that a job trains on, in order; None where it trains on none."""
    sources = [
        str(place_of(job, source.removeprefix("images:")))
        for source in job.data.mixture or (job.data.source,)
        if source.startswith("images:")
    ]
    return tuple(sorted({name for source in sources for name in class_names(source)})) if sources else None


def of_held_out(job: Job, name: str) -> Job:
    """Return a job whose data is one of the sets that a job evaluates: the held-out part of a source that is trained on, or all
    of another source.

    Raises:
        DataError: the set is a mixture.
    """
    if name == HELD_OUT:
        return job
    source = job.data.held_out_sets[name]
    if source == "mixture":
        raise DataError("a set is one source; several sources are several sets")
    held_out = job.data.held_out if source in (job.data.source, *job.data.mixture) else 0.0
    alone = job.data.model_copy(update={"source": source, "mixture": {}, "held_out": held_out})
    return job.model_copy(update={"data": alone})


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The token ids that a file holds, as far as it has been looked at."""

    least: int
    most: int
    file: Path | None
    """The file; None for tokens in memory."""


def token_ranges(dataset: Dataset, count: int) -> list[TokenRange]:
    """Return the range of the tokens in each file of token ids that a dataset reads, and none of other datasets.

    Of a file of more than about `count` tokens the beginning, the end and blocks between them are looked at.
    """
    if isinstance(dataset, Mixture):
        return [found for part in dataset.parts for found in token_ranges(part, count)]
    if not isinstance(dataset, TokenStream):
        return []
    tokens = dataset.tokens
    arrays = [array for array in (tokens.arrays if isinstance(tokens, Shards) else (tokens,)) if len(array)]
    files = [getattr(array, "filename", None) for array in arrays]  # numpy's mapped arrays know theirs
    found = []
    for array, file in zip(arrays, files, strict=True):
        blocks = [(int(block.min()), int(block.max())) for _, block in looked_at(array, count // 2, count // 512)]
        least, most = min(one for one, _ in blocks), max(one for _, one in blocks)
        found.append(TokenRange(least, most, Path(file) if file else None))
    return found


def of_words(dataset: Dataset, words: int | None) -> Dataset:
    """Return a dataset that refuses tokens of files, when they are read, for which a model of `words` tokens has no
    embedding."""
    if words is None:
        return dataset
    if isinstance(dataset, Mixture):
        return replace(dataset, parts=tuple(of_words(part, words) for part in dataset.parts))
    return replace(dataset, words=words) if isinstance(dataset, TokenStream) else dataset


def remarks_on(dataset: Dataset) -> tuple[str, ...]:
    """Return remarks for the user about the sources of a dataset."""
    if isinstance(dataset, Mixture):
        return tuple(remark for part in dataset.parts for remark in remarks_on(part))
    return dataset.remarks if isinstance(dataset, PackedDocuments) else ()


def classes_of(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the classes in folders of images, by number; none of other datasets."""
    parts = dataset.parts if isinstance(dataset, Mixture) else (dataset,)
    return next((part.classes for part in parts if isinstance(part, ImageFolder)), ())


def _of_part(job: Job, source: str) -> Job:
    """Return a job that trains on one source of its mixture alone."""
    if source == "mixture":
        raise DataError("data.mixture: a mixture cannot be a part of itself; its keys are other sources")
    return job.model_copy(update={"data": job.data.model_copy(update={"source": source, "mixture": {}})})
