"""Laws of the list of layouts: nothing legal is missing from it, and thinning it for `plan` leaves out nothing quicker."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.enumeration import candidates
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.program.step import StepSpec
from samestep.strategies import refusal_of
from samestep.wings.plan.search import plan
from tests.laws.models import LAW, MACHINES, MODELS, job_of, predictions

KINDS = {"dense": "tiny", "experts": "experts", "tied": "tied", "vision": "vision"}

Degrees = tuple[int, int, int, int]


def degrees(layout: Layout) -> Degrees:
    return layout.tp, layout.pp, layout.cp, layout.ep


def legal(model: ModelSpec, given: Job, layouts: Iterable[Layout]) -> set[Layout]:
    return {one for one in layouts if refusal_of(StepSpec.of(model, given, one)) is None}


@pytest.mark.parametrize(("kind", "devices"), [("dense", 6), ("experts", 4), ("tied", 3), ("vision", 2)])
def test_every_legal_split_is_listed_once(kind: str, devices: int) -> None:
    """Held against every layout that can be written down with so many ranks; ZeRO over one rank cuts nothing."""
    model, numbers = MODELS[KINDS[kind]], range(1, devices + 1)
    written = [
        Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp_replicate=replicate, dp_shard=shard, zero=zero)
        for tp, pp, cp, replicate, shard in itertools.product(numbers, repeat=5)
        if tp * pp * cp * replicate * shard == devices
        for ep, zero in itertools.product(numbers, (0, 1, 2, 3))
        if (shard == 1 if zero == 0 else shard * cp > 1)
    ]
    listed = list(candidates.list_layouts(devices, model))
    assert len(listed) == len(set(listed))
    assert all(layout.world_size == devices for layout in listed)
    assert legal(model, job_of(), listed) == legal(model, job_of(), written)


@pytest.mark.parametrize("what", ["experts", "wide", "vision"])
def test_each_switch_by_itself_is_one_of_their_combinations(what: str) -> None:
    model = MODELS[what]
    assert set(candidates.list_layouts(4, model, switches=True)) <= set(candidates.layouts_of(4, model, job_of()))


@LAW
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(MACHINES)),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.integers(1, 8),
)
def test_what_a_plan_considers_is_a_part_of_the_list_and_has_its_degrees(
    what: str, where: str, devices: int, global_batch: int
) -> None:
    model, given_job = MODELS[what], job_of(global_batch)
    every = list(candidates.layouts_of(devices, model, given_job))
    considered = list(candidates.layouts_of(devices, model, given_job, thin=MACHINES[where]))
    assert set(considered) <= set(every)
    assert legal_degrees(model, given_job, every) == legal_degrees(model, given_job, considered)


def legal_degrees(model: ModelSpec, given: Job, layouts: Iterable[Layout]) -> set[Degrees]:
    """Return the tp, pp, cp and ep of which some layout is legal; behind the first one no other is looked at."""
    found: set[Degrees] = set()
    for one in layouts:
        if degrees(one) not in found and refusal_of(StepSpec.of(model, given, one)) is None:
            found.add(degrees(one))
    return found


def quickest(step_s: dict[Layout, float], layouts: Iterable[Layout]) -> dict[Degrees, float]:
    """Return the least predicted seconds for each tp, pp, cp and ep of the layouts that have a prediction."""
    found: dict[Degrees, float] = {}
    for one in filter(step_s.__contains__, layouts):
        found[degrees(one)] = min(step_s[one], found.get(degrees(one), step_s[one]))
    return found


@pytest.mark.parametrize(
    ("kind", "where", "devices"),
    [
        ("experts", "alone", 2),
        ("tied", "slow", 2),
        ("vision", "alone", 2),
        *(
            pytest.param(kind, where, 4, marks=pytest.mark.nightly)
            for kind, where in itertools.product(KINDS, ("slow", "alone"))
        ),
    ],
)
def test_for_all_degrees_the_best_of_what_a_plan_considers_is_the_best_of_the_list(
    kind: str, where: str, devices: int
) -> None:
    """It ranges over every split and combination of switches but for offload, the slowest update, and loss_chunk, never quicker."""
    model, given_job, hardware = MODELS[KINDS[kind]], job_of(4), MACHINES[where]

    def is_priced(layout: Layout) -> bool:
        return not layout.offload and not layout.loss_chunk and layout.tp <= hardware.devices_per_node

    every, considered = (
        list(filter(is_priced, candidates.layouts_of(devices, model, given_job, thin=thin)))
        for thin in (None, hardware)
    )
    assert set(considered) <= set(every)
    step_s = {one.layout: one.step_s for one in predictions(model, given_job, hardware, every)}
    assert quickest(step_s, every) == quickest(step_s, considered)
    assert plan(model, given_job, hardware, devices, top=1).best[0].step_s == min(step_s.values())


@given(st.integers(2, 3000))
@example(128)
@example(256)
def test_a_share_that_two_or_three_divides_may_have_equal_micro_batches(share: int) -> None:
    """A share's half and third are looked at where they are whole, which makes all micro-batches equal; powers of two up to 128 alone."""
    given_job = job_of(global_batch=share)
    sizes = {
        one.microbatch for one in candidates.vary_microbatches(Layout(), given_job, thin=next(iter(MACHINES.values())))
    }
    whole = {share // number for number in (2, 3) if share % number == 0}
    assert {size for size in whole if size & (size - 1) or size <= 128} <= sizes
    assert all(size is None or 1 <= size < share for size in sizes)
