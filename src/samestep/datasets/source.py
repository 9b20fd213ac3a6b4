"""The data sources that `data.source` may name, and the dataset that each one opens.

The user's dataset is `module:function`, a function without arguments that returns a map-style dataset; its module is
also searched in the working directory. Samples may be anything that torch's `default_collate` stacks: dicts or tuples
of tensors, arrays and numbers.

`digits` comes with this package: 1,797 images of 8 x 8 pixels, in an order that does not depend on the writer. They are the test
set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak 1998, UCI Machine Learning Repository, CC BY 4.0), in
the file that scikit-learn distributes: 64 pixels of 0 to 16 and the digit in each line.
"""

from __future__ import annotations

import functools
import gzip
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep import wings
from samestep.datasets.batch import Dataset, FileSamples, check_map_style
from samestep.datasets.columns import Origin, Shards
from samestep.datasets.files import Split, name_of_part, part_of
from samestep.datasets.imported import import_named
from samestep.datasets.order import permute_positions
from samestep.datasets.reading import SampleDraw, read_samples
from samestep.datasets.token_files import looked_at
from samestep.datasets.tokenizers import open_tokenizer, tokenizer_key
from samestep.datasets.tokens import TokenStream, stdlib, stream_part, text_tokens, tokens_of, tokens_part, topics
from samestep.errors import DataError, did_you_mean, failures_of
from samestep.job import Job
from samestep.job_files import place_of
from samestep.job_tables import HELD_OUT, DataTable

SIDE = 8
LARGEST = 16


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
    """Return one part of the dataset that `data.source` names, or that the named function returns; its module is looked for in `folder` too.

    Raises:
        DataError: there is no such name, or it is or returns no map-style dataset.
    """
    source = data.source
    with failures_of(f"data.source: {source}", DataError):
        named = _named(source, folder)
        is_dataset = hasattr(named, "__getitem__") and not isinstance(named, type)
        dataset = named if is_dataset else named()
    check_map_style(dataset, f"{source} is" if is_dataset else f"{source} returned")
    part = DatasetSlice(dataset, part_of(len(dataset), data.held_out, split))
    if not len(part):
        raise DataError(
            "data-too-short",
            f"{name_of_part(split, source)} has none of {len(dataset)} samples; more samples are needed",
        )
    return part


def _named(source: str, folder: str | None) -> Any:
    """Import and return the function, the class or the dataset that `module:name` names."""
    named = import_named(source, source, DataError, folder)
    if callable(named) or hasattr(named, "__getitem__"):
        return named
    raise DataError("function-missing", f"{source} is a {type(named).__name__}, not a function and not a dataset")


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
            return _digits_part(data, split)
        case "images:":
            images: Dataset = wings.required("readers", "images").images_part(rest, data, split, classes)
            return images
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
            rows = wings.required("readers", "rows").rows_of(word, rest, data.text_field)
            documents = wings.required("readers", "documents")
            packed: Dataset = documents.packed_part(rows, open_tokenizer(job), tokenizer_key(job), data, split)
            return packed
    if re.fullmatch(r"[\w.]+:\w+", data.source):
        return function_part(data, split, job.run.folder)
    words = {name.partition(":")[0]: name for name in SOURCES if name != "module:function"}
    meant = f" (did you mean {words[word]}?)" if word in words else did_you_mean(word, words)
    raise DataError(
        "data-source-unknown",
        f"unknown data source {data.source!r}{meant}; the sources are "
        + "; ".join(f"{name} ({about})" for name, about in SOURCES.items()),
    )


def open_held_out(job: Job) -> dict[str, Dataset]:
    """Return the datasets that a job evaluates, by name: the held-out part of its data, and the sets of
    `data.held_out_sets`.

    Raises:
        DataError: the data of one of them is missing, badly formed, or too short for one sample.
    """
    datasets: dict[str, Dataset] = {}
    for name in job.evaluated_sets:
        source = job.data.held_out_sets.get(name, job.data.source)
        split: Split = "held_out" if source in (job.data.source, *job.data.mixture) else "train"
        try:
            datasets[name] = open_dataset(of_held_out(job, name), split, _classes(job))
        except DataError as error:
            raise DataError(
                error.code, str(error) if name == HELD_OUT else f"data.held_out_sets.{name}: {error}"
            ) from None
    return datasets


def _classes(job: Job) -> tuple[str, ...] | None:
    """Return the names of the classes in the images that a job trains on, in order; None where it trains on none."""
    sources = [
        str(place_of(job, source.removeprefix("images:")))
        for source in job.data.mixture or (job.data.source,)
        if source.startswith("images:")
    ]
    if not sources:
        return None
    images = wings.required("readers", "images")
    return tuple(sorted({name for source in sources for name in images.class_names(source)}))


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
        raise DataError("data-source-unknown", "a validation set has one source. Use one set for each source")
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
        return [token_range for part in dataset.parts for token_range in token_ranges(part, count)]
    if not isinstance(dataset, TokenStream):
        return []
    tokens = dataset.tokens
    arrays = [array for array in (tokens.arrays if isinstance(tokens, Shards) else (tokens,)) if len(array)]
    files = [getattr(array, "filename", None) for array in arrays]  # numpy's mapped arrays know theirs
    ranges = []
    for array, file in zip(arrays, files, strict=True):
        blocks = [(int(block.min()), int(block.max())) for _, block in looked_at(array, count // 2, count // 512)]
        least, most = min(end for end, _ in blocks), max(end for _, end in blocks)
        ranges.append(TokenRange(least, most, Path(file) if file else None))
    return ranges


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
    return dataset.remarks if isinstance(dataset, FileSamples) else ()


def classes_of(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the classes in folders of images, by number; none of other datasets."""
    parts = dataset.parts if isinstance(dataset, Mixture) else (dataset,)
    return next((part.classes for part in parts if isinstance(part, FileSamples) and part.classes), ())


def _of_part(job: Job, source: str) -> Job:
    """Return a job that trains on one source of its mixture alone."""
    if source == "mixture":
        raise DataError(
            "data-source-unknown", "data.mixture: a mixture cannot be a part of itself; its keys are other sources"
        )
    return job.model_copy(update={"data": job.data.model_copy(update={"source": source, "mixture": {}})})


@dataclass(frozen=True, eq=False)
class Digits:
    """One part of the digits: pairs of an image, float32 [1, 8, 8] of 0 to 1, and its digit."""

    images: npt.NDArray[np.float32]
    digits: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.images[index]), torch.tensor(self.digits[index])

    def read(self, indices: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Return images [N, 1, 8, 8] and digits [N]."""
        return torch.from_numpy(self.images[indices]), torch.from_numpy(self.digits[indices])


def _digits_part(data: DataTable, split: Split) -> Digits:
    """Return one part of the digits.

    Raises:
        DataError: nothing is held out.
    """
    images, digits = _everything()
    part = part_of(len(digits), data.held_out, split)
    return Digits(images[part.start : part.stop], digits[part.start : part.stop])


@functools.cache
def _everything() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return all images and digits, shuffled once: the lines of one writer follow each other in the file."""
    text = gzip.decompress(resources.files("samestep.datasets").joinpath("digits.csv.gz").read_bytes()).decode()
    table: npt.NDArray[Any] = np.array([line.split(",") for line in text.split()], dtype=np.float64)
    table = table[permute_positions(np.arange(len(table)), len(table), 0)]
    images = (table[:, :-1] / LARGEST).astype(np.float32).reshape(-1, 1, SIDE, SIDE)
    return images, table[:, -1].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Mixture:
    """A dataset whose samples are those of several datasets, one part after another; the order of samples mixes them.

    With weights w_k that sum to 1, and parts of n_k samples, one pass over the mixture has

        L = max_k ceil(n_k / w_k)        samples, of which part k gives  m_k = round(w_k L) >= n_k

    so in a pass every sample of every part occurs at least once, and those of a part equally often, up to one. The mixture is
    itself a map-style dataset, so the order of its samples, which rank reads which, and a resume are as with one source.
    """

    parts: tuple[Dataset, ...]
    lengths: tuple[int, ...]
    """The number of samples of each part."""
    ends: npt.NDArray[np.int64]
    """The index in the mixture after the last sample of each part."""

    @classmethod
    def of(cls, parts: Mapping[str, Dataset], weights: Mapping[str, float]) -> Mixture:
        """Return the mixture of named datasets by their weights.

        Raises:
            DataError: their samples differ in kind, so that they cannot be in one batch.
        """
        kinds = {name: kind_of(part) for name, part in parts.items()}
        first, *others = kinds
        for name in others:
            if kinds[name] != kinds[first]:
                raise DataError(
                    "data-form",
                    f"data.mixture: a sample of {name} has {kinds[name]}, one of {first} has {kinds[first]}. Use sources with the same tensors in their samples, as several of text:, or several of jsonl:, parquet: and hf:",
                )
        lengths = {name: len(part) for name, part in parts.items()}
        total = math.fsum(weights[name] for name in parts)
        length = max(math.ceil(lengths[name] * total / weights[name]) for name in parts)
        ends = np.cumsum([max(lengths[name], round(length * weights[name] / total)) for name in parts])
        return cls(tuple(parts.values()), tuple(lengths.values()), ends)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which, place = self._places(np.array([index]))
        return self.parts[which[0]][int(place[0])]

    def read_drawn(
        self, indices: npt.NDArray[np.int64], draw: SampleDraw | None
    ) -> dict[str, Tensor] | tuple[Tensor, ...]:
        """Return samples as tensors with the batch dimension first."""
        which, places = self._places(indices)
        draw = None if draw is None else SampleDraw(draw.seed, draw.step)  # whose whole batch is of all parts
        if not len(indices):
            return read_samples(self.parts[0], indices, draw)
        order = np.argsort(which, kind="stable")
        read = [read_samples(self.parts[part], places[which == part], draw) for part in np.unique(which)]
        back = torch.from_numpy(np.argsort(order))
        if isinstance(read[0], dict):
            return {name: torch.cat([samples[name] for samples in read])[back] for name in read[0]}
        return tuple(torch.cat(tensors)[back] for tensors in zip(*read, strict=True))

    def _places(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the part of each sample, and its index there."""
        which = np.searchsorted(self.ends, indices, side="right")
        begins = np.concatenate([[0], self.ends[:-1]])
        return which, (indices - begins[which]) % np.array(self.lengths)[which]


def kind_of(part: Dataset) -> str:
    """Return the names, shapes and dtypes of a sample's tensors."""
    samples = read_samples(part, np.array([0]))
    named = samples.items() if isinstance(samples, dict) else enumerate(samples)
    return ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape[1:])}" for name, tensor in named
    )
