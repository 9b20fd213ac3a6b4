"""Each verb as a function: objects in, a frozen result out, and one clear line where it is given what cannot run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import samestep
from samestep import cli, hardware
from samestep.job import Job
from samestep.job_files import default
from samestep.wings.plan import plan, ranking

GPT2 = Job(model={"source": "preset:gpt2"}, train={"global_batch": 8}, numerics={"precision": "bf16"})
WORDS = ("model.source=preset:gpt2", "train.global_batch=8", "numerics.precision=bf16")
A100 = "a100-80x8"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_a_plan_is_frozen_and_the_same_again() -> None:
    found = samestep.plan(GPT2, 2, A100, top=2)
    assert [one.layout.world_size for one in found.best] == [2, 2]
    assert found.best[0].step_s <= found.best[1].step_s
    assert found.considered == len(found.best) + len(found.rejections)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.devices = 4  # type: ignore[misc]
    same = samestep.plan(GPT2, 2, hardware.load(A100), top=1)
    assert same.best == found.best[:1]


def test_the_command_prints_what_the_function_returns(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [part for word in WORDS for part in ("--set", word)]
    assert cli.main(["plan", *settings, "--hardware", A100, "--devices", "2", "--json", "plan.json"]) == 0
    found = samestep.plan(default(WORDS), 2, A100)
    record = ranking.as_record(found)
    written = json.loads(Path("plan.json").read_text())
    assert written.pop("seconds") > 0
    assert written == json.loads(json.dumps({key: value for key, value in record.items() if key != "seconds"}))
    assert cli.main(["simulate", *settings, "--hardware", A100, "--layout", "dp=2", "--json", "step.json"]) == 0
    played = samestep.simulate(default(WORDS), "dp=2", A100)
    written = json.loads(Path("step.json").read_text())
    assert written.pop("job") == default(WORDS).model_dump(mode="json")
    assert written == json.loads(json.dumps(played.to_record()))
    capsys.readouterr()


def test_the_help_says_how_many_rows_there_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    assert f"at most {plan.MOST_ROWS};" in capsys.readouterr().out


def test_the_fewest_devices_are_planned_for() -> None:
    assert samestep.plan(GPT2, 8, A100, fewest_devices=True).devices == 1


def test_a_simulation_without_a_layout_takes_the_jobs_own_or_replicas() -> None:
    assert str(samestep.simulate(GPT2, hardware=A100).layout) == "dp=1"
    assert str(samestep.simulate(GPT2, hardware=A100, devices=4).layout) == "dp=4"
    own = GPT2.model_copy(update={"layout": {"tp": 2}})
    assert str(samestep.simulate(own, hardware=A100, devices=2).layout) == "dp=1 tp=2"


def test_layouts_are_rows_with_a_reason_where_they_are_refused() -> None:
    rows = samestep.layouts(GPT2, 5)
    assert isinstance(rows, tuple)
    assert {bool(row.reason) for row in rows} == {True, False}
    assert all((row.memory is None) == bool(row.reason) for row in rows)
    assert len(samestep.layouts(GPT2, 5, switches=True)) > len(rows)


def test_a_plan_keeps_memory_free_and_says_so() -> None:
    machine = hardware.load(A100)
    whole, kept, half = (
        samestep.plan(GPT2, 2, A100, top=1, **words) for words in ({"keep_free": 0}, {}, {"keep_free": 0.5})
    )
    assert "kept free" not in ranking.as_text(whole)
    assert "memory limit: 75.2 of 79.1 GiB per device (--keep-free 0.05)" in ranking.as_text(kept)
    assert half.best[0].peak.total <= machine.memory_bytes / 2
    tight = dataclasses.replace(machine, memory_bytes=int(whole.best[0].peak.total * 1.01))
    assert samestep.plan(GPT2, 2, tight, top=1, keep_free=0).best[0].layout == whole.best[0].layout
    assert samestep.plan(GPT2, 2, tight, top=1).best[0].layout != whole.best[0].layout


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "plan for nobody": (lambda: samestep.plan(GPT2, 0, A100), "devices=0: a plan needs at least 1"),
    "plan for too many rows": (lambda: samestep.plan(GPT2, 2, A100, top=51), "must be from 1 to 50, got 51"),
    "plan for no rows": (lambda: samestep.plan(GPT2, 2, A100, top=0), "must be from 1 to 50, got 0"),
    "plan on what": (lambda: samestep.plan(GPT2, 2, "h100"), "no hardware 'h100' (did you mean 'h100x8'?)"),
    "plan nothing": (lambda: samestep.plan(GPT2, 2, A100, keep_free=1), "keep_free=1 is not a part of a device's memory. Use 0.05"),
    "plan what": (lambda: samestep.plan(Job(model={"source": "preset:gpt5"}), 2, A100), "no preset 'gpt5' (did you mean 'gpt2'?)"),
    "simulate where": (lambda: samestep.simulate(GPT2, "dp=2 tq=1", A100), "unknown layout option 'tq'"),
    "simulate on how many": (lambda: samestep.simulate(GPT2, "dp=2", A100, devices=3), "layout 'dp=2' has 2 ranks"),
    "simulate a refusal": (lambda: samestep.simulate(GPT2, "tp=5", A100), "tp=5 does not divide"),
    "layouts of nothing": (lambda: samestep.layouts(GPT2, 0), "devices=0: a layout needs at least 1"),
    "measure a job nowhere": (lambda: samestep.benchmark_layouts(Job(), layouts=[]), "benchmark_layouts needs a layout to run"),
    "measure what has no values": (lambda: samestep.benchmark_layouts(GPT2, layouts=["dp=1"]), "preset:gpt2 has sizes and no code"),
    "measure on nothing": (lambda: samestep.benchmark_hardware(out="here.toml", ranks=0), "ranks=0: a run needs at least 1"),
    "measure on what": (lambda: samestep.benchmark_hardware(out="here.toml", device="gpu"), "device must be cpu, cuda or auto, got 'gpu'"),
    "measure into nowhere": (lambda: samestep.benchmark_hardware(out="nope/here.toml"), "there is no folder nope"),
    "train where": (lambda: samestep.train(Job(), layout="dp=0"), "dp=0 must be from 1 to 1048576"),
    "train too long": (lambda: samestep.train(Job(), steps=101, ranks=1), "--steps 101 is beyond train.steps = 100"),
    "train on": (lambda: samestep.train(Job(), ranks=1, resume=True), "there is no run below runs/ to resume"),
    "verify where": (lambda: samestep.verify(Job(), layout="dp=two"), "dp must be a whole number, got dp=two"),
    "verify too few steps": (lambda: samestep.verify(Job(), layout="dp=2", steps=1), "Use steps=2 or more"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_run_is_one_clear_line(case: str, tmp_path: Path) -> None:
    call, says = WRONG[case]
    with pytest.raises(samestep.InputError) as refused:
        call()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())
