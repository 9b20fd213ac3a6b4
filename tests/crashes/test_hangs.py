"""A rank that stands still is named, with what the others wait for, and ended; one that is slow and healthy never is."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.errors import WorkerError
from samestep.job import Job
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.guards import loss_trials
from samestep.runtime.interpreter import Interpreter
from samestep.runtime.processes import hang_watch, workers
from samestep.runtime.processes.hang_watch import HangWatch
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.whereabouts import Whereabouts, _module_in, whereabouts_of
from samestep.runtime.processes.worker import LaunchOptions, failure_of
from samestep.runtime.recording.step_recorder import _Issued
from samestep.training import launch
from samestep.training import rank_part as training
from tests import small


def _at(
    calls: int, call: str = "", step: int = 7, median_s: float = 0.1, task: str = "", apart: str = "", **more: Any
) -> Whereabouts:
    return Whereabouts(
        {"world": calls}, call, "model.py:3" if call else "", task, 0 if apart else step, median_s, apart, **more
    )


def _first(call: str = "", **more: Any) -> Whereabouts:
    """A rank in the first step, or in a step of a loop of one's own, where it may work for long."""
    return _at(3, call, step=1, median_s=0.0, may_work=not call, **more)


def _watch(
    history: Any, until_s: float, hang_s: float = 120.0, ranks: int = 2
) -> tuple[list[tuple[float, str]], tuple[float, str] | None]:
    """Let ranks answer every second what `history(rank, second)` is; return when each warning came, and the end."""
    watch, said = HangWatch(ranks, hang_s, start_s=600.0), []
    for second in range(int(until_s)):
        for rank in range(ranks):
            if (answer := history(rank, second)) is not None:
                watch.hear(rank, answer, second)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                watch.check(range(ranks), second)
            except WorkerError as error:
                return said, (second, str(error))
        said += [(second, str(one.message)) for one in caught]
    return said, None


def test_a_rank_ends_only_after_its_thread_has_left_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends a thread that comes back from C++ too late by an exception that C++ does not let through: the process aborts."""
    is_asked, may_answer, is_left = threading.Event(), threading.Event(), threading.Event()

    class SlowStore:
        def set(self, key: str, value: str) -> None:
            is_asked.set()
            may_answer.wait()

    monkeypatch.setattr(hang_watch, "_EVERY_S", 0.01)
    monkeypatch.setattr(hang_watch.join, "store_address", lambda: ("h1", 1))
    monkeypatch.setattr(hang_watch, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(hang_watch, "PrefixStore", lambda *_: SlowStore())

    def run() -> None:
        with hang_watch.watching(RankInfo(1, 1, 3, 3, torch.device("cpu")), 600.0, "x"):
            is_asked.wait()
        is_left.set()

    running = threading.Thread(target=run)
    running.start()
    assert is_asked.wait(60)
    assert not is_left.wait(0.3)
    may_answer.set()
    running.join(60)
    assert is_left.is_set()


def test_a_rank_in_no_collective_is_named_and_ended() -> None:
    def history(rank: int, second: int) -> Whereabouts:
        moving = min(second, 50)
        return _at(moving, "all_reduce") if rank == 0 or second < 50 else _at(moving, task="backward of micro-batch 2")

    said, end = _watch(history, 300)
    (when, text), *more = said
    assert not more, "once"
    assert 60 <= when <= 61
    assert text == (
        "rank 1 of 2 has not moved in the backward of micro-batch 2 of step 7, for 10 s; "
        "rank 0 in all_reduce, in step 7 (model.py:3)"
    )
    assert end is not None
    assert 170 <= end[0] <= 171
    assert "rank 1 of 2 has not moved" in end[1]
    assert end[1].endswith("run.hang_s = 120")


@pytest.mark.parametrize(
    ("hang_s", "said_by_ranks", "end_s"), [(120.0, 0.0, 120), (0.0, 30.0, 30), (0.0, 0.0, None)], ids=str
)
def test_ranks_that_all_wait_in_the_first_step_are_named_and_ended(
    hang_s: float, said_by_ranks: float, end_s: int | None
) -> None:
    """The launcher of a user's own loop learns of `run.hang_s` from the ranks; a function without a run has none."""

    def history(rank: int, second: int) -> Whereabouts:
        call, module = ("all_gather", "blocks.2") if rank else ("reduce_scatter", "(the model itself)")
        return _first(call, task="backward of micro-batch 1", module=module, hang_s=said_by_ranks)

    said, end = _watch(history, 300, hang_s=hang_s)
    if end_s is None:
        assert (said, end) == ([], None)
        return
    text = (
        "rank 0 of 2 has not moved in reduce_scatter, module (the model itself), in the backward of micro-batch 1 of step 1 (model.py:3)"
        ", for {} s; rank 1 in all_gather, module blocks.2, in the backward of micro-batch 1 of step 1 (model.py:3)"
    )
    assert said == [(10, text.format(10))]
    assert end == (end_s, f"{text.format(end_s)}; run.hang_s = {end_s}")


def test_a_run_that_was_asked_to_stop_and_waits_is_ended_when_it_would_be_named() -> None:
    watch = HangWatch(2, 600.0)
    for second in range(11):
        for rank in range(2):
            watch.hear(rank, _first("all_reduce"), second)
        if second < 10:
            watch.check([0, 1], second, hurries=True)
    with pytest.raises(WorkerError, match=r"have not moved in all_reduce, in step 1 .*, for 10 s; run\.hang_s = 600"):
        watch.check([0, 1], 10, hurries=True)


def test_a_rank_that_does_not_answer_and_one_that_lacks_a_call_are_named() -> None:
    said, _ = _watch(lambda rank, second: None if rank == 1 and second > 5 else _at(min(second, 6), "all_reduce"), 60)
    assert said[0][1].startswith("rank 1 of 2 does not answer, and was last seen in all_reduce, in step 7 (model.py:3)")
    said, _ = _watch(lambda rank, second: _at(min(second, 6) - (rank == 2), "all_reduce"), 60, ranks=3)
    assert said[0][1].startswith("rank 2 of 3 has not moved in all_reduce")
    assert "; ranks 0, 1 in all_reduce, in step 7 (model.py:3)" in said[0][1]


@pytest.mark.parametrize(
    "history",
    [
        lambda rank, second: _at(second // 9, "all_reduce"),  # a call in nine seconds
        lambda rank, second: _at(0, step=second // 9 + 1),  # one rank, which calls nobody
        lambda rank, second: _at(0, step=0),  # the first step, or its compilation
        lambda rank, second: _at(second // 60, "all_reduce", median_s=60),  # steps of a minute
        lambda rank, second: _first("all_reduce" if rank else ""),  # which compiles, while the other waits
        lambda rank, second: _first("all_reduce" if (rank + second // 100) % 2 else ""),
        lambda rank, second: _first("all_reduce") if rank else _at(3, step=0),  # its own loop, outside of a step
        lambda rank, second: _at(0, apart="a save" if rank == 0 else ""),
        lambda rank, second: _at(0, "all_gather", apart="a save") if rank == 0 else _at(0, apart="a save"),  # writes
        lambda rank, second: None if rank == 1 and second % 8 else _at(0, apart="a save"),  # encodes in between
        lambda rank, second: None if rank == 1 and second % 8 else _at(0, apart="an evaluation"),
        lambda rank, second: _at(second if rank == 0 else 0),  # one of them moves: a stage that others wait for
        lambda rank, second: _at(0, median_s=130) if second < 1200 else _at(second),  # ten median steps
        lambda rank, second: None if rank == 1 and second % 30 else _at(second),  # answers that come late
        lambda rank, second: None if second % 30 else _at(second),
    ],
)
def test_who_is_slow_and_healthy_is_neither_named_nor_ended(history: Any) -> None:
    assert _watch(history, 1500) == ([], None)


def test_a_rank_that_stopped_before_it_answered_or_in_a_phase_of_its_own_is_named() -> None:
    for first in (None, _at(3, step=0)):
        said, end = _watch(lambda rank, second, first=first: (first if second < 1 else None) if rank else _at(5), 300)
        assert said[0][0] == 10
        assert said[0][1].startswith("rank 1 of 2 does not answer")
        assert end is not None


@pytest.mark.parametrize(
    ("mine", "others", "where", "end_s"),
    [
        ("a save", "a save", "a save", 122),
        ("", "a save", "step 7", 122),  # stopped at the end of a step
        ("an evaluation", "a save", "an evaluation", 122),
    ],
)
def test_a_rank_that_does_not_answer_while_others_save_is_named_and_ended(
    mine: str, others: str, where: str, end_s: int
) -> None:
    def history(rank: int, second: int) -> Whereabouts | None:
        return _at(0, apart=others) if rank == 0 else _at(0, apart=mine) if second < 3 else None

    ((when, text),), end = _watch(history, 1500)
    assert when == 12
    assert text.startswith(f"rank 1 of 2 does not answer, and was last seen in {where}, for 10 s; rank 0 in a save")
    assert end is not None
    assert end[0] == end_s
    assert end[1].endswith("run.hang_s = 120")
    _, end = _watch(history, 1500, hang_s=2.5)
    assert end is not None
    assert end[0] == 32, "a limit of its own"


def test_a_rank_that_does_not_answer_before_the_first_step_is_over_is_named_and_not_ended() -> None:
    said, end = _watch(lambda rank, second: _at(0, step=0) if rank == 0 or second < 3 else None, 1500)
    assert end is None, "the time limit of the collective ends it"
    ((when, text),) = said
    assert when == 12
    assert text.startswith("rank 1 of 2 does not answer, and was last seen in code outside of steps")


@pytest.mark.parametrize(("step", "apart", "after_s"), [(7, "", 122), (7, "a save", 122), (0, "", 602)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_of_which_no_rank_answers_is_ended(step: int, apart: str, after_s: int, ranks: int) -> None:
    said, end = _watch(
        lambda rank, second: _at(second, step=step, apart=apart) if second < 3 else None, 1500, ranks=ranks
    )
    assert said == []
    assert end is not None
    assert end[0] == after_s
    assert end[1].startswith("rank 0 of 1 does not answer" if ranks == 1 else "ranks 0, 1 of 2 do not answer")


def test_a_run_that_was_stopped_as_a_whole_goes_on() -> None:
    watch = HangWatch(1, 120.0, start_s=600.0)
    for second in (*range(9), *range(5000, 5009)):  # as a cluster suspends it
        watch.check([0], second)
        watch.hear(0, _at(second), second)


def test_who_moves_again_is_not_ended_and_named_anew() -> None:
    said, end = _watch(lambda rank, second: _at(second // 100, "all_reduce"), 350)
    assert [when for when, _ in said] == [10, 110, 210, 310]
    assert end is None


# -- in a run --------------------------------------------------------------------------------------


def _stops_once(step: int, once: Path) -> Any:
    """A backward in which rank 1 stops for ever, as often as a file exists."""
    backward = Interpreter._backward

    def stopping(interpreter: Interpreter, task: Any, loss: Any) -> None:
        if interpreter.step == step + 1 and interpreter.assembly.parallel.mesh.rank == 1 and once.exists():
            once.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        backward(interpreter, task, loss)

    return stopping


@pytest.mark.filterwarnings("ignore:rank 1 of 2 (does not answer|has not moved)")
@pytest.mark.usefixtures("stop_signals")
def test_a_run_with_a_stopped_rank_is_ended_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, run, once = tmp_path / "whole", tmp_path / "run", tmp_path / "once"
    keys = {"checkpoint.every": 2, "train.evaluate_samples": 8}
    assert small.train("--layout", "dp=2", "--out", whole, **keys) == 0
    evaluate = training.held_out_losses

    def slow(*args: Any) -> Any:
        time.sleep(4.0)
        return evaluate(*args)

    monkeypatch.setattr(training, "held_out_losses", slow)  # longer than a rank may stand still in a step
    monkeypatch.setattr(hang_watch, "_NAMED_AFTER_S", 1.0)
    monkeypatch.setattr(hang_watch, "_SILENT_S", 1.5)
    monkeypatch.setattr(
        workers, "_ASK_EVERY_S", 5e-4
    )  # more questions than the pipe of a rank that reads none can hold
    monkeypatch.setattr(Interpreter, "_backward", _stops_once(4, once))
    once.touch()
    capfd.readouterr()
    more = {"run.hang_s": 2.5, "run.restarts": 1}
    assert small.train("--layout", "dp=2", "--out", run, **keys, **more) == 0
    said = capfd.readouterr().out
    assert "rank 1 of 2 does not answer" in said
    assert re.search(r"rank 1 of 2 does not answer.*; rank 0 in .*step 5", said)
    assert "run.hang_s = 2.5" in said
    assert f"restart 1 of 1 in 1 s, from {run}/checkpoints/step-000004" in said
    assert small.metrics(run) == small.metrics(whole)


@pytest.mark.filterwarnings("ignore:rank 1 of 2 does not answer")
@pytest.mark.usefixtures("stop_signals")
def test_a_rank_that_is_stopped_in_a_save_is_ended_and_one_that_saves_slowly_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, once = tmp_path / "run", tmp_path / "once"
    begin = checkpoint.begin

    def saving(run: Any, *args: Any) -> Any:
        if run.place.rank == 0 and run.steps_taken == 2:
            time.sleep(8.0)  # longer than a rank may be silent
        if run.place.rank == 1 and run.steps_taken == 4 and once.exists():
            once.unlink()
            time.sleep(1.0)  # it answers some questions first
            os.kill(os.getpid(), signal.SIGSTOP)
        return begin(run, *args)

    monkeypatch.setattr(checkpoint, "begin", saving)
    for name, seconds in (("_NAMED_AFTER_S", 2.0), ("_SILENT_S", 1.5), ("_SILENT_APART_S", 6.0)):
        monkeypatch.setattr(hang_watch, name, seconds)
    monkeypatch.setattr(workers, "_ASK_EVERY_S", 0.2)
    once.touch()
    keys = {"checkpoint.every": 2, "run.hang_s": 1.0, "run.restarts": 1}
    assert small.train("--layout", "dp=2", "--out", run, **keys) == 0
    said = capfd.readouterr().out
    assert re.search(
        r"rank 1 of 2 does not answer, and was last seen in a save \S+, for \d+ s; rank 0 in .*a save", said
    )
    assert f"restart 1 of 1 in 1 s, from {run}/checkpoints/step-000002" in said


@pytest.mark.filterwarnings("ignore:rank . of 2 (does not answer|has not moved)")
@pytest.mark.usefixtures("stop_signals")
@pytest.mark.parametrize(
    ("stopped", "words"),
    [
        (1, r"samestep: rank 1 of 2 does not answer.*; rank 0 in .*step 5.*; run.hang_s = 3"),
        pytest.param(
            0,  # which holds the store
            r"samestep: rank 1 of 2 stands still, and the store at 127.0.0.1:\d+ has not answered for \d+ s: its process "
            r"stands still or is gone; run.hang_s = 3",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_stopped_rank_of_another_launcher_is_named_and_the_others_end(
    stopped: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(hang_watch, "_NAMED_AFTER_S", 1.0)
    monkeypatch.setattr(hang_watch, "_SILENT_S", 1.5)
    monkeypatch.setattr(Interpreter, "_backward", _stops_in_step_5(stopped))
    command = ["train", *small.settings(**{"run.hang_s": 3}), "--layout", "dp=2", "--out", str(tmp_path / "run")]
    given = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": 2}
    ranks = [small.in_background(command, tmp_path / f"{rank}", RANK=rank, **given) for rank in range(2)]
    try:
        assert small.status_of(ranks[1 - stopped]) == 1
        assert re.search(words, (tmp_path / f"{1 - stopped}" / "err").read_text())
    finally:
        small.end_background()


def _stops_in_step_5(rank: int) -> Any:
    backward = Interpreter._backward

    def stopping(interpreter: Interpreter, task: Any, loss: Any) -> None:
        if interpreter.step == 5 and interpreter.assembly.parallel.mesh.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        backward(interpreter, task, loss)

    return stopping


def _loop(place: RankInfo, hang_s: float, timeout_s: float) -> None:
    job = Job(train={"global_batch": 4, "watch_every": 0}, run={"hang_s": hang_s, "timeout_s": timeout_s})
    run = samestep.parallelize(lambda: torch.nn.Linear(4, 2), "cross_entropy", torch.optim.SGD, layout="dp=2", job=job)
    run.step((torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)))


@pytest.mark.filterwarnings("ignore:ranks? .* of 2 ha(s|ve) not moved")
@pytest.mark.parametrize(
    ("hang_s", "limit_s", "end"), [(1.5, 600.0, r"run\.hang_s = 1\.5"), (600.0, 8.0, r"\(run\.timeout_s\)")]
)
def test_a_first_step_of_an_own_loop_that_hangs_ends_in_a_line(
    hang_s: float, limit_s: float, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for what rank 1 never sends."""
    backward = Interpreter._backward

    def waiting(interpreter: Interpreter, task: Any, loss: Any) -> None:
        if interpreter.assembly.parallel.mesh.rank == 0:
            dist.recv(torch.empty(1), 1)
        backward(interpreter, task, loss)

    monkeypatch.setattr(Interpreter, "_backward", waiting)
    monkeypatch.setattr(loss_trials, "refuse_collectives", contextlib.nullcontext)  # which names the function `waiting`
    monkeypatch.setattr(hang_watch, "_NAMED_AFTER_S", 1.0)
    with pytest.raises(WorkerError) as ended:
        samestep.launch(_loop, (hang_s, limit_s), ranks=2, timeout_s=limit_s)
    text = str(ended.value)
    assert re.search(rf"rank 0 .*in recv, in the backward of micro-batch 0 of step 1.*{end}$", text), text
    assert "\n" not in text


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList, nn.ModuleDict])
def test_a_module_that_is_being_made_or_is_empty_has_a_path(kind: type[nn.Module]) -> None:
    """Another thread asks at any moment, and the length of a container is that of its modules."""
    seen = []

    class Made(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            seen.append(_module_in(sys._getframe()))
            super().__init__()
            seen.append(_module_in(sys._getframe()))

    outer = nn.Module()
    outer.inner = Made()  # type: ignore[assignment]
    assert seen == ["", ""]


def _pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two workers of one host that have joined, and of which rank 1 returned after three calls."""
    monkeypatch.setattr(workers, "_WAITING_S", 0.0)
    options = LaunchOptions(2, 0, 2, 2, "cpu", 1, 60.0, 60.0, quiet=True, isolated=False)
    host: Any = SimpleNamespace(ranks=range(2), host="")
    pool = workers._WorkerPool(options, [host])
    pool.phases = {0: "joined", 1: "joined"}
    pool._hear(1, "done", (None, {"world": 3}))
    return pool


@pytest.mark.parametrize(
    ("calls", "call", "where", "text"),
    [
        (4, "", "runtime/recording/step_recorder.py:125", r"rank 0 waits for it in step 7 \(loop.py:10\)"),
        (4, "all_reduce", "loop.py:10", r"rank 0 waits for it in all_reduce \(loop.py:10\)"),
        (4, "", "", ""),
        (3, "", "runtime/recording/step_recorder.py:125", ""),
    ],
    ids=["a call that was begun before", "a call", "code of its own", "no call that the other lacks"],
)
def test_a_rank_that_returned_is_named_while_another_waits_for_it(
    calls: int, call: str, where: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _pool(monkeypatch)
    for _ in range(2):
        pool._hear(0, "at", Whereabouts({"world": calls}, call, where, step=7, line="loop.py:10"))
    if not text:
        pool._check_waiting()
        return
    with pytest.raises(WorkerError, match=rf"^rank 1 of 2 returned from the function while {text}: every rank must"):
        pool._check_waiting()


def test_a_rank_that_waits_within_the_runtime_is_at_a_line_of_the_user() -> None:
    """The thread stands in C code that a line of the runtime has called, as in the wait for a collective."""
    ends, waits = threading.Lock(), _Issued.__new__(_Issued)
    recorder: Any = SimpleNamespace(now=float, append=list)
    waits._recorder, waits._work = recorder, SimpleNamespace(wait=ends.acquire)
    waits._step, waits._number, waits._event = 1, 0, [""] * 6
    ends.acquire()
    thread = threading.Thread(target=lambda: waits.wait())
    thread.start()
    while not (at := whereabouts_of(thread.ident)).where and thread.is_alive():
        time.sleep(0.01)
    ends.release()
    thread.join()
    assert at.call == ""
    assert re.fullmatch(r".*/runtime/recording/step_recorder\.py:\d+", at.where)
    assert re.fullmatch(rf" \({re.escape(__file__)}:\d+\)", at.place)


def test_the_frames_of_a_failure_begin_with_the_users_function() -> None:
    def main(_: RankInfo) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as failed:
        launch._in_layout(RankInfo.__new__(RankInfo), main, (), "")
    lines = failure_of(1, failed.value.with_traceback(failed.tb.tb_next)).lines
    files = [line for line in lines if line.lstrip().startswith("File")]
    assert [__file__ in line for line in files] == [True], files
