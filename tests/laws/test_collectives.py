"""Laws of collectives: no faster than their slowest link, linear in the ranks of a ring, and as fast as was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import hardware
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.presets import preset
from samestep.program.ops import OpKind
from samestep.wings.plan.simulation.collectives import GroupShape, collective_s
from samestep.wings.plan.simulation.simulate import predict
from tests.laws.models import LAW

GPU = hardware.load("a100-80x8")
MACHINES = [GPU, *map(hardware.load, ("h100x8", "v100x8", "cpu-laptop"))]
COLLECTIVES = (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER)
kinds, machines, sizes = st.sampled_from(COLLECTIVES), st.sampled_from(MACHINES), st.integers(0, 2**32)
groups = st.builds(
    lambda nodes, inside: GroupShape(nodes * inside, nodes, inside),
    st.sampled_from((1, 2, 5, 8, 512)),
    st.sampled_from((1, 2, 4, 8)),
)


def passes(kind: OpKind) -> int:
    return 2 if kind is OpKind.ALL_REDUCE else 1


@LAW
@given(st.sampled_from(list(OpKind)), sizes, machines)
def test_a_group_of_one_rank_sends_nothing(kind: OpKind, size_bytes: int, machine: Hardware) -> None:
    if kind is not OpKind.SEND:  # which has a sender and a receiver
        assert collective_s(kind, size_bytes, GroupShape(1), machine) == 0.0


@LAW
@given(kinds, sizes, sizes, groups, machines)
def test_more_bytes_never_take_less_and_two_messages_never_less_than_one(
    kind: OpKind, first: int, second: int, group: GroupShape, machine: Hardware
) -> None:
    one_s, other_s, both_s = (collective_s(kind, size, group, machine) for size in (first, second, first + second))
    assert max(one_s, other_s) <= both_s <= (one_s + other_s) * (1 + 1e-9)


@LAW
@given(kinds, sizes, groups, machines)
def test_no_link_is_faster_than_it_is(kind: OpKind, size_bytes: int, group: GroupShape, machine: Hardware) -> None:
    """Each rank of a ring receives (n-1)/n of the buffer; a node does so through the ports of its ranks."""
    near = machine.intra.all_reduce_bytes_per_s or machine.intra.bytes_per_s
    slowest = near if group.nodes == 1 else min(near, machine.inter.bytes_per_s * group.inside)
    moved = passes(kind) * (group.num_ranks - 1) / group.num_ranks * size_bytes
    assert collective_s(kind, size_bytes, group, machine) >= moved / slowest * (1 - 1e-9)


@LAW
@given(kinds, sizes, st.integers(1, 512), st.sampled_from((1, 2, 4, 8)), machines)
def test_more_nodes_never_take_less(kind: OpKind, size_bytes: int, nodes: int, inside: int, machine: Hardware) -> None:
    fewer_s, more_s = (
        collective_s(kind, size_bytes, GroupShape(count * inside, count, inside), machine)
        for count in (nodes, nodes + 1)
    )
    assert fewer_s <= more_s * (1 + 1e-9)


@LAW
@given(st.sampled_from(COLLECTIVES[1:]), sizes, st.integers(2, 71))
def test_more_ranks_of_a_node_never_take_less(kind: OpKind, size_bytes: int, ranks: int) -> None:
    machine = hardware.load("gb200-nvl72")
    fewer_s, more_s = (collective_s(kind, size_bytes, GroupShape(n, 1, n), machine) for n in (ranks, ranks + 1))
    assert fewer_s <= more_s * (1 + 1e-9)


@LAW
@given(st.sampled_from(COLLECTIVES[1:]), st.integers(2, 512), st.sampled_from((2, 4, 8)))
def test_the_latency_of_a_ring_is_linear_in_ranks(kind: OpKind, nodes: int, inside: int) -> None:
    """Where a node has several ranks all_gather and reduce_scatter have no other choice."""
    hops_s = (nodes * inside - nodes) * GPU.intra.latency_s + (nodes - 1) * GPU.inter.latency_s
    taken_s = collective_s(kind, 0, GroupShape(nodes * inside, nodes, inside), GPU)
    assert taken_s == pytest.approx(GPU.inter.collective_s + hops_s)


@LAW
@given(st.integers(3, 12), st.sampled_from((1, 2, 4, 8)))
def test_the_latency_of_trees_grows_by_a_hop_where_the_nodes_double(power: int, inside: int) -> None:
    for kind in (OpKind.ALL_REDUCE, *[OpKind.ALL_GATHER] * (inside == 1)):
        once_s, twice_s = (
            collective_s(kind, 0, GroupShape(count * inside, count, inside), GPU)
            for count in (2**power, 2 ** (power + 1))
        )
        assert twice_s - once_s == pytest.approx(passes(kind) * GPU.inter.latency_s)


@LAW
@given(sizes, groups, machines)
def test_an_all_reduce_takes_no_longer_than_its_two_parts(
    size_bytes: int, group: GroupShape, machine: Hardware
) -> None:
    parts = sum(collective_s(kind, size_bytes, group, machine) for kind in (OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER))
    assert collective_s(OpKind.ALL_REDUCE, size_bytes, group, machine) <= parts * (1 + 1e-9)


def test_gloo_has_only_rings() -> None:
    machine = hardware.load("cpu-laptop")
    for kind in COLLECTIVES:
        taken_s = collective_s(kind, 0, GroupShape(64, 64, 1), machine)
        assert taken_s == pytest.approx(passes(kind) * 63 * machine.inter.latency_s)


def test_members_of_a_node_leave_it_through_all_its_ports() -> None:
    size_bytes = 2**33
    alone, together = (collective_s(OpKind.ALL_GATHER, size_bytes, GroupShape(8 * n, 8, n), GPU) for n in (1, 8))
    assert alone / together == pytest.approx(8 * (7 / 8) / (63 / 64), rel=0.02)


def test_where_no_switch_joins_the_devices_two_are_slower_than_eight() -> None:
    machine = hardware.load("v100x8")
    busy = {
        n: collective_s(OpKind.ALL_REDUCE, 2**30, GroupShape(n, 1, n), machine) * n / (2 * (n - 1)) for n in (2, 4, 8)
    }
    assert busy[2] > 3 * busy[4] > 3 * busy[8]


@LAW
@given(st.integers(2**16, 2**30), st.integers(1, 8), st.integers(2, 8))
def test_an_exchange_leaves_a_node_by_each_rank_s_own_port(size_bytes: int, inside: int, nodes: int) -> None:
    ranks = inside * nodes
    away = (ranks - inside) / ranks * size_bytes
    time_s = collective_s(OpKind.ALL_TO_ALL, size_bytes, GroupShape(ranks, nodes, inside), GPU)
    assert time_s >= away / GPU.inter.bytes_per_s
    near = collective_s(OpKind.ALL_TO_ALL, size_bytes, GroupShape(ranks, 1, ranks), GPU)
    assert near <= time_s


@LAW
@given(st.integers(2, 64), st.integers(0, 2**30), machines)
def test_an_exchange_waits_for_one_hop_where_all_peers_are_served_at_once(
    ranks: int, size_bytes: int, machine: Hardware
) -> None:
    """Beside a message that takes no time: the hops of an exchange do not add up, but by gloo, which serves one peer after the other."""
    slow = replace(machine, intra=replace(machine.intra, latency_s=machine.intra.latency_s + 1e-3))
    group = GroupShape(ranks, 1, ranks)
    more_s = [collective_s(OpKind.ALL_TO_ALL, size_bytes, group, one) for one in (machine, slow)]
    hops = ranks - 1 if machine.library == "gloo" else 1
    assert more_s[1] - more_s[0] == pytest.approx(hops * 1e-3)


def test_in_the_switch_only_an_all_reduce_is_faster() -> None:
    machine = hardware.load("h200x8")
    size_bytes, group = 2**34, GroupShape(8, 1, 8)
    reduce_s, gather_s = (
        collective_s(kind, size_bytes, group, machine) for kind in (OpKind.ALL_REDUCE, OpKind.ALL_GATHER)
    )
    assert 7 / 4 * size_bytes / reduce_s == pytest.approx(473e9, rel=0.01)  # 480 GB/s measured
    assert 7 / 8 * size_bytes / gather_s == pytest.approx(365e9, rel=0.01)  # 361 GB/s measured


def test_the_weights_of_175_billion_are_not_best_cut_over_4096_devices() -> None:
    """Rings of 4,096 ranks wait for as many hops three times a layer."""
    model, machine = preset("gpt3-175b"), hardware.load("h100x8")
    job = Job(train={"global_batch": 4096}, numerics={"precision": "bf16"})
    rings_s, hybrid_s = (
        predict(model, job, Layout(words), machine).step_s
        for words in (
            "dp=4096 zero=3 recompute=selective",
            "dp_replicate=16 dp_shard=128 tp=2 sequence_parallel zero=3 recompute=selective",
        )
    )
    assert hybrid_s < rings_s


@given(st.sampled_from([16, 64, 512, 4096]), st.integers(20, 33), st.sampled_from([1.0, 1.5, 2.0, 4.0]))
def test_switches_that_sum_between_nodes_hasten_all_reduces_alone(ranks: int, log_bytes: int, factor: float) -> None:
    """SHARP is a word of the link between nodes: an all_reduce is no slower, up to the rate inside a node, and others are the same."""
    plain, group = hardware.load("h100x8"), GroupShape(ranks, ranks // 8, 8)
    sharp = replace(plain, inter=replace(plain.inter, all_reduce_bytes_per_s=factor * plain.inter.bytes_per_s))
    for kind in (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL):
        before_s, after_s = (collective_s(kind, 2**log_bytes, group, one) for one in (plain, sharp))
        assert after_s < before_s if kind is OpKind.ALL_REDUCE and factor > 1 else after_s == before_s
        inside_s = collective_s(kind, 2**log_bytes, GroupShape(8, 1, 8), plain)
        assert after_s > inside_s or kind is not OpKind.ALL_REDUCE


MEASURED = {
    "vTrain (github.com/VIA-Research/vTrain), trace/a100": (
        "a100-80x8", GroupShape(8, 1, 8), {2**20: 93e-6, 2**23: 134e-6, 2**25: 358e-6, 2**27: 1162e-6, 2**30: 8193e-6}, 0.2,
    ),
    "ml-engineering (github.com/stas00/ml-engineering), network/README.md, H200": (
        "h200x8", GroupShape(8, 1, 8), {2**20: 46e-6, 2**22: 68e-6, 2**26: 339e-6, 2**28: 1077e-6, 2**32: 15887e-6}, 0.25,
    ),
    "ml-engineering, B200": (
        "b200x8", GroupShape(8, 1, 8), {2**20: 51e-6, 2**23: 116e-6, 2**26: 293e-6, 2**29: 1364e-6, 2**33: 17916e-6}, 0.4,
    ),
    "CoreWeave (github.com/coreweave/nccl-tests), 12 nodes of 8 H100": (
        "h100x8", GroupShape(96, 12, 8), {2**29: 2985e-6, 2**31: 11163e-6, 2**33: 43980e-6}, 0.15,
    ),
    "CoreWeave, one rack of 72 GB200": (
        "gb200-nvl72", GroupShape(72, 1, 72), {2**29: 1807e-6, 2**31: 5589e-6, 2**33: 20299e-6}, 0.15,
    ),
    "CoreWeave, two racks": (
        "gb200-nvl72", GroupShape(128, 2, 64), {2**29: 2157e-6, 2**31: 6264e-6, 2**34: 42067e-6}, 0.2,
    ),
}  # fmt: skip
"""Source: the machine, the group, seconds of an all_reduce by its bytes, and the part by which it may be missed."""


@pytest.mark.parametrize("source", MEASURED)
def test_the_bandwidth_measured_at_each_size_and_number_of_nodes_is_met(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone on the machine, as a benchmark runs it: at the whole rate of the network."""
    monkeypatch.setattr("samestep.wings.plan.simulation.collectives.NETWORK_REACHED", 1.0)
    name, group, measured, allowed = MEASURED[source]
    for size_bytes, measured_s in measured.items():
        predicted_s = collective_s.__wrapped__(OpKind.ALL_REDUCE, size_bytes, group, hardware.load(name))
        assert predicted_s == pytest.approx(measured_s, rel=allowed)
