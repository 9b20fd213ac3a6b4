"""Hosts on one machine: network namespaces of Linux, joined by a switch, with links of a chosen rate.

    with network(2, bits_per_s=100e6) as hosts:
        subprocess.run(hosts[0].command("python", "train.py"))

       host 0           host 1           host 2
      10.77.0.1        10.77.0.2        10.77.0.3       eth0 of each, shaped on both of its ends
          \\________________|________________/
                         switch                         a bridge in a namespace of its own

Everything is in namespaces, so that nothing is left on the machine when they are deleted: at the end of `network`, on an
error and on Ctrl-C; those of a process that was killed are deleted by the next one. It needs root, `ip` and `tc`
(iproute2). A rate is kept by a token bucket (tc-tbf(8)); a delay and losses need netem (tc-netem(8)), which not every kernel
has: `lacking` says what this machine lacks.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_NAME = re.compile(r"samestep-(\d+)-\w+")
"""The name of a namespace: of which process it is, and which it is of its namespaces."""
_QUEUED = "200ms"
"""The longest time that a packet waits for its turn; what comes then is lost, as in a switch."""
_BUCKET_S, _LEAST_BUCKET_BYTES = 1e-3, 16 * 1024
"""A link that was idle may send this much at once."""


class NetworkError(Exception):
    """This machine cannot make such a network; the text says why."""


@dataclass(frozen=True)
class Host:
    """A host of the network: a namespace whose processes see its interface eth0, and no other network."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs another one on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def bytes_sent(self) -> int:
        """Return the bytes that the kernel has sent from this host, with the headers of its packets."""
        return self._counted("tx_bytes")

    def bytes_received(self) -> int:
        """Return the bytes that the kernel has received on this host, with the headers of their packets."""
        return self._counted("rx_bytes")

    def set_link(self, is_up: bool) -> None:
        """Plug or pull this host's cable."""
        _run(*self.command("ip", "link", "set", "eth0", "up" if is_up else "down"))

    def _counted(self, counter: str) -> int:
        return int(_run(*self.command("cat", f"/sys/class/net/eth0/statistics/{counter}")))


@contextmanager
def network(
    num_hosts: int, bits_per_s: float | None = None, latency_s: float = 0.0, loss: float = 0.0
) -> Iterator[list[Host]]:
    """Make hosts on this machine, and remove them, with all processes in them, at the end.

    Args:
        num_hosts: number of hosts.
        bits_per_s: rate of each host's link in each direction; None for as fast as the machine is.
        latency_s: seconds that a packet takes between two hosts.
        loss: fraction of the packets that are lost between two hosts.

    Raises:
        NetworkError: this machine cannot make it.
    """
    missing = lacking(needs_netem=bool(latency_s or loss))
    if missing:
        raise NetworkError(missing)
    _delete(_left_behind())
    of_ours = f"samestep-{os.getpid()}"
    switch = f"{of_ours}-switch"
    hosts = [Host(f"{of_ours}-{index}", f"10.77.0.{index + 1}") for index in range(num_hosts)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for index, host in enumerate(hosts):
            _join(host, switch, f"port{index}")
            _shape(host.name, "eth0", bits_per_s, latency_s, loss)
            _shape(switch, f"port{index}", bits_per_s)
        yield hosts
    finally:
        _delete([host.name for host in hosts] + [switch])


def lacking(needs_netem: bool = False) -> str:
    """Return what this machine lacks for such a network, as text; empty where it lacks nothing."""
    probe = f"samestep-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "set", "lo", "up")
        _run(
            "tc",
            "-n",
            probe,
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "tbf",
            "rate",
            "1gbit",
            "burst",
            "64kb",
            "latency",
            "1s",
        )
        if needs_netem:
            _run("tc", "-n", probe, "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "1ms")
    except NetworkError as error:
        return f"no network of namespaces on this machine: {error}"
    finally:
        _delete([probe])
    return ""


def _join(host: Host, switch: str, port: str) -> None:
    """Make a host, and the cable between its eth0 and a port of the switch."""
    _run("ip", "netns", "add", host.name)
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for interface in ("eth0", "lo"):
        _run("ip", "-n", host.name, "link", "set", interface, "up")


def _shape(namespace: str, interface: str, bits_per_s: float | None, latency_s: float = 0.0, loss: float = 0.0) -> None:
    """Limit what an interface sends; packets are delayed and lost before they wait for their turn."""
    add, at = ("tc", "-n", namespace, "qdisc", "add", "dev", interface), ("root",)
    if latency_s or loss:
        _run(
            *add,
            *at,
            "handle",
            "1:",
            "netem",
            "delay",
            f"{latency_s * 1e6:.0f}us",
            "loss",
            f"{loss:.4%}",
            "limit",
            "100000",
        )
        at = ("parent", "1:")
    if bits_per_s is not None:
        bucket = max(int(bits_per_s / 8 * _BUCKET_S), _LEAST_BUCKET_BYTES)
        _run(*add, *at, "tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(bucket), "latency", _QUEUED)


def _left_behind() -> list[str]:
    """Return the names of the namespaces whose process is no more."""
    found = [_NAME.fullmatch(line.split()[0]) for line in _run("ip", "netns", "list").splitlines()]
    return [one.group() for one in found if one and not os.path.exists(f"/proc/{one.group(1)}")]


def _delete(names: Sequence[str]) -> None:
    """End the processes of namespaces and delete them, those that exist; a namespace lives on while a process is in it."""
    for name in names:
        inside = _output("ip", "netns", "pids", name)
        if inside is None:
            continue
        for process in inside.split():
            _output("kill", "-KILL", process)
        _output("ip", "netns", "delete", name)


def _run(*words: str) -> str:
    """Run a command and return its output; raise NetworkError with its message if it fails."""
    try:
        done = _start(words)
    except FileNotFoundError:
        raise NetworkError(f"there is no command {words[0]}, which iproute2 has") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        root = "" if os.geteuid() == 0 else " (it needs root)"
        raise NetworkError(f"{' '.join(words)}: {why}{root}")
    return done.stdout


def _output(*words: str) -> str | None:
    """Run a command and return its output, or None if it fails or is not there."""
    try:
        done = _start(words)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout


def _start(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # In a session of its own: a Ctrl-C must not end the commands that clean up.
    return subprocess.run(words, capture_output=True, text=True, check=False, start_new_session=True)
