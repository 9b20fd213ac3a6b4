"""Famous runs by name, and the page that draws a step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from samestep import cli
from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.presets import preset
from samestep.wings.plan.simulation import cases
from samestep.wings.plan.simulation.simulate import Prediction, predict
from tests.unit.pages import assert_whole


def gpt2(layout: str) -> Prediction:
    job = Job(train={"global_batch": 16}, numerics={"precision": "bf16"})
    return predict(preset("gpt2"), job, Layout(layout), load("a100-80x8"))


# -- cases -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.RUNS)
def test_a_famous_run_says_batch_tokens_days_and_what_was_published(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--case", name]) == 0
    said = capsys.readouterr().out
    run = cases.RUNS[name]
    devices = int(re.search(r"([\d,]+) A100", run.title)[1].replace(",", ""))  # type: ignore[index]
    assert Layout(run.layout).world_size == devices
    assert f"{run.global_batch} sequences of {run.sequence}, {run.global_batch * run.sequence:,} tokens" in said
    assert f"{run.tokens:.3g} tokens in all" in said
    assert ": fits\n" in said
    days = float(re.search(r"tokens take ([\d.]+) days", said)[1])  # type: ignore[index]
    found = run.predict()
    assert days == pytest.approx(run.tokens / found.tokens * found.step_s / 86400, abs=0.06)
    assert "\npublished: " in said
    years = float(re.search(r"one device would take ([\d,]+) years", said)[1].replace(",", ""))  # type: ignore[index]
    alone = run.on_one_device()
    assert years == pytest.approx(run.tokens / alone.tokens * alone.step_s / 86400 / 365.25, abs=0.51)
    assert years <= days * devices / 365.25  # no devices are faster than their number
    assert 0.4 < alone.mfu < 0.869, "of a product's own efficiency"


def test_weights_are_spread_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--case", "spread"]) == 0
    said = capsys.readouterr().out
    held = {
        words.strip(): float(size) for words, size in re.findall(r"^(\S.*?) +([\d.]+) B weights a device", said, re.M)
    }
    whole = preset("llama2-70b", 4096).num_params / 1e9
    assert held["dp=64 microbatch=1"] == pytest.approx(whole, abs=0.01)
    for words, size in held.items():
        assert words == "dp=64 microbatch=1" or size == pytest.approx(whole / 64, rel=0.01), words


def test_zero_saves_what_the_paper_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--case", "zero-memory"]) == 0
    paper = capsys.readouterr().out.splitlines()[1]
    assert [float(size) for size in re.findall(r"zero=\d +([\d.]+)", paper)] == [120.0, 31.4, 16.6, 1.9]


def test_more_devices_are_faster_and_the_ring_beats_the_root(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--case", "data-parallel"]) == 0
    speeds = [
        [float(x) for x in re.findall(r"([\d.]+) times", line)] for line in capsys.readouterr().out.splitlines()[1:]
    ]
    rings = [ring for ring, _ in speeds]
    assert rings == sorted(rings)
    assert all(ring <= count + 0.005 for ring, count in zip(rings, (1, 2, 4, 8), strict=True))
    assert all(ring > root for ring, root in speeds[1:])


def test_pipelines_beat_the_naive_way_by_the_formula() -> None:
    whole, piped = (cases._gpt2(f"pp=4 microbatch={size}", "gpt2-xl", 32) for size in (32, 4))
    assert whole.bubble_fraction == pytest.approx(0.75, abs=0.03)
    assert piped.bubble_fraction == pytest.approx(3 / 11, abs=0.08)
    assert 1.5 < whole.step_s / piped.step_s < 32 / 11


def test_the_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--case", "list"]) == 0
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert named == [*cases.RUNS, *cases.COMPARISONS]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--case", "gpt3"], "no case 'gpt3' (did you mean 'gpt3-4096'?)"),
        (["--case", "llama-65b", "--layout", "dp=2"], "has its own job and layout: leave --layout out"),
        (["--case", "zero-memory", "--html", "x.html"], "--html writes one step"),
    ],
)
def test_mistakes(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *words]) == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1


def test_simulate_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--case", "llama-65b", "--json", tmp_path / "n.json", "--html", tmp_path / "p.html"]
    assert cli.main([str(word) for word in words]) == 0
    assert assert_whole((tmp_path / "p.html").read_text()).record["devices"] == 2048
    assert json.loads((tmp_path / "n.json").read_text())["devices"] == 2048
    assert cli.main(["simulate", "--case", "llama-65b", "--html", "/nope/p.html"]) == 2
    assert "/nope/p.html cannot be written" in capsys.readouterr().err
