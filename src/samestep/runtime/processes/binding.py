"""The cores near a GPU, to which its rank is bound: transfers then cross no link between processors.

Linux lists, for each PCI device, the cores of the same NUMA node. Memory follows: a page belongs to the node of the core
that writes it first.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_PCI = Path("/sys/bus/pci/devices")


def bind_near(device: torch.device, devices: Path = _PCI) -> None:
    """Bind this process to those of its cores that are near a GPU, where the system tells which these are."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    near = cores_near(torch.cuda.get_device_properties(device), devices) & allowed
    if near and near != allowed:
        os.sched_setaffinity(0, near)


def cores_near(properties: object, devices: Path = _PCI) -> set[int]:
    """Return the cores of the node at which a GPU hangs, by its properties; empty where the system does not tell."""
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    path = devices / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "local_cpulist"
    try:
        return _cores(path.read_text())
    except (OSError, ValueError):  # no such file in a container, or another form
        return set()


def _cores(text: str) -> set[int]:
    """Return the numbers of a list such as 0-3,8."""
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}
