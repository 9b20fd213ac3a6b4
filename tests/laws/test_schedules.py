"""Laws of the pipeline schedules: complete, free of deadlock, and as slow and as large as their papers say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from samestep.errors import LayoutError
from samestep.schedules import (
    SCHEDULES,
    Action,
    Message,
    Order,
    TaskKind,
    check,
    in_flight,
    links,
    needs,
    order,
    to_text,
)
from samestep.wings.plan.bounds.body_seconds import after_last_backward
from tests.laws.models import LAW

WHOLE = {"F": 1, "B": 2}
SPLIT = {"F": 1, "B": 1, "W": 1}


class Shape(NamedTuple):
    """A schedule and its numbers."""

    schedule: str
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1

    @property
    def orders(self) -> list[Order]:
        p, m, v = self.num_stages, self.num_microbatches, self.num_chunks
        return [order(self.schedule, stage, p, m, v) for stage in range(p)]

    @property
    def kinds(self) -> str:
        return "FBW" if SCHEDULES[self.schedule].splits_backward else "FB"


def shapes(max_stages: int = 8, max_microbatches: int = 20, max_chunks: int = 4) -> st.SearchStrategy[Shape]:
    numbers = (st.integers(1, max_stages), st.integers(1, max_microbatches))
    one_chunk = st.builds(Shape, st.sampled_from(tuple(SCHEDULES)), *numbers, st.just(1))
    return one_chunk | st.builds(Shape, st.just("interleaved"), *numbers, st.integers(1, max_chunks))


COSTS = st.fixed_dictionaries({"F": st.integers(1, 9), "B": st.integers(1, 9), "W": st.integers(0, 9)})
"""Seconds of a stage's forward, input gradient and weight gradient."""


def end_of(orders: Sequence[Sequence[Action]], num_chunks: int, costs: dict[str, int]) -> int | None:
    """Play equal stages with free communication; None when they get stuck. Shares nothing with `check`."""
    num_stages = len(orders)
    depth = num_stages * num_chunks
    ended: dict[tuple[str, int, int], int] = {}
    left = [list(actions) for actions in orders]
    now = [0] * num_stages
    while any(left):
        before = len(ended)
        for stage, actions in enumerate(left):
            while actions:
                kind, microbatch, chunk = actions[0]
                at = chunk * num_stages + stage
                inputs = {
                    "F": [("F", microbatch, at - 1)] if at else [],
                    "B": [("F", microbatch, at), *([("B", microbatch, at + 1)] if at + 1 < depth else [])],
                    "W": [("B", microbatch, at)],
                }[kind]
                if any(name not in ended for name in inputs):
                    break
                actions.pop(0)
                now[stage] = max([now[stage], *(ended[name] for name in inputs)]) + costs[kind]
                ended[str(kind), microbatch, at] = now[stage]
        if len(ended) == before:
            return None
    return max(now)


def idle(shape: Shape, costs: dict[str, int]) -> int:
    """Time of the step in which a stage does nothing; equal stages have the same."""
    end = end_of(shape.orders, shape.num_chunks, costs)
    assert end is not None
    return end - shape.num_microbatches * shape.num_chunks * sum(costs[kind] for kind in shape.kinds)


def bubble(shape: Shape, costs: dict[str, int]) -> Fraction:
    """Idle time as a part of busy time."""
    busy = shape.num_microbatches * shape.num_chunks * sum(costs[kind] for kind in shape.kinds)
    return Fraction(idle(shape, costs), busy)


def read(text: str) -> list[list[Action]]:
    """Read what `to_text` writes, of one digit each."""
    return [[Action(TaskKind(w[1]), int(w[0]), int(w[2:] or 0)) for w in line.split()] for line in text.splitlines()]


def each_action_runs_once_and_after_what_it_needs(shape: Shape) -> None:
    rows = product(shape.kinds, range(shape.num_microbatches), range(shape.num_chunks))
    work = sorted(Action(TaskKind(kind), microbatch, chunk) for kind, microbatch, chunk in rows)
    for actions in shape.orders:
        assert sorted(actions) == work
        place = {action: index for index, action in enumerate(actions)}
        for microbatch, chunk in product(range(shape.num_microbatches), range(shape.num_chunks)):
            places = [place[Action(TaskKind(kind), microbatch, chunk)] for kind in shape.kinds]
            assert places == sorted(places)


def gradients_add_up_in_ascending_order(shape: Shape) -> None:
    for actions, kind, chunk in product(shape.orders, shape.kinds, range(shape.num_chunks)):
        found = [a.microbatch for a in actions if a.kind == kind and a.chunk == chunk]
        assert found == list(range(shape.num_microbatches))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 8])
def test_nothing_deadlocks(num_stages: int) -> None:
    for m in (1, 2, 3, 4, 5, 6, 7, 9, 13, 20):
        for shape in [Shape(schedule, num_stages, m) for schedule in SCHEDULES]:
            check(shape.orders, 1)
        for num_chunks in (2, 3, 4):
            check(Shape("interleaved", num_stages, m, num_chunks).orders, num_chunks)


def one_group_for_a_direction(message: Message, num_stages: int) -> str:
    return message.action.kind


def one_group_for_all(message: Message, num_stages: int) -> str:
    return "pp"


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("num_stages", [4, 5, 8])
def test_groups_of_all_stages_deadlock_on_nccl(schedule: str, num_stages: int) -> None:
    """A stage between two others then receives and sends in one group, and its receive ahead holds up its sends."""
    check(Shape(schedule, num_stages, 4).orders, 1, one_group_for_a_direction)
    for m in (5, 6, 8, 12):
        with pytest.raises(LayoutError, match="deadlock where messages of two stages keep their order"):
            check(Shape(schedule, num_stages, m).orders, 1, one_group_for_a_direction)


def test_one_group_for_both_directions_deadlocks_on_nccl() -> None:
    for schedule in SCHEDULES:
        with pytest.raises(LayoutError, match="deadlock where messages of two stages keep their order"):
            check(Shape(schedule, 2, 2).orders, 1, one_group_for_all)


def test_a_stage_only_sends_or_only_receives_in_a_link() -> None:
    for num_stages, num_chunks in product(range(2, 9), (1, 2)):
        found = links(num_stages, num_chunks)
        assert len(found) == (2 if num_stages == 2 else 4) + 2 * (num_chunks > 1)
        for pairs in found.values():
            assert len({*itertools.chain(*pairs)}) == 2 * len(pairs)


def test_ends_of_a_link_with_two_orders_are_refused() -> None:
    """Gloo would tell the messages apart by their tags; NCCL would give each receive the wrong one."""
    backward = " 0B1 1B1 0B0 1B0"
    with pytest.raises(LayoutError, match=r"stage 0 sends 0F1 of stage 0 where stage 1 receives 1F0 of stage 0"):
        check(read("0F0 0F1 1F0 1F1" + backward + "\n0F0 1F0 0F1 1F1" + backward), 2)


def is_ascending(orders: Sequence[Sequence[Action]]) -> bool:
    """Whether every stage takes the micro-batches of a chunk in order, forward and backward."""
    by_kind = [sorted(actions, key=lambda action: (action.kind, action.chunk)) for actions in orders]  # stable
    return all(actions == sorted(actions, key=lambda a: (a.kind, a.chunk, a.microbatch)) for actions in by_kind)


@LAW
@given(shapes(max_stages=4, max_microbatches=6, max_chunks=3), st.data())
def test_check_agrees_with_a_player(shape: Shape, data: st.DataObject) -> None:
    orders = [list(actions) for actions in shape.orders]
    for _ in range(data.draw(st.integers(0, 3))):
        actions = data.draw(st.sampled_from(orders))
        i, j = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        actions[i], actions[j] = actions[j], actions[i]
    if end_of(orders, shape.num_chunks, SPLIT) is None or not is_ascending(orders):
        with pytest.raises(LayoutError, match=r"deadlock|before"):
            check(orders, shape.num_chunks)
    else:
        check(orders, shape.num_chunks)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_of_gpipe_and_1f1b(p: int) -> None:
    for schedule, m in product(["gpipe", "1f1b"], range(p, 21)):
        assert bubble(Shape(schedule, p, m), WHOLE) == Fraction(p - 1, m), schedule


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_of_interleaved(p: int) -> None:
    """The paper says so where p divides m; the rounds of unequal length keep it for every m >= p."""
    for v, m in product((1, 2, 3, 4), range(p, 2 * p + 2)):
        assert bubble(Shape("interleaved", p, m, v), WHOLE) == Fraction(p - 1, v * m)


@LAW
@given(st.integers(1, 8), st.integers(0, 12), COSTS)
def test_bubble_of_zero_bubble(p: int, more: int, costs: dict[str, int]) -> None:
    assume(costs["W"] <= min(costs["F"], costs["B"]))
    assert idle(Shape("zero-bubble", p, p + more), costs) == (p - 1) * (costs["F"] + costs["B"] - costs["W"])


@LAW
@given(st.integers(2, 8), st.integers(1, 20), COSTS)
def test_zero_bubble_is_never_slower_than_1f1b(p: int, m: int, costs: dict[str, int]) -> None:
    """Faster wherever weight gradients cost something, for any costs and any m, m < p included."""
    whole = {"F": costs["F"], "B": costs["B"] + costs["W"]}
    ours, theirs = idle(Shape("zero-bubble", p, m), costs), idle(Shape("1f1b", p, m), whole)
    assert ours < theirs if costs["W"] else ours == theirs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_micro_batch_goes_there_and_back(schedule: str) -> None:
    shape = Shape(schedule, 4, 1, num_chunks=2 if schedule == "interleaved" else 1)
    there_and_back = 4 * shape.num_chunks * 3
    assert end_of(shape.orders, shape.num_chunks, WHOLE | {"W": 0}) == there_and_back
    assert all(in_flight(actions) == shape.num_chunks for actions in shape.orders)


def activations_in_flight(shape: Shape) -> None:
    schedule, p, m, v = shape
    longest = -(-m // max(m // p, 1))
    for stage, actions in enumerate(shape.orders):
        expected = {
            "gpipe": m,
            "1f1b": min(p - stage, m),
            "interleaved": min(2 * (p - stage - 1) + (v - 1) * longest + 1, m * v) if v > 1 else min(p - stage, m),
            "zero-bubble": min(p, m),  # not above the worst stage of 1F1B
        }[schedule]
        assert in_flight(actions) == expected


@LAW
@given(st.integers(1, 8), st.integers(1, 40))
def test_what_stages_defer_follows_their_last_backward(p: int, m: int) -> None:
    splitting = [name for name, spec in SCHEDULES.items() if spec.splits_backward]
    assert splitting
    for schedule, stage in product(splitting, range(p)):
        whole = order(schedule, stage, p, m)
        last = max(place for place, action in enumerate(whole) if action.kind is TaskKind.BACKWARD)
        assert after_last_backward(schedule, stage, p, m, 1) == whole[last + 1 :]


def test_interleaving_holds_what_megatron_states() -> None:
    """The first stage: 1 + (p-1)/(p v) times 1F1B's p (Korthikanti et al. 2022)."""
    for p, v in product((2, 4, 8), (2, 3, 4)):
        held = in_flight(order("interleaved", 0, p, 3 * p, v))
        assert Fraction(held, v) == p * (1 + Fraction(p - 1, p * v))


def test_interleaving_one_chunk_is_1f1b() -> None:
    assert Shape("interleaved", 4, 7).orders == Shape("1f1b", 4, 7).orders


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_the_others_say_who_takes_virtual_stages(schedule: str) -> None:
    with pytest.raises(LayoutError, match=rf"schedule={schedule} .* 2 were given. Use schedule=interleaved"):
        order(schedule, 0, 4, 8, 2)


GOLDEN = {
    # Huang et al. 2019, figure 2c, with ascending backwards as in Narayanan et al. 2021, figure 3
    "gpipe": """\
0F 1F 2F 3F 4F 5F 6F 7F 0B 1B 2B 3B 4B 5B 6B 7B
0F 1F 2F 3F 4F 5F 6F 7F 0B 1B 2B 3B 4B 5B 6B 7B
0F 1F 2F 3F 4F 5F 6F 7F 0B 1B 2B 3B 4B 5B 6B 7B
0F 1F 2F 3F 4F 5F 6F 7F 0B 1B 2B 3B 4B 5B 6B 7B""",
    # Qi et al. 2023, figure 2
    "1f1b": """\
0F 1F 2F 3F 0B 4F 1B 5F 2B 6F 3B 7F 4B 5B 6B 7B
0F 1F 2F 0B 3F 1B 4F 2B 5F 3B 6F 4B 7F 5B 6B 7B
0F 1F 0B 2F 1B 3F 2B 4F 3B 5F 4B 6F 5B 7F 6B 7B
0F 0B 1F 1B 2F 2B 3F 3B 4F 4B 5F 5B 6F 6B 7F 7B""",
    # Narayanan et al. 2021, section 2.2: as figure 4 shows it, two chunks a device
    "interleaved": """\
0F0 1F0 2F0 3F0 0F1 1F1 2F1 3F1 4F0 5F0 6F0 \
0B1 7F0 1B1 4F1 2B1 5F1 3B1 6F1 0B0 7F1 1B0 2B0 3B0 4B1 5B1 6B1 7B1 4B0 5B0 6B0 7B0
0F0 1F0 2F0 3F0 0F1 1F1 2F1 3F1 4F0 \
0B1 5F0 1B1 6F0 2B1 7F0 3B1 4F1 0B0 5F1 1B0 6F1 2B0 7F1 3B0 4B1 5B1 6B1 7B1 4B0 5B0 6B0 7B0
0F0 1F0 2F0 3F0 0F1 1F1 2F1 \
0B1 3F1 1B1 4F0 2B1 5F0 3B1 6F0 0B0 7F0 1B0 4F1 2B0 5F1 3B0 6F1 4B1 7F1 5B1 6B1 7B1 4B0 5B0 6B0 7B0
0F0 1F0 2F0 3F0 0F1 \
0B1 1F1 1B1 2F1 2B1 3F1 3B1 4F0 0B0 5F0 1B0 6F0 2B0 7F0 3B0 4F1 4B1 5F1 5B1 6F1 6B1 7F1 7B1 4B0 5B0 6B0 7B0""",
    # Qi et al. 2023, figure 3, top
    "zero-bubble": """\
0F 1F 2F 3F 0B 0W 4F 1B 1W 5F 2B 2W 6F 3B 3W 7F 4B 4W 5B 5W 6B 6W 7B 7W
0F 1F 2F 0B 3F 1B 0W 4F 2B 1W 5F 3B 2W 6F 4B 3W 7F 5B 4W 6B 5W 7B 6W 7W
0F 1F 0B 2F 1B 3F 2B 0W 4F 3B 1W 5F 4B 2W 6F 5B 3W 7F 6B 4W 7B 5W 6W 7W
0F 0B 1F 1B 2F 2B 3F 3B 0W 4F 4B 1W 5F 5B 2W 6F 6B 3W 7F 7B 4W 5W 6W 7W""",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_papers_figures(schedule: str) -> None:
    orders = Shape(schedule, 4, 8, num_chunks=2 if schedule == "interleaved" else 1).orders
    assert to_text(orders) == GOLDEN[schedule]
    assert [list(actions) for actions in orders] == read(GOLDEN[schedule])


def test_uneven_rounds_of_interleaving() -> None:
    """Five micro-batches on two stages go as three and two."""
    assert to_text(Shape("interleaved", 2, 5, 2).orders) == (
        "0F0 1F0 2F0 0F1 1F1 2F1 0B1 3F0 1B1 4F0 2B1 3F1 0B0 4F1 1B0 2B0 3B1 4B1 3B0 4B0\n"
        "0F0 1F0 2F0 0F1 0B1 1F1 1B1 2F1 2B1 3F0 0B0 4F0 1B0 3F1 2B0 4F1 3B1 4B1 3B0 4B0"
    )


@pytest.mark.parametrize(
    ("text", "num_chunks", "what"),
    [
        (
            "0F 0B 1F 1B\n0F 1F 0B 1B",
            1,
            "these orders deadlock where messages of two stages keep their order: "
            "stage 0 waits for 0B of stage 1; stage 1 waits for 1F of stage 0",
        ),
        ("0F1 0F0 0B1 0B0", 2, "stage 0 runs 0F1 before 0F0, which it needs"),
        ("0F 1F 0B 1B\n0F 1F 0B", 1, "stage 1 never runs 1B:"),
        ("0F 0B 1F 1B 1W", 1, "stage 0 never runs 0W:"),
        ("0F0 0B0", 2, "stage 0 never runs 0F1:"),
        ("0F 0B 0F", 1, "stage 0 runs 0F 2 times: every action runs once"),
        ("0F 0B\n0B 0F", 1, "stage 1 runs 0B before 0F, which it needs"),
        ("0F 0W 0B", 1, "stage 0 runs 0W before 0B"),
        ("0F 0B 0F2 0B2", 2, "stage 0 runs 0F2, which is not an action with virtual_stages=2"),
        ("0F 1F 1B 0B", 1, "stage 0 runs 1B before 0B. Use ascending micro-batches"),
        (
            "0F0 0F1 0B1 0B0 0W0 0W1",
            2,
            "stage 0 runs 0W0 before 0W1. Use the weight gradients of the first chunk as the last",
        ),
    ],
)
def test_a_wrong_order_is_refused_by_name(text: str, num_chunks: int, what: str) -> None:
    with pytest.raises(LayoutError) as error:
        check(read(text), num_chunks)
    assert what in str(error.value)


def messages(shape: Shape) -> tuple[dict[tuple[int, int, str, bool], list[Action]], ...]:
    """What passes over each link (sender, receiver, kind, around the end of the axis), as sent and as awaited."""
    count, chunks = shape.num_stages, shape.num_chunks
    sent: dict[tuple[int, int, str, bool], list[Action]] = {}
    awaited: dict[tuple[int, int, str, bool], list[Action]] = {}
    makers = {}
    for stage, actions in enumerate(shape.orders):
        for action in actions:
            for sender, needed in needs(action, stage, count, chunks):
                if sender != stage:
                    link = (sender, stage, str(action.kind), needed.chunk != action.chunk)
                    makers[sender, needed] = link
                    awaited.setdefault(link, []).append(needed)
    for stage, actions in enumerate(shape.orders):
        for action in actions:
            if (stage, action) in makers:
                sent.setdefault(makers[stage, action], []).append(action)
    return sent, awaited


def both_ends_of_a_link_name_its_messages_in_one_order(shape: Shape) -> None:
    """NCCL has no tags: what is awaited first gets what was sent first."""
    sent, awaited = messages(shape)
    assert sent == awaited


@LAW
@given(shapes())
def test_schedules_of_any_shape(shape: Shape) -> None:
    for law in (
        each_action_runs_once_and_after_what_it_needs,
        gradients_add_up_in_ascending_order,
        activations_in_flight,
        both_ends_of_a_link_name_its_messages_in_one_order,
    ):
        law(shape)
