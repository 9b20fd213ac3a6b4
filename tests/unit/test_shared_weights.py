"""Two runs over the same weights are noticed once both take steps, and one that has ended or was dropped is no hindrance."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.datasets import Batch
from samestep.errors import DataError, ModelError
from samestep.job import Job
from samestep.runtime.run import Run

STEPS = 3
JOB = Job(
    train={"global_batch": 4, "steps": STEPS, "watch_every": 0},
    run={"device": "cpu"},
    numerics={"precision": "float64"},
)
GIVEN_TWICE = r"was given to two runs that take steps, .* one run over a module that holds all parts works"


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return point, 2 * point


class Broken(Pairs):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise ValueError(index)


class Two(nn.Module):
    """A backbone and a head, which may be those of other models."""

    def __init__(self, backbone: nn.Module | None = None, head: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone, self.head = backbone or nn.Linear(4, 4), head or nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.backbone(x))


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def run_of(model: Any, optimizer: Any = sgd) -> Run:
    return samestep.parallelize(model, "mse", optimizer, layout="dp=1", job=JOB)


def stream() -> Iterator[Batch]:
    return samestep.batches(Pairs(), JOB)


def one_model() -> tuple[Any, Any]:
    model = Two()
    return model, model


def one_backbone() -> tuple[Any, Any]:
    backbone = nn.Linear(4, 4)
    return Two(backbone), Two(backbone)


def built_around_one() -> tuple[Any, Any]:
    backbone = nn.Linear(4, 4)
    return (lambda: Two(backbone)), (lambda: Two(head=backbone))


def frozen_in_one() -> tuple[Any, Any]:
    """As a discriminator stands still while its generator learns: one optimizer has it, and the other has not."""
    head = nn.Linear(4, 4)
    return Two(head=head), Two(head=head)


@pytest.mark.parametrize("models", [one_model, one_backbone, built_around_one, frozen_in_one])
def test_two_runs_in_turn_are_refused_at_the_first_step_of_the_second(models: Callable[[], tuple[Any, Any]]) -> None:
    one, other = map(run_of, models())
    batches = stream()
    one.step(batch := next(batches))
    with pytest.raises(ModelError, match=GIVEN_TWICE):
        other.step(batch)
    one.step(next(batches))


def test_one_optimizer_given_twice_is_refused() -> None:
    model = Two()
    optimizer = sgd([*model.parameters()])
    one, other = run_of(model, optimizer), run_of(model, optimizer)
    one.step(batch := next(stream()))
    with pytest.raises(ModelError, match=r"backbone.weight " + GIVEN_TWICE):
        other.step(batch)


def test_equal_models_and_a_frozen_part_that_both_have_are_no_shared_weights() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    for models in ((Two, Two), (Two(frozen), Two(frozen))):
        one, other = map(run_of, models)
        for batch in stream():
            one.step(batch)
            assert not other.step(batch).remarks


def test_a_run_that_nobody_holds_is_no_hindrance() -> None:
    model = Two()
    one = run_of(model)
    one.step(next(stream()))
    one.in_a_cycle = one  # type: ignore[attr-defined]
    gone = weakref.ref(one)
    del one
    run_of(model).step(next(stream()))
    assert gone() is None


@pytest.mark.parametrize("end", ["all steps", "an error"])
def test_a_run_after_one_that_has_ended_is_told_that_it_begins_with_the_first_values(end: str) -> None:
    model = Two()
    one, batches = run_of(model), stream()
    one.step(next(batches))
    if end == "all steps":
        for batch in batches:
            one.step(batch)
    else:
        with pytest.raises(DataError):
            one.step(Batch(1, next(batches).indices, Broken()))
    (remark,) = run_of(model).step(next(stream())).remarks
    assert "begins with the values of the given model, which another run has trained a copy of" in remark


def test_a_run_goes_on_where_trained_values_were_taken_over_and_the_one_before_may_not() -> None:
    model = Two().to(torch.float64)
    one, batches = run_of(model), stream()
    one.step(next(batches))
    model.load_state_dict(one.state_dict())
    other = run_of(model)
    batch = next(batches)
    assert not other.step(batch).remarks
    assert all(not torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(ModelError, match=GIVEN_TWICE):
        one.step(batch)


@pytest.mark.nightly  # which starts workers of its own
def test_a_model_that_was_verified_may_be_trained() -> None:
    model = Two()
    assert samestep.verify(
        JOB, layout="dp=1 microbatch=2", model=model, loss="mse", optimizer=sgd, dataset=Pairs(), precision="float64"
    ).proven
    assert not run_of(model).step(next(stream())).remarks
