"""Proxies of the workers on another host: the leading host uses them like local ones, and the other host starts them.

```
leading host                       channel                             following host
DistantWorkers ── run, tell at, tell leave, signal, kill, end ──► Follower ── LocalWorkers ── its ranks
               ◄── ready, joined, at, done, failed; stop ───────
```
All of it is JSON, and is checked against the types below when it comes: a host that says anything else is lost. Who waits for
whom, which failure was the first and when a run hangs is decided in one place, by the leading host
(`runtime/processes/workers.py`), which ends the run on every host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from types import FrameType
from typing import Any

from pydantic import TypeAdapter
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from samestep.errors import SamestepError
from samestep.runtime.processes.join import REQUESTS, STOP_SIGNALS, restore_signals
from samestep.runtime.processes.local_workers import LocalWorkers
from samestep.runtime.processes.whereabouts import Whereabouts
from samestep.runtime.processes.worker import Failure, LaunchOptions, failure_of
from samestep.wings.cluster.hosts.channel import Channel, shorten
from samestep.wings.cluster.hosts.meeting import Meeting

_starts = itertools.count()
_END_GRACE_S = 40.0  # another host waits for its workers to leave
_MOST_CHARACTERS_OF_LINES = 40 << 10


@dataclass(frozen=True)
class Order:
    """The message by which the leading host has another one start workers."""

    layout: str
    folder: str
    until: int | None
    resume_from: str
    lock: str
    ranks: int
    first_rank: int
    local_ranks: int
    ranks_per_node: int
    store: tuple[str, int]
    start: int
    """The number of this start."""


_ORDERS = TypeAdapter(Order)
_FAILURES = TypeAdapter(Failure)
_VALUES: Mapping[str, TypeAdapter[Any]] = {
    "ready": TypeAdapter(None),
    "joined": TypeAdapter(None),
    "at": TypeAdapter(Whereabouts),
    "done": TypeAdapter(tuple[None, dict[str, int]]),
}
_NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""The errors of a message with wrong words, ranks or types."""


class DistantWorkers:
    """The workers of one run on another host, seen from the leading one."""

    def __init__(self, channel: Channel, ranks: range, order: Mapping[str, Any]) -> None:
        self.host, self.ranks = channel.peer, ranks
        self._channel, self._order = channel, order
        self._over: set[int] = set()

    def start(self) -> None:
        """Ask the other host to start its workers."""
        self._channel.send({"run": dict(self._order)})

    def sources(self) -> list[Any]:
        """Return the channel, which can be waited for."""
        return [] if self._channel.lost else [self._channel]

    def hear(self) -> Iterator[tuple[int, str, Any]]:
        """Yield the received messages, as rank, word and value; a host that is lost is a failure of all its ranks."""
        for message in self._channel.receive():
            try:
                said = self._read(message)
            except _NONSENSE:
                self._channel.lose()
                break
            if said is not None:
                yield said
        for rank in self.ranks if self._channel.lost else ():
            if rank not in self._over:
                self._over.add(rank)
                yield rank, "failed", Failure(rank, time.monotonic(), f"is lost with its host: {self._channel.lost}")

    def _read(self, message: Mapping[str, Any]) -> tuple[int, str, Any] | None:
        """Return a message as rank, word and value; None for one of workers that have ended late."""
        if "stop" in message:
            return self.ranks.start, "stop", (signal.Signals(message["stop"]), bool(message["again"]))
        if message["start"] != self._order["start"] or "word" not in message:
            return None
        rank, word, value = message["rank"], message["word"], message["value"]
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is of another host")
        if word != "failed":
            return rank, word, _VALUES[word].validate_python(value)
        report = {**value, "time_s": time.monotonic() - value["age_s"], "text": f"on {self.host}: {value['text']}"}
        failure = _FAILURES.validate_python({**report, "rank": rank})
        self._over.add(rank)
        return rank, word, failure

    def tell(self, rank: int, word: str) -> None:
        """Ask a worker how far it has come (`at`), or tell it that it may leave (`leave`)."""
        if word == "leave":
            self._over.add(rank)
        self._channel.send({"tell": word, "rank": rank})

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker."""
        self._channel.send({"signal": int(number), "rank": rank})

    def kill(self, rank: int) -> None:
        """Kill a worker and the processes it started."""
        self._channel.send({"kill": True, "rank": rank})

    def end(self) -> None:
        """End the workers of the other host, and wait until they are gone."""
        self._channel.send({"end": True})
        end_s = time.monotonic() + _END_GRACE_S
        while not self._channel.lost and time.monotonic() < end_s:
            connection.wait(self.sources(), timeout=1.0)
            messages = self._channel.receive()
            if any("ended" in message and message["start"] == self._order["start"] for message in messages):
                return


@dataclass(frozen=True)
class Away:
    """The other hosts of a run, the number of ranks of each, and the order for them."""

    meeting: Meeting
    num_ranks: tuple[int, ...]
    """The number of ranks of this host, and of each of the others."""
    order: Mapping[str, Any]
    """The further fields of the order that a follower needs to know its function and its arguments."""

    first_rank = 0

    @property
    def interface(self) -> str:
        """The interface of this host over which the hosts met."""
        return self.meeting.interface

    @property
    def ranks_per_node(self) -> int:
        """The ranks of every host; 1 where they differ."""
        return self.num_ranks[0] if len({*self.num_ranks}) == 1 else 1

    @contextlib.contextmanager
    def store(self) -> Iterator[tuple[str, int]]:
        """Hold the store in which the ranks of one start find each other, on this host's address alone; yield its address."""
        # A new one for each start: the addresses of dead ranks must not be found.
        family = socket.AF_INET6 if ":" in self.meeting.address else socket.AF_INET
        listening = socket.create_server((self.meeting.address, 0), family=family)
        host, port, *_ = listening.getsockname()
        server = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        yield host, port
        del server

    def workers(self, options: LaunchOptions) -> list[DistantWorkers]:
        """Return the workers of each other host."""
        led: list[DistantWorkers] = []
        first = self.num_ranks[0]
        for channel, count in zip(self.meeting.followers, self.num_ranks[1:], strict=True):
            keywords = {"ranks": options.ranks, "first_rank": first, "local_ranks": count, "store": options.store}
            keywords |= {"ranks_per_node": options.ranks_per_node, "start": next(_starts)}
            led.append(DistantWorkers(channel, range(first, first + count), {**self.order, **keywords}))
            first += count
        return led


class Follower:
    """This host's part of a run that another host leads: it starts workers on orders, until the order that ends the
    run."""

    def __init__(self, leader: Channel, workers_of: Callable[[Order], LocalWorkers]) -> None:
        self._leader, self._workers_of = leader, workers_of
        self._workers: LocalWorkers | None = None
        self._signals: list[int] = []
        self._num_passed_on = 0
        self._start = -1
        """The number that the leading host gave to the start of these workers."""

    def follow(self) -> dict[str, Any] | None:
        """Do as the leading host says, and return its last word; None where it is lost."""
        handlers: dict[int, Any] = {
            number: signal.signal(number, self._on_signal)
            for number in (*STOP_SIGNALS, *REQUESTS)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            while True:
                sources: list[Any] = [self._leader, *(self._workers.sources() if self._workers else ())]
                connection.wait(sources, timeout=0.1)
                self._pass_on()
                for message in self._leader.receive():
                    if "bye" in message and isinstance(message["bye"], dict):
                        return message["bye"]
                    self._obey(message)
                if self._leader.lost:
                    return None
        finally:
            self._end()
            restore_signals(handlers)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)  # a handler may interrupt a message that is being sent

    def _pass_on(self) -> None:
        """Pass the workers' messages on, and the signals of this process, which the leading host gives to the workers of all."""
        while self._num_passed_on < len(self._signals):
            number, earlier = self._signals[self._num_passed_on], self._signals[: self._num_passed_on]
            is_again = any(word not in REQUESTS for word in earlier)
            self._say({"stop": int(number), "again": is_again})
            self._num_passed_on += 1
        for rank, word, value in self._workers.hear() if self._workers else ():
            self._say({"rank": rank, "word": word, "value": _to_json_value(word, value)})

    def _obey(self, message: Mapping[str, Any]) -> None:
        """Carry out one message of the leading host; an unknown one makes that host lost."""
        try:
            if "run" in message:
                order = _ORDERS.validate_python(message["run"])
            elif "end" not in message:
                self._pass_to_worker(message)
                return
        except _NONSENSE:
            self._leader.lose()
            return
        if "run" in message:
            self._run(order)
        else:
            self._end()
            self._say({"ended": True})

    def _pass_to_worker(self, message: Mapping[str, Any]) -> None:
        """Pass a word or a signal on to one worker; it comes late where the workers have ended."""
        rank = message["rank"]
        if self._workers is None:
            return
        if rank not in self._workers.ranks:
            raise ValueError(f"rank {rank} is of another host")
        if "tell" in message:
            self._workers.tell(rank, {"at": "at", "leave": "leave"}[message["tell"]])
        elif "signal" in message:
            self._workers.signal(rank, signal.Signals(message["signal"]))
        elif message["kill"]:
            self._workers.kill(rank)

    def _run(self, order: Order) -> None:
        """Start workers, or say why they cannot be."""
        self._start = order.start
        try:
            self._workers = self._workers_of(order)
            self._workers.start()
        except SamestepError as error:
            failure = failure_of(order.first_rank, error)
            value = _to_json_value("failed", failure)
            self._say({"rank": failure.rank, "word": "failed", "value": value})

    def _say(self, message: Mapping[str, Any]) -> None:
        self._leader.send({**message, "start": self._start})

    def _end(self) -> None:
        if self._workers is not None:
            self._workers.end()
            self._workers = None


def _to_json_value(word: str, value: Any) -> Any:
    """Return the value of a worker's message in the types of JSON."""
    if word == "failed":
        failure = dataclasses.asdict(value)
        failure["age_s"] = time.monotonic() - failure.pop("time_s")
        failure |= {"text": shorten(value.text), "what": shorten(value.what)}
        lines, half = "\n".join(value.lines), _MOST_CHARACTERS_OF_LINES // 2
        if len(lines) > 2 * half:  # the beginning and the failure are at the ends
            lines = f"{lines[:half]} ...\n... {lines[-half:]}"
        return failure | {"lines": lines.split("\n")}
    if word == "at":
        return dataclasses.asdict(value)
    return (None, value[1]) if word == "done" else None
