"""Instances of models and optimizers, and scripts of a user's own, train as in a plain loop in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.examination.examine import Source
from samestep.layout import Layout
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests.code.odd_models import FlatWithRoot, Pairs, WithBatchNorm
from tests.laboratory import in_loop, job_of, make_run
from tests.models import Plain, Tokens


def test_running_statistics_are_updated_once_a_step() -> None:
    """As in a plain loop: neither a repeated forward counts, nor one without gradients."""
    job, dataset = job_of("float64", 3, train={"loss": "mse"}, optimizer={"lr": 0.0}), Pairs()
    for layout in ("dp=1", "dp=1 recompute=full", "dp=1 recompute=selective"):
        run = make_run(0, 1, "odd batch_norm", layout, job)
        run.prepare(next(batches(dataset, job)).samples([0]))
        plain = WithBatchNorm().double()
        plain.load_state_dict(run.model.state_dict())
        for batch in batches(dataset, job):
            run.step(batch)
            run.evaluate(batch)
            plain(batch.samples(batch.indices)[0])
        for name, buffer in plain.named_buffers():
            assert torch.allclose(dict(run.model.named_buffers())[name], buffer, rtol=1e-12), (layout, name)


def regressor() -> nn.Module:
    torch.manual_seed(11)
    return FlatWithRoot()


def own_loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), outputs.numel()


def main(place: RankInfo, layout: str) -> list[float]:
    """What a user's script does on every rank."""
    job = samestep.Job(train={"global_batch": 8, "steps": 4}, numerics={"precision": "float64"}, run={"device": "cpu"})
    run = samestep.parallelize(
        regressor, own_loss, lambda params: torch.optim.Adam(params, lr=0.01), layout=layout, job=in_loop(job)
    )
    assert run.place == place
    return [run.step(batch).loss for batch in samestep.batches(Pairs(), job)]


def test_a_script_of_ones_own_gives_the_same_losses_in_every_layout() -> None:
    alone = samestep.launch(main, ("dp=1",), ranks=1, device="cpu")
    for layout in ("dp=2", "dp=2 zero=3 microbatch=1"):
        assert samestep.launch(main, (layout,), ranks=2, device="cpu") == pytest.approx(alone, rel=1e-6)


def test_a_model_that_was_built_for_inference_trains() -> None:
    """As `from_pretrained` gives it: evaluation mode of the whole is none of the user's wishes."""

    def losses(is_built_in_training: bool) -> list[float]:
        def build() -> nn.Module:
            return Plain(dropout=0.5).train(is_built_in_training)

        job = job_of("float64", 2)
        run = Run(
            Source(build, loss_of(job), optimizer_of(job)), Layout(), job, RankInfo(0, 0, 1, 1, torch.device("cpu"))
        )
        return [run.step(batch).loss for batch in batches(Tokens(), job)]

    assert losses(False) == losses(True)
