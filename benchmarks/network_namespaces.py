"""Hosts on one machine: network namespaces of Linux, joined by a switch, with links of a chosen rate.

    with network(2, bits_per_s=100e6) as hosts:
        subprocess.run(hosts[0].command("python", "train.py"))

       host 0           host 1           host 2
      10.77.0.1        10.77.0.2        10.77.0.3       eth0 of each, shaped on both of its ends
          \\________________|________________/
                         switch                         a bridge in a namespace of its own

Everything is in namespaces, so that nothing is left on the machine when they are deleted: at the end of `network`, on an
error and on Ctrl-C; those of a process that was killed are deleted by the next one. It needs root, `ip` and `tc`
(iproute2). A rate is kept by a token bucket (tc-tbf(8)). Where packets are to take time, or to be lost, a process takes the place of
the switch (`tun_relay.py`), which needs /dev/net/tun: `lacking` says what this machine lacks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

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
    is_carried = bool(latency_s or loss)
    missing = lacking(carries=is_carried)
    if missing:
        raise NetworkError(missing)
    _delete(_left_behind())
    of_ours = f"samestep-{os.getpid()}"
    switch = f"{of_ours}-switch"
    hosts = [Host(f"{of_ours}-{index}", f"10.77.0.{index + 1}") for index in range(num_hosts)]
    with ExitStack() as stack:
        stack.callback(lambda: _delete([host.name for host in hosts] + [switch]))
        for host in hosts:
            _run("ip", "netns", "add", host.name)
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
        if is_carried:
            stack.enter_context(_carried(hosts, bits_per_s, latency_s, loss))
        else:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "switch", "up")
        for index, host in enumerate(hosts):
            if not is_carried:
                _join(host, switch, f"port{index}")
                _shape(switch, f"port{index}", bits_per_s)
            _shape(host.name, "eth0", bits_per_s)
        yield hosts


@contextmanager
def _carried(hosts: Sequence[Host], bits_per_s: float | None, latency_s: float, loss: float) -> Iterator[None]:
    """Let a process carry the packets of some hosts, inside.

    Raises:
        NetworkError: it cannot make their interfaces.
    """
    given = {"latency_s": latency_s, "loss": loss, "bits_per_s": bits_per_s}
    words = json.dumps({**given, "hosts": {host.name: host.address for host in hosts}})
    command = (sys.executable, str(Path(__file__).with_name("tun_relay.py")), words)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as relay:
        assert relay.stdin is not None
        assert relay.stdout is not None
        assert relay.stderr is not None
        try:
            if not relay.stdout.readline():
                raise NetworkError(f"no relay of packets: {(relay.stderr.read().strip().splitlines() or [''])[-1]}")
            yield
        finally:
            relay.stdin.close()


def lacking(carries: bool = False) -> str:
    """Return what this machine lacks for such a network, with a relay if it `carries` packets; empty where it lacks nothing."""
    probe = f"samestep-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "set", "lo", "up")
        _shape(probe, "lo", 1e9)
        if carries and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            return "no packets can be delayed or lost on this machine: /dev/net/tun is not there, or not for this user"
    except NetworkError as error:
        return f"no network of namespaces on this machine: {error}"
    finally:
        _delete([probe])
    return ""


def _join(host: Host, switch: str, port: str) -> None:
    """Make the cable between a host's eth0 and a port of the switch."""
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _run("ip", "-n", host.name, "link", "set", "eth0", "up")


def _shape(namespace: str, interface: str, bits_per_s: float | None) -> None:
    """Limit what an interface sends."""
    if bits_per_s is not None:
        bucket = str(max(int(bits_per_s / 8 * _BUCKET_S), _LEAST_BUCKET_BYTES))
        shaper = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", bucket, "latency", _QUEUED)
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shaper)


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
