"""State that a sample hands to the next step's sample at its place: as in a plain loop, in every layout and over a resume."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.errors import InputError
from samestep.job import Job
from samestep.layout import Layout
from tests.plain import Trained, assert_trained, train_in_layout, train_in_turn, train_plainly
from tests.pool import pool, telling

STEPS, LANES, TOKENS = 6, 4, 5
JOB = Job(
    train={"global_batch": LANES, "steps": STEPS, "watch_every": 2},
    run={"device": "cpu"},
    numerics={"precision": "float64"},
    optimizer={"clip_norm": 0.25},
)


class Text:
    """Windows of one text: sample i is the i-th window, and its labels the tokens after it. There are five in each of four lanes."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.randint(0, 11, (22 * TOKENS + 1,), generator=torch.Generator().manual_seed(0))
        start = index * TOKENS
        return {"x": text[start : start + TOKENS], "labels": text[start + 1 : start + TOKENS + 1]}


class Recurrent(nn.Module):
    """An LSTM whose state goes on, with as many layers as there are lanes in a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(11, 6), nn.LSTM(6, 7, 2, batch_first=True), nn.Linear(7, 11)

    def forward(self, x: Tensor, carried: Any) -> tuple[Tensor, Any]:
        outputs, carried = self.lstm(self.embed(x), carried)
        return self.head(outputs), carried


class WithMemory(nn.Module):
    """Attention over a memory of the last tokens' features, which grows up to a length, as that of Transformer-XL."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(11, 6), nn.Linear(6, 18), nn.Linear(6, 11)

    def forward(self, batch: Any, carried: Any) -> tuple[Tensor, Any]:
        here = self.embed(batch["x"])
        memory = here[:, :0] if carried is None else carried["memory"].transpose(0, 1)
        both = torch.cat([memory, here], 1)
        query, key, value = self.qkv(both).chunk(3, -1)
        query = query[:, memory.shape[1] :]
        seen = torch.ones(query.shape[1], both.shape[1], dtype=torch.bool).tril(memory.shape[1])
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.head(here + mixed), {"memory": both[:, -7:].transpose(0, 1)}


MODELS: dict[str, type[nn.Module]] = {"lstm": Recurrent, "memory": WithMemory}


def build(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[kind]()


def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    labels = batch["labels"]
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def columns(source: str) -> list[dict[str, Tensor]]:
    """Return the batches of a plain loop over the text in four columns."""
    text, found = Text(), []
    for step in range(STEPS):
        rows = [text[lane * 5 + step % 5] for lane in range(LANES)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        if source == "starts":
            batch["starts"] = torch.tensor([step == 3 and lane % 2 == 1 for lane in range(LANES)])
        found.append(batch)
    return found


def in_columns() -> Iterator[dict[str, Tensor]]:
    yield from columns("starts")


def detached(carried: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, carried)


@functools.cache
def plain(kind: str, source: str) -> Trained:
    model, carried = build(kind).double(), [None]

    def of_batch(numbered: tuple[int, Any]) -> Any:
        step, batch = numbered
        before: Any = None if source == "data set" and step % 5 == 0 else carried[0]
        if "starts" in batch and before is not None:
            keep = (~batch["starts"]).double().view(1, -1, 1)
            before = torch.utils._pytree.tree_map_only(Tensor, lambda one: one * keep, before)
        outputs, carried[0] = model(batch["x"] if kind == "lstm" else batch, detached(before))
        return loss(outputs, batch)

    return train_plainly(model, enumerate(columns(source)), of_batch, momentum(model.parameters()), 0.25)


momentum = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)


plain_sgd = functools.partial(torch.optim.SGD, lr=0.5)


def train(rank: int, world: int, layout: str, kind: str, source: str, folder: str, first: int, last: int) -> Trained:
    run = samestep.parallelize(lambda: build(kind), loss, momentum, layout=layout, job=JOB)
    if first:
        run.load(folder)
    data = Text() if source == "data set" else in_columns
    losses = []
    for batch in samestep.batches(data, JOB, lanes=True, first_step=run.steps_taken):
        losses.append(run.step(batch).loss)
        if run.steps_taken == last:
            break
    run.save(folder)
    return losses, run.state_dict(on_every_rank=True)


@pytest.mark.parametrize(
    ("layouts", "kind", "source"),
    [
        (("dp=2 microbatch=1", "dp=1 microbatch=2"), "lstm", "starts"),
        (("dp=2 zero=3", "dp=1"), "memory", "starts"),
        (("dp=1 microbatch=3", "dp=2 zero=3 microbatch=1"), "memory", "data set"),
    ],
    ids=str,
)
def test_lanes_carry_their_state_as_a_plain_loop_does(
    layouts: tuple[str, str], kind: str, source: str, tmp_path: Any
) -> None:
    assert_trained(train_in_turn(train, layouts, STEPS, kind, source, str(tmp_path)), plain(kind, source))


class Stateless(Recurrent):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.lstm(self.embed(x))[0])


class OutputsAlone(Recurrent):
    def forward(self, x: Tensor, carried: Any) -> Any:
        return super().forward(x, carried)[0]


class MeanState(Recurrent):
    def forward(self, x: Tensor, carried: Any) -> Any:
        outputs, (hidden, _) = super().forward(x, None)
        return outputs, hidden.mean(1)


@telling
def _refused(rank: int, world: int, model: type[nn.Module], layout: str) -> None:
    run = samestep.parallelize(model, loss, lambda params: torch.optim.SGD(params, lr=0.1), layout=layout, job=JOB)
    run.step(next(samestep.batches(Text(), JOB, lanes=True)))


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        (Stateless, "dp=1", "takes x. With lanes, use forward(batch, carried)"),
        (OutputsAlone, "dp=1", "returns a Tensor. With lanes, return (outputs, carried)"),
        (MeanState, "dp=1", "so the part of each lane is not known. Use tensors with one dimension of lanes"),
        (
            Recurrent,
            "pp=2",
            "pp=2' splits the forward pass, and the state that lanes=True carries must pass through it in full. Use pp=1",
        ),
    ],
)
def test_forwards_that_carry_no_lanes_are_refused_in_one_line(model: type[nn.Module], layout: str, text: str) -> None:
    for said in pool(2).run(_refused, model, layout) if "pp" in layout else [_refused(0, 1, model, layout)]:
        assert text in said
        assert "\n" not in said


def test_lanes_and_the_first_step_are_named() -> None:
    assert [batch.step for batch in samestep.batches(Text(), JOB, first_step=4)] == [4, 5]
    lanes = [batch.indices.tolist() for batch in samestep.batches(Text(), JOB, lanes=True)]
    assert lanes == [[step % 5 + lane * 5 for lane in range(4)] for step in range(STEPS)]
    with pytest.raises(InputError, match=r"the data set has 3 samples, and train.global_batch = 4 lanes take one each"):
        samestep.batches([1, 2, 3], JOB, lanes=True)


# -- samples along the second dimension ------------------------------------------------------------


class OverTime(nn.Module):
    """A recurrent model over [tokens, samples], whose state may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(11, 6), nn.LSTM(6, 7, 2), nn.Linear(7, 11)

    def forward(self, x: Tensor, carried: Any = None) -> Any:
        outputs, after = self.lstm(self.embed(x), carried)
        return (self.head(outputs), after) if self.carries else self.head(outputs)

    carries = False


class OverTimeInLanes(OverTime):
    carries = True


def transposed(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([one[key] for one in samples], 1) for key in samples[0]}


def over_time(carries: bool) -> nn.Module:
    torch.manual_seed(1)
    return OverTimeInLanes() if carries else OverTime()


def train_over_time(rank: int, world: int, layout: str, how: str) -> Trained:
    make = functools.partial(
        samestep.parallelize, lambda: over_time(how == "lanes"), loss, plain_sgd, layout=layout, job=JOB, batch_dim=1
    )
    if how == "by hand":
        return train_in_layout(
            make, lambda _: ({key: one.T for key, one in batch.items()} for batch in columns("data set"))
        )
    source: Any = (
        torch.utils.data.DataLoader(Text(), batch_size=4, collate_fn=transposed) if how == "loader" else Text()
    )
    return train_in_layout(make, lambda _: samestep.batches(source, JOB, lanes=how == "lanes"))


@pytest.mark.parametrize(
    ("layout", "how"), [("dp=2", "by hand"), ("dp=2 zero=3 microbatch=1", "loader"), ("dp=2", "lanes")]
)
def test_samples_along_the_second_dimension_train_as_in_a_plain_loop(layout: str, how: str) -> None:
    model, carried, text = over_time(how == "lanes").double(), [None], Text()

    def of_step(step: int) -> Any:
        batch = {key: one.T for key, one in columns("data set")[step].items()}
        if how == "loader":
            batch = transposed([text[index] for index in range(22)][step * 4 : step * 4 + 4])
        outputs = model(batch["x"], detached(carried[0]) if step % 5 else None)
        outputs, carried[0] = outputs if how == "lanes" else (outputs, None)
        return loss(outputs, batch)

    expected = train_plainly(model, range(STEPS), of_step, plain_sgd(model.parameters()), 0.25)
    assert_trained(pool(Layout(layout).world_size).run(train_over_time, layout, how), expected)
