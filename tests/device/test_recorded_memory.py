"""The memory that a window records on a GPU is the allocator's own count: its peak, the op at which it stands, and what is reserved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samestep.datasets import batches
from samestep.job import Job
from samestep.program.recorded import path_of, read_record
from samestep.wings.explain.step_bytes import KEPT, StepMemory, step_memory
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import Tokens

JOB = job_of("float32", 4, train={"watch_every": 0})


def recorded(rank: int, world: int, model: str, layout: str, job: Job, folder: str) -> list[tuple[int, int]]:
    """Record two steps; return the allocator's peaks of every step, allocated and reserved."""
    run = make_run(rank, world, model, layout, job)
    run.record("2:3", folder)
    peaks = []
    for batch in batches(Tokens(), job):
        run.step(batch)
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    run.recorder.close()
    return peaks


def memories(folder: Path, rank: int) -> list[StepMemory]:
    record = read_record(path_of(folder, range(2, 4), rank))
    assert record.head.device != "cpu"
    found = [step_memory(record, number, None) for number in (2, 3)]
    assert all(found)
    return [one for one in found if one is not None]


@pytest.mark.parametrize(
    ("layout", "model"), [("dp=2 microbatch=2", "llama"), ("dp=2 zero=3", "llama"), ("pp=2 microbatch=2", "deep_llama")]
)
def test_the_peak_is_that_of_the_allocator_and_has_an_op(layout: str, model: str, tmp_path: Path) -> None:
    for rank, peaks in enumerate(on_ranks(layout, recorded, model, JOB, str(tmp_path), device="cuda")):
        for one, (allocated, reserved) in zip(memories(tmp_path, rank), peaks[1:3], strict=True):
            assert not one.is_process
            assert one.peak_bytes == allocated
            assert one.reserved_bytes is not None
            assert one.peak_bytes <= one.reserved_bytes <= reserved
            assert one.peak_at.partition(":")[0] in ("forward", "backward", "update")
            assert sum(one.parts.values()) == one.peak_bytes
            assert all(one.parts[name] > 0 for name in KEPT)
            assert [*one.over_step()] == [*one.parts]
