"""The cost of one collective in seconds, as NCCL and gloo carry it out: latency of the hops, and bytes over the slowest link.

With n ranks on N nodes, S bytes of whole buffer, a link of rate B, and hops of a seconds within a node and A seconds
between nodes (Thakur, Rabenseifner, Gropp 2005, doi:10.1177/1094342005051521; NCCL, src/graph/tuning.cc):

    all_gather, reduce_scatter   L + (n-1)/n S/B     a ring: L = (n-N) a + (N-1) A, linear in ranks
                                                     one rank a node, PAT: L = A log2 N, at PAT_REACHED of the rate
    all_reduce                 2(L + (n-1)/n S/B)    the same ring twice,
                                                     or trees between nodes: L = (n/N-1) a + A log2 N, at TREE_REACHED
    all_reduce in switches       L + (1 + 1/n) S/(eB)    NVLS: each rank's switch reads S of every rank once, and writes it once;
                                                     e and L are `switch_sums` and SWITCH_S, whatever the number of ranks
                                 between two nodes S/(g inter) besides, at once: one exchange, where a ring sends 2 (n-1)/n as much
                                 L + S/(g e inter)   SHARP: each port of a node sends 1/g of the buffer up once, and gets it down once
    all_to_all                   (n-1) (a + S/(nB))  every rank sends to every other rank over its own port
    send, shift                        A + S/B       a recv waits for the send and takes no time itself
    reduce, broadcast            (n-1) (A + S/B)     naive: the root receives or sends whole buffers one by one

so reduce=root moves n times the bytes of a ring over one link. Of what NCCL may choose from the fastest counts, and where a
profile has `ll128_latency_s` it is also tried with these shorter hops and LL128_REACHED of the rate. gloo has only the ring.

Where a profile has measured seconds of an all_reduce on as many ranks (`Link.measured_s`), these are taken instead, between two sizes by
a straight line through their logarithms, below the least no longer than that, above the largest at its bandwidth. An all_gather and a
reduce_scatter are one of that ring's two passes, unless switches have summed.

Otherwise the bandwidth that is reached grows with the size of the message and falls with the number of ranks by the latency of
the hops alone: messages of 512 MiB on 1,440 ranks were measured at 151 GB/s instead of 406, as 2,878 hops predict. The rate of very large
messages itself is little lower on more nodes (NETWORK_REACHED): for the eight ports of a node it was measured at 382 GB/s on 4 nodes,
387 on 12 and 370 on 16 of three clusters (`tests/laws/test_collectives.py` has the sources).

tp is innermost in the order of ranks, then dp_shard, then dp_replicate, node by node:

    4 ranks a node, dp_replicate=2 dp_shard=4      node 0: 0 1 2 3   node 1: 4 5 6 7
    dp_shard      0 1 2 3 | 4 5 6 7                stride 1, in one node
    dp_replicate  0 4 | 1 5 | 2 6 | 3 7            stride dp_shard, across

A group on several nodes is hierarchical: its g ranks on one node use g network ports at once, so B = min(intra, g x inter).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from samestep.hardware import Hardware, Link
from samestep.program.ops import OpKind
from samestep.program.step import StepSpec

NETWORK_REACHED = {2: 0.82, 4: 0.79, 8: 0.75}
"""Fraction of a network's rate that messages of a step reach, by the number of nodes. That of eight nodes and more is fitted once, on
the published record; so much more is left on fewer nodes as rings of 8 GB reach on 2 and 4 nodes over what they reach on 8 to 64 (345
and 331 to 317 GB/s without their hops, B200 with 400 Gb/s ports: github.com/togethercomputer/together-dgxc-benchmarking, worklog/)."""
SWITCH_S, NETWORK_SWITCH_S = 23e-6, 31e-6
"""Seconds in which switches of NVLink, and those of a network, have summed a small buffer (NCCL, src/graph/tuning.cc: NVLS and CollNet)."""
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
    link = _link(group, hardware)
    if kind is OpKind.ALL_TO_ALL:
        return link.collective_s + _exchange_s(size_bytes, group, hardware)
    pass_s = _pass_s(kind, size_bytes, group, link, hardware)
    measured = _Measured.of(group, hardware)
    if kind is OpKind.ALL_REDUCE:
        alone_s = link.collective_s + min([2 * pass_s, *_in_switches_s(size_bytes, group, hardware)])
        return measured.seconds(size_bytes, alone_s) if measured else alone_s
    if measured and hardware.intra.switch_sums is None and hardware.inter.switch_sums is None:
        pass_s = max(measured.seconds(size_bytes, link.collective_s + 2 * pass_s) - link.collective_s, 0.0) / 2
    return link.collective_s + pass_s


def _pass_s(kind: OpKind, size_bytes: int, group: GroupShape, link: Link, hardware: Hardware) -> float:
    """Return the seconds of one pass of a collective by the fastest algorithm from which the library may choose."""
    moved_s = (group.num_ranks - 1) / group.num_ranks * size_bytes / link.bytes_per_s
    return min(hops_s + moved_s / reached for hops_s, reached in _algorithms(kind, group, hardware))


def _in_switches_s(size_bytes: int, group: GroupShape, hardware: Hardware) -> Iterator[float]:
    """Yield the seconds of an all_reduce whose sums switches compute, one for each way that the profile has switches for."""
    near, far = hardware.intra, hardware.inter
    inside = group.inside
    if group.nodes == 1:
        if near.switch_sums is not None:
            yield SWITCH_S + _in_node_s(size_bytes, inside, near)
        return
    if near.switch_sums is not None and group.nodes == 2:
        across_s = size_bytes / (inside * _network_bytes_per_s(group, hardware))
        yield SWITCH_S + 2 * far.latency_s + max(_in_node_s(size_bytes, inside, near), across_s)
    if far.switch_sums is None:
        return
    # Within the node each rank is left a part of the sum, and gathers the others' behind it.
    within_s = 2 * (inside - 1) / inside * size_bytes / near.among(inside).bytes_per_s
    across_s = size_bytes / (inside * far.bytes_per_s * far.switch_sums)
    hops_s = 2 * (inside - 1) * near.latency_s + NETWORK_SWITCH_S
    yield hops_s + max(within_s, across_s)


def _in_node_s(size_bytes: int, inside: int, near: Link) -> float:
    """Return the seconds of the bytes that pass the ports of a node whose switches sum and then hand the sum to all."""
    assert near.switch_sums is not None
    return (1 + 1 / inside) * size_bytes / (near.bytes_per_s * near.switch_sums)


class _Measured(NamedTuple):
    """The measured seconds of an all_reduce, by bytes in rising order."""

    sizes: tuple[int, ...]
    times_s: tuple[float, ...]

    @classmethod
    def of(cls, group: GroupShape, hardware: Hardware) -> _Measured | None:
        """Return what a profile has of as many ranks of a node, or of most of several; None where nobody measured."""
        link = hardware.intra if group.nodes == 1 else hardware.inter
        times = link.measured_s.get(group.num_ranks)
        if times is None or (group.nodes > 1 and 2 * group.inside <= hardware.devices_per_node):
            return None
        sizes = sorted(times)
        # A larger message that was measured to take less was disturbed less.
        return cls(tuple(sizes), tuple(itertools.accumulate((times[size] for size in sizes), max)))

    def seconds(self, size_bytes: int, otherwise_s: float) -> float:
        """Return the seconds of so many bytes, which would be `otherwise_s` if nobody had measured."""
        sizes, times_s = self
        if size_bytes < sizes[0]:
            return min(times_s[0], otherwise_s)
        if size_bytes >= sizes[-1]:
            return times_s[-1] * size_bytes / sizes[-1]
        place = bisect.bisect_right(sizes, size_bytes)
        low, high = sizes[place - 1], sizes[place]
        part = math.log(size_bytes / low) / math.log(high / low)
        return times_s[place - 1] * math.pow(times_s[place] / times_s[place - 1], part)


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
    near_s = here * (near.latency_s + part / near.bytes_per_s)
    return max(near_s, away * part / _network_bytes_per_s(group, hardware) + far.latency_s * bool(away))


def _link(group: GroupShape, hardware: Hardware) -> Link:
    """Return the link of a ring over the group, in which every rank of a node adds one port to the network."""
    near = hardware.intra.among(group.inside)
    if group.nodes == 1:
        return near
    return Link(
        latency_s=hardware.inter.latency_s,
        bytes_per_s=min(near.bytes_per_s, group.inside * _network_bytes_per_s(group, hardware)),
        collective_s=hardware.inter.collective_s,
    )


def _network_bytes_per_s(group: GroupShape, hardware: Hardware) -> float:
    """Return the rate of one port to the network in a step, which falls with the number of nodes; what a profile gives by their number
    (`Link.by_ranks`), and one without efficiencies, are achieved rates."""
    link = hardware.inter
    if link.by_ranks or not hardware.efficiency or hardware.library != "nccl":
        return link.among(group.nodes).bytes_per_s
    known = max((count for count in NETWORK_REACHED if count <= group.nodes), default=min(NETWORK_REACHED))
    return link.bytes_per_s * NETWORK_REACHED[known]


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
