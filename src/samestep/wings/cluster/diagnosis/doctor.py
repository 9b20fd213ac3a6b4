"""The verb `doctor`: looks at every host of an allocation, and says in one line each what would fail or be slow there.

```
every process         who am I; the first of each host also: names, interfaces, folder, space, GPUs      its own findings
the one that leads    who came; one process a host: all pairs, one folder, one clock, rates, torch        the report
```
Each probe ends within 3 s. Findings of a host are written before it meets the others, so that they are there where it meets nobody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from samestep import calls
from samestep.errors import InputError
from samestep.hardware import Hardware, resolve_hardware
from samestep.job import Job
from samestep.output.durable_files import check_writable
from samestep.wings.cluster.diagnosis import all_hosts, gathering, link_rates, one_host
from samestep.wings.cluster.diagnosis.all_hosts import Heard
from samestep.wings.cluster.diagnosis.gathering import AbsentHost, Peer
from samestep.wings.cluster.diagnosis.identity import Identity, identify
from samestep.wings.cluster.diagnosis.questions import Examined, Questions
from samestep.wings.cluster.diagnosis.report import Report, ReportLine, merged
from samestep.wings.cluster.hosts.channel import Channel

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
