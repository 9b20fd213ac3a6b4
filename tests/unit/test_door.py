"""What a newcomer meets first: lists of models and machines, presets as published, words for mistakes, early returns."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.errors import DataError, JobError, ModelError, UnprovenError, WorkerError
from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.presets import PRESETS
from samestep.models.published import TOKENS, as_published
from samestep.proof import record
from samestep.proof.verdict import Check, Verdict
from samestep.runtime.processes import join, workers
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.workers import run_workers
from tests import small
from tests.models import LLAMA, Plain, Tokens
from tests.small import main

# -- lists and presets -----------------------------------------------------------------------------


def test_a_profile_is_shown_as_a_file_to_begin_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main("profiles", "--show", "rtx4090x8") == 0
    file = tmp_path / "mine.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert replace(load(file), name="rtx4090x8") == load("rtx4090x8")


def _after_the_job(out: str, begin: str) -> list[str]:
    """Return the lines after those that name the job, and that say how its preset is planned."""
    lines = out.splitlines()
    assert lines[0].startswith("job: built-in default")
    return lines[next(place for place, line in enumerate(lines) if re.match(begin, line)) :]


def test_many_layouts_are_a_screenful(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layouts", "--set", "model.source=preset:gpt2", "--devices"]
    assert main(*words, "12") == 0
    shown = _after_the_job(capsys.readouterr().out, r"\d+ of [\d,]+ layouts are valid")
    assert len(shown) <= 40
    assert re.match(r"\d+ of [\d,]+ layouts are valid, the first 20 of them", shown[0])
    assert main(*words, "12", "--whole") == 0
    whole = _after_the_job(capsys.readouterr().out, r"layout  ")
    legal, every = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", shown[0])[:2])
    assert len(whole) == every + 1
    assert sum("rejected:" not in line for line in whole[1:]) == legal
    refused = [int(line.split()[0].replace(",", "")) for line in shown if line.startswith("  ")]
    assert sum(refused) == every - legal or len(refused) == 12


def test_presets_and_profiles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("presets") == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [f"preset:{name}" for name in PRESETS]
    assert main("profiles") == 0
    rows = capsys.readouterr().out.splitlines()
    assert {"h100x8", "cpu-laptop", "v100x8"} <= {row.split()[0] for row in rows[1:]}


@pytest.mark.parametrize("name", ["llama3-70b", "preset:llama3-70b"])
def test_a_preset_given_as_a_file_says_how_to_name_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan", name, "--devices", "8") == 2
    assert "use --set model.source=preset:llama3-70b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tables", "precision", "batch", "says"),
    [
        ({}, "bf16", 1536, "is planned in bf16 and with its published 3.15M tokens per step, 1536 samples. Change by --set "),
        ({"numerics": {"precision": "float32"}}, "float32", 1536, "is planned with its published 3.15M tokens"),
        ({"train": {"global_batch": 32}}, "bf16", 32, "is planned in bf16. Change by --set numerics.precision="),
        ({"train": {"global_batch": 32}, "numerics": {"precision": "float32"}}, "float32", 32, ""),
        ({"data": {"sequence_length": 1024}}, "bf16", 3072, "3072 samples"),
    ],
)  # fmt: skip
def test_a_preset_is_planned_as_published_unless_told_otherwise(tables, precision, batch, says):
    job, said = as_published(Job(model={"source": "preset:gpt3-175b"}, **tables))
    assert (job.numerics.precision, job.train.global_batch) == (precision, batch)
    assert says in said
    assert bool(said) == bool(says)


def test_a_model_of_code_keeps_its_own_batch_and_precision() -> None:
    job = Job()
    assert as_published(job) == (job, "")
    unpublished, said = as_published(Job(model={"source": "preset:llama3-70b"}))
    assert unpublished.train.global_batch == 512
    assert "the usual (no published number) 4.19M tokens" in said
    assert TOKENS.keys() <= set(PRESETS)


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        (["--hardware", "h100x8"], "launches of small kernels"),
        (["--hardware", "h100x8", "--set", "model.source=preset:gpt2-xl"], "compute"),
    ],
)
def test_a_plan_says_what_binds(words: list[str], bound: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan", "--devices", "2", *words) == 0
    assert f"bottleneck: {bound} (" in capsys.readouterr().out


def test_the_package_shows_its_public_names_and_its_version() -> None:
    assert [name for name in dir(samestep) if not name.startswith("_")] == sorted(samestep.__all__)
    assert samestep.__version__[0].isdigit()


# -- the words of a mistake ------------------------------------------------------------------------


class Rows:
    """Samples as lists of numbers, which are no tensors."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[int]:
        return list(range(index, index + 12))


class Pairs(Rows):
    """The same rows, as a tensor and its class."""

    def __getitem__(self, index: int) -> Any:
        return torch.arange(index, index + 12), torch.tensor(index % 3)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 8), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens).mean(1))


def _sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _losses(model: Callable[[], nn.Module], loss: Any, dataset: Any, example: Any = None) -> list[float]:
    job = Job(train={"global_batch": 4, "steps": 2})
    run = samestep.parallelize(model, loss, _sgd, job=job)
    if example is not None:
        run.prepare(example)
    return [run.step(batch).loss for batch in samestep.batches(dataset, job)]


def test_a_mistake_in_the_data_is_not_blamed_on_the_model() -> None:
    with pytest.raises(
        DataError, match=r"a batch of tensors \[12\], \[12\] .* batch.samples\(\[0\]\) is a batch of one"
    ):
        _losses(LLAMA, "cross_entropy", Tokens(), Tokens()[0])
    with pytest.raises(DataError, match=r"a sample of 12 single numbers .* torch\.tensor"):
        _losses(LLAMA, "cross_entropy", Rows())
    whole = {name: value[None] for name, value in Tokens()[0].items()}
    assert _losses(LLAMA, "cross_entropy", Tokens(), whole) == _losses(LLAMA, "cross_entropy", Tokens())
    assert len(_losses(Classifier, "cross_entropy", Pairs())) == 2


def _of(value: Any) -> Callable[[Any, Any], Any]:
    """A loss that returns the sum over a batch as `value` makes it."""
    return lambda outputs, batch: value(F.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1]))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda total, count: total / count, r"returned one number.*Otherwise return \(sum, count\)"),
        (lambda total, count: (total.item(), count), r"returned \(a float, a int\). Use \(sum, count\)"),
        (lambda total, count: (total.expand(2), count), r"returned \(a tensor \[2\], a int\)"),
        (lambda total, count: (total, None), r"returned \(a tensor \[\], None\)"),
        (lambda total, count: (total.detach(), count), "the sum that the loss returned has no gradient"),
    ],
)
def test_a_loss_is_a_sum_with_a_gradient_and_a_count(value: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        _losses(Classifier, _of(value), Pairs())


def test_a_sum_and_a_count_may_have_any_form() -> None:
    forms: list[Any] = [
        lambda total, count: (total, count),
        lambda total, count: [total[None], torch.tensor([count])],
        lambda total, count: (total, np.int64(count)),
    ]
    assert len({tuple(_losses(Classifier, _of(form), Pairs())) for form in forms}) == 1


def test_a_run_is_prepared_by_a_batch_or_by_samples_of_one() -> None:
    def source() -> Any:
        return torch.utils.data.DataLoader(Pairs(), batch_size=4)

    batch = next(iter(samestep.batches(source(), Job(train={"global_batch": 4, "steps": 2}))))
    found = [_losses(Classifier, "cross_entropy", source(), one) for one in (None, batch, batch.samples([0]))]
    assert found[0] == found[1] == found[2]


def test_what_trains_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="no output of the model depends on a parameter that takes a gradient"):
        _losses(lambda: Classifier().requires_grad_(False), "cross_entropy", Pairs())
    run = samestep.parallelize(Plain, "cross_entropy", lambda params: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match="the optimizer function returned a NoneType"):
        run.prepare({name: value[None] for name, value in Tokens()[0].items()})


def test_arguments_of_a_forward_are_given_whatever_it_calls_itself() -> None:
    class Mine(Classifier):
        def forward(this, tokens: torch.Tensor) -> torch.Tensor:  # noqa: N805
            return super().forward(tokens)

    class Named(Pairs):
        def __getitem__(self, index: int) -> Any:
            return *super().__getitem__(index), f"sample {index}"

    assert _losses(Mine, "cross_entropy", Named()) == _losses(Classifier, "cross_entropy", Pairs())


OWN = """
import torch
from tests.models import Plain, Tokens
def load(): model = Plain(); model.load_state_dict(torch.load("nothing.pt")); return model
def build(): return Plain()
def data(): return Tokens()
def fail(*given): raise OSError("disk gone")
class Broken(Tokens):
    def __getitem__(self, index): raise KeyError("a broken row")
"""


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.source=own_functions:load", r"own_functions:load fails: FileNotFoundError: .*'nothing.pt' \(.*:4\)"),
        ("data.source=own_functions:fail", r"own_functions:fail fails: OSError: disk gone \(.*own_functions.py:7\)"),
        ("data.source=own_functions:Broken", r"reading sample 0 of a Broken fails: KeyError: 'a broken row' \(.*:9\)"),
        ("optimizer.name=own_functions:fail", r"own_functions:fail fails: OSError: disk gone \(.*own_functions.py:7\)"),
        ("model.source=own_functions.py:build", "module not found: 'own_functions.py'.*. Use own_functions:build"),
    ],
)
def test_failures_of_the_users_functions_are_one_line_with_theirs(setting, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_functions.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_functions", None)
    (tmp_path / "job.toml").write_text(
        '[model]\nsource = "own_functions:build"\n[data]\nsource = "own_functions:data"\n'
    )
    assert main("train", "job.toml", "--dry-run", "--layout", "dp=2", "--set", setting) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert re.search(says, said[0]), said


@pytest.fixture
def _no_group() -> None:
    """Leave the group that a run of one rank has made here: workers would start as new processes, of 3 s each."""
    join.leave()


ERRORS = """
import samestep
def main(place):
    samestep.parallelize(lambda: None, "mse", lambda p: p, layout="dp=2 zero=7")
if __name__ == "__main__":
    samestep.launch(main, ranks=2)
"""


def test_an_error_of_launch_has_the_lines_of_the_script_and_of_its_rank_alone(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(ERRORS)
    status, _, complaints = small.script(script, (), tmp_path / "said")
    lines = complaints.splitlines()
    assert status == 1
    assert lines[-1] == "samestep.errors.LayoutError: zero=7: the ZeRO stages are 0, 1, 2 and 3 [value-out-of-range]"
    places = [line.rpartition(", ")[2] for line in lines if line.startswith("  File")]
    assert places == ["in <module>", "in main"], "the line that was launched, and the line that the rank ran"
    assert re.fullmatch("  in rank [01]:", lines[-4])


# -- ranks that return early -----------------------------------------------------------------------


def _early(place: RankInfo) -> None:
    dist.barrier()
    if place.rank != 1:
        dist.all_reduce(torch.ones(1))


def _late(place: RankInfo) -> int:
    dist.barrier()
    if place.rank == 0:
        time.sleep(2.5)
    return 7


def _pairs(place: RankInfo) -> None:
    dist.barrier()
    for _ in range(3 if place.rank < 2 else 0):
        if place.rank == 0:
            time.sleep(0.8)
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)


@pytest.mark.usefixtures("_no_group")
def test_a_rank_that_returns_early_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_WAITING_S", 1.0)
    monkeypatch.setattr(workers, "_ASK_EVERY_S", 0.3)
    said = r"^rank 1 of 3 returned from the function while ranks 0, 2 wait for it in all_reduce \(.*test_door.py:\d+\)"
    with pytest.raises(WorkerError, match=said):
        run_workers(_early, ranks=3, timeout_s=300, quiet=True)


@pytest.mark.usefixtures("_no_group")
def test_ranks_may_return_at_different_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_WAITING_S", 1.0)
    monkeypatch.setattr(workers, "_ASK_EVERY_S", 0.3)
    assert run_workers(_late, ranks=2, timeout_s=300, quiet=True) == 7
    run_workers(_pairs, ranks=3, timeout_s=300, quiet=True)


# -- what is proven, and what is allowed -----------------------------------------------------------


def _verdict(layout: str = "dp=2") -> Verdict:
    checks = (Check(what="loss", error=0.0, allowance=1e-9, compared=1),)
    return Verdict(layout=layout, job="hf:llama", steps=3, precision="float64", checks=checks)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_proof_holds_for_the_same_job_at_any_length_and_place(home: Path) -> None:
    job = Job(data={"source": "text:/here/book.txt"})
    record.keep(record.record_of(job, _verdict()))
    layout, nowhere = Layout("dp=2"), home / "run"
    found = record.find_record(job, layout, nowhere)
    assert found is not None
    assert "3 steps in float64 are equal to one device" in found.to_line()
    same: list[dict[str, Any]] = [
        {"train": {"steps": 9}},
        {"run": {"threads": 3, "device": "cpu"}},
        {"checkpoint": {"every": 2}},
        {"data": {"source": "text:/there/book.txt"}},
    ]
    other: list[dict[str, Any]] = [
        {"train": {"seed": 1}},
        {"train": {"global_batch": 8}},
        {"model": {"source": "hf:gpt2"}},
        {"model": {"config": {"num_hidden_layers": 3}}},
        {"numerics": {"precision": "bf16"}},
        {"optimizer": {"lr": 0.5}},
    ]
    base: dict[str, Any] = {"data": {"source": "text:/here/book.txt"}}
    assert all(record.find_record(Job(**{**base, **tables}), layout, nowhere) for tables in same)
    assert not any(record.find_record(Job(**{**base, **tables}), layout, nowhere) for tables in other)
    assert record.find_record(job, Layout("dp=4"), nowhere) is None


def test_a_proof_ends_with_a_change_of_the_users_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "newcomers_model.py").write_text("def build(): pass\n")
    (home / "newcomers_layers.py").write_text("WIDTH = 3\n")
    monkeypatch.syspath_prepend(home)
    __import__("newcomers_model")
    job, layout = Job(model={"source": "newcomers_model:build"}), Layout("dp=2")
    record.keep(record.record_of(job, _verdict()))
    assert record.find_record(job, layout, home)
    (home / "newcomers_layers.py").write_text("WIDTH = 4\n")
    assert record.find_record(job, layout, home) is None


def test_a_damaged_record_proves_nothing(home: Path) -> None:
    job, layout = Job(), Layout("dp=2")
    made = record.record_of(job, _verdict())
    record.keep(made, home)
    (home / "home" / ".cache" / "samestep" / "proofs" / f"{made.key}.json").write_text("{")
    assert record.find_record(job, layout, home) == made
    (home / record.FILE).write_text('{"key": 3}')
    assert record.find_record(job, layout, home) is None


def test_a_waived_refusal_is_noted_once_and_another_raised() -> None:
    run = Job(run={"allow": ["loss"]}).run
    assert run.met == ()
    for _ in range(2):
        assert (
            run.waived("loss", "some-code", "the loss is a mean")
            == 'the loss is a mean (allowed by run.allow = ["loss"])'
        )
    assert run.met == ('the loss is a mean (allowed by run.allow = ["loss"])',)
    assert run.model_copy(update={"device": "cpu"}).met == run.met
    with pytest.raises(UnprovenError, match=r'run.allow = \["samples"\] lets it run unproven'):
        run.waived("samples", "some-code", "samples influence each other")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.config.num_key_value_heads=3", r"queries \(1, 4, 16, 4\) with keys \(1, 3, 16, 4\).* heads .* do not fit"),
        ("model.config.vocab_size=-5", "model.config does not fit hf:llama: .*negative dimension -5"),
        ("optimizer.options.betas=[0.9]", "AdamW rejects its settings: tuple index out of range"),
    ],
)  # fmt: skip
def test_settings_that_torch_refuses_are_one_line(setting: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.train("--dry-run", "--layout", "dp=2", "--set", setting) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert re.search(says, said[0]), said
