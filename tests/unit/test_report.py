"""The log, the screen and the TensorBoard events of a run, without a run."""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib.machinery
import importlib.util
import io
import json
import math
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from samestep import hardware
from samestep.errors import JobError
from samestep.job import Job
from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec
from samestep.output import durable_files
from samestep.runtime.recording.sums import StepSums
from samestep.runtime.step_report import StepReport
from samestep.training import trackers
from samestep.training.metrics import Metrics, Screen, Speed, scalars_of
from tests import small


def _report(step: int, **changes: Any) -> StepReport:
    values = {
        "loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens": 128, "step_s": 0.25, "tokens_per_s": 512.0,
        "memory_bytes": 2**28,
    }  # fmt: skip
    return StepReport(step=step, **(values | changes))


def _write(folder: Path, first: int, *reports: StepReport) -> Metrics:
    metrics = Metrics(folder, first, trackers.open_trackers(Job(), folder, first))
    for one in reports:
        metrics.write(one)
    metrics.close()
    return metrics


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_the_plain_keys_even_where_they_are_nothing(tmp_path: Path) -> None:
    _write(tmp_path, 0, _report(1, lr=0.0, grad_norm=0.0, tokens=0, tokens_per_s=0.0))
    assert _rows(tmp_path) == [
        {
            "step": 1, "loss": 2.5, "grad_norm": 0.0, "lr": 0.0, "tokens": 0, "step_s": 0.25, "tokens_per_s": 0.0,
            "data_wait_s": 0.0, "memory_bytes": 2**28,
        }
    ]  # fmt: skip


def test_what_the_allocator_of_a_gpu_has_taken_is_shown_and_kept(tmp_path, capsys):
    report = _report(1, memory_bytes=2**28, reserved_bytes=2**29)
    _write(tmp_path, 0, report)
    assert list(_rows(tmp_path)[0].items())[-2:] == [("memory_bytes", 2**28), ("reserved_bytes", 2**29)]
    assert scalars_of(report, None)["memory/reserved_bytes"] == 2**29
    Screen(0, 2).show(report)
    Screen(0, 2).show(_report(2))
    on_gpu, on_cpu = capsys.readouterr().out.splitlines()
    assert on_gpu.endswith("256 MiB (512 reserved)")
    assert on_cpu.endswith("256 MiB")


def test_what_is_not_finite_is_null_and_told(tmp_path: Path) -> None:
    _write(tmp_path, 0, _report(1, loss=math.nan, grad_norm=math.inf, skipped=True, note="layer 3 is at fault"))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row["loss"] is row["grad_norm"] is None
    assert (row["skipped"], row["note"]) == (True, "layer 3 is at fault")


@pytest.mark.parametrize(
    "torn", ["", '{"step": 4, "lo', '{"step": 4, "loss": 1}\n{"st', "\x00\x00\x00", '17\n{"step": 4}\n', "null"]
)
def test_a_resumed_log_has_no_gap_and_no_double(torn: str, tmp_path: Path) -> None:
    _write(tmp_path, 0, *(_report(step, loss=float(step)) for step in (1, 2, 3)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    metrics = _write(tmp_path, 2, *(_report(step, loss=step + 0.5) for step in (3, 4)))
    assert [(row["step"], row["loss"]) for row in _rows(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]
    assert metrics.last_loss == 4.5


def test_the_last_loss_is_known_without_a_new_step(tmp_path: Path) -> None:
    assert _write(tmp_path, 0).last_loss is None
    _write(tmp_path, 0, _report(1, loss=7.0), _report(2, loss=6.0))
    assert _write(tmp_path, 1).last_loss == 7.0


def test_a_line_is_in_the_file_when_it_is_written(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.write(_report(1))
    assert len(_rows(tmp_path)) == 1
    metrics.sync()
    metrics.close()


def test_the_events_have_the_names_of_the_design(tmp_path: Path) -> None:
    _write(tmp_path, 0, _report(1), _report(2))
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    content = events.read_bytes()
    for name in ("train/loss", "train/grad_norm", "train/lr", "perf/tokens_per_s", "perf/step_ms", "memory/peak_bytes"):
        assert content.count(name.encode()) == 2, name


def test_a_run_without_tensorboard_has_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else found(name))
    _write(tmp_path, 0, _report(1))
    assert len(_rows(tmp_path)) == 1
    assert not (tmp_path / "tensorboard").exists()


def test_a_whole_file_replaces_the_old_one_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.toml"
    durable_files.write_whole(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _raise)
        with pytest.raises(OSError, match="full"):
            durable_files.write_whole(path, "new")
    assert path.read_text() == "old"
    durable_files.write_whole(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.toml"]


def _raise(_: int) -> None:
    raise OSError("the disk is full")


def _shown(first: int, last: int, monkeypatch: pytest.MonkeyPatch, terminal: bool = False, **changes: Any) -> str:
    """What a run of the steps after `first` writes."""

    class Out(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    out = Out()
    monkeypatch.setattr(sys, "stdout", out)
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    screen = Screen(first, last)
    with screen.live():
        for step in range(first + 1, last + 1):
            screen.show(_report(step))
    return out.getvalue()


def test_lines_are_few_and_the_first_and_last_are_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _shown(0, 1001, monkeypatch).splitlines()
    assert 40 <= len(lines) <= 43
    assert lines[0] == "step      1/1001  loss 2.5000  norm 0.500  lr 1.00e-03  512 tok/s  256 MiB"
    assert lines[-1].startswith("step   1001/1001  loss 2.5000")
    assert len(_shown(995, 1001, monkeypatch).splitlines()) == 6
    assert _shown(5, 5, monkeypatch) == ""


def test_a_live_line_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in _shown(0, 3, monkeypatch)
    assert "\x1b[?25l" in _shown(0, 3, monkeypatch, terminal=True)
    assert "\x1b" not in _shown(0, 3, monkeypatch, terminal=True, CI="true")
    assert "\x1b[38" in _shown(0, 3, monkeypatch, terminal=True)
    assert "\x1b[38" not in _shown(0, 3, monkeypatch, terminal=True, NO_COLOR="1")


def test_a_note_and_a_stop_are_shown_whatever_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    screen = Screen(0, 10_000)
    screen.show(_report(2, note="overflow in layer 1", skipped=True))
    screen.show(_report(3))
    screen.show(_report(4, stop=True))
    assert [line[:40].rstrip() for line in out.getvalue().splitlines()] == [
        "step 2: skipped, overflow in layer 1",
        "step      4/10000  loss 2.5000  norm 0.5",
    ]


def test_a_terminal_that_lacks_a_character_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    Screen(0, 1).say("h\u00e9llo [bold] \ufffd")
    assert raw.getvalue() == b"h?llo [bold] ?\n"
    sys.stdout.detach()


def test_a_step_that_waits_for_data_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(0, 2)
    screen.show(_report(1, step_s=1.0, data_wait_s=0.25))
    screen.show(_report(2, step_s=1.0, data_wait_s=0.01))
    first, second = capsys.readouterr().out.splitlines()
    assert "25% waiting for data" in first
    assert "waiting" not in second


SPEED = Speed(flops=10**12, devices=2, peak_flops_per_s=4e12)


def test_utilisation_is_a_fraction_of_the_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(tmp_path, 0, speed=SPEED)
    metrics.write(_report(1))  # in a quarter of a second
    metrics.close()
    (row,) = _rows(tmp_path)
    assert (row["tflops_per_device"], row["mfu"]) == (2.0, 0.5)
    Screen(0, 1, SPEED).show(_report(1))
    assert "2.0 TFLOP/s (50.0%)  256 MiB" in capsys.readouterr().out
    assert "perf/mfu" not in scalars_of(_report(1), Speed(10**12, 2, None))
    assert Speed(10**12, 1, 1e9).mfu(1.0) is None, "a profile of a busy machine holds less than the peak"


def test_masked_positions_of_a_causal_attention_are_no_flops() -> None:
    linear = Product(rows=4, inner=3, columns=5)
    causal = Product(rows=4, inner=6, columns=4, factors="causal")
    frozen = Product(rows=4, inner=2, columns=2, factors="frozen")
    products = (linear, causal, frozen)
    layer = LayerSpec(name="a", modules=("a",), products=products, forward_flops=sum(one.flops for one in products))
    spec = ModelSpec(name="one", layers=(layer,), params=())
    assert spec.sample_flops == 3 * linear.flops + 3 * causal.flops // 2 + 2 * frozen.flops


def test_a_gpu_is_known_by_the_name_of_its_driver() -> None:
    known = hardware.of_device("NVIDIA H100 80GB HBM3")
    assert known is not None
    assert known.name == "h100x8"
    assert hardware.of_device("NVIDIA H100 PCIe") is None  # another peak


def test_some_steps_are_logged(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0, log_every=4)
    for step in range(1, 11):
        metrics.write(_report(step, note="overflow" if step == 6 else ""), is_last=step == 10)
    metrics.close()
    assert [row["step"] for row in _rows(tmp_path)] == [1, 4, 6, 8, 10]


class _Service(types.ModuleType):
    """A stand-in for wandb and for mlflow, which keeps what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.params: dict[str, Any] = {}
        self.ended = 0
        self.info = types.SimpleNamespace(run_id="entry")

    def init(self, **words: Any) -> _Service:
        self.started.append(words)
        return self

    start_run = init

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.logged.append((step, scalars))

    log_metrics = log

    def log_params(self, params: dict[str, Any]) -> None:
        assert len(params) <= 100
        self.params |= params

    def finish(self) -> None:
        self.ended += 1

    end_run = finish


@pytest.mark.parametrize("word", trackers.SERVICES)
def test_a_resumed_run_continues_its_entry(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, service = Job(run={"report": word}), _Service(word)
    with pytest.raises(JobError, match=f"{word} is not installed here. Use pip install {word}"):
        trackers.check(job)
    monkeypatch.setitem(sys.modules, word, service)
    trackers.check(job)
    for first in (0, 1):
        metrics = Metrics(tmp_path, first, trackers.open_trackers(job, tmp_path, first))
        metrics.write(_report(first + 1))
        metrics.sync()
        metrics.close()
    assert [step for step, _ in service.logged] == [1, 2]
    assert service.logged[0][1]["train/loss"] == 2.5
    assert word == "wandb" or service.params["train.seed"] == 0
    ids = [words.get("id", words.get("run_id")) for words in service.started]
    assert ids[1] == (ids[0] or "entry")
    assert service.ended == 2


@pytest.mark.parametrize("word", [*trackers.SERVICES, trackers.TENSORBOARD])
def test_the_time_of_a_step_reaches_trackers_axis_by_axis(word, tmp_path, monkeypatch):
    service = _Service(word)
    if word in trackers.SERVICES:
        monkeypatch.setitem(sys.modules, word, service)
    waits = {f"wait_{axis}_s": 0.5**number for number, axis in enumerate(("dp_replicate", "tp", "pp", "cp", "world"))}
    sums = StepSums(1, {"forward_s": 3.0, "backward_s": 6.0, "sent": 7.0, **waits})
    opened = trackers.open_trackers(Job(run={"report": word}), tmp_path, 0)
    with contextlib.closing(Metrics(tmp_path, 0, opened)) as metrics:
        metrics.write(_report(2), sums=sums)
    seconds = {**waits, "forward_s": 3.0, "backward_s": 6.0}
    expected = {f"time/{name.removesuffix('_s')}_ms": value * 1e3 for name, value in seconds.items()}
    assert {*waits} <= {*_rows(tmp_path)[0]["time"]}
    if word in trackers.SERVICES:
        ((step, logged),) = service.logged
        assert step == 2
        assert {name: value for name, value in logged.items() if name.startswith("time/")} == expected
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    assert all(events.read_bytes().count(name.encode()) == 1 for name in expected)


def test_a_disk_that_is_full_at_the_start_costs_the_numbers_and_not_the_run(tmp_path, monkeypatch):
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trackers, "_STARTS", {"tensorboard": full})
    with contextlib.closing(Metrics(tmp_path, 0, trackers.open_trackers(Job(), tmp_path, 0))) as metrics:
        with pytest.warns(UserWarning, match="tensorboard.* does not take .* No space left .*, and the run continues"):
            metrics.write(_report(1))
        metrics.write(_report(2))
    assert len(_rows(tmp_path)) == 2


def test_a_service_that_fails_is_named_once_and_the_run_goes_on(tmp_path, monkeypatch):
    job, service = Job(run={"report": "mlflow"}), _Service("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", service)
    metrics = Metrics(tmp_path, 0, trackers.open_trackers(job, tmp_path, 0))
    works, service.log_metrics = service.log_metrics, lambda scalars, step: 1 / 0
    with pytest.warns(
        UserWarning, match=r'run.report = "mlflow" does not take the numbers of step 1 .ZeroDivisionError'
    ):
        metrics.write(_report(1))
    metrics.write(_report(2))
    service.log_metrics = works
    metrics.write(_report(3, held_out={"held_out": 1.0, "held_out/right (all)": 0.5}))
    metrics.close()
    ((step, scalars),) = service.logged
    assert (step, scalars["held_out/held_out.right _all_"], len(_rows(tmp_path))) == (3, 0.5, 3)


def test_a_function_of_the_user_is_given_each_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_reports.py").write_text(
        "seen = []\n\ndef keep(report):\n    seen.append(report.loss)\n\ndef fail(report):\n    return {}['speed']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    job = Job(run={"report": ["own_reports:keep"]})
    trackers.check(job)
    _write_to(tmp_path, job, _report(1), _report(2, loss=1.5))
    assert sys.modules.pop("own_reports").seen == [2.5, 1.5]
    with pytest.raises(JobError, match=r"step 1: run.report = \"own_reports:fail\" fails: KeyError: 'speed' .*:7"):
        _write_to(tmp_path, Job(run={"report": "own_reports:fail"}), _report(1))
    with pytest.raises(JobError, match=r"own_reports has no function 'kep'.*did you mean 'keep'"):
        trackers.check(Job(run={"report": "own_reports:kep"}))
    sys.modules.pop("own_reports")


def _write_to(folder: Path, job: Job, *reports: StepReport) -> None:
    with contextlib.closing(Metrics(folder, 0, trackers.open_trackers(job, folder, 0))) as metrics:
        for one in reports:
            metrics.write(one)


def test_a_profile_has_the_names_of_the_program(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = {"run__profile": "2:2", "train__steps": 3, "run__log_every": 2, "train__watch_every": 0}
    assert small.train("--layout", "dp=2 microbatch=2", "--out", out, **words) == 0
    for rank in range(2):
        with gzip.open(out / "profile" / f"steps-2-2.rank{rank}.json.gz", "rt") as file:
            names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
        assert names["samestep::task F0"] == names["samestep::task B1"] == 1
        assert names["samestep::op forward:model.layers.1"] == 2
        assert names["samestep::owner scalars"] == 1
    rows = small.metrics(out, timings=True)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["tflops_per_device"] > 0 for row in rows)


class _FullDisk(io.BytesIO):
    """A file whose disk is full after its first bytes."""

    is_full = False

    def write(self, data: Any) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)

    def fileno(self) -> int:
        return 2


def test_a_full_disk_costs_tensorboard_its_numbers_and_not_the_run(tmp_path, monkeypatch):
    """More steps than the queue of tensorboardX's own thread holds."""
    file = _FullDisk()
    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda _: file)
    tracker = trackers.open_receiver("tensorboard", Job(), tmp_path, 0, "a run")
    file.is_full = True
    with pytest.warns(
        UserWarning, match=r"a run does not take the numbers of step 1 .*No space left.* the run continues"
    ):
        tracker.add(_report(1), {"train/loss": 1.0})
    for step in range(2, 40):
        tracker.add(_report(step), {"train/loss": 1.0})
    tracker.flush()
    tracker.close()


@pytest.mark.parametrize("kind", ["full", "closed pipe"])
def test_what_a_log_cannot_print_is_lost(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    with os.fdopen(descriptor, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        screen = Screen(0, 50, log_every=1)
        with screen.live():
            for step in range(1, 40):
                screen.show(_report(step))
        print("lost", file=durable_files.LastingStream(stream), flush=True)
        monkeypatch.undo()
