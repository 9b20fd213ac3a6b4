"""The verb `doctor`: looks at every host of an allocation, and says in one line each what would fail or be slow there.

```
every process         who am I; the first of each host also: names, interfaces, folder, space, GPUs      its own findings
the one that leads    who came; one process a host: all pairs, one folder, one clock, rates, torch        the report
```
Each probe ends within 3 s. Findings of a host are written before it meets the others, so that they are there where it meets nobody.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep import calls
from samestep.errors import InputError
from samestep.hardware import Hardware, resolve_hardware
from samestep.job import Job
from samestep.output.durable_files import check_writable
from samestep.wings.cluster.diagnosis import all_hosts, doors, findings, gathering, link_rates, one_host
from samestep.wings.cluster.diagnosis.all_hosts import Heard
from samestep.wings.cluster.diagnosis.doors import REACHED, Attempt, Door, Rate, Target
from samestep.wings.cluster.diagnosis.findings import PROBE_S, HostFindings, SharedFiles, Sight, at_once, of_record
from samestep.wings.cluster.diagnosis.gathering import AbsentHost, Peer, ask_all
from samestep.wings.cluster.diagnosis.gpus import Torch, TorchQuestion
from samestep.wings.cluster.diagnosis.identity import Identity, identify
from samestep.wings.cluster.diagnosis.link_rates import Links
from samestep.wings.cluster.diagnosis.report import Report, ReportLine, merged
from samestep.wings.cluster.hosts.channel import Channel

_CLOCK_TURNS = 3
_MOST_CLOCKED = 64
"""Hosts up to which clocks are read several times."""
_RATES_UNTIL_S = 18.0
"""Seconds after which no new round of rates begins."""


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
        skews = self._clocks() if several else {}
        sights = self._look(nonces) if several else {}
        links = self._between()
        heard = Heard(
            identities=tuple(peer.identity for peer in self._peers),
            hosts=tuple(self._found),
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

    def _between(self) -> dict[tuple[int, int], Rate]:
        rates: dict[tuple[int, int], Rate] = {}
        for pairs in link_rates.pairs_of(link_rates.rounds(len(self._hosts))):
            if time.monotonic() > self._began_s + _RATES_UNTIL_S:
                break
            rates |= self._rates(pairs)
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


WAIT_S = 10.0
_TOTAL_S = 27.0
"""The examination ends within this, where all processes start at once."""
_LEAST_TORCH_S = 6.0
"""Seconds that torch has at least."""
_LINGER_S = 22.0
"""Seconds after which a process that met nobody ends: mpirun and torchrun end all others with the first that fails."""


@dataclass(frozen=True)
class _Wanted:
    """What the report is to be held against and to end with."""

    job: Job | None
    layout: str | None
    profile: Hardware | str | Path | None
    machine: Hardware
    out: Path | None
    began_s: float


@calls.checked
def doctor(
    job: Job | None = None,
    layout: str | None = None,
    hardware: Hardware | str | Path | None = None,
    *,
    folder: str | Path = ".",
    out: str | Path | None = None,
    wait_s: float = WAIT_S,
    rendezvous: tuple[str, int, int] | None = None,
    token: bytes = b"",
    say: Callable[[str], object] | None = None,
) -> Report:
    """Check the hosts of the allocation of this process for faults and slow links.

    Collective over the processes of the allocation: each must call it. A missing one is named as silent after `wait_s`.

    Args:
        job: the job to run; its digest is compared.
        layout: the layout to run; its number of ranks is compared. By default the job's own.
        hardware: the profile to compare links with; by default the one that `plan` would use.
        folder: the folder that all hosts must share.
        out: a TOML file for the profile with the measured links.
        wait_s: seconds to wait for the other processes.
        rendezvous: the host and the port to meet at, and the number of hosts, if no launcher provides them.
        token: a secret that all processes have; by default it is derived from the port of the run.
        say: called with each text to print: the findings of this host before it connects to the others, and the report.

    Returns:
        The report about all hosts on the leading process, and about the own host on the others.

    Raises:
        InputError: the hardware cannot be understood, or the file cannot be written.
    """
    path = None if out is None else Path(out)
    wanted = _Wanted(job, layout, hardware, resolve_hardware(hardware), path, time.monotonic())
    if path is not None:
        check_writable(path)
    if wait_s < 0:
        raise InputError("value-out-of-range", f"wait_s={wait_s:g}. Use seconds of at least 0")
    identity = identify(os.environ, rendezvous)
    secret = gathering.token_of(identity, token)
    me = Examined(identity, job, _folder_of(job), Path(folder), secret)
    try:
        return _look(me, identity, wanted, secret, wait_s, say or (lambda text: None))
    finally:
        me.close()


def _look(
    me: Examined, identity: Identity, wanted: _Wanted, secret: bytes, wait_s: float, say: Callable[[str], object]
) -> Report:
    """Look at this host, alone or with the other processes of the allocation, and return the report that this process is left with."""
    if identity.size == 1:
        report = _report([Peer(identity, None, me.answer)], (), wanted)
        say(report.to_text())
        return report
    host_report = _own_report(me, identity, wanted)
    if identity.is_first_of_host:
        say(host_report.to_short_text())
    met = gathering.meet(identity, secret, wait_s)
    if isinstance(met, AbsentHost):
        return _of_absent(host_report, met, identity, wanted, say)
    if isinstance(met, Channel):
        return _of_follower(host_report, gathering.follow(met, me.answer), wanted)
    with gathering.gathered(met, identity, secret, wait_s, me.answer) as peers:
        report = _report(peers, met.taken, wanted)
        say(report.to_text())
        gathering.dismiss(peers, report.status)
        return report


def _folder_of(job: Job | None) -> Path:
    return Path(job.run.folder) if job is not None and job.run.folder else Path.cwd()


def _report(peers: list[Peer], taken: tuple[int, ...], wanted: _Wanted) -> Report:
    """Ask all hosts, and return the report about them."""
    questions = Questions(peers, taken, wanted.began_s)
    heard, links = questions.ask()
    per_host = link_rates.ranks_of_host(heard, wanted.layout, wanted.job)
    left_s = wanted.began_s + _TOTAL_S - time.monotonic()
    heard = replace(heard, torches=questions.torches(max(_LEAST_TORCH_S, left_s)))
    lines = [
        replace(line, hosts=(heard.name(place),))
        for place, host in enumerate(heard.hosts)
        for line in one_host.lines_of(host)
    ]
    if len(peers) > 1:
        lines = [line for line in lines if line.about != "identity" or line.level != "ok"]
    lines += [*all_hosts.lines_of(heard), *link_rates.lines_of(heard, links, wanted.machine)]
    lines += [
        one_host.torch_line(heard.name(place), torch_, heard.hosts[place]) for place, torch_ in heard.torches.items()
    ]
    links = link_rates.judged(heard, links, wanted.machine)
    lines += link_rates.layout_lines(heard, wanted.layout, wanted.job)
    written = ""
    if wanted.out is not None:
        written = link_rates.write_profile(wanted.out, wanted.profile, wanted.machine, links, per_host)
    return Report(_head(heard), merged(lines), time.monotonic() - wanted.began_s, written)


def _head(heard: Heard) -> str:
    who, hosts = heard.identities[0], len(heard.hosts)
    names = ", ".join(heard.name(place) for place in range(min(hosts, 8))) + (", ..." if hosts > 8 else "")
    by = "" if who.launcher in ("", "alone") else f" by {who.launcher}"
    return f"samestep doctor: {hosts} host{'s' * (hosts > 1)}{by}: {names}"


def _own_report(me: Examined, identity: Identity, wanted: _Wanted) -> Report:
    """Return the report about this host by itself; of a further process of a host, about that process alone."""
    if identity.is_first_of_host:
        lines = merged(one_host.lines_of(me.findings()))
    else:
        lines = (one_host.about(identity.host, *one_host.identity_line(identity)),)
    head = f"samestep doctor: {identity.host}, by itself"
    return Report(head, lines, time.monotonic() - wanted.began_s, host=identity.host)


def _of_follower(report: Report, status: int | None, wanted: _Wanted) -> Report:
    seconds = time.monotonic() - wanted.began_s
    if status is not None:
        return replace(report, seconds=seconds, told=status)
    gone = ReportLine(
        "fault", "meeting", "the process that leads ended before its report", "Read the output of that process"
    )
    return replace(report, lines=(gone, *report.lines), seconds=seconds)


def _of_absent(
    report: Report, met: AbsentHost, identity: Identity, wanted: _Wanted, say: Callable[[str], object] | None
) -> Report:
    """Return the report of a process that met nobody, after a time in which the others may end."""
    tried = "; ".join(f"{at}: {what}" for at, what in met.outcomes.items())
    fix = "Start this on the first host too, and check its name, its interface and the firewall"
    line = ReportLine("fault", "meeting", f"no other host was met. {tried}", fix, (identity.host,))
    if say is not None:
        say(line.to_text())
    time.sleep(max(0.0, wanted.began_s + _LINGER_S - time.monotonic()))
    return replace(report, lines=(line, *report.lines), seconds=time.monotonic() - wanted.began_s, has_come=False)
