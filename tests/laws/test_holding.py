"""Laws of what a rank holds of a weight: parts make up the whole, each is updated and saved once, and buckets are of a kind."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from samestep import Job, Layout
from samestep.errors import LayoutError
from samestep.models.presets import preset
from samestep.models.spec import ModelSpec
from samestep.program.program import Program
from samestep.strategies import programs_of
from tests.laws.models import LAW

_SMALL = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 96, "kv_heads": 2}
MODELS = (
    preset("llama3.2-1b", 16, {**_SMALL, "intermediate": 80}),  # embedding and head are tied
    preset("mixtral-8x7b", 16, {**_SMALL, "intermediate": 40, "experts": 8}),
    preset("qwen3-8b", 16, {**_SMALL, "intermediate": 80}),  # norms of heads
)


@st.composite
def programs(draw: st.DrawFn) -> tuple[ModelSpec, list[Program]]:
    """A model, and the programs of all stages of a layout that cuts it in any way."""
    model, zero, tp = draw(st.sampled_from(MODELS)), draw(st.integers(0, 3)), draw(st.sampled_from([1, 2, 4]))
    layout = Layout(
        dp_replicate=draw(st.sampled_from([1, 2])),
        dp_shard=draw(st.sampled_from([1, 2, 4])) if zero else 1,
        zero=zero,
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        ep=draw(st.sampled_from([1, 2, 4])) if any(param.experts for param in model.params) else 1,
        pp=draw(st.sampled_from([1, 2])),
    )
    try:
        return model, list(programs_of(model, Job(train={"global_batch": 16}), layout))
    except LayoutError:
        assume(False)
        raise


@LAW
@given(programs())
def test_parts_make_up_the_whole(found: tuple[ModelSpec, list[Program]]) -> None:
    model, stages = found
    whole = {param.name: param.numel for param in model.params}
    for program in stages:
        for param in program.step.model.params:
            assert whole[param.name] == param.numel * program.step.holding(param).num_parts


@LAW
@given(programs())
def test_every_rank_of_a_stage_has_its_part_in_a_weight(found: tuple[ModelSpec, list[Program]]) -> None:
    """It holds a part or a copy of it, and takes part in the sum of its gradient."""
    for program in found[1]:
        step, layout = program.step, program.step.layout
        for param in step.model.params:
            holding = step.holding(param)
            axes = (*holding.sharded_over, *holding.replicated_over, *holding.data_axes)
            assert len({*axes}) == len(axes)
            assert math.prod(map(step.ranks.size, axes)) == layout.world_size // layout.pp
            assert holding.num_copies == math.prod(map(step.ranks.size, (*holding.replicated_over, *holding.tied_over)))


@LAW
@given(programs())
def test_each_element_is_saved_once(found: tuple[ModelSpec, list[Program]]) -> None:
    """By the ranks that come first on every axis over which it is copied, which together have all parts and shards."""
    saved: dict[str, int] = {}
    for program in found[1]:
        step = program.step
        for param in step.model.params:
            holding = step.holding(param)
            for rank in step.ranks.groups("world")[0]:
                if step.ranks.coordinate(rank, "pp") == step.stage and not any(
                    step.ranks.coordinate(rank, axis) for axis in holding.copied_over
                ):
                    share = holding.num_parts * holding.num_shards
                    saved[param.name] = saved.get(param.name, 0) + 16 * 8 // share
    assert {*saved.values()} == {16 * 8}  # no more than 16 parts of 8 shards in any of these layouts


@LAW
@given(programs())
def test_what_is_partial_is_held_whole(found: tuple[ModelSpec, list[Program]]) -> None:
    for program in found[1]:
        for param in program.step.model.params:
            holding = program.step.holding(param)
            assert {*holding.partial_over} <= {*holding.replicated_over}


@LAW
@given(programs())
def test_zero_divides_by_the_innermost_data_axis(found: tuple[ModelSpec, list[Program]]) -> None:
    for program in found[1]:
        step = program.step
        held = {param.name: step.holding(param) for param in step.model.params}
        assert all(one.num_shards == (step.ranks.size(one.data_axis) if step.zero else 1) for one in held.values())
        for bucket in program.buckets:
            assert {held[member.name] for member in bucket.members} == {bucket.holding}
        for unit in program.units:
            assert {(held[name].data_axis, held[name].num_shards) for name in unit.params} == {
                (unit.shard_axis, unit.num_shards)
            }
