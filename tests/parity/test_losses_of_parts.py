"""Losses and measures whose values alone, or first samples alone, add up: equal to a plain loop in every layout, or refused by name.

Steps: the first has positives in each part, the second one positive, the third none.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.errors import DataError, JobError, UnprovenError
from samestep.job import Job
from samestep.layout import Layout
from tests.plain import Trained, assert_trained, train_plainly
from tests.pool import pool, telling

B, STEPS = 8, 4
JOB = Job(train={"global_batch": B, "steps": STEPS}, run={"device": "cpu"}, numerics={"precision": "float64"})
STEP = [0]
"""The step, counted from 0, as a loop's own flag knows it."""


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch_of(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x, rewards = (torch.rand(*size, generator=drawn, dtype=torch.float64) for size in ((B, 6), (B,)))
    positives = (torch.arange(B) % 2 == 0, torch.arange(B) == 3, torch.zeros(B) > 0, torch.arange(B) < 3)
    labels = torch.randint(4, (B,), generator=drawn)
    x[0, 0] = 3.0 * (step == 2)
    return {"x": x, "y": labels, "rewards": rewards, "groups": torch.arange(B) // 2, "pos": positives[step]}


def forward(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"])


optimizer = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01)


def each(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch["y"], reduction="none")


def ratio(outputs: Tensor, batch: Any) -> Tensor:
    """The ratio of a first epoch on policy: its value is 1."""
    chosen = outputs.log_softmax(-1).gather(1, batch["y"][:, None]).squeeze(1)
    return (chosen - chosen.detach()).exp()


def counting(count: Callable[[Tensor], Any]) -> Callable[[Tensor, Any], Any]:
    """Return the loss of the positives with their count, guarded in some way."""

    def loss(outputs: Tensor, batch: Any) -> Any:
        return (each(outputs, batch) * batch["pos"]).sum(), count(batch["pos"].sum())

    return loss


def picked(outputs: Tensor, batch: Any) -> Any:
    rows = each(outputs, batch)[batch["pos"]]
    return rows.sum(), max(len(rows), 1)


def branched(outputs: Tensor, batch: Any) -> Any:
    number = int(batch["pos"].sum())
    return (each(outputs, batch)[batch["pos"]].sum(), number) if number else (outputs.sum() * 0.0, 1)


def terms(outputs: Tensor, batch: Any) -> Any:
    found = counting(lambda n: n.clamp(min=1))(outputs, batch)
    return {"all": (each(outputs, batch).sum(), len(outputs)), "pos": found}, {
        "share": (batch["pos"].sum(), len(outputs))
    }


def terms_of_numbers(outputs: Tensor, batch: Any) -> Any:
    positive = (outputs.square().sum(-1) * batch["pos"]).sum()
    return {"all": (each(outputs, batch).sum(), len(outputs)), "pos": (positive, max(1, int(batch["pos"].sum())))}


def pairs(outputs: Tensor, batch: Any) -> Any:
    """Advantages of groups of two that stay together."""
    rewards = batch["rewards"].view(-1, 2)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    return -(ratio(outputs, batch) * advantages).sum(), len(outputs)


EQUAL: dict[str, Callable[[Tensor, Any], Any]] = {
    "clamp": counting(lambda n: n.clamp(min=1)),
    "clamp in place": counting(lambda n: n.clamp_(min=1)),
    "maximum": counting(lambda n: torch.maximum(n, torch.ones_like(n))),
    "where": counting(lambda n: torch.where(n > 0, n, torch.ones_like(n))),
    "max and int": counting(lambda n: max(1, int(n))),
    "max of a tensor": counting(lambda n: max(n, 1)),
    "or": counting(lambda n: int(n) or 1),
    "one more if none": counting(lambda n: n + (n == 0)),
    "less than one": counting(lambda n: n.add((n < 1).to(n.dtype))),
    "if any": lambda o, b: ((each(o, b) * b["pos"]).sum(), b["pos"].sum() if b["pos"].any() else 1),
    "rows": picked,
    "a branch": branched,
    "terms": terms,
    "terms of numbers": terms_of_numbers,
    "groups of two": pairs,
}


def balanced(outputs: Tensor, batch: Any) -> Any:
    one, other = each(outputs, batch).sum(), outputs.square().sum()
    return one + (one / other).detach() * other, len(outputs)


def hooked(outputs: Tensor, batch: Any) -> Any:
    rows = each(outputs, batch)
    if rows.requires_grad:
        rows.register_hook(lambda gradient: gradient / gradient.norm())
    return rows.sum(), len(rows)


def mined(outputs: Tensor, batch: Any) -> Any:
    rows = each(outputs, batch)
    return (rows.sum() if STEP[0] < 2 else rows.topk(len(rows) // 2).values.sum() * 2), len(rows)


def with_share(outputs: Tensor, batch: Any) -> Any:
    """A guarded number of positives among the values, where the guard is in a sum."""
    return each(outputs, batch).sum(), len(outputs), {"share": (batch["pos"].sum().clamp(min=1), len(outputs))}


def with_limit(outputs: Tensor, batch: Any) -> Any:
    return each(outputs, batch).sum().clamp(max=100.0), len(outputs)


DECISIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "the largest": lambda _, batch: batch["x"].max() > 3.5,
    "any": lambda _, batch: (batch["groups"] == 700).any(),
    "the spread": lambda _, batch: batch["x"].std() > 20,
    "an interval": lambda _, batch: (batch["x"].max() > 5.5) & (batch["x"].max() < 7),
    "an output": lambda outputs, _: outputs.max() > 90,
    "a class": lambda _, batch: torch.tensor(9 in batch["groups"].tolist()),
}
"""What samples of the steps do not decide, but others may."""
SELECTIONS: dict[str, Callable[[Tensor], Any]] = {
    "where": lambda decision: torch.where(decision, 2.0, 1.0),
    "a table": lambda decision: [1.0, 2.0][int(decision)],
    "a dict": {False: 1.0, True: 3.0}.get,
    "arithmetic": lambda decision: 1 + decision.double(),
}


def selected(decision: Callable[[Tensor, Any], Tensor], select: Callable[[Any], Any]) -> Callable[[Tensor, Any], Any]:
    def loss(outputs: Tensor, batch: Any) -> Any:
        found = decision(outputs, batch)
        return each(outputs, batch).sum() * select(bool(found) if select.__name__ == "get" else found), len(outputs)

    return loss


def of_rows(decision: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Any]:
    """Return the loss in which each sample decides on its own factor."""

    def loss(outputs: Tensor, batch: Any) -> Any:
        rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(len(outputs))]
        found = [decision(outputs[i : i + 1], row) for i, row in enumerate(rows)]
        return (each(outputs, batch) * torch.where(torch.stack(found), 2.0, 1.0)).sum(), len(outputs)

    return loss


def group_of_ids(outputs: Tensor, batch: Any) -> Any:
    """Rewards without the mean of their group, whose number no other group has."""
    groups = batch["groups"] - batch["groups"].min()
    sums = torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add(0, groups, batch["rewards"])
    advantages = batch["rewards"] - (sums / torch.bincount(groups))[groups]
    return -(outputs.log_softmax(-1)[:, 0] * advantages).sum(), len(outputs)


EQUAL |= {f"{name} of each": of_rows(DECISIONS[name]) for name in ("the largest", "any", "an output")}
EQUAL["ids of groups"] = group_of_ids
GRADIENT, SUM = "its gradient by the outputs", "its sum is"
REFUSED: dict[str, tuple[Callable[[Tensor, Any], Any], int, str]] = {
    "balanced terms": (balanced, 0, GRADIENT),
    "a hook": (hooked, 0, GRADIENT),
    "another guard": (counting(lambda n: n + (n < 2)), 0, "Use a plain sum and count, also after n.clamp(min=1)"),
    "a sum of a value that is guarded": (with_share, 0, "its sum of values.share is 2 for the whole"),
    "a sum that is limited": (with_limit, 0, SUM),
    "mining by a flag": (mined, 2, SUM),
}
"""Each with the step that is refused, counted from 0, and words of the refusal."""
WAYS = [*zip(DECISIONS, [*SELECTIONS] * 3, strict=False)]
REFUSED |= {f"{name}, by {way}": (selected(DECISIONS[name], SELECTIONS[way]), 0, SUM) for name, way in WAYS}


def learn(run: samestep.Run) -> tuple[list[float], dict[str, Tensor], str]:
    """Take the steps; return the losses before an error, the weights, and the error."""
    losses: list[float] = []
    for STEP[0] in range(STEPS):
        try:
            losses.append(run.step(batch_of(STEP[0])).loss)
        except UnprovenError as error:
            return losses, {}, str(error)
    return losses, run.state_dict(on_every_rank=True), ""


def trained(rank: int, world: int, layout: str, name: str) -> tuple[list[float], dict[str, Tensor], str]:
    loss = EQUAL[name] if name in EQUAL else REFUSED[name][0]
    return learn(samestep.parallelize(build, loss, optimizer, layout=layout, job=JOB, forward=forward))


def plain(loss: Callable[[nn.Module, Any], Any]) -> Trained:
    """Train with a loss of the model and a batch."""
    model = build()

    def of_step(step: int) -> Any:
        STEP[0] = step
        return loss(model, batch_of(step))

    return train_plainly(model, range(STEPS), of_step, optimizer(model.parameters()))


def of_outputs(loss: Callable[[Tensor, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    return lambda model, batch: loss(forward(model, batch), batch)


def assert_equal(ranks: list[Any], expected: Trained) -> None:
    assert not any(error for *_, error in ranks)
    assert_trained(ranks, expected, 1e-9, 1e-12)


def counted_calls(factor: Callable[[int], float]) -> Callable[[Tensor, Any], Any]:
    """Return a loss with a factor of the number of its calls."""
    seen = {"calls": 0}

    def loss(outputs: Tensor, batch: Any) -> Any:
        seen["calls"] += 1
        return each(outputs, batch).sum() * factor(seen["calls"]), len(outputs)

    return loss


REFUSED["a term that begins after so many calls"] = (
    counted_calls(lambda calls: 1.0 + (calls > 20)),
    0,
    "number of its calls",
)
ROWS = [("dp=1 microbatch=4", name) for name in EQUAL]
ROWS += [("dp=2", "terms of numbers"), ("dp=2 zero=3", "max and int"), ("pp=2 microbatch=4", "terms")]


@pytest.mark.parametrize(("layout", "name"), ROWS)
def test_a_count_that_is_guarded_is_that_of_the_step(layout: str, name: str) -> None:
    assert_equal(pool(Layout(layout).world_size).run(trained, layout, name), plain(of_outputs(EQUAL[name])))


@pytest.mark.parametrize("name", REFUSED)
def test_what_adds_up_in_values_or_first_samples_alone_is_refused_before_its_update(name: str) -> None:
    _, step, words = REFUSED[name]
    layout = "dp=2" if name == "mining by a flag" else "dp=1 microbatch=4"
    for losses, _, error in pool(Layout(layout).world_size).run(trained, layout, name):
        assert words in error
        assert len(losses) == step


# -- losses that a forward returns -----------------------------------------------------------------


def with_count(count: Callable[[Tensor], Any]) -> Callable[[nn.Module, Any], Any]:
    return lambda model, batch: counting(count)(forward(model, batch), batch)


def of_mean(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Any], Any]:
    def returned(model: nn.Module, batch: Any) -> Tensor:
        outputs = forward(model, batch)
        return change(each(outputs, batch), outputs)

    return returned


def without_gradients(model: nn.Module, batch: Any) -> Tensor:
    rows = each(forward(model, batch), batch)
    with torch.no_grad():
        scale = rows.mean()
    return rows.mean() / scale


def by_a_teacher(model: nn.Module, batch: Any) -> Tensor:
    outputs = forward(model, batch)
    with torch.no_grad():
        sure = forward(model, batch).softmax(-1).max(-1).values
    return (each(outputs, batch) * sure).mean()


OF_MODEL: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "clamp": (with_count(lambda n: n.clamp(min=1)), ""),
    "one more if none": (with_count(lambda n: n + (n == 0)), ""),
    "another guard": (with_count(lambda n: n + (n < 2)), "a sum and a count, and the loss of parts"),
    "a ratio": (of_mean(lambda rows, _: rows.mean() / rows.mean().detach()), "which is neither"),
    "balanced": (of_mean(lambda rows, o: rows.mean() + (rows.mean() / o.square().mean()).detach() * o.square().mean()), "neither"),
    "under no_grad": (without_gradients, "neither"),
    "a teacher": (by_a_teacher, ""),
    "a detached factor of each": (of_mean(lambda rows, o: (rows * o.softmax(-1).amax(-1).detach()).mean()), ""),
}  # fmt: skip

MORE = "which is neither"
OF_MODEL |= {
    "a factor of many samples": (of_mean(lambda rows, _: rows.mean() * (2 if len(rows) > B - 2 else 1)), MORE),
    "a count that is limited": (with_count(lambda n: n.clamp(1, 2)), "a sum and a count, and the loss of parts"),
}  # fmt: skip


def of_model(rank: int, world: int, layout: str, name: str) -> tuple[list[float], dict[str, Tensor], str]:
    run = samestep.parallelize(build, "model", optimizer, layout=layout, job=JOB, forward=OF_MODEL[name][0])
    try:
        losses = [run.step(batch_of(step)).loss for step in range(STEPS)]
    except UnprovenError as error:
        return [], {}, str(error)
    return losses, run.state_dict(on_every_rank=True), ""


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("dp=1 microbatch=4", name) for name in OF_MODEL),
        ("dp=1", "a ratio"),
        ("tp=2", "clamp"),
        ("pp=2 microbatch=4", "clamp"),
    ],
)
def test_a_loss_that_a_forward_returns(layout: str, name: str) -> None:
    returned, words = OF_MODEL[name]
    found = pool(Layout(layout).world_size).run(of_model, layout, name)
    if words and layout != "dp=1":
        assert words in found[0][2]
        return
    assert_equal(found, plain(returned))


def later(
    first: Callable[[nn.Module, Any], Any], second: Callable[[nn.Module, Any], Any]
) -> Callable[[nn.Module, Any], Any]:
    """Return a forward that returns another loss once a loop has set a flag."""
    return lambda model, batch: (second if STEP[0] >= 2 else first)(model, batch)


MEAN = of_mean(lambda rows, _: rows.mean())


def over(count: Callable[[Any], Any]) -> Callable[[nn.Module, Any], Any]:
    return lambda model, batch: each(forward(model, batch), batch).sum() / count(batch)


LATER = {
    "a count": (later(over(lambda b: len(b["y"])), over(lambda b: b["y"].sum().clamp(min=2))), "neither their sum"),
    "the same count": (later(over(lambda b: len(b["y"])), over(lambda b: torch.tensor(len(b["y"])))), ""),
    "a ratio": (later(MEAN, of_mean(lambda rows, _: rows.mean() / rows.mean().detach())), "neither their sum"),
    "a sum": (later(MEAN, of_mean(lambda rows, _: rows.sum())), "begun to compute another loss"),
    "another mean": (later(MEAN, of_mean(lambda rows, o: (rows + o.square().sum(-1)).mean())), ""),
}  # fmt: skip
"""Each with words of the refusal of the third step."""


def of_later(rank: int, world: int, layout: str, name: str) -> tuple[list[float], dict[str, Tensor], str]:
    return learn(samestep.parallelize(build, "model", optimizer, layout=layout, job=JOB, forward=LATER[name][0]))


@pytest.mark.parametrize("name", LATER)
def test_a_forward_that_returns_another_loss_later_is_tried_before_that_update(name: str) -> None:
    returned, words = LATER[name]
    found = pool(1).run(of_later, "dp=1 microbatch=4", name)
    if words:
        assert words in found[0][2]
        assert len(found[0][0]) == 2
        return
    assert_equal(found, plain(returned))


# -- measures --------------------------------------------------------------------------------------


def auc(outputs: Tensor, batch: Any) -> Any:
    scores, good = outputs[:, 0], batch["rewards"] > 0.5
    return {"auc": ((scores[good][:, None] > scores[~good]).double().mean() * len(outputs), len(outputs))}


def recall(outputs: Tensor, batch: Any) -> Any:
    right = (outputs.argmax(-1) == batch["y"]) & batch["pos"]
    return {"recall": (right.sum(), batch["pos"].sum().clamp(min=1))}


MEASURES = {"auc": (auc, "of auc"), "recall": (recall, "")}


def measured(rank: int, world: int, layout: str, name: str) -> tuple[float, str]:
    run = samestep.parallelize(build, "cross_entropy", optimizer, layout=layout, job=JOB, forward=forward)
    held = {key: torch.cat([batch_of(step)[key] for step in range(STEPS)]) for key in batch_of(0)}
    held["labels"] = held["y"]
    try:
        return run.evaluate(held, MEASURES[name][0])[name], ""
    except UnprovenError as error:
        return math.nan, str(error)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
def test_a_measure_is_a_sum_or_refused(layout: str, name: str) -> None:
    measure, words = MEASURES[name]
    for value, error in pool(Layout(layout).world_size).run(measured, layout, name):
        if words:
            assert words in error
            assert "run.predict(set)" in error
            continue
        held = {key: torch.cat([batch_of(step)[key] for step in range(STEPS)]) for key in batch_of(0)}
        total, count = measure(forward(build(), held), held)[name]
        assert (value, error) == (pytest.approx(float(total) / float(count), rel=1e-12), "")


def right(outputs: Tensor, batch: Any) -> Any:
    return {"right": ((outputs.argmax(-1) == batch["y"]).sum(), len(outputs))}


def caught(rank: int, world: int, layout: str, what: str) -> tuple[str, float]:
    """Go on after an error that the loop has caught."""

    def fails_on_one(outputs: Tensor, batch: Any) -> Any:
        if rank == 1:
            raise ValueError("no such file")
        return right(outputs, batch)

    run = samestep.parallelize(build, "cross_entropy", optimizer, layout=layout, job=JOB, forward=forward)
    held = {**batch_of(0), "labels": batch_of(0)["y"]}
    run.step(held)
    text = ""
    try:
        if what == "a measure":
            run.evaluate(held, fails_on_one)
        else:
            run.step({**held, "x": held["x"][:, :5]})
    except (RuntimeError, JobError) as error:
        text = str(error)
    return text, run.evaluate(held, right)["right"]


@pytest.mark.parametrize(
    ("layout", "what", "words"),
    [("tp=2", "a step", "shapes cannot be multiplied"), ("tp=2", "a measure", "no such file")],
)
def test_an_error_that_the_loop_catches_leaves_no_rank_behind(layout: str, what: str, words: str) -> None:
    (text, first), (other, second) = pool(2).run(caught, layout, what)
    assert words in text
    assert words in other
    assert first == second


# -- cross_entropy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8])
def test_classes_that_may_be_in_two_places_are_refused(size: int) -> None:
    model = nn.Sequential(nn.Linear(6, size * size), nn.Unflatten(1, (size, size)))
    run = samestep.parallelize(model, "cross_entropy", torch.optim.SGD, job=JOB)
    with pytest.raises(JobError, match="classes may be the last or the second dimension"):
        run.step((torch.randn(B, 6), torch.zeros(B, size, dtype=torch.int64)))


def _summed_by_hand(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten(), reduction="sum"), batch[1].numel()


@pytest.mark.parametrize(
    ("loss", "label", "place", "layout"),
    [
        ("cross_entropy", -1, 5, "dp=1"),
        ("cross_entropy", -101, 0, "dp=1 microbatch=1"),
        ("cross_entropy", 4, 2, "dp=1"),
        (nn.CrossEntropyLoss(), 9, B - 2, "dp=1 microbatch=1"),
        (nn.NLLLoss(), 9, B - 2, "dp=1"),
        (_summed_by_hand, 9, B - 2, "dp=1 microbatch=1"),
    ],
    ids=str,
)
def test_a_label_that_is_no_class_is_named_with_its_sample(loss: Any, label: int, place: int, layout: str) -> None:
    """By its index among all samples, whichever micro-batch it is in."""
    labels = torch.arange(B) % 4
    labels[place], labels[(place + 1) % B] = label, 0 if place == B - 2 else -100
    run = samestep.parallelize(nn.Linear(6, 4), loss, torch.optim.SGD, layout=layout, job=JOB)
    classes = "and the classes are 0 to 3" if loss == "cross_entropy" else ""
    with pytest.raises(DataError, match=f"sample {place} has the label {label}, {classes}"):
        run.step((torch.randn(B, 6), labels))


# -- values of a whole batch -----------------------------------------------------------------------


class Items(torch.utils.data.Dataset[Any]):
    """The samples of the first batch, of which the first four are each of another class."""

    def __len__(self) -> int:
        return B

    def __getitem__(self, index: int) -> Any:
        return {"x": batch_of(0)["x"][index], "y": torch.tensor(index % 4)}


def with_weights(samples: Any) -> Any:
    batch = torch.utils.data.default_collate(samples)
    counts = torch.bincount(batch["y"], minlength=4).clamp(min=1).double()
    return {**batch, "w": (1 / counts)[batch["y"]]}


def centred(samples: Any) -> Any:
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "x": batch["x"] - batch["x"].mean(0), "w": torch.ones(len(samples))}


def ranked(samples: Any) -> Any:
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "w": batch["x"][:, 0].argsort().argsort().double() / len(samples)}


@pytest.mark.parametrize("collate", [with_weights, centred, ranked])
def test_a_collate_function_with_values_of_the_batch_is_refused(collate: Callable[[Any], Any]) -> None:
    def loss(outputs: Tensor, batch: Any) -> Any:
        return (each(outputs, batch) * batch["w"]).sum(), len(outputs)

    loader = torch.utils.data.DataLoader(Items(), batch_size=B, collate_fn=collate)
    run = samestep.parallelize(build, loss, optimizer, layout="dp=1 microbatch=4", job=JOB, forward=forward)
    batch = next(iter(samestep.batches(loader, JOB)))
    with pytest.raises(UnprovenError, match=r"run\.step\(batch\)"):
        run.step(batch)


# -- losses that read the run's weights ------------------------------------------------------------


PENALTIES: dict[str, Callable[[nn.Module], Tensor]] = {
    "all": lambda model: torch.stack([param.abs().sum() for param in model.parameters()]).sum(),
    "a norm": lambda model: model[0].weight.norm(),  # type: ignore[index]
    "a product": lambda model: (model[2].weight @ model[2].weight.T - torch.eye(4)).square().sum(),  # type: ignore[index]
}


def penalised(rank: int, world: int, layout: str, kind: str) -> list[float] | str:
    run: samestep.Run | None = None

    def loss(outputs: Tensor, batch: Any) -> Any:
        assert run is not None
        return each(outputs, batch).sum() + 0.01 * PENALTIES[kind](run.model) * len(outputs), len(outputs)

    run = samestep.parallelize(build, loss, optimizer, layout=layout, job=JOB, forward=forward)
    try:
        return [run.step(batch_of(step)).loss for step in range(STEPS)]
    except samestep.SamestepError as error:
        return str(error)


@pytest.mark.parametrize("kind", PENALTIES)
def test_a_penalty_on_the_weights_of_the_run_is_equal_or_refused_where_they_are_cut(kind: str) -> None:
    model, losses = build(), []
    optim = optimizer(model.parameters())
    for step in range(STEPS):
        batch = batch_of(step)
        value = each(forward(model, batch), batch).mean() + 0.01 * PENALTIES[kind](model)
        optim.zero_grad()
        value.backward()
        optim.step()
        losses.append(value.item())
    for layout, ranks in (("dp=1 microbatch=4", 1), ("dp=2", 2)):
        for found in pool(ranks).run(penalised, layout, kind):
            assert found == pytest.approx(losses, rel=1e-12)
    for text in pool(2).run(penalised, "dp=2 zero=3", kind):
        assert re.match(r"the loss (reads|depends on) \S+ of the model, .*Use a forward that returns", str(text))


class KeptScores:
    """A measure with a list, a number or a tensor of its own."""

    def __init__(self, kept: str) -> None:
        self.kept, self.scores, self.number, self.total = kept, [], 0, torch.zeros(())

    def __call__(self, outputs: Tensor, batch: Any) -> Any:
        if self.kept == "a list":
            self.scores.append(outputs.detach().clone())
        elif self.kept == "a number":
            self.number += len(outputs)
        elif self.kept == "a tensor":
            self.total += outputs.float().sum()
        return {"right": ((outputs.argmax(-1) == batch["y"]).sum(), len(outputs))}


@telling
def kept_by_measure(rank: int, world: int, layout: str, kept: str) -> None:
    run = samestep.parallelize(build, "cross_entropy", optimizer, layout=layout, job=JOB, forward=forward)
    held = {key: torch.cat([batch_of(step)[key] for step in range(2)]) for key in batch_of(0)}
    run.evaluate({**held, "labels": held["y"]}, KeptScores(kept))


@pytest.mark.parametrize("kept", ["a list", "a tensor", "nothing"])
def test_a_measure_that_keeps_samples_is_refused_where_ranks_have_their_own(kept: str) -> None:
    for error in pool(2).run(kept_by_measure, "dp=2", kept):
        assert ("keeps something between its calls" in error) is (kept != "nothing")
    if kept == "a list":
        assert pool(1).run(kept_by_measure, "dp=1 microbatch=4", kept) == [""]


def keeping_in_loss(rank: int, world: int, layout: str, kept: str) -> list[str]:
    scores = KeptScores(kept)

    def loss(outputs: Tensor, batch: Any) -> Any:
        return each(outputs, batch).sum(), len(outputs), scores(outputs, batch)

    run = samestep.parallelize(build, loss, optimizer, layout=layout, job=JOB, forward=forward)
    return [text for text in run.step(batch_of(0)).remarks if "between its calls" in text]


def test_a_loss_that_keeps_samples_is_named_where_parts_have_their_own() -> None:
    assert all(pool(2).run(keeping_in_loss, "dp=2", "a number"))
    for layout, kept, is_named in (
        ("dp=1 microbatch=4", "a list", True),
        ("dp=1 microbatch=4", "nothing", False),
        ("dp=1", "a list", False),
    ):
        assert bool(*pool(1).run(keeping_in_loss, layout, kept)) is is_named
