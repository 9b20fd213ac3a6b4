"""The lines about hosts compared with each other: one world, one software, names and ports of all pairs, one folder, one clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.wings.cluster.diagnosis.doors import REACHED, Attempt
from samestep.wings.cluster.diagnosis.findings import HostFindings, Sight
from samestep.wings.cluster.diagnosis.gpus import Torch
from samestep.wings.cluster.diagnosis.identity import LOOPBACK_ADDRESSES, Identity
from samestep.wings.cluster.diagnosis.report import Level, ReportLine

_LITTLE_SKEW_S, _SKEW_S = 1.0, 30.0
"""Seconds by which clocks may differ: log lines mix from the first on, credentials and leases end early from the second on."""
_MOST_NAMED = 8


@dataclass(frozen=True)
class Heard:
    """All that the process that leads has heard; hosts are counted in the order in which they were chosen, itself first."""

    identities: tuple[Identity, ...]
    """Every process that came."""
    hosts: tuple[HostFindings, ...]
    """The findings of one process on each host."""
    reached: Mapping[tuple[int, int], tuple[Attempt, ...]] = field(default_factory=dict)
    """From one host to another."""
    meeting: Mapping[int, Attempt] = field(default_factory=dict)
    """From each host to the port at which a run would meet."""
    taken: tuple[int, ...] = ()
    """The ports of the meeting point that another program holds."""
    skews: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By how many seconds a host's clock is ahead of the first one's, and how exact that is."""
    written: Mapping[int, str] = field(default_factory=dict)
    """Why a host could not write to the shared folder."""
    sights: Mapping[int, Sight] = field(default_factory=dict)
    torches: Mapping[int, Torch] = field(default_factory=dict)
    mute: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the name of a host, the questions to which it gave no answer, and why."""
    gone: Mapping[str, str] = field(default_factory=dict)
    """The hosts that left meanwhile, and why."""

    def name(self, host: int) -> str:
        """Return the name of a host, with the number of its process where two have the same name."""
        who = self.hosts[host].identity
        if sum(other.identity.host == who.host for other in self.hosts) == 1:
            return who.host
        number = f"{'host' if who.is_host else 'rank'} {who.rank}" if who.rank >= 0 else f"process {who.pid}"
        return f"{who.host} ({number})"


def lines_of(heard: Heard) -> list[ReportLine]:
    """Return the lines about all hosts together."""
    parts = [world_lines, _software_lines, _reach_lines, _meeting_lines]
    parts += [_folder_lines, _clock_lines, _gpu_lines, _mute_lines]
    return [line for part in parts for line in part(heard)]


def world_lines(heard: Heard) -> Iterator[ReportLine]:
    """Yield whether all processes see one world, each of its ranks once, and who of it never came."""
    who, size = heard.identities, heard.identities[0].size
    if size == 1 and len(who) == 1:
        return
    unit = "host" if who[0].is_host else "rank"
    sizes = Counter(identity.size for identity in who)
    if len(sizes) > 1:
        shown = "; ".join(
            f"{count} of {size}: {_some([identity.named() for identity in who if identity.size == size])}"
            for size, count in sizes.most_common()
        )
        yield ReportLine(
            "fault", "world", f"the processes see worlds of different sizes: {shown}", "Set one WORLD_SIZE on all"
        )
    ranks = defaultdict(list)
    for member in who:
        ranks[member.rank].append(member)
    for rank, same in sorted(ranks.items()):
        if rank >= 0 and len(same) > 1:
            shown = (
                f"{unit} {rank} was given to {len(same)} processes: {_some([identity.named() for identity in same])}"
            )
            yield ReportLine(
                "fault", "world", shown, f"Set another {unit.upper() if unit == 'rank' else 'number'} for each"
            )
    yield from _silent_lines(heard, unit, min(sizes), set(ranks))
    if len(sizes) == 1 and len(who) == size and all(len(same) == 1 for rank, same in ranks.items() if rank >= 0):
        on = f" on {len(heard.hosts)} hosts" if len(heard.hosts) > 1 else " on one host"
        yield ReportLine(
            "ok", "world", f"all {size} {unit}s by {who[0].launcher} came{'' if unit == 'host' else on}, each once"
        )


def _silent_lines(heard: Heard, unit: str, size: int, came: set[int]) -> Iterator[ReportLine]:
    """Yield who never came, by the launcher's list of hosts where it has one."""
    absent = [number for number in range(size) if number not in came] if -1 not in came else []
    if len(heard.identities) >= size:  # a number that is missing was given to another process, which is said already
        return
    listed = heard.identities[0].listed
    there = {name for identity in heard.identities for name in (identity.host, *identity.host.split(".")[:1])}
    addresses = {address for host in heard.hosts if host.network is not None for address in host.network.addresses}
    silent = [name for name in listed if name not in there and name not in addresses]
    if not absent:
        text = f"{len(heard.identities)} of {size} {unit}s came"
    else:
        text = (
            f"{unit}{'s' * (len(absent) > 1)} {_some(absent)} of {size} {'were' if len(absent) > 1 else 'was'} silent"
        )
    shown = f"{text}; {heard.identities[0].launcher} lists {_some(silent)}, without a process here" if silent else text
    net = heard.hosts[0].network if heard.hosts else None
    if net is not None and net.meeting_addresses[:1] and net.meeting_addresses[0].startswith(LOOPBACK_ADDRESSES):
        shown += f"; {net.meets_at}, at which they meet, is {net.meeting_addresses[0]} here: every host itself"
        ip = next((address for address in net.addresses if not address.startswith(LOOPBACK_ADDRESSES)), "")
        first = f"MASTER_ADDR={ip} on all hosts" if ip and heard.identities[0].rank == 0 else "its own address"
        fix = f"Use an address of the first host that the others reach: {first}, or {net.meets_at} with that address in /etc/hosts"
        yield ReportLine("fault", "world", shown, fix)
        return
    fix = "Read the output of such a host: it has no process, no way to the first host, or other variables. --wait S waits longer"
    yield ReportLine("fault", "world", shown, fix)


_SOFTWARE: tuple[tuple[str, str, str], ...] = (
    ("samestep", "samestep", "Use one version on all hosts"),
    ("source", "files of samestep", "Use the same files on all hosts: one environment that all see, or one image"),
    ("torch", "torch", "Use one version on all hosts"),
    ("python", "Python", "Use one version on all hosts"),
    ("commit", "commit", "Use the same commit, without other changes, in the work folder of all hosts"),
    ("job", "job", "Use the same job file and scripts on all hosts"),
)


def _software_lines(heard: Heard) -> Iterator[ReportLine]:
    known = [(place, host.software) for place, host in enumerate(heard.hosts) if host.software is not None]
    if not known:
        return
    differs = False
    for key, word, fix in _SOFTWARE:
        shown = _different(heard, [(place, getattr(software, key)) for place, software in known])
        if shown:
            differs = True
            yield ReportLine("fault", key if key in ("commit", "job") else "software", f"{word}: {shown}", fix)
    if not differs:
        first = known[0][1]
        commit = f", commit {first.commit}" if first.commit else ""
        on = " on all hosts" if len(heard.hosts) > 1 else ""
        job = f", job {first.job}" if first.job else ""
        yield ReportLine(
            "ok", "software", f"samestep {first.samestep}, torch {first.torch}, Python {first.python}{commit}{job}{on}"
        )


def _different(heard: Heard, values: Sequence[tuple[int, Any]]) -> str:
    """Return how hosts differ in a value, the fewest named first; empty where all have the same."""
    groups: dict[Any, list[int]] = {}
    for place, value in values:
        groups.setdefault(value, []).append(place)
    if len(groups) < 2:
        return ""
    fewest = sorted(groups.items(), key=lambda group: len(group[1]))
    return " and ".join(
        f"{value or 'none'} on {_some([heard.name(place) for place in places])}" for value, places in fewest[:3]
    )


def _reach_lines(heard: Heard) -> Iterator[ReportLine]:
    """Yield which hosts are not reached: over which interface, and at which ports."""
    problems: dict[tuple[int, str, str, str], list[int]] = {}
    pairs = 0
    for (place, target), attempts in heard.reached.items():
        pairs += 1
        if problem := _problem(heard, target, attempts):
            problems.setdefault((target, *problem), []).append(place)
    for (target, about, text, fix), places in problems.items():
        yield ReportLine(
            "fault", about, f"{text}, from {_some([heard.name(place) for place in places])}", fix, (heard.name(target),)
        )
    if pairs and not problems:
        yield ReportLine("ok", "ports", f"every host reaches every other: {pairs} ways, at free ports")


def _problem(heard: Heard, target: int, attempts: Sequence[Attempt]) -> tuple[str, str, str] | None:
    """Return topic, finding and remedy of the attempts to reach one host; None where it is reached."""
    first = attempts[0].address
    tried = [attempt for attempt in attempts if attempt.address == first]
    failed = [attempt for attempt in tried if attempt.outcome != REACHED]
    if not failed:
        return None
    net = heard.hosts[target].network
    others = [attempt.address for attempt in attempts if attempt.address != first and attempt.outcome == REACHED]
    what = f"{failed[0].outcome} at {first or 'it'}"
    if others and len(failed) == len(tried) and net is not None:
        if any(interface.name == net.chosen and not interface.is_up for interface in net.interfaces):
            return None  # that it is down is said already
        right, by = net.interface_of(others[0]), f" (by {net.chosen_by})"
        fix = f"Set GLOO_SOCKET_IFNAME={right} and NCCL_SOCKET_IFNAME={right} there"
        return "interface", f"{net.chosen}, {first}{by}, is not reached: {what}; {right}, {others[0]}, is", fix
    fix = "Open every port between these hosts in the firewall: gloo and NCCL choose free ones"
    if len(failed) < len(tried):
        return "ports", f"some of its ports are blocked: {what}, while another port there is reached", fix
    return (
        "ports",
        f"not reached at any port: {what}",
        f"{fix}. Or use another interface: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    )


def _meeting_lines(heard: Heard) -> Iterator[ReportLine]:
    port = heard.identities[0].port
    if port in heard.taken:
        fix = "Use another MASTER_PORT"
        yield ReportLine(
            "fault",
            "ports",
            f"port {port}, at which a run would meet, is held by another program",
            fix,
            (heard.name(0),),
        )
        return
    for outcome in dict.fromkeys(answer.outcome for answer in heard.meeting.values()):
        if outcome != REACHED:
            places = [place for place, answer in heard.meeting.items() if answer.outcome == outcome]
            at = heard.meeting[places[0]].address
            text = f"port {port} of {at}, at which a run would meet, is blocked: {outcome}"
            fix = "Open it in the firewall, or use another MASTER_PORT"
            yield ReportLine("fault", "ports", text, fix, _hosts(heard, places))


def _folder_lines(heard: Heard) -> Iterator[ReportLine]:
    if len(heard.hosts) < 2 or not heard.sights:
        return
    folder = heard.hosts[0].folder
    path = folder.path if folder is not None else "the folder"
    unseen = {place: {*sight.missing} for place, sight in heard.sights.items() if sight.missing}
    if unseen:
        alone = _apart(len(heard.hosts), unseen)
        shown = _some([heard.name(place) for place in alone])
        fix = "Use a folder that all hosts mount for --out and the data. --folder DIR checks another one"
        yield ReportLine(
            "fault",
            "folder",
            f"{path} is not shared: files of the others are not seen on {shown}",
            fix,
            _hosts(heard, alone),
        )
    blind = [place for place, sight in heard.sights.items() if not sight.sees_lock]
    if blind:
        fix = "Use NFS with its lock service, or Lustre with -o flock. Otherwise no run continues without its leading host"
        yield ReportLine("warning", "folder", f"locks of other hosts in {path} are not seen", fix, _hosts(heard, blind))
    refused = [place for place, why in heard.written.items() if why.startswith("no lock")]
    if refused:
        fix = "Use NFS with its lock service, or Lustre with -o flock"
        yield ReportLine(
            "fault",
            "folder",
            f"files in {path} cannot be locked: {heard.written[refused[0]]}",
            fix,
            _hosts(heard, refused),
        )
    if not unseen and not blind and not refused and not any(heard.written.values()):
        yield ReportLine("ok", "folder", f"{path} is one folder for all {len(heard.hosts)} hosts, with locks")


def _apart(num_hosts: int, unseen: Mapping[int, set[int]]) -> list[int]:
    """Return the hosts that see another folder than most: those outside of the largest set of hosts that see each other."""
    groups: list[list[int]] = []
    for place in range(num_hosts):
        fitting = (g for g in groups if g[0] not in unseen.get(place, ()) and place not in unseen.get(g[0], ()))
        if (group := next(fitting, None)) is None:
            groups.append([place])
        else:
            group.append(place)
    largest = max(groups, key=len)
    return [place for place in range(num_hosts) if place not in largest]


def _clock_lines(heard: Heard) -> Iterator[ReportLine]:
    if not heard.skews:
        return
    ahead = {0: (0.0, 0.0), **heard.skews}
    # Of two clocks none is the usual one: the first host's counts as right.
    around = sorted(ahead_s for ahead_s, _ in ahead.values())[len(ahead) // 2] if len(ahead) > 2 else 0.0
    for place, (ahead_s, exact_s) in ahead.items():
        off_s = ahead_s - around
        if abs(off_s) - exact_s > _LITTLE_SKEW_S:
            level: Level = "fault" if abs(off_s) > _SKEW_S else "warning"
            others = "the others" if len(ahead) > 2 else f"that of {heard.name(1 - place)}"
            text = f"its clock is {abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} {others}"
            yield ReportLine(level, "clock", text, "Use chrony or ntpd on every host", (heard.name(place),))
    most_s = max(abs(ahead_s) + exact_s for ahead_s, exact_s in heard.skews.values())
    if most_s <= _LITTLE_SKEW_S:
        yield ReportLine("ok", "clock", f"the clocks of all hosts agree within {max(most_s, 0.001) * 1e3:.0f} ms")


def _gpu_lines(heard: Heard) -> Iterator[ReportLine]:
    """Yield how the GPUs, drivers and NCCL of the hosts differ."""
    known = [
        (place, host.gpus) for place, host in enumerate(heard.hosts) if host.gpus is not None and not host.gpus.error
    ]
    torches = [*heard.torches.items()]
    compared: tuple[tuple[str, str, Sequence[tuple[int, Any]]], ...] = (
        (
            "driver",
            "GPUs",
            [(place, f"{gpus.num_visible} of {gpus.names[0] if gpus.names else 'none'}") for place, gpus in known],
        ),
        ("driver", "driver", [(place, gpus.driver) for place, gpus in known if gpus.names]),
        ("torch", "NCCL", [(place, torch_.nccl) for place, torch_ in torches if torch_.nccl]),
    )
    for about, word, values in compared:
        if shown := _different(heard, values):
            yield ReportLine("fault", about, f"{word}: {shown}", "Use the same on all hosts")


def _mute_lines(heard: Heard) -> Iterator[ReportLine]:
    for name, questions in heard.mute.items():
        if name in heard.gone:
            fix = "Read the output of this host"
            yield ReportLine(
                "fault", "answers", f"it came, and left during the examination: {heard.gone[name]}", fix, (name,)
            )
        else:
            fix = "Use a host that is less busy, or a file server that answers"
            yield ReportLine("warning", "answers", f"no answer to {'; '.join(questions)}", fix, (name,))


def _hosts(heard: Heard, places: Sequence[int]) -> tuple[str, ...]:
    return tuple(heard.name(place) for place in places)


def _some(things: Sequence[object]) -> str:
    more = f" and {len(things) - _MOST_NAMED} more" if len(things) > _MOST_NAMED else ""
    return ", ".join(map(str, things[:_MOST_NAMED])) + more
