"""When and on what a row was measured: kept beside its figures, and said below the tables that are made of them."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import torch

KEY = "measured"


def now() -> dict[str, Any]:
    """Return the day, the software, the cores of this machine and how many processes want them, before something is measured."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "day": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": cores,
        "load": round(os.getloadavg()[0], 1),
    }


def sentence(rows: Iterable[Mapping[str, Any]]) -> str:
    """Say of some rows when and on what they were measured; loads of all rows of one day and software together."""
    loads: dict[str, list[float | None]] = {}
    for row in rows:
        one = row[KEY]
        where = f"on {one['day']} on {one['cores']} cores (torch {one['torch']}, Python {one['python']})"
        loads.setdefault(where, []).append(one["load"])
    return (
        f"Measured {'; '.join(f'{where} {_loaded(found)}' for where, found in sorted(loads.items()))}." if loads else ""
    )


def _loaded(loads: list[float | None]) -> str:
    """Say how many processes wanted the cores; None where that was not kept."""
    kept = sorted(load for load in loads if load is not None)
    span = f"{kept[0]:g}" if kept and kept[0] == kept[-1] else f"{kept[0]:g} to {kept[-1]:g}" if kept else ""
    parts = [f"with a load before of {span}"] * bool(kept) + ["with a load that was not noted"] * (
        len(kept) < len(loads)
    )
    return " or ".join(parts)
