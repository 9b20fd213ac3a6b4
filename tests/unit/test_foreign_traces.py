"""Traces of other programs have the rows of any step; a damaged or foreign file is one line. Two steps are compared by size."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import job_files as jobs
from samestep.errors import InputError, RecordError
from samestep.job import Job
from samestep.program.recorded import RankRecord
from samestep.wings.explain.differences import SIMULATION, differences
from samestep.wings.explain.explain import explain
from samestep.wings.explain.foreign_traces import explain_traces, is_foreign, own_times
from samestep.wings.plan.simulation.partition import REST, TRANSFER, WAIT, seconds_of
from samestep.wings.plan.simulation.simulate import simulate
from tests.unit.ranks_on_a_clock import records_of
from tests.unit.test_explain import LAYOUT, OPS, records, script, write
from tests.unit.test_explain import TRANSFER as TRANSFERS

BASE_NS = 1_790_000_000_000_000_000


def span(name: str, cat: str, start_ms: float, length_ms: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "pid": 7,
        "tid": tid,
        "ts": start_ms * 1e3,
        "dur": length_ms * 1e3,
        "args": args,
    }


def on_cpu(rank: int, late_ms: float) -> dict[str, Any]:
    """Two steps of 100 ms of DDP on gloo: 40 ms of compute, the later rank's more, and an all_reduce that takes 10 ms."""
    events = []
    for step in (3, 4):
        begin = (step - 3) * 100.0
        mine = 40.0 + (late_ms if rank else 0.0)
        events += [
            span(f"ProfilerStep#{step}", "user_annotation", begin, 100),
            span("aten::addmm", "cpu_op", begin, mine),
            span("aten::add", "cpu_op", begin + 1, 2),  # within the one before
            span("gloo:all_reduce", "user_annotation", begin + mine, 10 + late_ms + 40 - mine, tid=9),
            span("aten::add_", "cpu_op", begin + 50 + late_ms, 100 - 50 - late_ms),
        ]
    pg = [{"pg_name": "0", "ranks": [0, 1]}]
    return {
        "traceEvents": events,
        "baseTimeNanoseconds": BASE_NS,
        "distributedInfo": {"rank": rank, "world_size": 2, "pg_config": pg},
    }


def store(folder: Path, made: Callable[[int], dict[str, Any]], ranks: int = 2) -> Path:
    for rank in range(ranks):
        (folder / f"trace{rank}.json").write_text(json.dumps(made(rank)))
    return folder


@settings(max_examples=15, derandomize=True, database=None, deadline=None)
@given(st.floats(0, 45))
def test_a_late_rank_of_a_trace_is_waited_for(tmp_path_factory: pytest.TempPathFactory, late_ms: float) -> None:
    folder = store(tmp_path_factory.mktemp("traces"), lambda rank: on_cpu(rank, late_ms))
    assert is_foreign(folder)
    found = explain_traces(folder)
    assert found.steps == (4,)
    for rank in (0, 1):
        whole = sum(row.seconds for row in found.rows if row.stage == rank)
        assert whole == pytest.approx(0.1)
        assert seconds_of(found.rows, TRANSFER, stage=rank) == pytest.approx(0.01, abs=1e-5)
        assert seconds_of(found.rows, REST, stage=rank) <= 1e-5
    assert seconds_of(found.rows, WAIT, stage=0) == pytest.approx(late_ms / 1e3, abs=1e-5)
    assert seconds_of(found.rows, WAIT, stage=1) == pytest.approx(0, abs=1e-5)
    assert ("others wait for rank 1" in found.verdict) == (late_ms > 5.001)
    assert "ranks 0,1 (guessed)" in found.to_text()
    record = json.loads(json.dumps(found.to_record()))
    for one in (record, *record["ranks"]):
        assert sum(part["measured_s"] for part in one["parts"]) + one["rest_s"] == pytest.approx(one["step_s"])
    assert record["step_s"] == pytest.approx(0.1)
    assert [one["rank"] for one in record["ranks"]] == [0, 1]


@pytest.mark.parametrize("is_gpu", [False, True])
def test_operations_of_an_update_are_the_optimizers(tmp_path: Path, is_gpu: bool) -> None:
    def with_update(rank: int) -> dict[str, Any]:
        kind, note = ("kernel", "gpu_user_annotation") if is_gpu else ("cpu_op", "user_annotation")
        events = [
            span("ProfilerStep#1", "user_annotation", 0, 50),
            span("aten::mm", kind, 0, 30),
            span("Optimizer.step#AdamW.step", "user_annotation", 20 if is_gpu else 30, 15),
            span("Optimizer.step#AdamW.step", note, 30, 15),
            span("aten::_foreach_add_", kind, 31, 6),
            span("aten::mul", kind, 38, 5),
            span("aten::zero_", kind, 46, 2),
            span("aten::mul", "cpu_op", 0, 50, tid=3),
        ]
        return {"traceEvents": events, "distributedInfo": {"rank": rank}}

    found = explain_traces(store(tmp_path, with_update))
    assert seconds_of(found.rows, "optimizer", stage=1) == pytest.approx(0.011)
    assert seconds_of(found.rows, "compute", stage=1) == pytest.approx(0.032)
    assert sum(row.seconds for row in found.rows if row.stage == 1) == pytest.approx(0.05)


def test_ranks_that_wait_for_each_other_are_not_blamed(tmp_path: Path) -> None:
    def by_turns(rank: int) -> dict[str, Any]:
        events = [span("ProfilerStep#1", "user_annotation", 0, 100)]
        for part in range(4):
            mine = 24 if part % 2 == rank else 10
            events += [
                span("aten::mm", "cpu_op", part * 25, mine),
                span("gloo:all_reduce", "user_annotation", part * 25 + mine, 25 - mine, tid=9),
            ]
        about = {"rank": rank, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
        return {"traceEvents": events, "distributedInfo": about}

    found = explain_traces(store(tmp_path, by_turns))
    assert found.verdict.endswith("; the ranks wait for each other, up to 28% of the step")


def test_kernels_of_a_gpu_are_compute_and_those_of_nccl_are_sent(tmp_path: Path) -> None:
    def on_gpu(rank: int) -> dict[str, Any]:
        ranks = {"Collective name": "allreduce", "Process Group Ranks": "[0, 1]"}
        return {
            "traceEvents": [
                span("ProfilerStep#1", "user_annotation", 0, 50),
                span("aten::mm", "cpu_op", 0, 50),
                span("ampere_sgemm", "kernel", 5, 20, tid=7),
                span("ncclDevKernel_AllReduce_Sum", "kernel", 15 + 5 * rank, 25 - 5 * rank, tid=8, **ranks),
                span("ampere_sgemm", "kernel", 40, 10, tid=7),
            ],
            "distributedInfo": {"rank": rank},
        }

    found = explain_traces(store(tmp_path, on_gpu))
    assert seconds_of(found.rows, "compute", stage=0) == pytest.approx(0.03)
    assert seconds_of(found.rows, TRANSFER, stage=0) == pytest.approx(0.015)  # 10 ms of it run beside compute
    assert seconds_of(found.rows, REST, stage=0) == pytest.approx(0.005)


def test_steps_of_a_trace_are_chosen_as_those_of_a_run(tmp_path: Path) -> None:
    store(tmp_path, lambda rank: on_cpu(rank, 0))
    assert explain_traces(tmp_path, step=3).steps == (3,)
    assert explain_traces(tmp_path, step="3:9").steps == (3, 4)
    with pytest.raises(RecordError, match="has no step 7: steps 3 to 4 are in the traces of all ranks"):
        explain_traces(tmp_path, step=7)


def test_what_a_trace_lacks_is_named(tmp_path: Path) -> None:
    store(tmp_path, lambda rank: {"traceEvents": [span("aten::mm", "cpu_op", 0, 5)]}, ranks=1)
    text = explain_traces(tmp_path).to_text()
    for words in ("ProfilerStep", "no span of NCCL or gloo", "the traces of other ranks"):
        assert words in text


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("a.json", b"{", "is not a trace, or is cut off"),
        ("a.json", b"[]", "is not a trace of torch.profiler"),
        ("a.json", b'{"traceEvents": []}', "is damaged"),
        ("a.json", b'{"traceEvents": [{"ph": "X", "dur": 1}]}', "is damaged"),
        ("a.json", b'{"entries": [{}]}', "is not a trace of torch.profiler"),
        ("a.json.gz", gzip.compress(b'{"traceEvents": []}', mtime=0)[:12], "is not a trace, or is cut off"),
        ("a.json", b"\x80\x04K\x01.", "is not a trace, or is cut off"),
    ],
)
def test_a_damaged_or_foreign_file_is_one_line(tmp_path: Path, name: str, raw: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(RecordError) as caught:
        explain_traces(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    store(tmp_path, lambda rank: on_cpu(0, 0))
    with pytest.raises(RecordError, match="are both of rank 0"):
        explain_traces(tmp_path)


# -- two steps ---------------------------------------------------------------------------------------------------------


def test_differences_of_two_runs_are_sorted_and_their_layouts_named(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write(records(), one)
    write(records(clocks=dict.fromkeys(range(4), 0)), other)
    found = differences(str(one), str(other))
    sizes = [abs(after - before) for _, _, before, after in found.rows]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) == pytest.approx(0)
    assert found.causes == ()
    assert "0% shorter" in found.to_text()


def test_differences_of_two_layouts_add_up_to_that_of_their_steps() -> None:
    found = differences("dp=2", "dp=4 zero=1", "cpu-laptop")
    assert sum(after - before for _, _, before, after in found.rows) == pytest.approx(
        found.other.step_s - found.one.step_s
    )
    assert found.causes[0] == "other layout options: dp=2 and dp=4 zero=1"
    json.dumps(found.to_record())


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (SIMULATION, SIMULATION, "one of the two must be a run folder or a layout"),
        ("dp=2", "nowhere/at/all", "is neither a run folder nor a layout. Use the folder of a run or of traces"),
        ("dp=2", "colour=3", "is neither a run folder nor a layout: unknown layout option"),
        ("dp=2", SIMULATION, "both are the same step"),
        ("{run}", "{empty}", "has no recorded steps, and no traces"),
        ("{traces}", SIMULATION, "simulation is the prediction of a run's own layout"),
        ("{run}", "{json}", "is not a trace"),
    ],
)
def test_what_is_neither_a_run_nor_a_layout_is_refused(one: str, other: str, words: str, tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("run", "traces", "empty", "json")}
    write(records(), places["run"])
    for name in ("traces", "empty"):
        places[name].mkdir()
    store(places["traces"], lambda rank: on_cpu(rank, 0))
    places["json"].write_text('{"layout": "dp=2", "step_s": 1}')
    with pytest.raises((InputError, RecordError), match=words):
        differences(one.format(**places), other.format(**places), "cpu-laptop")


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_run_is_held_against_the_file_of_a_simulation_and_another_job_is_a_cause(
    tmp_path: Path, is_whole: bool
) -> None:
    write(records(), tmp_path / "run")
    (tmp_path / "run" / "record" / "job.toml").write_text(Job().to_toml())
    job = Job(model={"source": "preset:gpt2"}, train={"global_batch": Job().train.global_batch * 2})
    said = simulate(job, "dp=2", "cpu-laptop").to_record() | {"job": job.model_dump(mode="json")}
    path = tmp_path / "said.json"
    path.write_text(json.dumps({"samestep": "0", "verb": "simulate", "result": said} if is_whole else said))
    found = differences(str(tmp_path / "run"), str(path))
    assert found.other.step_s == said["step_s"]
    assert sum(found.other.rows.values()) == pytest.approx(found.other.step_s)
    assert "one is measured, the other predicted for cpu-laptop" in found.causes
    assert f"train.global_batch: {Job().train.global_batch} and {job.train.global_batch}" in found.causes
    assert any(cause.startswith("other layout options") for cause in found.causes)


@pytest.mark.parametrize(
    ("one", "other", "headline"),
    [
        ("{run}", "dp=4", "predicted for cpu-laptop: dp=4 takes {dp=4} ms per step, {own} {own_ms} ms: "),
        ("{run}", SIMULATION, "simulation (predicted) takes {own_ms} ms per step, {run} (measured) {run_ms} ms: "),
        ("{run}", "{own}", "{own} (predicted) takes {own_ms} ms per step, {run} (measured) {run_ms} ms: "),
        ("{run}", "{other}", "{other} takes {run_ms} ms per step, {run} {run_ms} ms: 0% shorter"),
    ],
)
def test_a_headline_holds_a_prediction_against_a_prediction_or_says_which_is_one(
    one: str, other: str, headline: str, tmp_path: Path
) -> None:
    for name in ("run", "other"):
        write(records(), tmp_path / name)
    own = explain(tmp_path / "run").layout
    step_s = {name: simulate(jobs.default([]), name, "cpu-laptop").step_s for name in (own, "dp=4")}
    places = {"run": tmp_path / "run", "other": tmp_path / "other", "own": own, "dp=4": f"{step_s['dp=4'] * 1e3:,.4g}"}
    found = differences(one.format(**places), other.format(**places), "cpu-laptop")
    measured = next((side for side in (found.one, found.other) if not side.predicted_for), found.one)
    places |= {"own_ms": f"{step_s[own] * 1e3:,.4g}", "run_ms": f"{measured.step_s * 1e3:,.4g}"}
    assert found.verdict.startswith(headline.format(**places))
    assert found.verdict.endswith(f"{places['run']} was measured at {places['run_ms']} ms") == headline.startswith(
        "predicted"
    )


def test_other_load_and_bytes_are_known_causes(tmp_path: Path) -> None:
    def loaded(queued_ns: int, ops: Any = OPS) -> dict[int, RankRecord]:
        made = records_of(LAYOUT, ops, TRANSFERS, {rank: script({}) for rank in range(4)})
        for one in made.values():
            one.steps = {step: replace(seen, queued_ns=queued_ns) for step, seen in one.steps.items()}
        return made

    heavier = [op._replace(size_bytes=2 * op.size_bytes) if op.axis == "tp" else op for op in OPS]
    write(loaded(0), tmp_path / "quiet")
    write(loaded(30_000_000, heavier), tmp_path / "loaded")
    found = differences(str(tmp_path / "quiet"), str(tmp_path / "loaded"))
    assert found.causes == (
        "buffers of a rank in a step: tp 1000 B, dp_replicate 4.88 KiB, world 64 B and "
        "tp 1.95 KiB, dp_replicate 4.88 KiB, world 64 B",
        "waits for a CPU that other programs used: 0 ms and 30 ms",
    )


@pytest.mark.parametrize(("ranks", "name"), [("[0, 1]", "0,1"), ([0, 8, 16, 24], "0,8..24"), (list(range(64)), "0-63")])
def test_groups_are_named_by_their_ranks(tmp_path: Path, ranks: Any, name: str) -> None:
    events = [
        span("ProfilerStep#3", "user_annotation", 0, 20),
        span("ncclDevKernel_AllReduce_Sum", "kernel", 2, 5, **{"Process Group Ranks": ranks}),
    ]
    store(tmp_path, lambda rank: {"traceEvents": events, "distributedInfo": {"rank": rank}}, ranks=1)
    assert f"exposed communication ranks {name} (guessed)" in explain_traces(tmp_path).to_text()


def test_cycles_of_a_profiler_are_one_trace_of_a_rank(tmp_path: Path) -> None:
    """As `tensorboard_trace_handler` writes them: a file of each cycle, with other steps."""
    for rank in (0, 1):
        for cycle in (0, 1):
            made = json.loads(json.dumps(on_cpu(rank, 20)).replace("ProfilerStep#", f"ProfilerStep#{cycle}"))
            made["baseTimeNanoseconds"] = BASE_NS + cycle * 10**9
            (tmp_path / f"host_{rank}.{cycle}.pt.trace.json").write_text(json.dumps(made))
    found = explain_traces(tmp_path)
    assert found.steps == (4, 13, 14)
    assert seconds_of(found.rows, WAIT, stage=0) == pytest.approx(0.02)


def test_ranks_without_a_trace_and_a_single_step_are_named(tmp_path: Path) -> None:
    def of_four(rank: int) -> dict[str, Any]:
        made = on_cpu(rank, 0)
        made["distributedInfo"]["world_size"] = 4
        made["traceEvents"] = [one for one in made["traceEvents"] if one["name"] != "ProfilerStep#4"]
        return made

    text = explain_traces(store(tmp_path, of_four)).to_text()
    assert "missing: the traces of ranks 2, 3" in text
    assert "missing: a second step" in text


def test_what_the_host_does_between_operations_is_its_own_and_a_call_of_a_collective_is_no_compute(
    tmp_path: Path,
) -> None:
    def made(rank: int) -> dict[str, Any]:
        events = [
            span("ProfilerStep#3", "user_annotation", 0, 100),
            span("aten::mm", "cpu_op", 0, 30),
            span("autograd::engine::evaluate_function: AccumulateGrad", "cpu_op", 40, 40),
            span("c10d::allreduce_", "cpu_op", 42, 36),
            span("gloo:all_reduce", "user_annotation", 50, 28, tid=9),
            span("aten::add_", "cpu_op", 80, 20),
        ]
        return {**on_cpu(rank, 0), "traceEvents": events}

    rows = explain_traces(store(tmp_path, made)).rows
    for rank in (0, 1):
        assert seconds_of(rows, "compute", stage=rank) == pytest.approx(0.05)
        assert seconds_of(rows, TRANSFER, stage=rank) == pytest.approx(0.028)
        assert seconds_of(rows, "host", stage=rank) == pytest.approx(0.022)
        assert seconds_of(rows, WAIT, REST, stage=rank) == pytest.approx(0.0)


@pytest.mark.parametrize("over", [0, 1], ids=["ends with its caller", "ends a nanosecond after it"])
def test_no_interval_of_a_call_is_empty_or_ends_before_it_begins(over: int) -> None:
    """A profiler rounds both ends of a call, so that a call may seem to outlast its caller."""
    calls = [(100, 200, "caller"), (120, 200 + over, "called"), (300, 400, "next")]
    expected = [("caller", 100, 120), ("called", 120, 200 + over), ("next", 300, 400)]
    assert [*own_times(calls)] == expected
