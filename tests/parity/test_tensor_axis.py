"""Tensor parallelism, alone and with every data-axis layout, computes what one device computes, and sends what it says.

float64, 1e-9; perturbed norms and biases, uneven counts of tokens, clipping. Each case holds the ledger too. The rows of
known silent errors: tied embeddings cut apart, norms of heads without a summed gradient, biases of row cuts added tp
times, a norm that counts replicated weights tp times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from samestep.building.torch_seams import current_backward_id
from samestep.datasets import batches
from samestep.errors import LayoutError
from samestep.program.ops import BYTES_OF, OpKind
from samestep.runtime.axes import rank_crossings
from samestep.runtime.ledger import _owners
from samestep.schedules import TaskKind
from tests.laboratory import (
    TOLERANCE,
    assert_same,
    clipped,
    observe,
    on_ranks,
    prepared_run,
    program_in,
    program_traced_in,
    reference,
)
from tests.models import MODELS, Parted, PartedBlock, Tokens
from tests.pool import pool


def test_a_sequence_without_a_tensor_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"tp=1 cuts none. Use tp=2"):
        program_in("dp=2 sequence_parallel", "parted")


def order_in_backward(rank: int, world: int, layout: str, kind: str) -> list[str]:
    """Return, in order, where a sum of a block's input gradients begins and ends, and which weights get gradients."""
    run = prepared_run(rank, world, "llama_even", layout, clipped(steps=1))
    seen: list[str] = []
    block = run.model.get_submodule("model.layers.0")
    for name, param in block.named_parameters():

        def note(_: Any, name: str = name) -> None:
            if current_backward_id() != -1:  # else it is tried on drawn gradients
                seen.append(name.split(".")[-2])

        param.register_hook(note)

    def noted(send: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            work = send(*args, **named)
            if named.get("async_op") and _owners.names[-1].startswith("model.layers.0."):
                seen.append("begin")
                return Mock(wait=lambda: (work.wait(), seen.append("end")))
            return work

        return call

    module = rank_crossings if kind == "reduce_scatter" else dist
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


def test_groups_that_four_ranks_cannot_cut_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"tp=4 does not divide the 2 heads of .*c_attn.*. Use tp=2"):
        program_traced_in("tp=4", "gpt2_even")


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"tp=8 does not divide the 4 heads of .*q_proj.weight. Use tp=2 or 4"):
        program_in("tp=8", "deep_llama")


@pytest.mark.parametrize(
    "layout", ["tp=2 sequence_parallel microbatch=2", "dp=2 tp=2 zero=3 sequence_parallel microbatch=2"]
)
def test_gradients_of_parts_are_summed_once_a_step(layout: str) -> None:
    program = program_in(layout, "llama_even")
    sums = [(task.kind, op) for task, op in program.ops() if op.kind is OpKind.ALL_REDUCE and op.axis == "tp"]
    in_blocks = [(kind, op) for kind, op in sums if op.owner.startswith(("bucket", "model.layers"))]
    assert program.step.num_microbatches > 1
    assert {kind for kind, _ in in_blocks} == {TaskKind.UPDATE}
    between = sum(param.numel for param in program.step.model.params if param.partial == "sequence")
    ranks = program.step.layout.num_shards
    assert sum(op.size_bytes for _, op in in_blocks) == between // ranks * BYTES_OF[program.step.master_dtype]


_products = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)


class KeepingBlock(PartedBlock):
    """A block that checkpoints its own code and keeps the results of its products, whole or in a part."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__(16, 4)
        self.is_whole = is_whole

    def forward(self, x: Tensor) -> Tensor:
        if self.is_whole:
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=_products)
        x = x + self.attention(self.first(x)) * self.gain
        return x + checkpoint(self.fed_forward, x, use_reentrant=False, context_fn=_products)

    def fed_forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mlp(self.second(x)))


class Keeping(Parted):
    def __init__(self, is_whole: bool) -> None:
        super().__init__(blocks=2)
        self.blocks = nn.ModuleList(KeepingBlock(is_whole) for _ in range(2))


MODELS |= {f"keeping {is_whole}": functools.partial(Keeping, is_whole) for is_whole in (True, False)}


@pytest.mark.parametrize("model", ["keeping True", "keeping False"])
def test_products_that_the_models_code_keeps_are_summed_once(model: str) -> None:
    """A kept product that held the sum already would be summed again when its forward is repeated."""
    assert_same(on_ranks("tp=2", observe, model, clipped()), reference(model, clipped()), TOLERANCE)
