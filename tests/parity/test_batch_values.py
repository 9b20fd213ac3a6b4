"""Sums, means and rows of all samples, and state that follows from them, are those of a plain loop in every layout."""

from __future__ import annotations

import pytest
import torch

from samestep import after_step, batch_cat, batch_mean, batch_sum
from samestep.datasets import batches
from samestep.errors import LayoutError, ModelError
from samestep.layout import Layout
from tests.parity.batch_values import VALUES
from tests.parity.whole_batch import Views, job, prove, run_of
from tests.pool import pool

LAYOUTS = ("dp=2", "dp=2 zero=3", "dp=2 recompute=full", "tp=2", "pp=2", "dp=3")
NOW = [name for name in VALUES if not name.startswith("later")]
LATER = [name for name in VALUES if name.startswith("later")]
CHOICES = [(layout, names) for names in (NOW, LATER) for layout in LAYOUTS]
ROWS = [(name, layout, batch) for layout, names in CHOICES for name in names for batch in (8, 5, 2)]
DAILY = {(names[index % len(names)], layout, (8, 5, 2)[index % 3]) for index, (layout, names) in enumerate(CHOICES)}


@pytest.mark.parametrize(
    ("name", "layout", "batch"), [pytest.param(*row, marks=() if row in DAILY else pytest.mark.nightly) for row in ROWS]
)
def test_a_layout_is_equal_to_a_plain_loop(name: str, layout: str, batch: int) -> None:
    """Of five samples ranks have unequal numbers; of two a third rank has none."""
    assert_proven(name, layout, batch)


@pytest.mark.usefixtures("ranks_inherit_the_compiler")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("later blocks", "dp=2"),
        pytest.param("whitened", "dp=2 zero=1 recompute=selective", marks=pytest.mark.nightly),
        pytest.param("later seen", "dp=2 recompute=full", marks=pytest.mark.nightly),
    ],
)
def test_code_that_takes_them_stays_outside_of_graphs(name: str, layout: str) -> None:
    assert_proven(name, layout, 8, "blocks")


def test_outside_of_a_run_they_are_those_of_torch() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert torch.equal(batch_sum(x), x.sum(0))
    assert torch.equal(batch_mean(x), x.mean(0))
    assert batch_cat(x) is x
    with pytest.raises(ModelError, match="takes a tensor with a row for each sample, and was given a tensor"):
        batch_sum(torch.zeros(()))


def test_outside_of_a_run_a_buffer_follows_when_an_optimizer_has_stepped() -> None:
    buffer, weight = torch.zeros(2), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    after_step(buffer, torch.ones(2))
    after_step(buffer, buffer + 3.0)
    assert torch.equal(buffer, torch.zeros(2))
    optimizer.step()
    assert torch.equal(buffer, torch.full((2,), 3.0))
    buffer.zero_()
    optimizer.step()
    assert torch.equal(buffer, torch.zeros(2))
    with pytest.raises(ModelError, match=r"was given a value .* for a buffer .*. Use a tensor of the buffer's shape"):
        after_step(buffer, torch.ones(3))


def assert_proven(name: str, layout: str, batch: int, part: str = "") -> None:
    held_out = prove(name, layout, batch, part)
    assert held_out == [held_out[0]] * len(held_out)


def prepared(rank: int, world: int, name: str, layout: str) -> None:
    run_of(rank, world, name, layout).prepare(next(batches(Views(), job())).samples([0]))


@pytest.mark.parametrize(
    ("name", "layout", "works"), [("whitened", "dp=2 microbatch=2", 4), ("later queue", "pp=2 microbatch=2", 8)]
)
def test_several_micro_batches_are_refused_with_what_works(name: str, layout: str, works: int) -> None:
    with pytest.raises(
        LayoutError, match=rf"takes values of all samples of the step within one .*. Use microbatch={works}"
    ):
        pool(Layout(layout).world_size).run(prepared, name, layout)
