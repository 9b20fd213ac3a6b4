"""The processes of an allocation find each other: the first that can listen at the meeting point leads, the others do what it asks.

Any process to which the meeting point's address belongs may lead, whatever its rank: so two processes of one rank, or a world
without a rank 0, meet too. The ports are tried in turn; one that is blocked or taken is a finding, and does not end the meeting.
Where no secret is given, the token is made of the port, which keeps other runs away and no attacker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.wings.cluster.diagnosis.findings import of_record
from samestep.wings.cluster.diagnosis.identity import Identity, addresses_of
from samestep.wings.cluster.hosts.channel import Channel, GreetingError, TokenError, greet
from samestep.wings.cluster.hosts.meeting import Arrival, Lobby

_RETRY_S, _CONNECT_S, _GRACE_S = 0.25, 1.4, 0.4
_LEAD_ANYWHERE_S = 2.0
"""Seconds after which the first rank listens itself, where the meeting point's name belongs to no host, as of a service."""
_LATER_S = 4.0
"""Seconds that the others wait longer than the one that leads."""
_IDLE_S = 60.0
_MOST_ADDRESSES = 2
_REFUSED = "nobody listens there"
_OTHER_RUN = "another run, or one with another token, listens there"
_ANSWER_S = 1.5
"""Seconds that an answer may take beyond its probe."""

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


def token_of(identity: Identity, secret: bytes = b"") -> bytes:
    """Return what all processes of a run know: their secret, or a digest of their port."""
    return secret or hashlib.sha256(f"samestep doctor {identity.ports[-1:]}".encode()).hexdigest().encode()


class Peer:
    """A process that has come, seen from the one that leads; that one itself has no channel."""

    def __init__(self, identity: Identity, channel: Channel | None, answer: Answer | None = None) -> None:
        self.identity, self.channel, self._answer = identity, channel, answer
        self._asked = 0

    def ask(self, question: Mapping[str, Any]) -> None:
        """Send a question."""
        self._asked += 1
        if self.channel is not None:
            self.channel.send({**question, "number": self._asked})

    def heard(self, question: Mapping[str, Any], end_s: float) -> dict[str, Any] | None:
        """Return the answer to the question that was asked last; None where none comes in time."""
        if self.channel is None:
            return self._answer(question) if self._answer else None
        while (left_s := end_s - time.monotonic()) > 0:
            said = self.channel.next(left_s)
            if said is None:
                return None
            if said.get("number") == self._asked:
                return said
        return None


def ask_all(questions: Mapping[Peer, Mapping[str, Any]], probe_s: float) -> dict[Peer, dict[str, Any]]:
    """Ask several processes at once; return the answers that come in time."""
    for peer, question in questions.items():
        peer.ask(question)
    end_s = time.monotonic() + probe_s + _ANSWER_S
    ordered = sorted(
        questions, key=lambda peer: peer.channel is not None
    )  # the one that leads answers while the others do
    answers = {peer: peer.heard(questions[peer], end_s) for peer in ordered}
    return {peer: said for peer, said in answers.items() if said is not None}


@dataclass(frozen=True)
class AbsentHost:
    """A process that met nobody, and why, port by port."""

    outcomes: Mapping[str, str]
    """What happened at every address and port that was tried last."""


@dataclass(frozen=True)
class Leads:
    """A process that leads: the sockets at which it listens, and the ports that another program holds."""

    listening: tuple[socket.socket, ...]
    taken: tuple[int, ...]


def meet(identity: Identity, token: bytes, wait_s: float) -> Leads | Channel | AbsentHost:
    """Lead, or return the channel to the process that leads."""
    began_s, outcomes = time.monotonic(), dict[str, str]()
    while True:
        addresses = addresses_of(identity.meets_at)[:_MOST_ADDRESSES]
        if not addresses:
            outcomes = {identity.meets_at: "this name has no address here"}
        ports_tried = set()
        for address, port in itertools.product(addresses, identity.ports):
            tried = _try(address, port, token)
            if isinstance(tried, Channel):
                tried.send(dataclasses.asdict(identity))
                return tried
            if outcomes.get(at := f"{address}, port {port}") != _OTHER_RUN:  # which ends before this process does
                outcomes[at] = tried
            ports_tried |= {port} if tried != _REFUSED else set()
        passed_s = time.monotonic() - began_s
        anywhere = [""] if identity.rank == 0 and addresses and passed_s > _LEAD_ANYWHERE_S else []
        for address in [*addresses, *anywhere]:
            if (leader := _lead_at(address, identity.ports, ports_tried)) is not None:
                return leader
        if passed_s > wait_s + _LATER_S:
            return AbsentHost(outcomes)
        time.sleep(_RETRY_S)


def _lead_at(address: str, ports: Sequence[int], ports_tried: Collection[int]) -> Leads | None:
    """Listen at the ports of an address, but for those that another program holds.

    None where the address is that of another host, or where a process of this run came first: it has the first free port.
    """
    listening: list[socket.socket] = []
    taken = []
    for port in ports:
        try:
            listening.append(
                socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port not in ports_tried:
                for listener in listening:
                    listener.close()
                return None
            taken.append(port)
    return Leads(tuple(listening), tuple(taken)) if listening else None


def _try(address: str, port: int, token: bytes) -> Channel | str:
    try:
        connected = socket.create_connection((address, port), timeout=_CONNECT_S)
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        return _REFUSED if error.errno == errno.ECONNREFUSED else (error.strerror or str(error)).lower()
    try:
        return greet(connected, token)
    except TokenError:
        connected.close()
        return _OTHER_RUN
    except (GreetingError, OSError):
        connected.close()
        return "another program listens there"


@contextlib.contextmanager
def gathered(leads: Leads, identity: Identity, token: bytes, wait_s: float, answer: Answer) -> Iterator[list[Peer]]:
    """Wait for the other processes, and yield all that have come, the one that leads first."""
    end_s, complete_s = time.monotonic() + wait_s, 0.0
    with contextlib.ExitStack() as stack:
        lobbies = [stack.enter_context(Lobby(listener, token)) for listener in leads.listening]
        for listener in leads.listening:
            stack.callback(listener.close)
        known: dict[Arrival, Identity | None] = {}
        while time.monotonic() < end_s:
            with contextlib.redirect_stdout(sys.stderr):  # who leaves again is no part of the report
                came = [arrival for lobby in lobbies for arrival in lobby.look(0.05)]
            known = {guest: known[guest] if guest in known else of_record(Identity, guest.says) for guest in came}
            complete_s = complete_s or time.monotonic() if 1 + len(known) >= identity.size else 0.0
            if complete_s and time.monotonic() > complete_s + _GRACE_S:
                break
        peers = [Peer(facts, guest.channel) for guest, facts in known.items() if facts is not None]
        peers.sort(key=lambda peer: (peer.identity.rank, peer.identity.key, peer.identity.pid))
        yield [Peer(identity, None, answer), *peers]


def dismiss(peers: Sequence[Peer], status: int) -> None:
    """Tell all processes that the examination is over, and its exit status."""
    for peer in peers:
        if peer.channel is not None:
            peer.channel.send({"over": status})
    for peer in peers:
        if peer.channel is not None:
            peer.channel.close()


def follow(channel: Channel, answer: Answer) -> int | None:
    """Answer the questions of the process that leads; return the exit status, or None where it is gone."""
    try:
        while (question := channel.next(_IDLE_S)) is not None:
            if "over" in question:
                return int(question["over"])
            channel.send({**answer(question), "number": question.get("number")})
    finally:
        channel.close()
    return None
