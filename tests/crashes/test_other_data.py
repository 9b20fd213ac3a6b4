"""A resume that would read other samples than the run before is refused by name, and goes on where that is meant."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep import rules
from samestep.datasets import open_dataset, stamps
from samestep.errors import CheckpointError, JobError
from samestep.job import Job
from samestep.runtime.checkpoints import manifests
from samestep.runtime.run import Run
from tests import small

# -- samestep train --------------------------------------------------------------------------------

LINES = [f"line {number} of a text about {number * 7919 % 1009}" for number in range(400)]


def text(folder: Path) -> str:
    (folder / "text").mkdir(parents=True)
    for part in range(2):
        (folder / "text" / f"{part}.txt").write_text("\n".join(LINES[200 * part : 200 * part + 200]))
    return f"text:{folder / 'text'}"


def jsonl(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return f"jsonl:{folder / 'lines.jsonl'}"


def parquet(folder: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(
        pyarrow.table({"text": LINES}), folder / "rows.parquet", compression="none", use_dictionary=False
    )
    return f"parquet:{folder / 'rows.parquet'}"


def tokens(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    np.arange(6000, dtype=np.uint16).__mod__(200).astype(np.uint16).tofile(folder / "ids.bin")
    return f"tokens:{folder / 'ids.bin'}"


def saved(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": LINES}).save_to_disk(str(folder / "hf"))
    return f"hf:{folder / 'hf'}"


def _file_of(source: str) -> Path:
    """Return a file of a source that holds samples."""
    place = Path(source.partition(":")[2])
    return (
        place
        if place.is_file()
        else next(file for file in sorted(place.rglob("*")) if file.suffix in (".txt", ".arrow"))
    )


def one_byte(source: str) -> None:
    """Change a letter of a word that is among the first hundred."""
    file = _file_of(source)
    held = bytearray(file.read_bytes())
    at = held.find(b"of a text")
    held[at if at > 0 else 2000] ^= 1
    file.write_bytes(held)


def grown(source: str) -> None:
    file = _file_of(source)
    last = file.read_bytes()
    file.write_bytes(last + (b'{"text": "more"}\n' if source.startswith("jsonl") else last[-64:]))


def trained(source: str, run: Path, *words: Any, **changes: Any) -> int:
    settings = {"data.source": source, "train.steps": 4, "checkpoint.every": 2, **changes}
    return small.train("--out", run, *words, **settings)


def _text_of(capfd: pytest.CaptureFixture[str]) -> str:
    found = capfd.readouterr()
    return found.out + found.err


KINDS = [text, jsonl, parquet, tokens, saved]


def stamp(source: str, **data: Any) -> stamps.Stamp:
    job = Job(data={"source": source, "sequence_length": 16, **data})
    return stamps.of_job(job, open_dataset(job))


@pytest.mark.parametrize("make", KINDS)
def test_one_byte_of_any_source_is_noticed_and_where_it_is_counts_for_nothing(
    make: Callable[[Path], str], tmp_path: Path
) -> None:
    source = make(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "same")
    before, moved = stamp(source), stamp(source.replace(str(tmp_path / "data"), str(tmp_path / "same")))
    assert not stamps.difference(before, moved)
    one_byte(source)
    assert stamps.difference(before, stamp(source)) == f"{source} has the size that it had, and other content"


def test_one_byte_of_a_source_ends_a_resume_and_may_be_meant(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, run = text(tmp_path / "data"), tmp_path / "run"
    assert trained(source, run, "--steps", "2") == 0
    one_byte(source)
    capfd.readouterr()
    assert trained(source, run, "--resume") == 2
    assert f"{source} has the size that it had, and other content, when " in (told := _text_of(capfd))
    assert "--allow data" in told
    assert trained(source, run, "--resume", "--allow", "data") == 0
    assert f"after step 2: {source} has the size that it had, and other content (allowed)" in _text_of(capfd)


def test_data_of_another_size_is_refused_and_data_that_has_moved_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, run = text(tmp_path / "data"), tmp_path / "run"
    assert trained(source, run, "--steps", "2") == 0
    shutil.copytree(tmp_path / "data", tmp_path / "same")
    grown(source)
    capfd.readouterr()
    assert trained(source, run, "--resume") == 2
    assert " bytes in " in (told := _text_of(capfd))
    assert f"{source} has " in told
    moved = source.replace(str(tmp_path / "data"), str(tmp_path / "same"))
    assert trained(moved, run, "--resume") == 2
    assert "another data.source: resume with the job in its run folder; --allow data.source lets it change" in _text_of(
        capfd
    )
    assert trained(moved, run, "--resume", "--allow", "data.source") == 0
    assert "after step 2: data.source is " in _text_of(capfd)


def test_each_source_of_a_mixture_and_the_order_of_them_count(tmp_path: Path) -> None:
    first, second = jsonl(tmp_path / "a"), jsonl(tmp_path / "b")
    grown(second)
    before = stamp("mixture", mixture={first: 1.0, second: 2.0})
    assert f"{second} has " in stamps.difference(before, stamp("mixture", mixture={second: 2.0, first: 1.0}))
    assert "has 1 parts, and had 2" in stamps.difference(before, stamp("mixture", mixture={first: 1.0}))
    one_byte(second)
    found = stamps.difference(before, stamp("mixture", mixture={first: 1.0, second: 2.0}))
    assert found == f"{second} has the size that it had, and other content"


@pytest.mark.parametrize("source", ["topics", "digits"])
def test_data_that_comes_with_python_or_samestep_has_a_stamp(source: str) -> None:
    (found,) = stamp(source)
    assert not stamps.difference([found], stamp(source))
    assert stamps.difference([{**found, "content": "other", "length": 3}], stamp(source))


def images(folder: Path) -> str:
    image = pytest.importorskip("PIL.Image")
    for number in range(12):
        place = folder / "images" / ("cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(place / f"{number}.png")
    return f"images:{folder / 'images'}"


@pytest.mark.parametrize("how", ["other pixels", "another name"])
def test_a_folder_of_images_has_a_stamp(how: str, tmp_path: Path) -> None:
    source = images(tmp_path)
    before = stamp(source)
    file = tmp_path / "images" / "cat" / "3.png"
    if how == "other pixels":
        file.write_bytes((tmp_path / "images" / "dog" / "2.png").read_bytes())
    else:
        file.rename(file.with_name("30.png"))
    assert stamps.difference(before, stamp(source))
    assert not stamps.difference(before, before)


def test_of_large_files_blocks_are_read_in_seeded_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "WHOLE_BYTES", 2**20)
    (tmp_path / "ids").mkdir()
    for number in range(3):
        np.random.default_rng(number).integers(0, 200, 2**20, np.uint16).tofile(tmp_path / "ids" / f"{number}.bin")
    source = f"tokens:{tmp_path / 'ids'}"
    before = stamp(source)
    assert before == stamp(source)
    for place in (5, 2**21 - 5):  # the head and the tail of all
        file = tmp_path / "ids" / ("0.bin" if place == 5 else "2.bin")
        held = bytearray(file.read_bytes())
        held[place] ^= 1
        file.write_bytes(held)
        assert "other content" in stamps.difference(before, stamp(source))
        held[place] ^= 1
        file.write_bytes(held)
    assert not stamps.difference(before, stamp(source))


# -- a loop of one's own ---------------------------------------------------------------------------


class Points(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int = 40, other: int = -1, *, is_random: bool = False) -> None:
        self.length, self.other, self.is_random = length, other, is_random

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.randn(4, generator=torch.Generator().manual_seed(index)) + (index == self.other)
        return point + (torch.rand(4) if self.is_random else 0), 2 * point


def loop(folder: Path, dataset: Points, until: int, *allow: str) -> Run:
    job = Job(train={"global_batch": 4, "steps": 4}, run={"device": "cpu", "allow": allow})
    run = samestep.parallelize(
        lambda: nn.Linear(4, 4), "mse", lambda p: torch.optim.SGD(p, lr=0.1), layout="dp=1", job=job
    )
    if samestep.latest(folder) is not None:
        run.load(folder)
    for batch in samestep.batches(dataset, job, first_step=run.steps_taken):
        if batch.step == until:
            break
        run.step(batch)
    run.save(folder)
    return run


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Points(41), r"Points has 41 samples, and had 40"),
        (Points(39), r"Points has 39 samples, and had 40"),
        (Points(other=17), r"Points has another sample 17 than it had"),
    ],
)
def test_a_loop_that_loads_is_refused_other_samples_at_its_first_step(
    dataset: Points, why: str, tmp_path: Path
) -> None:
    loop(tmp_path, Points(), 2)
    with pytest.raises(CheckpointError, match=why + r", when .*step-000002 was written.* run.allow = \[\"data\"\]"):
        loop(tmp_path, dataset, 4)
    (change,) = loop(tmp_path, dataset, 4, "data").changes
    assert change.startswith("after step 2: Points has ")


def test_a_loop_that_loads_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    loop(tmp_path, Points(), 2)
    assert loop(tmp_path, Points(), 4).steps_taken == 4


def test_samples_that_are_changed_at_random_are_compared_with_seeded_generators() -> None:
    state = torch.get_rng_state()
    found = stamps.of_dataset(Points(is_random=True), 0)
    assert found[0]["digests"]
    assert not stamps.difference(found, stamps.of_dataset(Points(is_random=True), 0))
    assert stamps.difference(found, stamps.of_dataset(Points(41, is_random=True), 0))
    assert stamps.difference(found, stamps.of_dataset(Points(), 0))
    assert torch.equal(state, torch.get_rng_state())


def test_a_checkpoint_without_a_stamp_is_taken_as_it_is(tmp_path: Path) -> None:
    loop(tmp_path, Points(), 2)
    folder = manifests.list_checkpoints(tmp_path)[-1]
    manifest = manifests.read_manifest(folder)
    manifest["data"] = []
    (folder / manifests.NAME).unlink()
    manifests.write_manifest(folder, manifest)
    assert loop(tmp_path, Points(41), 4).steps_taken == 4


# -- rules that have changed -----------------------------------------------------------------------

CHANGE = rules.RuleChange(
    since=2,
    what="labels of tests are others",
    works="the version of samestep that wrote it goes on",
    concerns=lambda job: job["train"]["global_batch"] == 4,
)


@pytest.mark.parametrize(("version", "is_concerned"), [(1, True), (1, False), (2, True)])
def test_a_run_from_before_a_changed_rule_is_refused_by_its_name_if_it_uses_it(
    version: int, is_concerned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = dataclasses.replace(CHANGE, concerns=CHANGE.concerns if is_concerned else lambda job: False)
    monkeypatch.setattr(rules, "CHANGES", (changed,))
    loop(tmp_path, Points(), 2)
    folder = manifests.list_checkpoints(tmp_path)[-1]
    manifest = manifests.read_manifest(folder)
    assert manifest["job"]["numerics"]["rules"] == rules.RULES
    if version == 1:
        del manifest["job"]["numerics"]["rules"]
        (folder / manifests.NAME).unlink()
        manifests.write_manifest(folder, manifest)
    if version == 2 or not is_concerned:
        assert loop(tmp_path, Points(), 4).steps_taken == 4
        return
    with pytest.raises(
        CheckpointError, match=r"was written under rules 1, and since rules 2 labels of tests are others: the version"
    ):
        loop(tmp_path, Points(), 4)


def test_a_resolved_job_names_the_version_and_no_other_is_taken() -> None:
    assert "rules = 2" in Job().to_toml()
    with pytest.raises(JobError, match=r"numerics.rules"):
        Job(numerics={"rules": 1})


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ({"data": {"source": "mine:data"}}, "labels that are the inputs"),
        ({"data": {"source": "mine:data"}, "model": {"source": "hf:bert", "task": "masked"}}, ""),
        ({"data": {"source": "mine:data"}, "model": {"source": "mine:model"}}, ""),
        ({"data": {"source": "jsonl:x", "tokenizer": "folder"}}, "documents begin"),
        ({"data": {"source": "jsonl:x.jsonl"}}, ""),
        ({"data": {"source": "jsonl:x"}}, "files of a folder that are named as validation"),
        (
            {"data": {"source": "mixture", "mixture": {"parquet:x": 1.0, "topics": 1.0}, "tokenizer": "f"}},
            "documents begin",
        ),
        ({"data": {"source": "tokens:folder"}}, "heads of token files"),
        ({"data": {"source": "tokens:one.bin"}}, ""),
        ({"data": {"source": "topics", "held_out_sets": {"x": "images:y"}}}, "pictures"),
        ({"model": {"lora": {"targets": ["q"], "base": "nf4"}}}, "base = 'nf4' rounds"),
        ({"model": {"lora": {"targets": ["q"], "base": "full"}}}, ""),
        ({}, ""),
    ],
)
def test_jobs_that_use_a_changed_rule_are_known(tables: dict[str, Any], what: str) -> None:
    job = {"model": {"source": "hf:llama"}, "data": {"source": "topics"}} | tables
    found = rules.refusal({"model": {"source": "hf:llama"}, **job})
    assert (what in found) if what else not found
    assert not rules.refusal({**job, "numerics": {"rules": 2}})
