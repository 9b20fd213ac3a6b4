"""Every data-axis layout gives the losses, norms, gradients and weights of one device, and sends what it lists.

float64 with the model's float32 islands raised: what is left is the order of sums, 1e-9 by the design's rule. SGD, so
that weights can be compared after separate backward passes; uneven counts of tokens, clipping, uneven batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.building.initial_values import blueprint, fill_rest
from samestep.building.loss import loss_of
from samestep.building.model import call_model
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.examination.examine import Source
from samestep.runtime.processes.join import RankInfo
from tests.code.odd_models import FlatWithRoot, Pairs, WithBatchNorm
from tests.laboratory import (
    TOLERANCE,
    assert_same,
    clipped,
    in_loop,
    job_of,
    make_run,
    observe,
    perturbed,
    reference,
    run_from,
)
from tests.models import MODELS, Plain, Tokens
from tests.parity import axes  # noqa: F401 (it adds models)
from tests.plain import train_plainly, whole_batches
from tests.pool import pool


def test_nodes_are_reduced_first() -> None:
    """Two nodes of two ranks: three collectives a bucket, over two axes, give the sum of four."""
    job = job_of("float64", 2, optimizer={"clip_norm": 0.5}, run={"ranks_per_node": 2})
    ranks = pool(4).run(observe, "plain", "dp=4 reduce=hierarchical", job, True)
    assert_same(ranks, reference("plain"), TOLERANCE)
    for seen in ranks:
        assert seen.ledger == seen.predicted
        assert sorted(len(group.split(",")) for group in seen.ledger) == [2, 2, 4]


def _by_hand(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module with the values that a run starts from."""
    cpu = torch.device("cpu")
    plan = blueprint(perturbed(build), seed)
    fill_rest(plan, cpu)
    made: dict[str, nn.Parameter] = {}
    for name, first in plan.canonical.items():
        path, _, leaf = name.rpartition(".")
        if leaf in plan.module.get_submodule(path)._parameters:
            made.setdefault(first, nn.Parameter(plan.materialize(first, cpu)))
            setattr(plan.module.get_submodule(path), leaf, made[first])
    return plan.module


@pytest.mark.parametrize("model", ["llama", "gpt2", "plain"])
def test_one_rank_is_a_plain_pytorch_loop(model: str) -> None:
    """The reference itself is what anybody would write by hand: mean over all counted tokens, clip, SGD."""
    job, seen = clipped(), reference(model)
    built = _by_hand(MODELS[model], job.train.seed).double()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)
    loss = loss_of(job)
    losses, weights = train_plainly(
        built, whole_batches(Tokens(), job), lambda batch: loss(call_model(built, batch), batch), optimizer, 0.5
    )
    # The plain loop leaves float32 islands (rotary angles, norms of Llama) as they are: 1e-6 instead of 1e-9.
    assert losses == pytest.approx(seen.losses, rel=1e-6)
    assert all(math.isfinite(loss) for loss in losses)
    for name, start, stop, value in seen.weights:
        assert torch.allclose(value.flatten(), weights[name].flatten()[start:stop], rtol=1e-5, atol=1e-6), name


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
        run = run_from(Source(build, loss_of(job), optimizer_of(job)), "dp=1", job)
        return [run.step(batch).loss for batch in batches(Tokens(), job)]

    assert losses(False) == losses(True)
