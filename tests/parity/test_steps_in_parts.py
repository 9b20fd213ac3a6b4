"""Steps that a loop takes in parts are those of the plain loop: several losses, GANs in turn, gradients that are changed."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.runtime.run import Run
from tests.laboratory import in_loop
from tests.parity.loops import (
    LOOPS,
    OF_HEADS,
    STEPS,
    Loop,
    Points,
    Regression,
    Result,
    adam,
    both,
    parts_result,
    plain_result,
    run_of,
)
from tests.plain import Trained, assert_as_on_one_device, assert_trained
from tests.pool import pool, telling


@functools.cache
def plain(name: str) -> Result:
    return plain_result(LOOPS[name])


def parts(
    rank: int, world: int, name: str, layout: str, folder: Path | None = None, first: int = 0, last: int = STEPS
) -> Any:
    return parts_result(LOOPS[name], layout, folder, first, last)


LAYOUTS = ["dp=1 microbatch=4", "dp=2", "dp=2 zero=1 microbatch=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4"]
EVALUATING = [name for name in LOOPS if "sam" in name or "lbfgs" in name]
ELSEWHERE = {("wgan-gp", "tp=2"), *((name, layout) for name in EVALUATING for layout in LAYOUTS[2:])}
CASES = [(name, layout) for name in [*LOOPS][1:] for layout in LAYOUTS if (name, layout) not in ELSEWHERE]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_loop_in_parts_is_the_plain_loop(name: str, layout: str) -> None:
    assert_trained(pool(Layout(layout).world_size).run(parts, name, layout), plain(name))


RESUMED = ("gan", "sam", "body every other step")
"""Loops that are resumed by default, one of each kind of state: several optimizers, a second look at the loss, steps left out."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in RESUMED else pytest.mark.nightly) for name in LOOPS]
)
def test_a_loop_in_parts_is_resumed_in_another_layout(name: str, tmp_path: Path) -> None:
    first, *_ = pool(2).run(parts, name, "dp=2" if name in EVALUATING else "dp=2 zero=3", tmp_path, 0, 2)
    losses, weights = plain(name)
    assert_trained(pool(1).run(parts, name, "dp=1", tmp_path, 2), (losses[len(first[0]) :], weights))


# -- what a step is --------------------------------------------------------------------------------


def both_ways(rank: int, world: int, layout: str) -> tuple[Any, Any]:
    """Return the losses, norms and weights of whole steps, and of steps in two parts."""
    found = []
    for in_parts in (False, True):
        run = run_of(LOOPS["one backward"], layout, schedule={"name": "cosine", "warmup_steps": 2})
        seen = []
        for batch in samestep.batches(Points(), run.job):
            if in_parts:
                run.backward(batch)
            report = run.update() if in_parts else run.step(batch)
            seen.append((report.step, report.loss, report.grad_norm, report.lr, report.tokens))
        found.append((seen, run.state_dict(on_every_rank=True)))
    return found[0], found[1]


@pytest.mark.parametrize("layout", ["dp=2 microbatch=2", "dp=2 zero=3"])
def test_a_step_is_a_backward_and_an_update_to_the_bit(layout: str) -> None:
    for whole, in_parts in pool(Layout(layout).world_size).run(both_ways, layout):
        assert whole[0] == in_parts[0]
        assert all(torch.equal(value, in_parts[1][name]) for name, value in whole[1].items())


class Counted(torch.autograd.Function):
    """The identity, whose backwards are counted."""

    count = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Counted.count += 1
        return gradients[0]


class CountedHeads(Regression):
    """Two heads of one body, of which the backwards into the body are counted."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = Counted.apply(self.body(x))
        return self.one(found), self.two(found)


def counts(rank: int, world: int, layout: str) -> list[int]:
    job = samestep.Job(train={"global_batch": 8, "steps": 2, "watch_every": 0}, numerics={"precision": "float64"})
    run = samestep.parallelize(CountedHeads, both, OF_HEADS, layout=layout, job=in_loop(job))
    found = []
    for batch in samestep.batches(Points(), job):
        for into in ("one", "body", None):
            Counted.count = 0
            run.backward(batch, into=into)
            found.append(Counted.count)
        run.update()
    return found[3:]


def test_a_backward_into_some_weights_does_not_go_where_none_of_them_is() -> None:
    assert pool(2).run(counts, "dp=2 microbatch=2") == [[0, 2, 2]] * 2


def spread(outputs: Any, batch: Any) -> Any:
    """A loss that needs several samples, and names its terms."""
    if len(outputs[0]) < 2:
        raise ValueError("one sample has no spread")
    return {"spread": (outputs[0].std(0).sum(), 1), "size": (outputs[0].square().sum(), len(outputs[0]))}


def test_several_samples_show_the_terms_of_another_loss_over_the_batch() -> None:
    loop = Loop(Regression, samestep.whole_batch(lambda outputs, batch: outputs[1].square().mean()), adam)
    run = run_of(loop, "dp=1 microbatch=4")
    batch = next(samestep.batches(Points(), run.job))
    run.backward(batch)
    report = run.backward(batch, samestep.whole_batch(spread))
    assert report.terms.keys() == {"spread", "size"}
    run.zero_grad()


def test_a_weight_of_the_loss_that_nothing_updates_is_remarked_on() -> None:
    scale = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    loop = Loop(Regression, lambda outputs, batch: ((outputs[0] * scale).square().sum(), len(outputs[0])), adam)
    run = run_of(loop, "dp=1")
    report = run.step(next(samestep.batches(Points(), run.job)))
    assert any(re.search(r"the loss has a weight of its own, of shape \[2\]", remark) for remark in report.remarks)


class Dropping(Regression):
    """A model that drops activations."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1] = torch.nn.Dropout(0.5)


still = functools.partial(torch.optim.SGD, lr=0.0)


def masks(rank: int, world: int, layout: str) -> tuple[list[float], list[float], list[float]]:
    """Return the losses of backwards of one batch, of whole steps, and of a backward behind a whole step, at a rate of zero."""
    loop = Loop(Dropping, both, still)
    run = run_of(loop, layout)
    backwards, steps, behind = [], [], []
    for batch in samestep.batches(Points(), run.job):
        steps.append(run.step(batch).loss)
        behind.append(run.backward(batch).loss)
        run.zero_grad()
    run = run_of(loop, layout)
    for batch in samestep.batches(Points(), run.job):
        for _ in range(2):
            backwards.append(run.backward(batch).loss)
            run.update()
    return backwards, steps, behind


def test_masks_depend_on_the_number_of_the_backward_and_on_no_layout() -> None:
    (alone,) = pool(1).run(masks, "dp=1 microbatch=4")
    backwards, steps, behind = alone
    assert backwards[::2] == steps
    assert backwards[1::2] == behind
    assert all(one != other for one, other in zip(steps, behind, strict=True))
    for found in pool(2).run(masks, "dp=2 zero=3"):
        for mine, other in zip(found, alone, strict=True):
            assert mine == pytest.approx(other, rel=1e-9)


def rates(rank: int, world: int) -> list[tuple[float, float]]:
    """Return the rates of two optimizers, of which one makes two updates a step and the other one in every second step."""
    run = run_of(Loop(Regression, both, OF_HEADS), "", schedule={"name": "linear"})
    found = []
    for batch in samestep.batches(Points(), run.job):
        for _ in range(2):
            run.backward(batch)
            one = run.update("body").lr
        two = run.update("two").lr if batch.step % 2 else 0.0
        run.zero_grad()
        found.append((one, two))
    return found


def test_each_optimizer_counts_its_own_updates() -> None:
    (found,) = pool(1).run(rates)

    def at(count: int) -> float:
        return 0.02 * max(0.0, 1 - count / (STEPS - 1))

    wanted = [(at(2 * step + 1), at(step // 2) if step % 2 else 0.0) for step in range(STEPS)]
    assert [rate for pair in found for rate in pair] == pytest.approx([rate for pair in wanted for rate in pair])


# -- wrong uses ------------------------------------------------------------------------------------


def _first(run: Run) -> Any:
    return next(samestep.batches(Points(), run.job))


def _step_while_gradients_wait(run: Run) -> None:
    run.backward(_first(run))
    run.step(_first(run))


def _save_amid_a_step(run: Run) -> None:
    run.backward(_first(run))
    run.save("nowhere")


def _update_twice(run: Run) -> None:
    run.backward(_first(run))
    run.update()
    run.update()


def _update_of_others(run: Run) -> None:
    run.backward(_first(run), into="one")
    run.update("two")


def _after_the_end(run: Run) -> None:
    *_, last = samestep.batches(Points(), run.job)
    run.backward(last)


def _of_an_option(run: Run) -> None:
    run.backward(_first(run))
    run.update("two", bs=3)


def _of_a_mean(run: Run) -> None:
    run.backward(_first(run), lambda outputs, batch: outputs[0].mean())


def _over_the_batch(run: Run) -> None:
    run.backward(_first(run), samestep.whole_batch(lambda outputs, batch: torch.logsumexp(outputs[0].flatten(), 0)))


def _method(run: Run) -> None:
    run.backward(_first(run))
    run.call("two", "update_hessian")


def _no_gradient(run: Run) -> None:
    run.backward(_first(run))
    for param in run.model.parameters():
        param.grad = None
    run.update("one")


def _forgotten_in_the_module(run: Run) -> None:
    run.backward(_first(run))
    run.model.zero_grad()
    run.backward(_first(run))


def _replaced_behind_gradients(run: Run) -> None:
    run.backward(_first(run))
    for name, gradient in run.gradients().items():
        gradient.mul_(0.5)  # in place, which counts
        run.model.get_parameter(name).grad = None
    run.update()


WRONG: dict[str, tuple[Any, str]] = {
    "update first": (lambda run: run.update(), r"no gradient is accumulated for it. Use run.backward\(batch, loss\) before it"),
    "gradients first": (lambda run: run.gradients(), r"run.gradients: no gradient is accumulated for it"),
    "unknown": (lambda run: run.backward(_first(run), into="three"), r"run.backward: unknown optimizer 'three': the run has 'body', 'one', 'two'"),
    "unknown to zero": (lambda run: run.zero_grad("three"), r"run.zero_grad: unknown optimizer 'three': the run has"),
    "step": (_step_while_gradients_wait, r"run.step: accumulated gradients are not used yet, for example of body.0.bias"),
    "save": (_save_amid_a_step, r"run.save: accumulated gradients are not used yet"),
    "twice": (_update_twice, r"run.update: no gradient is accumulated for it"),
    "of others": (_update_of_others, r"run.update: no gradient is accumulated for it"),
    "after the end": (_after_the_end, r"the batch of step 4, and its stream has ended"),
    "option": (_of_an_option, r"run.update gives bs to Adam.step, which does not take it"),
    "over the batch": (_over_the_batch, r"the loss of the run is a sum over samples, so that nothing is exchanged for it"),
    "method": (_method, r"run.call: Adam has no method 'update_hessian'"),
    "mean": (_of_a_mean, r"use samestep\.mean_over.* return \(sum, count\)"),
    "no gradient": (_no_gradient, r"\.grad of run.model was replaced between run.backward and run.update"),
    "forgotten in the module": (_forgotten_in_the_module, r"\.grad of run.model was replaced between run.backward and run.backward"),
    "replaced behind gradients": (_replaced_behind_gradients, r"\.grad of run.model was replaced between run.backward and run.update"),
}  # fmt: skip


@telling
def wrong(rank: int, world: int, case: str) -> None:
    run = run_of(Loop(Regression, both, OF_HEADS), f"dp={world}")
    run.prepare(_first(run).samples([0]))
    WRONG[case][0](run)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_refused_in_one_line(case: str) -> None:
    """On the ranks too where they could wait for each other, or exchange something."""
    for text in pool(2).run(wrong, case) if case in ("over the batch", "no gradient") else [wrong(0, 1, case)]:
        assert re.search(WRONG[case][1], text), text
        assert "\n" not in text


COUPLED = {"sam": "dp=2 zero=3", "sam by hand": "pp=2"}


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_all_weights_is_refused_where_a_rank_lacks_some(name: str) -> None:
    with pytest.raises(LayoutError, match=r"evaluates the loss again, .*Use .*zero=0 without tp and pp"):
        pool(2).run(parts, name, COUPLED[name])


# -- weights that several stages of a pipeline hold ------------------------------------------------


class TiedLayers(nn.Module):
    """Four blocks, whose first and last layers have one weight, and a head that reads what the last block gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4))
        self.last, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x), self.head(x.detach())


def _near(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    return outputs[0].square().sum(), len(outputs[0])


def _far(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    return (outputs[1] - 1).square().sum() + outputs[0].abs().sum(), outputs[1].numel()


def _first_and_last(rank: int, world: int, layout: str, order: str) -> Trained:
    """Two backwards before two updates, or one in front of each, of weights on one stage and of such on several."""
    job = samestep.Job(train={"global_batch": 8, "steps": 3, "watch_every": 0}, numerics={"precision": "float64"})
    optimizers = {
        "head": lambda named: torch.optim.SGD([param for name, param in named if name.startswith("head")], lr=0.1),
        "rest": lambda named: torch.optim.SGD([param for name, param in named if not name.startswith("head")], lr=0.1),
    }
    torch.manual_seed(0)
    run = samestep.parallelize(TiedLayers().double(), _both_outputs, optimizers, layout=layout, job=in_loop(job))
    losses = []
    for batch in samestep.batches(Points(), job):
        if order == "in turn":
            for name, loss in (("head", _far), ("rest", _near)):
                losses.append(run.backward(batch, loss, into=name).loss)
                losses.append(run.update(name).grad_norm)
        else:
            run.backward(batch, _far, into="head")
            losses.append(run.backward(batch, _near, into="rest").loss)
            losses += [run.update("rest").grad_norm, run.update("head").grad_norm]
    return losses, run.state_dict(on_every_rank=True)


def _both_outputs(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    return _near(outputs, batch)[0] + _far(outputs, batch)[0], len(outputs[0])


@pytest.mark.parametrize("order", ["in turn", "waiting"])
@pytest.mark.parametrize("layout", ["pp=2", pytest.param("dp=2 pp=2", marks=pytest.mark.nightly)])
def test_gradients_of_weights_on_several_stages_wait_alike_on_all(layout: str, order: str) -> None:
    assert_as_on_one_device(_first_and_last, layout, order)
