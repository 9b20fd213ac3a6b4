"""Seconds of one op, alone on its stream: FLOPs over speed, bytes over bandwidth, alpha-beta for a collective.

With n ranks, S bytes of whole buffer, a link of latency a and bandwidth B (Thakur, Rabenseifner, Gropp 2005,
doi:10.1177/1094342005051521, rings):

    all_gather, reduce_scatter   (n-1) (a + S/(nB))      n-1 hops of one n-th of the buffer
    all_reduce                  2(n-1) (a + S/(nB))      one after the other; towards 2 S/B for many ranks
    reduce, broadcast            (n-1) (a + S/B)         naive: the root takes, or sends, whole buffers one by one

so reduce=root costs n times the bandwidth of a ring. A group whose ranks lie on several nodes runs at the slower link.
Ranks count with dp_shard inside, dp_replicate around it, node by node:

    4 ranks a node, dp_replicate=2 dp_shard=4      node 0: 0 1 2 3   node 1: 4 5 6 7
    dp_shard      0 1 2 3 | 4 5 6 7                stride 1, in one node
    dp_replicate  0 4 | 1 5 | 2 6 | 3 7            stride dp_shard, across

An update reads and writes the master weights and Adam's two states, reads the gradient, and writes the weight's copy
in the compute dtype where there is one.
"""

from __future__ import annotations

from samestep.errors import SamestepError
from samestep.hardware import Hardware, Link
from samestep.program import BYTES_OF, Kind, Op, Program, Step

UPDATE_PASSES = 7
"""Times an update goes over memory for one weight: weight, two states read and written, gradient read."""


def seconds(op: Op, program: Program, hardware: Hardware) -> float:
    """Price one op of the program.

    Raises:
        SamestepError: the hardware has no speed for the op's dtype.
    """
    if op.axis is not None:
        return _collective_s(op, program.axes[op.axis], _link(op.axis, program, hardware))
    if op.kind is Kind.UPDATE:
        return _update_bytes(program.step) / hardware.memory_bytes_per_s
    if not op.flops:
        return 0.0
    if op.dtype not in hardware.flops_per_s:
        known = ", ".join(hardware.flops_per_s)
        raise SamestepError(f"hardware {hardware.name} has no flops_per_s for {op.dtype}; it has {known}")
    return op.flops / hardware.flops_per_s[op.dtype]


def _collective_s(op: Op, num_ranks: int, link: Link) -> float:
    hops = num_ranks - 1
    if op.kind in (Kind.REDUCE, Kind.BROADCAST):
        return hops * (link.latency_s + op.size_bytes / link.bytes_per_s)
    one_way_s = hops * (link.latency_s + op.size_bytes / num_ranks / link.bytes_per_s)
    return 2 * one_way_s if op.kind is Kind.ALL_REDUCE else one_way_s


def _link(axis: str, program: Program, hardware: Hardware) -> Link:
    """What the slowest group of an axis runs over."""
    step = program.step
    tp, stage_ranks = step.layout.tp, step.layout.dp * step.layout.tp
    strides = {
        "dp_shard": tp,
        "dp_intra": tp,
        "dp_replicate": tp * step.layout.dp_shard,
        "dp_inter": step.ranks_per_node,
        "pp": stage_ranks,
        "tie": stage_ranks * (step.layout.pp - 1),
    }
    stride = strides.get(axis, 1)
    block = stride * program.axes[axis]  # ranks from one set of interleaved groups to the next
    in_node = step.layout.world_size <= hardware.devices_per_node or hardware.devices_per_node % block == 0
    return hardware.intra if in_node else hardware.intra.slower(hardware.inter)


def _update_bytes(step: Step) -> int:
    """Bytes that the optimizer of one rank touches: of all weights, or of its share of them."""
    master = BYTES_OF[step.master_dtype]
    touched = 0
    for param in step.model.params:
        if param.trainable:
            copied = step.zero < 2 and step.working_dtype(param) != step.master_dtype
            touched += param.numel * (UPDATE_PASSES * master + copied * BYTES_OF[step.compute_dtype])
    return -(-touched // step.layout.dp_shard)  # dp_shard is 1 where nothing is sharded
