"""The benchmark of one GPU at toy size: on a CPU, on the simulated device, and with parts that fail."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_correctness
import gpu_rows
import gpu_throughput

from samestep.runtime.processes.join import RankInfo
from tests.device.simulated_cuda import refusal
from tests.pool import pool

DEVICES = ["cpu"] if refusal() else ["cuda", pytest.param("cpu", marks=pytest.mark.nightly)]
"""By default the simulated device, where there can be one: on it the same parts run, and wait for it."""
CPU = RankInfo(0, 0, 1, 1, torch.device("cpu"))


def toy(rank: int, world: int, device: str, rows: str) -> tuple[list[int], str]:
    """Return the exit codes of the parts that run in one process, and what they print."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        words = ["--toy", "--device", device, "--rows", rows, "--limit-s", "400"]
        codes = [gpu.main(["predict", *words]), gpu.main(["throughput", "--sizes", "toy", *words])]
    return codes, printed.getvalue()


def wrong(rank: int, world: int) -> list[str]:
    """Return what is wrong with the collectives and the waits of a step on the simulated device."""
    place = RankInfo(0, 0, 1, 1, torch.device("cuda", 0))
    return gpu_correctness.wrong_collectives(place) + gpu_correctness.waits_of_a_step(place)


@pytest.mark.parametrize("device", DEVICES)
def test_jobs_are_predicted_and_timed(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpu.json"
    [(codes, printed)] = pool(1, device).run(toy, device, str(file))
    assert codes == [0, 0], printed
    rows = json.loads(file.read_text())
    assert [row["part"] for row in rows] == ["predict"] * 2 + ["throughput"] * 4
    assert all(row["step_s"] > 0 and row["date"] and row["torch"] == torch.__version__ for row in rows)
    for ours, theirs in (rows[2:4], rows[4:]):  # a CPU's compiler fuses a block and a whole model differently
        is_fused = device == "cpu" and "compiled" in ours["name"]
        expected = pytest.approx(theirs["losses"], rel=1e-6) if is_fused else theirs["losses"]
        assert ours["losses"] == expected, "in bf16, to the bit"
    assert (tmp_path / "gpu-profile.toml").is_file()
    monkeypatch.setattr(gpu_rows, "KEPT", file)
    assert "| toy, samestep | samestep |" in gpu_rows.tables()


@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_a_right_device_passes_the_trials() -> None:
    assert pool(1, "cuda").run(wrong) == [[]]


@pytest.mark.parametrize(
    "trial", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "nccl")) for name in gpu_correctness.TRIALS]
)
def test_a_cpu_passes_the_trials(trial: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["correctness", "--toy", "--device", "cpu", "--trials", trial]) == 0
    assert f"{trial}: outcome right" in capfd.readouterr().out


def broken(*_: Any) -> Iterator[Any]:
    raise RuntimeError("no kernel\nand where")
    yield


def other(place: RankInfo, setting: Any, source: Any) -> Iterator[Any]:
    while True:
        yield lambda: 1.0


def test_what_fails_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    contestants = {"broken": broken, "one": other, "another": gpu_throughput.by_hand}
    monkeypatch.setattr(gpu_throughput, "CONTESTANTS", contestants)
    monkeypatch.setattr(gpu_throughput, "COMPILED", (False,))
    sizes = [("toy", gpu_throughput.TOY_SIZES["toy"])]
    failed, one, another = (row for _, row in gpu_throughput.rows(CPU, sizes, time.monotonic() + 600, 1, 1))
    assert failed["error"] == "RuntimeError: no kernel"
    assert "error" not in one
    assert another["error"].startswith("not the losses of one: ")
    late = [row for _, row in gpu_throughput.rows(CPU, sizes, time.monotonic() - 1)]
    assert ["left out" in row["note"] for row in late] == [True] * 3


def test_a_trial_that_finds_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = {"broken": broken, "wrong": lambda kind: iter(["a difference"]), "right": lambda kind: iter(())}
    monkeypatch.setattr(gpu_correctness, "TRIALS", trials)
    assert gpu.main(["correctness", "--toy"]) == 1
    printed = capsys.readouterr().out
    for line in ("broken: outcome RuntimeError: no kernel,", "wrong: outcome a difference,", "right: outcome right,"):
        assert line in printed


def test_every_part_is_started_and_a_failed_one_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    more: list[list[str]] = []
    statuses = iter([1, -9, 0, 0])

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command[2])
        assert command[3] == "--toy"
        more.append(command[4:])
        return subprocess.CompletedProcess(command, next(statuses))

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu.main(["--toy"]) == 1
    assert started == ["correctness", "predict", "throughput", "throughput"]
    assert more == [[], [], ["--sizes", "toy"], ["--sizes", "toy-layers"]]


def test_a_row_is_replaced_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept.json"
    monkeypatch.setattr(gpu_rows, "KEPT", kept)
    assert gpu_rows.tables() == ""
    one, two = (gpu_rows.Measured(name, "2.11", "3.12", "2026-01-02") for name in ("NVIDIA H200", "NVIDIA H100"))
    gpu_rows.write(kept, one, "correctness", "nccl", {"outcome": "right", "seconds": 2.0})
    new = tmp_path / "new.json"
    gpu_rows.write(new, two, "correctness", "nccl", {"outcome": "right", "seconds": 3.0})
    gpu_rows.write(new, one, "correctness", "nccl", {"outcome": "right", "seconds": 4.0})
    gpu_rows.write(new, one, "throughput", "8B", {"loop": "samestep", "error": "out of memory"})
    monkeypatch.setattr(gpu_rows, "KEPT", new)
    table = gpu_rows.tables()
    assert table.count("**NVIDIA H200: ") == 2
    assert "| nccl | right | 4.0 |" in table
    assert "| nccl | right | 2.0 |" not in table
    assert "| 8B | samestep | out of memory |" in table
