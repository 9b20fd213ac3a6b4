"""Laws of the order of ranks: what coordinates, groups and strides of any layout must be."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from samestep import Layout
from samestep.program.ranks import Ranks, stages_of, tie_of

DEGREE = st.integers(1, 4)
ORDERS = (
    ("pp", "dp_replicate", "dp_shard", "tp"),
    ("pp", "dp", "cp", "tp"),
    ("pp", "dp_cp", "tp"),
    ("pp", "dp_outer", "dp_expert", "ep", "tp"),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of every kind: replicated or sharded, cut, staged, with slices of sequences and experts."""
    zero = draw(st.integers(0, 3))
    dp, shard, cp = draw(DEGREE), draw(DEGREE) if zero else 1, draw(st.sampled_from([1, 2]))
    innermost = shard * cp if zero and shard * cp > 1 else dp * cp
    ep = draw(st.sampled_from([n for n in range(1, innermost + 1) if innermost % n == 0]))
    return Layout(
        dp_replicate=dp, dp_shard=shard, zero=zero, cp=cp, ep=ep, tp=draw(DEGREE), pp=draw(st.sampled_from([1, 2, 3]))
    )


@given(layouts())
def test_coordinates_count_like_digits(layout: Layout) -> None:
    """So they determine the rank, and the product of the axes is the world."""
    ranks = Ranks.of(layout)
    assert ranks.world_size == layout.world_size
    for order in ORDERS:
        digits = list(itertools.product(*(range(ranks.size(axis)) for axis in order)))
        assert [tuple(ranks.coordinate(rank, axis) for axis in order) for rank in range(layout.world_size)] == digits


@given(layouts())
def test_groups_divide_the_world_between_them(layout: Layout) -> None:
    ranks = Ranks.of(layout)
    for axis in {"world", *itertools.chain(*ORDERS)}:
        groups = ranks.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        assert all(ranks.group(rank, axis) == group for group in groups for rank in group)
        assert all([ranks.coordinate(rank, axis) for rank in group] == [*range(ranks.size(axis))] for group in groups)


@given(layouts())
def test_ranks_of_a_group_differ_in_its_coordinate_alone(layout: Layout) -> None:
    ranks = Ranks.of(layout)
    for order in ORDERS:
        for axis in order:
            others = [other for other in order if other != axis]
            for group in ranks.groups(axis):
                assert len({tuple(ranks.coordinate(rank, other) for other in others) for rank in group}) == 1


@given(layouts())
def test_a_stride_is_the_distance_of_neighbours(layout: Layout) -> None:
    ranks = Ranks.of(layout)
    ties = {tie_of((0, layout.pp - 1))} if layout.pp > 1 else set()
    for axis in {*itertools.chain(*ORDERS)} & ranks.axes.keys() | ties:
        for group in ranks.groups(axis):
            assert all(after - before == ranks.stride(axis) for before, after in itertools.pairwise(group))


@given(layouts())
def test_experts_divide_the_innermost_data_axis(layout: Layout) -> None:
    """Neighbours hold different experts; with those that hold the same they make up a group of the data axis."""
    ranks = Ranks.of(layout)
    innermost = "dp_shard" if layout.num_shards > 1 else "dp_replicate"
    assert ranks.size("ep") == layout.ep
    assert ranks.size("ep") * ranks.size("dp_expert") == ranks.size(innermost)
    assert ranks.stride("ep") == ranks.stride(innermost) == ranks.stride("tp") * layout.tp
    for group in ranks.groups(innermost):
        met = {other for rank in ranks.group(group[0], "dp_expert") for other in ranks.group(rank, "ep")}
        assert met == {*group}


@given(layouts())
def test_data_axes_make_up_all_whose_gradients_are_summed(layout: Layout) -> None:
    ranks = Ranks.of(layout)
    for rank in range(layout.world_size):
        summed = {*ranks.group(rank, "dp_cp")}
        assert len(summed) == layout.dp_cp_size
        for outer, inner in (("dp_replicate", "dp_shard"), ("dp", "cp")):
            assert {r for one in ranks.group(rank, outer) for r in ranks.group(one, inner)} == summed


@given(layouts(), st.data())
def test_ties_join_the_stages_that_they_are_named_by(layout: Layout, data: st.DataObject) -> None:
    ranks = Ranks.of(layout)
    drawn = data.draw(st.sets(st.integers(0, layout.pp - 1), min_size=1))
    tie = tie_of(sorted(drawn))
    members = [[r for r in range(layout.world_size) if ranks.coordinate(r, "pp") == stage] for stage in sorted(drawn)]
    assert ranks.groups(tie) == tuple(zip(*members, strict=True))
    assert ranks.size(tie) == len(drawn)
    for index, stage in enumerate(members):
        assert {ranks.coordinate(rank, tie) for rank in stage} == {index}
    assert not any(stages_of(axis) for axis in ranks.axes)


@given(layouts(), st.data())
def test_nodes_hold_neighbours(layout: Layout, data: st.DataObject) -> None:
    """Where nodes are whole, ranks of one node that differ in data alone are a group."""
    whole = [count for count in range(1, layout.dp_cp_size + 1) if layout.dp_cp_size % count == 0]
    ranks_per_node = data.draw(st.sampled_from(whole)) * layout.tp
    ranks = Ranks.of(layout, ranks_per_node)
    assert ranks.size("dp_intra") * ranks.size("dp_inter") == layout.dp_cp_size
    for group in ranks.groups("dp_intra"):
        assert len({rank // ranks_per_node for rank in group}) == 1
    for group in ranks.groups("dp_inter"):
        assert len({rank // ranks_per_node for rank in group}) == len(group)
