"""Laws of the lower bounds of memory: none is above what the memory of a step is found to be, and they are close to it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import memory_of
from samestep.models.presets import preset
from samestep.program.step import StepSpec
from samestep.strategies import programs_of, refusal_of
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.least_memory import Needs
from tests.laws.models import LAW, MACHINES, MODELS, Case, cases, data_cases, job_of, layouts, possible

HARDWARE = MACHINES["slow"]


@LAW
@given(cases() | data_cases())
def test_no_bound_is_above_the_memory_of_a_step(drawn: Case) -> None:
    """Neither that of a layout, nor that of all layouts that it is among."""
    layout, ranks_per_node = drawn.layout, drawn.program.step.ranks_per_node
    prices = Prices(drawn.model, drawn.job, replace(HARDWARE, devices_per_node=ranks_per_node))
    needs = Needs(prices, 2)

    def step(layout: Layout) -> StepSpec:
        return StepSpec.of(drawn.model, drawn.job, layout, ranks_per_node)

    group = step(replace(layout, dp_replicate=layout.dp, dp_shard=1, zero=0))
    stages = needs.stages(group)
    bounds = {
        "of the first stage": needs.first_stage_bytes(group, layout, layout.recompute),
        "of all splits": needs.stages_bytes(group, stages),
        "of a split": needs.split_need(group, stages, layout).total,
        "of the layout": needs.need(step(layout)).total,
    }
    found = max(use.total for use in memory_of(drawn.programs, HARDWARE, 2))
    above = {name: bound for name, bound in bounds.items() if bound > found * (1 + 1e-9)}
    assert not above, f"{layout}: {found:,}"


_WORDS = st.sampled_from(sorted(MODELS)), st.sampled_from(["float32", "bf16"]), st.integers(1, 40)


@LAW
@given(*_WORDS, st.lists(layouts(), min_size=6, max_size=12))
def test_what_was_bounded_before_does_not_matter(what: str, precision: str, batch: int, every: list[Layout]) -> None:
    """A search bounds many layouts with the sums that it keeps: those of others must not be among them."""
    model, job = MODELS[what], job_of(batch, precision)
    needs = Needs(Prices(model, job, HARDWARE), 2)
    ranks_per_node = HARDWARE.devices_per_node
    for drawn in every:
        for layout in (possible(drawn), possible(drawn.but(schedule="zero-bubble"))):
            step = StepSpec.of(model, job, layout, ranks_per_node)
            if refusal_of(step) is None:
                alone = Needs(Prices(model, job, HARDWARE), 2)
                assert needs.need(step) == alone.need(step), layout


def test_layouts_that_hardly_fit_are_refused_by_their_bound() -> None:
    """Stages keep what they have sent each other."""
    words = "dp_replicate=16 dp_shard=16 pp=16 ep=8 schedule=interleaved virtual_stages=2 zero=2 microbatch=1 recompute=full accumulate=full"
    model, layout, hardware = preset("deepseek-v3", 4096), Layout(words), load("h100x8")
    job = Job(data={"sequence_length": 4096}, train={"global_batch": 15360}, numerics={"precision": "bf16"})
    step = StepSpec.of(model, job, layout, hardware.devices_per_node)
    needed = Needs(Prices(model, job, hardware), 2).need(step).total
    programs = programs_of(model, job, layout, hardware.devices_per_node)
    found = max(use.total - use.overhead for use in memory_of(programs, hardware, 2))
    assert 0.97 * found < needed <= found * (1 + 1e-9)
