"""benchmarks/network_namespaces.py: hosts that reach each other, links that are cut, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import network_namespaces
from network_namespaces import Host, NetworkError, network
from tun_relay import Relay

needs_namespaces = pytest.mark.skipif(bool(network_namespaces.lacking()), reason=network_namespaces.lacking())
SENDS = """
import socket, sys
socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])).sendall(bytes(100_000))
"""
RECEIVES = """
import socket, sys
listening = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, count = listening.accept()[0], 0
while part := connection.recv(2**16):
    count += len(part)
print(count)
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def send(source: Host, target: Host, within_s: float = 20.0) -> str:
    """Return the number of bytes that arrived, as text; empty where the target was not reached in time.

    A handshake of which one packet is lost takes 1 s longer, and 2 s more for the next one.
    """
    words = target.command(sys.executable, "-c", RECEIVES, target.address)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as receiving:
        assert receiving.stdout is not None
        receiving.stdout.readline()
        sending = subprocess.run(
            source.command(sys.executable, "-c", SENDS, target.address, str(within_s)), capture_output=True
        )
        if sending.returncode:
            receiving.kill()
        return receiving.stdout.read().strip()


@needs_namespaces
def test_hosts_reach_each_other_and_the_kernel_counts_it() -> None:
    with network(3, bits_per_s=100e6) as hosts:
        assert send(hosts[0], hosts[2]) == "100000"
        assert hosts[0].bytes_sent() > 100_000
        assert hosts[2].bytes_received() > 100_000
        assert hosts[1].bytes_received() < 10_000
        hosts[2].set_link(is_up=False)
        assert not send(hosts[0], hosts[2], within_s=1.0)
        assert hosts[0].name in namespaces()
    assert hosts[0].name not in namespaces()


needs_relay = pytest.mark.skipif(bool(network_namespaces.lacking(True)), reason=network_namespaces.lacking(True))


@needs_relay
def test_packets_that_are_late_or_lost_arrive_and_are_counted() -> None:
    with network(2, bits_per_s=50e6, latency_s=0.002, loss=0.02) as hosts:
        assert send(hosts[0], hosts[1]) == "100000"
        assert hosts[0].bytes_sent() > 100_000
    assert hosts[0].name not in namespaces()


class Files:
    """What a relay has written to the ends of two hosts' devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[int] = []
        monkeypatch.setattr(os, "write", lambda file, packet: self.written.append(file))
        self.addresses = {7: bytes([10, 77, 0, 1]), 8: bytes([10, 77, 0, 2])}


def packet(to: int, size: int = 1000) -> bytes:
    return (bytes([0x45, *[0] * 15, 10, 77, 0, to])).ljust(size, b"\0")


def test_a_packet_waits_for_its_turn_and_for_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(monkeypatch)
    relay = Relay(files.addresses, latency_s=0.1, loss=0.0, bits_per_s=100_000.0)  # 0.08 s for each packet
    for _ in range(4):
        relay.take(packet(2), now=1.0)
    relay.take(packet(9), now=1.0)  # to nobody
    assert [len(files.written) for now in (1.17, 1.19, 1.27, 1.35) if relay.give(now) >= 0.0] == [0, 1, 2, 3]
    relay.give(9.0)
    assert files.written == [8, 8, 8]  # the fourth would have waited longer than a switch keeps packets


def test_so_many_packets_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(monkeypatch)
    relay = Relay(files.addresses, latency_s=0.0, loss=0.25, bits_per_s=None)
    for _ in range(4000):
        relay.take(packet(1), now=0.0)
    relay.give(0.0)
    assert 2800 < len(files.written) < 3200


@needs_namespaces
def test_after_an_error_nothing_is_left_and_processes_are_ended() -> None:
    def fail() -> None:
        with network(2) as hosts:
            names.append(hosts[0].name)
            command = hosts[0].command("sh", "-c", "echo within; sleep 60")
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            assert started[0].stdout is not None
            started[0].stdout.readline()  # it is in the namespace now
            started[0].stdout.close()
            raise KeyboardInterrupt

    names: list[str] = []
    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert started[0].wait(timeout=10) == -9
    assert names[0] not in namespaces()


def test_a_machine_without_the_commands_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NetworkError, match="there is no command ip, which iproute2 has"), network(2):
        pass
