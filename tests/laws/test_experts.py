"""Laws of dealt experts: each lies on one rank of `ep`, rows are neither lost nor sent twice, sums run over holders."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest
from samestep.models.spec import from_json, to_json
from samestep.program.ops import OpKind
from samestep.program.program import Program
from tests.laws.models import LAW, case, dealing, machine

DEGREES = [
    f"{data} ep={ep}"
    for data, ep in product(["dp=4", "dp=8", "dp=8 zero=1", "dp_replicate=2 dp_shard=4 zero=1"], (1, 2, 4))
]


def _ops(program: Program, kind: OpKind, axis: str) -> list[int]:
    return [op.size_bytes for _, op in program.ops() if op.kind is kind and op.axis == axis]


@LAW
@given(st.sampled_from(DEGREES), st.integers(1, 4), st.sampled_from(["none", "selective", "full"]))
def test_every_row_goes_out_and_comes_back(text: str, microbatch: int, recompute: str) -> None:
    model = dealing(rows=6, width=4)
    program = case(model, f"{text} microbatch={microbatch} recompute={recompute}", global_batch=32).program
    step = program.step
    sent = [op for _, op in program.ops() if op.kind is OpKind.ALL_TO_ALL]
    if step.layout.ep == 1:
        assert not sent
        return
    passes = 4 if recompute == "none" else 6  # forward, backward and a repeated forward, each out and back
    rows = [op for op in sent if op.dtype == "float32"]
    assert len(rows) == passes * len(model.layers) * step.num_microbatches
    assert {op.size_bytes for op in rows} == {6 * 4 * 4 * samples for samples in step.microbatch_sizes}
    # Of each dispatch the counts are exchanged once: a repeated forward has them.
    assert len(sent) - len(rows) == len(model.layers) * step.num_microbatches


@LAW
@given(st.sampled_from(DEGREES))
def test_experts_are_summed_by_those_who_hold_them(text: str) -> None:
    program = case(dealing(), text).program
    layout = program.step.layout
    of_experts = [bucket for bucket in program.buckets if bucket.holding.is_expert_sharded]
    assert {m.name for b in of_experts for m in b.members} == {
        p.name for p in program.step.model.params if p.experts and layout.ep > 1
    }
    innermost = layout.dp_shard if layout.zero else layout.dp
    holders = innermost // layout.ep
    assert program.axes.get("dp_expert", 1) == (holders if layout.ep > 1 else 1)
    kind = OpKind.REDUCE_SCATTER if layout.zero else OpKind.ALL_REDUCE
    assert len(_ops(program, kind, "dp_expert")) == (len(of_experts) if holders > 1 else 0)


@LAW
@given(st.sampled_from(["dp=8", "dp_replicate=2 dp_shard=4"]), st.sampled_from([2, 4, 8]), st.sampled_from([2, 3]))
def test_units_of_experts_are_cut_by_those_who_hold_them(data: str, ep: int, zero: int) -> None:
    """All else is cut over the whole of dp_shard; what one rank holds alone is neither gathered nor scattered."""
    text = f"{data} zero={zero} ep={ep}"
    if Layout(text).dp_shard % ep:
        with pytest.raises(LayoutError, match="does not divide dp_shard=4"):
            case(dealing(), text)
        return
    program = case(dealing(), text).program
    layout = program.step.layout
    holders = layout.dp_shard // ep
    of_experts = {unit.name for unit in program.units if unit.shard_axis == "dp_expert"}
    assert len(of_experts) == len(program.step.model.layers)
    for kind in (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER):
        over = {op.axis: op.owner in of_experts for _, op in program.ops() if op.kind is kind}
        assert over == {"dp_shard": False, **({"dp_expert": True} if holders > 1 else {})}
    reduced = {op.owner for _, op in program.ops() if op.kind is OpKind.ALL_REDUCE and op.axis == "dp_replicate"}
    assert (of_experts <= reduced) is (layout.dp_replicate > 1)
    held = sum(at_rest(program, rank=rank).optimizer for rank in range(layout.dp_shard))
    assert held == at_rest(case(dealing(), "dp=1").program).optimizer


@LAW
@given(st.sampled_from(DEGREES))
def test_a_rank_holds_its_part_of_the_experts(text: str) -> None:
    dealt, whole = (case(dealing(), words).program for words in (text, text.rpartition(" ")[0]))
    ep = dealt.step.layout.ep
    experts = sum(p.numel for p in whole.step.model.params if p.experts)
    assert at_rest(dealt).weights == at_rest(whole).weights - 4 * experts * (ep - 1) // ep
    states = [at_rest(dealt, rank=rank).optimizer for rank in range(dealt.step.layout.world_size)]
    everything = 8 * (sum(p.numel for p in whole.step.model.params if not p.experts) + experts)
    copies = dealt.step.layout.dp_replicate if dealt.step.zero else 1
    if dealt.step.zero == 1:
        assert sum(states) == everything * copies


@LAW
@given(st.sampled_from(DEGREES))
def test_reductions_follow_the_exchanges_of_their_layer(text: str) -> None:
    program = case(dealing(), text).program
    for key, ops in program.bodies.items():
        if program.step.ends_gradients(key):
            for before, op in pairwise(ops):
                assert not (op.kind is OpKind.ALL_TO_ALL and before.owner.startswith("bucket"))


def test_a_spec_reads_back() -> None:
    model = replace(dealing(), balanced_experts=8)
    assert from_json(to_json(model)) == model


def test_a_loss_over_the_batch_needs_all_of_it_at_once() -> None:
    model = replace(dealing(), balanced_experts=8)
    assert _ops(case(model, "dp=4 ep=2").program, OpKind.ALL_REDUCE, "world")[0] == 80
    with pytest.raises(LayoutError, match="Use microbatch=2"):
        case(model, "dp=4 microbatch=1")


def test_the_search_deals_experts() -> None:
    from samestep.job import Job
    from samestep.wings.plan.search import plan

    found = plan(dealing(), Job(train={"global_batch": 8}), machine(), 4, top=1000)
    shown, others = ({one.layout.ep for one in some} for some in (found.best, found.rejections))
    assert {2, 4} <= shown
    assert shown | others == {1, 2, 4}
    assert str(Layout("dp=4 ep=2")) == "dp=4 ep=2"
