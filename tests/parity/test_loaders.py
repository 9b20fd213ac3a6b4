"""Batches of loaders, streams and changed samples: one order in every layout and after a resume, and the losses of a plain loop."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import samestep
from samestep.datasets import Batch, loaders
from samestep.errors import DataError
from samestep.job import Job
from tests.plain import Trained, assert_trained, train_in_turn, train_plainly
from tests.pool import pool, telling

STEPS = 6
JOB = Job(
    train={"global_batch": 4, "steps": STEPS, "watch_every": 3, "seed": 5},
    run={"device": "cpu"},
    numerics={"precision": "float64"},
)


class Words(Dataset[Any]):
    """Twenty-two sequences of their own lengths, with a label each."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 9, (3 + index % 4,), generator=drawn)
        return tokens, torch.tensor(index % 3)


class Points(Words):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=drawn, dtype=torch.float64), torch.tensor(index % 3)


def padded(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return {"tokens": tokens, "labels": torch.stack([label for _, label in samples])}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.head = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).sum(1) if not tokens.is_floating_point() else tokens
        return self.head(torch.tanh(self.first(x)))


def build() -> nn.Module:
    torch.manual_seed(3)
    return Model()


def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    return nn.functional.cross_entropy(outputs, labels, reduction="sum"), len(labels)


optimizer = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9)


def plain(batches: list[Any]) -> Trained:
    """Train in a plain loop over whole batches, each collated at once."""
    model = build().double()

    def of_batch(batch: Any) -> Any:
        return loss(model(batch["tokens"] if isinstance(batch, dict) else batch[0]), batch)

    return train_plainly(model, batches, of_batch, optimizer(model.parameters()))


def prepared() -> Any:
    return samestep.parallelize(build, loss, optimizer, layout="", job=JOB)


def train(
    rank: int, world: int, layout: str, kind: str, folder: str, first: int, last: int
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Take the steps from `first` to `last`, beginning from a checkpoint unless it is the first, and leave one."""
    run = samestep.parallelize(build, loss, optimizer, layout=layout, job=JOB)
    if first:
        run.load(folder)
    losses, seen = [], []
    for batch in samestep.batches(SOURCES[kind](), JOB, first_step=run.steps_taken):
        losses.append(run.step(batch).loss)
        seen += getattr(batch, "indices", np.zeros(0)).tolist()
        if run.steps_taken == last:
            break
    run.save(folder)
    return losses, run.state_dict(on_every_rank=True), seen


def check(layouts: tuple[str, str], kind: str, expected: Trained, folder: str) -> None:
    """Train three steps in one layout and the others in another, and hold both against a plain loop."""
    assert_trained(train_in_turn(train, layouts, STEPS, kind, folder), expected)


# -- loaders ---------------------------------------------------------------------------------------


class Sorted(Sampler[int]):
    """Indices of a random order of its own, whose generator and count of passes are state."""

    def __init__(self, count: int) -> None:
        self.count, self.passes, self.own = count, 0, random.Random(7)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        order = list(range(self.count))
        self.own.shuffle(order)
        random.shuffle(order)
        yield from order[self.passes :]


class ByLength(Sampler[list[int]]):
    """Batches of sequences of one length, whose sizes differ."""

    def __init__(self, words: Words) -> None:
        self.words = words

    def __iter__(self) -> Iterator[list[int]]:
        for length in torch.randperm(4).tolist():
            alike = [index for index in range(len(self.words)) if index % 4 == length]
            yield alike[:4]
            yield alike[4:]


class Forever(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(np.random.randint(22))


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Points(), batch_size=4),
    "in order, dropped": lambda: DataLoader(Points(), batch_size=4, drop_last=True),
    "shuffled": lambda: DataLoader(Words(), batch_size=4, shuffle=True, collate_fn=padded),
    "generator": lambda: DataLoader(Points(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9)),
    "replacement": lambda: DataLoader(Points(), 4, sampler=RandomSampler(Points(), replacement=True, num_samples=9)),
    "weighted": lambda: DataLoader(Points(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, 23.0), 10)),
    "subset": lambda: DataLoader(Words(), 4, sampler=SubsetRandomSampler(range(3, 16)), collate_fn=padded),
    "subset of points": lambda: DataLoader(Points(), 4, sampler=SubsetRandomSampler(range(3, 16))),
    "own sampler": lambda: DataLoader(Words(), 4, sampler=Sorted(22), collate_fn=padded, num_workers=0),
    "batch sampler": lambda: DataLoader(Words(), batch_sampler=BatchSampler(Sorted(22), 4, True), collate_fn=padded),
    "by length": lambda: DataLoader(Words(), batch_sampler=ByLength(Words())),
    "forever": lambda: DataLoader(Points(), 4, sampler=Forever()),
    "distributed": lambda: DataLoader(Points(), 2, sampler=DistributedSampler(Points(), 2, 1, seed=11)),
    "workers": lambda: DataLoader(Points(), 4, shuffle=True, num_workers=1),
}  # fmt: skip


# -- samples that are changed at random ------------------------------------------------------------


class Jittered(Points):
    """Points that are changed at random with the generators of the process, some of them only."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, label = super().__getitem__(index)
        if index % 2:
            return point, label
        if random.random() < 0.5:
            point = point.flip(0)
        return point + 0.1 * torch.randn(6) + 0.1 * float(np.random.standard_normal()), label


class Batched(Jittered):
    def read(self, indices: Any) -> dict[str, Tensor]:
        points, labels = zip(*[self[int(index)] for index in indices], strict=True)
        return {"tokens": torch.stack(points), "labels": torch.stack(labels)}


def masked(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Put samples together with some words left out at random, as for a masked language model."""
    batch = padded(samples)
    batch["tokens"][torch.rand(batch["tokens"].shape) < 0.3] = 0
    return batch


CHANGED: dict[str, Callable[[], Any]] = {
    "jittered": Jittered,
    "jittered, read together": Batched,
    "jittered, workers": lambda: DataLoader(Jittered(), batch_size=4, shuffle=True, num_workers=1),
    "masked": lambda: DataLoader(Words(), batch_size=4, shuffle=True, collate_fn=masked),
}

# -- streams ---------------------------------------------------------------------------------------


class Flow(IterableDataset[Any]):
    """Some points one after another, shuffled within a buffer by Python's generator."""

    def __init__(self, count: int = 22, shuffled: bool = False) -> None:
        self.count, self.shuffled = count, shuffled

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for index in range(self.count):
            held.append(Points()[index])
            if not self.shuffled or len(held) == 5:
                yield held.pop(random.randrange(len(held)))
        while held:
            yield held.pop()


class Stateful(Flow):
    """A stream that knows its place, and counts the samples that it has read."""

    def __init__(self) -> None:
        super().__init__(22)
        self.at = self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            self.at += 1
            self.read += 1
            point, label = Points()[self.at - 1]
            yield point + torch.randn(6), label
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"].item() == state["at"]
        self.at = state["at"]


class Forgetful(Flow):
    """A stream shuffled within a buffer that its state lacks."""

    def __init__(self) -> None:
        super().__init__(22)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        while self.at < self.count:
            held.append(Points()[self.at])
            self.at += 1
            if len(held) == 5:
                yield held.pop(random.randrange(5))
        while held:
            yield held.pop()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def of_library() -> Any:
    """Samples in several files that Hugging Face's library shuffles within a buffer, of which its state lacks the content."""
    library = pytest.importorskip("datasets")
    points, labels = zip(*[Points()[index] for index in range(22)], strict=True)
    rows = library.Dataset.from_dict({"tokens": torch.stack(points).tolist(), "labels": torch.stack(labels).tolist()})
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=6).map(_in_float64)


def _in_float64(row: Any) -> dict[str, Tensor]:
    return {"tokens": torch.tensor(row["tokens"], dtype=torch.float64), "labels": torch.tensor(row["labels"])}


def points_one_by_one() -> Iterator[Any]:
    yield from Flow()


def whole_batches() -> Iterator[Any]:
    for start in range(0, 22, 4):
        points, labels = zip(*[Points()[index] for index in range(start, min(start + 4, 22))], strict=True)
        yield {"tokens": torch.stack(points), "labels": torch.stack(labels)}


def sequences() -> Iterator[Any]:
    for index in range(22):
        yield Words()[index]


class Everything(Flow):
    def __iter__(self) -> Iterator[Any]:
        return whole_batches()


STREAMS: dict[str, Callable[[], Any]] = {
    "iterable": Flow,
    "shuffled iterable": lambda: Flow(22, True),
    "stateful": Stateful,
    "without its buffer": Forgetful,
    "of a library": of_library,
    "function": lambda: points_one_by_one,
    "generator once": points_one_by_one,
    "function of batches": lambda: whole_batches,
    "generator of batches": whole_batches,
    "list of batches": lambda: [*whole_batches()],
    "stream, loader": lambda: DataLoader(Flow(22, True), batch_size=4),
    "stream, collated": lambda: DataLoader(IteratedWords(), batch_size=4, collate_fn=masked),
    "stream, dropped": lambda: DataLoader(Flow(), batch_size=4, drop_last=True, num_workers=0),
    "batches, loader": lambda: DataLoader(Everything(), batch_size=None),
    "batches, data set": lambda: DataLoader(Whole(), batch_size=None, shuffle=True),
}  # fmt: skip


class IteratedWords(Flow):
    def __iter__(self) -> Iterator[Any]:
        return sequences()


class Whole(Words):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return [*whole_batches()][index]


SOURCES = {**LOADERS, **CHANGED, **STREAMS}
"""What `samestep.batches` is given, by name."""
IN_PLAIN_LOOP = ("in order", "in order, dropped")
LAYOUTS = (("dp=2", "dp=1 microbatch=2"), ("dp=2 zero=3", "dp=2 microbatch=1"), ("dp=1", "dp=2 zero=3 microbatch=1"))


def _order_of(kind: str) -> tuple[list[list[int]], list[Any]]:
    """Return the indices of each batch of a loader, and the batches."""
    loader, seen = LOADERS[kind](), [batch.indices.tolist() for batch in samestep.batches(LOADERS[kind](), JOB)]
    return seen, [loader.collate_fn([loader.dataset[index] for index in indices]) for indices in seen]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_has_one_order(kind: str) -> None:
    source = LOADERS[kind]
    seen, batches = _order_of(kind)
    assert len(seen) == STEPS
    again = [batch.indices.tolist() for first in (0, 4) for batch in samestep.batches(source(), JOB, first_step=first)]
    assert again == [*seen, *seen[4:]]
    loader = source()
    if kind in IN_PLAIN_LOOP:
        assert seen[0] == [0, 1, 2, 3]
        plainly = [*loader, *loader][:STEPS]
        assert all(torch.equal(one[0], other[0]) for one, other in zip(batches, plainly, strict=True))


TRAINED = ("shuffled", "batch sampler", "workers", "distributed")
"""Loaders that train: with a `collate_fn`, by batches of indices, with workers, and of a rank of its own; the others differ from them
in their order alone."""


@pytest.mark.parametrize("kind", TRAINED)
def test_a_loader_has_the_losses_of_a_plain_loop(kind: str, tmp_path: Any) -> None:
    check(LAYOUTS[len(kind) % 3], kind, plain(_order_of(kind)[1]), str(tmp_path))


def test_an_epoch_of_a_loader_ends_as_the_loaders_does() -> None:
    job = JOB.model_copy(update={"train": JOB.train.model_copy(update={"steps": 12})})
    sizes = {}
    for kind in ("in order", "in order, dropped", "shuffled", "replacement", "distributed"):
        seen = [batch.indices.tolist() for batch in samestep.batches(LOADERS[kind](), job)]
        sizes[kind] = [len(batch) for batch in seen]
        if kind == "shuffled":
            assert (
                sorted(functools.reduce(operator.iadd, seen[:6], []))
                == sorted(functools.reduce(operator.iadd, seen[6:], []))
                == list(range(22))
            )
            assert seen[:6] != seen[6:]
        if kind == "distributed":
            order = torch.randperm(22, generator=torch.Generator().manual_seed(11)).tolist()
            assert functools.reduce(operator.iadd, seen[:6], []) == order
    assert sizes == {
        "in order": [4, 4, 4, 4, 4, 2] * 2,
        "in order, dropped": [4] * 12,
        "shuffled": [4, 4, 4, 4, 4, 2] * 2,
        "replacement": [4, 4, 1] * 4,
        "distributed": [4, 4, 4, 4, 4, 2] * 2,
    }


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (lambda: DataLoader(Points(), batch_size=8), r"batch_size = 8, and train.global_batch = 4 .*. Set train.global_batch = 8"),
        (
            lambda: DataLoader(Points(), 4, sampler=DistributedSampler(Points(), 2, 0)),
            r"batch_size = 4 on each of the 2 ranks of its DistributedSampler, .*. Set train.global_batch = 8",
        ),
        (lambda: DataLoader(Points(), 4, sampler=["a", "b"]), "sampler yields a str and not indices"),
        (lambda: DataLoader(Points(), 4, sampler=[], drop_last=True), "the DataLoader has no batch in an epoch"),
        (lambda: DataLoader(Flow(), batch_size=8), r"batch_size = 8, and train.global_batch = 4 samples"),
        (lambda: "points", "the dataset is a str without samples at the numbers 0, 1, .... Use a list of samples"),
        (lambda: {"x": torch.ones(8, 6)}, r"the dataset is a dict .*TensorDataset\(x, labels\)$"),
        (lambda: Points, r"the dataset is the class Points. Use a data set, such as Points\(\)"),
        (lambda: 7, "the dataset is a int without __len__ and __getitem__. Use .* an IterableDataset "),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_taken_apart_is_refused_in_one_line(source: Callable[[], Any], text: str) -> None:
    with pytest.raises(DataError, match=text) as raised:
        list(samestep.batches(source(), JOB))
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match=r"lanes = 'yes'. Use True or False"):
        samestep.batches(Points(), JOB, lanes="yes")  # type: ignore[arg-type]


def _said(rank: int, world: int) -> list[tuple[str, ...]]:
    run = prepared()
    return [run.step(batch).remarks for batch in samestep.batches(LOADERS["generator"](), JOB)][:2]


def test_what_is_taken_of_a_loader_is_said_once(capfd: Any) -> None:
    (first, second), _ = pool(2).run(_said)
    (line,) = [line for line in first if "DataLoader" in line]
    assert line.startswith("used from the DataLoader: its data set (Points), the order of its RandomSampler, ")
    assert line.endswith("the last batch of an epoch also if it is smaller")
    assert not [line for line in second if "DataLoader" in line]


class ByEpoch(Sampler[int]):
    """An order that Python's generator draws, anew in each epoch, which a loop tells it."""

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(22), 22))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


ORDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffled": (lambda: RandomSampler(Points()), "its RandomSampler (seeded by train.seed),"),
    "generator": (lambda: RandomSampler(Points(), generator=torch.Generator()), "its RandomSampler, the last"),
    "told": (ByEpoch, "draws from generators of the process), with set_epoch(0) and so on, the last"),
    "with a generator": (lambda: DrawnOnce(), "its DrawnOnce, the last"),
    "distributed": (lambda: DistributedSampler(Points(), 2, 1), "on one rank, with set_epoch(0) and so on, the last"),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_an_order_that_is_not_that_of_a_plain_loop_is_said_to_be_the_seeds(kind: str) -> None:
    sampler, words = ORDERS[kind]
    size = 2 if kind == "distributed" else 4
    assert words in loaders.parts_of(DataLoader(Points(), size, sampler=sampler()), JOB).remark


def _evaluated(rank: int, world: int, kinds: list[str]) -> list[float]:
    run = prepared()
    run.prepare(Batch(0, np.arange(1), Points()).samples([0]))
    return [run.evaluate(SOURCES[kind]())["loss"] for kind in kinds]


def test_an_evaluation_counts_each_sample_of_a_loader_or_a_stream_once() -> None:
    """Changed samples are the same each time, and in every layout."""
    model, wanted = build().double(), []
    for rows in (range(22), range(3, 16)):
        points, labels = zip(*[Points()[row] for row in rows], strict=True)
        with torch.no_grad():
            total, count = loss(model(torch.stack(points)), (None, torch.stack(labels)))
        wanted.append(float(total) / count)
    changed = ["jittered", "jittered", "jittered, workers"]
    ((alone, again, _),) = pool(1).run(_evaluated, changed)
    assert alone == again
    kinds = ["in order", "iterable", "function of batches", "subset of points"]
    for found in pool(2).run(_evaluated, [*kinds, *changed]):
        assert found == pytest.approx([wanted[0]] * 3 + [wanted[1]] + [alone] * 3, rel=1e-9)


@pytest.mark.parametrize("kind", ["jittered, read together", "jittered, workers", "masked"])
def test_samples_changed_by_generators_of_the_process_are_functions_of_seed_step_and_sample(
    kind: str, tmp_path: Any
) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    found = [batch.samples(batch.indices) for batch in samestep.batches(CHANGED[kind](), JOB)]
    again = [batch.samples(batch.indices) for batch in samestep.batches(CHANGED[kind](), JOB, first_step=2)]
    assert states() == before
    first = [batch["tokens"] if isinstance(batch, dict) else batch[0] for batch in found]
    second = [batch["tokens"] if isinstance(batch, dict) else batch[0] for batch in again]
    assert all(torch.equal(one, other) for one, other in zip(first[2:], second, strict=True))
    wanted = plain(found)
    random.random(), torch.rand(1)
    check(LAYOUTS[len(kind) % 3], kind, wanted, str(tmp_path))


def _of_stream(batch: Any) -> Any:
    return batch.values if hasattr(batch, "values") else batch.samples(batch.indices)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_has_one_order(kind: str) -> None:
    before = torch.get_rng_state(), random.getstate()
    found = [_of_stream(batch) for batch in samestep.batches(STREAMS[kind](), JOB)]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    sizes = [len(batch["labels"] if isinstance(batch, dict) else batch[1]) for batch in found]
    assert sorted(sizes, reverse=True) == ([4] * 5 if kind == "stream, dropped" else [4, 4, 4, 4, 4, 2])
    if kind == "iterable":
        assert torch.equal(torch.cat([batch[0] for batch in found]), torch.stack([Points()[i][0] for i in range(22)]))


class DrawnOnce(Sampler[int]):
    """A sampler of one's own with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(22, generator=self.generator).tolist())


def _with_generator(kind: str) -> DataLoader[Any]:
    points, drawn = Points(), torch.Generator().manual_seed(3)
    weights = torch.arange(22.0) + 1
    made: dict[str, Callable[[], DataLoader[Any]]] = {
        "shuffle": lambda: DataLoader(points, 4, shuffle=True, generator=drawn),
        "fewer": lambda: DataLoader(points, 4, sampler=RandomSampler(points, num_samples=9, generator=drawn), drop_last=True),
        "of both": lambda: DataLoader(
            points, 4, sampler=WeightedRandomSampler(weights, 20, generator=drawn), generator=drawn
        ),
        "subset": lambda: DataLoader(points, 4, sampler=SubsetRandomSampler(range(3, 20), generator=drawn)),
        "of batches": lambda: DataLoader(
            points, batch_sampler=BatchSampler(RandomSampler(points, generator=drawn), 4, True)
        ),
        "one's own": lambda: DataLoader(points, 4, sampler=DrawnOnce()),
    }  # fmt: skip
    return made[kind]()


OF_GENERATORS = "shuffle", "fewer", "of both", "subset", "of batches", "one's own"


@pytest.mark.parametrize("kind", OF_GENERATORS)
def test_a_generator_that_a_sampler_was_given_is_followed(kind: str) -> None:
    job = JOB.model_copy(update={"train": JOB.train.model_copy(update={"steps": 17})})
    loader, expected = _with_generator(kind), list[Any]()
    while len(expected) < 17:
        expected += [values for values, _ in loader]
    for first in (0, 11):
        found = [_of_stream(batch)[0] for batch in samestep.batches(_with_generator(kind), job, first_step=first)]
        assert len(found) == 17 - first
        assert all(torch.equal(ours, plain) for ours, plain in zip(found, expected[first:17], strict=True))


def test_a_generator_of_whole_batches_is_followed() -> None:
    loader = DataLoader(Whole(), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(3))
    expected = [batch["tokens"] for batch in loader]
    loader.generator.manual_seed(3)  # type: ignore[union-attr]
    found = [batch.values["tokens"] for batch in samestep.batches(loader, JOB)]
    assert all(torch.equal(ours, plain) for ours, plain in zip(found, expected, strict=True))


TRAINED_STREAMS = ("stateful", "of a library", "stream, collated", "batches, data set")
"""Streams that train: with a place, shuffled in a buffer that its state lacks, through a loader, and of whole batches as a data set."""


@pytest.mark.parametrize("kind", TRAINED_STREAMS)
def test_a_stream_has_the_losses_of_a_plain_loop(kind: str, tmp_path: Any) -> None:
    found = [_of_stream(batch) for batch in samestep.batches(STREAMS[kind](), JOB)]
    check(LAYOUTS[len(kind) % 3], kind, plain(found), str(tmp_path))


def test_a_stream_that_knows_its_place_is_not_read_from_its_beginning(tmp_path: Any) -> None:
    ((losses, _, _),) = pool(1).run(train, "dp=1", "stateful", str(tmp_path), 0, 3)
    ((more, _, _),) = pool(1).run(train, "dp=1", "stateful", str(tmp_path), 3, STEPS)
    assert pool(1).run(_read_after_a_load, str(tmp_path / "other"), str(tmp_path)) == [0]
    found = [_of_stream(batch) for batch in samestep.batches(Stateful(), JOB)]
    assert losses + more == pytest.approx(plain(found)[0], rel=1e-9)


def _read_after_a_load(rank: int, world: int, other: str, folder: str) -> int:
    """Return how many samples more than those of the steps a resumed loop reads."""
    train(rank, world, "dp=1", "stateful", other, 0, 3)
    run, stream = prepared(), Stateful()
    run.load(other)
    for batch in samestep.batches(stream, JOB, first_step=run.steps_taken):
        run.step(batch)
    return stream.read - (22 - 12)


def test_the_next_loop_over_a_stream_begins_it_anew() -> None:
    job = JOB.model_copy(update={"train": JOB.train.model_copy(update={"steps": 100})})
    steps = samestep.batches(Flow(10), job)
    passes = [[(batch.step, len(batch.indices)) for batch in steps] for _ in range(2)]
    assert passes == [[(0, 4), (1, 4), (2, 2)], [(3, 4), (4, 4), (5, 2)]]
    later = samestep.batches(Flow(10), job, first_step=4)
    assert [(batch.step, len(batch.indices)) for batch in later] == [(4, 4), (5, 2)]
    once = samestep.batches(points_one_by_one(), job, first_step=2)
    assert [batch.step for batch in once] == [2, 3, 4, 5]
    assert [*once] == []
    assert once.remarks[0].endswith("are read and left out; give it a fresh stream")


class Divided(Flow):
    """A stream that is divided among the ranks already."""

    def __iter__(self) -> Iterator[Any]:
        yield from [*super().__iter__()][torch.distributed.get_rank() :: 2]


@telling
def _divided(rank: int, world: int, kind: str) -> None:
    run = prepared()
    source = Divided() if kind == "samples" else DataLoader(Divided(), batch_size=4)
    for batch in samestep.batches(source, JOB):
        run.step(batch)


@pytest.mark.parametrize("kind", ["samples", "loader"])
def test_a_stream_that_ranks_read_differently_is_refused(kind: str) -> None:
    first, second = pool(2).run(_divided, kind)
    assert first == second
    assert "another one on rank 1 than on rank 0. Use a stream that is the same on every rank" in first


def _of_unequal_lengths(rank: int, world: int, kind: str, counts: list[int], layout: str) -> tuple[str, int]:
    run = samestep.parallelize(build, loss, optimizer, layout=layout, job=JOB)
    flow = Flow(counts[rank])
    source = flow if kind == "samples" else (batch for batch in DataLoader([*flow], batch_size=4))
    steps = 0
    try:
        for batch in samestep.batches(source, JOB):
            if layout == "tp=2":
                run.evaluate(batch)
                run.backward(batch)
                run.backward(batch)
                run.update()
            else:
                run.step(batch)
            steps += 1
    except DataError as error:
        return str(error), steps
    return "", steps


@pytest.mark.parametrize(
    ("layout", "counts"), [("dp=2", (8, 12)), ("tp=2", (12, 8)), ("dp=2", (12, 10)), ("tp=2", (8, 8))]
)
def test_a_stream_that_is_shorter_on_one_rank_is_named_on_all_at_once(layout: str, counts: tuple[int, int]) -> None:
    (first, taken), (second, also) = pool(2).run(_of_unequal_lengths, "samples", counts, layout)
    assert (first, taken) == (second, also)
    assert taken == 2
    said = [f"{count - 8} sample{'s' * (count != 9)}" if count > 8 else "nothing more" for count in counts]
    assert first.startswith(
        f"for step 3 a stream has {said[0]} on rank 0 and {said[1]} on rank 1. Use " if counts != (8, 8) else ""
    )
    assert bool(first) == (counts != (8, 8))


def test_batches_of_a_stream_that_are_fewer_on_one_rank_are_named_too() -> None:
    found = pool(2).run(_of_unequal_lengths, "batches", (8, 16), "dp=2")
    assert {taken for _, taken in found} == {2}
    assert all(
        text.startswith("for step 3 a stream has nothing more on rank 0 and 4 samples on rank 1. Use ")
        for text, _ in found
    )


def test_a_generator_that_has_begun_cannot_be_resumed() -> None:
    begun = points_one_by_one()
    next(begun)
    with pytest.raises(
        DataError, match=r"the generator has begun, and first_step = 2 .*Use .* the function that makes it"
    ):
        samestep.batches(begun, JOB, first_step=2)
