"""The data sources that `data.source` may name, and the dataset that each one opens."""

from __future__ import annotations

import re

from samestep.datasets.batch import Dataset
from samestep.datasets.documents import hf_rows, jsonl_rows, packed_part
from samestep.datasets.function import function_part
from samestep.datasets.split import Split
from samestep.datasets.text import stdlib, text_files, tokens_of, topics
from samestep.datasets.tokenizers import open_tokenizer
from samestep.datasets.tokens import read_token_file, stream_part
from samestep.errors import DataError, did_you_mean
from samestep.job import Job

SOURCES = {
    "topics": "the reference behind Python's help()",
    "stdlib": "the source code of Python's standard library",
    "text:PATH": "a text file or a folder of them",
    "tokens:PATH": "a file of token ids",
    "jsonl:PATH": "JSON lines with text or messages",
    "hf:PATH": "a Hugging Face dataset saved with save_to_disk",
    "module:function": "a function of yours that returns a map-style dataset",
}


def open_dataset(job: Job, split: Split = "train") -> Dataset:
    """Return one part of the dataset that `job.data.source` names; the two parts never overlap.

    Samples of text are dicts of int64 tensors `input_ids` and `labels`, both [sequence_length], where labels[t] is the
    token after input_ids[t], or -100 where it is not counted. Documents (`jsonl:`, `hf:`) also have `position_ids`, which
    restart with every document.

    Raises:
        DataError: the data is missing, badly formed, or too short for one sample.
    """
    data = job.data
    word, colon, rest = data.source.partition(":")
    match f"{word}{colon}":
        case "topics":
            return stream_part(tokens_of(topics(), open_tokenizer(job)), data, split)
        case "stdlib":
            return stream_part(tokens_of(stdlib(), open_tokenizer(job)), data, split)
        case "text:":
            return stream_part(tokens_of(text_files(rest), open_tokenizer(job)), data, split)
        case "tokens:":
            return stream_part(read_token_file(rest, data), data, split)
        case "jsonl:":
            return packed_part(jsonl_rows(rest), open_tokenizer(job), data, split)
        case "hf:":
            return packed_part(hf_rows(rest), open_tokenizer(job), data, split)
    if re.fullmatch(r"[\w.]+:\w+", data.source):
        return function_part(data, split)
    words = [name.partition(":")[0] for name in SOURCES if name != "module:function"]
    raise DataError(
        f"unknown data source {data.source!r}{did_you_mean(word, words)}; the sources are "
        + "; ".join(f"{name} ({about})" for name, about in SOURCES.items())
    )
