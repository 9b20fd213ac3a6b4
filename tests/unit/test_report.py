"""The log, the screen and the TensorBoard events of a run, without a run."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.output import output_file
from samestep.runtime.step_report import StepReport
from samestep.training.metrics import Metrics, Screen


def _report(step: int, **changes: Any) -> StepReport:
    values = {
        "loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens": 128, "step_s": 0.25, "tokens_per_s": 512.0,
        "memory_bytes": 2**28,
    }  # fmt: skip
    return StepReport(step=step, **(values | changes))


def _write(folder: Path, first: int, *reports: StepReport) -> Metrics:
    metrics = Metrics(folder, first)
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


def test_what_is_not_finite_is_null_and_told(tmp_path: Path) -> None:
    _write(tmp_path, 0, _report(1, loss=math.nan, grad_norm=math.inf, skipped=True, note="layer 3 is at fault"))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row["loss"] is row["grad_norm"] is None
    assert (row["skipped"], row["note"]) == (True, "layer 3 is at fault")


@pytest.mark.parametrize(
    "torn",
    ["", '{"step": 4, "lo', '{"step": 4, "loss": 1}\n{"st', "\x00\x00\x00", '17\n{"step": 4}\n', "null"],
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
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    _write(tmp_path, 0, _report(1))
    assert len(_rows(tmp_path)) == 1
    assert not (tmp_path / "tensorboard").exists()


def test_a_whole_file_replaces_the_old_one_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.toml"
    output_file.write_whole(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(output_file.os, "fsync", _raise)
        with pytest.raises(OSError, match="full"):
            output_file.write_whole(path, "new")
    assert path.read_text() == "old"
    output_file.write_whole(path, "new")
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
