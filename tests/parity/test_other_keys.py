"""Samples with keys of their own, as text with a picture, with sound, or alone: each layout is the plain loop, whichever sample is traced.

A rank whose samples have no picture calls no tower, and its loss needs none of the tower's values, though the model may return them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.datasets.reading import read_samples
from samestep.datasets.values import rows_of, together
from samestep.errors import DataError
from samestep.job import Job
from samestep.layout import Layout
from tests.parts import Residual
from tests.plain import train_plainly
from tests.pool import pool

WIDTH, STEPS = 8, 2
PICTURE, SOUND = 1, 2
TEXT_FIRST, PICTURE_FIRST, MANY = (0, 1, 1, 0, 0), (1, 0, 0, 1, 0), (0, 2, 1, 3, 0, 0, 2)


JOB = Job(
    train={"global_batch": 6, "steps": STEPS},
    run={"device": "cpu", "timeout_s": 60.0, "hang_s": 30.0},
    numerics={"precision": "float64"},
)


def tower(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, WIDTH), *(Residual(WIDTH, 16, norm=True) for _ in range(2)))


class Mixed(nn.Module):
    """Tokens [B, T], in which one stands for a picture and another for a sound; it may return the values of its towers."""

    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.shows, self.embedding, self.vision, self.hearing = shows, nn.Embedding(32, WIDTH), tower(6), tower(5)
        self.blocks, self.head = nn.ModuleList(Residual(WIDTH, 16, norm=True) for _ in range(3)), nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor, pixels: Tensor | None = None, sound: Tensor | None = None) -> Any:
        x, seen = self.embedding(tokens), {}
        if pixels is not None:
            seen["pixels"] = self.vision(pixels)
            x = x.masked_scatter((tokens == 30)[..., None], seen["pixels"])
        if sound is not None:
            seen["sound"] = self.hearing(sound).mean(1)
            x = x.masked_scatter((tokens == 31)[..., None], seen["sound"])
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), **seen} if self.shows else self.head(x)


class Items:
    """Samples of these kinds, one by one."""

    def __init__(self, kinds: tuple[int, ...]) -> None:
        self.kinds = kinds

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn, kind = torch.Generator().manual_seed(index), self.kinds[index % len(self.kinds)]
        sample = {"tokens": torch.randint(30, (7,), generator=drawn)}
        if kind & PICTURE:
            sample["pixels"], sample["tokens"][1] = torch.randn(6, generator=drawn), 30
        if kind & SOUND:
            sample["sound"], sample["tokens"][3] = torch.randn(3, 5, generator=drawn), 31
        return sample


class Batches(Items):
    """A batch has pictures if one of its samples has."""

    def read(self, indices: Sequence[int]) -> dict[str, Tensor]:
        samples = [self[int(index)] for index in indices]
        keys = dict.fromkeys(key for sample in samples for key in sample)
        return {key: torch.stack([one[key] for one in samples if key in one]) for key in keys}


def loss(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    labels = batch["tokens"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum"), len(labels)


def build(shows: bool) -> nn.Module:
    torch.manual_seed(0)
    return Mixed(shows).double()


sgd = functools.partial(torch.optim.SGD, lr=0.5)


def plain(steps: Iterable[list[dict[str, Tensor]]], shows: bool = False) -> list[float]:
    """Return the losses of a plain loop that takes the samples of each step one by one."""
    model = build(shows)

    def of_samples(samples: list[dict[str, Tensor]]) -> Any:
        sums = [
            loss(model(**{k: v.double() if v.is_floating_point() else v for k, v in one.items()}), one)
            for one in samples
        ]
        return sum(total for total, _ in sums), sum(count for _, count in sums)

    return train_plainly(model, steps, of_samples, sgd(model.parameters()))[0]


def samples_of(kinds: tuple[int, ...]) -> Iterator[list[dict[str, Tensor]]]:
    for step in samestep.batches(Batches(kinds), JOB):
        yield [Batches(kinds).read([index]) for index in step.indices]


def trained(rank: int, world: int, layout: str, kinds: tuple[int, ...], shows: bool) -> list[float]:
    run = samestep.parallelize(build(shows), loss, sgd, layout=layout, job=JOB)
    return [run.step(batch).loss for batch in samestep.batches(Batches(kinds), JOB)]


@pytest.mark.parametrize(
    ("layout", "kinds", "shows"),
    [
        ("dp=2 zero=3 microbatch=1", TEXT_FIRST, True),
        ("dp=2 zero=2 microbatch=1", PICTURE_FIRST, True),
        ("dp=2 zero=3", TEXT_FIRST, False),  # no sample can be taken out of a micro-batch
        ("pp=2 microbatch=1", (0, SOUND), False),
        ("tp=2 microbatch=1", TEXT_FIRST, False),
        pytest.param("dp=3 zero=3 microbatch=1", MANY, True, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_samples_of_other_keys_train_as_in_a_plain_loop(layout: str, kinds: tuple[int, ...], shows: bool) -> None:
    expected = plain(samples_of(kinds), shows)
    for losses in pool(Layout(layout).world_size).run(trained, layout, kinds, shows):
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (2, 1)])
def test_samples_of_other_keys_that_no_function_puts_together_are_refused_by_the_key(first: int, second: int) -> None:
    """torch takes the keys of the first sample, and drops a picture of the second without a word."""
    with pytest.raises(DataError, match=r"cannot be stacked .*'(pixels|sound)' is in some of them only.*method read"):
        read_samples(Items((first, second)), [0, 1])


def own_samples(kinds: tuple[int, ...], step: int, rank: int, empty: bool) -> dict[str, Any]:
    """One sample of a rank, which holds None where it lacks a key, or has no such key."""
    sample = Batches(kinds).read([2 * step + rank])
    return {"pixels": None, "sound": None, **sample} if empty else sample


def by_hand(rank: int, world: int, layout: str, kinds: tuple[int, ...], empty: bool) -> list[float]:
    run = samestep.parallelize(build(False), loss, sgd, layout=layout, job=JOB)
    return [run.step(own_samples(kinds, step, rank, empty), local=True).loss for step in range(STEPS)]


@pytest.mark.parametrize(
    ("layout", "kinds", "empty"), [("dp=2 zero=3", (0, PICTURE), False), ("dp=2 zero=2", (PICTURE, 0, 0, SOUND), True)]
)
def test_ranks_own_samples_of_other_keys_train_as_in_a_plain_loop(
    layout: str, kinds: tuple[int, ...], empty: bool
) -> None:
    expected = plain([own_samples(kinds, step, rank, False) for rank in range(2)] for step in range(STEPS))
    for found in pool(2).run(by_hand, layout, kinds, empty):
        assert found == pytest.approx(expected, rel=1e-9)


def test_a_batch_by_hand_of_fewer_pictures_than_samples_is_refused_with_what_works() -> None:
    run = samestep.parallelize(build(False), loss, sgd, job=JOB)
    with pytest.raises(
        DataError, match=r"without a number of samples.*fewer pictures .* a data set with a method read"
    ):
        run.step(Batches((0, PICTURE)).read(range(6)))


@pytest.mark.parametrize("rows", [[0, 1], [1, 2], [0, 3, 4], [4, 0, 2]])
def test_rows_of_parts_have_the_keys_of_some(rows: list[int]) -> None:
    parts = [
        ({"t": torch.arange(2)}, torch.zeros(2)),
        ({"t": torch.arange(2, 5), "p": torch.arange(2, 5)}, torch.ones(3)),
    ]
    samples, ones = rows_of(together(parts, [2, 3]), rows, 5)
    assert samples["t"].tolist() == rows
    assert samples.get("p", torch.zeros(0)).tolist() == [row for row in rows if row >= 2]
    assert ones.tolist() == [float(row >= 2) for row in rows]
