"""Laws of MLPs in chunks of tokens: what a block keeps and works on, what its products cost, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from samestep.enumeration import candidates
from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.live_bytes import saved_bytes
from samestep.memory.memory_use import during_step
from samestep.models import decoder_spec
from samestep.models.decoder import Decoder
from samestep.models.layer_parts import MoveKind, TokenMove
from samestep.models.spec import MaskSpec, ModelSpec
from samestep.program.ops import OpKind
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.strategies import program_of
from samestep.strategies.chunked_mlp import chunked_parts
from samestep.wings.plan.bounds.layer_costs import Prices
from samestep.wings.plan.bounds.least_memory import Needs
from samestep.wings.plan.bounds.step_time import Bounds
from samestep.wings.plan.simulation.simulate import predict
from tests.laws.models import MACHINES, assert_bounded

LENGTH, HIDDEN, WIDE, BLOCKS = 512, 64, 256, 3
BYTES = 2


def model(*, gated: bool = True, **others: object) -> ModelSpec:
    shape = Decoder(
        layers=BLOCKS, hidden=HIDDEN, heads=4, kv_heads=2, vocab=64, sequence=LENGTH, gated=gated, intermediate=WIDE,
        fused=True, **others,  # type: ignore[arg-type]
    )  # fmt: skip
    return decoder_spec.spec(shape, "decoder")


def job() -> Job:
    return Job(train={"global_batch": 8}, numerics={"precision": "bf16"})


def program(layout: str, of: ModelSpec | None = None) -> Program:
    return program_of(of or model(), job(), Layout(layout))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("words", ["dp=8", "dp=4 microbatch=1", "dp=2 cp=2 zero=3 microbatch=2"])
def test_a_block_keeps_less_by_what_its_mlp_makes(words: str, gated: bool) -> None:
    whole, chunked = (program(f"{words} {more}", model(gated=gated)) for more in ("", "mlp_chunk=64"))
    step = whole.step
    tokens = LENGTH * step.microbatch_samples // step.layout.cp
    for before, after in zip(whole.step.model.layers, chunked.step.model.layers, strict=True):
        kept = saved_bytes(whole.step, before).after_forward - saved_bytes(chunked.step, after).after_forward
        assert kept == (tokens * WIDE * (3 if gated else 2) * BYTES if before.is_block else 0)


def test_a_chunk_alone_works_on_what_an_mlp_makes() -> None:
    held = {
        chunk: saved_bytes(made.step, made.step.model.layers[1])
        for chunk in (32, 64, 128, LENGTH, 2 * LENGTH)
        for made in [program(f"dp=8 mlp_chunk={chunk}")]
    }
    of_token = 3 * WIDE + 2 * WIDE  # what it keeps, and the gradients of that
    assert held[64].working - held[32].working == 32 * of_token * BYTES
    assert held[LENGTH] == held[2 * LENGTH], "a micro-batch has no more tokens"
    assert held[64].working_fixed == held[64].working - 2 * LENGTH * HIDDEN * BYTES - _of_attention_beyond(
        held[64].working
    )


def _of_attention_beyond(working: int) -> int:
    """Return by how much the rest of the block works on more than the gradients of its MLP's input and output."""
    return max(0, LENGTH * (HIDDEN + 2 * HIDDEN + 2 * HIDDEN // 2) - 2 * LENGTH * HIDDEN) * BYTES if working else 0


def test_each_product_of_an_mlp_is_computed_once_more_and_nothing_else_is_sent() -> None:
    whole, chunked = (program(f"dp=2 zero=3 microbatch=1 {more}") for more in ("", "mlp_chunk=64"))
    assert whole.ledger() == chunked.ledger()
    more = 2 * LENGTH * HIDDEN * WIDE * 3
    for (_, before), (_, after) in zip(whole.ops(), chunked.ops(), strict=True):
        is_more = before.kind is OpKind.BACKWARD and before.owner.startswith("model.layers")
        assert after.flops - before.flops == (more if is_more else 0)


def test_weight_gradients_of_chunks_come_with_the_backward() -> None:
    whole, chunked = (program(f"pp=3 schedule=zero-bubble microbatch=1 {more}") for more in ("", "mlp_chunk=64"))
    deferred = [sum(op.flops for _, op in made.ops() if op.kind is OpKind.WEIGHT) for made in (whole, chunked)]
    assert deferred[0] - deferred[1] == 8 * 2 * LENGTH * HIDDEN * WIDE * 3


@pytest.mark.parametrize("words", ["dp=8", "dp=8 recompute=full", "dp=4 cp=2 zero=3 microbatch=1 recompute=offload"])
def test_it_costs_time_and_saves_memory_and_bounds_hold(words: str) -> None:
    hardware, of = MACHINES["slow"], model()
    whole, chunked = (predict(of, job(), Layout(f"{words} {more}"), hardware) for more in ("", "mlp_chunk=64"))
    assert chunked.step_s > whole.step_s
    assert chunked.peak.total < whole.peak.total
    assert_bounded(of, job(), f"{words} mlp_chunk=64", hardware)
    step = StepSpec.of(of, job(), Layout(f"{words} mlp_chunk=64"), hardware.devices_per_node)
    prices = Prices(of, job(), hardware)
    assert Bounds(prices).least_s([step], [step.layout]) <= chunked.step_s * (1 + 1e-9)
    assert (needs := Needs(prices, 2)).stages_bytes(step, needs.stages(step)) <= chunked.peak.total * (1 + 1e-9)


def test_long_samples_alone_have_the_word_in_a_plan() -> None:
    for length in (candidates.LONG_SAMPLE // 2, candidates.LONG_SAMPLE):
        of = replace(model(), length=length)
        assert (candidates.mlp_chunks(Layout(), of) != (None,)) == (length == candidates.LONG_SAMPLE)
        assert candidates.mlp_chunks(Layout(tp=2), of) == (None,)


@pytest.mark.parametrize(
    ("words", "of", "text"),
    [
        ("tp=2 mlp_chunk=64", {}, "tp=2 cuts the inner part of an MLP already"),
        ("dp=2 mlp_chunk=64", {"attention": "plain"}, "needs blocks that work token by token"),
        ("dp=2 mlp_chunk=64", {"experts": 4, "top_k": 2}, "no part of a block that keeps more than its input"),
    ],
)
def test_what_cannot_be_chunked_is_refused_with_what_works(words: str, of: dict[str, object], text: str) -> None:
    with pytest.raises(LayoutError, match=f"{text}.*Use a layout without mlp_chunk"):
        program(words, model(**of))  # type: ignore[arg-type]


def test_a_part_that_computes_a_token_of_others_or_draws_a_mask_is_computed_at_once() -> None:
    of = model()
    (block, *_), owner = [layer for layer in of.layers if layer.is_block], "model.layers.0.mlp"
    assert [part.owner for part in chunked_parts(of, block)] == [owner]
    move = TokenMove(owner=f"{owner}.mix", number=0, kind=get_args(MoveKind)[0], dim=1, left=1, right=0)
    mask = MaskSpec(owner=f"{owner}.dropout", entry=0, draw=0, shape=(LENGTH, HIDDEN))
    assert chunked_parts(of, replace(block, token_moves=(move,))) == ()
    assert chunked_parts(replace(of, masks=(mask,)), block) == ()


def test_peaks_of_long_samples_fall_by_most_of_an_mlp() -> None:
    whole, chunked = (during_step(program(f"dp=8 {more}")) for more in ("", "mlp_chunk=16"))
    assert whole.activations - chunked.activations > 0.9 * BLOCKS * LENGTH * WIDE * 3 * BYTES
