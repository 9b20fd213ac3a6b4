"""A run folder belongs to one run; it is resumed without being told how, and keeps going where a disk or a worker fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import JobError, SaveError
from samestep.output import durable_files
from samestep.program.recorded import read_record
from samestep.runtime.checkpoints import manifests
from samestep.runtime.interpreter import Interpreter
from samestep.runtime.recording.step_recorder import ASKED_STEPS
from samestep.training import elastic, run_folder
from tests import small

pytestmark = pytest.mark.usefixtures("stop_signals", "nothing_is_left_running")


KEYS = {"checkpoint.every": 2, "checkpoint.keep": 9}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which nothing fails."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert small.train("--layout", "dp=2", "--out", run, **KEYS) == 0
    return run


def test_a_second_run_in_a_folder_is_refused_and_usr1_saves_and_usr2_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, talk = tmp_path / "run", tmp_path / "talk"
    words = ["train", *small.settings(**{"train.steps": 100_000}), "--layout", "dp=2", "--out", str(run)]
    pid = small.in_background(words, talk)
    small.wait_for(lambda: small.num_steps(run) >= 2)
    assert small.main("train", "--auto-resume", "--out", run, "--steps", "3") == 2
    assert f"{run} is in use by process {pid} on " in capfd.readouterr().err
    os.kill(pid, signal.SIGUSR1)
    small.wait_for(lambda: (run / "checkpoints").exists() and any((run / "checkpoints").glob("step-*")))
    os.kill(pid, signal.SIGUSR2)  # the launcher hears it, and every rank records
    small.wait_for(lambda: "recorded into" in (talk / "out").read_text())
    (last,) = re.findall(r"steps \d+ to (\d+) are recorded into", (talk / "out").read_text())
    small.wait_for(lambda: small.num_steps(run) > int(last) + 2)  # it goes on
    os.kill(pid, signal.SIGTERM)
    assert small.status_of(pid) == 143
    assert len(small.checkpoints(run)) == 2
    steps = [[*read_record(path).steps] for path in (run / "record").glob("steps-*.jsonl")]
    assert len(steps) == 2
    assert steps[0] == steps[1]
    assert len(steps[0]) == ASKED_STEPS
    assert not (run / ".lock").exists()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    pid = os.fork()
    if pid == 0:
        with run_folder.claim_folder(tmp_path / "run", is_new=True):
            ready.touch()
            signal.pause()
    small.wait_for(ready.exists)
    with pytest.raises(JobError, match=f"is in use by process {pid} on .*: another --out starts another run"):
        run_folder.claim_folder(tmp_path / "run", is_new=True).__enter__()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with run_folder.claim_folder(tmp_path / "run", is_new=True):
        assert (tmp_path / "run" / ".lock").exists()
    assert (tmp_path / "run").exists(), "it was there before"
    assert [*(tmp_path / "run").iterdir()] == []


def test_a_run_that_fails_in_its_first_step_leaves_its_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Interpreter, "_backward", _fails_at(0))
        assert small.train("--layout", "dp=2", "--out", run) == 1
    assert "broken cable" in capfd.readouterr().err
    assert not run.exists()
    assert small.train("--layout", "dp=2", "--out", run, "--steps", "1") == 0


def _fails_at(step: int, times: Path | None = None) -> Any:
    """A backward that fails in one step; as often as a file has bytes, if one is given."""
    backward = Interpreter._backward

    def failing(interpreter: Interpreter, task: Any, loss: Any) -> None:
        left = times.read_bytes() if times else b" "
        if interpreter.step == step + 1 and interpreter.assembly.parallel.mesh.rank == 0 and left:
            if times:
                times.write_bytes(left[1:])
            raise RuntimeError(f"broken cable {len(left)}")
        backward(interpreter, task, loss)

    return failing


def test_auto_resume_always_works(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, keys = tmp_path / "run", KEYS
    words: list[str | Path] = ["--auto-resume", "--layout", "dp=2", "--out", run]
    assert small.train("--auto-resume") == 2
    assert "--out DIR names the folder" in capfd.readouterr().err
    assert small.train(*words, "--steps", "1", **keys) == 0  # nothing is there: it starts
    shutil.rmtree(run / "checkpoints")
    assert small.train(*words, "--steps", "5", **keys) == 0  # a run that died before its first checkpoint starts again
    newest = run / "checkpoints" / "step-000005"
    (newest / "manifest.json").write_text("{")
    capfd.readouterr()
    assert small.main("train", *words) == 0  # a damaged one is passed over, and kept aside
    said = capfd.readouterr().out
    assert f"{newest}/manifest.json is missing or damaged; once {newest} is removed, step-000004 is the newest" in said
    assert "resumes after step 4" in said
    assert [name for name in small.checkpoints(run) if name.startswith("damaged-step-000005-")]
    assert small.metrics(run) == small.metrics(whole)
    small.assert_equal(*(small.stored(path / "checkpoints" / "step-000006") for path in (run, whole)))
    before = small.files_of(run)
    assert small.main("train", *words) == 0  # and one that is finished is left as it is
    assert f"{run} is finished: step 6 was its last" in capfd.readouterr().out
    assert small.files_of(run) == before


def test_what_a_resume_may_change_is_said_and_written_down(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert small.train("--ranks", "1", "--out", run, "--steps", "2", **{"optimizer.lr": 0.1}) == 0
    change = ["--set", "optimizer.lr=0.0"]
    assert small.main("train", "--resume", "--out", run, *change) == 2
    assert "with another optimizer.lr: resume with the job in its run folder; --allow optimizer.lr lets it change" in (
        capfd.readouterr().err
    )
    more = ["--set", "train.steps=7", "--layout", "dp=2", "--allow", "optimizer.lr"]
    assert small.main("train", "--resume", "--out", run, *change, *more) == 0
    expected = [
        "after step 2: optimizer.lr is 0.0, which was 0.1",
        "after step 2: train.steps is 7, which was 6",
        "after step 2: the layout is 'dp=2', which was 'dp=1'",
    ]
    said = capfd.readouterr().out
    assert all(line in said for line in expected)
    assert json.loads((run / "summary.json").read_text())["changes"] == expected
    newest = run / "checkpoints" / "step-000007"
    assert manifests.read_manifest(newest)["changes"] == expected
    before, after = (small.whole(run / "checkpoints" / name) for name in ("step-000002", "step-000007"))
    values = {name for name in before if name.startswith("value/")}
    small.assert_equal({name: before[name] for name in values}, {name: after[name] for name in values})


def test_checkpoints_that_cannot_be_written_do_not_end_a_run_unless_they_are_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write = durable_files.write_new

    def full(path: Path, pieces: Any) -> str:
        if ".step-000004" in str(path) or (always and ".step-000006" in str(path)):
            raise OSError(28, os.strerror(28), str(path))
        return write(path, pieces)

    monkeypatch.setattr(durable_files, "write_new", full)
    always = False
    keys = {"checkpoint.every": 2}
    for layout, background in (("dp=1", False), ("dp=2", True)):
        run = tmp_path / f"run-{background}"
        more = {"checkpoint.background": background}
        assert small.train("--layout", layout, "--out", run, **keys, **more) == 0
        said = capfd.readouterr().out
        assert "warning: the checkpoint of step 4 cannot be written: rank 0: No space left on device" in said
        assert f"the newest whole checkpoint is {run}/checkpoints/step-000002; training continues" in said
        assert small.checkpoints(run) == ["step-000002", "step-000006"]
    stop = {"checkpoint.on_failure": "stop"}
    assert small.train("--layout", "dp=2", "--out", tmp_path / "stops", **keys, **stop) == 1
    error = capfd.readouterr().err
    assert error.startswith("samestep: the checkpoint of step 4 cannot be written: rank 0: No space left on device")
    assert error.count("\n") == 1
    always = True
    assert small.train("--layout", "dp=1", "--out", tmp_path / "last", **keys) == 1
    assert "the checkpoint of step 6 cannot be written" in capfd.readouterr().err
    assert issubclass(SaveError, RuntimeError)


def test_some_checkpoints_stay_for_ever(tmp_path: Path) -> None:
    keys = {"checkpoint.every": 1, "checkpoint.keep": 1, "checkpoint.keep_every": 2}
    assert small.train("--ranks", "1", "--out", tmp_path / "run", "--steps", "5", **keys) == 0
    assert small.checkpoints(tmp_path / "run") == ["step-000002", "step-000004", "step-000005"]


def test_a_failed_worker_is_started_again_until_its_error_comes_twice(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, times, keys = tmp_path / "run", tmp_path / "times", KEYS
    pauses: list[float] = []
    monkeypatch.setattr(elastic.time, "sleep", pauses.append)
    monkeypatch.setattr(elastic.restarting, "__defaults__", (pauses.append,))
    monkeypatch.setattr(Interpreter, "_backward", _fails_at(4, times))
    times.write_bytes(b"..")
    capfd.readouterr()
    assert small.train("--layout", "dp=2", "--out", run, **keys, **{"run.restarts": 3}) == 0
    said = capfd.readouterr().out
    assert f"restart 1 of 3 in 1 s, from {run}/checkpoints/step-000004" in said
    assert f"restart 2 of 3 in 2 s, from {run}/checkpoints/step-000004" in said
    assert pauses == [1.0, 2.0]
    assert small.metrics(run) == small.metrics(whole)
    monkeypatch.setattr(Interpreter, "_backward", _fails_at(0))
    assert small.train("--layout", "dp=1", "--out", tmp_path / "never", **{"run.restarts": 9}) == 1
    assert "the same error came twice after step 0: no restart helps" in capfd.readouterr().err


def test_a_restart_of_a_run_with_first_weights_keeps_what_it_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run, times = tmp_path / "whole", tmp_path / "run", tmp_path / "times"
    assert small.train("--ranks", "1", "--out", tmp_path / "first", "--steps", "1") == 0
    words: list[str | Path] = ["--ranks", "1", "--init-from", tmp_path / "first"]
    keys = {"checkpoint.every": 2, "run.restarts": 1}
    assert small.train(*words, "--out", whole, **keys) == 0
    monkeypatch.setattr(elastic.restarting, "__defaults__", (lambda pause_s: None,))
    monkeypatch.setattr(Interpreter, "_backward", _fails_at(4, times))
    times.write_bytes(b".")
    assert small.train(*words, "--out", run, **keys) == 0
    assert small.metrics(run) == small.metrics(whole)


def _rank_3_never_comes_far(interpreter: Interpreter, task: Any, loss: Any) -> None:
    """A backward in which the last of four ranks dies in the third step."""
    if interpreter.step == 3 and interpreter.assembly.parallel.mesh.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    _backward(interpreter, task, loss)


_backward = Interpreter._backward


@pytest.mark.parametrize(
    ("layout", "left"),
    [
        ("dp=4", "dp=3"),
        pytest.param("dp=2 tp=2", "dp=1 tp=2", marks=pytest.mark.nightly),
        pytest.param("auto", "", marks=pytest.mark.nightly),
    ],
)
def test_a_worker_that_fails_wherever_it_starts_is_left_out(
    layout: str,
    left: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, keys = tmp_path / "run", {"checkpoint.every": 2, "run.restarts": 3}
    monkeypatch.setattr(elastic.restarting, "__defaults__", (lambda pause_s: None,))
    monkeypatch.setattr(Interpreter, "_backward", _rank_3_never_comes_far)
    capfd.readouterr()
    assert small.train("--layout", layout, "--ranks", "2:4", "--out", run, **keys) == 0
    assert re.search(rf"continues with [23] of 4 ranks, layout '{left}", capfd.readouterr().out)
    assert small.losses(run) == pytest.approx(small.losses(whole), rel=1e-5)


def test_where_no_layout_of_fewer_ranks_is_allowed_the_run_says_what_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic.restarting, "__defaults__", (lambda pause_s: None,))
    monkeypatch.setattr(Interpreter, "_backward", _rank_3_never_comes_far)
    words = ["--layout", "tp=4", "--ranks", "1:4", "--out", str(tmp_path / "run")]
    assert small.train(*words) == 2
    assert "run.restarts = 0. Use --set run.restarts=3" in capfd.readouterr().err
    assert small.train(*words, **{"run.restarts": 2}) == 1
    assert (
        "3 ranks are left, and no layout of 1 to 3 ranks is 'dp=1 tp=4' with smaller data degrees. Use a number of ranks that "
        "4 divides, or --layout auto, which plans again"
    ) in capfd.readouterr().err
