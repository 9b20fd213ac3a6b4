"""The order of ranks: those of one host are neighbours, by whatever launcher and in whatever order it counts."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.program.ranks import Ranks
from samestep.runtime.processes import rank_order
from samestep.runtime.processes.join import join, leave
from samestep.runtime.processes.rank_order import Numbering, Seat
from tests.pool import Pool, telling
from tests.unit.test_launch import _free_port


@st.composite
def seats(draw: st.DrawFn) -> list[Seat]:
    """Processes on some hosts, in any order, with or without local ranks."""
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    is_told = draw(st.booleans())
    made = [Seat(f"h{host}", local if is_told else -1) for host, count in enumerate(counts) for local in range(count)]
    return draw(st.permutations(made))


@given(seats())
def test_ranks_of_one_host_are_neighbours(given_seats: list[Seat]) -> None:
    found = Numbering.of(given_seats)
    assert sorted(found.ranks) == [*range(len(given_seats))]
    counts = [sum(seat.host == host for seat in given_seats) for host in dict.fromkeys(one.host for one in given_seats)]
    for host in {seat.host for seat in given_seats}:
        theirs = sorted((found.ranks[r], r) for r, seat in enumerate(given_seats) if seat.host == host)
        assert [number - theirs[0][0] for number, _ in theirs] == [*range(len(theirs))]
        assert [found.local_ranks[r] for _, r in theirs] == [*range(len(theirs))]
        locals_of = [given_seats[r].local_rank for _, r in theirs]
        assert locals_of == sorted(locals_of)
    first = next(r for r, number in enumerate(found.ranks) if number == 0)
    assert given_seats[first].host == given_seats[0].host, "the host of rank 0 holds the store"
    assert found.ranks_per_node == (counts[0] if len({*counts}) == 1 else 1)
    text = found.to_text("srun", [f"h{n}" for n in range(len(counts))])
    assert text.startswith(f"{len(given_seats)} ranks by srun, on ")
    assert "\n" not in text


@given(seats())
def test_a_group_in_any_order_is_refused_only_where_ours_keeps_tp_within_hosts(given_seats: list[Seat]) -> None:
    hosts, world = Numbering.of(given_seats).hosts, len(given_seats)
    for tp in (n for n in range(1, world + 1) if world % n == 0):
        layout = Layout(f"dp={world // tp} tp={tp}")

        def leaves(order: Sequence[int], layout: Layout = layout) -> bool:
            groups = Ranks.of(layout).groups("tp") if layout.tp > 1 else ()
            return any(len({order[rank] for rank in group}) > 1 for group in groups)

        if leaves(hosts) and not leaves(sorted(hosts)):
            with pytest.raises(LayoutError, match=f"tp={tp} of layout .* leaves its hosts"):
                rank_order.check(layout, hosts)
        else:
            rank_order.check(layout, hosts)


def _environment_of(launcher: str, rank: int, port: int, hosts: Sequence[str]) -> dict[str, str]:
    local = [*hosts[:rank]].count(hosts[rank])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {
        "srun": {
            "SLURM_PROCID": f"{rank}",
            "SLURM_LOCALID": f"{local}",
            "SLURM_STEP_NUM_TASKS": f"{len(hosts)}",
            "SLURM_STEP_NODELIST": "a,b",
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": hosts[rank],
            "SLURM_DISTRIBUTION": "cyclic",
        },
        "torchrun": {"RANK": f"{rank}", "WORLD_SIZE": f"{len(hosts)}", "HOSTNAME": hosts[rank]},
    }[launcher] | shared


def _join(rank: int, world: int, launcher: str, port: int, hosts: list[str]) -> tuple[Any, ...]:
    dist.destroy_process_group()
    given_env = _environment_of(launcher, rank, port, hosts)
    os.environ.update(given_env)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        place = join("cpu", timeout_s=60)
    mine = torch.zeros(world)
    mine[place.rank] = rank + 1
    dist.all_reduce(mine)
    assert os.environ.get("RANK") == given_env.get("RANK"), "the launcher's own variables stay"
    leave()
    return place.rank, place.local_rank, place.ranks_per_node, dist.is_initialized(), mine.tolist(), said.getvalue()


@pytest.mark.parametrize(("launcher", "hosts"), [("srun", "abab"), ("torchrun", "abba")])
def test_processes_on_hosts_in_any_order_are_numbered_by_host(launcher: str, hosts: str) -> None:
    processes, port = Pool(4), _free_port()
    try:
        answers = processes.run(_join, launcher, port, [*hosts])
    finally:
        processes.close()
    found = Numbering.of([Seat(host, hosts[:rank].count(host)) for rank, host in enumerate(hosts)])
    assert [one[0] for one in answers] == [*found.ranks]
    assert [one[1] for one in answers] == [*found.local_ranks]
    assert {one[2] for one in answers} == {found.ranks_per_node}
    order = [found.ranks.index(number) + 1.0 for number in range(4)]
    assert [one[4] for one in answers] == [order] * 4, "the group counts as the place says"
    lines = [one[5] for one in answers if one[5]]
    assert len(lines) == 1
    assert lines[0].startswith(f"samestep: 4 ranks by {launcher}, on 2 hosts: ")
    assert ("(RANK " in lines[0]) == (found.ranks != (0, 1, 2, 3))


@telling
def _join_twice(rank: int, world: int, port: int) -> None:
    dist.destroy_process_group()
    os.environ.update(_environment_of("torchrun", min(rank, 1), port, ["a"] * 3))
    join("cpu", timeout_s=60)


def test_a_rank_that_two_processes_have_is_refused_by_name() -> None:
    processes, port = Pool(3), _free_port()
    try:
        answers = processes.run(_join_twice, port)
    finally:
        processes.close()
    assert all("rank 1 was given to two processes" in answer for answer in answers[1:]), answers


def _use_a_group(rank: int, world: int, hosts: str, may_renew: bool, has_more: bool) -> tuple[Any, ...]:
    os.environ["HOSTNAME"] = hosts[rank]
    more = dist.new_group([*range(world)]) if has_more else None
    place = join("cpu", timeout_s=60, may_renew=may_renew)
    try:
        rank_order.check(Layout("dp=2 tp=2"), place.hosts)
        refused = ""
    except LayoutError as error:
        refused = str(error)
    assert place.rank == dist.get_rank()
    total = torch.ones(1)
    dist.all_reduce(total)
    leave()
    del os.environ["HOSTNAME"]
    if more is not None:
        dist.destroy_process_group(more)
    return place.rank, place.ranks_per_node, place.hosts, refused, total.item()


def test_a_group_that_exists_is_taken_or_made_anew_or_refused() -> None:
    processes = Pool(4)
    try:
        taken = processes.run(_use_a_group, "aabb", False, False)
        assert [one[:3] for one in taken] == [(rank, 2, ()) for rank in range(4)]
        assert {one[3] for one in taken} == {""}
        mixed = processes.run(_use_a_group, "abab", False, False)
        assert [one[:3] for one in mixed] == [(rank, 1, (0, 1, 0, 1)) for rank in range(4)]
        assert all("Use a group in the order 0, 2, 1, 3 of its ranks" in one[3] for one in mixed)
        shared = processes.run(_use_a_group, "abab", True, True)
        assert all("a group in the order 0, 2, 1, 3" in one[3] for one in shared)
        renewed = processes.run(_use_a_group, "abab", True, False)
        assert [one[:4] for one in renewed] == [(rank, 2, (), "") for rank in (0, 2, 1, 3)]
        assert {one[4] for one in renewed} == {4.0}
    finally:
        processes.close()
