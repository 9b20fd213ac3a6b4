"""Laws of `plan`: nothing legal is better than what it finds, and nothing is thrown out without a reason."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from dataclasses import replace
from operator import mul
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from samestep.enumeration import candidates
from samestep.hardware import Hardware, load
from samestep.job import Job
from samestep.layout import Accumulate, Layout, Recompute
from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.models.presets import preset
from samestep.models.spec import ModelSpec
from samestep.optimizer_tables import OptimizerTable
from samestep.program.step import StepSpec
from samestep.strategies import ProgramBuilder, refusal_of
from samestep.wings.plan import ranking, search
from samestep.wings.plan.bounds.layer_costs import COUNTED, Prices
from samestep.wings.plan.bounds.least_memory import Needs
from samestep.wings.plan.bounds.step_time import Bounds
from samestep.wings.plan.open_groups import distance, nearest
from samestep.wings.plan.search import Plan, plan
from samestep.wings.plan.simulation.accuracy import intervals
from samestep.wings.plan.simulation.simulate import Prediction, predict
from tests.laws.models import LAW, MACHINES, MODELS, assert_bounded, blocks, in_chunks, job_of, machine, predictions

LAUNCHED = replace(MACHINES["a100"], kernel_launch_s=1e-6)
"""A machine on which neither the host nor the device hides the other's work on small models."""
COSTLY = blocks(4, 256, 256, forward_flops=10**9, saved_elements=10**6, input_elements=10**4)


def every(model: ModelSpec, given: Job, hardware: Hardware, devices: int) -> list[Prediction]:
    """Every legal layout that a plan considers and that fits, each played in full."""
    considered = candidates.layouts_of(devices, model, given, thin=hardware)
    inside = (layout for layout in considered if layout.tp <= hardware.devices_per_node)
    return list(predictions(model, given, hardware, inside))


@pytest.mark.parametrize(
    ("what", "where", "devices"),
    [
        ("odd", "a100", 4),
        ("experts", "slow", 2),
        ("vision", "slow", 2),
        ("odd", "uneven", 4),
        ("unfused", "compiled", 4),
        *(
            pytest.param(what, where, 4, marks=pytest.mark.nightly)
            for what, where in (("tiny", "slow"), ("tied", "alone"), ("tied", "slow"), ("experts", "slow"), ("vision", "slow"))
        ),
    ],
)  # fmt: skip
def test_the_best_of_a_small_search_is_the_best_of_all(what: str, where: str, devices: int) -> None:
    """Every model on two devices with every split: `test_candidates.py`."""
    model, hardware = MODELS[what], MACHINES.get(where, LAUNCHED)
    given_job = job_of(6, compile="blocks" if where == "compiled" else "none")
    found = plan(model, given_job, hardware, devices, top=3)
    all_of_them = sorted(one.step_s for one in every(model, given_job, hardware, devices))
    assert [one.step_s for one in found.best] == pytest.approx(all_of_them[:3])


@pytest.mark.parametrize("share", [30, 416])
def test_no_other_micro_batch_is_much_faster_where_a_rank_has_many_samples(share: int) -> None:
    """`microbatch=104` of 416 samples was 5 % faster than 32, the largest that was looked at."""
    hardware = replace(load("a100-40x8"), kept_free=0.05)
    given = Job(train={"global_batch": 8 * share}, numerics={"precision": "bf16"})
    (best,) = plan(preset("gpt2"), given, hardware, 8, top=1).best
    assert best.layout.dp == 8
    every = (best.layout.but(microbatch=size) for size in range(1, share) if share % size == 0)
    for one in predictions(preset("gpt2"), given, hardware, every):
        assert best.step_s < 1.01 * one.step_s, one.layout


@pytest.mark.parametrize("part", [0.2, 0.8])
def test_where_memory_is_short_the_best_is_the_best_of_what_fits(part: float) -> None:
    roomy = plan(COSTLY, job_of(), MACHINES["slow"], 4, top=1)
    hardware = replace(MACHINES["slow"], memory_bytes=int(part * roomy.best[0].peak.total))
    found = plan(COSTLY, job_of(), hardware, 4)
    fitting = [one for one in _every_costly() if replace(one, hardware=hardware).fits]
    assert (found.best == ()) == (fitting == [])
    if fitting:
        assert found.best[0].step_s == pytest.approx(min(one.step_s for one in fitting))
        assert all(one.fits for one in found.best)
    else:
        assert "comes nearest" in found.nearest


_DEGREES = ("tp", "sequence_parallel", "cp", "exchange", "pp", "ep", "offload")
"""The words of a layout that its degrees have."""


@LAW
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(MACHINES)),
    st.sampled_from([1, 3, 6, 8, 16]),
    st.sampled_from(["float32", "bf16"]),
    st.data(),
)
def test_a_bound_is_never_above_what_it_bounds(
    what: str, where: str, devices: int, precision: str, data: st.DataObject
) -> None:
    model, hardware = MODELS[what], MACHINES[where]
    groups = [{"match": ["*1*"], "name": data.draw(st.sampled_from(["muon", "sgd"]))}] * data.draw(st.integers(0, 1))
    words = data.draw(st.sampled_from([{}, {"compile": "blocks"}]))
    given_job = job_of(data.draw(st.integers(1, 40)), precision, **words).model_copy(
        update={"optimizer": OptimizerTable.model_validate({"groups": groups})}
    )
    prices = Prices(model, given_job, hardware.slowest_of(devices))
    bounds, needs = Bounds(prices), Needs(prices, 2)
    considered = list(candidates.layouts_of(devices, model, given_job, thin=hardware))
    layout = data.draw(st.sampled_from(considered))
    assume(refusal_of(StepSpec.of(model, given_job, layout, hardware.devices_per_node)) is None)
    played = predict(model, given_job, layout, hardware)
    step = StepSpec.of(model, given_job, layout, hardware.devices_per_node)
    least_s = bounds.least_s(in_chunks(model, given_job, layout, hardware), [layout])
    degrees = Layout().but(**{name: getattr(layout, name) for name in _DEGREES}, dp_replicate=layout.dp)
    degrees_s = max(
        bounds.degrees_s(
            degrees.but(recompute=again),
            lambda one: in_chunks(model, given_job, one, hardware),
            one.but(recompute=again),
        )
        for one in candidates.less_cut(degrees, model, hardware.devices_per_node)
        for again in ("none", layout.recompute)
    )
    base = replace(layout, dp_replicate=layout.dp, dp_shard=1, zero=0)
    group = StepSpec.of(model, given_job, base, hardware.devices_per_node)
    first_bytes = needs.first_stage_bytes(group, layout, layout.recompute)
    group_bytes, split_need = (
        needs.stages_bytes(group, needs.stages(group)),
        needs.split_need(group, needs.stages(group), layout).total,
    )
    chunked = in_chunks(model, given_job, base, hardware)
    # What computes less again bounds what computes more again.
    policies = get_args(Recompute)[: get_args(Recompute).index(layout.recompute) + 1]
    group_s = max(bounds.group_s(replace(group, layout=replace(base, recompute=one))) for one in policies)
    assert max(
        degrees_s, least_s, bounds.schedule_s(chunked), group_s, bounds.step_s(step, plays=True)
    ) <= played.step_s * (1 + 1e-9)
    waits_s = bounds.least_s(chunked, [base])
    assert max(degrees_s, waits_s, bounds.sharded_s(step)) <= played.step_s * (1 + 1e-9)
    assert max(first_bytes, group_bytes, split_need, needs.need(step).total) <= played.peak.total * (1 + 1e-9)


@LAW
@given(st.data())
def test_a_bound_of_sharded_experts_is_never_above_what_it_bounds(data: st.DataObject) -> None:
    """Gathers and scatters that alternate with compute are most of such a step, on machines where any of them may be the slowest."""
    shape = Decoder(layers=data.draw(st.sampled_from([2, 5, 8])), hidden=64, heads=4, vocab=512, sequence=64, experts=8)
    model = spec(replace(shape, top_k=2), "experts")
    hardware = machine(
        bytes_per_s=10 ** data.draw(st.floats(7, 11)), latency_s=10 ** data.draw(st.floats(-7, -4)),
        memory_bytes_per_s=10 ** data.draw(st.floats(9, 12)), devices_per_node=data.draw(st.sampled_from([2, 4, 8])),
    )  # fmt: skip
    hardware = replace(hardware, contention=data.draw(st.sampled_from([1.0, 1.3])))
    pp, ep = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2, 4]))
    chunks = data.draw(st.sampled_from([1, 2])) if pp > 1 and shape.layers >= 4 else 1
    layout = Layout(
        dp_replicate=data.draw(st.sampled_from([1, 2])), dp_shard=8, zero=data.draw(st.sampled_from([2, 3])), ep=ep, pp=pp,
        tp=data.draw(st.sampled_from([1, 2])), microbatch=data.draw(st.sampled_from([1, 2])),
        schedule="interleaved" if chunks > 1 else "1f1b", virtual_stages=chunks,
        accumulate=data.draw(st.sampled_from(get_args(Accumulate))), recompute=data.draw(st.sampled_from(get_args(Recompute))),
    )  # fmt: skip
    given_job = job_of(data.draw(st.sampled_from([16, 40, 64])), data.draw(st.sampled_from(["float32", "bf16"])))
    step = StepSpec.of(model, given_job, layout, hardware.devices_per_node)
    assume(refusal_of(step) is None)
    played_s = predict(model, given_job, layout, hardware).step_s
    assert Bounds(Prices(model, given_job, hardware)).step_s(step, plays=True) <= played_s * (1 + 1e-9)


def test_a_split_is_bounded_without_weights_in_the_hosts_memory() -> None:
    hardware = MACHINES["slow"]
    for zero, what in itertools.product(range(4), sorted(MODELS)):
        model = MODELS[what]
        frozen = replace(model, params=tuple(replace(param, trainable=False) for param in model.params))
        roots = tuple({param.name.rpartition(".")[0] for param in frozen.params if "." in param.name})
        given_job = job_of(8).model_copy(update={"model": job_of(8).model.model_copy(update={"offload": roots})})
        layout = Layout(dp_shard=4 if zero else 1, dp_replicate=1 if zero else 4, zero=zero)
        needs = Needs(Prices(frozen, given_job, hardware), 2)
        step = StepSpec.of(frozen, given_job, layout, hardware.devices_per_node)
        group = StepSpec.of(frozen, given_job, Layout(dp_replicate=4), hardware.devices_per_node)
        assert needs.split_need(group, needs.stages(group), layout).total <= needs.need(step).total * (1 + 1e-9), what


_AXES = ("dp=4", "dp=2 tp=2", "dp=2 tp=2 sequence_parallel", "dp=2 cp=2", "dp=8 ep=4", "dp=8 zero=3 tp=2 ep=2")
_LEGAL = [
    (what, words)
    for what, words in itertools.product(sorted(MODELS), _AXES)
    if refusal_of(StepSpec.of(MODELS[what], job_of(64), Layout(words), 4)) is None
]


@pytest.mark.parametrize(("words", "cuts_loss"), [("pp=8", True), ("pp=4 tp=2 sequence_parallel", False)])
def test_chunks_of_the_loss_leave_stages_where_they_are(words: str, cuts_loss: bool) -> None:
    model, layout, hardware = preset("llama3-8b", 8192), Layout(words), load("h100x8")
    given_job = Job(data={"sequence_length": 8192}, train={"global_batch": 64})
    prices = Prices(model, given_job, hardware)
    steps = [
        StepSpec.of(model, given_job, layout.but(loss_chunk=chunk), 8).but(cuts_loss=cuts_loss)
        for chunk in candidates.loss_chunks(layout, model)
    ]
    assert len(steps) > 1
    assert len({prices.cut(step).flops for step in steps}) == 1
    assert len({prices.runs(step).counts for step in steps}) == 1


def test_every_model_and_every_axis_is_tried() -> None:
    assert {what for what, _ in _LEGAL} == set(MODELS)
    assert {words for _, words in _LEGAL} == set(_AXES)


@pytest.mark.parametrize(("what", "words"), _LEGAL)
@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_each_sample_adds_the_same_to_a_program(what: str, recompute: Recompute, words: str) -> None:
    """From the digits of the program of `COUNTED` samples those of any number follow."""
    model, layout = MODELS[what], replace(Layout(words), recompute=recompute)
    step = StepSpec.of(model, job_of(64), layout, 4)
    builder = ProgramBuilder(model, job_of(64), 4)
    counted = builder.before_stages(replace(step, samples=COUNTED))
    for samples in (1, 2, 7):
        program = builder.before_stages(replace(step, samples=samples))
        assert program.bodies.keys() == counted.bodies.keys()
        assert replace(program.step, samples=COUNTED) == counted.step
        for body in program.bodies:
            for op, digits in zip(program.bodies[body], counted.bodies[body], strict=True):
                flops, size_bytes = (
                    sum(map(mul, divmod(n, COUNTED), (samples, 1))) for n in (digits.flops, digits.size_bytes)
                )
                assert digits.but(flops=flops, size_bytes=size_bytes) == op


@pytest.mark.parametrize(
    "words",
    [
        "dp=2 tp=2 pp=3 microbatch=1 schedule=zero-bubble",
        "dp=2 zero=1 tp=2 pp=3 sequence_parallel microbatch=1 schedule=interleaved virtual_stages=2",
        "dp_replicate=2 dp_shard=2 zero=3 pp=3 microbatch=1",
        "dp=4 zero=3 microbatch=1 accumulate=full",
        "dp=2 zero=3 pp=2 microbatch=1 accumulate=full",
    ],
)
@pytest.mark.parametrize("what", ["lopsided", "experts"])
@pytest.mark.parametrize("where", ["crowded", "a100"])
def test_bounds_hold_where_communication_slows_compute(what: str, words: str, where: str) -> None:
    layout = Layout(words)
    if what == "experts":
        layout = replace(layout, ep=2, pp=min(layout.pp, 2))
    assert_bounded(MODELS[what], job_of(48), str(layout), MACHINES[where], plays=True)


def test_shards_of_whole_gradients_are_not_counted_beside_activations() -> None:
    """They come with the last micro-batch's backward alone."""
    words = "dp=2 tp=4 sequence_parallel pp=3 zero=2 microbatch=2 accumulate=full"
    for precision in ("float32", "bf16"):
        assert_bounded(MODELS["experts"], job_of(13, precision), words, MACHINES["crowded"])


@pytest.mark.parametrize(
    ("words", "global_batch"),
    [
        ("dp=64 tp=8 pp=8 zero=1 sequence_parallel microbatch=1 recompute=selective", 1024),
        ("dp=512 zero=3 microbatch=1 recompute=full", 1024),
        ("dp=64 tp=2 cp=4 zero=3 microbatch=2", 1000),
        ("dp=16 tp=8 pp=4 microbatch=2 schedule=interleaved virtual_stages=2", 1000),
        ("dp=8 tp=4 pp=12 microbatch=1 schedule=zero-bubble recompute=full", 1024),
    ],
)
def test_bounds_are_close_on_models_that_are_rented_for(words: str, global_batch: int) -> None:
    """With 1,000 samples some micro-batches have one more than others."""
    given_job = Job(
        data={"sequence_length": 4096}, train={"global_batch": global_batch}, numerics={"precision": "bf16"}
    )
    part, played, need = assert_bounded(preset("llama2-13b"), given_job, words, load("h100x8"))
    assert part > 0.85
    # The bound has no unit of a single layer that is gathered, and whose gradients are there, for its backward.
    of_units = played.peak.buffers + played.peak.gradients if played.layout.zero == 3 else 0
    assert need > 0.95 * (played.peak.total - played.peak.overhead - of_units)


@pytest.mark.parametrize(
    "words",
    [
        "dp=256 pp=2 ep=8 schedule=interleaved virtual_stages=2 zero=1 microbatch=1",
        "dp_replicate=16 dp_shard=8 pp=4 ep=8 schedule=interleaved virtual_stages=2 zero=2 microbatch=1",
        "dp=128 pp=4 ep=8 schedule=zero-bubble zero=1 microbatch=1",
        "dp=512 ep=4 zero=3 microbatch=1 recompute=selective",
    ],
)
def test_bounds_of_experts_are_close_enough_to_play_few(words: str) -> None:
    """What their gradients take beside the last backwards is most of what pipelines of experts differ in."""
    given_job = Job(data={"sequence_length": 4096}, train={"global_batch": 1024}, numerics={"precision": "bf16"})
    assert assert_bounded(preset("mixtral-8x7b", 4096), given_job, words, load("h100x8"))[0] > 0.95


@pytest.mark.parametrize(
    "words", ["dp=16 pp=8 microbatch=1", "dp=16 pp=8 microbatch=1 schedule=interleaved virtual_stages=2"]
)
def test_the_own_clock_of_a_pipeline_knows_what_neighbours_wait_for_each_other(words: str) -> None:
    """Messages over slow links delay each turn of two neighbours, which sums of their bodies leave out."""
    model, hardware = preset("llama2-13b", 1024), load("h100x8")
    hardware = replace(hardware, inter=replace(hardware.inter, bytes_per_s=hardware.inter.bytes_per_s / 8))
    given_job = Job(data={"sequence_length": 1024}, train={"global_batch": 1024}, numerics={"precision": "bf16"})
    assert assert_bounded(model, given_job, words, hardware)[0] < 0.98
    assert assert_bounded(model, given_job, words, hardware, plays=True)[0] > 0.995


def test_every_layout_is_accounted_for_with_a_reason() -> None:
    found = plan(MODELS["odd"], job_of(12), MACHINES["slow"], 6)
    assert all(one.reason and one.rule in {"refused", "memory", "slower", "unplayed"} for one in found.rejections)
    counts = Counter(one.layout for one in found.rejections)
    counts.update(one.layout for one in found.best)
    assert set(counts.values()) == {1}
    assert len(counts) == found.considered
    assert all(layout.world_size == 6 for layout in counts)


def test_no_layout_changes_the_batch() -> None:
    for global_batch in (1, 7):
        found = plan(MODELS["tiny"], job_of(global_batch), MACHINES["a100"], 4)
        for one in found.best:
            steps = [program.step for program in one.programs]
            assert {step.global_batch for step in steps} == {global_batch}
            assert one.tokens == global_batch * 64
            assert steps[0].num_microbatches * steps[0].microbatch_samples * one.layout.dp >= global_batch


def test_a_search_that_ends_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan(MODELS["tiny"], job_of(), MACHINES["slow"], 4, top=2)
    monkeypatch.setattr(search, "MOST_PLAYED", 2)
    short = plan(MODELS["tiny"], job_of(), MACHINES["slow"], 4, top=2)
    assert not any(one.rule == "unplayed" for one in whole.rejections)
    assert any(one.rule == "unplayed" for one in short.rejections)
    assert short.best[0].step_s >= whole.best[0].step_s
    assert "the search ended" in ranking.as_text(short)
    assert "the search ended" not in ranking.as_text(whole)


def test_nothing_fits_names_what_comes_nearest() -> None:
    found = plan(MODELS["tiny"], job_of(), replace(MACHINES["a100"], memory_bytes=1000), 2)
    assert found.best == ()
    assert found.nearest.startswith('nothing fits; "')
    assert {one.rule for one in found.rejections} <= {"memory", "refused"}
    assert ranking.as_text(found).startswith("nothing fits")


def _least_bytes(devices: int) -> int:
    return min(one.peak.total for one in every(COSTLY, job_of(12), MACHINES["slow"], devices))


def test_nothing_fits_names_how_many_devices_would_do() -> None:
    found = plan(COSTLY, job_of(12), replace(MACHINES["slow"], memory_bytes=_least_bytes(4)), 1)
    assert found.nearest.endswith("; 4 devices would do")


@pytest.mark.parametrize("devices", [1, 3])
def test_the_fewest_devices_are_the_first_that_fit(devices: int) -> None:
    found = search.fewest(COSTLY, job_of(12), replace(MACHINES["slow"], memory_bytes=_least_bytes(devices)), 6)
    assert found.devices == devices
    assert found.best


def test_beyond_a_node_the_fewest_are_whole_nodes() -> None:
    small = replace(MACHINES["slow"], devices_per_node=2, memory_bytes=_least_bytes(3))
    assert plan(COSTLY, job_of(12), small, 3, may_offload=False).best
    assert search.fewest(COSTLY, job_of(12), small, 8).devices == 4


def test_data_ranks_without_samples_are_named() -> None:
    found = plan(MODELS["tiny"], job_of(2), MACHINES["slow"], 8)
    idle, busy = (
        ranking.as_text(replace(found, best=(predict(MODELS["tiny"], job_of(2), Layout(words), found.hardware),)))
        for words in ("dp=4 tp=2", "dp=2 tp=4")
    )
    assert "leaves 2 of its 4 data ranks without samples: 4 devices would take as long" in idle
    assert "without samples" not in busy


def test_what_may_not_fit_is_said_beside_what_is_likelier_to() -> None:
    found = plan(COSTLY, job_of(), MACHINES["slow"], 4, top=20)
    full, roomy = (pick(found.best, key=lambda one: one.peak.total) for pick in (max, min))
    hardware = replace(MACHINES["slow"], memory_bytes=int(full.peak.total * 0.8))
    full, roomy = replace(full, hardware=hardware), replace(roomy, hardware=hardware)
    assert 0.1 < full.chance_to_fit < 0.5
    assert full.chance_to_fit < roomy.chance_to_fit
    said = " ".join(ranking.as_text(replace(found, best=(full,), safe=roomy)).split())
    assert f'recommended: "{roomy.layout}", {roomy.chance_to_fit:.0%} likely to fit' in said
    assert f"but is {full.chance_to_fit:.0%} likely to fit" in said
    assert said.index(str(roomy.layout)) < said.index(str(full.layout))
    assert ranking.as_record(replace(found, best=(full,), safe=roomy))["safe"]["chance_to_fit"] == roomy.chance_to_fit
    assert "the fastest is" not in ranking.as_text(replace(found, best=(full,), safe=full))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_a_chance_and_the_size_that_has_it_belong_together(chance: float) -> None:
    memory = intervals("all")["memory"]
    assert memory.chance_below(100.0, memory.safe_below(100.0, chance)) == pytest.approx(chance)
    assert memory.chance_below(memory.high, 1.0) == pytest.approx(0.9)
    assert memory.chance_below(memory.low, 1.0) == pytest.approx(0.1)


@functools.cache
def _every_costly() -> list[Prediction]:
    return every(COSTLY, job_of(), MACHINES["slow"], 4)


@pytest.mark.parametrize("layout", ["dp=4 microbatch=2", "tp=2 dp=2"])
def test_the_nearest_that_works_keeps_the_degrees_if_any_does(layout: str) -> None:
    given = Layout(layout)
    fitting = sorted(_every_costly(), key=lambda one: one.peak.total)
    for few in (fitting[0], fitting[len(fitting) // 3]):
        hardware = replace(MACHINES["slow"], memory_bytes=few.peak.total)
        found = nearest(COSTLY, job_of(), hardware, given, 4)
        assert found is not None
        assert found.fits
        least = min(distance(given, one.layout) for one in fitting if replace(one, hardware=hardware).fits)
        assert distance(given, found.layout) == least
    assert nearest(COSTLY, job_of(), replace(hardware, memory_bytes=1000), given, 4) is None


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("dp=4 zero=1 accumulate=full", "is not supported: accumulate=full needs sharded gradients"),
        ("pp=8", 'is not supported: pp=8 cuts the 4 blocks of tiny into 8 stages. Use pp=4. Use "'),
    ],
)
def test_why_names_the_rule_and_what_works(layout: str, says: str) -> None:
    found = plan(MODELS["tiny"], job_of(), MACHINES["slow"], 4)
    text = ranking.why_not(found, Layout(layout))
    assert says in text
    assert re.search(r'\. Use "[^"]+", [0-9.e-]+ s per step$', text)


def _why(found: Plan, layout: str) -> str:
    return ranking.why_not(found, Layout(layout))


def test_why_tells_the_fastest_the_slower_and_the_too_large() -> None:
    found = plan(MODELS["tiny"], job_of(), MACHINES["slow"], 4)
    assert "is the fastest" in _why(found, str(found.best[0].layout))
    assert "times the step of" in _why(found, "dp=4 microbatch=1 recompute=full")
    small = replace(found.hardware, memory_bytes=found.best[0].peak.total // 100)
    assert "does not fit: needs" in _why(plan(MODELS["tiny"], job_of(), small, 4), "dp=4")


def test_experts_that_may_not_be_given_a_part_of_the_tokens_are_cut_by_tp_alone() -> None:
    model, job = preset("mixtral-8x7b", 4096), Job(train={"global_batch": 4})
    refused = replace(model, expert_refusal="nobody knows")
    for one, cuts in ((model, True), (refused, False)):
        found = [
            layout for layout in candidates.degrees(4, one, thin=MACHINES["a100"]) if layout.tp > 1 and layout.cp == 1
        ]
        assert {layout.sequence_parallel for layout in found} == {False, cuts}
        assert refusal_of(StepSpec.of(one, job, Layout(tp=4, sequence_parallel=cuts))) is None
    assert "nobody knows" in str(refusal_of(StepSpec.of(refused, job, Layout(tp=4, sequence_parallel=True))))


@pytest.mark.parametrize(
    ("words", "precision"),
    [("dp=2", "float32"), ("dp=2 tp=2 zero=2", "bf16"), ("dp=2 pp=2 zero=1 microbatch=1", "float32"), ("dp=4 zero=3", "bf16")],
)  # fmt: skip
def test_the_bound_of_an_update_on_the_host_is_close_and_never_above_what_is_played(words: str, precision: str) -> None:
    given_job = Job(train={"global_batch": 8}, numerics={"precision": precision})
    assert assert_bounded(preset("gpt2", 64), given_job, f"{words} offload", load("h100x8"))[0] > 0.8
