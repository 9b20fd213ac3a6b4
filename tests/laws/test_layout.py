"""Laws of the layout as text: it reads back, and what it cannot read it says."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.step import StepSpec
from tests.laws.models import LAW, Case, cases, layouts


@LAW
@given(layouts())
def test_text_reads_back(layout: Layout) -> None:
    assert Layout(str(layout)) == layout


def test_a_degree_is_of_data_of_chunks_or_divides_the_model() -> None:
    """What asks for all axes that divide a model must not miss one that is added."""
    degrees = {one.name for one in fields(Layout) if "is_degree" in one.metadata}
    assert {*Layout().inner_degrees} == degrees - {"dp_replicate", "dp_shard", "virtual_stages"}


@LAW
@given(layouts())
def test_words_come_in_any_order(layout: Layout) -> None:
    assert Layout(" ".join(reversed(str(layout).split()))) == layout


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
    layout = Layout(f"dp={dp} zero={zero}")
    assert (layout.dp_shard if zero else layout.dp_replicate) == layout.dp == dp


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("dp=2 dp=4", "twice"),
        ("dp=2 dp_shard=2", "dp alone"),
        ("dp_shardd=2", "did you mean 'dp_shard'"),
        ("dp=two", "whole number"),
        ("dp", "needs a value"),
        ("dp=0", "dp=0 must be from 1 to 1048576"),
        ("zero=4", "0, 1, 2 and 3"),
        ("dp_shard=2 zero=0", "dp_replicate=2"),
        ("microbatch=0", "microbatch=0 must be from 1 to 16777216"),
        *((f"{word}={number}", word) for word in ("mlp_chunk", "loss_chunk") for number in (0, -3, 2147483648, "many")),
        ("recompute=ful", "did you mean 'full'"),
        ("offload=perhaps", "switch"),
    ],
)
def test_what_it_cannot_read_it_says(text: str, what: str) -> None:
    with pytest.raises(LayoutError, match=what):
        Layout(text)


@LAW
@given(st.integers(1, 8), st.integers(0, 3), st.integers(1, 4))
def test_text_commas_and_keywords_are_one(dp: int, zero: int, tp: int) -> None:
    layout = Layout(f"dp={dp} zero={zero} tp={tp}")
    assert layout == Layout(f"dp={dp},zero={zero}, tp={tp}") == Layout(dp=dp, zero=zero, tp=tp)
    assert layout == Layout(f"dp={dp}", zero=zero, tp=tp) == replace(layout)


@LAW
@given(st.integers(1, 8), st.integers(0, 3), st.integers(1, 4), st.booleans())
def test_a_job_takes_a_layout_in_each_of_its_forms(dp: int, zero: int, tp: int, offload: bool) -> None:
    layout = Layout(dp=dp, zero=zero, tp=tp, offload=offload)
    forms: list[Any] = [str(layout), layout, layout.options, {"dp": dp, "zero": zero, "tp": tp, "offload": offload}]
    assert all(Layout(**Job(layout=form).layout) == layout for form in forms)
    assert all(Job(**tomllib.loads(Job(layout=form).to_toml())) == Job(layout=form) for form in forms)


@pytest.mark.parametrize(
    ("method", "exchange"), [("ulysses", "heads"), ("ring", "ring"), ("usp", "hybrid"), ("auto", "auto")]
)
def test_the_method_of_cp_has_the_names_of_papers(method: str, exchange: str) -> None:
    layout = Layout(cp=4, exchange=exchange)
    assert (
        layout
        == Layout(f"cp=4 cp_method={method}")
        == Layout("cp=4", cp_method=method)
        == Layout(cp=4, exchange=method)
    )
    for words, options in ((f"cp_method={method} exchange=ring", {}), (f"cp_method={method}", {"exchange": "ring"})):
        with pytest.raises(LayoutError, match="given twice"):
            Layout(words, **options)


@pytest.mark.parametrize("options", [{"dp": 2.5}, {"dp": None}, {"microbatch": "many"}, {"tp": 0}, {"dpp": 2}])
def test_a_keyword_that_cannot_be_used_is_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        Layout(**options)
    with pytest.raises(LayoutError, match="given twice"):
        Layout("dp=2", dp=2)
