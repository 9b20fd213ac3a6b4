"""Parts of a model that the samples of one rank use and those of another do not, where weights are gathered (zero=2 and 3).

A vision tower with text-only samples, a branch by the data, a head of some tasks: every layout gives what one device gives, in
float64 to 1e-9, and sends what its program lists, whichever rank passes which part over. What cannot keep the program's
order is refused by name, on all ranks.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.run import Run
from tests.laboratory import TOLERANCE, Observed, assert_ledger, assert_same, follow, job_of, perturbed, traced_run
from tests.models import OwnExperts
from tests.parts import Residual
from tests.pool import pool

WIDTH = 6
ALL = 15


class Kinds:
    """Samples of a few features, each with the parts of the model that it uses, as bits."""

    def __init__(self, *kinds: int) -> None:
        made = torch.Generator().manual_seed(5)
        self.x = torch.randn(24, WIDTH, generator=made, dtype=torch.float64)
        self.kinds = kinds

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        kind = torch.tensor(self.kinds[index % len(self.kinds)])
        return {"x": self.x[index].float(), "kind": kind, "labels": (self.x[index].sum() > 0).long()}


Part = functools.partial(Residual, WIDTH, 2 * WIDTH, norm=True, bias=False)


class Parts(nn.Module):
    """A first layer, some parts, a head; subclasses say who uses what."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Part() for _ in range(count))
        self.head = nn.Linear(WIDTH, 2)

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.head(self.between(self.first(x), kind))


def uses(kind: Tensor, index: int) -> Tensor:
    return (kind >> index) & 1


class Gated(Parts):
    """Each part is called where a sample of the micro-batch uses it."""

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        for index, part in enumerate(self.parts):
            mine = uses(kind, index)
            if mine.any():
                x = torch.where(mine[:, None] > 0, part(x), x)
        return x


class Tower(Parts):
    """A tower in front of the first layer, whose input then takes a gradient; or else it takes none."""

    def __init__(self) -> None:
        super().__init__(2)
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        mine = uses(kind, 0)
        if mine.any():
            x = x + self.tower(x) * mine[:, None]
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


class Heads(Gated):
    """A head for each kind, the last thing that runs."""

    def __init__(self) -> None:
        super().__init__(2)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.between(self.first(x), kind)
        y = self.head(x)
        for index, head in enumerate(self.heads):
            mine = uses(kind, index)
            if mine.any():
                y = y + head(x) * mine[:, None]
        return y


class Watched(Parts):
    """A part whose result only some samples take over, and another that learns from some samples alone."""

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        seen = self.parts[0](x)
        if uses(kind, 0).any():
            x = torch.where(uses(kind, 0)[:, None] > 0, seen, x)
        with torch.set_grad_enabled(bool(uses(kind, 1).any())):
            added = self.parts[1](x)
        x = x + torch.where(uses(kind, 1)[:, None] > 0, added, added.detach())
        return self.parts[3](self.parts[2](x))


class Nested(Parts):
    """Parts within a part, and a part that two callers share."""

    def __init__(self) -> None:
        super().__init__(2)
        self.around = nn.ModuleDict({"inner": Gated(3), "outer": Part()})
        self.parts[1].up.weight = self.parts[0].up.weight

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        if uses(kind, 3).any():
            y = self.around["outer"](self.around["inner"].between(x, kind))
            x = torch.where(uses(kind, 3)[:, None] > 0, y, x)
        for index, part in enumerate(self.parts):
            if uses(kind, index).any():
                x = torch.where(uses(kind, index)[:, None] > 0, part(x), x)
        return x


class Swapped(Parts):
    """Two parts whose order depends on the kind of a sample."""

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        x, y = self.parts[0](x), x
        for order, mine in (((1, 2), uses(kind, 0) > 0), ((2, 1), uses(kind, 0) == 0)):
            if mine.any():
                y = torch.where(mine[:, None], self.parts[order[1]](self.parts[order[0]](x)), y)
        return self.parts[3](y)


class Deeper(Parts):
    """A part that some samples run through once more, behind another."""

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        x, again = self.parts[1](self.parts[0](x)), uses(kind, 0) == 0
        if again.any():
            x = torch.where(again[:, None], self.parts[0](x), x)
        return self.parts[3](self.parts[2](x))


class Wandering(Parts):
    """Parts that each sample runs through in an order of its own, some of them several times."""

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        for turn in range(5):
            chosen = (kind * (turn + 1) + turn * turn) % len(self.parts)
            for index, part in enumerate(self.parts):
                if (chosen == index).any():
                    x = torch.where((chosen == index)[:, None], part(x), x)
        return x


class Halting(Parts):
    """A group of parts that samples run through as often as they say."""

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        for turn in range(int(kind.max()) + 1):
            x = torch.where((kind >= turn)[:, None], self.parts[1](self.parts[0](x)), x)
        return self.parts[3](self.parts[2](x))


class Aside(Parts):
    """Parts that every sample runs through, of which the loss of some needs no result."""

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        for index, part in enumerate(self.parts):
            mine, y = uses(kind, index), part(x)
            if mine.any():
                x = torch.where(mine[:, None] > 0, y, x)
        return x


class NormedAside(Aside):
    """Batch norm in two parts."""

    def __init__(self) -> None:
        super().__init__(3)
        self.parts[0].norm, self.parts[1].norm = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)


class NormedStill(Aside):
    """Batch norm in a part that learns from some samples alone."""

    def __init__(self) -> None:
        super().__init__(2)
        self.parts[1].norm = nn.BatchNorm1d(WIDTH)

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.parts[0](x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(uses(kind, 1).any())):
            added = self.parts[1](x)
        return x + added


class Normed(Gated):
    """Batch norm in a part, and in a head that every sample uses."""

    def __init__(self) -> None:
        super().__init__(3)
        self.parts[1].norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.BatchNorm1d(WIDTH, affine=False)

    def between(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.last(super().between(x, kind))


class Dealt(Gated):
    """Experts in two parts."""

    expert_plan: ClassVar[list[str]] = ["parts.*.experts"]

    def __init__(self) -> None:
        super().__init__(3)
        for index in (0, 1):
            self.parts[index] = Dealing()


class DealtAside(Aside):
    """Experts in two parts."""

    expert_plan: ClassVar[list[str]] = ["parts.*.experts"]

    def __init__(self) -> None:
        super().__init__(3)
        for index in (0, 1):
            self.parts[index] = Dealing()


class Dealing(nn.Module):
    """A block of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.experts = OwnExperts(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return x + self.experts(rows, chosen, weights)


MODELS: dict[str, Callable[[], nn.Module]] = {
    one.__name__: one
    for one in (
        Gated,
        Tower,
        Heads,
        Watched,
        Nested,
        Swapped,
        Deeper,
        Wandering,
        Halting,
        Normed,
        Dealt,
        NormedAside,
        DealtAside,
        NormedStill,
    )
}  # type: ignore[attr-defined]
Case = tuple[str, tuple[int, ...]]
"""A model, and the parts that its samples use, which repeat."""
CASES: dict[str, Case] = {
    "middle": ("Gated", (15, 11, 13, 9, 15, 9, 11, 13)),
    "first and last": ("Gated", (15, 14, 7, 6, 7, 14, 6, 15)),
    "in a row": ("Gated", (15, 1, 8, 15, 9, 1, 8, 1)),
    "all": ("Gated", (15, 0, 0, 15, 15, 0, 15, 0)),
    "either": ("Gated", (15, 5, 10, 5, 10, 5, 10, 5)),
    "unseen in the trace": ("Gated", (4, 15, 0, 11, 2, 9, 6, 15)),
    "tower": ("Tower", (1, 0, 0, 1, 1, 0, 0, 1)),
    "tower unseen": ("Tower", (0, 1, 1, 0, 0, 1, 1, 1)),
    "heads": ("Heads", (15, 1, 2, 3, 1, 2, 0, 3)),
    "no gradient": ("Watched", (3, 0, 1, 2, 3, 2, 1, 0)),
    "nested": ("Nested", (15, 7, 8, 1, 9, 10, 0, 15)),
}


DAILY = {"middle": 0, "first and last": 1, "unseen in the trace": 5, "tower": 4, "no gradient": 3, "nested": 4}
"""Cases that run by default, with the number of their layout."""


def dataset_of(case: Case) -> Kinds:
    return Kinds(*case[1])


def job_for(**tables: Any) -> Job:
    return job_of("float64", 3, train={"loss": "cross_entropy", "watch_every": 0}, run={"timeout_s": 20.0}, **tables)


def run_of(rank: int, world: int, case: Case, layout: str) -> Run:
    model, _ = case
    job, data = job_for(), dataset_of(case)
    source = Source(perturbed(MODELS[model]), loss_of(job), optimizer_of(job), model)
    first = next(batches(data, job)).samples([0])["kind"]
    return traced_run(f"one-sided {model} of {first.tolist()}", source, data, layout, job, rank, world)


def observe(rank: int, world: int, case: Case, layouts: list[str]) -> list[Observed]:
    found = []
    for layout in layouts:
        run = run_of(rank, world, case, layout)
        seen = follow(run, dataset_of(case), job_for(), record=True)
        held_out = next(batches(dataset_of(case), job_for()))
        seen.losses.append(run.evaluate(held_out)["loss"])
        found.append(seen)
    return found


@functools.cache
def alone(case: Case) -> Observed:
    return observe(0, 1, case, ["dp=1"])[0]


LAYOUTS = [
    "dp=2 zero=3 microbatch=1",
    "dp=2 zero=2 microbatch=1",
    "dp=2 zero=3 microbatch=1 recompute=full",
    "dp=2 zero=3 microbatch=2 accumulate=full",
    "dp=2 zero=2 microbatch=1 accumulate=sharded recompute=selective",
    "dp=2 zero=3 microbatch=3",
]


def prove(case: Case, layouts: list[str]) -> None:
    expected = alone(case)  # whose trace the ranks inherit
    ranks = pool(Layout(layouts[0]).world_size).run(observe, case, layouts)
    for index, layout in enumerate(layouts):
        seen = [rank[index] for rank in ranks]
        assert_same(seen, expected, TOLERANCE)
        assert_ledger(seen, layout)


def _cases_with_layouts() -> Iterator[Any]:
    """Some cases with one layout each; the others nightly."""
    for index, name in enumerate(CASES):
        turn = DAILY.get(name, index % len(LAYOUTS))
        yield pytest.param(name, LAYOUTS[turn : turn + 1], id=name, marks=() if name in DAILY else pytest.mark.nightly)
        others = [*LAYOUTS[:turn], *LAYOUTS[turn + 1 :]]
        yield pytest.param(name, others, id=f"{name}-others", marks=pytest.mark.nightly)


@pytest.fixture(scope="module", autouse=True)
def _traced(request: pytest.FixtureRequest) -> None:
    """Trace what the rows name that run, before the first pool of ranks is forked, which inherits it."""
    rows = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    for case in {case: None for row in rows if (case := _case_of(**row)) is not None}:
        run_of(0, 1, case, "dp=1")


def _case_of(name: str = "", model: str = "", text: str = "", **_: Any) -> Case | None:
    if text:
        return model, (15,)
    if not model:
        return CASES.get(name)
    return model, ASIDE[name] if name else ORDERS[model]


@pytest.mark.parametrize(("name", "layouts"), list(_cases_with_layouts()))
def test_a_part_may_be_passed_over_on_any_rank(name: str, layouts: list[str]) -> None:
    prove(CASES[name], layouts)


@pytest.mark.parametrize(
    "name", ["nested", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("either", "tower", "no gradient"))]
)
def test_a_part_may_be_passed_over_in_hybrid_shards(name: str) -> None:
    prove(CASES[name], ["dp_replicate=2 dp_shard=2 zero=3 microbatch=1"])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_any_parts_may_be_passed_over(seed: int) -> None:
    draw = random.Random(seed)
    model = draw.choice(["Gated", "Tower", "Heads", "Watched", "Nested"])
    case = model, (ALL, *(draw.randrange(16) for _ in range(7)))  # the trace sees the blocks, as recompute demands
    prove(case, draw.sample(LAYOUTS, 2))


ORDERS = {
    "Swapped": (1, 0, 0, 1, 1, 1, 0, 0),
    "Deeper": (1, 0, 0, 1, 1, 1, 0, 0),
    "Wandering": (1, 5, 2, 11, 4, 9, 0, 7),
    "Halting": (0, 1, 0, 3, 0, 0, 2, 1),
}
"""Samples of models that call parts in another order, or once more, which the first sample does not show."""


def _orders_with_layouts() -> Iterator[Any]:
    """Each model with one layout in turn; with the others, and in hybrid shards, nightly."""
    for turn, model in enumerate(ORDERS):
        for index, layout in enumerate([*LAYOUTS, "dp_replicate=2 dp_shard=2 zero=3 microbatch=1"]):
            marks = () if index == (0, 2, 3, 5)[turn] else pytest.mark.nightly
            yield pytest.param(model, layout, id=f"{model}-{layout}", marks=marks)


@pytest.mark.parametrize(("model", "layout"), list(_orders_with_layouts()))
def test_parts_may_be_called_in_another_order_or_once_more_on_any_rank(model: str, layout: str) -> None:
    prove((model, ORDERS[model]), [layout])


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        ("Dealt", "dp=2 ep=2 zero=1 microbatch=2", "parts.1.experts did not run .* experts exchange rows .*. Use ep=1"),
        ("Normed", "dp=2 zero=3", "parts.1.norm did not run .*batch norm.*. Use one data rank"),
    ],
)
def test_what_ranks_exchange_within_a_part_is_refused_by_name_where_a_rank_passes_it_over(
    model: str, layout: str, text: str
) -> None:
    """Before any rank communicates again: the others would wait until the time limit, or read what belongs to another module."""
    step = [index % 24 for index in next(batches(Kinds(15), job_for())).indices]
    kinds = [15] * 24
    for index in step[4:]:  # the second rank's samples of the first step
        kinds[index] = 13
    with pytest.raises(LayoutError, match=text):
        pool(2).run(observe, (model, tuple(kinds)), [layout])
    prove((model, (15,)), [layout])


ASIDE = {
    "either": (7, 5, 6, 5, 6, 7, 5, 6),
    "rarely": (4, 4, 4, 4, 7, 4, 4, 4),
    "never": (5, 4, 5, 4, 4, 5, 5, 4),
    "unseen in the trace": (4, 7, 5, 4, 6, 4, 4, 5),
}
"""Parts that the samples of Aside's models need the results of; "never" has one that no loss needs."""
EXCHANGING = {
    "NormedAside": ("dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=2 zero=3 recompute=full", "dp_replicate=2 dp_shard=2 zero=3"),
    "DealtAside": (
        "dp=2 ep=2 microbatch=2", "dp=2 ep=2 zero=1 microbatch=1", "dp=2 ep=2 zero=2 microbatch=1", "dp=2 ep=2 zero=3 microbatch=2",
        "dp=2 ep=2 zero=3 microbatch=1 recompute=full", "dp=4 ep=4 zero=1 microbatch=1", "dp=4 ep=2 zero=3 microbatch=1",
    ),
}  # fmt: skip


def _exchanges() -> Iterator[Any]:
    """Each layout with one case in turn; the others nightly."""
    for model, layouts in EXCHANGING.items():
        for turn, layout in enumerate(layouts):
            for index, name in enumerate(ASIDE):
                marks = () if index == turn % len(ASIDE) and turn < 4 else pytest.mark.nightly
                yield pytest.param(model, layout, name, id=f"{model}-{name}-{layout}", marks=marks)


@pytest.mark.parametrize(("model", "layout", "name"), list(_exchanges()))
def test_what_ranks_exchange_in_a_backward_runs_where_the_loss_of_a_rank_does_not_need_it(
    model: str, layout: str, name: str
) -> None:
    prove((model, ASIDE[name]), [layout])


def test_what_exchanges_in_a_backward_is_refused_by_name_where_a_rank_runs_it_without_gradients() -> None:
    kinds = [15] * 24
    for index in [index % 24 for index in next(batches(Kinds(15), job_for())).indices][4:]:
        kinds[index] = 13
    with pytest.raises(LayoutError, match=r"parts\.1\.norm ran without gradients .*batch norm.*. Use one data rank"):
        pool(2).run(observe, ("NormedStill", tuple(kinds)), ["dp=2"])
