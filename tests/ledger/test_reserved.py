"""What the allocator would take for the tensors of real steps is what is predicted from their program.

Every storage of a run on a CPU is placed by the model of torch's allocator, in the order in which it really comes and goes; the
prediction knows the program alone, and divides what a layer keeps by its products.
"""

from __future__ import annotations

import gc
import itertools
import sys
from pathlib import Path

import pytest

from samestep.datasets import batches
from samestep.job_files import load
from samestep.layout import Layout
from samestep.program.update_rules import states_per_param
from samestep.runtime.run import Run
from samestep.training.workload import Workload
from samestep.wings.plan.simulation.caching_allocator import CachingAllocator, MemoryBlock
from samestep.wings.plan.simulation.reserved_memory import reserved_bytes
from tests.covering import daily
from tests.ledger.test_peaks import JOB, _place

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from live import Live

SETTINGS = (
    "train.global_batch=8", "train.watch_every=0", "data.sequence_length=128", "model.config.num_hidden_layers=2", "model.config.hidden_size=256",
    "model.config.intermediate_size=1024", "model.config.vocab_size=4096", "model.config.max_position_embeddings=512",
)  # fmt: skip
"""A model whose tensors are larger than the rounding of the allocator."""
STEPS = 2
PAGE = 20 * 2**20
"""Of memory as small as this the last page of a segment is a part."""


class Placed(Live):
    """Places each storage in allocators, as soon as it is there, until it is gone."""

    def __init__(self, allocators: list[CachingAllocator]) -> None:
        super().__init__()
        self.allocators = allocators
        self.blocks: dict[int, list[MemoryBlock]] = {}

    def _resized(self, key: int, size: int) -> None:
        if size != self._sizes[key]:
            self._drop(key)
            self.blocks[key] = [one.take(size, "compute") for one in self.allocators] if size else []
        super()._resized(key, size)

    def _gone(self, key: int, reference: object) -> None:
        super()._gone(key, reference)
        self._drop(key)

    def _drop(self, key: int) -> None:
        for allocator, block in zip(self.allocators, self.blocks.pop(key, ()), strict=False):
            allocator.give(block)


@pytest.mark.parametrize(
    ("layout", "precision"),
    daily(
        itertools.product(
            ("dp=1 microbatch=4", "dp=1 microbatch=4 recompute=full", "dp=1 microbatch=4 recompute=selective"),
            ("float32", "bf16"),
        )
    ),
)
def test_real_steps_would_reserve_what_is_predicted(layout: str, precision: str) -> None:
    gc.collect()
    gc.freeze()  # what other tests of this process have left is not counted
    job = load(JOB, (*SETTINGS, f"numerics.precision={precision}"))
    workload = Workload(job)
    run = Run(workload.source, Layout(layout), job, _place(0, 1))
    growing, fixed = allocators = [CachingAllocator(expandable=True), CachingAllocator(expandable=False)]
    placed = Placed(allocators)
    run.prepare(workload.example)
    steps = iter(batches(workload.dataset, job))
    run.step(next(steps))  # a watched step, which needs more: its repetitions hold outputs of the micro-batch twice
    placed.count_all()
    with placed.watching():
        for batch in itertools.islice(steps, STEPS):
            run.step(batch)
    for is_growing, real in ((True, growing), (False, fixed)):
        said = reserved_bytes(run.program, states_per_param(job), expandable=is_growing)
        assert said.allocated == pytest.approx(real.most_allocated_bytes, rel=0.03)
        assert said.reserved == pytest.approx(real.reserved_bytes, rel=0.03, abs=PAGE), (is_growing, said)
