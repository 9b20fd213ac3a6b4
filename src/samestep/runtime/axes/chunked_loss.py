"""Logits and cross entropy in chunks of tokens (twin of `strategies/chunked_loss.py`, which has the mathematics).

The head of the model returns logits that are not made yet (`tracing/pending_logits.py`); the loss makes them, a chunk at a time. Where
tp cuts the vocabulary, each chunk's largest logits and sums are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.chunked_cross_entropy import Chunking
from samestep.building.loss import RunFunction
from samestep.program.program import Program
from samestep.runtime.axes.tensor import cuts_logits
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.tracing.pending_logits import PendingHead


def pending_of(
    model: nn.Module, program: Program, mesh: Mesh, run: RunFunction
) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes the context of a forward without logits, on the stage that has the head; elsewhere it does nothing.

    `run` calls the functions of a chunk.
    """
    head, chunk = program.step.model.layers[-1].head, program.step.layout.loss_chunk
    is_here = not program.chunks or program.chunks[-1].stop == len(program.step.model.layers)
    if head is None or chunk is None or not is_here:
        return nullcontext
    module = model.get_submodule(head.owner)
    assert isinstance(module, nn.Linear), "another head is refused"
    return PendingHead(module, _chunking_of(program, mesh, chunk, run)).pending


def _chunking_of(program: Program, mesh: Mesh, tokens: int, run: RunFunction) -> Chunking:
    """Return how this rank computes logits in chunks of `tokens`, over the ranks of `tp` where these cut the
    vocabulary."""
    if not cuts_logits(program):
        return Chunking(tokens, run=run)
    group = mesh.groups["tp"]

    def reduce(values: Tensor, held: str) -> None:
        op = dist.ReduceOp.MAX if held == "largest" else dist.ReduceOp.SUM
        with owned(f"loss.{held}"):
            dist.all_reduce(values, op=op, group=group)

    return Chunking(tokens, dist.get_world_size(group), dist.get_rank(group), reduce, run)
