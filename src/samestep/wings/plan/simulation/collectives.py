"""The cost of one collective in seconds, as NCCL and gloo carry it out: latency of the hops, and bytes over the slowest link.

With n ranks on N nodes, S bytes of whole buffer, a link of rate B, and hops of a seconds within a node and A seconds
between nodes (Thakur, Rabenseifner, Gropp 2005, doi:10.1177/1094342005051521; NCCL, src/graph/tuning.cc):

    all_gather, reduce_scatter   L + (n-1)/n S/B     a ring: L = (n-N) a + (N-1) A, linear in ranks
                                                     one rank a node, PAT: L = A log2 N, at PAT_REACHED of the rate
    all_reduce                 2(L + (n-1)/n S/B)    the same ring twice,
                                                     or trees between nodes: L = (n/N-1) a + A log2 N, at TREE_REACHED
    all_to_all                 a + (n-1)/n S/B       every rank sends to all other ranks at once, over its own port
                               (n-1) (a + S/(nB))    by gloo, one after the other
    send, shift                        A + S/B       a recv waits for the send and takes no time itself
    reduce, broadcast            (n-1) (A + S/B)     naive: the root receives or sends whole buffers one by one

so reduce=root moves n times the bytes of a ring over one link. Of what NCCL may choose from the fastest counts, and where a
profile has `ll128_latency_s` it is also tried with these shorter hops and LL128_REACHED of the rate. gloo has only the ring.
An exchange of NCCL is a group of sends and receives, of which its kernel serves as many peers at once as it has channels, times eight
(src/transport/net.cc, maxConcurrentPeers; src/include/channel.h): 256 and more, so the hop counts once, within a node as between nodes.

So the bandwidth that is reached grows with the size of the message and falls with the number of ranks by the latency of
the hops alone. The rate of very large messages itself is not lower on more nodes: for the eight ports of a node it was
measured at 382 GB/s on 4 nodes, 387 on 12 and 370 on 16 (`tests/laws/test_collectives.py` has the sources), and for
messages of 512 MiB on 1,440 ranks at 151 GB/s instead of 406, as 2,878 hops predict.

tp is innermost in the order of ranks, then dp_shard, then dp_replicate, node by node:

    4 ranks a node, dp_replicate=2 dp_shard=4      node 0: 0 1 2 3   node 1: 4 5 6 7
    dp_shard      0 1 2 3 | 4 5 6 7                stride 1, in one node
    dp_replicate  0 4 | 1 5 | 2 6 | 3 7            stride dp_shard, across

A group on several nodes is hierarchical: its g ranks on one node use g network ports at once, so B = min(intra, g x inter).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from samestep.hardware import Hardware, Link
from samestep.program.ops import OpKind
from samestep.program.step import StepSpec

NETWORK_REACHED = 0.75
"""Fraction of the rate of very large messages that those of a step reach. Fitted once, on the published record."""
IN_SWITCH = 4
"""Number of ranks above which the switch sums (measured: H200 and B200, ml-engineering network/README.md)."""
TREE_REACHED, PAT_REACHED, LL128_REACHED = 0.92, 0.75, 0.92
"""Fractions of a ring's rate (NCCL, src/graph/tuning.cc); of LL128's 128 bytes 120 are data."""


class GroupShape(NamedTuple):
    """The spread of a group over nodes: its ranks are on `nodes` nodes, at least `inside` of them on each."""

    num_ranks: int
    nodes: int = 1
    inside: int = 1


@lru_cache(maxsize=2**16)
def collective_s(kind: OpKind, size_bytes: int, group: GroupShape, hardware: Hardware) -> float:
    """Return the predicted seconds of one collective over a group."""
    if group.num_ranks == 1 and kind is not OpKind.SEND:
        return 0.0
    if kind in (OpKind.SEND, OpKind.SHIFT):
        link = hardware.intra if group.nodes == 1 else hardware.inter
        return link.collective_s + link.latency_s + size_bytes / link.bytes_per_s
    if kind in (OpKind.REDUCE, OpKind.BROADCAST):
        far = hardware.intra if group.nodes == 1 else hardware.intra.slower(hardware.inter)
        return far.collective_s + (group.num_ranks - 1) * (far.latency_s + size_bytes / far.bytes_per_s)
    link = _link(group, kind, hardware)
    if kind is OpKind.ALL_TO_ALL:
        return link.collective_s + _exchange_s(size_bytes, group, hardware)
    moved_s = (group.num_ranks - 1) / group.num_ranks * size_bytes / link.bytes_per_s
    passes = 2 if kind is OpKind.ALL_REDUCE else 1
    fastest_s = min(hops_s + moved_s / reached for hops_s, reached in _algorithms(kind, group, hardware))
    return link.collective_s + passes * fastest_s


def _algorithms(kind: OpKind, group: GroupShape, hardware: Hardware) -> Iterator[tuple[float, float]]:
    """Yield the algorithms from which the library may choose: seconds of the hops of one pass, and fraction of the rate."""
    near, far = hardware.intra, hardware.inter
    protocols = [(near.latency_s, far.latency_s, 1.0)]
    if near.ll128_latency_s is not None and far.ll128_latency_s is not None:
        protocols.append((near.ll128_latency_s, far.ll128_latency_s, LL128_REACHED))
    for near_s, far_s, reached in protocols:
        yield (group.num_ranks - group.nodes) * near_s + (group.nodes - 1) * far_s, reached
        if hardware.library == "gloo" or group.nodes == 1:
            continue
        if kind is OpKind.ALL_REDUCE:
            chain_s = (group.num_ranks / group.nodes - 1) * near_s
            yield chain_s + math.log2(group.nodes) * far_s, reached * TREE_REACHED
        elif group.inside == 1:
            yield math.log2(group.nodes) * far_s, reached * PAT_REACHED


def _exchange_s(size_bytes: int, group: GroupShape, hardware: Hardware) -> float:
    """Return the seconds of an all_to_all, which sends within the node and over the network at once."""
    near, far = hardware.intra.among(group.inside), hardware.inter
    part = size_bytes / group.num_ranks
    away = group.num_ranks - group.inside if group.nodes > 1 else 0
    here = group.num_ranks - 1 - away
    rounds = here if hardware.library == "gloo" else min(here, 1)
    near_s = rounds * near.latency_s + here * part / near.bytes_per_s
    return max(near_s, away * part / (far.bytes_per_s * _network_efficiency(hardware)) + far.latency_s * bool(away))


def _link(group: GroupShape, kind: OpKind, hardware: Hardware) -> Link:
    """Return the link of a ring over the group, in which every rank of a node adds one port to the network."""
    near, far_bytes_per_s = hardware.intra.among(group.inside), hardware.inter.bytes_per_s
    if kind is OpKind.ALL_REDUCE:
        if near.all_reduce_bytes_per_s and group.inside > IN_SWITCH:
            near = replace(near, bytes_per_s=near.all_reduce_bytes_per_s)
        far_bytes_per_s = hardware.inter.all_reduce_bytes_per_s or far_bytes_per_s
    if group.nodes == 1:
        return near
    return Link(
        latency_s=hardware.inter.latency_s,
        bytes_per_s=min(near.bytes_per_s, far_bytes_per_s * group.inside * _network_efficiency(hardware)),
        collective_s=hardware.inter.collective_s,
    )


def _network_efficiency(hardware: Hardware) -> float:
    """Return the fraction of the network's rate that is reached; a profile without efficiencies has achieved rates."""
    return NETWORK_REACHED if hardware.efficiency and hardware.library == "nccl" else 1.0


def group_of(axis: str, size: int, step: StepSpec, hardware: Hardware) -> GroupShape:
    """Return the spread over nodes of one group of an axis with `size` ranks."""
    per_node, stride = hardware.devices_per_node, step.ranks.stride(axis)
    if axis == "pp":
        # A stage sends to the next one, which is on the same node unless this is the last stage of the node.
        crosses = step.layout.world_size > per_node and (step.stage + 1) * stride % per_node == 0
        return GroupShape(2, 2 if crosses or stride >= per_node else 1)
    if step.layout.world_size <= per_node or per_node % (stride * size) == 0:
        return GroupShape(size, 1, size)
    inside = max(1, per_node // stride)
    nodes = max(2, -(-size // inside))
    return GroupShape(size, nodes, max(1, size // nodes))
