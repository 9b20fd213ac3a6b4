"""Parts of a cut weight: runs are where cutting puts them, and what two parts share is found in both."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.runtime.weights.placement import WeightSlice, copy_shared, whole


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> WeightSlice:
    edges = sorted(draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=6)))
    edges = edges[: len(edges) // 2 * 2]
    return WeightSlice(shape, dim, tuple(zip(edges[::2], edges[1::2], strict=True)))


@st.composite
def two_parts(draw: st.DrawFn) -> tuple[WeightSlice, WeightSlice]:
    shape = tuple(draw(st.lists(st.integers(2, 7), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    return draw(parts(shape, draw(dims))), draw(parts(shape, draw(dims)))


def cut(part: WeightSlice) -> torch.Tensor:
    numbers = torch.arange(math.prod(part.shape)).view(part.shape)
    return torch.cat([numbers.narrow(part.dim, a, b - a) for a, b in part.intervals], dim=part.dim).flatten()


@given(two_parts(), st.data())
def test_runs_are_where_cutting_puts_them(two: tuple[WeightSlice, WeightSlice], data: st.DataObject) -> None:
    part = two[0]
    start = data.draw(st.integers(0, part.numel))
    stop = data.draw(st.integers(start, part.numel))
    assert part.runs(start, stop).positions().tolist() == cut(part)[start:stop].tolist()


@given(two_parts())
def test_what_two_parts_share_is_copied(two: tuple[WeightSlice, WeightSlice]) -> None:
    mine, theirs = (part.runs(0, part.numel) for part in two)
    into = torch.full((two[0].numel,), -1)
    copied = copy_shared(into, mine, cut(two[1]), theirs)
    both = set(cut(two[1]).tolist())
    assert into.tolist() == [place if place in both else -1 for place in cut(two[0]).tolist()]
    assert copied == sum(place >= 0 for place in into.tolist())


def test_the_whole_is_one_run() -> None:
    runs = whole((3, 4)).runs(2, 11)
    assert (runs.starts.tolist(), runs.lengths.tolist()) == ([2], [9])
    assert whole(()).runs(0, 1).positions().tolist() == [0]
    assert np.array_equal(whole((0, 4)).runs(0, 0).starts, [])
