"""Pools of warm ranks: who refuses alike is kept, who failed or is busy without a job is ended, and models are traced before."""

from __future__ import annotations

import threading
import warnings

import pytest

from samestep.errors import LayoutError
from tests import laboratory, pool, traced


def refuse(rank: int, world: int, words: str) -> None:
    raise LayoutError("some-code", words.format(rank=rank))


def fail(rank: int, world: int) -> None:
    if rank == 1:
        warnings.warn("one rank alone", UserWarning, stacklevel=1)


def go_on(rank: int, world: int) -> int:
    return rank


def be_busy(rank: int, world: int) -> None:
    """Leave a thread behind that uses the processor, as gloo's does that looks for a message which nobody receives."""

    def turn() -> None:
        while True:
            pass

    if rank == 1:
        threading.Thread(target=turn, daemon=True).start()


@pytest.fixture
def ranks() -> pool.Pool:
    return pool.pool(2)


def pids(ranks: pool.Pool) -> list[int]:
    return [process.pid for process in ranks.processes]


def test_a_pool_is_the_same_however_its_device_is_named() -> None:
    assert pool.pool(2) is pool.pool(2, "cpu")


def test_ranks_that_refuse_alike_take_the_next_job(ranks: pool.Pool) -> None:
    assert ranks.run(go_on) == [0, 1]
    before = pids(ranks)
    with pytest.raises(LayoutError, match="alike"):
        ranks.run(refuse, "alike")
    assert ranks.run(go_on) == [0, 1]
    assert pids(ranks) == before


def test_ranks_that_part_are_ended(ranks: pool.Pool) -> None:
    for function, words in ((refuse, ["on rank {rank}"]), (fail, [])):
        ranks.run(go_on)
        before = pids(ranks)
        with pytest.raises((LayoutError, UserWarning), match="rank") as caught:
            ranks.run(function, *words)
        assert "of the pool:\nTraceback" in caught.value.__notes__[0]
        assert ranks.run(go_on) == [0, 1]
        assert not set(pids(ranks)) & set(before)


def test_ranks_that_are_busy_without_a_job_are_ended(ranks: pool.Pool) -> None:
    ranks.run(go_on)
    pool.close_busy()
    assert ranks.processes, "idle ranks stay"
    ranks.run(be_busy)
    for _ in range(100):  # the thread may have to wait for a core
        pool.close_busy()
        if not ranks.processes:
            return
    pytest.fail("a busy rank is left")


@pytest.mark.parametrize(("layout", "model"), [("dp=2", "llama"), ("dp=1 pp=2 microbatch=2", "deep_tied")])
def test_what_a_parameter_names_is_traced_before_the_first_fork(layout: str, model: str, ranks: pool.Pool) -> None:
    ranks.run(go_on)  # the first of the session, or a later one
    assert (model, laboratory.Tokens) in [key[0][:2] for key in traced.known() if isinstance(key[0], tuple)]
    before = pids(ranks)
    laboratory.on_ranks(layout, laboratory.observe, model, laboratory.clipped())
    assert pids(ranks) == before
