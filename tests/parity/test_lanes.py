"""State that a sample hands to the next step's sample at its place: as in a plain loop, in every layout and over a resume."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


# -- lanes with other features, and samples of several sizes that are padded -----------------------

WIDTH, BATCH, STEPS_OF_BOTH = 6, 8, 4
JOB_OF_BOTH = samestep.Job(
    train={"global_batch": BATCH, "steps": STEPS_OF_BOTH}, numerics={"precision": "float64"}, run={"device": "cpu"}
)


IGNORED = -100


class Vectors:
    """Vectors with a class each."""

    def __len__(self) -> int:
        return BATCH * STEPS_OF_BOTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "y": torch.randint(3, (), generator=generator)}


class Sequences(Vectors):
    """Sequences of 3 to 6 vectors, padded with zeros to the longest that is read with them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(3 + index % 4, WIDTH, generator=generator, dtype=torch.float64)}

    def read(self, indices: Any) -> dict[str, Tensor]:
        return {"x": nn.utils.rnn.pad_sequence([self[int(index)]["x"] for index in indices], batch_first=True)}


class Tagged(Sequences):
    """Sequences with a class for each vector, padded with a class that does not count."""

    def read(self, indices: Any) -> dict[str, Tensor]:
        x = super().read(indices)["x"]
        counts = x.abs().sum(-1) > 0
        return {"x": x, "tags": torch.where(counts, (x[..., 0] > 0).long() + (x[..., 1] > 0), IGNORED)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.last(torch.tanh(self.first(x))))


class OneCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, batch: Any, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        x = batch["x"]
        hidden = self.cell(x, x.new_zeros(len(x), WIDTH) if carried is None else carried)
        return self.head(hidden), hidden


def of_classes(z: Tensor, batch: Any) -> Tensor:
    """Supervised contrastive: samples of one class attract each other."""
    z = F.normalize(z, dim=-1)
    same = (batch["y"][:, None] == batch["y"][None]).double()
    return -((z @ z.T / 0.2).log_softmax(-1) * same).sum() / len(z)


def squares(z: Tensor, batch: Any) -> tuple[Tensor, int]:
    return z.square().sum(), len(z)


def others(z: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (z - 1).abs().sum(), 2 * len(z)


def of_sequences(z: Tensor, batch: Any) -> Tensor:
    counts = (batch["x"].abs().sum(-1) > 0).double()[..., None]
    z = F.normalize((z * counts).sum(1), dim=-1)
    return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)))


def of_tags(z: Tensor, batch: Any) -> Tensor:
    """A mean over all tags, and the spread of their scores."""
    counts = batch["tags"] != IGNORED
    rows = z[counts]
    scores = rows.gather(1, batch["tags"][counts][:, None])
    return scores.std() + F.cross_entropy(rows, batch["tags"][counts])


momentum_of_both = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def mean_of(loss: Callable[..., Any], z: Tensor, batch: Any) -> Tensor:
    found = loss(z, batch)
    return found if isinstance(found, Tensor) else found[0] / found[1]


CASES: dict[str, tuple[type[nn.Module], type[Vectors], list[Callable[..., Any]], bool, float | None]] = {
    "lanes, whole batch": (OneCell, Vectors, [of_classes], True, None),
    "lanes, two backwards": (OneCell, Vectors, [squares, others], True, None),
    "padded": (Net, Sequences, [of_sequences], False, 0.0),
    "padded tags": (Net, Tagged, [of_tags], False, float(IGNORED)),
}
"""Model, data, the losses of the backwards of a step, whether samples are in lanes, and what pads outputs."""


def start(case: str) -> nn.Module:
    torch.manual_seed(7)
    return CASES[case][0]().double()


def plain_of_both(case: str) -> list[float]:
    _, data, losses, lanes, _ = CASES[case]
    model, found, carried = start(case), [], None
    optimizer = momentum_of_both(model.parameters())
    source = data()
    for batch in samestep.batches(source, JOB_OF_BOTH, lanes=lanes):
        samples = batch.samples(batch.shares(0, 1, 1)[0])
        optimizer.zero_grad()
        for loss in losses:
            z, state = model(samples, carried) if lanes else (model(samples["x"]), None)
            value = mean_of(loss, z, samples)
            value.backward()
            found.append(value.item())
        carried = None if state is None else state.detach()
        optimizer.step()
    return found


def in_layout(rank: int, world: int, case: str, layout: str) -> list[float]:
    _, data, losses, lanes, pad = CASES[case]
    whole = [
        samestep.whole_batch(loss, pad=pad) if loss in (of_classes, of_sequences, of_tags) else loss for loss in losses
    ]
    run = samestep.parallelize(start(case), whole[0], momentum_of_both, layout=layout, job=JOB_OF_BOTH)
    found = []
    for batch in samestep.batches(data(), JOB_OF_BOTH, lanes=lanes):
        sums = [run.backward(batch, loss).loss for loss in whole]
        found += [sums[0], *(later - before for before, later in itertools.pairwise(sums))]
        run.update()
    return found


LAYOUTS = ["dp=2", "dp=2 zero=3", "dp=2 microbatch=2"]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *((case, layout) for case in CASES for layout in LAYOUTS),
        ("padded", "pp=2 microbatch=4"),
        ("padded tags", "pp=2 microbatch=4"),
    ],
)
def test_a_loop_that_uses_both_is_a_plain_loop(case: str, layout: str) -> None:
    wanted = plain_of_both(case)
    for found in pool(Layout(layout).world_size).run(in_layout, case, layout):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@telling
def refused_sizes(rank: int, world: int, layout: str) -> None:
    run = samestep.parallelize(
        start("padded"), samestep.whole_batch(of_sequences), momentum_of_both, layout=layout, job=JOB_OF_BOTH
    )
    for batch in samestep.batches(Sequences(), JOB_OF_BOTH):
        run.step(batch)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 microbatch=2"])
def test_several_sizes_without_padding_are_refused_in_one_line(layout: str) -> None:
    for text in pool(2).run(refused_sizes, layout):
        assert text.startswith("the loss over the whole batch is given tensors of "), text
        assert "different parts of it. Use samestep.whole_batch(loss, pad=0.0), which pads them" in text
        assert "[6, 4] and [6, 4]" not in text
