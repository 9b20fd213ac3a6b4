"""The questions that the process that leads asks one process of each host, one after the other, and what it hears."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from samestep.diagnosis import link_rates
from samestep.diagnosis.all_hosts import Heard
from samestep.diagnosis.doors import REACHED, Attempt, Rate
from samestep.diagnosis.findings import PROBE_S, HostFindings, of_record
from samestep.diagnosis.gathering import Peer, ask_all
from samestep.diagnosis.gpus import Torch
from samestep.diagnosis.link_rates import Links
from samestep.diagnosis.shared_folder import Sight

_CLOCK_TURNS = 3
_MOST_CLOCKED = 64
"""Hosts up to which clocks are read several times."""
_RATES_UNTIL_S = 18.0
"""Seconds after which no new round of rates begins."""
_MOST_AGAIN = 4
"""Slow ways that are measured again, since another program may have been in the way."""
_INSIDE = "127.0.0.1"


class Questions:
    """One examination of the hosts: each method asks one question of all of them, and keeps what they answer."""

    def __init__(self, peers: list[Peer], taken: tuple[int, ...], began_s: float) -> None:
        self._peers, self._taken, self._began_s = peers, taken, began_s
        self._mute: dict[str, list[str]] = {}
        self._gone: dict[str, str] = {}
        chosen: dict[str, Peer] = {}
        for peer in peers:
            chosen.setdefault(peer.identity.key, peer)
        self._hosts = [*chosen.values()]
        self._found: list[HostFindings] = []
        self._ports: list[tuple[int, ...]] = []
        self._reached: dict[tuple[int, int], tuple[Attempt, ...]] = {}

    def ask(self) -> tuple[Heard, Links]:
        """Ask everything but torch; return what was heard, and the rates."""
        self._ask_findings()
        written, several = self._write(), len(self._hosts) > 1
        nonces = {place: nonce for place, (why, nonce) in written.items() if not why or why.startswith("no lock")}
        meeting = self._reach() if several else {}
        unknown, skews = (self._names(), self._clocks()) if several else ({}, {})
        sights = self._look(nonces) if several else {}
        links = Links(self._between(), self._inside())
        heard = Heard(
            identities=tuple(peer.identity for peer in self._peers),
            hosts=tuple(self._found),
            unknown=unknown,
            reached=self._reached,
            meeting=meeting,
            taken=self._taken,
            skews=skews,
            written={place: why for place, (why, _) in written.items()},
            sights=sights,
            mute={name: tuple(words) for name, words in self._mute.items()},
            gone=dict(self._gone),
        )
        return heard, links

    def torches(self, timeout_s: float) -> dict[int, Torch]:
        """Return what torch says on every host."""
        said = self._asked("torch", self._all(timeout_s=timeout_s), timeout_s)
        return {place: found for place, one in said.items() if (found := of_record(Torch, one)) is not None}

    def _all(self, **given: Any) -> dict[int, dict[str, Any]]:
        return dict.fromkeys(range(len(self._hosts)), given)

    def _asked(
        self, word: str, given: Mapping[int, Mapping[str, Any]], probe_s: float = PROBE_S
    ) -> dict[int, dict[str, Any]]:
        """Ask hosts by their numbers; return the answers, and keep who gave none."""
        questions = {self._hosts[place]: {"do": word, **more} for place, more in given.items()}
        said = ask_all(questions, probe_s)
        answers = {}
        for place in given:
            peer = self._hosts[place]
            one = said.get(peer, {"failed": "nothing came"})
            if "failed" in one:
                self._mute.setdefault(peer.identity.host, []).append(f"{word}: {one['failed']}")
                if peer.channel is not None and peer.channel.lost:
                    self._gone[peer.identity.host] = peer.channel.lost
            else:
                answers[place] = one
        return answers

    def _ask_findings(self) -> None:
        said = self._asked("findings", self._all(), 2 * PROBE_S)
        kept = []
        for place, one in said.items():
            found = of_record(HostFindings, one.get("findings"))
            if found is not None:
                kept.append(self._hosts[place])
                self._found.append(found)
                self._ports.append(tuple(one["ports"]))
        self._hosts = kept

    def _write(self) -> dict[int, tuple[str, str]]:
        """Let every host write its file; return why it could not, and its nonce."""
        name, nonces = secrets.token_hex(4), [secrets.token_hex(8) for _ in self._hosts]
        said = self._asked(
            "write", {place: {"name": name, "place": place, "nonce": one} for place, one in enumerate(nonces)}
        )
        return {place: (str(one["refused"]), nonces[place]) for place, one in said.items()}

    def _look(self, nonces: Mapping[int, str]) -> dict[int, Sight]:
        said = self._asked(
            "look", {place: {"nonces": {str(key): one for key, one in nonces.items()}} for place in nonces}
        )
        return {place: found for place, one in said.items() if (found := of_record(Sight, one)) is not None}

    def _names(self) -> dict[int, tuple[str, ...]]:
        """Return the names in the launcher's list that have no address on each host."""
        listed = self._peers[0].identity.listed
        said = self._asked("names", self._all(names=[*listed])) if listed else {}
        return {place: tuple(one["unknown"]) for place, one in said.items()}

    def _reach(self) -> dict[int, Attempt]:
        """Let every host try to reach every other; return the findings about the port at which the ranks of a run find each other."""
        targets = [
            {
                "number": place,
                "addresses": [*found.network.addresses] if found.network is not None else [],
                "ports": [*self._ports[place]],
            }
            for place, found in enumerate(self._found)
        ]
        port = self._peers[0].identity.port
        given = {}
        for place, found in enumerate(self._found):
            at = found.network.meeting_addresses[:1] if found.network is not None else ()
            meeting = [(address, port) for address in at] if port and port not in self._taken and place else []
            given[place] = {"targets": [one for one in targets if one["number"] != place], "meeting": meeting}
        met: dict[int, Attempt] = {}
        for place, one in self._asked("reach", given).items():
            others = [other for other in range(len(self._hosts)) if other != place]
            for other, tried in zip(others, one["reached"], strict=True):
                self._reached[place, other] = _attempts(tried)
            for attempt in _attempts(one["meeting"]):
                met[place] = attempt
        return met

    def _clocks(self) -> dict[int, tuple[float, float]]:
        """Return by how much each clock is ahead of the first one's, and how exact that is: half of the shortest way there and back."""
        best: dict[int, tuple[float, float]] = {}
        for _turn in range(_CLOCK_TURNS if len(self._hosts) <= _MOST_CLOCKED else 1):
            for place in range(1, len(self._hosts)):
                asked_s = time.time()
                said = self._asked("clock", {place: {}}).get(place)
                heard_s = time.time()
                if said is None:
                    continue
                exact_s = (heard_s - asked_s) / 2
                if place not in best or exact_s < best[place][1]:
                    best[place] = (float(said["now_s"]) - (asked_s + heard_s) / 2, exact_s)
        return best

    def _inside(self) -> dict[int, Rate]:
        """Return the better of two measurements of each host, which another program may disturb."""
        best: dict[int, Rate] = {}
        for _turn in range(2):
            given = {place: {"address": _INSIDE, "port": ports[0]} for place, ports in enumerate(self._ports)}
            for place, one in self._asked("rate", given).items():
                found = of_record(Rate, one)
                if found is not None and (place not in best or found.bytes_per_s > best[place].bytes_per_s):
                    best[place] = found
        return best

    def _between(self) -> dict[tuple[int, int], Rate]:
        rates: dict[tuple[int, int], Rate] = {}
        for pairs in link_rates.pairs_of(link_rates.rounds(len(self._hosts))):
            if time.monotonic() > self._began_s + _RATES_UNTIL_S:
                break
            rates |= self._rates(pairs)
        for pair in link_rates.doubtful(rates)[:_MOST_AGAIN]:
            again = self._rates([pair]).get(pair)
            if again is not None and again.bytes_per_s > rates[pair].bytes_per_s:
                rates[pair] = again
        return rates

    def _rates(self, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Rate]:
        ways = {pair: way for pair in pairs if (way := self._way(*pair)) is not None}
        said = self._asked(
            "rate", {start: {"address": way.address, "port": way.port} for (start, _), way in ways.items()}
        )
        return {(start, end): found for start, end in ways if (found := of_record(Rate, said.get(start))) is not None}

    def _way(self, start: int, end: int) -> Attempt | None:
        """Return an attempt by which one host has reached another; None where it has not."""
        return next((one for one in self._reached.get((start, end), ()) if one.outcome == REACHED), None)


def _attempts(records: Sequence[Any]) -> tuple[Attempt, ...]:
    return tuple(found for one in records if (found := of_record(Attempt, one)) is not None)
