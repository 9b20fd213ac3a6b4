"""What one process finds on its host, without any other: plain data that is sent to the first host."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from samestep.diagnosis.gpus import Gpus, find_gpus
from samestep.diagnosis.identity import Identity
from samestep.diagnosis.limits import Limits, find_limits
from samestep.diagnosis.names import Network, find_network
from samestep.diagnosis.report import shortened
from samestep.diagnosis.shared_folder import Folder, find_folder
from samestep.diagnosis.software import Software, find_software
from samestep.job import Job

T = TypeVar("T")
PROBE_S = 3.0
"""The longest that one probe may take."""


@dataclass(frozen=True)
class HostFindings:
    """The findings of all probes on one host; None where a probe did not end in time."""

    identity: Identity
    software: Software | None
    network: Network | None
    folder: Folder | None
    limits: Limits | None
    gpus: Gpus | None
    late: tuple[str, ...] = ()
    """The probes that did not end in time, or failed, each with the reason."""

    def to_record(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return dataclasses.asdict(self)


def of_record(kind: type[T], record: object) -> T | None:
    """Return the dataclass of a record that came from another host; None where it is none."""
    try:
        return TypeAdapter(kind).validate_python(record)
    except ValidationError:
        return None


def find(identity: Identity, job: Job | None, job_folder: Path, folder: Path) -> HostFindings:
    """Return what is found on this host, all probes at once.

    Args:
        identity: who this process is.
        job: the job that is to run.
        job_folder: the folder of its file.
        folder: the folder that all hosts are to see.
    """
    probes: dict[str, Callable[[], Any]] = {
        "software": lambda: find_software(job, job_folder),
        "network": lambda: find_network(identity.meets_at, identity.listed),
        "folder": lambda: find_folder(folder),
        "limits": find_limits,
        "gpus": find_gpus,
    }
    found, late = at_once(probes)
    return HostFindings(identity, **found, late=late)


def at_once(probes: dict[str, Callable[[], Any]], limit_s: float = PROBE_S) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Run probes at the same time; return their results, and why some have none.

    A probe that hangs, as in a file system whose server is gone, is left behind in its thread.
    """
    results: dict[str, Any] = dict.fromkeys(probes)
    errors: dict[str, str] = {}

    def run(name: str) -> None:
        try:
            results[name] = probes[name]()
        except Exception as error:  # whatever a broken host does must not hide the other findings
            errors[name] = shortened(f"{type(error).__name__}: {error}")

    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in probes}
    for name, thread in threads.items():
        try:
            thread.start()
        except RuntimeError:  # no thread is left to this user; what hangs is then waited for
            run(name)
    end_s = time.monotonic() + limit_s
    for name, thread in threads.items():
        while thread.is_alive() and time.monotonic() < end_s:
            thread.join(0.05)
        if thread.is_alive():
            errors[name] = f"it did not end within {limit_s:.3g} s"
    return {name: results[name] for name in probes}, tuple(f"{name}: {error}" for name, error in errors.items())
