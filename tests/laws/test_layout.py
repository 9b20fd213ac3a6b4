"""Laws of the layout as text: it reads back, and what it cannot read it says."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.program.step import StepSpec
from tests.laws.models import LAW, Case, cases, layouts


@LAW
@given(layouts())
def test_text_reads_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_a_degree_is_of_data_of_chunks_or_divides_the_model() -> None:
    """What asks for all axes that divide a model must not miss one that is added."""
    degrees = {one.name for one in fields(Layout) if "is_degree" in one.metadata}
    assert {*Layout().inner_degrees} == degrees - {"dp_replicate", "dp_shard", "virtual_stages"}


@LAW
@given(layouts())
def test_words_come_in_any_order(layout: Layout) -> None:
    assert Layout.parse(" ".join(reversed(str(layout).split()))) == layout


@LAW
@given(cases())
def test_every_sample_is_read_once_or_padding(case: Case) -> None:
    """The samples of all replicas are the global batch, and one more where a rank's micro-batch would be empty."""
    steps = [replace(case.program.step, replica=replica) for replica in range(case.layout.dp)]
    read = [step.microbatch_sizes for step in steps]
    assert len({len(sizes) for sizes in read}) == 1, "every rank runs as many micro-batches"
    padding = sum(max(0, step.num_microbatches - _share(step)) for step in steps)
    assert sum(map(sum, read)) == case.job.train.global_batch + padding


def _share(step: StepSpec) -> int:
    """Return a replica's part of the batch: the first ones have one more where it does not divide."""
    return len(range(step.replica, step.global_batch, step.layout.dp))


@LAW
@given(cases())
def test_the_axes_make_up_the_ranks(case: Case) -> None:
    """What a program's groups span divides the ranks, and the ranks are samples' readers times what shares a sample."""
    layout = case.layout
    ways = layout.tp * layout.cp * layout.pp
    assert layout.world_size == layout.dp * ways
    assert layout.num_shards * layout.num_replicas * layout.tp * layout.pp == layout.world_size


@LAW
@given(st.integers(1, 64), st.integers(0, 3))
def test_dp_is_short_for_what_the_zero_stage_spreads(dp: int, zero: int) -> None:
    layout = Layout.parse(f"dp={dp} zero={zero}")
    assert (layout.dp_shard if zero else layout.dp_replicate) == layout.dp == dp


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("dp=2 dp=4", "twice"),
        ("dp=2 dp_shard=2", "dp alone"),
        ("dp_shardd=2", "did you mean 'dp_shard'"),
        ("dp=two", "whole number"),
        ("dp", "needs a value"),
        ("dp=0", "at least 1"),
        ("zero=4", "0, 1, 2 and 3"),
        ("dp_shard=2 zero=0", "dp_replicate=2"),
        ("microbatch=0", "at least 1 sample"),
        ("recompute=ful", "did you mean 'full'"),
        ("offload=perhaps", "switch"),
    ],
)
def test_what_it_cannot_read_it_says(text: str, what: str) -> None:
    with pytest.raises(LayoutError, match=what):
        Layout.parse(text)


def test_half_a_rank_is_refused() -> None:
    with pytest.raises(LayoutError, match="whole number"):
        Layout.of({"dp": 2.5})
