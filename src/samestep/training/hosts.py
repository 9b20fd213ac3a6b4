"""A run on several hosts: the one that the rendezvous belongs to leads it, and the others do as it says.

```
host 1: samestep train ─ meet ─ check ─ claim the folder ─ run_workers ──► ranks 0, 1 and, through its followers, 2, 3
host 2: samestep train ─ meet ─ follow ─ check the same ─ LocalWorkers ──► ranks 2, 3
```
All hosts give the same words, and see the same run folder. Each checks, builds and traces the model by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from samestep import errors
from samestep.errors import JobError, RunError
from samestep.job import Job
from samestep.runtime.processes import workers
from samestep.runtime.processes.distant_workers import Away, Follower
from samestep.runtime.processes.join import resolve_device
from samestep.runtime.processes.local_workers import LocalWorkers
from samestep.runtime.processes.meeting import Meeting
from samestep.runtime.processes.worker import LaunchOptions
from samestep.training import run_folder
from samestep.training.check import Checked, check, shares


def identity(job: Job, flags: Mapping[str, object]) -> dict[str, str]:
    """Return what must be equal on all hosts of a run, by the words that name it."""
    versions = {name: metadata.version(name) for name in ("samestep", "torch")}
    digest = hashlib.sha256(job.to_toml().encode()).hexdigest()[:16]
    given = {f"--{name.replace('_', '-')}": str(value) for name, value in flags.items()}
    return {**versions, "python": platform.python_version(), "a job of digest": digest, **given}


def away(checked: Checked, meeting: Meeting) -> Away:
    """Return the part that the other hosts take in one start of a run's workers."""
    order = {
        "layout": str(checked.layout),
        "folder": str(checked.folder.absolute()),
        "until": checked.until,
        "resume_from": str(checked.resume_from.absolute()) if checked.resume_from else "",
        "lock": run_folder.lock_of(checked.folder),
    }
    return Away(meeting, shares(checked.layout.world_size, meeting.num_hosts), order)


def follow(meeting: Meeting, job: Job, init_from: str | Path | None, work: Callable[..., Any]) -> dict[str, Any]:
    """Start workers of `work` as the leading host says, until the run is over, and return its summary.

    Raises:
        SamestepError: the run failed; class and text are those of the leading host.
        SystemExit: the run was killed.
    """
    assert meeting.leader is not None
    print(f"follows {meeting.leader.peer}, over {meeting.interface}", flush=True)

    known: dict[str, Checked] = {}

    def workers_of(order: Mapping[str, Any]) -> LocalWorkers:
        layout, until, folder = order["layout"], order["until"], Path(order["folder"])
        if run_folder.lock_of(folder) != order["lock"]:
            raise JobError(f"--out {folder} is not the leading host's folder: one that all hosts share works")
        if layout not in known:
            size = {"ranks": order["ranks"], "num_hosts": order["ranks"] // order["local_ranks"]}
            given = {"layout": layout, "steps": until, "out": folder, "init_from": init_from}
            known[layout] = check(job, **given, **size, auto_resume=True)
        checked = _resumed(known[layout], order)
        device = resolve_device(job.run.device)
        workers.check_gpus(device, order["local_ranks"])
        options = LaunchOptions(
            ranks=order["ranks"],
            first_rank=order["first_rank"],
            local_ranks=order["local_ranks"],
            ranks_per_node=order["ranks_per_node"],
            device_type=device,
            threads=job.run.threads,
            timeout_s=job.run.timeout_s,
            hang_s=job.run.hang_s,
            quiet=True,
            isolated=False,
            interface=meeting.interface,
            store=tuple(order["store"]),
        )
        return LocalWorkers(options, work, (checked,))

    last = Follower(meeting.leader, workers_of).follow()
    if "status" in last:
        raise SystemExit(last["status"])
    if "error" in last:
        raise getattr(errors, last["error"], RunError)(last["text"])
    summary: dict[str, Any] = last["summary"]
    return summary


def _resumed(checked: Checked, order: Mapping[str, Any]) -> Checked:
    """Return a run that has passed its checks here, from the checkpoint that the leading host says."""
    resume_from = Path(order["resume_from"]) if order["resume_from"] else None
    return dataclasses.replace(
        checked, resume_from=resume_from, first_weights=None if resume_from else checked.first_weights
    )
