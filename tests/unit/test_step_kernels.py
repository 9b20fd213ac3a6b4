"""Kernels are read from a file beside a record, and belong to the op in which the host has issued them."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.program.recorded import (
    Kernel,
    RankRecord,
    RecordedStep,
    RecordHead,
    StepKernels,
    kernel_head,
    kernel_line,
    kernel_path,
)
from samestep.runtime.recording.sums import sums_of
from samestep.wings.explain.step_kernels import kernels_of, own_times


def recorded_on_a_gpu() -> RecordHead:
    of = {"rank": 0, "world_size": 1, "host": "h", "clock": "c", "layout": "dp=1", "stage": 0, "device": "a GPU"}
    return RecordHead(**of, groups={}, ops=(), layers=("a",))  # type: ignore[arg-type]


def test_kernels_of_a_gpu_belong_to_the_op_of_the_host_that_issued_them(tmp_path: Path) -> None:
    """They run later, and on the clock of the device: the record's own events are of no use for them."""
    host = [["task", "F0", 100, 300], ["layer", "a", 100, 200], ["task", "B0", 300, 500], ["backward", "a", 300, 310]]
    late = [[form, name, begin + 5000, end + 5000] for form, name, begin, end in host]
    step = RecordedStep(step=1, begin_ns=0, end_ns=9000, until_ns=9000, cpu_ns=0, events=late)
    kernels = [Kernel(0, 150, 5100, 5400, 300), Kernel(1, 320, 5400, 5900, 500), Kernel(0, 330, 5900, 6000, 100)]
    seen = StepKernels(step=1, names=["gemm", "add"], kernels=kernels, events=host)
    path = tmp_path / "steps-1-1.rank0.jsonl"
    kernel_path(path).write_text(kernel_head(0, "") + kernel_line(seen))
    head = recorded_on_a_gpu()
    found, missing = kernels_of({0: RankRecord(path, head, {1: step})}, [1])
    assert not missing
    rows = [(row.op, row.kernel, row.calls, round(row.seconds * 1e9)) for row in found[0].rows]
    assert rows == [("backward:a", "add", 1, 500), ("backward:a", "gemm", 1, 100), ("forward:a", "gemm", 1, 300)]


@pytest.mark.parametrize("over", [0, 1], ids=["ends with its caller", "ends a nanosecond after it"])
def test_no_interval_of_a_call_is_empty_or_ends_before_it_begins(over: int) -> None:
    """A profiler rounds both ends of a call, so that a call may seem to outlast its caller."""
    calls = [(100, 200, "caller"), (120, 200 + over, "called"), (300, 400, "next")]
    expected = [("caller", 100, 120), ("called", 120, 200 + over), ("next", 300, 400)]
    assert [*own_times(calls)] == expected


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
