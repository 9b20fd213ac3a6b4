"""Stages of a pipeline evaluate, give outputs and keep dtypes as one device does; the models are those of `code/stages.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.datasets import batches
from tests.code.pipeline_models import WIDTH, Language
from tests.code.stages import IN_FLOAT32
from tests.laboratory import Observed, code_of, in_loop, job_for, job_of, make_run, observe
from tests.plain import Trained, assert_as_on_one_device
from tests.pool import pool


def evaluated(rank: int, world: int, name: str, layout: str) -> tuple[float, torch.Tensor]:
    """Return a validation loss and the outputs for three samples, which are fewer than a step has."""
    job = job_for(name)
    run, batch = make_run(rank, world, name, layout, job), next(batches(code_of(name).data(), job))
    run.step(batch)
    outputs = run.outputs(batch.samples(list(range(3))))
    return run.evaluate(batch)["loss"], outputs["logits"] if isinstance(outputs, dict) else outputs


@pytest.mark.parametrize("name", [f"stages {name}" for name in ("conditioned", "dropped")])
def test_stages_evaluate_and_give_outputs_as_one_device_does(name: str) -> None:
    loss, outputs = evaluated(0, 1, name, "dp=1")
    for found, given in pool(2).run(evaluated, name, "pp=2 microbatch=4"):
        assert found == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(given, outputs, rtol=1e-9, atol=1e-12)


def watch(rank: int, world: int, name: str, layouts: list[str], precision: str) -> list[Observed]:
    job = job_of(precision, 2, optimizer={"clip_norm": 0.5})
    return [observe(rank, world, name, layout, job, True) for layout in layouts]


@pytest.mark.parametrize("name", [f"stages {name}" for name in IN_FLOAT32])
def test_a_dtype_of_ones_own_is_kept_in_float32_and_bf16(name: str) -> None:
    """Layouts with the same micro-batches round alike, up to the order of float32 sums."""
    for precision in ("float32", "bf16") if name != "stages automatic" else ("float32",):
        (reference,) = watch(0, 1, name, ["dp=1 microbatch=4"], precision)
        layouts = ["pp=2 microbatch=4", "pp=2 microbatch=4 schedule=zero-bubble"]
        for ranks in zip(*pool(2).run(watch, name, layouts, precision), strict=True):
            for one in ranks:
                assert one.losses == pytest.approx(reference.losses, rel=3e-6)
                assert one.ledger == one.predicted


# -- Functions of autograd in the model's own code -------------------------------------------------


class Rounded(torch.autograd.Function):
    """Rounded values, whose gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        return (x / step).round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Scaled(torch.autograd.Function):
    """A product with a weight, and its sign, with gradients that autograd would not give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight, x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return -0.5 * gradients[0] * weight + 0.1 * gradients[1], (2 * gradients[0] * x).flatten(0, -2).sum(0)


class Quantiser(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x, 0.25)


class Functions(Language):
    """Functions at a boundary of stages, in front of it and behind it, called by the model and by a module without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.quantiser = nn.Parameter(torch.full((WIDTH,), 0.5)), Quantiser()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = Rounded.apply(self.embed(input_ids), 0.125)
        for block in self.blocks:
            product, sign = Scaled.apply(self.quantiser(block(x)), self.gain)
            x = x + Rounded.apply(product, 0.0625) + 0.01 * sign
        return self.head(x)


def _of_functions(rank: int, world: int, layout: str) -> Trained:
    job = job_of("float64", 3)
    torch.manual_seed(0)
    model = Functions().double()
    run = samestep.parallelize(
        model, "cross_entropy", lambda params: torch.optim.SGD(params, lr=0.1), layout=layout, job=in_loop(job)
    )
    losses = [run.step(batch).loss for batch in batches(code_of("stages skips").data(), job)]
    return losses, run.state_dict(on_every_rank=True)


@pytest.mark.parametrize(
    "layout", ["pp=2 microbatch=4 recompute=full", "pp=2 microbatch=2 schedule=interleaved virtual_stages=2"]
)
def test_functions_of_autograd_between_blocks_keep_their_backwards(layout: str) -> None:
    assert_as_on_one_device(_of_functions, layout)


# -- Forwards that take the items of a batch one by one --------------------------------------------


class ItemByItem(Language):
    """All layers for the first sample, before they are called for the second one."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.stack([self.of_one(ids) for ids in input_ids])

    def of_one(self, ids: Tensor) -> Tensor:
        return self.head(self.encoded(self.embed(ids)))

    def encoded(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class EncodedItems(ItemByItem):
    """Blocks for each sample, between an embedding and a head of all."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.stack([self.encoded(x) for x in self.embed(input_ids)]))


class WrittenItems(EncodedItems):
    """Two tensors cross each boundary for each sample, one of which the model's own code writes into."""

    def encoded(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = block(x) + 0.5 * first
            x += 0.1
        return x


class ListedItems(ItemByItem):
    """A list of one dict a sample, of unequal lengths."""

    def forward(self, items: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([self.of_one(item["input_ids"]).mean(0) for item in items])


def _of_items(rank: int, world: int, layout: str, build: type[Language]) -> Trained:
    job = job_of("float64", 2)
    torch.manual_seed(0)
    model = build().double()
    run = samestep.parallelize(
        model, _listed_loss if build is ListedItems else "cross_entropy", lambda params: torch.optim.SGD(params, lr=0.1),
        layout=layout, job=in_loop(job),
    )  # fmt: skip
    data = code_of("stages skips").data()
    if build is ListedItems:
        rows = [{"input_ids": row["input_ids"][: 2 + index % 3]} for index, row in zip(range(16), data, strict=False)]
        given: list[Any] = [rows[:8], rows[8:]]
    else:
        given = [*batches(data, job)]
    losses = [run.step(batch).loss for batch in given]
    return [*losses, run.evaluate(given[0])["loss"]], run.state_dict(on_every_rank=True)


def _listed_loss(outputs: Tensor, batch: list[dict[str, Tensor]]) -> tuple[Tensor, int]:
    labels = torch.stack([item["input_ids"][0] for item in batch])
    return nn.functional.cross_entropy(outputs, labels, reduction="sum"), len(batch)


@pytest.mark.parametrize(
    ("build", "layout"),
    [
        (ItemByItem, "pp=2 microbatch=4"),
        (WrittenItems, "pp=2 microbatch=2 schedule=interleaved virtual_stages=2"),
        (ListedItems, "pp=2 microbatch=2"),
    ],
)
def test_items_taken_one_by_one_pass_between_stages_as_one_message(build: type[Language], layout: str) -> None:
    assert_as_on_one_device(_of_items, layout, build)


class CarriedOver(ItemByItem):
    """A sample begins with what the last block has made of the sample before."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x, found = torch.zeros(()), []
        for one in self.embed(input_ids):
            x = self.encoded(one + x)
            found.append(self.head(x))
        return torch.stack(found)


def test_an_item_that_needs_a_later_layer_of_the_one_before_is_refused() -> None:
    with pytest.raises(samestep.SamestepError, match=r"another item of the batch|samples influence each other"):
        pool(2).run(_of_items, "pp=2 microbatch=4", CarriedOver)
