"""A step waits for the device once, and every wait and copy beside it has a name and a reason.

What is counted is the last step of a run, by function. A new wait, or one more of a known one, fails here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from samestep.building.loss import mse
from samestep.building.loss_result import as_number
from samestep.datasets import batches
from samestep.job import Job
from samestep.program.recorded import path_of, read_record
from tests.device import real_gpu, waits
from tests.device.real_gpu import refusal
from tests.laboratory import clipped, job_of, make_run, on_ranks
from tests.models import Tokens
from tests.pool import pool

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

SCALARS = ("to host pinned asynchronous", "runtime/device_decides.py:Decider.reading")
STEP_BEFORE = ("synchronize", "runtime/open_step.py:OpenStep.read")
WRITTEN = ("to host pinned asynchronous", "runtime/weights/pieces.py:LiveWeights.begin_step")
WRITTEN_THERE = ("synchronize", "runtime/weights/pieces.py:LiveWeights.was_written_early")
SAMPLES = ("to device pinned asynchronous", "runtime/host_copies.py:to_device")
KEYS = ("to device pinned asynchronous", "randomness/row_hashes.py:ForwardRows._begin")
GRADIENTS = ("to host pinned asynchronous", "runtime/host_copies.py:send_to_values")
WEIGHTS = ("to device pinned asynchronous", "runtime/host_copies.py:_send")
INPUTS = ("to host pinned asynchronous", "runtime/axes/host_inputs.py:HostLanes._copied")
INPUTS_BACK = ("to device pinned asynchronous", "runtime/axes/host_inputs.py:HostLanes._copied")
ROWS_OF_EXPERTS = ("to host", "runtime/axes/expert.py:_kept_or_counted")

REASONS = {
    SCALARS: "the count, the norm and the flags of all ranks; the CPU does not wait for them in the step",
    STEP_BEFORE: "before a step the CPU waits for the sums of the previous step; the device may still be at its update",
    WRITTEN: "weights beside masters: whether the user has written them between two steps",
    WRITTEN_THERE: "weights beside masters: the CPU has launched the whole step, and waits until the device begins it",
    SAMPLES: "tokens, labels and, for dropout, indices of samples come from the CPU, which does not wait",
    KEYS: "dropout: the keys of all masks of a micro-batch come from the CPU, which does not wait",
    GRADIENTS: "offload: the optimizer works on the CPU, where gradients arrive before the step's sums do",
    WEIGHTS: "offload: updated weights go back, and the CPU does not wait",
    INPUTS: "recompute=offload: inputs of blocks leave while the blocks compute, and the CPU does not wait",
    INPUTS_BACK: "recompute=offload: they come back during the backward pass of later blocks, and the CPU does not wait",
    ROWS_OF_EXPERTS: "the number of rows in an exchange depends on the chosen experts; a repeated forward reuses it",
}
PIECES = 21
"""Weights of the small Llama."""


def counted(rank: int, world: int, model: str, layout: str, job: Job) -> Counter[waits.Place]:
    """Return the waits and copies of the last step."""
    run = make_run(rank, world, model, layout, job)
    stream = batches(Tokens(), job)
    with waits.counting():
        for _ in range(job.train.steps):
            waits.clear()
            run.step(next(stream))  # where the step before is closed
    return Counter(waits.counted)


RUNNING_AHEAD = job_of("bf16", 3, optimizer={"clip_norm": 0.5}, train={"watch_every": 0})
"""Three steps: the host waits for the first, so the third is the first one that closes a step which ran ahead."""
BESIDE_MASTERS = {WRITTEN: 1, WRITTEN_THERE: 1}
OFFLOADED = {GRADIENTS: PIECES, WEIGHTS: PIECES}
EXPECTED: list[tuple[str, str, dict[tuple[str, str], int]]] = [
    ("dp=1", "plain", {SAMPLES: 2, **BESIDE_MASTERS}),
    ("dp=2", "llama", {SAMPLES: 2, **BESIDE_MASTERS}),
    ("dp=2 zero=1", "llama", {SAMPLES: 2, **BESIDE_MASTERS}),
    ("dp=2 zero=3 microbatch=2", "llama", {SAMPLES: 4}),
    ("dp=1 microbatch=1", "llama", {SAMPLES: 16, **BESIDE_MASTERS}),
    ("dp=2 microbatch=2", "gpt2_with_dropout", {SAMPLES: 6, KEYS: 2, **BESIDE_MASTERS}),
    ("dp=2 zero=3 offload", "llama", {SAMPLES: 2, **OFFLOADED}),
    ("dp=2 recompute=offload", "deep_llama", {SAMPLES: 2, INPUTS: 3, INPUTS_BACK: 3, **BESIDE_MASTERS}),
    ("tp=2 sequence_parallel", "llama", {SAMPLES: 2, **BESIDE_MASTERS}),
    ("cp=2", "llama", {SAMPLES: 2, **BESIDE_MASTERS}),
    ("cp=2 exchange=ring", "llama", {SAMPLES: 2, **BESIDE_MASTERS}),
    ("pp=2 microbatch=2", "llama", {SAMPLES: 8, **BESIDE_MASTERS}),
    ("dp=2 ep=2 recompute=full", "mixtral_balanced", {SAMPLES: 2, ROWS_OF_EXPERTS: 2, **BESIDE_MASTERS}),
]


def counted_in_a_window(rank: int, world: int, model: str, layout: str, job: Job, folder: str) -> Counter[waits.Place]:
    """Return the same of a step whose ops are all recorded; the record has been written when the run is closed."""
    run = make_run(rank, world, model, layout, job)
    run.record("2:3", folder)
    stream = batches(Tokens(), job)
    with waits.counting():
        for _ in range(job.train.steps):
            waits.clear()
            run.step(next(stream))
    seen = Counter(waits.counted)
    run.recorder.close()
    assert [*read_record(path_of(Path(folder), range(2, 4), rank)).steps] == [2, 3]
    return seen


def expected(row: tuple[str, str, dict[tuple[str, str], int]]) -> dict[tuple[str, str], int]:
    """Return all waits and copies of a row; `docs/reference/waits.md` shows them."""
    return {SCALARS: 1, STEP_BEFORE: 1, **row[2]}


def of_one_rank() -> Counter[waits.Place]:
    """Return all waits and copies of a rank alone, in bf16."""
    return Counter({waits.Place(*place): count for place, count in expected(EXPECTED[0]).items()})


@pytest.mark.parametrize(
    ("layout", "model", "others"),
    [
        pytest.param(*row, id=row[0], marks=[pytest.mark.nightly] * (row[0] in ("dp=2", "dp=2 zero=1")))
        for row in EXPECTED
    ],
)
def test_a_step_waits_once(layout: str, model: str, others: dict[tuple[str, str], int]) -> None:
    awaited = Counter({waits.Place(*place): count for place, count in expected((layout, model, others)).items()})
    for seen in on_ranks(layout, counted, model, RUNNING_AHEAD, device="cuda"):
        assert waits.by_function(seen) == waits.by_function(awaited)
        assert seen == awaited or real_gpu.is_asked(), "a real GPU tells of waits alone"


def test_recording_adds_no_wait(tmp_path: Path) -> None:
    row = next(row for row in EXPECTED if row[0] == "dp=2 zero=3 microbatch=2")
    awaited = Counter({waits.Place(*place): count for place, count in expected(row).items()})
    for seen in on_ranks(row[0], counted_in_a_window, "llama", RUNNING_AHEAD, str(tmp_path), device="cuda"):
        assert waits.by_function(seen) == waits.by_function(awaited)
        assert seen == awaited or real_gpu.is_asked()


ADDING_NO_WAIT = {
    "a loss scale": job_of("fp16", 3, optimizer={"clip_norm": 0.5}, train={"watch_every": 0}),
    "8-bit states": job_of("bf16", 3, numerics={"optimizer_states": "8bit"}, train={"watch_every": 0}),
}
"""A loss scale changes between steps, by sums that the host reads anyway; states are widened and packed on the device."""


@pytest.mark.parametrize("job", ADDING_NO_WAIT.values(), ids=ADDING_NO_WAIT)
def test_numerics_that_add_no_wait(job: Job) -> None:
    awaited = Counter({waits.Place(*place): count for place, count in expected(EXPECTED[0]).items()})
    (seen,) = on_ranks("dp=1", counted, "plain", job, device="cuda")
    assert waits.by_function(seen) == waits.by_function(awaited)
    assert seen == awaited or real_gpu.is_asked()


def test_every_wait_has_a_reason() -> None:
    assert REASONS.keys() == {SCALARS, STEP_BEFORE, *(place for _, _, others in EXPECTED for place in others)}


def counting_in_python(rank: int, world: int) -> Counter[waits.Place]:
    """Return the waits and copies of counts that are Python numbers."""
    on_device = torch.ones(2, 3, device="cuda")
    waits.clear()
    with waits.counting():
        as_number(3, on_device)
        mse(on_device, (on_device, on_device))
    return Counter(waits.counted)


def test_counts_are_not_copied() -> None:
    assert pool(1, "cuda").run(counting_in_python) == [Counter()]


def hidden_waits(rank: int, world: int, model: str, layout: str, job: Job) -> Counter[waits.Place]:
    """Return the waits and copies of the last step of a run in which a hook of the model looks at a value."""
    run = make_run(rank, world, model, layout, job)

    def looks(module: object, args: object, output: Tensor) -> None:
        if float(output.detach().sum()) == 0.5:
            raise AssertionError

    with waits.counting():
        for step, batch in enumerate(batches(Tokens(), job)):
            if step == 1:
                next(iter(run.model.children())).register_forward_hook(looks)
            waits.clear()
            run.step(batch)
    return Counter(waits.counted)


def test_a_hidden_wait_is_found() -> None:
    (seen,) = on_ranks("dp=1", hidden_waits, "plain", clipped("bf16"), device="cuda")
    known = {where for _, where in REASONS}
    assert {where: count for where, count in waits.by_function(seen).items() if where not in known} == {
        "building/model.py:call_model < device/test_waits.py:hidden_waits": 1
    }
