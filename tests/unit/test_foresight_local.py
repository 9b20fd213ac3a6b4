"""The benchmark that predicts this machine: what is held is what was said, in every layout that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import foresight_local


def test_states_are_exact_and_activations_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(foresight_local, "LAYOUTS", ("dp=2 zero=1 microbatch=4", "dp=1 tp=2", "dp=1 pp=2 microbatch=8"))
    monkeypatch.setattr(foresight_local, "ROUNDS", 1)
    file = tmp_path / "found.json"
    assert foresight_local.main(["--hardware", "cpu-laptop", "--steps", "1", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.count("exact") == 3
    assert " NO " not in said
    for row in json.loads(file.read_text()):
        predicted = row["said"]["memory_bytes"][0]["activations"]
        assert predicted == pytest.approx(row["seen"]["activations"], rel=0.02)
        assert row["seen"]["step_s"][0] > 0


def test_no_such_hardware_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        foresight_local.main(["--hardware", "nope"])
    assert stopped.value.code == 2
    assert "no hardware 'nope'" in capsys.readouterr().err
