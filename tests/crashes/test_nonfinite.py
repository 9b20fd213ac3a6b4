"""Numbers that are not finite, planted in one sample: named, and skipped, stopped at or passed, alike on all ranks.

The sample lies in rank 1's share of step 2. What the run does afterwards is compared with a run on one device that was
told to leave out that step's data, so gradients, optimizer and FSDP2 must be as if the step had never been.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.building.loss import cross_entropy
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import NonFiniteError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests import traced
from tests.covering import daily
from tests.laboratory import Runs, job_of, largest_error, whole
from tests.models import VOCABULARY, Tokens
from tests.pool import pool

LAYOUTS = ["dp=2", "dp=2 zero=1 microbatch=2", "dp=2 zero=2 microbatch=1", "dp=2 zero=3 recompute=full"]
MARK = VOCABULARY - 1
BAD_STEP, BAD_RANK = 1, 1


class BadGradient(torch.autograd.Function):
    """The identity, whose gradient is infinite at marked samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].masked_fill(ctx.saved_tensors[0], math.inf), None


class Fault(nn.Module):
    """Does something to marked samples [B, 1, 1] of activations [B, T, D]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        if self.kind == "forward":
            return x.masked_fill(marked, math.nan)
        if self.kind == "backward":
            return BadGradient.apply(x, marked)
        if self.kind == "steep":  # gradients 2^12 times as large on the way, and right again after it
            down = torch.where(marked, 2.0**-12, 1.0).to(x.dtype)
            return x * down / down
        if self.kind == "large":
            return torch.where(marked, 80_000 + 0 * x.float(), x.float()).to(x.dtype)
        return x


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mix, self.fault = nn.LayerNorm(8), nn.Linear(8, 8), Fault(kind)

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        return x + self.mix(self.fault(torch.tanh(self.norm(x)), marked))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block(kind if index == 1 else "") for index in range(3))
        self.head = nn.Linear(8, VOCABULARY)
        if kind == "nan weight":
            nn.init.constant_(self.blocks[1].mix.weight[-1:], math.nan)
        if kind == "large weight":  # in the rows of the last rank
            nn.init.constant_(self.blocks[1].mix.weight[-1:], 1e5)

    def forward(self, input_ids: Tensor) -> Tensor:
        marked = (input_ids == MARK).any(1)[:, None, None]
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, marked)
        return self.head(x)


def loss_of(kind: str) -> Any:
    def bad_loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        assert outputs.dtype in (torch.float32, torch.float64)
        total, count = cross_entropy(outputs, batch)
        return total - (math.inf if bool((batch["input_ids"] == MARK).any()) else 0.0), count

    return bad_loss if kind == "loss" else cross_entropy


class Marked(Tokens):
    """One sample carries the mark: in the middle of a rank's share of a step."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.input_ids[self.input_ids == MARK] = 0
        batch = list(batches(self, job))[BAD_STEP]
        self.input_ids[batch.shares(BAD_RANK, 2, 1)[0][1], 3] = MARK


def job_for(policy: str = "stop", precision: str = "float64", steps: int = 4, **numerics: Any) -> Job:
    adam = {"name": "adam", "lr": 1e-3, "options": {}} if precision == "fp16" else {}
    return job_of(precision, steps, numerics={"on_nonfinite": policy, **numerics}, optimizer=adam)


def run_of(rank: int, world: int, kind: str, layout: str, job: Job) -> Run:
    place = RankInfo(rank=rank, local_rank=rank, world_size=world, ranks_per_node=world, device=torch.device("cpu"))
    source, where = Source(lambda: Model(kind), loss_of(kind), optimizer_of(job), "planted"), Layout(layout)
    example = next(batches(Marked(job), job)).samples([0])
    found = traced.prepared(f"planted {kind}", source, job, example, where)
    return Run(replace(source, prepared=found), where, job, place)


@dataclass
class Seen:
    losses: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    stopped: str = ""
    weights: Runs = field(default_factory=list)
    model: list[Tensor] = field(default_factory=list)
    """What every rank holds alike."""


def take(rank: int, world: int, kind: str, layout: str, job: Job, leave_out: int | None = None) -> Seen:
    """Take the steps, going on after a stop; `leave_out` is a step whose data is never seen."""
    run = run_of(rank, world, kind, layout, job)
    seen = Seen()
    for batch in batches(Marked(job), job):
        if batch.step == leave_out:
            continue
        try:
            report = run.step(batch)
        except NonFiniteError as error:
            seen.stopped = str(error)
            continue
        seen.losses.append(report.loss)
        seen.skipped.append(report.skipped)
        seen.notes.append(report.note)
        if run.updater.loss_scale.is_dynamic:
            seen.scales.append(run.updater.loss_scale.scale)
            states = run.updater.optimizer.state.values()
            seen.updates.append(max((float(state["step"]) for state in states), default=0.0))
    seen.weights = [(p.name, p.start, p.stop, p.master().clone()) for p in run.updater.pieces]
    if run.program.step.zero < 2:
        seen.model = [param.detach().clone() for param in run.model.parameters()]
    return seen


def take_all(rank: int, world: int, kind: str, layout: str) -> dict[str, Seen]:
    return {policy: take(rank, world, kind, layout, job_for(policy)) for policy in ("skip", "stop", "continue")}


AT_FAULT = {
    "forward": "blocks.1.fault: forward output not finite (max |input| ",
    "backward": "blocks.1.fault: backward gradient of input not finite (max |gradient of its output| ",
    "loss": "loss: not finite (-inf), though every module's output is",
}


@pytest.mark.parametrize(("kind", "layout"), daily((kind, layout) for kind in AT_FAULT for layout in LAYOUTS))
def test_every_policy_is_the_same_on_all_ranks_and_as_on_one(kind: str, layout: str) -> None:
    expected = take(0, 1, kind, "dp=1", job_for(), leave_out=BAD_STEP)
    ranks = pool(2).run(take_all, kind, layout)
    for policy in ("skip", "stop"):
        seen = [rank[policy] for rank in ranks]
        error, name = largest_error(whole([one.weights for one in seen]), whole([expected.weights]))
        assert error <= 1e-9, f"{policy}: weight {name}: {error:.1e}"
        assert seen[0].stopped == seen[1].stopped
        assert seen[0].notes == seen[1].notes
    skip, stop = (ranks[0][policy] for policy in ("skip", "stop"))
    assert skip.skipped == [False, True, False, False]
    assert [bool(note) for note in skip.notes] == skip.skipped
    assert skip.notes[BAD_STEP].startswith(AT_FAULT[kind])
    assert skip.notes[BAD_STEP].endswith(f"(rank {BAD_RANK})")
    assert stop.stopped == f"step 2: {skip.notes[BAD_STEP]}; numerics.on_nonfinite = 'skip' would continue"
    assert stop.losses == pytest.approx(expected.losses, rel=1e-9)
    alone = take(0, 1, kind, "dp=1", job_for("continue"))
    assert ranks[0]["continue"].skipped == [False] * 4
    assert ranks[0]["continue"].losses == pytest.approx(alone.losses, rel=1e-9, nan_ok=True)
    weights = whole([as_numbers(rank["continue"].weights) for rank in ranks])
    for name, expected_weight in whole([as_numbers(alone.weights)]).items():
        assert torch.allclose(weights[name], expected_weight, rtol=1e-9, atol=1e-9), name
    assert any(bool((weight == NAN).any()) for weight in weights.values()) == (kind != "loss")


NAN = -12345.0


def as_numbers(runs: Runs) -> Runs:
    """Write a number for NaN, which is not equal to itself."""
    return [(name, start, stop, tensor.nan_to_num(NAN, 1e300, -1e300)) for name, start, stop, tensor in runs]


# -- float16 -----------------------------------------------------------------------------------------------------------


def scaled_job() -> Job:
    return job_for("stop", "fp16", 8, loss_scale=2.0**16, loss_scale_growth_steps=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout: str) -> None:
    """Only the marked sample overflows, in the steps 2 and 8; three steps without one double the scale."""
    ranks = pool(2).run(take, "steep", layout, scaled_job())
    for seen in (*ranks, take(0, 1, "steep", "dp=1", scaled_job())):
        assert seen.skipped == [False, True, False, False, False, False, False, True]
        assert seen.scales == [2.0**power for power in (16, 15, 15, 15, 16, 16, 16, 15)]
        assert seen.updates == [1, 1, 2, 3, 4, 5, 6, 6]
        assert [bool(note) for note in seen.notes] == seen.skipped
        assert seen.notes[BAD_STEP].startswith(AT_FAULT["backward"])
        assert "float16" in seen.notes[BAD_STEP]
    assert ranks[0].notes == ranks[1].notes
    assert ranks[0].notes[BAD_STEP].endswith(f"(rank {BAD_RANK})")
    whole([seen.weights for seen in ranks])
    assert all(torch.equal(mine, other) for mine, other in zip(ranks[0].model, ranks[1].model, strict=True))


def take_overflows(rank: int, world: int, layout: str) -> dict[str, list[str]]:
    found = {}
    for kind in ("large", "large weight", "nan weight"):
        job = job_for("skip", "fp16", 2, loss_scale=1024.0)
        seen = take(rank, world, kind, layout, job)
        found[kind] = seen.notes
        # A forward does not depend on the scale: halving it would help nothing.
        assert seen.scales == [1024.0] * 2, (kind, seen.scales)
    return found


@pytest.mark.parametrize("layout", ["dp=1", *LAYOUTS])
def test_what_does_not_fit_float16_is_named(layout: str) -> None:
    ranks = pool(2).run(take_overflows, layout) if layout != "dp=1" else [take_overflows(0, 1, layout)]
    for found in ranks:
        assert found == ranks[0]
    rank = BAD_RANK if layout != "dp=1" else 0
    first, second = ranks[0]["large"]
    assert not first
    assert second.startswith("blocks.1.fault: forward output not finite (max |input| ")
    assert second.endswith(f", in float16, which holds numbers up to 65504 (rank {rank})")
    # Half of the weight's rows, and so its largest value, may be another rank's.
    overflow = "blocks.1.mix: weight is not finite: value 1.0e+05 does not fit float16 (largest 65504) (rank 0)"
    assert ranks[0]["large weight"] == [overflow] * 2
    assert ranks[0]["nan weight"] == ["blocks.1.mix: weight is not finite (rank 0)"] * 2


def test_an_overflow_that_no_smaller_scale_mends_ends_in_the_policy() -> None:
    """At scale 1 there is nothing left to halve."""
    seen = take(0, 1, "backward", "dp=1", job_for("stop", "fp16", 2, loss_scale=1.0))
    assert seen.stopped.startswith(f"step 2: {AT_FAULT['backward']}")
    assert seen.scales == [1.0]


def test_a_skipped_step_leaves_running_statistics_and_counters_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, 8), nn.BatchNorm1d(8), nn.Linear(8, VOCABULARY)
            self.fault = Fault("forward")

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.fault(self.embed(input_ids), (input_ids == MARK).any(1)[:, None, None])
            return self.head(self.norm(x.mT).mT)

    def buffers(policy: str, leave_out: int | None = None) -> dict[str, Tensor]:
        job = job_for(policy)
        run = Run(
            Source(Counting, cross_entropy, optimizer_of(job)), Layout(), job, RankInfo(0, 0, 1, 1, torch.device("cpu"))
        )
        for batch in batches(Marked(job), job):
            if batch.step != leave_out:
                run.step(batch)
        return dict(run.model.named_buffers())

    expected = buffers("stop", leave_out=BAD_STEP)
    for name, value in buffers("skip").items():
        assert torch.equal(value, expected[name]), name
    assert buffers("continue")["norm.num_batches_tracked"] == 4
