"""Pipeline schedules as data: the order in which each stage runs its forwards, backwards and weight gradients.

A model cut into p stages works on m micro-batches. A schedule determines only the order in which a stage takes them; what each action
computes is the same in all of them, so they give one result and differ in time and memory. With p=4, m=5 (`2F` is the forward of micro-batch
2, `2B` its backward, in zero bubble for the inputs alone, `2W` its weight gradients):

```
1F1B          0F 1F 2F 3F ·  ·  ·  ·  ·  ·  0B─── 4F 1B─── ·  2B─── ·  3B─── ·  4B───
              ·  0F 1F 2F ·  ·  ·  ·  0B─── 3F 1B─── 4F 2B─── ·  3B─── ·  4B───
              ·  ·  0F 1F ·  ·  0B─── 2F 1B─── 3F 2B─── 4F 3B─── ·  4B───
              ·  ·  ·  0F 0B─── 1F 1B─── 2F 2B─── 3F 3B─── 4F 4B───

zero bubble   0F 1F 2F 3F ·  ·  ·  0B 0W 4F 1B 1W 2B 2W 3B 3W 4B 4W
              ·  0F 1F 2F ·  ·  0B 3F 1B 0W 4F 2B 1W 3B 2W 4B 3W 4W
              ·  ·  0F 1F ·  0B 2F 1B 3F 2B 0W 4F 3B 1W 4B 2W 3W 4W
              ·  ·  ·  0F 0B 1F 1B 2F 2B 3F 3B 0W 4F 4B 1W 2W 3W 4W
```
The stage before waits for the input gradient alone, so zero bubble defers weight gradients: stage s runs them s micro-batches late, and
every stage holds the activations of p micro-batches, as the first stage of 1F1B does.

For equal stages, free communication, m >= p and v virtual stages on a rank (F, B, W: seconds of a whole stage):

| schedule    | bubble of a stage | share of busy time  | activations held by stage s, in micro-batches          |
|-------------|-------------------|---------------------|--------------------------------------------------------|
| gpipe       | (p-1) (F+B)       | (p-1) / m           | m                                                      |
| 1f1b        | (p-1) (F+B)       | (p-1) / m           | p-s                                                    |
| interleaved | (p-1) (F+B) / v   | (p-1) / (v m)       | (2(p-s-1) + (v-1) r + 1) / v; at s=0, r=p: p + (p-1)/v |
| zero-bubble | (p-1) (F+B-W)     | (p-1) / 3m if F=B=W | p, of which s only wait for their W                    |

The B of the first three is the whole backward. Zero bubble's bubble holds for W <= F and W <= B; for any W > 0 it is smaller than that of
1F1B. No schedule holds more than m.

Sources: gpipe: Huang et al. 2019, arXiv:1811.06965 (it runs the backwards in reverse; here they must ascend, as in every schedule, which costs the same). 1f1b
(PipeDream-flush) and interleaved: Narayanan et al. 2021, arXiv:2104.04473; the memory of interleaved: Korthikanti et al. 2022,
arXiv:2205.05198. zero-bubble (ZB-H1): Qi et al. 2023, arXiv:2401.10241, figure 3.

Interleaved runs p micro-batches at a time through its chunks, and the paper requires that p divides m. Here the m micro-batches are divided
into m // p rounds (one if m < p) as evenly as possible, the longest first, of r = ceil(m / rounds) micro-batches: r = p where p divides m.
No round is shorter than p, because in a shorter one a rank would wait for its micro-batches to come back from the last stage. So the bubble
is the paper's for every m >= p, and only the number of activations held grows.

Every schedule accumulates a chunk's gradients in ascending order of micro-batches, as one device does. Reductions start with the last
micro-batch. Everything that other modules know of a schedule is in its `ScheduleSpec`, and a new schedule is a new row of
`SCHEDULES`: layouts, programs, messages between stages, memory and bounds follow from its order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from samestep.errors import LayoutError


class TaskKind(StrEnum):
    """The kind of a task; orders leave the update out, since every schedule ends with it."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward, or the gradients of the inputs alone if the order has W."""
    WEIGHT = "W"
    """The gradients of the weights."""
    UPDATE = "U"
    """The optimizer's update, once a step."""
    OUTPUTS = "O"
    """A forward for its outputs alone, which a loss over all samples needs before any backward; no order has it."""


class Action(NamedTuple):
    """One entry of an order: the kind of task, its micro-batch and its chunk.

    Chunk c on stage s is virtual stage c * num_stages + s of the model.
    """

    kind: TaskKind
    microbatch: int
    chunk: int = 0


Order = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """A pipeline schedule: its name in a layout, the order of each stage, and properties of that order."""

    name: str
    """Value of the layout word `schedule`."""
    order: Callable[[int, int, int, int], Order]
    """Function that returns the order of one stage, given its index and the numbers of stages, micro-batches and
    chunks. The orders of all stages pass `check`: among others, the actions of one kind take the micro-batches of a chunk in
    ascending order, since gradients are added up in this order in every layout."""
    takes_chunks: bool = False
    """Whether a rank may have several virtual stages (chunks)."""
    splits_backward: bool = False
    """Whether weight gradients are separate actions, so that the orders have W."""
    is_planned: bool = True
    """Whether `plan` tries it; not one that takes as long as another schedule and holds more activations."""


def order(schedule: str, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Return the order of one stage under a schedule; every number of micro-batches is legal.

    Raises:
        LayoutError: several virtual stages (chunks) with a schedule that takes one.
    """
    assert 0 <= stage < num_stages, f"stage {stage} of {num_stages}"
    assert num_microbatches >= 1, f"{num_microbatches} micro-batches"
    assert num_chunks >= 1, f"{num_chunks} chunks"
    spec = SCHEDULES[schedule]
    if num_chunks > 1 and not spec.takes_chunks:
        raise LayoutError(
            "virtual-stages",
            f"schedule={schedule} takes no virtual stages, and {num_chunks} were given. Use {taking_chunks()}",
        )
    return spec.order(stage, num_stages, num_microbatches, num_chunks)


def taking_chunks() -> str:
    """Return the schedules that take virtual stages (chunks), as layout words."""
    return " or ".join(f"schedule={spec.name}" for spec in SCHEDULES.values() if spec.takes_chunks)


def gpipe(stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Return all forwards, then all backwards."""
    return (*_all(TaskKind.FORWARD, num_microbatches), *_all(TaskKind.BACKWARD, num_microbatches))


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Return a forward for each later stage, then a forward and a backward in turn, then the other backwards."""
    forwards, backwards = _all(TaskKind.FORWARD, num_microbatches), _all(TaskKind.BACKWARD, num_microbatches)
    return _in_turn(forwards, backwards, num_stages - stage - 1)


def interleaved(stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Return the order of interleaved 1F1B: rounds of micro-batches go through the chunks one by one, and back.

    A stage starts with the forwards of one round through all chunks but the last, and two more forwards for each later
    stage: one for the way there and one for the way back. With one chunk it is 1F1B.
    """
    if num_chunks == 1:
        return one_f_one_b(stage, num_stages, num_microbatches)
    forwards, backwards = (
        _all(kind, num_microbatches, num_stages, num_chunks) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
    )
    round_length = len(next(_rounds(num_microbatches, num_stages)))
    return _in_turn(forwards, backwards, 2 * (num_stages - stage - 1) + (num_chunks - 1) * round_length)


def zero_bubble(stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Return the order of ZB-H1: that of 1F1B, with weight gradients `stage` micro-batches late, which fill the end."""
    written: list[Action] = []
    weights = _all(TaskKind.WEIGHT, num_microbatches)
    for action in one_f_one_b(stage, num_stages, num_microbatches):
        written.append(action)
        if action.kind is TaskKind.BACKWARD and action.microbatch >= stage:
            written.append(weights[action.microbatch - stage])
    return (*written, *weights[max(num_microbatches - stage, 0) :])


DEFAULT: Final = "1f1b"
"""The schedule of a layout that names none."""
SCHEDULES: Final[Mapping[str, ScheduleSpec]] = {
    spec.name: spec
    for spec in (
        ScheduleSpec(name="gpipe", order=gpipe, is_planned=False),
        ScheduleSpec(name=DEFAULT, order=one_f_one_b),
        ScheduleSpec(name="interleaved", order=interleaved, takes_chunks=True),
        ScheduleSpec(name="zero-bubble", order=zero_bubble, splits_backward=True),
    )
}
"""All schedules by name, in the order in which they are listed to the user."""


@lru_cache(maxsize=2**7)
def _all(kind: TaskKind, num_microbatches: int, num_stages: int = 1, num_chunks: int = 1) -> Order:
    """Return all actions of a kind in the order of every stage: rounds of micro-batches go through the chunks, or back."""
    rounds, chunks = _rounds(num_microbatches, num_stages), range(num_chunks)
    in_order = chunks if kind is TaskKind.FORWARD else chunks[::-1]
    return tuple(Action(kind, index, chunk) for part in rounds for chunk in in_order for index in part)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> Order:
    """Return `num_warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    warm = min(num_warmup, len(forwards))
    pairs = zip(forwards[warm:], backwards, strict=False)
    remaining = backwards[len(forwards) - warm :]
    return (*forwards[:warm], *(action for pair in pairs for action in pair), *remaining)


def _rounds(num_microbatches: int, num_stages: int) -> Iterator[range]:
    """Yield rounds of at least `num_stages` micro-batches, as even as possible, the longest first."""
    num_rounds = max(num_microbatches // num_stages, 1)
    size, longer = divmod(num_microbatches, num_rounds)
    start = 0
    for index in range(num_rounds):
        end = start + size + (index < longer)
        yield range(start, end)
        start = end


def needs(action: Action, stage: int, num_stages: int, num_chunks: int) -> Iterator[tuple[int, Action]]:
    """Yield the actions that must run before an action of `stage`, each with the stage that runs it.

    The result of another stage's action has to be sent: activations to a forward, gradients to a backward.
    """
    kind, microbatch, chunk = action
    virtual = chunk * num_stages + stage
    if kind is TaskKind.FORWARD and virtual > 0:
        yield (virtual - 1) % num_stages, Action(kind, microbatch, (virtual - 1) // num_stages)
    if kind is TaskKind.BACKWARD:
        yield stage, Action(TaskKind.FORWARD, microbatch, chunk)
        if virtual + 1 < num_stages * num_chunks:
            yield (virtual + 1) % num_stages, Action(kind, microbatch, (virtual + 1) // num_stages)
    if kind is TaskKind.WEIGHT:
        yield stage, Action(TaskKind.BACKWARD, microbatch, chunk)


class Message(NamedTuple):
    """A message from one stage to another: the result of an action of the sender."""

    sender: int
    receiver: int
    action: Action


def link_of(message: Message, num_stages: int) -> str:
    """Return the name of the process groups, one for each pair of stages, in which a message is sent.

    NCCL carries out a rank's sends and receives in one group in the order of issue, each once the other end has come to
    it. So a pair of stages has a group for each direction, in which one end only sends and the other only receives. A
    stage is in two pairs: those with an even first stage, with an odd one, and around the end have groups of three names.
    """
    is_forward = message.action.kind is TaskKind.FORWARD
    first = message.sender if is_forward else message.receiver
    place = "around" if first == num_stages - 1 else "odd" if first % 2 else "even"
    return f"pp {'forward' if is_forward else 'backward'} {place}"


def links(num_stages: int, num_chunks: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the pairs of stages, lower stage first, that the links of each name connect."""
    links: dict[str, tuple[tuple[int, int], ...]] = {}
    for first in range(num_stages if num_chunks > 1 else num_stages - 1):
        second = (first + 1) % num_stages
        for ends, kind in (((first, second), TaskKind.FORWARD), ((second, first), TaskKind.BACKWARD)):
            name = link_of(Message(*ends, Action(kind, 0)), num_stages)
            links[name] = (*links.get(name, ()), (min(first, second), max(first, second)))
    return links


def check(
    orders: Sequence[Sequence[Action]], num_chunks: int, link_of: Callable[[Message, int], str] = link_of
) -> None:
    """Check the orders of all stages by running them, with the messages as NCCL carries them out in the process groups that `link_of` names.

    The number of micro-batches is that of the largest one that any stage names; one W anywhere means that every B has a W.

    Raises:
        LayoutError: an action is missing, is repeated, runs before one it needs on its own stage, or breaks the order in
            which gradients are accumulated and reduced; or the stages deadlock, and then the text names what each one waits
            for, and the links with ends that issue messages in two orders.
    """
    has_weight = any(action.kind is TaskKind.WEIGHT for actions in orders for action in actions)
    kinds = [TaskKind.FORWARD, TaskKind.BACKWARD, *([TaskKind.WEIGHT] if has_weight else [])]
    num_microbatches = 1 + max((action.microbatch for actions in orders for action in actions), default=-1)
    expected = dict.fromkeys(
        Action(kind, index, chunk) for index in range(num_microbatches) for chunk in range(num_chunks) for kind in kinds
    )
    for stage, actions in enumerate(orders):
        _check_stage(stage, actions, expected, len(orders), num_chunks)
    for are_shapes_known in (False, True):  # as in the first step, and as in the later ones
        _Transport(orders, num_chunks, link_of, are_shapes_known).check()


def _check_stage(
    stage: int, actions: Sequence[Action], expected: Collection[Action], num_stages: int, num_chunks: int
) -> None:
    """Raise LayoutError for an order that is wrong whatever the other stages do."""

    def refused(verb: str, action: Action, rule: str) -> LayoutError:
        return LayoutError("schedule-order", f"stage {stage} {verb} {_label(action, num_chunks > 1)}{rule}")

    times = Counter(actions)
    for action in times:
        if action not in expected:
            raise refused("runs", action, f", which is not an action with virtual_stages={num_chunks}")
        if times[action] > 1:
            raise refused("runs", action, f" {times[action]} times: every action runs once")
    for action in expected:
        if action not in times:
            raise refused("never runs", action, ": every action runs once")
    done: set[Action] = set()
    for action in actions:
        for owner, needed in needs(action, stage, num_stages, num_chunks):
            if owner == stage and needed not in done:
                raise refused("runs", action, f" before {_label(needed, num_chunks > 1)}, which it needs")
        done.add(action)
    for earlier, later, rule in _misordered_pairs(actions, num_chunks):
        raise refused("runs", earlier, f" before {_label(later, num_chunks > 1)}. {rule}")


def _misordered_pairs(actions: Sequence[Action], num_chunks: int) -> Iterator[tuple[Action, Action, str]]:
    """Yield (a, b, rule) where a is scheduled before b but must run after it by a rule.

    Gradients are accumulated in one order in every layout, and the gradients of a stage's last chunk are reduced first.
    """
    latest: dict[tuple[TaskKind, int], Action] = {}
    last = max((action.microbatch for action in actions), default=0)
    for action in actions:
        earlier = latest.get((action.kind, action.chunk))
        if earlier is not None and earlier.microbatch > action.microbatch:
            yield (
                earlier,
                action,
                "Use ascending micro-batches for the actions of one kind: gradients are added up in this order",
            )
        latest[action.kind, action.chunk] = action
        if action.kind is TaskKind.WEIGHT and action.microbatch == last:
            for chunk in range(action.chunk + 1, num_chunks):
                follower = Action(TaskKind.WEIGHT, last, chunk)
                if latest.get((TaskKind.WEIGHT, chunk)) != follower:
                    yield (
                        action,
                        follower,
                        "Use the weight gradients of the first chunk as the last action: later chunks are reduced first",
                    )


class _Transport:
    """The messages of a step as NCCL carries them out: those of one stage and link in order, each when both ends issued it."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        num_chunks: int,
        link_of: Callable[[Message, int], str],
        are_shapes_known: bool,
    ) -> None:
        self._num_chunks, self._link_of = num_chunks, link_of
        self._stages = [issues(orders, stage, num_chunks, are_shapes_known) for stage in range(len(orders))]
        self._issued: list[dict[str, deque[Message]]] = [{} for _ in orders]
        """The messages of each stage and link that are not carried out, in the order of issue."""
        self._arrived: set[Message] = set()

    def check(self) -> None:
        """Let each stage issue what it can, and carry out what both ends have come to, until all is done.

        Raises:
            LayoutError: nothing more can be carried out.
        """
        awaited: dict[int, Message] = {}
        running = set(range(len(self._stages)))
        moved = True
        while moved:
            moved = False
            for stage in sorted(running):
                if stage in awaited and awaited[stage] not in self._arrived:
                    continue
                moved = True
                awaited.pop(stage, None)
                for message, is_issued in self._stages[stage]:
                    if not is_issued:
                        awaited[stage] = message
                        break
                    self._issued[stage].setdefault(self._link_of(message, len(self._stages)), deque()).append(message)
                else:
                    running.remove(stage)
            moved = self._carry_out() or moved
        if running or any(queue for queues in self._issued for queue in queues.values()):
            stuck = [f"stage {stage} waits for {self._named(message)}" for stage, message in sorted(awaited.items())]
            stuck += [
                f"stage {sent.sender} sends {self._named(sent)} where stage {sent.receiver} receives {self._named(received)}"
                for sent, received in self._meeting()
            ]
            raise LayoutError(
                "schedule-deadlock",
                f"these orders deadlock where messages of two stages keep their order: {'; '.join(stuck)}",
            )

    def _meeting(self) -> Iterator[tuple[Message, Message]]:
        """Yield the first message that is sent over each link, and the first that is received there, where both are issued."""
        for stage, queues in enumerate(self._issued):
            for link, queue in queues.items():
                other = self._issued[queue[0].receiver].get(link) if queue and queue[0].sender == stage else None
                if other and other[0].sender == stage:
                    yield queue[0], other[0]

    def _carry_out(self) -> bool:
        """Carry out the messages that are the first of their link at both ends; return whether there were any."""
        carried = [message for message, received in self._meeting() if message == received]
        for message in carried:
            link = self._link_of(message, len(self._stages))
            for end in (message.sender, message.receiver):
                self._issued[end][link].popleft()
        self._arrived.update(carried)
        return bool(carried)

    def _named(self, message: Message) -> str:
        return f"{_label(message.action, self._num_chunks > 1)} of stage {message.sender}"


def issues(
    orders: Sequence[Sequence[Action]], stage: int, num_chunks: int, are_shapes_known: bool
) -> Iterator[tuple[Message, bool]]:
    """Yield the messages that one stage issues, its receives and its sends, and those for which it waits (False).

    A stage posts the next receive of each link ahead of need: of an activation once the shapes of activations are known,
    of a gradient once its forward has run.
    """
    num_stages, order = len(orders), orders[stage]
    arriving = dict(_arrivals(order, stage, num_stages, num_chunks))
    due: dict[str, list[Action]] = {}
    for action in reversed(arriving):
        due.setdefault(link_of(arriving[action], num_stages), []).append(action)
    done: set[Action] = set()
    posted: set[Action] = set()

    def post_ahead() -> Iterator[tuple[Message, bool]]:
        for action in [queue[-1] for queue in due.values() if queue and queue[-1] not in posted]:
            if are_shapes_known if action.kind is TaskKind.FORWARD else action._replace(kind=TaskKind.FORWARD) in done:
                posted.add(action)
                yield arriving[action], True

    for action in order:
        message = arriving.get(action)
        if action.kind is TaskKind.FORWARD or (action.kind is TaskKind.BACKWARD and message is None):
            yield from post_ahead()
        if message is not None:
            due[link_of(message, num_stages)].pop()
            if action not in posted:
                yield message, True
            yield message, False
            yield from post_ahead()
        done.add(action)
        if (receiver := _receiver(action, stage, num_stages, num_chunks)) is not None:
            yield Message(stage, receiver, action), True


def _arrivals(
    order: Sequence[Action], stage: int, num_stages: int, num_chunks: int
) -> Iterator[tuple[Action, Message]]:
    """Yield the actions of a stage that need a message, and the message."""
    for action in order:
        for sender, needed in needs(action, stage, num_stages, num_chunks):
            if sender != stage:
                yield action, Message(sender, stage, needed)


def _receiver(action: Action, stage: int, num_stages: int, num_chunks: int) -> int | None:
    """Return the stage to which the result of an action is sent; None where it is sent to none."""
    virtual = action.chunk * num_stages + stage
    if action.kind is TaskKind.FORWARD and num_stages > 1 and virtual + 1 < num_stages * num_chunks:
        return (stage + 1) % num_stages
    return (stage - 1) % num_stages if action.kind is TaskKind.BACKWARD and num_stages > 1 and virtual > 0 else None


def in_flight(actions: Sequence[Action]) -> int:
    """Return the largest number of activations that a stage holds at once, each of one micro-batch in one chunk.

    Divide by the number of chunks to count micro-batches of the whole stage. Activations are held until the backward,
    or until the weight gradients if these are actions of their own.
    """
    last = TaskKind.WEIGHT if any(action.kind is TaskKind.WEIGHT for action in actions) else TaskKind.BACKWARD
    count = peak = 0
    for action in actions:
        count += (action.kind is TaskKind.FORWARD) - (action.kind is last)
        peak = max(peak, count)
    return peak


def to_text(orders: Sequence[Sequence[Action]]) -> str:
    """Return a line for each stage: `0F 1F 0B`, and with several chunks the chunk after the kind: `0F0 0F1 0B1`."""
    has_chunks = any(action.chunk > 0 for actions in orders for action in actions)
    return "\n".join(" ".join(_label(action, has_chunks) for action in actions) for actions in orders)


def _label(action: Action, has_chunks: bool) -> str:
    return f"{action.microbatch}{action.kind}{action.chunk if has_chunks else ''}"
