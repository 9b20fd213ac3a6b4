"""A run owns the model instance that it is given, trains it in place, and gives it back whole; no other run takes a part of it meanwhile."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.datasets import Batch
from samestep.errors import InputError, LayoutError, ModelError
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.run import Run
from tests.plain import train_plainly
from tests.pool import pool, telling

STEPS = 3
JOB = Job(
    train={"global_batch": 4, "steps": STEPS, "watch_every": 0},
    run={"device": "cpu"},
    numerics={"precision": "float64"},
)
TAKEN = r"belongs to a run that is still there\. Use run\.release\(\), .* one run over a module that holds all parts"


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return point, 2 * point


class Two(nn.Module):
    """A backbone and a head, which may be those of other models."""

    def __init__(self, backbone: nn.Module | None = None, head: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone, self.head = backbone or nn.Linear(4, 4), head or nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.backbone(x))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def run_of(model: Any, optimizer: Any = sgd, layout: str = "dp=1", **more: Any) -> Run:
    return samestep.parallelize(model, "mse", optimizer, layout=layout, job=JOB, **more)


def stream() -> Iterator[Batch]:
    return samestep.batches(Pairs(), JOB)


# -- one run at a time -----------------------------------------------------------------------------


def one_model() -> tuple[Any, Any]:
    model = Two()
    return model, model


def one_backbone() -> tuple[Any, Any]:
    backbone = nn.Linear(4, 4)
    return Two(backbone), Two(backbone)


def frozen_in_both() -> tuple[Any, Any]:
    head = nn.Linear(4, 4).requires_grad_(False)
    return Two(head=head), Two(head=head)


@pytest.mark.parametrize(("models", "takes_step"), [(one_model, False), (one_backbone, True), (frozen_in_both, True)])
def test_a_part_of_a_model_that_a_run_owns_is_refused(models: Callable[[], Any], takes_step: bool) -> None:
    one, other = models()
    run = run_of(one)
    if takes_step:
        run.step(next(stream()))
    with pytest.raises(ModelError, match=TAKEN):
        run_of(other)
    run.release()
    run_of(other).step(next(stream()))


def test_a_model_that_a_forward_is_around_has_one_run() -> None:
    model = Two()
    run = run_of(model, forward=lambda model, batch: model(batch[0]))
    run.step(next(stream()))
    with pytest.raises(ModelError, match=TAKEN):
        run_of(model, forward=lambda model, batch: model(batch[0]))


def test_two_build_functions_around_one_backbone_are_refused_at_the_second() -> None:
    backbone = nn.Linear(4, 4)
    run = run_of(lambda: Two(backbone))
    run.step(next(stream()))
    with pytest.raises(ModelError, match=TAKEN):
        run_of(lambda: Two(head=backbone)).step(next(stream()))


def test_equal_models_are_no_shared_weights() -> None:
    one, other = run_of(Two()), run_of(Two())
    for batch in stream():
        one.step(batch)
        assert not other.step(batch).remarks


def test_a_run_that_nobody_holds_gives_whole_weights_back() -> None:
    model = Two()
    run = run_of(model)
    run.step(next(stream()))
    run.in_a_cycle = run  # type: ignore[attr-defined]
    gone, trained = weakref.ref(run), model.head.weight.detach().clone()
    del run
    run_of(model).step(next(stream()))
    assert gone() is None
    assert not torch.equal(trained, model.head.weight)


def test_a_layout_that_is_refused_leaves_the_model_as_it_was() -> None:
    model = Two()
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}

    def wrong(outputs: Any, batch: Any) -> Any:
        raise ValueError("no loss")

    run = samestep.parallelize(model, wrong, sgd, layout="dp=1", job=JOB)
    with pytest.raises(InputError, match="no loss"):
        run.step(next(stream()))
    for name, param in model.named_parameters():
        assert param is before[name][0]
        assert torch.equal(param.detach().float(), before[name][1])


@pytest.mark.nightly  # which starts workers of its own
def test_a_model_that_was_verified_may_be_trained() -> None:
    model = Two()
    assert samestep.verify(
        JOB, layout="dp=1 microbatch=2", model=model, loss="mse", optimizer=sgd, dataset=Pairs(), precision="float64"
    ).proven
    assert not run_of(model).step(next(stream())).remarks


# -- in place, and given back ----------------------------------------------------------------------


class Marked(Two):
    """A model with what a layout may change: hooks, attributes, a weight of two names, a buffer that steps change, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.backbone.weight
        self.first = nn.Linear(4, 4).requires_grad_(False)
        self.first.weight.kind = "frozen"  # type: ignore[assignment]
        self.register_buffer("steps", torch.zeros(()))
        self.register_forward_hook(lambda module, inputs, output: output * 1.0)
        self.settings = {"layers": 3}

    def forward(self, x: Tensor) -> Any:
        self.steps += self.training
        return super().forward(self.again(self.first(x)).tanh())


def plain_losses(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    samples: Any = (batch.samples(batch.indices) for batch in stream() if first <= batch.step < last)
    return train_plainly(model, samples, lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]), optimizer)[0]


def trainable(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.requires_grad]


def given_back(rank: int, world: int, layout: str) -> list[str]:
    """Return what differs from a plain loop where a run takes two steps, gives the model back, and the loop takes one more."""
    torch.manual_seed(1)
    model = Marked().double()
    plain, kinds, keys = (
        copy.deepcopy(model),
        [type(one) for one in model.modules()],
        [{*vars(one)} for one in model.modules()],
    )
    params, hooks = dict(model.named_parameters()), [len(one._forward_hooks) for one in model.modules()]
    run, wrong = run_of(model, layout=layout), []
    losses = [run.step(batch).loss for batch, _ in zip(stream(), range(2), strict=False)]
    if run.model is not model:
        wrong.append("run.model")
    if layout in ("dp=1 microbatch=1", "dp=2 zero=1") and any(
        params[name] is not one for name, one in model.named_parameters()
    ):
        wrong.append("the parameters in their layout")
    if run.release() is not model:
        wrong.append("what is given back")
    if any(params[name] is not one or type(one) is not nn.Parameter for name, one in model.named_parameters()):
        wrong.append("the parameters")
    if [type(one) for one in model.modules()] != kinds or [{*vars(one)} for one in model.modules()] != keys:
        wrong.append("classes or attributes")
    if [len(one._forward_hooks) for one in model.modules()] != hooks or model.first.weight.kind != "frozen":
        wrong.append("hooks or marks")
    losses += plain_losses(model, sgd(trainable(model)), 2, 3)
    expected = plain_losses(plain, sgd(trainable(plain)), 0, 3)
    if losses != pytest.approx(expected, rel=1e-9):
        wrong.append(f"losses {losses}, {expected}")
    state = plain.state_dict()
    wrong += [name for name, one in model.state_dict().items() if not torch.allclose(one, state[name], rtol=1e-9)]
    return wrong


@pytest.mark.parametrize("layout", ["dp=1 microbatch=1", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4"])
def test_a_model_is_trained_in_place_and_given_back_whole(layout: str) -> None:
    ranks = Layout(layout).world_size
    assert (pool(ranks).run(given_back, layout) if ranks > 1 else [given_back(0, 1, layout)]) == [[]] * ranks


def test_a_run_that_has_given_its_model_back_takes_no_step() -> None:
    run = run_of(Two)
    run.step(batch := next(stream()))
    model = run.release()
    assert type(model) is Two
    assert model(torch.ones(1, 4).to(model.head.weight)).shape == (1, 4)
    for call in (lambda: run.step(batch), run.release, run.state_dict, lambda: run.evaluate(batch)):
        with pytest.raises(ModelError, match=r"after run\.release\(\): .* Use samestep\.parallelize"):
            call()


@telling
def lost(rank: int, world: int) -> None:
    model = Two()
    run = run_of(model, layout="dp=2 zero=3")
    run.step(next(stream()))
    del run
    gc.collect()
    run_of(model, layout="dp=2")


def test_parts_that_a_dropped_run_has_left_are_named() -> None:
    for said in pool(2).run(lost):
        assert "still has the shards of a run that was deleted" in said


# -- writes of a loop ------------------------------------------------------------------------------


def by_a_fused_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "p.data.mul_": lambda model: [param.data.mul_(0.5) for param in model.parameters()],
    "p.data = x": lambda model: [setattr(param, "data", param.data * 0.5) for param in model.parameters()],
    "vector_to_parameters": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters()
    ),
    "a numpy view": lambda model: [param.detach().numpy().__imul__(0.5) for param in model.parameters()],
    "a fused step": by_a_fused_step,
    "p.data.clamp_": lambda model: [param.data.clamp_(-0.2, 0.2) for param in model.parameters()],
}
"""Writes of which `_version` counts none but, at most, the last."""


def with_writes(rank: int, world: int, layout: str, kind: str, precision: str) -> list[float] | str:
    torch.manual_seed(1)
    job = JOB.model_copy(update={"numerics": JOB.numerics.model_copy(update={"precision": precision})})
    run = samestep.parallelize(Two(), "mse", sgd, layout=layout, job=job)
    found = []
    try:
        for batch in samestep.batches(Pairs(), job):
            found.append(run.step(batch).loss)
            WRITES[kind](run.model)
    except (LayoutError, RuntimeError) as error:  # torch's own, of numpy and sharded weights
        return str(error)
    return found


REFUSED_WRITES = {
    "dp=2 zero=1": {"a fused step"},
    "dp=2 zero=3": {"p.data = x", "vector_to_parameters", "a numpy view", "a fused step"},
    "tp=2": {"vector_to_parameters", "a numpy view", "a fused step"},
}


@functools.cache
def with_writes_alone(kind: str, precision: str) -> list[float] | str:
    return with_writes(0, 1, "dp=1", kind, precision)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("dp=2 zero=1", "float64"), ("dp=2 zero=3", "float64"), ("tp=2", "float64"), ("dp=2", "bf16")],
)
def test_a_write_between_steps_is_that_of_one_device_or_refused(layout: str, precision: str) -> None:
    for kind in WRITES if precision == "float64" else WRITES.keys() - {"a numpy view"}:  # numpy knows no bfloat16
        wanted = with_writes_alone(kind, precision)
        for found in pool(2).run(with_writes, layout, kind, precision):
            if kind in REFUSED_WRITES.get(layout, ()):
                assert isinstance(found, str), kind
            else:
                assert found == pytest.approx(wanted, rel=1e-9 if precision == "float64" else 2e-2), kind


def test_a_write_between_steps_is_that_of_a_plain_loop() -> None:
    for kind, write in WRITES.items():
        torch.manual_seed(1)
        model, wanted = Two().double(), []
        optimizer = sgd(model.parameters())
        for batch in stream():
            wanted += plain_losses(model, optimizer, batch.step, batch.step + 1)
            write(model)
        assert with_writes_alone(kind, "float64") == pytest.approx(wanted, rel=1e-9), kind


# -- the optimizer ---------------------------------------------------------------------------------

OF_CLASSES = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def instances() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def run_over(model: nn.Module, optimizer: Any) -> Any:
    return samestep.parallelize(model, "cross_entropy", optimizer, job=Job(train={"global_batch": 4}))


def test_an_instance_is_the_optimizer_of_its_run() -> None:
    model, optimizer = instances()
    other, plain = instances()
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, plain)]
    run = run_over(model, optimizer)
    for step in range(4):
        loss = nn.functional.cross_entropy(other(OF_CLASSES[0]), OF_CLASSES[1])
        plain.zero_grad()
        loss.backward()
        plain.step()
        report = run.step(OF_CLASSES)
        assert report.loss == pytest.approx(loss.item(), rel=1e-5)
        for each in (optimizer, plain):  # a loop changes the states that the next update reads
            for state in each.state.values():
                state["exp_avg"].zero_()
        for scheduler in schedulers:
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (step + 1))
    assert run.updater.optimizer is optimizer
    assert [state["step"].item() for state in optimizer.state.values()] == [4.0, 4.0]


def test_an_instance_takes_no_step_outside_of_its_run() -> None:
    model, optimizer = instances()
    run = run_over(model, optimizer)
    run.step(OF_CLASSES)
    for method in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(ModelError, match=r"AdamW.* Use run\."):
            method()
    with pytest.raises(ModelError, match="the AdamW instance belongs to a run that is still there"):
        run_over(nn.Linear(8, 4), optimizer)
    run.release()
    with pytest.raises(ModelError, match=r"AdamW.step was called by the loop.*After run.release\(\), use another"):
        optimizer.step()


@pytest.mark.parametrize("number", [1, 2])
def test_another_run_has_an_instance_that_was_given_back(number: int) -> None:
    model, optimizer = instances()
    given = (
        [torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()] if number > 1 else optimizer
    )
    run = run_over(model, given)
    run.step(OF_CLASSES)
    first = given[0] if number > 1 else given
    first.param_groups[0]["lr"] = 0.05
    run.release()
    assert first.param_groups[0]["lr"] == 0.05
    assert first.param_groups[0]["params"][0] is model.weight
    again = run_over(model, given)
    assert again.step(OF_CLASSES).lr == 0.05
    del run, again
    assert run_over(model, given).step(OF_CLASSES).loss > 0.0
