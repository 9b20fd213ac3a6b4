"""Carries the packets of hosts in network namespaces to each other, later than they were sent, and loses some.

    python benchmarks/tun_relay.py '{"latency_s": 0.02, "loss": 0.001, "bits_per_s": 1e7, "hosts": {"NAMESPACE": "10.77.0.1", ...}}'

       host 0           host 1                 eth0 of each is a TUN device, whose other end is a file of this process
      10.77.0.1        10.77.0.2
          \\________________/
              this process                     keeps a packet for its turn on the receiver's link, and then for the latency

Every packet is lost with equal probability, whatever happened to the one before. It needs /dev/net/tun and no module of the
kernel's scheduler (netem); one core carries some 50,000 packets a second, which is 500 Mbit/s. It prints a line when all hosts are
up, and ends with its standard input.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping

MTU = 1500
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MOST_WAITING_S = 0.2
"""The longest time that a packet waits for its turn on a link; one that would wait longer is lost, as in a switch."""
_STANDARD_INPUT = 0


def device_in(namespace: str, address: str, index: int) -> int:
    """Make a TUN device, move it into a namespace as its eth0, and return the file of its other end."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"tun{os.getpid()}-{index}"[:15]
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    for words in (
        ("ip", "link", "set", name, "netns", namespace),
        ("ip", "-n", namespace, "link", "set", name, "name", "eth0"),
        ("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0"),
        ("ip", "-n", namespace, "link", "set", "eth0", "mtu", str(MTU), "txqueuelen", "1000", "up"),
    ):
        subprocess.run(words, check=True)
    return file


class Relay:
    """Packets on their way between hosts."""

    def __init__(self, files: Mapping[int, bytes], latency_s: float, loss: float, bits_per_s: float | None) -> None:
        """Carry packets between files, each with the address of its host."""
        self._to = {address: file for file, address in files.items()}
        self._latency_s, self._loss, self._bits_per_s = latency_s, loss, bits_per_s
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._free_at = dict.fromkeys(files, 0.0)
        self._count = 0

    def take(self, packet: bytes, now: float) -> None:
        """Take a packet that a host has sent."""
        file = self._to.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if file is None or random.random() < self._loss:
            return
        sent = max(now, self._free_at[file])
        if sent - now > _MOST_WAITING_S:
            return
        if self._bits_per_s is not None:
            sent += len(packet) * 8 / self._bits_per_s
        self._free_at[file] = sent
        self._count += 1
        heapq.heappush(self._under_way, (sent + self._latency_s, self._count, file, packet))

    def give(self, now: float) -> float:
        """Hand over the packets that are due, and return the seconds until the next one is."""
        while self._under_way and self._under_way[0][0] <= now:
            _, _, file, packet = heapq.heappop(self._under_way)
            try:
                os.write(file, packet)
            except OSError:  # the host's cable is pulled
                continue
        return max(0.0, self._under_way[0][0] - now) if self._under_way else 1.0


def main() -> None:
    """Carry packets until the standard input ends."""
    given = json.loads(sys.argv[1])
    files = {
        device_in(name, address, index): bytes(map(int, address.split(".")))
        for index, (name, address) in enumerate(given["hosts"].items())
    }
    relay = Relay(files, given["latency_s"], given["loss"], given["bits_per_s"])
    print("up", flush=True)
    wait_s = 1.0
    while True:
        ready, _, _ = select.select([_STANDARD_INPUT, *files], [], [], wait_s)
        if _STANDARD_INPUT in ready:
            return
        for file in ready:
            for _ in range(64):  # in turns, so that no host fills the relay
                try:
                    packet = os.read(file, 2 * MTU)
                except BlockingIOError:
                    break
                relay.take(packet, time.monotonic())
        wait_s = relay.give(time.monotonic())


if __name__ == "__main__":
    main()
