"""Laws of the ring: every pair of tokens is computed once, by ranks that have equal work, and what passes is what is listed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import LayoutError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.live_bytes import saved_bytes
from samestep.models import decoder_spec
from samestep.models.decoder import Decoder
from samestep.models.spec import ModelSpec
from samestep.program.ops import BYTES_OF, OpKind
from samestep.program.program import Program
from samestep.program.ring_visits import SlicePlacement, source_at, visit
from samestep.strategies import program_of
from samestep.strategies.context import attention_ranks, exchange_of, placement_of
from samestep.wings.plan.simulation.cost import seconds
from tests.laws.models import LAW, MACHINES

HEADS, LENGTH, WIDTH = 8, 64, 16


def model(kv_heads: int = 2, length: int = LENGTH) -> ModelSpec:
    shape = Decoder(
        layers=3, hidden=HEADS * WIDTH, heads=HEADS, kv_heads=kv_heads, vocab=256, sequence=length, gated=True
    )
    return decoder_spec.spec(shape, "decoder")


def program(layout: str, kv_heads: int = 2, precision: str = "bf16") -> Program:
    job = Job(train={"global_batch": 8}, numerics={"precision": precision})
    return program_of(model(kv_heads), job, Layout(layout))


def placements() -> st.SearchStrategy[SlicePlacement]:
    return st.builds(
        lambda degree, each, may_split: SlicePlacement.of(degree * each, degree, may_split=may_split),
        st.integers(1, 6), st.integers(1, 6), st.booleans(),
    )  # fmt: skip


@LAW
@given(placements())
def test_every_token_has_one_rank(placement: SlicePlacement) -> None:
    held = [token for rank in range(placement.degree) for run in placement.runs(rank) for token in run]
    assert sorted(held) == [*range(placement.length)]
    for rank in range(placement.degree):
        mine = [token for run in placement.runs(rank) for token in run]
        assert mine == sorted(mine)
        assert len(mine) == placement.size


@LAW
@given(placements(), st.booleans())
def test_every_pair_that_is_seen_is_computed_once(placement: SlicePlacement, is_causal: bool) -> None:
    found: Counter[tuple[int, int]] = Counter()
    for rank in range(placement.degree):
        mine = [token for run in placement.runs(rank) for token in run]
        sources = [source_at(hop, rank, placement.degree) for hop in range(placement.degree)]
        assert sorted(sources) == [*range(placement.degree)]
        assert sources[0] == rank
        for source in sources:
            theirs = [token for run in placement.runs(source) for token in run]
            seen = visit(placement, rank, source, is_causal=is_causal)
            if seen is None:
                continue
            queries, keys = [*range(*seen.queries.indices(len(mine)))], [*range(*seen.keys.indices(len(theirs)))]
            for query, key in itertools.product(queries, keys):
                if not seen.is_causal or key <= query:
                    found[mine[query], theirs[key]] += 1
    everything = itertools.product(range(placement.length), repeat=2)
    assert found == Counter((query, key) for query, key in everything if key <= query or not is_causal)


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_ranks_with_a_head_and_a_tail_have_equal_work_at_every_hop(degree: int) -> None:
    placement = SlicePlacement.of(8 * degree, degree, may_split=True)
    assert placement.is_head_tail
    for rank in range(degree):
        for hop in range(1, degree):
            seen = visit(placement, rank, source_at(hop, rank, degree), is_causal=True)
            assert seen is not None
            assert not seen.is_causal
            area = (seen.queries.stop - seen.queries.start) * (seen.keys.stop - seen.keys.start)
            assert area * 2 == placement.size**2


def test_what_comes_next_is_what_the_rank_before_had() -> None:
    for degree, rank, hop in itertools.product([2, 3, 5], range(5), range(4)):
        if rank < degree:
            assert source_at(hop + 1, rank, degree) == source_at(hop, (rank - 1) % degree, degree)


@LAW
@given(
    cp=st.sampled_from([2, 4, 8, 16, 32]),
    rest=st.sampled_from(["", "dp=2", "dp=2 zero=3", "tp=2", "recompute=full", "recompute=selective", "microbatch=2"]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    precision=st.sampled_from(["bf16", "float32", "float64"]),
)
def test_keys_and_values_pass_once_forward_and_once_backward(cp: int, rest: str, kv_heads: int, precision: str) -> None:
    if "tp" in rest and kv_heads == 1:
        return
    made = program(f"cp={cp} exchange=ring {rest}", kv_heads, precision)
    step = made.step
    sent = [op for _, op in made.ops() if op.kind is OpKind.SHIFT]
    assert not [op for _, op in made.ops() if op.kind is OpKind.ALL_TO_ALL]
    forwards = 3 if "recompute" in rest else 2
    of_gradients = [op for op in sent if op.owner.endswith("_gradient")]
    assert len(of_gradients) == (cp - 1) * 3 * step.num_microbatches
    assert len(sent) - len(of_gradients) == forwards * (cp - 1) * 3 * step.num_microbatches
    numel = 2 * step.microbatch_samples * LENGTH // cp * (kv_heads // step.layout.tp) * WIDTH
    for op in sent:
        summed = op in of_gradients and precision == "bf16"
        assert op.size_bytes == numel * BYTES_OF["float32" if summed else step.compute_dtype]
        assert op.axis == "cp"


@pytest.mark.parametrize(
    ("layout", "found"), [("cp=4", "heads"), ("cp=4 exchange=ring", "ring"), ("cp=16", "ring"), ("cp=8 tp=2", "ring")]
)
def test_heads_are_exchanged_where_the_degree_divides_them(layout: str, found: str) -> None:
    assert exchange_of(model(), Layout(layout)) == found


def test_causal_models_hold_heads_and_tails_where_these_divide_the_tokens() -> None:
    ring = Layout("cp=4 exchange=ring")
    assert placement_of(model(), ring, 64, None).is_head_tail
    assert not placement_of(model(), ring, 36, None).is_head_tail
    assert not placement_of(model(), Layout("cp=4"), 64, None).is_head_tail


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("cp=3 exchange=ring", "cp=3 does not divide the 64 tokens into slices of 2 tokens or more. Use cp=2 or 4"),
        ("cp=64", "cp=64 does not divide the 64 tokens into .*. Use cp=32"),
        ("cp=16 exchange=heads", "cp=16 does not divide the 64 tokens and 8 heads .*. Use cp=2 or 4 or 8, or exchange=ring"),
    ],
)  # fmt: skip
def test_a_degree_that_does_not_divide_the_tokens_is_refused(layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        program(layout)


def test_the_word_is_read_and_written() -> None:
    layout = Layout("cp=2 exchange=ring tp=2")
    assert str(layout) == "dp=1 tp=2 cp=2 exchange=ring"
    assert Layout(str(layout)) == layout
    assert str(Layout("cp=2")) == "dp=1 cp=2"
    with pytest.raises(LayoutError, match="exchange=rings must be one of auto, heads, ring, hybrid"):
        Layout("cp=2 exchange=rings")


def _exposed(layout: str, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of a shift that a step waits for, without and with the attention beside it."""
    made = program(layout)
    op = next(op for _, op in made.ops() if op.kind is OpKind.SHIFT)
    return seconds(op.but(beside=()), made, hardware), seconds(op, made, hardware)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_slices_of_slices_keep_and_send_a_part_of_a_slice(recompute: str) -> None:
    """Of `tp` with a cut sequence each rank of a ring keeps 1/cp of every block, and gathers and scatters 1/cp."""
    whole, mine = (
        program(f"tp=2 sequence_parallel recompute={recompute} {rest}") for rest in ("", "cp=4 exchange=ring")
    )
    for before, after in zip(whole.step.model.layers, mine.step.model.layers, strict=True):
        if before.is_block:
            kept, ours = (saved_bytes(made.step, layer) for made, layer in ((whole, before), (mine, after)))
            # A ring's attention has a backward of its own, and keeps what that needs behind its forward: it is repeated.
            attended = sum(one.result_elements for one in before.products if one.is_attention)
            again = attended * whole.step.microbatch_samples * 2 if recompute == "selective" else 0
            assert (ours.after_forward * 4, ours.in_backward * 4) == (kept.after_forward - again, kept.in_backward)
    sent, ours_sent = (
        [
            (op.kind, op.owner, op.size_bytes)
            for _, op in made.ops()
            if op.axis == "tp" and op.kind in (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER)
        ]
        for made in (whole, mine)
    )
    assert sent
    assert [(kind, owner, size * 4) for kind, owner, size in ours_sent] == sent


def test_a_slice_that_cannot_be_cut_once_more_is_refused() -> None:
    job, layout = Job(train={"global_batch": 8}), Layout("tp=2 sequence_parallel cp=2 exchange=ring")
    with pytest.raises(
        LayoutError, match=r"tp=2 does not divide the 5 tokens of a slice that cp=2 leaves .*. Use 8 tokens"
    ):
        program_of(model(length=10), job, layout)


@pytest.mark.parametrize("where", sorted(MACHINES))
def test_a_shift_is_hidden_by_the_attention_beside_it(where: str) -> None:
    alone, exposed = _exposed("cp=4 exchange=ring", MACHINES[where])
    if MACHINES[where].overlap:
        assert exposed < alone or alone == 0.0
    else:
        assert exposed == alone


@LAW
@given(
    heads=st.sampled_from([1, 2, 3, 4]),
    ring=st.sampled_from([1, 2, 3, 4]),
    part=st.integers(1, 4),
    may_split=st.booleans(),
)
def test_ranks_of_a_group_hold_equal_parts_of_what_a_rank_of_the_ring_has(
    heads: int, ring: int, part: int, may_split: bool
) -> None:
    placement = SlicePlacement.of(2 * heads * ring * part, heads * ring, may_split=may_split, heads=heads)
    held = [[token for run in placement.runs(rank) for token in run] for rank in range(placement.degree)]
    assert sorted(token for tokens in held for token in tokens) == [*range(placement.length)]
    assert {len(tokens) for tokens in held} == {placement.size}
    for group in range(ring):
        together = [token for tokens in held[group * heads : (group + 1) * heads] for token in tokens]
        assert together == [token for run in placement.ring.runs(group) for token in run]


@pytest.mark.parametrize(
    ("layout", "per_node", "found"),
    [
        ("cp=8", 8, (8, 1)),
        ("cp=16 exchange=hybrid", 8, (8, 2)),
        ("cp=16 exchange=hybrid", 4, (4, 4)),
        ("cp=8 tp=2 exchange=hybrid", 8, (4, 2)),
    ],
)
def test_heads_are_exchanged_within_a_node(layout: str, per_node: int, found: tuple[int, int]) -> None:
    ranks = attention_ranks(model(), Layout(layout), per_node)
    assert ranks[:2] == found


def test_a_hybrid_sends_two_messages_of_heads_and_those_of_its_ring() -> None:
    made = program("cp=8 exchange=hybrid dp=1 tp=2")
    kinds = Counter((op.kind, op.axis) for _, op in made.ops() if op.axis in ("cp_heads4", "cp_ring4", "cp"))
    # forward and backward of three blocks; of keys and values one shift there, one back, and one of their gradients
    assert kinds == {(OpKind.ALL_TO_ALL, "cp_heads4"): 2 * 2 * 3, (OpKind.SHIFT, "cp_ring4"): (1 + 1 + 1) * 3}
    assert made.axes["cp_heads4"] * made.axes["cp_ring4"] == made.axes["cp"] == 8
    with pytest.raises(LayoutError, match=r"no number of ranks between 1 and 2 divides .*Use .*exchange=ring"):
        program("cp=2 exchange=hybrid")
