"""A loss over all samples of a step is that of a plain loop in every layout, with one micro-batch a rank or several."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.examination.examine import Source
from samestep.layout import Layout
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests import traced
from tests.laboratory import TOLERANCE, Observed, assert_ledger, follow
from tests.parity.whole_batch import BATCH, CASES, Views, job, plain
from tests.pool import pool

Found = tuple[Observed, dict[str, Tensor], dict[str, float]]


def run_of(rank: int, world: int, name: str, layout: str, batch: int = BATCH) -> Run:
    case, settings = CASES[name], job(batch)
    source = Source(case.model, case.loss, optimizer_of(settings), name)
    example = next(batches(Views(), settings)).samples([0])
    prepared = traced.prepared(("whole batch", name), source, settings, example, Layout.parse(layout))
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    return Run(replace(source, prepared=prepared), Layout.parse(layout), settings, place)


def observe(rank: int, world: int, name: str, layout: str, batch: int = BATCH) -> Found:
    run = run_of(rank, world, name, layout, batch)
    seen = follow(run, Views(), run.job, record=True)
    held_out = run.evaluate(next(batches(Views(), job(20))))
    return seen, run.state_dict(on_every_rank=True), held_out


@functools.cache
def expected(name: str, batch: int = BATCH) -> tuple[list[float], dict[str, Tensor]]:
    run = run_of(0, 1, name, "dp=1", batch)
    run.prepare(next(batches(Views(), job(batch))).samples([0]))
    return plain(name, run.state_dict(), run.program.step.model.masks, batch)


def on_ranks(layout: str, *args: object) -> list[Found]:
    world = Layout.parse(layout).world_size
    name, rest = args[0], args[1:]
    return pool(world).run(observe, name, layout, *rest) if world > 1 else [observe(0, 1, name, layout, *rest)]  # type: ignore[arg-type]


LAYOUTS = (
    "dp=1",
    "dp=1 microbatch=4",
    "dp=2",
    "dp=2 microbatch=2",
    "dp=2 zero=1 microbatch=2",
    "dp=2 zero=2 microbatch=2",
    "dp=2 zero=3",
    "dp=2 zero=3 microbatch=2",
    "dp=2 microbatch=2 recompute=full",
    "tp=2",
    "tp=2 microbatch=4",
    "pp=2",
    "pp=2 microbatch=2",
    "dp=2 pp=2 zero=3 microbatch=2",
    "dp=2 pp=2 microbatch=1 schedule=gpipe",
    "pp=2 microbatch=2 schedule=zero-bubble",
    "pp=2 microbatch=2 schedule=interleaved",
)
ROWS = [(name, layout, batch) for layout in LAYOUTS for name in CASES for batch in (8, 5)]
DAILY = {(sorted(CASES)[index % len(CASES)], layout, (8, 5)[index % 2]) for index, layout in enumerate(LAYOUTS)}


@pytest.mark.parametrize(
    ("name", "layout", "batch"),
    [pytest.param(*row, marks=() if row in DAILY else pytest.mark.nightly) for row in ROWS],
)
def test_a_layout_is_equal_to_a_plain_loop(name: str, layout: str, batch: int) -> None:
    """Of five samples ranks and micro-batches have unequal numbers, or none."""
    losses, weights = expected(name, batch)
    ranks = on_ranks(layout, name, batch)
    for seen, ours, held_out in ranks:
        assert seen.losses == pytest.approx(losses, rel=TOLERANCE)
        assert ours.keys() == weights.keys()
        for key, value in weights.items():
            assert torch.allclose(ours[key], value, rtol=TOLERANCE, atol=TOLERANCE), key
        assert held_out == ranks[0][2]
    if Layout.parse(layout).world_size > 1:
        assert_ledger([seen for seen, *_ in ranks], layout)
