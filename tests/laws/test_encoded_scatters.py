"""Units that all data ranks shard and scatter encoded: what is refused and what works, and that bounds of the search hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.errors import LayoutError
from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.program.ops import OpKind
from samestep.strategies import program_of
from tests.laws.models import assert_bounded

SIZES = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "sequence": 16, "gated": True, "intermediate": 192}
MODELS = {
    "tied": spec(Decoder(**SIZES, tied=True), "tied"),
    "normed": spec(Decoder(**SIZES, query_norm="head"), "normed"),
    "grouped": spec(Decoder(**SIZES, kv_heads=2), "grouped"),
}


def job_of(codec: str = "bf16", replicas: int = 2) -> Job:
    return Job(train={"global_batch": 16}, numerics={"compression": codec, "replicas": replicas})


@pytest.mark.parametrize(
    ("model", "layout", "why", "works"),
    [
        ("tied", "dp=2 zero=3 microbatch=2", "each of 4 micro-batches", "dp=2 zero=3 microbatch=2 accumulate=full"),
        ("tied", "dp=2 zero=2 microbatch=2", "or zero=1", "dp=2 zero=1 microbatch=2"),
        ("normed", "dp=2 zero=3 tp=2", "self_attn.q_norm.weight", "dp=2 zero=1 tp=2"),
        ("grouped", "dp=2 zero=3 tp=4", "self_attn.k_proj.weight", "dp=2 zero=3 tp=2"),
        ("grouped", "dp=2 zero=2 tp=2 sequence_parallel", "or tp alone", "dp=2 zero=2 tp=2"),
        ("tied", "dp=2 zero=3 pp=2 accumulate=full", "embed_tokens.weight, which several", "dp=2 zero=1 pp=2"),
    ],
)
def test_what_is_refused_says_what_works(model: str, layout: str, why: str, works: str) -> None:
    with pytest.raises(LayoutError, match=why):
        program_of(MODELS[model], job_of(), Layout(layout))
    program_of(MODELS[model], job_of(), Layout(works))


def test_a_rank_makes_one_contribution() -> None:
    with pytest.raises(LayoutError, match=r"each data rank makes one contribution, and .* has 2\. Use dp=4"):
        program_of(MODELS["tied"], job_of(replicas=4), Layout("dp=2 zero=3 accumulate=full"))


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("layout", ["dp=2 zero=2", "dp=2 zero=3 tp=2", "dp=2 zero=3 microbatch=2 accumulate=full"])
def test_codes_take_the_place_of_each_reduce_scatter(layout: str, codec: str) -> None:
    plain, coded = (
        [(task.body, op) for task, op in program_of(MODELS["grouped"], job, Layout(layout)).ops()]
        for job in (Job(train={"global_batch": 16}), job_of(codec))
    )
    swapped = [op.kind is OpKind.ALL_TO_ALL for _, op in coded]
    assert any(swapped)
    assert [(body, op.owner, op.axis) for body, op in coded] == [(body, op.owner, op.axis) for body, op in plain]
    for is_swapped, (_, ours), (_, theirs) in zip(swapped, coded, plain, strict=True):
        if not is_swapped:
            assert ours.size_bytes == theirs.size_bytes
            continue
        assert theirs.kind is OpKind.REDUCE_SCATTER
        assert ours.size_bytes <= theirs.size_bytes * (0.5 if codec == "bf16" else 0.28)


@pytest.mark.parametrize("layout", ["dp=4 zero=2", "dp=4 zero=3", "dp=4 zero=3 microbatch=1 accumulate=full"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_bounds_of_the_search_hold(layout: str, nodes: int) -> None:
    machine = replace(load("a100-80x8"), devices_per_node=4 // nodes)
    assert_bounded(MODELS["tied"], job_of("int8", 4), layout, machine)
