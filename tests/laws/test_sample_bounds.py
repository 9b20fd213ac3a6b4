"""Laws of the bounds by which a search leaves degrees closed: of a sample in any micro-batch, and of rings of any length."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from samestep.enumeration import candidates
from samestep.hardware import Hardware, load
from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.models.presets import preset
from samestep.models.spec import ModelSpec
from samestep.program.step import StepSpec
from samestep.strategies import refusal_of
from samestep.wings.plan.bounds.layer_costs import Prices
from tests.laws.models import LAW, MACHINES, MODELS, in_chunks, job_of

_RENTED = {
    name: preset(name, length)
    for name, length in (("gpt3-175b", 2048), ("llama3-8b", 8192), ("mixtral-8x7b", 4096), ("deepseek-v3", 4096))
}


def _drawn_machine(data: st.DataObject) -> Hardware:
    """Return a machine with or without tiles, the rates of whose products may fall again for longer sides."""
    hardware = data.draw(st.sampled_from([load("h100x8"), load("a100-80x8"), *MACHINES.values()]))
    parts = st.floats(0.05, 1.0)
    sides = data.draw(st.sampled_from([{}, *({dtype: {16: 0.3, 100: 0.9, 300: 0.6}} for dtype in ("bf16", "float32"))]))
    link = replace(hardware.inter, latency_s=10 ** data.draw(st.floats(-7, -4)), collective_s=data.draw(parts) * 1e-4)
    return replace(
        hardware, inter=link, efficiency_by_shortest_side=sides, num_units=data.draw(st.sampled_from([0, 5, 132])),
        kernel_s=data.draw(parts) * 1e-5, contention=data.draw(st.sampled_from([1.0, 1.1, 1.4])), overlap=data.draw(st.booleans()),
    )  # fmt: skip


def _drawn_model(data: st.DataObject) -> ModelSpec:
    if data.draw(st.booleans()):
        return data.draw(st.sampled_from([*_RENTED.values(), *MODELS.values()]))
    shape = Decoder(
        layers=data.draw(st.sampled_from([2, 5])), hidden=data.draw(st.sampled_from([48, 64, 264])), heads=4,
        vocab=data.draw(st.sampled_from([333, 512])), sequence=data.draw(st.sampled_from([24, 64, 96])),
        experts=data.draw(st.sampled_from([0, 6, 8])),
    )  # fmt: skip
    return spec(replace(shape, top_k=2) if shape.experts else shape, "drawn")


@LAW
@given(st.data())
def test_no_sample_takes_less_than_the_least_of_a_sample_in_any_micro_batch(data: st.DataObject) -> None:
    model, hardware = _drawn_model(data), _drawn_machine(data)
    given_job = job_of(data.draw(st.integers(1, 200)), data.draw(st.sampled_from(["float32", "bf16"])))
    every = [one for one in candidates.degrees(16, model, thin=hardware) if one.tp <= hardware.devices_per_node]
    degrees = data.draw(st.sampled_from(every))
    assume(refusal_of(StepSpec.of(model, given_job, degrees, hardware.devices_per_node)) is None)
    prices = Prices(model, given_job, hardware)
    again = data.draw(st.sampled_from(candidates.recomputations(model)))
    for step in in_chunks(model, given_job, degrees.but(recompute=again), hardware):
        least = prices.sample_seconds(step)
        samples = data.draw(st.integers(1, given_job.train.global_batch))
        for one, took in zip(least, prices.seconds(step.but(samples=samples)), strict=True):
            assert samples * one.forward_s <= took.forward_s * (1 + 1e-9)
            assert samples * one.backward_s <= took.backward_s * (1 + 1e-9)
        assert prices.sample_s(step) > 0


@LAW
@given(st.data())
def test_ranks_that_cut_a_sequence_more_together_take_no_less_for_a_sample(data: st.DataObject) -> None:
    model, hardware = _drawn_model(data), _drawn_machine(data)
    given_job = job_of(64, data.draw(st.sampled_from(["float32", "bf16"])))
    devices = data.draw(st.sampled_from([64, 48]))
    every = [one for one in candidates.degrees(devices, model, thin=hardware) if one.tp <= hardware.devices_per_node]
    cut = [one for one in every if one.cp > 1]
    assume(cut)
    degrees = data.draw(st.sampled_from(cut))
    prices = Prices(model, given_job, hardware)
    of_all = candidates.less_cut(degrees, model, hardware.devices_per_node)
    steps = [StepSpec.of(model, given_job, one, hardware.devices_per_node) for one in of_all]
    assume(refusal_of(steps[-1]) is None)
    most_s = prices.sample_s(steps[-1]) * degrees.cp
    assert [one.cp for one in of_all] == sorted({one.cp for one in of_all})
    assert (of_all[0].cp, of_all[-1]) == (1, degrees)
    for one, step in zip(of_all, steps, strict=True):
        assert prices.sample_s(step) * one.cp <= most_s * (1 + 1e-9)
        same = (one.pp, one.tp, one.ep, one.sequence_parallel, one.world_size)
        assert same == (degrees.pp, degrees.tp, degrees.ep, degrees.sequence_parallel, degrees.world_size)
