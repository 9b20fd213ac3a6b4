"""Data, tensor and pipeline parallelism together (3D), layout `dp=2 tp=2 pp=2 microbatch=2`, on eight ranks.

The ranks are a grid, and each technique acts along one of its axes. Ranks that differ in tp only are neighbours, because they
send the most; ranks that differ in pp only are the furthest apart, because they send the least:

    rank = (pp * DP + dp) * TP + tp

    tp   copy and add within each block          (tensor_parallel.py)
    pp   activations and their gradients         (pipeline.py)
    dp   the sum of gradients, once in a step    (data_parallel.py)

Nothing of the three files changes except for their groups: the three are sums over different indices, and sums commute.
"""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch import nn

from pipeline import Stage, step_of
from tensor_parallel import ParallelBlock
from tiny import SAMPLES, STEPS, TOKENS, batch, build, main, optimizer

DP = TP = PP = 2


def groups(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup, list[int]]:
    """The groups of a rank along tp and dp, and the ranks of its pipeline. All ranks make all groups, in one order."""
    grid = [[[(pp * DP + dp) * TP + tp for tp in range(TP)] for dp in range(DP)] for pp in range(PP)]
    along_tp = [grid[pp][dp] for pp in range(PP) for dp in range(DP)]
    along_dp = [[grid[pp][dp][tp] for dp in range(DP)] for pp in range(PP) for tp in range(TP)]
    made = [
        [(ranks, cast(dist.ProcessGroup, dist.new_group(ranks))) for ranks in rows] for rows in (along_tp, along_dp)
    ]
    tp_group, dp_group = (next(group for ranks, group in rows if rank in ranks) for rows in made)
    return tp_group, dp_group, [(pp * DP + rank // TP % DP) * TP + rank % TP for pp in range(PP)]


def train(rank: int, world: int) -> list[float]:
    assert world == DP * TP * PP
    tp_group, dp_group, pipeline = groups(rank)
    pp, dp, tp = rank // (TP * DP), rank // TP % DP, rank % TP
    model, losses = build(), []
    model.blocks = nn.ModuleList(ParallelBlock(block, tp, TP, tp_group) for block in model.blocks)
    stage = Stage(model, pp, PP)
    adam, count = optimizer(stage.parameters()), SAMPLES * TOKENS
    for step in range(STEPS):
        tokens, labels = (values.chunk(DP)[dp] for values in batch(step))
        adam.zero_grad()
        total = step_of(stage, tokens, labels, count, "1f1b", pipeline, pp)
        for param in stage.parameters():
            dist.all_reduce(param.grad, group=dp_group)
        adam.step()
        if tp != 0:
            total.zero_()  # ranks of tp have computed the same loss: it counts once
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


if __name__ == "__main__":
    main(train, "dp=2 tp=2 pp=2 microbatch=2", ranks=8)
