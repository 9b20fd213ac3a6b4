"""Laws of slices: what is exchanged, what is divided, which degrees are refused, over which ranks gradients are summed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.live_bytes import saved_bytes
from samestep.memory.memory_use import at_rest, over_step
from samestep.models import decoder_spec
from samestep.models.decoder import Decoder
from samestep.models.spec import ModelSpec
from samestep.program.ops import BYTES_OF, OpKind
from samestep.program.program import Program
from samestep.strategies import program_of
from samestep.strategies.context import num_sent_heads
from tests.laws.models import LAW

HEADS, LENGTH, WIDTH = 8, 64, 16


def model(kv_heads: int = 2) -> ModelSpec:
    shape = Decoder(
        layers=3, hidden=HEADS * WIDTH, heads=HEADS, kv_heads=kv_heads, vocab=256, sequence=LENGTH, gated=True
    )
    return decoder_spec.spec(shape, "decoder")


def program(layout: str, kv_heads: int = 2) -> Program:
    job = Job(train={"global_batch": 8}, numerics={"precision": "bf16"})
    return program_of(model(kv_heads), job, Layout(layout))


@LAW
@given(
    cp=st.sampled_from([2, 4, 8]),
    rest=st.sampled_from(["", "dp=2", "dp=2 zero=3", "tp=2", "recompute=full", "recompute=selective", "microbatch=2"]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
)
def test_every_attention_exchanges_four_tensors_in_two_messages_each_way(cp: int, rest: str, kv_heads: int) -> None:
    if "tp" in rest and (kv_heads == 1 or cp == 8):
        return
    made = program(f"cp={cp} {rest}", kv_heads)
    step = made.step
    tp = step.layout.tp
    repeats = 3 if "recompute" in rest else 2
    sent = [op for _, op in made.ops() if op.kind is OpKind.ALL_TO_ALL]
    assert len(sent) == repeats * 2 * 3 * step.num_microbatches
    tokens = step.microbatch_samples * LENGTH // cp
    for op in sent:
        assert op.axis == "cp"
        whole = HEADS // tp
        of_keys = num_sent_heads(kv_heads // tp, whole, cp)
        heads = whole if op.owner.endswith("output") else whole + 2 * of_keys
        assert op.size_bytes == tokens * heads * WIDTH * BYTES_OF["bfloat16"]
        assert whole % cp == of_keys % cp == 0


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_work_and_activations_of_blocks_and_head_are_divided(cp: int) -> None:
    whole, mine = program("dp=1"), program(f"cp={cp}")
    for before, after in zip(whole.step.model.layers[1:], mine.step.model.layers[1:], strict=True):
        assert after.forward_flops * cp == before.forward_flops
        twice = sum(exchange.elements for exchange in before.exchanges if exchange.is_kept)  # once sent, once come back
        assert after.saved_elements * cp == before.saved_elements + twice
        assert after.output_elements * cp == before.output_elements
        wanted = saved_bytes(whole.step, replace(before, saved_elements=before.saved_elements + twice))
        assert wanted == tuple(size * cp for size in saved_bytes(mine.step, after))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_summed_over_slices_as_over_samples(zero: int) -> None:
    """To weights, gradients and optimizer, ranks of `cp` are ranks of the data axis."""
    sliced, plain = program(f"dp=2 cp=2 zero={zero}"), program(f"dp=4 zero={zero}")
    for rank in range(4):
        assert at_rest(sliced, rank=rank) == at_rest(plain, rank=rank)
    for axis in ("dp_replicate", "dp_shard"):
        assert sliced.ledger().get(axis) == plain.ledger().get(axis)
    assert {axis: size for axis, size in sliced.axes.items() if axis != "cp"} == plain.axes


@given(heads=st.sampled_from([1, 2, 3, 4, 6, 12]), degree=st.sampled_from([2, 3, 4, 6, 12]))
def test_heads_are_repeated_until_every_rank_has_those_of_its_queries(heads: int, degree: int) -> None:
    """Queries are dealt in runs: head i of 12 reads key head i * heads // 12."""
    queries = 12
    sent = num_sent_heads(heads, queries, degree)
    assert sent % degree == sent % heads == queries % sent == 0
    repeated = [head for head in range(heads) for _ in range(sent // heads)]
    for rank in range(degree):
        mine = repeated[rank * sent // degree : (rank + 1) * sent // degree]
        local = queries // degree
        reads = [mine[i * len(mine) // local] for i in range(local)]
        assert reads == [(rank * local + i) * heads // queries for i in range(local)]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("cp=3", "cp=3 does not divide the 64 tokens and 8 heads into slices of 2 tokens or more. Use cp=2 or 4 or 8$"),
        ("cp=16", "cp=16 does not divide the 64 tokens and 8 heads .*. Use cp=2 or 4 or 8, or exchange=ring"),
        ("cp=8 tp=2", "cp=8 does not divide the 64 tokens and 4 heads that tp=2 leaves a rank .*. Use cp=2 or 4"),
    ],
)
def test_a_degree_that_cuts_through_a_head_is_refused(layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        program(f"{layout} exchange=heads")


def test_the_layout_is_one_line() -> None:
    layout = Layout("dp=2 cp=4 tp=2 zero=3")
    assert (layout.world_size, layout.dp, layout.num_shards, layout.num_replicas) == (16, 2, 8, 1)
    assert Layout(str(layout)) == layout
    assert (Layout("dp=2 cp=4").num_replicas, Layout("cp=4 zero=1").num_shards) == (8, 4)
    with pytest.raises(LayoutError, match="cp=0 must be from 1 to 1048576"):
        Layout("cp=0")


@pytest.mark.parametrize(
    "words", ["cp=2 microbatch=1", "cp=4 zero=3 microbatch=2 recompute=full", "recompute=offload microbatch=1"]
)
def test_what_stands_in_front_of_the_blocks_is_held_whole_until_they_have_run(words: str) -> None:
    made = program(words)
    step, layers = made.step, made.step.model.layers
    whole = layers[0].output_elements * step.microbatch_samples * BYTES_OF["bfloat16"]
    assert layers[0].output_elements == LENGTH * HEADS * WIDTH
    found = {use.peak_at: use.activations for task, use in over_step(made) if task.microbatch == 0}
    kept = [
        saved_bytes(step, layer, step.layout.recompute == "offload" and layer.is_block).after_forward
        for layer in layers
    ]
    leaving = layers[1].input_elements * step.microbatch_samples * BYTES_OF["bfloat16"]
    moved = (
        2 * leaving if step.layout.recompute == "offload" else 0
    )  # the last input, which stays, and the one before it
    assert found["forward:model.layers.2"] == sum(kept[:4]) + whole + moved - leaving * bool(moved)
    assert found["forward:norm+lm_head"] == sum(kept) + leaving * bool(moved)
