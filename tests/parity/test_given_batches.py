"""Batches that a loop hands over itself, as values on every rank, on rank 0 alone or each rank's own, train as in a plain loop."""

from __future__ import annotations

import functools
import re
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.datasets.values import tensors_of_arrays
from samestep.errors import LayoutError, UnprovenError
from samestep.job import Job
from samestep.layout import Layout
from tests.parity.code_features import Encoding
from tests.plain import Trained, assert_trained, train_in_layout, train_plainly
from tests.pool import pool, telling

STEPS = 3
JOB = Job(
    train={"global_batch": 8, "steps": STEPS, "watch_every": 2},
    run={"device": "cpu"},
    numerics={"precision": "float64"},
    optimizer={"clip_norm": 1.0},
)


class Blocks(nn.Module):
    """Two blocks over points [N, 6], with a batch norm where a test asks for one."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Any) -> Tensor:
        x = getattr(x, "inputs", x)
        x = torch.stack([one["points"] for one in x]) if isinstance(x, list | tuple) else x
        x = x["points"] if isinstance(x, dict) else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return Blocks(norm)


def points(step: int, count: int = 8) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(100 + step)
    return torch.randn(count, 6, generator=drawn, dtype=torch.float64), torch.randint(3, (count,), generator=drawn)


def _loss(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, labels, reduction="sum"), len(labels)


@dataclass
class Record:
    """A batch whose parts are attributes."""

    inputs: Any
    labels: Any
    unit: int = 2


@dataclass(frozen=True, slots=True)
class FixedRecord:
    """The same, which cannot be written."""

    inputs: Any
    labels: Any


Named = namedtuple("Named", "x labels")


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any, Any], Any]]] = {
    "tuple": (lambda x, y: (x, y), lambda out, batch: _loss(out, batch[1])),
    "list": (lambda x, y: [x, y], lambda out, batch: _loss(out, batch[1])),
    "dict": (lambda x, y: {"x": x, "labels": y, "unit": 2, "name": "points"}, lambda out, batch: _loss(out, batch["labels"])),
    "nested": (
        lambda x, y: {"x": {"points": x}, "labels": (y, torch.tensor(1.0))},
        lambda out, batch: _loss(out, batch["labels"][0]),
    ),
    "listed": (
        lambda x, y: [{"points": one, "label": other} for one, other in zip(x, y, strict=True)],
        lambda out, batch: _loss(out, torch.stack([one["label"] for one in batch])),
    ),
    "arrays": (lambda x, y: {"x": x.numpy(), "labels": y.numpy()}, lambda out, batch: _loss(out, batch["labels"])),
    "targets": (
        lambda x, y: {"x": x, "labels": [{"label": one} for one in y]},
        lambda out, batch: _loss(out, torch.stack([one["label"] for one in batch["labels"]])),
    ),
    "zipped": (
        lambda x, y: tuple(zip(*[({"points": one}, {"label": other}) for one, other in zip(x, y, strict=True)], strict=True)),
        lambda out, batch: _loss(out, torch.stack([one["label"] for one in batch[1]])),
    ),
    "zipped numbers": (
        lambda x, y: [*zip(*[({"points": one}, int(other)) for one, other in zip(x, y, strict=True)], strict=True)],
        lambda out, batch: _loss(out, torch.tensor(batch[1])),
    ),

    "fixed record": (FixedRecord, lambda out, batch: _loss(out, batch.labels)),
    "nested record": (
        lambda x, y: Record({"points": x}, (FixedRecord(None, y), "name")),
        lambda out, batch: _loss(out, batch.labels[0].labels),
    ),

    "records in an encoding": (
        lambda x, y: Encoding(x=Record(x, None), labels=y), lambda out, batch: _loss(out, batch.labels),
    ),
    "named": (Named, lambda out, batch: _loss(out, batch.labels)),
}  # fmt: skip
"""What a batch is made of, and its loss; `code_array.py` has records and encodings."""


@functools.cache
def plain(form: str, sizes: tuple[int, ...], norm: bool = False) -> Trained:
    make, loss = FORMS[form]
    model = build(norm).double()

    def of_values(values: tuple[Tensor, Tensor]) -> Any:
        given = tensors_of_arrays(make(*values))
        is_whole = form == "listed" or hasattr(given, "inputs")
        inputs = given if is_whole else given["x"] if isinstance(given, dict | UserDict) else given[0]
        return loss(model(inputs), given)

    return train_plainly(model, map(points, range(STEPS), sizes), of_values, momentum(model.parameters()), 1.0)


momentum = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def given_to(rank: int, world: int, how: str, make: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, dict[str, bool]]:
    """Return what a rank's loop hands over, and how."""
    x, y = batch
    if how == "rank 0":
        return (make(x, y) if rank == 0 else None), {}
    if how == "own" and world > 1:
        cut = len(x) // 3 if len(x) != 5 else 0  # shares of different sizes, and one that is empty
        mine = slice(None, cut) if rank == 0 else slice(cut, None)
        return make(x[mine], y[mine]), {"local": True}
    return make(x, y), {"local": True} if how == "own" else {}


def trained(
    rank: int, world: int, layout: str, form: str, how: str, sizes: tuple[int, ...], norm: bool
) -> tuple[list[float], dict[str, Tensor], float, Any]:
    make, loss = FORMS[form]
    run, losses = samestep.parallelize(lambda: build(norm), loss, momentum, layout=layout, job=JOB), []
    for step in range(STEPS):
        given, keywords = given_to(rank, world, how, make, points(step, sizes[step]))
        losses.append(run.step(given, **keywords).loss)
    given, keywords = given_to(rank, world, how, make, points(77, 6))
    loss_of, outputs = run.evaluate(given, **keywords)["loss"], run.predict(given, **keywords)
    return losses, run.state_dict(on_every_rank=True), loss_of, outputs


CASES = [
    ("dp=1 microbatch=3", "nested", "own", (8, 5, 9), False),
    ("dp=2 microbatch=2", "arrays", "rank 0", (8, 5, 8), False),
    ("dp=2 microbatch=2", "list", "own", (8, 5, 12), False),
    ("dp=2 microbatch=1", "listed", "own", (8, 5, 2), False),
    ("dp=2 zero=3", "targets", "all", (8, 3, 8), False),
    ("pp=2 microbatch=4", "zipped", "all", (8, 6, 8), False),
    ("dp=2 zero=3", "zipped numbers", "rank 0", (8, 8, 5), False),
    ("dp=2 zero=3 microbatch=1", "dict", "own", (8, 7, 9), False),
    ("dp=2", "dict", "own", (8, 6, 5), True),
    ("dp=2 zero=3", "fixed record", "all", (8, 8, 6), False),
    ("dp=2 microbatch=2", "nested record", "all", (8, 8, 6), False),
    ("pp=2 microbatch=4", "records in an encoding", "all", (8, 8, 6), False),
    ("dp=2 microbatch=2", "named", "all", (8, 8, 6), False),
]


@pytest.mark.parametrize(("layout", "form", "how", "sizes", "norm"), CASES, ids=lambda one: str(one))
def test_values_of_a_batch_train_as_in_a_plain_loop(
    layout: str, form: str, how: str, sizes: tuple[int, ...], norm: bool
) -> None:
    expected = plain(form, sizes, norm)
    ranks = pool(Layout(layout).world_size).run(trained, layout, form, how, sizes, norm)
    assert_trained(ranks, expected, 1e-8, 1e-9)
    model = build(norm).double()
    model.load_state_dict(expected[1])
    x, y = points(77, 6)
    with torch.no_grad():
        wanted_outputs = model.eval()(x)
    for *_, loss, outputs in ranks:
        assert loss == pytest.approx(float(_loss(wanted_outputs, y)[0]) / 6, rel=1e-8)
        torch.testing.assert_close(outputs, wanted_outputs, rtol=1e-7, atol=1e-8)


def _of_lists(rank: int, world: int, layout: str, form: str) -> list[float]:
    """Evaluate a list of samples before and after a step, on every rank and on rank 0 alone, and lists of whole batches."""
    make, loss = FORMS[form]
    run = samestep.parallelize(build, loss, lambda params: torch.optim.SGD(params, lr=0.0), layout=layout, job=JOB)
    x, y = points(77, 7)
    listed = form == "list"  # whose samples are pairs
    samples = [make(*(one.squeeze(0) for one in pair)) for pair in zip(x.split(1), y.split(1), strict=True)]
    samples = [tuple(one) if listed else one for one in samples]
    whole = [make(x[:3], y[:3]), make(x[3:], y[3:])]
    found = [run.evaluate(samples)["loss"]]
    run.step(make(*points(0)))
    given = (samples, samples if rank == 0 else None, whole, make(x, y))
    found += [run.evaluate(one)["loss"] for one in given]
    assert torch.equal(run.predict(samples), run.predict(whole))
    return found


@pytest.mark.parametrize(
    ("layout", "form"), [("dp=1", "tuple"), ("dp=2", "arrays"), ("dp=2", "list"), ("pp=2 microbatch=4", "tuple")]
)
def test_a_list_of_samples_is_a_data_set_to_evaluate_and_one_of_batches_too(layout: str, form: str) -> None:
    x, y = points(77, 7)
    with torch.no_grad():
        total, count = _loss(build().double()(x), y)
    for found in pool(Layout(layout).world_size).run(_of_lists, layout, form):
        assert found == pytest.approx([float(total) / count] * 5, rel=1e-9)


class Boxes(Blocks):
    """As many rows for each image as it has points, in a list of one tensor for each."""

    def forward(self, x: Any) -> Any:
        return [super(Boxes, self).forward(one["points"]) for one in x]


def _predicted(rank: int, world: int, layout: str) -> Any:
    def boxes_loss(outputs: Any, batch: Any) -> tuple[Tensor, int]:
        return sum(one.square().sum() for one in outputs), len(batch)  # type: ignore[return-value]

    torch.manual_seed(3)
    run = samestep.parallelize(
        Boxes(), boxes_loss, lambda params: torch.optim.SGD(params, lr=0.1), layout=layout, job=JOB
    )
    run.step([{"points": points(number, 1 + number % 3)[0]} for number in range(8)])
    return run.predict([{"points": points(number, 1 + number % 3)[0]} for number in range(5)])


def test_outputs_in_a_list_of_one_for_each_sample_are_those_of_all_samples() -> None:
    ((alone),) = pool(1).run(_predicted, "dp=1 microbatch=8")
    assert [len(one) for one in alone] == [1, 2, 3, 1, 2]
    for layout in ("dp=2", "dp=2 microbatch=1"):
        for found in pool(2).run(_predicted, layout):
            assert len(found) == 5
            for one, other in zip(found, alone, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@telling
def _late(rank: int, world: int) -> None:
    """Give ranks other values in the first step of a run that a prediction has prepared."""
    make, loss = FORMS["tuple"]
    run = samestep.parallelize(build, loss, sgd, layout="dp=2", job=JOB)
    run.steps_taken = 3
    run.predict(make(*points(77, 6)))
    run.step(make(*points(rank, 8)))


def test_the_first_values_of_a_step_are_compared_whatever_came_before() -> None:
    for text in pool(2).run(_late):
        assert text.startswith("run.step was given other values on rank 1 than on rank 0")


@telling
def _refused(rank: int, world: int, layout: str, kind: str) -> None:
    make, loss = FORMS["tuple"]
    run = samestep.parallelize(build, loss, sgd, layout=layout, job=JOB)
    batch: Any = make(*points(rank if kind in ("other", "own") else 0))
    keywords = {"local": kind == "own"}
    if kind == "none":
        batch = None
    if kind == "on rank 1":
        batch = batch if rank else None
    if kind == "object":
        batch = (object(), *batch) if rank == 0 else None
    if kind == "no samples":
        batch = {"x": 3.0}
    run.step(batch, **keywords)


@pytest.mark.parametrize(
    ("layout", "kind", "text"),
    [
        ("dp=2", "other", r"run.step was given other values on rank 1 than on rank 0. Use .*local=True\) takes each rank's own samples"),
        ("dp=2", "on rank 1", r"run.step was given None on rank 0. Use values on rank 0"),
        ("dp=2", "none", r"run.step was given None on rank 0"),
        ("dp=2", "object", r"without a number of samples"),
        ("dp=2", "no samples", r"without a number of samples. Use tensors"),
        ("tp=2", "own", r"other samples on rank 1 than on rank 0, and both compute the same data rank's part"),
    ],
)  # fmt: skip
def test_values_that_are_no_one_batch_are_refused_on_every_rank(layout: str, kind: str, text: str) -> None:
    first, second = pool(2).run(_refused, layout, kind)
    assert first == second
    assert "\n" not in first
    assert re.search(text, first), first


# -- micro-batches whose tensors are not one row for each sample -----------------------------------


class Graph:
    """Several graphs as one, as libraries of graphs put them together: nodes, edges, and the graph of each node."""

    def __init__(self, x: Tensor, edges: Tensor, graph: Tensor, y: Tensor) -> None:
        self.x, self.edges, self.graph, self.y = x, edges, graph, y


class Graphs:
    """Rings of three to six nodes."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        nodes = 3 + index % 4
        x = torch.randn(nodes, 6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return x, torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)]), torch.tensor(index % 3)


def as_graph(samples: list[Any]) -> Graph:
    sizes = [len(x) for x, _, _ in samples]
    edges = [edges + sum(sizes[:place]) for place, (_, edges, _) in enumerate(samples)]
    graph = torch.arange(len(samples)).repeat_interleave(torch.tensor(sizes))
    return Graph(
        torch.cat([x for x, _, _ in samples]), torch.cat(edges, 1), graph, torch.stack([y for *_, y in samples])
    )


def as_dict(samples: list[Any]) -> dict[str, Tensor]:
    made = as_graph(samples)
    return {"x": made.x, "edges": made.edges, "graph": made.graph, "labels": made.y}


def as_lists(samples: list[Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    return [x for x, _, _ in samples], [{"boxes": x[:, :4], "label": y} for x, _, y in samples]


class OfGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def pooled(self, x: Tensor, edges: Tensor, graph: Tensor, count: int) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden = hidden + torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
        return self.head(hidden.new_zeros(count, 8).index_add(0, graph, hidden))

    def forward(self, data: Graph) -> Tensor:
        return self.pooled(data.x, data.edges, data.graph, len(data.y))


class OfDicts(OfGraphs):
    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:  # type: ignore[override]
        return self.pooled(x, edges, graph, int(graph.max()) + 1)


class OfLists(OfGraphs):
    def forward(self, images: list[Tensor]) -> Tensor:  # type: ignore[override]
        return torch.stack([self.head(torch.relu(self.first(image)).mean(0)) for image in images])


RAGGED: dict[str, tuple[type[nn.Module], Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "objects": (OfGraphs, as_graph, lambda batch: batch.y),
    "graphs in a dict": (OfDicts, as_dict, lambda batch: batch["labels"]),
    "lists of dicts": (OfLists, as_lists, lambda batch: torch.stack([one["label"] for one in batch[1]])),
}


class NormedNodes(OfGraphs):
    """Divides by a statistic of the nodes of all graphs."""

    def forward(self, data: Graph) -> Tensor:
        return self.pooled(data.x / data.x.std(0), data.edges, data.graph, len(data.y))


class AnsweredNodes(NormedNodes):
    """Has an output for each node besides."""

    def forward(self, data: Graph) -> Any:
        hidden = self.first(data.x - data.x.mean(0))
        return hidden.new_zeros(len(data.y), 8).index_add(0, data.graph, hidden)[:, :3], hidden


class NormedLists(OfLists):
    def forward(self, images: list[Tensor]) -> Tensor:
        size = torch.cat(images).std(0)
        return super().forward([image / size for image in images])


MIXED: dict[str, tuple[type[nn.Module], Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "nodes": (NormedNodes, as_graph, lambda batch: batch.y),
    "answers of nodes": (AnsweredNodes, as_graph, lambda batch: batch.y),
    "items of a list": (NormedLists, as_lists, lambda batch: torch.stack([one["label"] for one in batch[1]])),
}
"""Models in which the samples of what a `collate_fn` makes influence each other."""


def _ragged_loss(kind: str) -> Callable[[Any, Any], tuple[Tensor, int]]:
    return lambda outputs, batch: _loss(
        outputs[0] if isinstance(outputs, tuple) else outputs, (RAGGED | MIXED)[kind][2](batch)
    )


def ragged_model(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return (RAGGED | MIXED)[kind][0]()


def trained_on_ragged(rank: int, world: int, layout: str, kind: str) -> Trained:
    loader = torch.utils.data.DataLoader(Graphs(), batch_size=8, collate_fn=(RAGGED | MIXED)[kind][1])
    make = functools.partial(
        samestep.parallelize, lambda: ragged_model(kind), _ragged_loss(kind), sgd, layout=layout, job=JOB
    )
    return train_in_layout(make, lambda _: samestep.batches(loader, JOB))


sgd = functools.partial(torch.optim.SGD, lr=0.3)


@pytest.mark.parametrize("layout", ["dp=1 microbatch=3", "dp=2", "dp=2 zero=3 microbatch=2"])
@pytest.mark.parametrize("kind", RAGGED)
def test_what_a_collate_fn_makes_of_any_kind_trains_as_in_a_plain_loop(kind: str, layout: str) -> None:
    model, loss = ragged_model(kind).double(), _ragged_loss(kind)

    def of_step(step: int) -> Any:
        batch = RAGGED[kind][1]([Graphs()[(8 * step + place) % 24] for place in range(8)])
        inputs = {"objects": (batch,), "lists of dicts": (batch[0],) if kind == "lists of dicts" else ()}.get(kind)
        return loss(model(*inputs) if inputs else model(batch["x"], batch["edges"], batch["graph"]), batch)

    expected = train_plainly(model, range(STEPS), of_step, sgd(model.parameters()), 1.0)
    assert_trained(pool(Layout(layout).world_size).run(trained_on_ragged, layout, kind), expected)


def _said_of_mixed(rank: int, world: int, layout: str, kind: str) -> str:
    with pytest.raises((UnprovenError, LayoutError)) as refused:
        trained_on_ragged(rank, world, layout, kind)
    return str(refused.value)


@pytest.mark.parametrize("layout", ["dp=1 microbatch=4", "dp=2 zero=3 microbatch=1"])
@pytest.mark.parametrize("kind", MIXED)
def test_samples_that_influence_each_other_in_what_a_collate_fn_makes_are_named(kind: str, layout: str) -> None:
    said = pool(Layout(layout).world_size).run(_said_of_mixed, layout, kind)
    assert len({*said}) == 1
    assert re.search("samples of a batch influence each other by (std|mean)|so samples influence each other", said[0])


def test_one_rank_with_the_whole_batch_trains_samples_that_influence_each_other() -> None:
    assert len(trained_on_ragged(0, 1, "dp=1", "items of a list")[0]) == STEPS


# -- float64 of a batch ----------------------------------------------------------------------------


class Clock(nn.Module):
    """Seconds of a day in November 2026, whose differences are computed in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("start", torch.tensor(1.764e9, dtype=torch.float64))

    def forward(self, time: Tensor) -> Tensor:
        return self.scale * ((time - self.start) / 60).float()


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, place: Tensor) -> Tensor:
        return self.head((place - place.new_tensor([500_000.0, 5_400_000.0])).float()).squeeze(-1)


class Half(nn.Module):
    """Torch multiplies no float64 by a weight of float32, so these are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(rows).squeeze(-1)


_DRAWN = torch.rand(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DOUBLES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "times": (Clock, {"time": 1.764e9 + _DRAWN[:, 0] * 60}),
    "places": (Places, {"place": torch.tensor([500_000.0, 5_400_000.0], dtype=torch.float64) + _DRAWN}),
    "values that fit": (Half, {"rows": _DRAWN.float().double()}),
    "values that torch refuses": (Half, {"rows": _DRAWN}),
}


def _squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (outputs - batch.get("label", 0.0)).square().sum(), len(outputs)


@pytest.mark.parametrize("name", DOUBLES)
def test_float64_of_a_batch_loses_nothing(name: str) -> None:
    """In what the model predicts, and in the losses of values and of a data set."""
    build, batch = DOUBLES[name]
    job = Job(train={"global_batch": 8})
    given = batch | {"label": 1e-9 + _DRAWN[:, 1]}
    rows = [{key: value[row] for key, value in given.items()} for row in range(8)]
    for source in (given, next(iter(samestep.batches(rows, job)))):
        torch.manual_seed(0)
        model = build()
        values = [part.float() if isinstance(model, Half) else part for part in batch.values()]
        outputs = model(*values).detach()
        expected = _squares(outputs, given)[0].item() / 8
        run = samestep.parallelize(model, _squares, torch.optim.SGD, layout="", job=job)
        run.prepare(given)
        assert torch.equal(run.outputs(given), outputs)
        assert run.step(source).loss == pytest.approx(expected, rel=1e-6)
