"""Tensor parallelism, alone and with every data-axis layout, computes what one device computes, and sends what it says.

float64, 1e-9; perturbed norms and biases, uneven counts of tokens, clipping. Each case holds the ledger too. The rows of
known silent errors: tied embeddings cut apart, norms of heads without a summed gradient, biases of row cuts added tp
times, a norm that counts replicated weights tp times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from samestep.building.torch_seams import current_backward_id
from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.program.ops import BYTES_OF, OpKind
from samestep.runtime.axes import sequence
from samestep.runtime.ledger import _owners
from samestep.schedules import TaskKind
from samestep.strategies import program_of
from tests.covering import daily
from tests.laboratory import clipped, combinations, make_run, observe, prepared_run, prove, prove_ledger
from tests.models import Tokens
from tests.pool import pool

MODELS = ["llama_even", "llama_tied", "qwen3", "gpt2_even", "attentive", "llama"]
LAYOUTS = [
    "tp=2",
    "tp=2 microbatch=3",
    "tp=2 recompute=full",
    "tp=2 recompute=selective microbatch=4",
    "tp=2 offload",
    "dp=2 tp=2 zero=1 microbatch=2",
    "dp=2 tp=2 zero=3 microbatch=2 accumulate=full",
]
SEQUENCES = ["deep_llama", "deep_qwen3", "deep_gpt2", "deep_gemma", "deep_tied", "parted", "attentive"]
CUT_SEQUENCES = [
    "tp=2 sequence_parallel",
    "tp=2 sequence_parallel recompute=full microbatch=4",
    "tp=2 sequence_parallel recompute=selective",
    "dp=2 tp=2 sequence_parallel zero=3 recompute=full",
]


@pytest.mark.parametrize(
    ("layout", "model"),
    daily(combinations(LAYOUTS, MODELS) + combinations(CUT_SEQUENCES, SEQUENCES), beside_products=True),
)
def test_a_tensor_cut_computes_what_one_device_computes(layout: str, model: str) -> None:
    prove(layout, model)


def test_masks_of_a_cut_sequence_are_those_of_one_device() -> None:
    prove("tp=2 sequence_parallel", "dropping_gpt2")


def test_a_sequence_without_a_tensor_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match="tp=1 cuts none: tp=2 works"):
        pool(2).run(observe, "parted", "dp=2 sequence_parallel", clipped())


def order_in_backward(rank: int, world: int, layout: str, kind: str) -> list[str]:
    """Return, in order, where a sum of a block's input gradients begins and ends, and which weights get gradients."""
    run = prepared_run(rank, world, "llama_even", layout, clipped(steps=1))
    seen: list[str] = []
    block = run.model.get_submodule("model.layers.0")
    for name, param in block.named_parameters():

        def note(_: Any, name: str = name) -> None:
            if current_backward_id() != -1:  # else it is tried on drawn gradients
                seen.append(name.split(".")[-2])

        param.register_post_accumulate_grad_hook(note)

    def noted(send: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            work = send(*args, **named)
            if named.get("async_op") and _owners.names[-1].startswith("model.layers.0."):
                seen.append("begin")
                return Mock(wait=lambda: (work.wait(), seen.append("end")))
            return work

        return call

    module = sequence if kind == "reduce_scatter" else dist
    with patch.object(module, kind, noted(getattr(module, kind))):
        run.step(next(batches(Tokens(), run.job)))
    return seen


@pytest.mark.parametrize(
    ("layout", "kind"), [("tp=2", "all_reduce"), ("tp=2 sequence_parallel recompute=full", "reduce_scatter")]
)
def test_weights_get_their_gradients_while_that_of_their_input_is_summed(layout: str, kind: str) -> None:
    for seen in pool(2).run(order_in_backward, layout, kind):
        waits = [index for index, name in enumerate(seen) if name == "begin"]
        parts = [seen[index : seen.index("end", index) + 1] for index in waits]
        beside = [sorted(part[1:-1]) for part in parts if len(part) > 2]
        assert beside == [["gate_proj", "up_proj"], ["k_proj", "q_proj", "v_proj"]]
        assert sorted(name for name in seen if name.endswith("proj")) == sorted(
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        )


@pytest.mark.nightly  # by default the rows of `test_products.py` in bf16 hold it
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *combinations(["tp=2 recompute=full", "dp=2 tp=2 zero=3 microbatch=2", "tp=2 microbatch=4"], MODELS),
        ("tp=2 sequence_parallel", "deep_gpt2"),
        ("tp=2 sequence_parallel", "parted"),
        ("tp=4", "qwen3"),
    ],
)
def test_the_ledger_holds_in_mixed_precision(layout: str, model: str) -> None:
    prove_ledger(layout, model)


@pytest.mark.parametrize("model", [pytest.param("llama_even", marks=pytest.mark.nightly), "gpt2_even", "attentive"])
def test_four_ranks_cut_one_model(model: str) -> None:
    if model == "gpt2_even":
        with pytest.raises(LayoutError, match=r"tp=4 does not divide the 2 groups of .*c_attn.*; tp=2 does"):
            pool(4).run(observe, model, "tp=4", clipped())
        return
    prove("tp=4", model)


SHARED = [
    "tp=4",
    "tp=4 sequence_parallel recompute=selective",
    "tp=4 recompute=full microbatch=4",
]
SHARED_BY_EIGHT = ["dp=2 tp=4 zero=3 microbatch=2", "dp=2 tp=4 zero=1", "tp=4 pp=2 microbatch=2"]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *daily(combinations(SHARED, ["qwen3"])),
        *(
            pytest.param(layout, model, marks=pytest.mark.nightly)
            for layout in SHARED
            for model in ("qwen2", "llama_tied")
        ),
        *(pytest.param(layout, "deep_qwen3", marks=pytest.mark.nightly) for layout in SHARED_BY_EIGHT),
        pytest.param("tp=4 cp=2", "many_heads", marks=pytest.mark.nightly),
    ],
)
def test_ranks_share_heads_of_keys_and_values(layout: str, model: str) -> None:
    """Query heads on four ranks, two heads of keys and values: two ranks compute on each of these."""
    prove(layout, model)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    run = make_run(0, 1, "deep_llama", "dp=1", clipped())
    run.prepare(next(batches(Tokens(), clipped())).samples([0]))
    with pytest.raises(LayoutError, match=r"tp=8 does not divide the 4 groups of .*q_proj.weight; tp=2 or 4 does"):
        program_of(run.assembly.model.spec, clipped(), Layout.parse("tp=8"))


@pytest.mark.parametrize(
    "layout", ["tp=2 sequence_parallel microbatch=2", "dp=2 tp=2 zero=3 sequence_parallel microbatch=2"]
)
def test_gradients_of_parts_are_summed_once_a_step(layout: str) -> None:
    run = make_run(0, 1, "llama_even", "dp=1", clipped())
    run.prepare(next(batches(Tokens(), clipped())).samples([0]))
    program = program_of(run.assembly.model.spec, clipped(), Layout.parse(layout))
    sums = [(task.kind, op) for task, op in program.ops() if op.kind is OpKind.ALL_REDUCE and op.axis == "tp"]
    in_blocks = [(kind, op) for kind, op in sums if op.owner.startswith(("bucket", "model.layers"))]
    assert program.step.num_microbatches > 1
    assert {kind for kind, _ in in_blocks} == {TaskKind.UPDATE}
    between = sum(param.numel for param in program.step.model.params if param.partial == "sequence")
    ranks = program.step.layout.num_shards
    assert sum(op.size_bytes for _, op in in_blocks) == between // ranks * BYTES_OF[program.step.master_dtype]


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["deep_qwen3", "deep_llama"])
def test_parts_of_gradients_that_are_computed_later(model: str) -> None:
    prove("tp=4 pp=2 schedule=zero-bubble microbatch=2", model)
    prove("dp=2 tp=2 pp=2 schedule=zero-bubble sequence_parallel microbatch=2", model)
