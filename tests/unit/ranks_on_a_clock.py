"""Ranks that follow scripts on a clock of their own, and write what a recorder would: a truth against which `explain` is held.

    work(ns)  layer(name, ...)  task(label, ...)  region(name, ns)      what a host does
    sync(owner)  issue(owner)  wait(owner)  send(owner)  recv(owner)    what it sends, and waits for
    hidden(ns)                                                          work in which nothing is recorded, as a slow Python

A collective ends its `transfer` after its last rank has entered it, and collectives of one group come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.layout import Layout
from samestep.program.ranks import Ranks
from samestep.program.recorded import RankRecord, RecordedStep, RecordHead, SentOp

Script = Sequence[tuple[Any, ...]]


def work(ns: int) -> tuple[Any, ...]:
    return ("work", ns)


def task(label: str, *body: tuple[Any, ...]) -> tuple[Any, ...]:
    return ("nest", "task", label, body)


def layer(name: str, *body: tuple[Any, ...]) -> tuple[Any, ...]:
    return ("nest", "layer", name, body)


def region(name: str, ns: int) -> tuple[Any, ...]:
    return ("nest", "region", name, (work(ns),))


def backward(name: str) -> tuple[Any, ...]:
    return ("backward", name)


def sync(owner: str) -> tuple[Any, ...]:
    return ("sync", owner)


def issue(owner: str) -> tuple[Any, ...]:
    return ("issue", owner)


def wait(owner: str) -> tuple[Any, ...]:
    return ("wait", owner)


@dataclass
class _Rank:
    rank: int
    now: int
    events: list[list[Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    cpu: int = 0


@dataclass
class World:
    """The groups of a layout, what its ops take, and what has been entered."""

    layout: str
    ops: Sequence[SentOp]
    transfer: Mapping[str, int]
    """Nanoseconds of each op, by owner."""
    entered: dict[Any, dict[int, int]] = field(default_factory=dict)
    ended: dict[Any, int] = field(default_factory=dict)

    def group(self, rank: int, owner: str) -> tuple[Any, tuple[int, ...]]:
        axis = next(op.axis for op in self.ops if op.owner == owner)
        return axis, Ranks.of(Layout(self.layout)).group(rank, axis)

    def enter(self, one: _Rank, owner: str, number: int) -> Callable[[], int | None]:
        """Enter the n-th op of an owner; return what says when it has ended, or None as long as a rank is missing."""
        axis, members = self.group(one.rank, owner)
        key = (axis, members, owner, number)
        self.entered.setdefault(key, {})[one.rank] = one.now

        def ends() -> int | None:
            if len(self.entered[key]) < len(members):
                return None
            if key not in self.ended:
                before = max((end for other, end in self.ended.items() if other[:2] == key[:2]), default=0)
                self.ended[key] = max(before, *self.entered[key].values()) + self.transfer[owner]
            return self.ended[key]

        return ends


def _follow(
    one: _Rank, world: World, script: Script, open_ops: dict[str, tuple[int, Callable[[], int | None]]]
) -> Generator[None]:
    for word, *given in script:
        if word == "work":
            one.now += given[0]
            one.cpu += given[0]
        elif word == "backward":
            one.events.append(["backward", given[0], one.now, one.now])
        elif word == "nest":
            form, name, body = given
            event = [form, name, one.now, 0]
            one.events.append(event)
            yield from _follow(one, world, body, open_ops)
            event[3] = one.now
        elif word in ("sync", "issue"):
            (owner,) = given
            number = one.counts[owner] = one.counts.get(owner, -1) + 1
            ends = world.enter(one, owner, number)
            event = ["sent", owner, one.now, one.now, number, "", int(word == "issue")]
            one.events.append(event)
            if word == "issue":
                open_ops[owner] = (number, ends)
                continue
            while (end := ends()) is None:
                yield
            one.now = event[3] = max(one.now, end)
        else:
            number, ends = open_ops.pop(given[0])
            event = ["wait", given[0], one.now, 0, number, "", 0]
            one.events.append(event)
            while (end := ends()) is None:
                yield
            one.now = event[3] = max(one.now, end)


def records_of(
    layout: str,
    ops: Sequence[SentOp],
    transfer: Mapping[str, int],
    scripts: Mapping[int, Script],
    *,
    steps: int = 3,
    between: Mapping[int, Script] | None = None,
    clocks: Mapping[int, int] | None = None,
) -> dict[int, RankRecord]:
    """Return the records of ranks that follow their scripts, with what they do `between` steps, each by a clock that is so far off."""
    where = Layout(layout)
    ranks = Ranks.of(where)
    found = {
        rank: RankRecord(path=__file__, head=_head(rank, where, ranks, ops, clocks or {}))  # type: ignore[arg-type]
        for rank in scripts
    }
    states = {rank: _Rank(rank, 1_000_000) for rank in scripts}
    for number in range(1, steps + 1):
        world = World(layout, ops, transfer)
        begins = {rank: one.now for rank, one in states.items()}
        for one in states.values():
            one.events, one.counts, one.cpu = [], {}, 0
        running = {rank: _follow(one, world, scripts[rank], {}) for rank, one in states.items()}
        while running:
            running = {rank: steps_of for rank, steps_of in running.items() if next(steps_of, "done") is None}
        ends = {rank: one.now for rank, one in states.items()}
        cpu = {rank: one.cpu for rank, one in states.items()}
        for rank, one in states.items():
            [*_follow(one, world, (between or {}).get(rank, ()), {})]
        until = max(one.now for one in states.values())
        for rank, one in states.items():
            own_until = one.now
            events = [[f, n, b - begins[rank], e - begins[rank], *m] for f, n, b, e, *m in one.events]
            events = [[*event[:6], number] if event[0] == "wait" else event for event in events]
            off = (clocks or {}).get(rank, 0)
            found[rank].steps[number] = RecordedStep(
                step=number,
                begin_ns=begins[rank] - off,
                end_ns=ends[rank] - off,
                until_ns=own_until - off,
                cpu_ns=cpu[rank],
                events=events,
            )
        del until
    return found


def _head(rank: int, layout: Layout, ranks: Ranks, ops: Sequence[SentOp], clocks: Mapping[int, int]) -> RecordHead:
    axes = dict.fromkeys(op.axis for op in ops)
    return RecordHead(
        rank=rank,
        world_size=layout.world_size,
        host=f"host{clocks.get(rank, 0)}",
        clock=str(clocks.get(rank, 0)),
        layout=str(layout),
        stage=ranks.coordinate(rank, "pp"),
        device="cpu",
        groups={axis: ranks.group(rank, axis) for axis in axes},
        ops=list(ops),
        layers=["a", "b"],
    )
