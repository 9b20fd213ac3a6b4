"""`plan --measure-top`: what is predicted beside what is measured, and the user's own profile refitted to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from samestep import hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import presets
from samestep.strategies import programs_of
from samestep.wings.plan.measurement import refit as refits
from samestep.wings.plan.measurement.refit import StepTime, StepTimes, as_toml, refit, slower, why_not
from samestep.wings.plan.simulation.clock import play
from tests import small

LAYOUTS = [Layout(text) for text in ("dp=1", "dp=2", "dp=2 zero=3")]


@pytest.mark.parametrize(("compute", "links"), [(1.0, 1.0), (2.0, 0.5), (0.5, 4.0)])
def test_a_refit_finds_how_much_slower_a_machine_is(compute: float, links: float, tmp_path: Path) -> None:
    model, machine = presets.preset("gpt2", 64, {"layers": 2}), replace(hardware.load("cpu-laptop"), overlap=False)
    job = Job(data={"sequence_length": 64}, train={"global_batch": 4})

    programs = [programs_of(model, job, layout, machine.devices_per_node) for layout in LAYOUTS]

    def predicted(candidate: hardware.Hardware) -> list[float]:
        return [play(of_stages, candidate).step_s for of_stages in programs]

    fitted, factors = refit(machine, predicted(slower(machine, compute, links)), predicted)
    assert factors == pytest.approx((compute, links), rel=0.05)
    file = tmp_path / "own.toml"
    file.write_text(as_toml(fitted, machine, factors, '"dp=1"'), encoding="utf-8")
    read = hardware.load(file)
    assert replace(read, name="", sources={}) == replace(fitted, name="", sources={})
    refitted = {key for key, source in read.sources.items() if source.startswith("refitted: times")}
    assert ("flops_per_s.float32" in refitted) is (compute != 1.0)
    assert ("intra.latency_s" in refitted) is (links != 1.0)
    assert "memory_bytes" not in refitted
    assert set(read.sources) == set(machine.sources)


def test_no_refit_leaves_a_machine_that_cannot_be() -> None:
    machine = hardware.load("cpu-laptop")

    def predicted(candidate: hardware.Hardware) -> list[float]:
        return [1e9 / candidate.intra.bytes_per_s + 1e-9 * candidate.kernel_launch_s for _ in range(2)]

    fitted, factors = refit(machine, [1e-6, 1e-6], predicted)  # steps in which nothing seems to be sent
    assert fitted.intra.bytes_per_s <= fitted.memory_bytes_per_s
    assert all(1 / 8 <= factor <= 8 for factor in factors)


@pytest.mark.parametrize(
    ("before", "after", "taken", "says"),
    [
        ([1.0, 2.0], [2.0, 4.0], [[2.0, 2.1], [4.0, 4.1]], ""),
        ([1.0, 2.0], [2.0, 4.0], [[1.0, 4.0], [2.0, 8.0]], "repeated steps differ"),
        ([1.0, 1.1], [2.1, 2.0], [[2.0, 2.01], [2.1, 2.11]], "in the wrong one"),
        ([1.0], [1.0], [[1.0, 1.0]], "would fall from 0% to 0%"),
    ],
)
def test_a_refit_is_kept_where_it_beats_the_noise(
    before: list[float], after: list[float], taken: list[list[float]], says: str
) -> None:
    reason = why_not(before, after, taken)
    assert says in reason
    assert bool(reason) is bool(says)


def test_the_best_are_run_and_the_own_profile_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(refits, "why_not", lambda *args: "")  # how busy the machine is decides otherwise
    shipped = hardware.load("cpu-laptop")
    words = ["plan", *small.settings(), "--devices", "2", "--measure-top", "2", "--json", str(tmp_path / "plan.json")]
    assert small.main(*words) == 0
    said = capsys.readouterr().out
    rows = json.loads((tmp_path / "plan.json").read_text())["measured"]
    assert len(rows) == 2
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in rows)
    assert "predicted s  measured s" in said
    assert f"refitted: {hardware.own_path()}" in said
    assert hardware.load(hardware.OWN).memory_bytes == shipped.memory_bytes
    assert hardware.load("cpu-laptop") == shipped


def test_what_was_not_written_is_said(tmp_path: Path) -> None:
    row = StepTime(layout=LAYOUTS[0], predicted_s=1.0, measured_s=1.0, refitted_s=1.0)
    kept = StepTimes(
        rows=(row,), hardware=hardware.load("cpu-laptop"), path=tmp_path, factors=(1.0, 1.0), kept="of noise"
    )
    assert kept.to_text().endswith("not refitted, and nothing written: of noise")
    assert "times as long as before" in replace(kept, kept="").to_text()


@pytest.mark.parametrize(
    ("load", "cores", "is_busy"),
    [(7.0, 2, True), (1.9, 2, False), (1.2, 1, False), (40.0, 64, True), (20.0, 64, False)],
)
def test_a_measurement_on_a_busy_machine_says_so(load: float, cores: int, is_busy: bool, tmp_path: Path) -> None:
    row = StepTime(layout=LAYOUTS[0], predicted_s=1.0, measured_s=1.0, refitted_s=1.0)
    times = StepTimes(
        rows=(row,),
        hardware=hardware.load("cpu-laptop"),
        path=tmp_path,
        factors=(1.0, 1.0),
        busy=refits.busy(load, cores),
    )
    for one in (times, replace(times, kept="of noise")):
        assert one.to_text().endswith(". Repeat the measurement without them") is is_busy
        assert (f"the load was {load:.1f} on {cores} CPU cores" in one.to_text()) is is_busy


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hardware", "h100x8"], "--measure-top runs on this machine, and --hardware h100x8 is another"),
        (["--set", "model.source=preset:gpt2"], "preset:gpt2 has a shape but no code"),
    ],
)
def test_what_cannot_be_run_is_refused_first(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main("plan", "--devices", "2", "--measure-top", "2", *words) == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1
