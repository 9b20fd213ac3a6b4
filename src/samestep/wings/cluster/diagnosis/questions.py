"""The questions that the process that leads asks one process of each host, and how that process answers, each within the time of a probe."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.job import Job
from samestep.wings.cluster.diagnosis import doors, findings, link_rates
from samestep.wings.cluster.diagnosis.all_hosts import Heard
from samestep.wings.cluster.diagnosis.doors import REACHED, Attempt, Door, Rate, Target
from samestep.wings.cluster.diagnosis.findings import PROBE_S, HostFindings, at_once, of_record
from samestep.wings.cluster.diagnosis.gathering import Peer, ask_all
from samestep.wings.cluster.diagnosis.gpus import Torch, TorchQuestion
from samestep.wings.cluster.diagnosis.identity import Identity, without_address
from samestep.wings.cluster.diagnosis.link_rates import Links
from samestep.wings.cluster.diagnosis.shared_folder import SharedFiles, Sight

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
        return {place: facts for place, record in said.items() if (facts := of_record(Torch, record)) is not None}

    def _all(self, **arguments: Any) -> dict[int, dict[str, Any]]:
        return dict.fromkeys(range(len(self._hosts)), arguments)

    def _asked(
        self, word: str, arguments: Mapping[int, Mapping[str, Any]], probe_s: float = PROBE_S
    ) -> dict[int, dict[str, Any]]:
        """Ask hosts by their numbers; return the answers, and keep who gave none."""
        questions = {self._hosts[place]: {"do": word, **more} for place, more in arguments.items()}
        said = ask_all(questions, probe_s)
        answers = {}
        for place in arguments:
            peer = self._hosts[place]
            answer = said.get(peer, {"failed": "nothing came"})
            if "failed" in answer:
                self._mute.setdefault(peer.identity.host, []).append(f"{word}: {answer['failed']}")
                if peer.channel is not None and peer.channel.lost:
                    self._gone[peer.identity.host] = peer.channel.lost
            else:
                answers[place] = answer
        return answers

    def _ask_findings(self) -> None:
        said = self._asked("findings", self._all(), 2 * PROBE_S)
        findings = []
        for place, record in said.items():
            host_findings = of_record(HostFindings, record.get("findings"))
            if host_findings is not None:
                findings.append(self._hosts[place])
                self._found.append(host_findings)
                self._ports.append(tuple(record["ports"]))
        self._hosts = findings

    def _write(self) -> dict[int, tuple[str, str]]:
        """Let every host write its file; return why it could not, and its nonce."""
        name, nonces = secrets.token_hex(4), [secrets.token_hex(8) for _ in self._hosts]
        said = self._asked(
            "write", {place: {"name": name, "place": place, "nonce": nonce} for place, nonce in enumerate(nonces)}
        )
        return {place: (str(record["refused"]), nonces[place]) for place, record in said.items()}

    def _look(self, nonces: Mapping[int, str]) -> dict[int, Sight]:
        said = self._asked(
            "look", {place: {"nonces": {str(key): nonce for key, nonce in nonces.items()}} for place in nonces}
        )
        return {place: sight for place, record in said.items() if (sight := of_record(Sight, record)) is not None}

    def _names(self) -> dict[int, tuple[str, ...]]:
        """Return the names in the launcher's list that have no address on each host."""
        listed = self._peers[0].identity.listed
        said = self._asked("names", self._all(names=[*listed])) if listed else {}
        return {place: tuple(record["unknown"]) for place, record in said.items()}

    def _reach(self) -> dict[int, Attempt]:
        """Let every host try to reach every other; return the findings about the port at which the ranks of a run find each other."""
        targets = [
            {
                "number": place,
                "addresses": [*host_findings.network.addresses] if host_findings.network is not None else [],
                "ports": [*self._ports[place]],
            }
            for place, host_findings in enumerate(self._found)
        ]
        port = self._peers[0].identity.port
        words = {}
        for place, host_findings in enumerate(self._found):
            at = host_findings.network.meeting_addresses[:1] if host_findings.network is not None else ()
            meeting = [(address, port) for address in at] if port and port not in self._taken and place else []
            words[place] = {"targets": [target for target in targets if target["number"] != place], "meeting": meeting}
        met: dict[int, Attempt] = {}
        for place, records in self._asked("reach", words).items():
            others = [other for other in range(len(self._hosts)) if other != place]
            for other, tried in zip(others, records["reached"], strict=True):
                self._reached[place, other] = _attempts(tried)
            for attempt in _attempts(records["meeting"]):
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
            arguments = {place: {"address": _INSIDE, "port": ports[0]} for place, ports in enumerate(self._ports)}
            for place, record in self._asked("rate", arguments).items():
                rate = of_record(Rate, record)
                if rate is not None and (place not in best or rate.bytes_per_s > best[place].bytes_per_s):
                    best[place] = rate
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
        return {(start, end): rate for start, end in ways if (rate := of_record(Rate, said.get(start))) is not None}

    def _way(self, start: int, end: int) -> Attempt | None:
        """Return an attempt by which one host has reached another; None where it has not."""
        return next((attempt for attempt in self._reached.get((start, end), ()) if attempt.outcome == REACHED), None)


def _attempts(records: Sequence[Any]) -> tuple[Attempt, ...]:
    return tuple(reach for record in records if (reach := of_record(Attempt, record)) is not None)


class Examined:
    """The questions that this process is asked, with the doors and files that it has opened for them; `close` ends all of it."""

    def __init__(self, identity: Identity, job: Job | None, job_folder: Path, folder: Path, token: bytes) -> None:
        self._identity, self._job, self._job_folder, self._folder, self._token = (
            identity,
            job,
            job_folder,
            folder,
            token,
        )
        self._found: HostFindings | None = None
        self._door: Door | None = None
        self._files: SharedFiles | None = None
        self._torch: TorchQuestion | None = None

    def findings(self) -> HostFindings:
        """Return what is found on this host; it is looked for once."""
        if self._found is None:
            self._found = findings.find(self._identity, self._job, self._job_folder, self._folder)
            self._torch = TorchQuestion()
        return self._found

    def torch(self, timeout_s: float) -> dict[str, Any]:
        """Return what torch says here, as plain data."""
        assert self._torch is not None, "findings are asked for before torch is"
        return dataclasses.asdict(self._torch.answer(timeout_s))

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one question of the process that leads; `failed` says why it has no answer."""
        asked = {
            "clock": lambda _: {"now_s": time.time()},
            "findings": self._open,
            "names": lambda question: {"unknown": [*without_address(question["names"])]},
            "reach": self._reach,
            "write": self._write,
            "look": lambda question: self._look(question["nonces"]),
            "rate": lambda question: dataclasses.asdict(doors.rate(question["address"], question["port"], self._token)),
            "torch": lambda question: self.torch(question["timeout_s"]),
        }.get(str(question.get("do")))
        if asked is None:
            return {"failed": "it does not know the question"}
        return self._within(asked, question)

    def close(self) -> None:
        """End what is open."""
        for resource in (self._door, self._files, self._torch):
            if resource is not None:
                resource.close()

    def _within(self, asked: Callable[[Any], dict[str, Any]], question: Mapping[str, Any]) -> dict[str, Any]:
        if question["do"] in ("findings", "torch"):  # these have limits of their own
            return asked(question)
        results, late = at_once({"probe": lambda: asked(question)})
        return results["probe"] if results["probe"] is not None else {"failed": late[0].partition(": ")[2]}

    def _open(self, _given: Mapping[str, Any]) -> dict[str, Any]:
        self._door = self._door or Door(self._token)
        return {"findings": self.findings().to_record(), "ports": [*self._door.ports]}

    def _reach(self, question: Mapping[str, Any]) -> dict[str, Any]:
        targets = [target for record in question["targets"] if (target := of_record(Target, record)) is not None]
        extra = [doors.attempt(address, port, self._token) for address, port in question["meeting"]]
        reached = doors.reach(targets, self._token)
        return {
            "reached": [[dataclasses.asdict(attempt) for attempt in attempts] for attempts in reached],
            "meeting": [dataclasses.asdict(attempt) for attempt in extra],
        }

    def _write(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if self._door is not None:
            self._door.number = int(question["place"])
        self._files = SharedFiles(self._folder, str(question["name"]))
        return {"refused": self._files.write(int(question["place"]), str(question["nonce"]))}

    def _look(self, nonces: Mapping[str, str]) -> dict[str, Any]:
        seen = (
            Sight(error="it has not written")
            if self._files is None
            else self._files.look({int(key): nonce for key, nonce in nonces.items()})
        )
        return dataclasses.asdict(seen)
