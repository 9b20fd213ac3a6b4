"""The benchmark that predicts this machine: what is held is what was said, in every layout that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import foresight
import foresight_local
import single_gpu
import step_times
from foresight_workers import Workers

from samestep import hardware


def test_states_are_exact_and_peaks_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(foresight_local, "LAYOUTS", ("dp=2 zero=1 microbatch=4", "dp=1 tp=2", "dp=1 pp=2 microbatch=8"))
    monkeypatch.setattr(foresight_local, "ROUNDS", 1)
    file = tmp_path / "found.json"
    assert (
        foresight_local.main(["--device", "cpu", "--hardware", "cpu-laptop", "--steps", "1", "--json", str(file)]) == 0
    )
    said = capsys.readouterr().out
    assert said.count("exact") == 3
    assert " NO " not in said
    for row in json.loads(file.read_text()):
        rest = row["held"]["peak"]
        predicted = row["said"]["memory_bytes"][0]["peak"]
        assert predicted == pytest.approx(rest + row["seen"]["in_step"], rel=0.01), row["layout"]
        assert row["seen"]["step_s"][0] > 0


def test_a_device_alone_makes_rows_that_the_record_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.ones(1 << 20)  # what this process holds is nobody's peak
    monkeypatch.setattr(step_times, "FIRST_STEPS", 1)
    monkeypatch.setattr(single_gpu, "GROUPS", 1)
    monkeypatch.setattr(single_gpu, "SIZES", {"tiny": single_gpu.Size(2, 64, 4, 176)})
    chosen = [single_gpu.Setting("tiny", 2, recompute) for recompute in ("none", "full")]
    seen = single_gpu.measured(chosen, 1, "cpu", sequence=64)
    for line in single_gpu.compared(seen, hardware.load("h200x8"), sequence=64):
        assert line[-2] == pytest.approx(0, abs=1.0), "per cent of the peak"
    del held
    short = single_gpu.Seen(chosen[0], seen[0].spec)
    assert "does not fit" not in str(single_gpu.compared([short], hardware.load("h200x8"), sequence=64))
    columns = foresight_local.SAMPLE.read_text().partition("\n")[0].split(",")
    single_gpu.write_rows(tmp_path / "rows" / "own.csv", columns, [*seen, short], "NVIDIA H200", sequence=64)
    rows, _ = foresight.read_rows(tmp_path / "rows")
    outcomes = foresight.predict_all(rows, Workers(rows))
    assert [one.reason for one in outcomes[:2]] == ["", ""]
    assert all(one.predicted_s > 0 and one.measured_bytes > 0 for one in outcomes[:2])
    assert [one.layout for one in outcomes[:2]] == [str(setting.layout) for setting in chosen]
    assert outcomes[2].out_of_memory


def test_a_gpu_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        foresight_local.main(["--device", "cuda"])
    assert stopped.value.code == 2
    assert "no GPU here" in capsys.readouterr().err


def test_no_such_hardware_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        foresight_local.main(["--hardware", "nope"])
    assert stopped.value.code == 2
    assert "no hardware 'nope'" in capsys.readouterr().err
