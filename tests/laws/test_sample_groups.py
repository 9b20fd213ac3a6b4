"""Shares of a batch and groups of coupled samples: what the closed forms say is what listing every sample shows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.program.step import SampleGroups
from samestep.shares import Shares

COUNTS = st.integers(1, 24), st.integers(1, 6), st.integers(1, 4)


@given(*COUNTS)
def test_shares_are_even_parts_of_the_batch(batch: int, ranks: int, microbatches: int) -> None:
    by_rank, by_microbatch = (Shares(batch, ranks, microbatches, together) for together in (False, True))
    parts = [np.array_split(part, microbatches) for part in np.array_split(np.arange(batch), ranks)]
    for rank, mine in enumerate(parts):
        for index, expected in enumerate(mine):
            assert [*by_rank.positions(rank, index)] == expected.tolist()
            assert len(by_microbatch.positions(rank, index)) == len(expected) == by_rank.size(rank, index)
    order = [p for index in range(microbatches) for rank in range(ranks) for p in by_microbatch.positions(rank, index)]
    assert order == [*range(batch)]


@settings(max_examples=300)
@given(*COUNTS, st.integers(1, 24))
def test_groups_are_where_their_samples_are(batch: int, ranks: int, microbatches: int, size: int) -> None:
    found = SampleGroups.of(batch, size, ranks, microbatches)
    totals = {found.shares.total(index) for index in range(microbatches)}
    assert {*found.totals} == totals
    assert found.fit == (microbatches == 1 or all(total % size == 0 for total in totals))
    if not found.fit:
        return
    for index in range(microbatches):
        runs = [found.runs(rank, index) for rank in range(ranks)]
        holders: dict[int, list[int]] = {}
        for rank, mine in enumerate(runs):
            positions = found.shares.positions(rank, index)
            assert sum(run.num_samples for run in mine) == len(positions)
            first = found.shares.first(index) // size if microbatches > 1 else 0
            expected = dict.fromkeys(position // size - first for position in positions)
            assert [run.group for run in mine] == [*expected]
            for run in mine:
                holders.setdefault(run.group, []).append(rank)
        assert max(map(len, runs)) <= found.num_slots
        assert len(holders) <= found.num_groups
        assert found.spans_ranks or all(len(ranks_of) == 1 for ranks_of in holders.values())
        assert not found.is_one_forward or (len(holders) == 1 and ranks == 1)
        for group, where in enumerate(found.slots(index)):
            assert {slot // found.num_slots for slot in where} == {*holders[group]}
