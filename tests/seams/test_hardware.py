"""A hardware profile is one TOML file: `abacus.toml`, here in the test folder, is planned for and simulated on.

One that is shipped lies in `src/samestep/profiles`: each file there is a name that the command line knows. One of a device
that samestep does not run on lies in `benchmarks/machines`, and is loaded by its path.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.hardware import load, profiles
from samestep.layout import Layout
from tests.small import main

PROFILE = Path(__file__).parent / "abacus.toml"
MACHINES = sorted((Path(__file__).parents[2] / "benchmarks" / "machines").glob("*.toml"))
GPT2 = ("--set", "model.source=preset:gpt2", "--set", "train.global_batch=16", "--set", "numerics.precision=bf16")


def simulated(profile: Path, folder: Path) -> float:
    """Return the seconds of a step that the command line writes."""
    file = folder / "numbers.json"
    assert main("simulate", *GPT2, "--layout", "dp=4 microbatch=1", "--hardware", profile, "--json", file) == 0
    step_s: float = json.loads(file.read_text())["step_s"]
    return step_s


def test_it_is_simulated_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number that is changed in the file shows in what is predicted: links of no speed make every step longer."""
    slow = tmp_path / "slow.toml"
    slow.write_text(PROFILE.read_text().replace("bytes_per_s = 40e9", "bytes_per_s = 40e5"))
    assert simulated(PROFILE, tmp_path) < simulated(slow, tmp_path)
    said = capsys.readouterr().out
    assert "abacus" in said
    assert "slow" in said


def test_it_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main("plan", *GPT2, "--devices", 8, "--hardware", PROFILE, "--json", file) == 0
    assert "abacus" in capsys.readouterr().out
    assert Layout(json.loads(file.read_text())["best"][0]["layout"]).world_size == 8


@pytest.mark.parametrize("file", MACHINES, ids=lambda file: file.stem)
def test_a_machine_of_the_benchmarks_is_of_the_same_form_and_not_shipped_too(file: Path) -> None:
    assert load(file).name == file.stem
    assert file.stem not in profiles()
