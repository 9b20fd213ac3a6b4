"""The recorder hears every op of the program, changes no bit and no graph, and refuses files that are no records."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.datasets import batches
from samestep.errors import InputError, RecordError
from samestep.job import Job
from samestep.program.ops import UPDATE_BODY, StepFlag, Task
from samestep.program.recorded import RankRecord, RecordedStep, parse_steps, path_of, read_record
from samestep.runtime.ledger import owned
from samestep.runtime.processes import join
from samestep.runtime.recording import marks
from samestep.runtime.recording.record_window import ProcessorTime
from samestep.runtime.recording.step_recorder import StepRecorder
from samestep.runtime.recording.sums import sums_of
from samestep.runtime.run import Run
from samestep.runtime.step_observer import StepObserver
from samestep.trees import tree_leaves
from samestep.wings.explain.explain import Explained, explain
from tests.laboratory import job_of, make_run, on_ranks

STEPS = 4
WINDOW = range(2, 4)
JOB = job_of("float32", STEPS, train={"watch_every": 0})
LAYOUTS = [
    ("dp=2 zero=3 microbatch=2", "llama"),
    ("tp=2 sequence_parallel", "llama"),
    ("cp=2", "llama"),
    ("pp=2 microbatch=2 schedule=zero-bubble", "deep_llama"),
    ("dp=2 recompute=offload", "deep_llama"),
    pytest.param("dp=2 tp=2 pp=2 microbatch=2", "deep_llama", marks=pytest.mark.nightly),
    pytest.param("dp=4 pp=2 microbatch=1 schedule=zero-bubble zero=1", "deep_llama", marks=pytest.mark.nightly),
]


def nodes_of(outputs: Any) -> int:
    """The nodes of the graph behind a forward's outputs."""
    found = {leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
    ahead = [*found]
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                ahead.append(node)
    return len(found)


Outcome = tuple[list[float], list[Tensor], list[int]]


def trained(rank: int, world: int, model: str, layout: str, job: Job, folder: str) -> Outcome:
    """Take some steps, two of which are recorded; return losses, weights and the graphs' sizes."""
    run = make_run(rank, world, model, layout, job)
    assert run.record(f"{WINDOW.start}:{WINDOW.stop - 1}", folder) == Path(folder)
    found = _steps_of_run(run, job)
    assert marks.listener() is run.recorder
    run.recorder.close()
    assert marks.listener() is None
    return found


def unheard(rank: int, world: int, model: str, layout: str, job: Job) -> Outcome:
    """Take the same steps with a recorder that hears nothing, not even for the sums of every step."""
    taking, StepRecorder.taking = StepRecorder.taking, lambda *_: contextlib.nullcontext()  # type: ignore[method-assign,assignment]
    try:
        run = make_run(rank, world, model, layout, job)
        found = _steps_of_run(run, job)
        assert marks.listener() is not run.recorder
        return found
    finally:
        StepRecorder.taking = taking  # type: ignore[method-assign]


def _steps_of_run(run: Run, job: Job) -> Outcome:
    sizes: list[int] = []
    losses = []
    for batch in batches_of(job):
        losses.append(run.step(batch).loss)
        if not sizes:  # from the second step on
            run.model.register_forward_hook(lambda _m, _a, outputs: sizes.append(nodes_of(outputs)))
    return losses, [*run.state_dict(on_every_rank=True).values()], sizes


def batches_of(job: Job) -> Any:
    from tests.models import Tokens

    return batches(Tokens(), job)


@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_a_window_changes_no_bit_and_no_graph_and_holds_every_op(layout: str, model: str, tmp_path: Path) -> None:
    plain = on_ranks(layout, unheard, model, JOB)
    recorded = on_ranks(layout, trained, model, JOB, str(tmp_path))
    for (losses, weights, sizes), (others, values, nodes) in zip(plain, recorded, strict=True):
        assert (losses, sizes) == (others, nodes)
        assert all(torch.equal(one, other) for one, other in zip(weights, values, strict=True))
    found = explain(tmp_path, hardware="cpu-laptop")
    for rank in range(len(plain)):
        record = read_record(path_of(tmp_path, WINDOW, rank))
        assert [*record.steps] == [*WINDOW]
        for step in WINDOW:
            assert_holds_every_op(record, step)
        assert_bytes_are_those_of_the_prediction(found, rank)


def test_copies_of_inputs_have_the_spans_that_the_program_lists(tmp_path: Path) -> None:
    layout = "dp=1 recompute=offload microbatch=4"
    on_ranks(layout, trained, "deep_llama", JOB, str(tmp_path))
    found = explain(tmp_path, hardware="cpu-laptop")
    assert found.predicted is not None
    (program,) = found.predicted.programs
    listed = Counter((op.name, op.stream) for _, op in program.ops() if op.stream in ("to host", "from host"))
    assert {name.partition(":")[0] for name, _ in listed} == {"offload", "fetch"}
    spans = [span for span in found.found.last.timeline.spans_of(0) if span.stream in ("to host", "from host")]
    assert Counter((span.name, span.stream) for span in spans) == listed
    assert {span.task[:1] for span in spans if span.stream == "to host"} == {"F"}
    assert {span.task[:1] for span in spans if span.stream == "from host"} == {"B"}
    names = {
        event["args"]["name"] for event in found.to_chrome_trace()["traceEvents"] if event["name"] == "thread_name"
    }
    assert {"rank 0 to host", "rank 0 from host"} <= names


def assert_bytes_are_those_of_the_prediction(found: Explained, rank: int) -> None:
    """Hold what torch was given, axis by axis, against the programs that a prediction makes anew of the recorded job and model."""
    assert found.predicted is not None
    listed: Counter[str] = Counter()
    for _, op in found.predicted.programs[found.found.records[rank].head.stage].ops():
        listed.update({op.axis: op.size_bytes} if op.axis else {})
    (row,) = (row for row in cast(list[Any], found.to_record()["ranks"]) if row["rank"] == rank)
    assert {one["axis"]: one["measured_bytes"] for one in row["bytes"]} == listed
    assert {one["axis"]: one["predicted_bytes"] for one in row["bytes"]} == listed
    assert "listed and sent: " in found.to_text()
    assert sum(part["measured_s"] for part in row["parts"]) + row["rest_s"] == pytest.approx(row["step_s"], abs=1e-9)


def assert_holds_every_op(record: RankRecord, number: int) -> None:
    """Hold a step's events against the program: tasks, forwards and backwards of layers, and all that is sent."""
    step, head = record.steps[number], record.head
    assert step.begin_ns < step.end_ns <= step.until_ns
    assert all(0 <= begin <= end <= step.until_ns - step.begin_ns for _, _, begin, end, *_ in step.events)
    tasks = [name for form, name, *_ in step.events if form == "task"]
    assert tasks[-1].startswith("U")
    assert {op.task for op in head.ops} <= set(tasks)
    sent = Counter(name for form, name, *_ in step.events if form == "sent")
    assert sent == Counter(op.owner for op in head.ops)
    kinds = {
        name: {more[1] for form, other, _, _, *more in step.events if form == "sent" and other == name} for name in sent
    }
    assert all(
        kind in ("", *(op.kind for op in head.ops if op.owner == name)) for name in kinds for kind in kinds[name]
    )
    forwards = {name for form, name, *_ in step.events if form == "layer"}
    backwards = {name for form, name, *_ in step.events if form == "backward"}
    assert backwards <= forwards  # a later stage calls a stand-in of the embeddings
    assert forwards <= {*head.layers}
    assert len(forwards) >= len(head.layers) / 2
    assert [form for form, *_ in step.events].count("task") == len(tasks) <= len(step.memory)
    assert {mark.op for mark in step.memory} >= {"update:optimizer", *(f"forward:{name}" for name in forwards)}
    assert all(mark.used > 0 for mark in step.memory)
    assert step.held["weights"] > 0
    if Path("/proc/self/task").is_dir():
        assert step.others_queued_ns is not None
        assert step.others_queued_ns >= 0


def sums_of_steps(rank: int, world: int, model: str, layout: str, job: Job) -> list[tuple[int, dict[str, float]]]:
    run = make_run(rank, world, model, layout, job)
    seen = []
    for batch in batches_of(job):
        run.step(batch)
        seen.append((run.recorder.sums.step, dict(run.recorder.sums.values)))
    return seen


def test_every_step_has_sums_without_a_window() -> None:
    for steps in on_ranks("tp=2", sums_of_steps, "llama", JOB):
        assert [step for step, _ in steps] == [0, 1, 2, 3]  # known when the next one begins
        for _, values in steps[1:]:
            assert values["sent"] > 0
            assert {"forward_s", "backward_s", "update_s", "data_s", "wait_world_s", "cpu_s"} <= values.keys()
            assert all(value >= 0 for value in values.values())


def test_a_recorder_is_not_kept_alive_by_its_marks() -> None:
    run = make_run(0, 1, "plain", "dp=1", JOB)
    run.step(next(batches_of(JOB)))
    seen = weakref.ref(run.recorder)
    assert marks.listener() is run.recorder
    del run
    gc.collect()
    assert seen() is None
    assert marks.listener() is None


def test_a_mark_without_a_listener_does_nothing() -> None:
    with marks.region("data"):
        assert marks.listener() is None


@pytest.mark.parametrize(
    ("text", "steps"), [("100:104", range(100, 105)), ("7:7", range(7, 8)), ("3", range(4, 8)), ("1", range(4, 6))]
)
def test_windows(text: str, steps: range) -> None:
    assert parse_steps(text, 0) == steps


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "4:2", "1:b", ":3", "1:2:3"])
def test_what_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"names no steps. Use FIRST:LAST"):
        parse_steps(text, 0)


def recorded_file(folder: Path) -> Path:
    run = make_run(0, 1, "plain", "dp=1", JOB)
    run.record("2:3", folder)
    for batch in batches_of(JOB):
        run.step(batch)
    run.recorder.close()
    return path_of(folder, WINDOW, 0)


def test_damaged_records_are_one_line(tmp_path: Path) -> None:
    path = recorded_file(tmp_path)
    whole = path.read_text()
    head, first, second = whole.splitlines()
    assert [*read_record(path).steps] == [2, 3]
    step = json.loads(first)
    harmed = {
        "": "is empty: its rank was ended before it could write. Use records of all ranks",
        "\x00\x01": "damaged",
        '{"traceEvents": []}': "is not a record of samestep",
        "[]\n": "is not a record of samestep",
        head.replace('"version": 4', '"version": 5') + "\n": "is a record of version 5; this samestep reads version 4",
        head.replace('"rank"', '"place"') + "\n": "damaged",
        f"{head}\n{first[:40]}\n{second}\n": ":2: damaged",
        f"{head}\n{json.dumps({**step, 'until_ns': 0})}\n": ":2: damaged: ends before it begins",
        f"{head}\n{json.dumps({**step, 'events': [['task']]})}\n": ":2: damaged",
        f"{head}\n{json.dumps({**step, 'events': [['task', 'F0', 'a', 'b']]})}\n": ":2: damaged",
        f"{head}\n[1]\n": ":2: damaged: the line is not a step",
        f"{head}\n{json.dumps({**step, 'colour': 1})}\n": ":2: damaged",
    }
    for text, words in harmed.items():
        path.write_text(text)
        with pytest.raises(RecordError) as caught:
            read_record(path)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="it is not text"):
        read_record(path)
    path.write_text(f"{head}\n{first}\n{second[:50]}")  # a run that was killed
    assert [*read_record(path).steps] == [2]
    with pytest.raises(RecordError, match="cannot be read"):
        read_record(tmp_path / "nothing")


def test_layers_are_named_once_and_their_marks_are_removed(tmp_path: Path) -> None:
    run = make_run(0, 1, "plain", "dp=1", JOB)
    run.record("2:2", tmp_path)
    stream = batches_of(JOB)
    run.step(next(stream))
    before = hooks_of(run.model)
    collecting = len(gc.callbacks)
    run.step(next(stream))
    assert hooks_of(run.model) > before
    assert len(gc.callbacks) == collecting + 1
    run.step(next(stream))
    assert hooks_of(run.model) == before
    assert len(gc.callbacks) == collecting


def hooks_of(module: nn.Module) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in module.modules())


def recorded_by_signal(rank: int, world: int, model: str, layout: str, job: Job, folder: str) -> None:
    run = make_run(rank, world, model, layout, job)
    run.recorder.folder = Path(folder)
    run.record("12:13", folder)
    remarks, before = [], join._listen_for_stop()
    for batch in batches_of(job):
        if (rank, batch.step) in ((world - 1, 1), (0, 3)):  # the second one comes while steps are recorded
            os.kill(os.getpid(), signal.SIGUSR2)
        remarks += run.step(batch).remarks
    run.recorder.close()
    join.restore_signals(before)
    assert not join.requests()[StepFlag.RECORD]
    (line,) = [one for one in remarks if "recorded" in one]
    assert line.startswith("steps 4 to 9 are recorded into ")


def test_a_signal_to_one_rank_lets_all_record_the_same_steps(tmp_path: Path) -> None:
    job = job_of("float32", 14, train={"watch_every": 2})
    on_ranks("pp=2 microbatch=2 schedule=zero-bubble", recorded_by_signal, "deep_llama", job, str(tmp_path))
    for rank in (0, 1):
        assert [*read_record(path_of(tmp_path, range(4, 10), rank)).steps] == [*range(4, 10)]
        assert [*read_record(path_of(tmp_path, range(12, 14), rank)).steps] == [12, 13]


def test_windows_that_overlap_give_way_and_others_wait(tmp_path: Path) -> None:
    run = make_run(0, 1, "plain", "dp=1", job_of("float32", 8, train={"watch_every": 0}))
    run.record("6:7", tmp_path)
    run.record("2:3", tmp_path)
    run.record("3:4", tmp_path)
    for batch in batches_of(run.job):
        run.step(batch)
    run.recorder.close()
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["steps-3-4.rank0.jsonl", "steps-6-7.rank0.jsonl"]
    assert len(read_record(path_of(tmp_path, range(6, 8), 0)).steps) == 2


def python_calls(body: Callable[[], None], times: int = 50) -> float:
    """Return the calls of functions, in Python and in C, that one call of `body` makes."""
    seen = 0

    def count(_frame: Any, event: str, _given: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    body()
    sys.setprofile(count)
    try:
        for _ in range(times):
            body()
    finally:
        sys.setprofile(None)
    return seen / times


class _Sent:
    def wait(self) -> None:
        """Return at once."""


def collective() -> None:
    with owned("bucket.0") as issue:
        work = issue.sent(_Sent())
    work.wait()


def test_what_follows_from_the_records_of_a_step_is_linear() -> None:
    recorder = StepRecorder(Job(), torch.device("cpu"), 0)
    nothing: Any = SimpleNamespace(ops=tuple, exchange=(), tasks=(Task(UPDATE_BODY, 0),))
    step: Any = functools.partial(recorder.taking, program=nothing, module=nn.Module(), spec=nothing, held=dict)

    def one_step(number: int) -> None:
        with step(recorder.step + 1):
            for _ in range(number):
                with recorder.running(Task(UPDATE_BODY, 0), np.empty(0, np.int64), StepObserver()):
                    collective()
        with step(recorder.step + 1):  # reads the one before
            pass

    one, ten, hundred = (python_calls(functools.partial(one_step, number), 2) for number in (1, 10, 100))
    assert hundred - ten <= 10 * (ten - one) + 30
    assert (hundred - ten) / 90 <= 80  # of one task and one collective: three records, and their sums
    assert (ten - one) / 9 <= 80


def _steps_of(model: str) -> tuple[Any, Callable[[], None]]:
    """Return a run that has taken three steps, and what takes one more."""
    run = make_run(0, 1, model, "dp=1", job_of("float32", 12, train={"watch_every": 0}))
    stream = batches_of(run.job)

    def step() -> None:
        run.step(next(stream))

    python_calls(step, 2)
    return run, step


def _calls_and_events_of_a_window(run: Any, step: Callable[[], None], folder: Path) -> tuple[float, int]:
    """Return the calls that recording adds to a step of a window, and the step's events of layers."""
    plain = python_calls(step, 2)
    window = range(8, 12)
    run.record("8:11", folder)
    step()
    recorded = python_calls(step, 2)
    run.recorder.close()
    events = read_record(path_of(folder, window, 0)).steps[10].events
    return recorded - plain, sum(event[0] in ("layer", "backward") for event in events)


def test_an_op_of_a_window_takes_a_few_calls_its_memory_and_its_line_included(tmp_path: Path) -> None:
    """What a step costs by itself, such as a look at each thread of this process, is no cost of an op."""
    runs = [_steps_of(model) for model in ("llama", "deep_llama")]  # both have their threads before one is counted
    gc.collect()
    gc.disable()  # a collection is an event too
    try:
        two, four = (
            _calls_and_events_of_a_window(run, step, tmp_path / str(number)) for number, (run, step) in enumerate(runs)
        )
    finally:
        gc.enable()
    assert four[1] - two[1] >= 4  # two layers more: a mark of each, forward and backward
    assert 0 < (four[0] - two[0]) / (four[1] - two[1]) <= 26


def test_waits_are_taken_out_of_the_task_that_they_are_in() -> None:
    ms = 1_000_000
    events = [["task", f"F{index}", index * 10 * ms, (index * 10 + 8) * ms] for index in range(4)]
    events += [["wait", "a", (10 * index + 2) * ms, (10 * index + 2 + index) * ms, 0, "", 1] for index in range(4)]
    events += [["region", "data", 8 * ms, 11 * ms], ["sent", "b", 28 * ms, 29 * ms, 0, "", 0]]
    recorded_step = RecordedStep(step=1, begin_ns=0, end_ns=40 * ms, until_ns=41 * ms, cpu_ns=0, events=events)
    values = sums_of(recorded_step, {"a": "tp", "b": "world"}).values
    assert values["forward_s"] == pytest.approx((4 * 8 - (0 + 1 + 2 + 3) - 1) / 1e3)
    assert values["wait_tp_s"] == pytest.approx(6e-3)
    assert values["wait_world_s"] == pytest.approx(1e-3)
    assert values["data_s"] == pytest.approx(3e-3)


def test_a_thread_knows_what_it_had_of_a_processor_in_every_thread_and_fork() -> None:
    time_of = ProcessorTime()
    had, queued = time_of.read()
    sum(range(200_000))
    later, still_queued = time_of.read()
    assert later > had
    if queued is None:
        return  # the system does not count
    assert still_queued is not None
    assert still_queued >= queued
    others: list[tuple[int, int | None]] = []
    thread = threading.Thread(target=lambda: others.append(time_of.read()))
    thread.start()
    thread.join()
    assert others[0][0] < later  # of the thread that asks
    assert time_of.read()[0] >= later


def test_sums_of_a_step_have_recomputed_forwards_apart_and_each_instant_once() -> None:
    """A collective that a recomputed forward waits for is neither its work nor that of the backward."""
    events = [
        ["task", "F0", 0, 100],
        ["task", "B0", 100, 400],
        ["region", "recompute:a", 150, 250],
        ["sent", "a.out", 200, 230, 0, "all_reduce", 0],
        ["region", "data", 300, 310],
    ]
    sums = sums_of(RecordedStep(step=1, begin_ns=0, end_ns=500, until_ns=500, cpu_ns=0, events=events), {"a.out": "tp"})
    found = {name: round(value * 1e9) for name, value in sums.values.items() if name.endswith("_s")}
    assert found == {"forward_s": 100, "backward_s": 190, "recompute_s": 70, "wait_tp_s": 30, "data_s": 10, "cpu_s": 0}
    assert sums.scalars()["time/wait_tp_ms"] == pytest.approx(30e-6)
