"""Measured links against the profile that `plan` would use, and the profile with what was measured.

Pairs are measured in rounds, as in a tournament: in each round every host has one partner, so that no two measurements share a
link of a host. What is measured is one TCP stream, as gloo uses; NCCL over InfiniBand is faster, and is not measured so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tomli_w

from samestep import hardware
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.output.durable_files import write_whole
from samestep.wings.cluster.diagnosis.all_hosts import Heard
from samestep.wings.cluster.diagnosis.doors import Rate
from samestep.wings.cluster.diagnosis.report import ReportLine

MOST_ROUNDS = 5
"""Rounds that are played: with more hosts each meets this many of the others."""
_ONE_STREAM_BYTES_PER_S = 1e9
"""The rate that one stream of Python reaches on any machine; a faster link is not told from this one."""
_SLOW = 0.5
"""Part of the profile's rate below which a link is slow."""
_LATE_TIMES, _LATE_S = 10.0, 5e-3
"""A latency is long if it is so many times that of the profile, and so many seconds longer."""


def rounds(num_hosts: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of hosts, round by round, each host at most once in a round (the circle method)."""
    places = [*range(num_hosts), *([-1] if num_hosts % 2 else [])]
    count, played = len(places), []
    for _turn in range(count - 1):
        pairs = [(places[index], places[count - 1 - index]) for index in range(count // 2)]
        played.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return played[:MOST_ROUNDS]


Links = Mapping[tuple[int, int], Rate]
"""The rates that were measured, from one host to another."""


def _slowest(links: Links) -> Rate | None:
    """Return the lowest rate between hosts, with the longest latency; None where nothing was measured."""
    measured = [rate for rate in links.values() if not rate.error and rate.bytes_per_s]
    if not measured:
        return None
    return Rate(min(rate.bytes_per_s for rate in measured), max(rate.latency_s for rate in measured))


def lines_of(heard: Heard, links: Links, machine: Hardware) -> Iterator[ReportLine]:
    """Yield whether the links are as fast as the profile says, and as each other."""
    failed = {pair: rate for pair, rate in links.items() if rate.error}
    for (start, end), failure in failed.items():
        yield ReportLine(
            "fault",
            "bandwidth",
            f"nothing could be measured to {heard.name(end)}: {failure.error}",
            "the lines above give the reason",
            (heard.name(start),),
        )
    measured = {pair: rate for pair, rate in links.items() if not rate.error}
    if not measured:
        return
    lower, higher = (
        min(rate.bytes_per_s for rate in measured.values()),
        max(rate.bytes_per_s for rate in measured.values()),
    )
    longest = max(rate.latency_s for rate in measured.values())
    shown = f"{_rate(lower)} to {_rate(higher)} and at most {longest * 1e6:,.0f} us between hosts, one TCP stream"
    if fast := _faster(heard, machine):
        yield ReportLine("ok", "bandwidth", f"{shown}; NCCL goes over {', '.join(fast)}, which this does not measure")
        return
    slow = [*_slow_lines(heard, measured, machine), *_late_lines(heard, measured, machine)]
    yield from slow or [
        ReportLine("ok", "bandwidth", f"{shown}; {machine.name} has {_rate(machine.inter.bytes_per_s)}")
    ]


def judged(heard: Heard, links: Links, machine: Hardware) -> Links:
    """Return the links that say what a run would get: those between hosts not where NCCL has a faster way."""
    return {} if _faster(heard, machine) else links


def _faster(heard: Heard, machine: Hardware) -> list[str]:
    """Return the devices over which NCCL would go rather than over TCP."""
    names = {name for host in heard.hosts if host.gpus is not None for name in host.gpus.infiniband}
    return sorted(names) if machine.library == "nccl" else []


def _slow_lines(heard: Heard, measured: Mapping[tuple[int, int], Rate], machine: Hardware) -> Iterator[ReportLine]:
    limit = _SLOW * min(machine.inter.bytes_per_s, _ONE_STREAM_BYTES_PER_S)
    rates = {pair: rate.bytes_per_s for pair, rate in measured.items()}
    slow = {pair: rate for pair, rate in rates.items() if rate < limit}
    if not slow:
        return
    worst = min(slow, key=lambda pair: slow[pair])
    way = f"{heard.name(worst[0])} to {heard.name(worst[1])}"
    text = f"a slow link: {_rate(slow[worst])} from {way}, while {machine.name} has {_rate(machine.inter.bytes_per_s)}"
    fix = "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the fast network. Otherwise write this rate with --out FILE, and use plan --hardware FILE"
    yield ReportLine("fault", "bandwidth", text, fix, tuple(heard.name(place) for place in _common(slow, rates)))


def _common(slow: Mapping[tuple[int, int], float], every: Mapping[tuple[int, int], float]) -> list[int]:
    """Return the hosts to or from which all ways are slow, unless those are all hosts; else the ends of the slowest way."""
    hosts = sorted({place for pair in every for place in pair})
    places = [
        place for place in hosts if any(all(pair in slow for pair in every if pair[end] == place) for end in (0, 1))
    ]
    return places if 0 < len(places) < len(hosts) else sorted({*min(slow, key=lambda pair: slow[pair])})


def _late_lines(heard: Heard, measured: Mapping[tuple[int, int], Rate], machine: Hardware) -> Iterator[ReportLine]:
    least_s = min(rate.latency_s for rate in measured.values())
    pair, worst = max(measured.items(), key=lambda item: item[1].latency_s)
    wanted_s = machine.inter.latency_s
    if worst.latency_s > max(_LATE_TIMES * wanted_s, wanted_s + _LATE_S):
        text = f"a slow link: {worst.latency_s * 1e3:.3g} ms from {heard.name(pair[0])} to {heard.name(pair[1])}, at least {least_s * 1e3:.3g} ms on the others, while {machine.name} has {wanted_s * 1e3:.3g} ms"
        yield ReportLine(
            "fault",
            "latency",
            text,
            "Use hosts that are closer to each other, or fewer and larger messages",
            tuple(heard.name(place) for place in pair),
        )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"


def write_profile(
    path: Path, given: Hardware | str | Path | None, machine: Hardware, links: Links, per_host: int
) -> str:
    """Write the profile with the measured links to a file; return the line that says so."""
    name = machine.name if given is None or isinstance(given, Hardware) else str(given)
    table = tomllib.loads(hardware.as_written(name))
    slowest, sources = _slowest(links), dict(table.get("sources", {}))
    if slowest is None:
        return f"written: {path}, as {machine.name} has it, since no links between hosts were measured"
    table["inter"] = {
        **table["inter"],
        "latency_s": float(f"{slowest.latency_s:.4g}"),
        "bytes_per_s": float(f"{slowest.bytes_per_s / max(1, per_host):.4g}"),
    }
    table["devices_per_node"] = max(1, per_host)
    by = f"measured: samestep doctor, one TCP stream between {len({start for start, _ in links})} hosts, the slowest of {len(links)}"
    sources |= {
        "inter.latency_s": by,
        "inter.bytes_per_s": f"{by}, shared by {max(1, per_host)} devices",
        "devices_per_node": f"measured: {max(1, per_host)} ranks of a host",
    }
    write_whole(path, tomli_w.dumps({**table, "sources": sources}))
    return f"written: {path}, {machine.name} with the links that were measured"


def ranks_of_host(heard: Heard, layout: str | None, job: Job | None) -> int:
    """Return the ranks of a host: those that came, or the share of a layout, or its GPUs."""
    hosts = len(heard.hosts)
    if not heard.identities[0].is_host and len(heard.identities) > hosts:
        return len(heard.identities) // hosts
    spec = Layout(layout) if layout else Layout(**job.layout) if job is not None and job.layout else None
    if spec is not None and spec.world_size >= hosts:
        return spec.world_size // hosts
    gpus = [host.gpus.num_visible for host in heard.hosts if host.gpus is not None]
    return max(1, *gpus) if gpus else 1


def layout_lines(heard: Heard, layout: str | None, job: Job | None) -> Iterator[ReportLine]:
    """Yield a line where a layout is for another number of ranks than the launcher has started; a single process starts its ranks itself."""
    spec = Layout(layout) if layout else Layout(**job.layout) if job is not None and job.layout else None
    who = heard.identities[0]
    if spec is None or (who.size == 1 and not who.variables):
        return
    needs, size, unit = spec.world_size, who.size, "host" if who.is_host else "rank"
    if needs == size or (who.is_host and needs % size == 0):
        return
    rule = f"a layout of {size} ranks" if unit == "rank" else f"a layout with as many ranks on each of {size} hosts"
    text = f'"{spec}" is for {needs} ranks, and {who.launcher} has {size} {unit}{"s" * (size > 1)}'
    yield ReportLine("fault", "layout", text, f"Use {rule}, or {needs} ranks")


def pairs_of(played: Sequence[Sequence[tuple[int, int]]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs that are measured at once: each round in one direction and then in the other."""
    for pairs in played:
        yield [*pairs]
        yield [(end, start) for start, end in pairs]
