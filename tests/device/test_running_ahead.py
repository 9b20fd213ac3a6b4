"""An update that is launched before the host knows the step's sums ends as one for which the host has waited."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.datasets import batches
from samestep.errors import NonFiniteError
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from samestep.training.rank_part import Profiler
from tests.device import waits
from tests.device.real_gpu import refusal
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import Tokens
from tests.parity import unused_weights
from tests.pool import pool

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

BAD_STEP = 3
"""Neither the first step, for which the host waits, nor the last."""
LAYOUTS = ("dp=1", "dp=2 zero=1")
LARGE = 2**26
"""Bytes, more than a step of the model takes."""
TWO_ROUNDINGS = 1e-6
"""Of the factor on the gradients, by whose inverse torch's fused kernels divide in float32."""


def job(policy: str = "skip", precision: str = "bf16") -> Job:
    return job_of(
        precision,
        6,
        numerics={"on_nonfinite": policy},
        optimizer={"name": "adamw", "lr": 1e-2, "clip_norm": 0.5, "options": {}},
        train={"watch_every": 0, "ema": 0.9},
    )


def weights(run: Run) -> list[Tensor]:
    """Return the masters and the moving averages of the weights that this rank updates."""
    averages = run.updater.averages
    assert averages is not None
    values = [value for piece in run.updater.pieces for value in (piece.master(), averages.of(piece))]
    return [value.cpu().clone() for value in values if value is not None]


class Faulty:
    """A run whose model makes an infinite output in one step, until it is removed."""

    def __init__(self, rank: int, world: int, model: str, layout: str, job: Job) -> None:
        self.run, self.job = make_run(rank, world, model, layout, job), job
        self.step = -1

    def take(self, waits: bool = False, leave_out: int | None = None) -> list[StepReport]:
        reports = []
        for batch in batches(Tokens(), self.job):
            self.step = batch.step
            if batch.step == leave_out:
                continue
            reports.append(self.run.step(batch))
            if batch.step == 0:
                first = next(iter(self.run.model.children()))
                first.register_forward_hook(self._fail)
                self.run._stepper._deciders.writes_unseen = waits
        return reports

    def _fail(self, module: object, args: object, output: Tensor) -> Tensor:
        return output * torch.inf if self.step == BAD_STEP else output


def skipped(rank: int, world: int, model: str, layout: str, job: Job) -> dict[str, Any]:
    """Return weights and reports of a run that skips a step, running ahead, waiting, and without the step's data."""
    ahead, waiting = Faulty(rank, world, model, layout, job), Faulty(rank, world, model, layout, job)
    reports, expected = ahead.take(), waiting.take(waits=True)
    spared = Faulty(rank, world, model, layout, job)
    spared.take(leave_out=BAD_STEP)
    return {
        "skipped": [report.skipped for report in reports],
        "notes": ([report.note for report in reports], [report.note for report in expected]),
        "losses": ([report.loss for report in reports], [report.loss for report in expected]),
        "weights": [weights(one.run) for one in (ahead, spared, waiting)],
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_is_not_finite_is_skipped_and_named(layout: str) -> None:
    for seen in on_ranks(layout, skipped, "plain", job(), device="cuda"):
        assert seen["skipped"] == [step == BAD_STEP for step in range(6)]
        ours, theirs = seen["notes"]
        assert ours == theirs
        assert "not finite" in ours[BAD_STEP]
        assert seen["losses"][0] == pytest.approx(seen["losses"][1], rel=1e-2, nan_ok=True)
        ahead, spared, waiting = seen["weights"]
        for one, other, third in zip(ahead, spared, waiting, strict=True):
            assert torch.equal(one, other)
            assert torch.allclose(one, third, rtol=0, atol=1e-2)


def open_steps(rank: int, world: int, model: str, layout: str, job: Job, folder: Path) -> list[bool]:
    """Return after which steps of a run of `samestep train` the host does not know the sums."""
    run = make_run(rank, world, model, layout, job)
    run._stepper.guards.observer = Profiler(range(0), folder, run.place)
    return [run.step(batch).step > 0 and run._stepper.launched is not None for batch in batches(Tokens(), job)]


def test_a_profiler_does_not_keep_the_host_from_running_ahead(tmp_path: Path) -> None:
    for seen in on_ranks("dp=1", open_steps, "plain", job(), tmp_path, device="cuda"):
        assert seen == [False, *[True] * 5]


def peaks(rank: int, world: int, model: str, layout: str, job: Job) -> list[tuple[int, int | None]]:
    """Return the peaks of each step; between two of them this process holds much for a moment."""
    gc.collect()  # what an earlier test has left in a cycle would be freed in one of the steps
    faulty, found = Faulty(rank, world, model, layout, job), []
    for batch in batches(Tokens(), job):
        if batch.step == 4:
            torch.zeros(LARGE, dtype=torch.uint8, device="cuda")
        report = faulty.run.step(batch)
        found.append((report.memory_bytes, report.reserved_bytes))
    return found


def test_the_peak_of_memory_is_that_of_one_step() -> None:
    for found in on_ranks("dp=1", peaks, "plain", job(), device="cuda"):
        assert all(reserved is not None and allocated <= reserved < LARGE for allocated, reserved in found)
        assert found[-1] == found[-2] == found[-3]


def stopped(rank: int, world: int, model: str, layout: str, job: Job) -> tuple[list[str], int, list[bool]]:
    """Return the errors of a run that stops, where it stands, and whether its weights are those before the step."""
    faulty, errors = Faulty(rank, world, model, layout, job), []
    taken: list[StepReport] = []
    before: list[Tensor] = []
    for batch in batches(Tokens(), job):
        faulty.step = batch.step
        if batch.step == BAD_STEP:
            before = weights(faulty.run)
        taken.append(faulty.run.step(batch))
        if batch.step == 0:
            next(iter(faulty.run.model.children())).register_forward_hook(faulty._fail)
        if batch.step == BAD_STEP:
            break
    for read in (lambda: taken[-1].loss, lambda: taken[-1].note):
        with pytest.raises(NonFiniteError) as error:
            read()
        errors.append(str(error.value))
    same = [torch.equal(one, other) for one, other in zip(before, weights(faulty.run), strict=True)]
    return errors, faulty.run.steps_taken, same


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stop_is_said_when_the_report_is_read_and_leaves_the_weights(layout: str) -> None:
    for errors, steps_taken, same in on_ranks(layout, stopped, "plain", job("stop"), device="cuda"):
        assert errors[0] == errors[1]
        assert errors[0].startswith(f"step {BAD_STEP + 1}: ")
        assert "not finite" in errors[0]
        assert steps_taken == BAD_STEP
        assert same
        assert all(same)


def written(rank: int, world: int, model: str, layout: str, job: Job) -> list[list[Tensor]]:
    """Return the weights of runs in which the user halves the weights between two steps, running ahead and waiting."""
    found = []
    for has_waited in (False, True):
        faulty = Faulty(rank, world, model, layout, job)
        parameters: list[Tensor] = []
        for batch in batches(Tokens(), job):
            faulty.run.step(batch)
            if batch.step == 0:
                faulty.run._stepper._deciders.writes_unseen = has_waited
                parameters = list(faulty.run.model.parameters())
            if batch.step == 2:
                for parameter in parameters:
                    parameter.data.mul_(0.5)
            if batch.step == 4:
                with torch.no_grad():
                    parameters[0].add_(1.0)
        found.append(weights(faulty.run))
    return found


@pytest.mark.parametrize(("layout", "precision"), [("dp=1", "float32"), ("dp=1", "bf16"), ("dp=2 zero=1", "bf16")])
def test_what_a_user_writes_between_steps_is_kept(layout: str, precision: str) -> None:
    for ahead, waiting in on_ranks(layout, written, "plain", job(precision=precision), device="cuda"):
        for one, other in zip(ahead, waiting, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=TWO_ROUNDINGS if precision == "float32" else 1e-2)
            assert float((one - other).abs().mean()) < 1e-4


def unused(rank: int, world: int, model: str, layout: str, seed: int) -> dict[str, Any]:
    """Return what a loop that uses other weights in each step computes, and after which steps the host does not know the sums."""
    made = unused_weights.job(precision="float32", device="cuda", train={"watch_every": 0})
    run = unused_weights.run_of(rank, world, model, layout, made, FUSED)
    losses, ahead, waited = [], [], []
    with waits.counting():
        for loss in unused_weights.reports(run, unused_weights.turns("both", seed)):
            ahead.append(run._stepper.launched is not None)
            waited.append(Counter(waits.counted)[CLOSED])
            waits.clear()
            losses.append(loss)
    return {
        "losses": [report.loss for report in losses],
        "weights": {name: value.double() for name, value in run.state_dict(on_every_rank=True).items()},
        "ahead": ahead,
        "waited": waited,
    }


FUSED = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True)
CLOSED = waits.Place("synchronize", "runtime/open_step.py:OpenStep.read")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("switched", "dp=1"),
        ("experts", "dp=2 zero=1"),
        pytest.param("switched", "dp=2 zero=3", marks=pytest.mark.nightly),
        pytest.param("matched", "dp=2 offload", marks=pytest.mark.nightly),
    ],
)
def test_a_step_that_uses_other_weights_runs_ahead_and_waits_no_more(model: str, layout: str) -> None:
    losses, weights = unused_weights.plain(model, None, "momentum", "both", 3)
    for seen in pool(Layout(layout).world_size, "cuda").run(unused, model, layout, 3):
        assert seen["losses"] == pytest.approx(losses, rel=1e-5)
        for name, value in weights.items():
            assert torch.allclose(seen["weights"][name], value, rtol=1e-5, atol=1e-6), name
        assert all(seen["ahead"][2:]) or "offload" in layout, "the host waits for the first update of a weight alone"
        assert max(seen["waited"][1:]) == 1
