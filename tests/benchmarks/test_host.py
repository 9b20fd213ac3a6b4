"""Calls of ATen and of Python in a step of samestep beside those of a loop by hand: bounds that need no clock."""

from __future__ import annotations

import functools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import ANY

import pytest
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import host
import host_models
import host_peers
import host_rows
from host import Row

from samestep import Job, batches, parallelize
from samestep.datasets import read_ahead
from tests.pool import pool

LLAMA = Row(name="Llama", aim=None)


@pytest.fixture(autouse=True)
def _no_thread_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every batch be made in the step: where reading takes long, as on a busy machine, a thread makes them, whose calls are not seen."""
    monkeypatch.setattr(read_ahead, "WORTH_A_THREAD_S", math.inf)


class Counts(NamedTuple):
    """The calls of ATen in a step of ours and of a loop by hand, and how many more Python functions ours calls."""

    ours: int
    peer: int
    more_in_python: int


def counts_of(row: Row) -> Counts:
    aten, python = [], []
    for steps in (host.ours(row), host_peers.PEERS[row.peer](row)):
        aten.append(host.calls_of(steps))
        python.append(host.python_calls_of(steps, warm=0))
    return Counts(*aten, python[0] - python[1])


@functools.cache
def of_few_and_many_layers(precision: str) -> tuple[Counts, Counts]:
    """Return the calls of a Llama with 2 layers and with 5."""
    few, many = (counts_of(replace(LLAMA, precision=precision, options={"layers": n})) for n in (2, 5))
    return few, many


@pytest.mark.parametrize(
    ("row", "share"),
    [
        (LLAMA, 0.005),
        (replace(LLAMA, precision="bf16"), 0.0),
        (replace(LLAMA, microbatches=4), 0.002),
        pytest.param(replace(LLAMA, microbatches=4, precision="bf16"), 0.0, marks=pytest.mark.nightly),
        pytest.param(replace(LLAMA, model="gpt", options={"dropout": 0.0}), 0.005, marks=pytest.mark.nightly),
        pytest.param(replace(LLAMA, model="gpt"), 0.0, marks=pytest.mark.nightly),
        (replace(LLAMA, model="gpt", precision="bf16"), 0.0),
    ],
    ids=[
        "float32",
        "bf16",
        "micro-batches",
        "micro-batches in bf16",
        "gpt",
        "gpt with dropout",
        "gpt with dropout in bf16",
    ],
)
def test_a_step_calls_hardly_more_than_a_loop_by_hand(row: Row, share: float) -> None:
    ours, peer = (host.calls_of(steps) for steps in (host.ours(row), host_peers.PEERS[row.peer](row)))
    assert ours <= (1 + share) * peer


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_what_a_step_calls_besides_does_not_grow_with_the_layers(precision: str) -> None:
    few, many = of_few_and_many_layers(precision)
    assert (many.ours - many.peer) - (few.ours - few.peer) <= 1


def python_calls_on_ranks(rank: int, world: int, row: Row) -> int:
    """Return on one of several ranks how many more Python functions a step calls than the loop by hand."""
    return host.python_calls_of(host.ours(row)) - host.python_calls_of(host_peers.PEERS[row.peer](row))


@pytest.mark.parametrize(
    ("row", "most"),
    [
        (replace(LLAMA, layout="dp=2"), 12),
        (replace(LLAMA, layout="tp=2", peer="two autograd functions"), 120),
        (replace(LLAMA, layout="pp=2", peer="torch's Schedule1F1B", microbatches=4), 40),
        (replace(LLAMA, model="gpt"), 66),
        (replace(LLAMA, model="gpt", precision="bf16"), 90),
    ],
    ids=["dp=2", "tp=2", "pp=2", "dropout", "dropout in bf16"],
)
def test_python_functions_in_a_layer_are_bounded(row: Row, most: int) -> None:
    rows = [replace(row, options={"layers": layers}) for layers in (2, 4)]
    few, many = (pool(row.num_ranks).run(python_calls_on_ranks, one)[0] for one in rows)
    assert many - few <= 2 * most


def has_tried_its_loss(rank: int, world: int) -> bool:
    """Return whether a stage has nothing left to try after its first step, so that later forwards are not watched for it."""
    job = Job(train={"global_batch": 2, "steps": 4, "watch_every": 0}, run={"device": "cpu"})
    run = parallelize(
        lambda: host_models.build("llama", layers=2),
        host_models.loss_sum,
        host_peers.adamw,
        layout="pp=2 microbatch=1",
        job=job,
    )
    for batch in batches(host_models.Samples("llama"), job):
        run.step(batch)
    return run._stepper.guards.trials.is_tried


def test_a_stage_without_the_loss_tries_nothing_in_later_steps() -> None:
    assert pool(2).run(has_tried_its_loss) == [True, True]


@pytest.mark.parametrize(("precision", "in_a_step", "in_a_layer"), [("float32", 385, 0), ("bf16", 495, 22)])
def test_a_step_calls_few_python_functions_that_a_loop_by_hand_does_not(
    precision: str, in_a_step: int, in_a_layer: int
) -> None:
    """In bf16 each of a layer's nine weights has a hook on its gradient, and each of its modules a cast that finds nothing to do."""
    few, many = of_few_and_many_layers(precision)
    assert few.more_in_python <= in_a_step + 2 * in_a_layer
    assert many.more_in_python - few.more_in_python <= 3 * in_a_layer + 1


class Norms(nn.Module):
    """Norms that follow one another, each with a weight by which autograd reaches the one before."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(number)))

    def forward(self, images: Tensor) -> Tensor:
        return self.norms(images).flatten(1)[:, : host_models.CLASSES]


def calls_of_norms(rank: int, world: int, number: int) -> tuple[int, int, int]:
    """Return the calls of ATen, of collectives and of Python functions in a step of two ranks, of a model with so many norms."""
    job = Job(train={"global_batch": 4, "steps": 8, "watch_every": 0}, run={"device": "cpu"})
    run = parallelize(lambda: Norms(number), host_models.loss_sum, host_peers.adamw, layout="dp=2", job=job)
    steps = (run.step(batch).loss for batch in batches(host_models.Samples("resnet"), job))
    for _ in range(4):
        next(steps)
    with host.CountedCalls() as calls:
        next(steps)
    return calls.number, calls.collectives, host.python_calls_of(steps, warm=0)


def test_a_batch_norm_over_ranks_has_few_calls_and_a_collective_in_each_direction() -> None:
    (few, sent, few_in_python), *_ = pool(2).run(calls_of_norms, 2)
    (many, all_sent, many_in_python), *_ = pool(2).run(calls_of_norms, 6)
    assert all_sent - sent == 4 * 2
    # Besides them each of its two weights has a gradient that autograd detaches and the bucket takes, and its input one
    # that is detached.
    assert (many - few) - (all_sent - sent) <= 4 * (11 + 12 + 5)
    assert many_in_python - few_in_python <= 4 * 72


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_a_compiled_layer_calls_hardly_more_than_one_that_is_not(model: str) -> None:
    """A graph contains operations that torch's functions hide, and nothing else: without fusion they are counted."""
    row = replace(LLAMA, model=model, peer=host_rows.UNCOMPILED, backend="aot_eager")
    for_each = [host.calls_of(host.ours(replace(row, options={"layers": n}))) for n in (2, 6)]
    plain = [host.calls_of(host.ours(replace(row, options={"layers": n}, backend=""))) for n in (2, 6)]
    assert for_each[1] - for_each[0] <= 1.12 * (plain[1] - plain[0])


@pytest.mark.parametrize(("ratios", "is_slower"), [((1.1, 1.2, 1.3, 1.2), True), ((0.9, 1.2, 0.95, 1.1), False)])
def test_compiled_rows_that_are_slower_beyond_their_quartiles_are_named(
    ratios: tuple[float, ...], is_slower: bool
) -> None:
    found = host_rows.figures_of({"ratios": {"ours": [*ratios]}})
    compiled = [row for row in host.ROWS if row.backend]
    assert compiled
    assert all(row.peer == host_rows.UNCOMPILED and row.aim == 1.0 for row in compiled)
    assert [host_rows.is_slower(row, found) for row in compiled] == [is_slower] * len(compiled)
    assert not host_rows.is_slower(LLAMA, found)


def test_a_row_that_misses_its_aim_says_why(tmp_path: Path) -> None:
    row = Row(name="dp=2", aim=1.1, cause="a hook on each weight")
    ratios = {1.0: "", 1.1: "", 1.12: f"The aim is between the quartiles. {row.cause}", 1.4: row.cause}
    for ratio, why in ratios.items():
        turns = [ratio + one for one in (-0.02, -0.02, -0.01, 0.0, 0.01, 0.05, 0.05)]
        found = {"ratios": {"ours": turns}} | {key: {"ours": 2, "peer": 1} for key in ("ms", "calls", "python")}
        figures = host_rows.figures_of(found)
        assert host_rows.why_missed(row, figures) == why
        assert host_rows.cells(row, figures)[2:6] == [f"{ratio:.2f}", ANY, "1.10", "no" if why else "yes"]
    kept = tmp_path / "host.json"
    for name in (row.name, host.ROWS[0].name, row.name):
        host_rows.keep({name: figures}, kept)
    assert [*json.loads(kept.read_text())] == [host.ROWS[0].name, row.name]
    assert f"| {row.name} | {host.ROWS[9].cause} |" in host_rows.markdown(kept)


def test_each_kept_row_meets_its_aim_or_says_why() -> None:
    figures = json.loads(host_rows.KEPT.read_text())
    assert {row.name for row in host.ROWS} == {*figures}
    for row in host.ROWS:
        is_missed = "no" in host_rows.cells(row, figures[row.name])
        assert is_missed == bool(host_rows.why_missed(row, figures[row.name])), row.name
