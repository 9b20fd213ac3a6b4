"""Every data-axis layout gives the losses, norms, gradients and weights of one device, and sends what it lists.

float64 with the model's float32 islands raised: what is left is the order of sums, 1e-9 by the design's rule. SGD, so
that weights can be compared after separate backward passes; uneven counts of tokens, clipping, uneven batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from samestep.building.initial_values import blueprint, fill_rest
from samestep.building.loss import loss_of
from samestep.building.model import call_model
from tests.covering import daily
from tests.laboratory import (
    TOLERANCE,
    assert_same,
    clipped,
    combinations,
    job_of,
    observe,
    perturbed,
    reference,
)
from tests.models import MODELS, Tokens
from tests.parity.axes import MODELS_HERE
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


@pytest.mark.parametrize(
    ("layout", "model"),
    daily(
        combinations(["dp=2", "dp=2 zero=1 microbatch=1", "dp=2 zero=2", "dp=2 zero=3 microbatch=2"], MODELS_HERE),
        beside_products=True,
    ),
)
def test_float32_differs_by_the_order_of_sums_alone(layout: str, model: str) -> None:
    """A sum of n float32 terms in another order differs by n roundings at most; n is in the hundreds here."""
    ranks = pool(2).run(observe, model, layout, clipped("float32"))
    assert_same(ranks, reference(model, clipped("float32")), 1000 * torch.finfo(torch.float32).eps)


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
