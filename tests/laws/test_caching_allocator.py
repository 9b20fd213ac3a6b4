"""Laws of what torch's allocator takes from a device: its constants, sequences by hand, and steps of programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.memory.memory_use import during_step
from samestep.wings.plan.simulation import caching_allocator
from samestep.wings.plan.simulation.caching_allocator import CachingAllocator, block_bytes
from samestep.wings.plan.simulation.reserved_memory import reserved_bytes, shares, without_equal_rounds
from tests.laws.models import LAW, MODELS, Case, blocks, case, cases

MIB = 2**20
SIZES = st.sampled_from([1, 512, 513, 100_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB, 100 * MIB + 7])


def of(*sizes: int, expandable: bool = False) -> int:
    """Return the bytes that are reserved for tensors that are there at once."""
    allocator = CachingAllocator(expandable=expandable)
    for size in sizes:
        allocator.take(size, "compute")
    return allocator.reserved_bytes


# -- constants, and sequences by hand ----------------------------------------------------------------------------------


def test_the_constants_are_those_of_the_header_that_comes_with_torch() -> None:
    text = (Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h").read_text(encoding="utf-8")
    found = {name: int(value) for name, value in re.findall(r"constexpr size_t (k\w+) = (\d+);", text)}
    assert found["kMinBlockSize"] == caching_allocator.LEAST_BLOCK
    assert found["kSmallSize"] == caching_allocator.MOST_SMALL
    assert found["kSmallBuffer"] == caching_allocator.SMALL_SEGMENT
    assert found["kMinLargeAlloc"] == caching_allocator.LEAST_OWN
    assert found["kRoundLarge"] == caching_allocator.OWN_UNIT


@pytest.mark.parametrize(
    ("size", "segments", "growing"),
    [
        (1, 2 * MIB, 2 * MIB),  # small ones share a segment of 2 MiB
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),  # those below 10 MiB one of 20 MiB
        (10 * MIB - 512, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),  # larger ones have their own, in whole 2 MiB; a growing one has pages of 20 MiB
        (11 * MIB, 12 * MIB, 20 * MIB),
        (41 * MIB, 42 * MIB, 60 * MIB),
    ],
)
def test_one_tensor_takes_a_segment_of_its_kind(size: int, segments: int, growing: int) -> None:
    assert of(size) == segments
    assert of(size, expandable=True) == growing


def test_segments_are_shared_as_far_as_they_go() -> None:
    assert of(MIB, MIB) == 2 * MIB
    assert of(MIB, MIB, 1) == 4 * MIB
    assert of(9 * MIB, 9 * MIB) == 20 * MIB
    assert of(9 * MIB, 9 * MIB, 9 * MIB) == 40 * MIB
    assert of(41 * MIB, 19 * MIB, expandable=True) == 60 * MIB
    assert of(41 * MIB, 19 * MIB + 1, expandable=True) == 80 * MIB


def test_a_freed_block_is_used_again_whole_where_a_megabyte_or_less_would_be_left() -> None:
    for size, is_split in ((49 * MIB, False), (49 * MIB - 512, True)):
        allocator = CachingAllocator(expandable=False)
        allocator.give(allocator.take(50 * MIB, "compute"))
        allocator.take(size, "compute")
        assert allocator.reserved_bytes == 50 * MIB
        assert allocator.allocated_bytes == (size if is_split else 50 * MIB)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator(expandable=False)
    for block in [allocator.take(size * MIB, "compute") for size in (60, 30, 40)]:
        allocator.give(block)
    allocator.take(29 * MIB + 512, "compute")  # all of the 30 MiB
    allocator.take(60 * MIB, "compute")
    allocator.take(40 * MIB, "compute")
    assert allocator.reserved_bytes == 130 * MIB


def test_neighbours_merge_when_they_are_freed() -> None:
    allocator = CachingAllocator(expandable=False)
    allocator.give(allocator.take(100 * MIB, "compute"))
    parts = [allocator.take(25 * MIB, "compute") for _ in range(4)]
    for index in (0, 2, 1, 3):
        allocator.give(parts[index])
    allocator.take(100 * MIB, "compute")
    assert allocator.reserved_bytes == 100 * MIB


def test_a_hole_between_two_tensors_holds_nothing_larger() -> None:
    """Half of it is free, and yet as much again is taken."""
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        allocator.give(allocator.take(200 * MIB, "compute"))
        parts = [allocator.take(20 * MIB, "compute") for _ in range(10)]
        for block in parts[::2]:
            allocator.give(block)
        allocator.take(100 * MIB, "compute")
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (200 * MIB, 300 * MIB)


def test_a_growing_segment_grows_by_what_its_end_lacks() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.take(20 * MIB, "compute")
    allocator.give(allocator.take(40 * MIB, "compute"))
    allocator.take(60 * MIB, "compute")
    assert allocator.reserved_bytes == 80 * MIB


def test_streams_share_nothing() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.give(allocator.take(40 * MIB, "compute"))
    allocator.give(allocator.take(40 * MIB, "gathers"))
    assert allocator.most_allocated_bytes == 40 * MIB
    assert allocator.reserved_by_stream() == {"compute": 40 * MIB, "gathers": 40 * MIB}


# -- laws of any sequence ----------------------------------------------------------------------------------------------

SEQUENCES = st.lists(
    st.tuples(SIZES, st.sampled_from(["compute", "gathers"]), st.integers(0, 9)), min_size=1, max_size=60
)


def play(sequence: list[tuple[int, str, int]], allocator: CachingAllocator, times: int = 1) -> list[int]:
    """Take each block; free the one that stands so many places before, if there is any, and all at the end of each time."""
    reserved = []
    for _ in range(times):
        held = []
        for size, stream, back in sequence:
            held.append(allocator.take(size, stream))
            if back < len(held) - 1:
                allocator.give(held.pop(-1 - back))
        for block in held:
            allocator.give(block)
        reserved.append(allocator.reserved_bytes)
    return reserved


@LAW
@given(SEQUENCES, st.booleans())
def test_what_is_reserved_holds_what_is_allocated_and_never_falls(
    sequence: list[tuple[int, str, int]], expandable: bool
) -> None:
    allocator = CachingAllocator(expandable=expandable)
    reserved = play(sequence, allocator, times=6)
    assert reserved == sorted(reserved)
    assert reserved[0] >= allocator.most_allocated_bytes >= max(block_bytes(size) for size, _, _ in sequence)
    assert sum(allocator.reserved_by_stream().values()) == reserved[-1]
    assert allocator.allocated_bytes == 0


@LAW
@given(SEQUENCES)
def test_a_growing_segment_is_one_block_again_once_all_is_free(sequence: list[tuple[int, str, int]]) -> None:
    large = [one for one in sequence if block_bytes(one[0]) > MIB]
    allocator = CachingAllocator(expandable=True)
    play(large, allocator)
    before = allocator.reserved_by_stream()
    for stream, size in before.items():
        allocator.take(size, stream)
    assert allocator.reserved_by_stream() == before


def test_equal_microbatches_come_to_a_fixed_point() -> None:
    """Each frees what it has taken, in the order of a backward; after the second nothing more is taken."""
    sizes = [33 * MIB, 3 * MIB, 70 * MIB, 12 * MIB, 5 * MIB] * 4
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        reserved = []
        for _ in range(8):
            held = [allocator.take(size, "compute") for size in sizes]
            for block in reversed(held):
                allocator.give(allocator.take(40 * MIB, "compute"))
                allocator.give(block)
            reserved.append(allocator.reserved_bytes)
        assert reserved[1:] == reserved[1:2] * 7


# -- programs ----------------------------------------------------------------------------------------------------------


@LAW
@given(cases(), st.booleans())
def test_the_tensors_of_a_step_are_those_of_the_memory_model(drawn: Case, expandable: bool) -> None:
    """At the peak they have what the model says, but for rounding; and no less is reserved."""
    for program in drawn.programs:
        peak = during_step(program).total
        found = reserved_bytes(program, expandable=expandable)
        assert found.reserved >= found.allocated >= peak
        assert sum(found.by_stream.values()) == found.reserved


LAYOUTS = (
    "dp=1 microbatch=1", "dp=1 microbatch=1 recompute=full", "dp=1 microbatch=1 recompute=selective", "dp=2 zero=1 microbatch=1",
    "dp=2 zero=3 microbatch=1", "dp=2 zero=2 microbatch=1", "tp=2 microbatch=1", "pp=2 microbatch=1", "pp=2 schedule=gpipe microbatch=1",
    "pp=2 schedule=zero-bubble microbatch=1", "pp=2 schedule=interleaved virtual_stages=2 microbatch=1", "cp=2 microbatch=1",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_tensors_have_the_bytes_of_the_model(layout: str) -> None:
    """To within the rounding of each tensor, and what under zero=2 and 3 is there twice while it is copied."""
    drawn = case(MODELS["wide"], layout, global_batch=16, precision="bf16")
    for program in drawn.programs:
        found, peak = reserved_bytes(program), during_step(program).total
        unit = max((unit.padded_numel * 2 for unit in program.units), default=0)
        assert peak <= found.allocated <= peak + 512 * 400 + unit


@pytest.mark.parametrize("layout", [*LAYOUTS, "pp=4 microbatch=1"])
@pytest.mark.parametrize("expandable", [False, True])
def test_rounds_that_are_left_out_change_nothing(layout: str, expandable: bool) -> None:
    drawn = case(MODELS["tiny"], layout, global_batch=32, precision="bf16")
    for program in drawn.programs:
        assert reserved_bytes(program, expandable=expandable) == reserved_bytes(
            program, expandable=expandable, all_rounds=True
        )


def test_long_steps_are_played_in_short() -> None:
    drawn = case(MODELS["tiny"], "pp=2 microbatch=1", global_batch=512)
    tasks = without_equal_rounds(drawn.program.tasks)
    assert len(tasks) < 20 < 1000 < len(drawn.program.tasks)
    started = [task.microbatch for task in tasks if str(task.body).startswith("F")]
    ended = [task.microbatch for task in tasks if str(task.body).startswith("B")]
    assert started == ended == [*range(len(started))]


def test_a_step_of_twice_as_many_equal_microbatches_reserves_the_same() -> None:
    short, long = (case(MODELS["tiny"], "dp=1 microbatch=1", global_batch=batch).program for batch in (8, 16))
    assert reserved_bytes(short, all_rounds=True) == reserved_bytes(long, all_rounds=True)


def test_gathers_and_reductions_have_pools_of_their_own() -> None:
    model = blocks(8, 2048, 2048)
    found = reserved_bytes(case(model, "dp=2 zero=3", precision="bf16").program)
    assert set(found.by_stream) == {"compute", "all_gather dp_shard", "reduce_scatter dp_shard"}
    gathered, shard = 2048 * 2048 * 2, 2048 * 2048 * 4 // 2
    assert found.by_stream["all_gather dp_shard"] >= gathered
    assert 8 * shard <= found.by_stream["reduce_scatter dp_shard"] < 8 * shard + 20 * MIB
    alone = reserved_bytes(case(model, "dp=1", precision="bf16").program)
    assert set(alone.by_stream) == {"compute"}


def test_growing_segments_waste_less_of_large_tensors_that_vary() -> None:
    program = case(MODELS["wide"], "dp=1 microbatch=2", precision="bf16").program
    fixed, growing = (reserved_bytes(program, expandable=expandable) for expandable in (False, True))
    assert fixed.reserved > growing.reserved
    assert growing.reserved <= growing.allocated * 1.05


@given(st.integers(0, 10**6), st.lists(st.integers(0, 1000), max_size=9))
def test_shares_add_up(total: int, weights: list[int]) -> None:
    assert sum(shares(total, weights)) == total
