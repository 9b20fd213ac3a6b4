"""Process groups are made once for all runs of a process."""

from __future__ import annotations

from typing import Any

import psutil
import torch.distributed as dist

from samestep.datasets import batches
from samestep.runtime.processes.join import RankInfo, leave
from samestep.runtime.processes.mesh import group_among
from samestep.runtime.processes.workers import run_workers
from tests.laboratory import clipped, make_run
from tests.models import Tokens
from tests.pool import pool


def prepared(rank: int, world: int, layout: str) -> Any:
    job = clipped()
    run = make_run(rank, world, "llama", layout, job)
    run.prepare(next(batches(Tokens(), job)).samples([0]))
    return run


def runs_in_turn(rank: int, world: int) -> tuple[bool, list[int]]:
    first = prepared(rank, world, "dp=2 tp=2").assembly.parallel.mesh.groups
    threads, same = [], True
    for _ in range(3):
        again = prepared(rank, world, "dp=2 tp=2").assembly.parallel.mesh.groups
        same = same and all(again[axis] is group for axis, group in first.items())
        threads.append(psutil.Process().num_threads())
    return same and len(first) >= 2, threads


def test_runs_of_one_process_share_their_groups() -> None:
    for same, threads in pool(4).run(runs_in_turn):
        assert same
        assert len(set(threads)) == 1  # a group keeps threads of its own


def groups_of_two_names(rank: int, world: int) -> tuple[bool, bool, bool]:
    everyone = [tuple(range(world))]
    plain, named = group_among(everyone, "", 60.0), group_among(everyone, "cp", 60.0)
    return plain is dist.group.WORLD, named is plain, group_among(everyone, "cp", 60.0) is named


def test_a_name_asks_for_a_group_of_its_own() -> None:
    assert pool(2).run(groups_of_two_names) == [(True, False, True)] * 2


def threads_after_leaving(place: RankInfo) -> tuple[int, int]:
    with_world = psutil.Process().num_threads()
    group_among([(0, 1)], "cp", 60.0)
    dist.barrier()
    leave()
    return with_world, psutil.Process().num_threads()


def test_who_leaves_keeps_no_group() -> None:
    before, after = run_workers(threads_after_leaving, ranks=2)
    assert after < before
