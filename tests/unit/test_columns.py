"""Sources larger than memory: written once as files, mapped by all, kept by content and tokenizer; shards and mixtures."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep.datasets import columns, files, open_dataset
from samestep.datasets.columns import Origin, Shards
from samestep.datasets.reading import read_samples
from samestep.errors import DataError
from samestep.job import Job


def job_of(source: str | Path, **data: Any) -> Job:
    return Job(data={"source": str(source), "sequence_length": 8, "held_out": 0.25, **data})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path / ".cache" / "samestep" / "tokens"


@pytest.fixture
def _always_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MOST_IN_MEMORY_BYTES", 0)


def documents(path: Path, number: int = 40) -> Path:
    path.parent.mkdir(exist_ok=True)
    lines = [{"text": "" if index % 7 == 3 else f"document {index} " * (index % 5 + 1)} for index in range(number)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def samples(job: Job, split: str = "train") -> list[dict[str, list[int]]]:
    dataset = open_dataset(job, split)
    return [{name: tensor.tolist() for name, tensor in dataset[index].items()} for index in range(len(dataset))]


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("word", ["jsonl", "text", "parquet", "hf"])
def test_files_hold_what_memory_holds(tmp_path, home, monkeypatch, capsys, word, split) -> None:
    path = documents(tmp_path / "corpus" / "a.jsonl")
    if word in ("parquet", "hf"):
        library = pytest.importorskip("datasets")
        rows = library.Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])
        path = path.with_suffix(".parquet")
        rows.to_parquet(str(path), batch_size=7) if word == "parquet" else rows.save_to_disk(path)
        capsys.readouterr()
    job = job_of(f"{word}:{path}")
    in_memory = samples(job, split)
    assert not home.exists()
    assert in_memory
    monkeypatch.setattr(columns, "MOST_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(files, "PART_BYTES", 64)
    assert samples(job, split) == in_memory
    assert "into tokens, once" in capsys.readouterr().err
    assert isinstance(open_dataset(job, split).tokens, np.memmap)
    assert samples(job, split) == in_memory
    assert not capsys.readouterr().err  # made once


@pytest.mark.usefixtures("_always_files")
def test_another_content_or_setting_makes_other_files(tmp_path, home) -> None:
    path = documents(tmp_path / "corpus" / "a.jsonl")
    first = samples(job_of(f"jsonl:{path}"))
    text = path.read_text()
    path.write_text(text.replace("document 1 ", "document 2 "))  # of the same size
    assert samples(job_of(f"jsonl:{path}")) != first
    assert len([folder for folder in home.iterdir() if folder.is_dir()]) == 2
    with pytest.raises(DataError, match="neither 'words'"):
        open_dataset(job_of(f"jsonl:{path}", text_field="words"))


@pytest.mark.usefixtures("_always_files")
def test_an_interrupted_or_failing_draft_leaves_nothing_behind(tmp_path, home) -> None:
    path = documents(tmp_path / "corpus" / "a.jsonl")
    whole = path.read_text()
    path.write_text(whole + "{broken\n")
    with pytest.raises(DataError, match=r"a\.jsonl:41: not JSON"):
        open_dataset(job_of(f"jsonl:{path}"))
    assert not [folder for folder in home.iterdir() if folder.is_dir()]
    path.write_text(whole)

    def interrupted(*_: Any) -> Any:
        yield 1, {"tokens": np.arange(3)}
        os._exit(1)

    context = multiprocessing.get_context("fork")
    origin = Origin("text:x", 10, ("x",))
    process = context.Process(target=columns.columns, args=(origin, {"tokens": "<u2"}, interrupted))
    process.start()
    process.join(60)
    assert [folder.suffix for folder in home.iterdir() if folder.is_dir()] == [".draft"]
    made = columns.columns(origin, {"tokens": "<u2"}, lambda: iter([(1, {"tokens": np.arange(5)})]))
    assert made["tokens"].tolist() == [0, 1, 2, 3, 4]
    assert not [folder for folder in home.iterdir() if folder.suffix == ".draft"]


@pytest.mark.usefixtures("_always_files")
def test_one_process_writes_while_the_others_wait(tmp_path, home) -> None:
    context = multiprocessing.get_context("fork")
    written = context.Value("i", 0)
    results = context.Queue()

    def pieces() -> Any:
        with written.get_lock():
            written.value += 1
        for number in range(5):
            time.sleep(0.02)
            yield 1, {"tokens": np.full(4, number)}

    def opened() -> None:
        results.put(int(columns.columns(Origin("text:x", 10, ("x",)), {"tokens": "<u2"}, pieces)["tokens"].sum()))

    processes = [context.Process(target=opened) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [40, 40, 40]
    assert written.value == 1


def test_a_home_that_cannot_be_written_to_is_named(tmp_path, home, monkeypatch) -> None:
    path = documents(tmp_path / "corpus" / "a.jsonl")
    monkeypatch.setattr(columns, "MOST_IN_MEMORY_BYTES", 0)
    (tmp_path / ".cache").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be kept in ~/\.cache/samestep"):
        open_dataset(job_of(f"jsonl:{path}"))


def _anonymous_bytes() -> int:
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell anonymous memory")
@pytest.mark.usefixtures("_always_files")
def test_a_corpus_takes_a_tenth_of_its_size_in_memory_at_most(tmp_path, home) -> None:
    path = tmp_path / "large.txt"
    path.write_text("forty-nine characters, and a newline at the end.\n" * (2**21))
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def read() -> None:
        before, seen, ended = _anonymous_bytes(), [0], threading.Event()

        def look() -> None:
            while not ended.wait(0.002):
                seen.append(_anonymous_bytes() - before)

        watch = threading.Thread(target=look)
        watch.start()
        for _ in range(2):  # written, then mapped
            dataset = open_dataset(job_of(f"text:{path}"))
            for index in range(0, len(dataset) - 4, 4999):
                dataset.read(np.arange(index, index + 4))
        ended.set()
        watch.join()
        results.put(max(seen))

    process = context.Process(target=read)
    process.start()
    assert 0 < results.get(timeout=300) < path.stat().st_size / 10
    process.join()


# --- shards ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_token_files_is_one_stream(tmp_path) -> None:
    tokens = np.random.default_rng(0).integers(0, 200, 1000).astype(np.uint16)
    tokens.tofile(tmp_path / "all.bin")
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, part in enumerate(np.split(tokens, [3, 350, 351, 900])):
        part.tofile(folder / f"{number:02}.bin") if number % 2 else np.save(folder / f"{number:02}.npy", part)
    for split in ("train", "held_out"):
        whole, parts = (open_dataset(job_of(f"tokens:{path}"), split) for path in (tmp_path / "all.bin", folder))
        assert len(whole) == len(parts)
        indices = np.random.default_rng(1).permutation(len(whole))
        for name, tensor in whole.read(indices).items():
            assert torch.equal(parts.read(indices)[name], tensor)


def test_shards_are_sliced_without_copies() -> None:
    arrays = [np.arange(0, 5), np.arange(5, 6), np.arange(6, 20)]
    shards = Shards(arrays)
    assert len(shards[4:7]) == 3
    assert shards[4:7][np.arange(3)].tolist() == [4, 5, 6]
    assert np.shares_memory(shards[4:7].arrays[-1], arrays[-1])
    assert len(shards[7:7]) == 0
    with pytest.raises(IndexError):
        shards[np.array([20])]


# --- mixtures --------------------------------------------------------------------------------------------------------


def mixture_of(folder: Path, weights: list[float], lengths: list[int], **data: Any) -> Job:
    sources = {}
    for number, (weight, length) in enumerate(zip(weights, lengths, strict=True)):
        path = folder / f"{number}.bin"
        np.full(length * 8 + 1, number, np.uint16).tofile(path)
        sources[f"tokens:{path}"] = weight
    return job_of("mixture", mixture=sources, held_out=0.0, **data)


@pytest.mark.parametrize(
    ("weights", "lengths"),
    [([1.0], [7]), ([0.5, 0.5], [10, 30]), ([3, 1], [10, 10]), ([0.7, 0.2, 0.1], [5, 100, 3]), ([1e-3, 1.0], [9, 9])],
)
def test_every_part_gives_its_share_and_each_of_its_samples(tmp_path, weights, lengths) -> None:
    dataset = open_dataset(mixture_of(tmp_path, weights, lengths))
    which, places = dataset._places(np.arange(len(dataset)))
    for part, (weight, length) in enumerate(zip(weights, lengths, strict=True)):
        mine = np.bincount(places[which == part], minlength=length)
        assert len(mine) == length
        assert mine.min() >= 1
        assert mine.max() - mine.min() <= 1
        assert mine.sum() == pytest.approx(len(dataset) * weight / sum(weights), abs=1)


def test_a_batch_of_a_mixture_keeps_its_order(tmp_path) -> None:
    dataset = open_dataset(mixture_of(tmp_path, [2, 1, 1], [6, 5, 9]))
    indices = np.random.default_rng(0).permutation(len(dataset))
    read = read_samples(dataset, indices)
    for row, index in enumerate(indices):
        for name, tensor in dataset[int(index)].items():
            assert torch.equal(read[name][row], tensor)
    assert read_samples(dataset, indices[:0])["labels"].shape == (0, 8)


def test_what_cannot_be_mixed_is_refused(tmp_path) -> None:
    path = documents(tmp_path / "corpus" / "a.jsonl")
    with pytest.raises(DataError, match=r"a sample of topics has .*, one of jsonl:"):
        open_dataset(job_of("mixture", mixture={f"jsonl:{path}": 1.0, "topics": 1.0}))
    with pytest.raises(ValueError, match=r"a table \[data.mixture\]"):
        Job(data={"source": "mixture"})
    with pytest.raises(ValueError, match="greater than 0"):
        Job(data={"source": "mixture", "mixture": {"topics": -1.0}})
    with pytest.raises(DataError, match="part of itself"):
        open_dataset(job_of("mixture", mixture={"mixture": 1.0}))
