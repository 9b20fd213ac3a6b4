"""The figures of a profile that measured steps can distinguish, each as a multiple of the time that it takes.

    products, attention, memory     matrix products, fused attention, and elementwise kernels
    launches, host                  one launch of a kernel, and the host's work once a step
    collectives, links              what each collective takes however small, and the bytes of all links

A profile with these factors computes what the same data sheet gives, at other efficiencies: peaks, sizes and latencies stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import tomli_w

from samestep.hardware import Hardware

FACTORS = ("products", "attention", "memory", "launches", "host", "collectives", "links")
Factors = Mapping[str, float]
"""Multiples of time by the names of `FACTORS`; what is missing is 1."""
_KEYS = {
    "efficiency.attention": "attention",
    "efficiency": "products",
    "memory_efficiency": "memory",
    "kernel_launch_s": "launches",
    "host_step_s": "host",
    "intra.collective_s": "collectives",
    "inter.collective_s": "collectives",
    "intra": "links",
    "inter": "links",
}
"""The factor of each key of a profile, the most specific key first."""
_RATES = ("bytes_per_s", "by_ranks", "measured_s")


def scaled(machine: Hardware, factors: Factors) -> Hardware:
    """Return a machine on which each kind of work takes `factors` times as long; no efficiency is larger than 1."""
    of = {name: factors.get(name, 1.0) for name in FACTORS}
    return replace(
        machine,
        name=f"{machine.name} {' '.join(f'{of[name]:.6g}' for name in FACTORS)}",  # prices are cached by the name
        flops_per_s={
            dtype: rate if dtype in machine.efficiency else rate / of["products"]
            for dtype, rate in machine.flops_per_s.items()
        },
        efficiency={
            key: min(1.0, rate / of["attention" if key == "attention" else "products"])
            for key, rate in machine.efficiency.items()
        },
        memory_efficiency=min(1.0, machine.memory_efficiency / of["memory"]),
        kernel_launch_s=machine.kernel_launch_s * of["launches"],
        host_step_s=machine.host_step_s * of["host"],
        intra=machine.intra.delayed(transfer=of["links"], collective=of["collectives"]),
        inter=machine.inter.delayed(transfer=of["links"], collective=of["collectives"]),
    )


def limits(machine: Hardware) -> dict[str, float]:
    """Return the smallest factor of those figures that are fractions of a peak: with it all of the peak is reached."""
    products = [rate for key, rate in machine.efficiency.items() if key != "attention"]
    return {
        "products": max(products, default=0.0),
        "attention": machine.efficiency.get("attention", 0.0),
        "memory": machine.memory_efficiency,
    }


def as_toml(fitted: Hardware, machine: Hardware, factors: Factors, what: str) -> str:
    """Return a refitted profile as TOML; the source of a refitted number names its factor, the steps and its former source."""
    table: dict[str, Any] = plain(asdict(fitted))
    del table["name"]
    sources = dict(machine.sources)
    for key, before in machine.sources.items():
        factor = factors.get(_factor_of(key, machine), 1.0)
        if not math.isclose(factor, 1.0):
            sources[key] = (
                f"refitted: takes {factor:.3g} times as long as in {machine.name}, on {what}; before: {before}"
            )
    return tomli_w.dumps({**table, "sources": sources})


def _factor_of(key: str, machine: Hardware) -> str:
    """Return the factor that changes a key of a profile; empty if none does."""
    first, _, last = key.partition(".")
    if first == "flops_per_s":
        return "" if last in machine.efficiency else "products"
    if first in ("intra", "inter") and last not in ("collective_s", *_RATES):
        return ""  # latencies stay
    return _KEYS.get(key) or _KEYS.get(first, "")


def plain(value: Any) -> Any:
    """Return nested data without the values that are not set: TOML cannot write None."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items() if one is not None and one != {}}
    return value
