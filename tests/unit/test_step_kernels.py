"""Kernels are read from a file beside a record, and belong to the op in which the host has issued them."""

from __future__ import annotations

from pathlib import Path

from samestep.explanation.step_kernels import kernels_of
from samestep.program.recorded import RankRecord, RecordedStep, RecordHead
from samestep.program.recorded_kernels import Kernel, StepKernels, head_line, path_beside, step_line


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
    path_beside(path).write_text(head_line(0, "") + step_line(seen))
    head = recorded_on_a_gpu()
    found, missing = kernels_of({0: RankRecord(path, head, {1: step})}, [1])
    assert not missing
    rows = [(row.op, row.kernel, row.calls, round(row.seconds * 1e9)) for row in found[0].rows]
    assert rows == [("backward:a", "add", 1, 500), ("backward:a", "gemm", 1, 100), ("forward:a", "gemm", 1, 300)]
