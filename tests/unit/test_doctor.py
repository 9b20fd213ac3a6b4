"""`samestep doctor` on generated findings: each single fault is named in one line, by the host that has it, and none on healthy hosts."""

from __future__ import annotations

import dataclasses
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep import hardware
from samestep.runtime.processes.launch_info import ALONE
from samestep.runtime.processes.rank_variables import listed_hosts
from samestep.wings.cluster.diagnosis import all_hosts, doors, findings, gathering, link_rates, one_host
from samestep.wings.cluster.diagnosis.all_hosts import Heard
from samestep.wings.cluster.diagnosis.doors import REACHED, Attempt, Rate
from samestep.wings.cluster.diagnosis.findings import (
    Folder,
    HostFindings,
    Limits,
    Sight,
    Software,
    at_once,
    find_folder,
    of_record,
)
from samestep.wings.cluster.diagnosis.gathering import Leads
from samestep.wings.cluster.diagnosis.gpus import Gpus, Torch, TorchQuestion
from samestep.wings.cluster.diagnosis.identity import Identity, Interface, Network, identify
from samestep.wings.cluster.diagnosis.link_rates import Links
from samestep.wings.cluster.diagnosis.report import Report, ReportLine, merged
from samestep.wings.cluster.hosts.channel import Channel

GIB = 1 << 30
MACHINE = hardware.load("cpu-laptop")
Case = tuple[Heard, Links]


def _host(place: int, draw: random.Random, num_hosts: int, *, has_gpus: bool) -> HostFindings:
    name = f"n{place + 1}"
    names = ("NVIDIA H100",) * 8 if has_gpus else ()
    interfaces = (
        Interface("lo", "127.0.0.1", True),
        Interface("eth0", f"10.0.0.{place + 1}", True),
        Interface("eth1", f"10.9.0.{place + 1}", True),
    )
    return HostFindings(
        Identity(
            name, f"key {place}", 100 + place, "srun", ("SLURM_PROCID=0",), place, num_hosts, meets_at="n1",
            ports=(29500, 23456), port=29500,
        ),
        Software("0.1.0", "3.11.7", "2.13.0", "CUDA 12.6" if has_gpus else "", "abc", "0123456789ab", "job1"),
        Network(
            name, "n1", ("10.0.0.1",), interfaces, "eth0", "the way to n1",
        ),
        Folder("/shared", "nfs of server:/shared", draw.randint(2, 900) * GIB, ""),
        Limits(
            "/tmp", draw.randint(2, 90) * GIB, 64 * GIB, draw.randint(1, 64) * GIB, "",
            draw.choice([-1, 1024, 65536]),
        ),
        Gpus(names, "550.54.15" if has_gpus else "", "", "", ()),
    )  # fmt: skip


def healthy(seed: int) -> Case:
    """Hosts that are well, of any number, with numbers drawn at random from those that are well."""
    draw = random.Random(seed)
    count = draw.randint(2, 6)
    has_gpus = draw.random() < 0.5
    hosts = tuple(_host(place, draw, count, has_gpus=has_gpus) for place in range(count))
    ways = [(one, other) for one in range(count) for other in range(count) if one != other]
    reached = {
        (one, other): tuple(Attempt(f"10.0.0.{other + 1}", port, REACHED) for port in (40001, 40002))
        for one, other in ways
    }
    heard = Heard(
        tuple(host.identity for host in hosts),
        hosts,
        reached=reached,
        meeting={place: Attempt("10.0.0.1", 29500, REACHED) for place in range(1, count)},
        skews={place: (draw.uniform(-0.4, 0.4), draw.uniform(0, 0.05)) for place in range(1, count)},
        written=dict.fromkeys(range(count), ""),
        sights=dict.fromkeys(range(count), Sight()),
        torches=dict.fromkeys(range(count), Torch("2.13.0", 8 if has_gpus else 0, "2.27" if has_gpus else "", "")),
    )
    return heard, {way: Rate(draw.uniform(0.5e9, 1e9), draw.uniform(5e-6, 5e-5)) for way in ways}


def lines_of(case: Case) -> list[ReportLine]:
    heard, links = case
    lines = [line for found in heard.hosts for line in one_host.lines_of(found)]
    lines += [*all_hosts.lines_of(heard), *link_rates.lines_of(heard, links, MACHINE)]
    lines += [one_host.torch_line(heard.name(place), one, heard.hosts[place]) for place, one in heard.torches.items()]
    return [*merged(lines)]


def _on_last(part: str, **changes: Any) -> Callable[[Case], Case]:
    """A fault of the last host: a part of its findings has other values."""

    def plant(case: Case) -> Case:
        heard, links = case
        last = heard.hosts[-1]
        changed = replace(last, **{part: replace(getattr(last, part), **changes)})
        identities = (*heard.identities[:-1], changed.identity)
        return replace(heard, hosts=(*heard.hosts[:-1], changed), identities=identities), links

    return plant


def _heard(change: Callable[[Heard, int], dict[str, Any]]) -> Callable[[Case], Case]:
    return lambda case: (replace(case[0], **change(case[0], len(case[0].hosts) - 1)), case[1])


def _to_last(heard: Heard, last: int, outcomes: Callable[[int], tuple[Attempt, ...]]) -> dict[str, Any]:
    return {"reached": {way: outcomes(last) if way[1] == last else tried for way, tried in heard.reached.items()}}


def _blocked(last: int) -> tuple[Attempt, ...]:
    return tuple(Attempt(f"10.0.0.{last + 1}", port, "no answer within 1.4 s") for port in (40001, 40002))


def _one_blocked(last: int) -> tuple[Attempt, ...]:
    return Attempt(f"10.0.0.{last + 1}", 40001, REACHED), Attempt(f"10.0.0.{last + 1}", 40002, "no answer within 1.4 s")


def _wrong_interface(last: int) -> tuple[Attempt, ...]:
    return (*_blocked(last), Attempt(f"10.9.0.{last + 1}", 40001, REACHED))


def _slow(part: float, way: Callable[[int, tuple[int, int]], bool]) -> Callable[[Case], Case]:
    def plant(case: Case) -> Case:
        heard, links = case
        last = len(heard.hosts) - 1
        between = {
            pair: replace(one, bytes_per_s=one.bytes_per_s * part) if way(last, pair) else one
            for pair, one in links.items()
        }
        return heard, between

    return plant


def _late(case: Case) -> Case:
    heard, links = case
    last = len(heard.hosts) - 1
    return heard, {pair: replace(one, latency_s=0.05) if pair == (0, last) else one for pair, one in links.items()}


def _all_unseen(heard: Heard, last: int) -> dict[str, Any]:
    everyone = range(len(heard.hosts))
    return {
        "sights": {
            place: Sight(missing=tuple(one for one in everyone if (one == last) != (place == last)))
            for place in everyone
        }
    }


def _duplicated(case: Case) -> Case:
    return _on_last("identity", rank=0)(case)


FAULTS: dict[str, tuple[Callable[[Case], Case], str, str]] = {
    "duplicate ranks": (_duplicated, "world", "rank 0 was given to 2 processes: process 100 on n1, process"),
    "other world": (_on_last("identity", size=1), "world", "worlds of different sizes"),
    "half-set variables": (_on_last("identity", refused="RANK is set but WORLD_SIZE not"), "identity", "RANK is set but WORLD_SIZE not"),
    "a world of one": (_on_last("identity", others="4 processes of this command by mpirun"), "identity", "a world of one, yet 4 processes"),
    "silent host": (_heard(lambda heard, last: {"identities": heard.identities[:-1], "hosts": heard.hosts}), "world", "was silent"),
    "other samestep": (_on_last("software", samestep="0.0.9"), "software", "0.0.9 on n"),
    "other files": (_on_last("software", source="def"), "software", "def on n"),
    "other torch": (_on_last("software", torch="2.11.0"), "software", "2.11.0 on n"),
    "other Python": (_on_last("software", python="3.12.1"), "software", "3.12.1 on n"),
    "other commit": (_on_last("software", commit="ffff"), "commit", "ffff on n"),
    "uncommitted changes": (_on_last("software", commit="0123456789ab with changes 00"), "commit", "with changes 00 on"),
    "other job": (_on_last("software", job="job2"), "job", "job2 on n"),
    "dead name": (_on_last("network", meeting_addresses=()), "names", "n1, at which all ranks meet, has no address here"),
    "host that leaves": (
        _heard(lambda heard, last: {"mute": {"n2": ("look: nothing came",)}, "gone": {"n2": "its connection ended"}}),
        "answers",
        "it came, and left during the examination: its connection ended",
    ),
    "no such interface": (_on_last("network", unknown=("GLOO_SOCKET_IFNAME=ib0",)), "interface", "GLOO_SOCKET_IFNAME=ib0 names no interface"),
    "interface down": (_on_last("network", interfaces=(Interface("eth0", "10.0.0.9", False),)), "interface", "eth0 (by the way to n1) is down"),
    "wrong interface": (_heard(lambda heard, last: _to_last(heard, last, _wrong_interface)), "interface", "eth1, 10.9.0."),
    "blocked ports": (_heard(lambda heard, last: _to_last(heard, last, _blocked)), "ports", "not reached at any port: no answer"),
    "one blocked port": (_heard(lambda heard, last: _to_last(heard, last, _one_blocked)), "ports", "some of its ports are blocked"),
    "blocked meeting": (
        _heard(lambda heard, last: {"meeting": {**heard.meeting, last: Attempt("10.0.0.1", 29500, "refused")}}),
        "ports",
        "port 29500 of 10.0.0.1, at which a run would meet, is blocked: refused",
    ),
    "taken port": (_heard(lambda heard, last: {"taken": (29500,)}), "ports", "port 29500, at which a run would meet, is held"),
    "unshared folder": (_heard(_all_unseen), "folder", "/shared is not shared"),
    "hidden locks": (_heard(lambda heard, last: {"sights": {**heard.sights, last: Sight(sees_lock=False)}}), "folder", "locks of other hosts"),
    "no locks": (_heard(lambda heard, last: {"written": {**heard.written, last: "no lock: No locks available"}}), "folder", "cannot be locked"),
    "read-only folder": (_on_last("folder", error="it is mounted read-only"), "folder", "it is mounted read-only"),
    "full folder": (_on_last("folder", free_bytes=1 << 20), "folder", "has 1 MiB left"),
    "hung folder": (lambda case: _hung(case, "folder"), "folder", "it did not end within 3 s"),
    "clock ahead": (_heard(lambda heard, last: {"skews": {**heard.skews, last: (3600.0, 0.01)}}), "clock", "its clock is 3"),
    "clock behind": (_heard(lambda heard, last: {"skews": {**heard.skews, last: (-7.0, 0.01)}}), "clock", "its clock is "),
    "full disk": (_on_last("limits", temporary_free_bytes=0), "disk", "/tmp has 0"),
    "full /dev/shm": (_on_last("limits", shm_free_bytes=4096), "shm", "/dev/shm has"),
    "/dev/shm without room": (_on_last("limits", shm_error="No space left on device"), "shm", "no file can be written to /dev/shm"),
    "few open files": (_on_last("limits", open_files=128), "files", "at most 128 open"),
    "broken driver": (_on_last("gpus", error="Failed to initialize NVML: Driver/library version mismatch"), "driver", "Failed to initialize NVML"),
    "torch without CUDA": (
        lambda case: _on_last("software", torch_cuda="")(_on_last("gpus", names=("T4",), driver="550.1")(case)),
        "driver",
        "torch is built without CUDA",
    ),
    "old driver": (
        lambda case: _on_last("software", torch_cuda="CUDA 13.0")(
            _on_last("gpus", names=("T4",), driver="470.1")(case)
        ),
        "driver",
        "driver 470.1 is too old for torch's CUDA 13.0",
    ),
    "GPUs that torch does not see": (
        lambda case: _seen_by_torch(
            _on_last("software", torch_cuda="CUDA 12.6")(_on_last("gpus", names=("T4",) * 8, driver="550.54.15")(case))
        ),
        "torch",
        "torch sees 3 GPUs, and the driver 8",
    ),
    "torch that fails": (
        _heard(lambda heard, last: {"torches": {**heard.torches, last: Torch("", 0, "", "ImportError: libcudart")}}),
        "torch",
        "ImportError: libcudart",
    ),
    "slow links of one host": (_slow(0.01, lambda last, pair: last in pair), "bandwidth", "a slow link"),
    "one slow link": (_slow(0.01, lambda last, pair: pair == (0, last)), "bandwidth", "a slow link"),
    "long way": (_late, "latency", "a slow link: 50 ms"),
    "no answer": (_heard(lambda heard, last: {"mute": {"n2": ("look: nothing came",)}}), "answers", "no answer to look: nothing came"),
}  # fmt: skip


def _seen_by_torch(case: Case) -> Case:
    heard, links = case
    return replace(heard, torches={**heard.torches, len(heard.hosts) - 1: Torch("2.13.0", 3, "2.27", "")}), links


def _hung(case: Case, part: str) -> Case:
    heard, links = case
    last = replace(heard.hosts[-1], **{part: None}, late=(f"{part}: it did not end within 3 s",))
    return replace(heard, hosts=(*heard.hosts[:-1], last)), links


@pytest.mark.parametrize("seed", range(12))
def test_healthy_hosts_have_no_fault(seed: int) -> None:
    assert [line.to_text() for line in lines_of(healthy(seed)) if line.level != "ok"] == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_one_line(fault: str, seed: int) -> None:
    plant, about, text = FAULTS[fault]
    case = plant(healthy(seed))
    bad = [line for line in lines_of(case) if line.level != "ok"]
    named = [line for line in bad if line.about == about and text in line.found]
    assert len(named) == 1, [line.to_text() for line in bad]
    assert named[0].remedy
    assert "\n" not in named[0].to_text()


def test_a_probe_that_hangs_is_left_behind_and_named() -> None:
    released = threading.Event()
    found, late = at_once({"folder": lambda: released.wait(60), "names": lambda: 7, "clock": lambda: 1 / 0}, 0.3)
    released.set()
    assert (found["folder"], found["names"]) == (None, 7)
    assert {*late} == {"folder: it did not end within 0.3 s", "clock: ZeroDivisionError: division by zero"}


@pytest.mark.parametrize("end", [0, 1])
def test_a_host_whose_ways_out_or_in_are_slow_is_the_one_that_is_named(end: int) -> None:
    heard, links = next(case for case in map(healthy, range(20)) if len(case[0].hosts) == 3)
    between = {pair: replace(one, bytes_per_s=1e6) if pair[end] == 1 else one for pair, one in links.items()}
    (slow,) = (line for line in lines_of((heard, between)) if line.level == "fault")
    assert slow.hosts == ("n2",)


def test_findings_survive_the_way_as_json() -> None:
    heard, _ = healthy(3)
    for found in heard.hosts:
        assert of_record(HostFindings, json.loads(json.dumps(found.to_record()))) == found
    assert of_record(Identity, {"rank": "many"}) is None


def test_the_record_has_the_lines_and_the_status() -> None:
    fault = ReportLine("fault", "clock", "its clock is 9 s ahead", "Use chrony", ("n2",))
    report = Report("head", (fault, ReportLine("ok", "names", "n1")), 1.5)
    assert report.status == 1
    record = json.loads(json.dumps(report.to_record()))
    assert record["faults"] == 1
    assert record["lines"][0] == {
        "level": "fault",
        "about": "clock",
        "hosts": ["n2"],
        "found": "its clock is 9 s ahead",
        "remedy": "Use chrony",
    }
    assert replace(report, lines=report.lines[1:]).status == 0
    assert replace(report, told=0).status == 0


@pytest.mark.parametrize("count", range(2, 12))
def test_every_round_measures_a_host_once_and_all_rounds_every_pair(count: int) -> None:
    played = link_rates.rounds(count)
    for pairs in played:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len({*hosts})
    pairs = [pair for pairs in played for pair in pairs]
    assert len(pairs) == len({*pairs})
    if count <= link_rates.MOST_ROUNDS:
        assert len(pairs) == count * (count - 1) // 2


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3],m7", ["n1", "n2", "n3", "m7"]),
        ("r[08-10]c[1,3]x", ["r08c1x", "r08c3x", "r09c1x", "r09c3x", "r10c1x", "r10c3x"]),
        ("a[1-999999999]", ["a[1-999999999]"]),
    ],
)
def test_lists_of_slurm_are_expanded(nodes: str, names: list[str]) -> None:
    assert [*listed_hosts({"SLURM_JOB_NODELIST": nodes})] == names


def test_a_position_has_the_variables_that_give_it() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
    found = identify(env)
    assert (found.rank, found.size, found.meets_at, found.ports[0]) == (1, 2, "h1", 29500)
    assert "RANK=1" in found.variables
    held = identify({**env, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert 29500 not in held.ports
    assert held.ports
    assert "RANK is set but WORLD_SIZE" in identify({"RANK": "1"}).refused
    assert dataclasses.replace(found, refused="") == found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _identity(rank: int, ports: tuple[int, ...], size: int = 3) -> Identity:
    at = {"meets_at": "127.0.0.1", "ports": ports, "port": ports[0]}
    return Identity(f"h{rank}", f"key {rank}", rank, "torchrun", (), rank, size, **at)


def _answers(rank: int) -> gathering.Answer:
    return lambda question: {"rank": rank, "heard": question["do"]}


def test_processes_meet_at_the_second_port_where_the_first_is_held_and_answer_what_they_are_asked(capsys):
    with socket.create_server(("127.0.0.1", 0)) as held:
        threading.Thread(target=_hang_up, args=(held,), daemon=True).start()
        ports = (int(held.getsockname()[1]), _free_port())
        token = gathering.token_of(_identity(0, ports))
        statuses: dict[int, int | None] = {}

        def follower(rank: int) -> None:
            met = gathering.meet(_identity(rank, ports), token, 60)
            assert isinstance(met, Channel)
            statuses[rank] = gathering.follow(met, _answers(rank))

        leads = gathering.meet(_identity(0, ports), token, 60)
        assert isinstance(leads, Leads)
        assert leads.taken == ports[:1]
        threads = [threading.Thread(target=follower, args=(rank,)) for rank in (2, 1)]
        for thread in threads:
            thread.start()
        with gathering.gathered(leads, _identity(0, ports), token, 60, _answers(0)) as peers:
            assert [peer.identity.rank for peer in peers] == [0, 1, 2]
            print("the report")
            assert capsys.readouterr().out == "the report\n"
            said = gathering.ask_all({peer: {"do": "clock"} for peer in peers}, 60)
            gathering.dismiss(peers, 1)
        for thread in threads:
            thread.join()
    assert sorted((peer.identity.rank, one["rank"], one["heard"]) for peer, one in said.items()) == [
        (rank, rank, "clock") for rank in range(3)
    ]
    assert statuses == {1: 1, 2: 1}


def _hang_up(listening: socket.socket) -> None:
    """Answer whoever connects as another program does."""
    while True:
        try:
            listening.accept()[0].close()
        except OSError:
            return


def test_doors_tell_hosts_ports_and_tokens_apart_and_measure() -> None:
    door, token = doors.Door(b"secret"), b"secret"
    door.number = 7
    closed = _free_port()
    try:
        right = doors.Target(7, ("127.0.0.1",), door.ports)
        other = doors.Target(8, ("127.0.0.1",), door.ports)
        shut = doors.Target(7, ("127.0.0.1",), (closed,))
        found = [{one.outcome for one in tried} for tried in doors.reach([right, other, shut], token)]
        assert found == [{REACHED}, {"another host answers"}, {"refused"}]
        assert doors.attempt("127.0.0.1", door.ports[0], b"another", 7).outcome == "another program answers"
        measured = doors.rate("127.0.0.1", door.ports[0], token)
        assert measured.error == ""
        assert measured.bytes_per_s > 0
        assert measured.latency_s > 0
        assert doors.rate("127.0.0.1", closed, token).error
    finally:
        door.close()


def test_the_profile_has_the_measured_links_shared_by_the_devices_of_a_host(tmp_path: Path) -> None:
    heard, links = healthy(5)
    rate, latency_s = min(one.bytes_per_s for one in links.values()), max(one.latency_s for one in links.values())
    assert "measured" in link_rates.write_profile(tmp_path / "x.toml", "cpu-laptop", MACHINE, links, 4)
    written = hardware.load(str(tmp_path / "x.toml"))
    assert written.inter.bytes_per_s == pytest.approx(rate / 4, rel=1e-3)
    assert (written.devices_per_node, written.intra) == (4, MACHINE.intra)
    assert written.inter.latency_s == pytest.approx(latency_s, rel=1e-3)
    gpus = replace(heard.hosts[0], gpus=Gpus(("H100",), "550.1", "", "", ("mlx5_0",)))
    faster = replace(heard, hosts=(gpus, *heard.hosts[1:]))
    assert link_rates.judged(faster, links, hardware.load("h100x8")) == {}
    assert link_rates.judged(faster, links, MACHINE) is links


@pytest.mark.parametrize(
    ("layout", "is_host", "named"),
    [
        ("dp=4", False, ""),
        ("dp=2 tp=2", False, ""),
        ("dp=2", False, '"dp=2" is for 2 ranks, and torchrun has 4 ranks'),
        ("dp=8", False, '"dp=8" is for 8 ranks, and torchrun has 4 ranks'),
        ("dp=8", True, ""),
        ("dp=6", True, '"dp=6" is for 6 ranks, and torchrun has 4 hosts'),
        (None, False, ""),
    ],
)
def test_a_layout_for_another_number_of_ranks_is_named(layout: str | None, is_host: bool, named: str) -> None:
    who = Identity("n0", "n0", 1, "torchrun", ("RANK=0",), size=4, is_host=is_host)
    found = [*link_rates.layout_lines(Heard((who,), ()), layout, None)]
    assert [line.found for line in found] == ([named] if named else [])
    alone = Heard((Identity("n0", "n0", 1, ALONE),), ())
    assert not [*link_rates.layout_lines(alone, layout, None)]


def test_a_meeting_point_that_is_every_host_itself_has_the_address_to_use() -> None:
    heard, _ = healthy(3)
    assert len(heard.hosts) > 1
    net = replace(heard.hosts[0].network, meeting_addresses=("127.0.1.1", "10.0.0.1"))
    first = Heard(heard.identities[:1], (replace(heard.hosts[0], network=net),))
    (line,) = [one for one in all_hosts.lines_of(first) if one.about == "world"]
    assert "is 127.0.1.1 here: every host itself" in line.found
    assert "MASTER_ADDR=10.0.0.1 on all hosts" in line.remedy


def test_a_python_that_cannot_be_started_and_a_thread_that_cannot_are_no_traceback(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def refuse_process(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as broken:
        broken.setattr(subprocess, "Popen", refuse_process)
        asked = TorchQuestion()
    assert asked.answer(1.0).error == f"{sys.executable} cannot be started: resource temporarily unavailable"
    asked.close()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert at_once({"one": lambda: 1, "two": lambda: 1 // 0}) == (
        {"one": 1, "two": None},
        ("two: ZeroDivisionError: integer division or modulo by zero",),
    )


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert find_folder(tmp_path / "file").error == "it is a file"
    assert find_folder(tmp_path / "none yet").error == ""


def test_all_files_of_samestep_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digested: list[Path] = []
    monkeypatch.setattr(findings, "_digest", lambda files: str(digested.extend(files)))
    monkeypatch.setattr(findings, "_commit", str)
    findings._find_software(None, tmp_path)
    assert {*digested} == {*Path(samestep.__file__).parent.rglob("*.py")}
    assert {"layout.py", "run.py", "findings.py"} <= {path.name for path in digested}
