"""The messages of a pipeline are issued as the model of NCCL assumes, in groups with the run's time limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samestep import schedules
from samestep.datasets import batches
from samestep.errors import ModelError
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.ranks import Ranks
from samestep.runtime.axes.pipeline.stage_messages import Messages
from samestep.runtime.processes import mesh, messages
from samestep.runtime.processes.messages import broadcast_from, broadcast_value, gather_values
from tests.laboratory import clipped, make_run, on_ranks
from tests.models import Tokens
from tests.pool import pool

Event = tuple[str, schedules.Action]


@contextmanager
def noted(events: list[Event]) -> Iterator[None]:
    """Note what the messages of this rank do, by the action that receives or has made them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, word in (("_post", "receive"), ("receive", "wait"), ("send", "send")):
            inner = getattr(Messages, name)

            def outer(
                self: Messages, action: schedules.Action, *args: Any, inner: Any = inner, word: str = word
            ) -> Any:
                if word == "wait":
                    result = inner(self, action, *args)
                    events.append((word, action))
                    return result
                events.append((word, action))
                return inner(self, action, *args)

            patch.setattr(Messages, name, outer)
        yield


def issued(rank: int, world: int, model: str, layout: str, job: Job) -> list[list[Event]]:
    """Return what this stage issued in each step, and the orders of the model in both cases."""
    run, found = make_run(rank, world, model, layout, job), []
    for batch in batches(Tokens(), job):
        events: list[Event] = []
        with noted(events):
            run.step(batch)
        found.append(events)
    step = run.program.step
    where = step.layout
    orders = [
        schedules.order(where.schedule, s, where.pp, step.num_microbatches, where.virtual_stages)
        for s in range(where.pp)
    ]
    receiving = {
        schedules.Message(sender, rank, needed): action
        for action in orders[rank]
        for sender, needed in schedules.needs(action, rank, where.pp, where.virtual_stages)
        if sender != rank
    }
    for are_shapes_known in (False, True):
        model_events: list[Event] = []
        for message, is_issued in schedules.issues(orders, rank, where.virtual_stages, are_shapes_known):
            if message in receiving:
                model_events.append(("receive" if is_issued else "wait", receiving[message]))
            else:
                model_events.append(("send", message.action))
        found.append(model_events)
    return found


@pytest.mark.parametrize(
    "layout",
    [
        "pp=2 microbatch=1 schedule=interleaved virtual_stages=2",
        "pp=4 microbatch=1",
        pytest.param("pp=4 microbatch=1 schedule=zero-bubble", marks=pytest.mark.nightly),
    ],
)
def test_stages_issue_messages_as_the_model_of_nccl_does(layout: str) -> None:
    for second, unknown, known in (found[1:] for found in on_ranks(layout, issued, "deep_llama", clipped())):
        assert second == known
        assert sorted(unknown) == sorted(known)


def time_limits(rank: int, world: int, model: str, layout: str, job: Job) -> dict[str, float]:
    run = make_run(rank, world, model, layout, job)
    run.prepare(next(batches(Tokens(), job)).samples([0]))
    made = run.assembly.parallel.mesh
    groups = {**made.groups, **made.links}
    device = torch.device("cpu")
    return {
        axis: group._get_backend(device).options._timeout.total_seconds()  # type: ignore[attr-defined]
        for axis, group in groups.items()
        if axis != "world"
    }


def test_groups_have_the_time_limit_of_the_run() -> None:
    job = clipped()
    job = job.model_copy(update={"run": job.run.model_copy(update={"timeout_s": 77.0})})
    for limits in on_ranks("dp=2 pp=2 microbatch=2", time_limits, "llama", job):
        assert {*limits.values()} == {77.0}
        assert {"dp_replicate", "pp forward even", "pp backward even"} <= limits.keys()


def test_an_axis_takes_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 ranks each takes part in eight calls, whatever the number of groups: an axis has up to 64 of them."""
    layout, calls = Layout("dp_replicate=2 dp_shard=4 tp=4 pp=4"), []
    world = SimpleNamespace(size=lambda: 128, rank=lambda: 5, bound_device_id=0)
    stub = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 128,
        get_rank=lambda: 5,
        get_backend=lambda group: "nccl",
        group=SimpleNamespace(WORLD=world),
        split_group=lambda **given: calls.append(given) or len(calls),
    )
    monkeypatch.setattr(mesh, "dist", stub)
    monkeypatch.setattr(mesh, "dist", stub)
    axes = dict.fromkeys(("world", "dp_replicate", "dp_shard", "tp", "pp", "dp_shard"), 0)
    program: Any = SimpleNamespace(axes=axes, step=SimpleNamespace(layout=layout, ranks=Ranks.of(layout)))
    built = mesh.build(program, torch.device("cuda", 0), 77.0)
    assert len(calls) == 4 + len(schedules.links(4, 1)) == len(built.groups) + len(built.links) - 1
    assert {call["timeout"].total_seconds() for call in calls} == {77.0}
    for call in calls:
        members = [rank for ranks in call["split_ranks"] for rank in ranks]
        assert len(members) == len({*members}) <= 128
    mesh.forget_groups()


def sent_whole(rank: int, world: int, value: Any) -> Any:
    group = torch.distributed.group.WORLD
    assert group is not None
    return broadcast_from(world - 1, value if rank == world - 1 else None, group, torch.device("cpu"))


def test_results_of_the_last_stage_arrive_whole() -> None:
    logits = torch.arange(6.0).view(2, 3).t()
    for got in pool(2).run(sent_whole, {"logits": logits, "others": (torch.ones(()), "text"), "none": None}):
        assert torch.equal(got["logits"], logits)
        assert [str(one) for one in got["others"]] == ["tensor(1.)", "text"]
        assert got["none"] is None


def refused(rank: int, world: int) -> str:
    with pytest.raises(ModelError) as error:
        sent_whole(rank, world, SimpleNamespace(logits=torch.ones(2)))
    return str(error.value)


def test_results_that_are_no_plain_data_are_refused_on_every_rank() -> None:
    assert all("returns a SimpleNamespace" in text for text in pool(2).run(refused))


PLAIN = {
    "floats": [0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan], "tuple": (1, (2**64 - 1, True, None)), "\ud800": "ü\n",
    (3, "key"): {1, 2}, "range": range(3), "empty": [],
}  # fmt: skip


def exchanged(rank: int, world: int) -> tuple[list[Any], Any]:
    mine = {**PLAIN, "rank": rank, "long": "x" * 1000 * rank}
    return gather_values(mine, world), broadcast_value(1, mine)


def test_values_arrive_exactly() -> None:
    for gathered, sent in pool(2).run(exchanged):
        assert [one.pop("rank") for one in gathered] == [0, 1]
        assert [len(one.pop("long")) for one in gathered] == [0, 1000]
        assert sent.pop("rank") == 1
        assert sent.pop("long")
        assert [repr(one) for one in (*gathered, sent)] == [
            repr(PLAIN)
        ] * 3  # nan is not equal to itself, and -0.0 to 0.0


@pytest.mark.parametrize("value", [object(), b"bytes", 1j, torch.ones(1), {"deep": [Job]}, lambda: None])
def test_what_is_no_plain_data_is_not_sent(value: Any) -> None:
    with pytest.raises(messages.NotPlainError):
        messages.to_text(value)


def ways_of_making_groups(rank: int, world: int, model: str, layout: str, job: Job) -> list[str | None]:
    asked: list[str | None] = []
    split = torch.distributed.split_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "split_group", lambda **g: (asked.append(g["group_desc"]), split(**g))[1])
        mesh.forget_groups()
        make_run(rank, world, model, layout, job).prepare(next(batches(Tokens(), job)).samples([0]))
    return asked


def test_groups_on_a_device_are_splits() -> None:
    asked = on_ranks("pp=2 microbatch=2", ways_of_making_groups, "llama", clipped(), device="cuda")
    assert asked == [["link of 0,1", "link of 0,1"]] * 2
