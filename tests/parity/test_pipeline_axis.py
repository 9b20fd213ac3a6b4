"""Pipelines of any decoder, alone and in products with the other axes, compute what one device computes.

float64, 1e-9, and the ledger: sends, receives, and every sum. Among the models are the known silent errors: embeddings
tied across stages, and embeddings that the model scales before its blocks (Gemma, Granite).
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import LayoutError, ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from tests.code import pipeline_models as models
from tests.laboratory import job_of, program_traced_in, run_from
from tests.models import Tokens
from tests.pool import pool


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        ("deep_llama", "pp=8", "cuts the 4 blocks of deep_llama into 8 stages. Use pp=4"),
        (
            "deep_llama",
            "pp=4 schedule=interleaved virtual_stages=2",
            "blocks of deep_llama into 8 virtual stages. Use schedule=1f1b",
        ),
        ("deep_llama", "pp=2 virtual_stages=2", "needs schedule=interleaved"),
        ("deep_llama", "dp=2 pp=2 zero=3 schedule=zero-bubble", "Use zero=1, or schedule=1f1b"),
        ("deep_llama", "pp=2 schedule=zero-bubble virtual_stages=2", "needs schedule=interleaved"),
    ],
)
def test_what_cannot_be_is_refused(model: str, layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        program_traced_in(layout, model)


class Shaken(models.Language):
    """Something is added in front of every block: numbers that are drawn, which stages refuse in the middle of a step."""

    draws = True

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x + (torch.nn.init.uniform_(torch.empty_like(x)) if self.draws else torch.ones_like(x)))
        return self.head(x)


class Steady(Shaken):
    draws = False


def losses_of(rank: int, world: int, build: type[Shaken], layout: str, job: Job) -> list[float]:
    run = run_from(Source(build, loss_of(job), optimizer_of(job), build.__name__), layout, job, rank, world)
    return [run.step(batch).loss for batch in batches(Tokens(), job)]


def losses_behind_a_refusal(rank: int, world: int, layout: str, job: Job) -> list[float]:
    with pytest.raises(ModelError, match="its random numbers would differ"):
        losses_of(rank, world, Shaken, layout, job)
    return losses_of(rank, world, Steady, layout, job)


def test_a_run_behind_one_that_was_refused_in_the_middle_of_a_step_gets_its_own_messages() -> None:
    job = job_of(run={"timeout_s": 20})
    found = pool(2).run(losses_behind_a_refusal, "pp=2 microbatch=4", job)
    assert found[0] == pytest.approx(losses_of(0, 1, Steady, "dp=1", job), rel=1e-12)


class FailingOnce(torch.optim.SGD):
    """Fails on the rank that says so, when all messages of a step have come."""

    fails = False

    def step(self, closure: None = None) -> None:
        if FailingOnce.fails:
            FailingOnce.fails = False
            raise ArithmeticError("no step today")
        super().step(closure)


def losses_behind_a_failure(rank: int, world: int, layout: str, job: Job) -> list[float]:
    source = Source(Steady, loss_of(job), lambda params: FailingOnce(params, lr=0.1), "steady")
    run, steps = run_from(source, layout, job, rank, world), batches(Tokens(), job)
    run.step(next(steps))
    FailingOnce.fails = rank == 1
    with pytest.raises(ArithmeticError) if rank == 1 else contextlib.nullcontext():
        run.step(next(steps))
    return losses_of(rank, world, Steady, layout, job)


def test_a_run_behind_one_that_failed_on_one_rank_alone_gets_its_own_messages() -> None:
    job = job_of(run={"timeout_s": 20}, train={"watch_every": 0})
    found = pool(2).run(losses_behind_a_failure, "pp=2 microbatch=4", job)
    assert found[0] == pytest.approx(losses_of(0, 1, Steady, "dp=1", job), rel=1e-12)
