"""Every axis, alone and with others, computes what one device computes, and sends what its program lists: the rows of `axes.py`.

float64 with the model's float32 islands raised: what is left is the order of sums, 1e-9 by the design's rule. SGD, so
that weights can be compared after separate backward passes; perturbed norms and biases, uneven counts of tokens, clipping. Among
the models are those of known silent errors: embeddings that are cut apart or tied across stages, norms of heads without a summed
gradient, biases of row cuts added tp times, embeddings that the model scales before its blocks, routes that leave experts of some
ranks without rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.examination.examine import Source
from tests.covering import beyond_products
from tests.laboratory import (
    TOLERANCE,
    assert_same,
    clipped,
    job_of,
    observe,
    on_ranks,
    prove,
    prove_ledger,
    reference,
    run_from,
)
from tests.models import Plain, Tokens
from tests.parity.axes import LEDGERS, ROWS, UNEVEN
from tests.pool import pool


def _rows() -> Iterator[Any]:
    """Yield the rows of the axes by name; those whose pairs other rows hold, or the products, are for `make parity`."""
    given = [
        (axis, *((row.values, row.marks) if hasattr(row, "values") else (row, ())))
        for axis, rows in ROWS.items()
        for row in rows
    ]
    kept = beyond_products(values for _, values, marks in given if not marks)
    for axis, values, marks in given:
        name = f"{axis}-{'-'.join(map(str, values))}"
        yield pytest.param(*values, id=name, marks=marks or (() if values in kept else pytest.mark.nightly))


@pytest.mark.every_row
@pytest.mark.parametrize(("layout", "model"), [*_rows()])
def test_an_axis_computes_what_one_device_computes(layout: str, model: str) -> None:
    prove(layout, model)


@pytest.mark.every_row
@pytest.mark.parametrize(("layout", "model"), LEDGERS)
def test_the_ledger_holds_in_mixed_precision(layout: str, model: str) -> None:
    prove_ledger(layout, model)


@pytest.mark.every_row
@pytest.mark.parametrize(("layout", "model", "batch"), UNEVEN)
def test_uneven_batches_are_legal(layout: str, model: str, batch: int) -> None:
    prove(layout, model, job_of("float64", 2, train={"global_batch": batch}))


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=2 zero=2 microbatch=2", "deep_gpt2"),
        pytest.param("dp=2 zero=3 microbatch=2", "deep_llama", marks=pytest.mark.nightly),
        pytest.param("tp=2 sequence_parallel", "deep_qwen3", marks=pytest.mark.nightly),
        pytest.param("cp=2", "recurrent layers", marks=pytest.mark.nightly),
    ],
)
def test_in_bf16_inputs_on_the_host_give_the_bits_of_a_repeated_forward(layout: str, model: str) -> None:
    there, here = (
        on_ranks(f"{layout} recompute={word}", observe, model, clipped("bf16")) for word in ("offload", "full")
    )
    for one, other in zip(there, here, strict=True):
        assert one.losses == other.losses
        for mine, others in zip(one.gradients, other.gradients, strict=True):
            assert mine
            assert all(torch.equal(a[-1], b[-1]) and a[:-1] == b[:-1] for a, b in zip(mine, others, strict=True))


def test_nodes_are_reduced_first() -> None:
    """Two nodes of two ranks: three collectives a bucket, over two axes, give the sum of four."""
    job = job_of("float64", 2, optimizer={"clip_norm": 0.5}, run={"ranks_per_node": 2})
    ranks = pool(4).run(observe, "plain", "dp=4 reduce=hierarchical", job, True)
    assert_same(ranks, reference("plain"), TOLERANCE)
    for seen in ranks:
        assert seen.ledger == seen.predicted
        assert sorted(len(group.split(",")) for group in seen.ledger) == [2, 2, 4]


def test_a_model_that_was_built_for_inference_trains() -> None:
    """As `from_pretrained` gives it: evaluation mode of the whole is none of the user's wishes."""

    def losses(is_built_in_training: bool) -> list[float]:
        def build() -> nn.Module:
            return Plain(dropout=0.5).train(is_built_in_training)

        job = job_of("float64", 2)
        run = run_from(Source(build, loss_of(job), optimizer_of(job)), "dp=1", job)
        return [run.step(batch).loss for batch in batches(Tokens(), job)]

    assert losses(False) == losses(True)
