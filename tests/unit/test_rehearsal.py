"""`plan --measure-top`: what is predicted beside what is measured, and the user's own profile refitted to it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from samestep import hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import presets
from samestep.strategies import programs_of
from samestep.wings.plan import calibrate
from samestep.wings.plan.calibrate import calibrated, fit_of
from samestep.wings.plan.measured_steps import TimedStep
from samestep.wings.plan.measurement import profile
from tests import small


def test_the_best_are_run_and_the_own_profile_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "_why_kept", lambda _: "")  # how busy the machine is decides otherwise
    shipped = hardware.load("cpu-laptop")
    words = ["plan", *small.settings(), "--devices", "2", "--measure-top", "2", "--json", str(tmp_path / "plan.json")]
    assert small.main(*words) == 0
    said = capsys.readouterr().out
    steps = json.loads((tmp_path / "plan.json").read_text())["measured"]["steps"]
    assert len(steps) == 2
    assert all(step["measured_s"] > 0 and step["before_s"] > 0 for step in steps)
    assert re.search("layout +measured s +before +after", said)
    assert f"written: {hardware.own_path()}" in said
    assert hardware.load(hardware.OWN).memory_bytes == shipped.memory_bytes
    assert hardware.load("cpu-laptop") == shipped


def test_one_step_refits_nothing(tmp_path: Path) -> None:
    """What a fit is worth is said by steps that had no part in it, and there are none."""
    machine, job = hardware.load("cpu-laptop"), Job(model={"source": "preset:gpt2"}, train={"global_batch": 4})
    layout, model = Layout("dp=1"), presets.preset("gpt2")
    step = TimedStep(origin="5 steps", job=job, model=model, layout=layout, step_s=1.0)
    fit = fit_of([step], [programs_of(model, job, layout, 2)], machine)
    calibration = calibrated([step], fit, machine, tmp_path / "own.toml", [])
    assert calibration.hardware == machine
    assert "nothing written: one step" in calibration.to_text()
    assert not (tmp_path / "own.toml").exists()


@pytest.mark.parametrize(
    ("load", "cores", "is_busy"),
    [(7.0, 2, True), (1.9, 2, False), (1.2, 1, False), (40.0, 64, True), (20.0, 64, False)],
)
def test_a_measurement_on_a_busy_machine_says_so(load, cores, is_busy, monkeypatch):
    monkeypatch.setattr("psutil.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    lines = profile.busy()
    assert [f"the load was {load:.1f} on {cores} CPU cores" in line for line in lines] == [True] * is_busy


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
