"""A run on several hosts: the host of the rendezvous address leads it, and the others follow its orders.

```
host 1: samestep train ─ meet ─ check ─ claim the folder ─ run_workers ──► ranks 0, 1 and, through its followers, 2, 3
host 2: samestep train ─ meet ─ follow ─ check the same ─ LocalWorkers ──► ranks 2, 3
```
All hosts give the same arguments, and see the same run folder. Each checks, builds and traces the model by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from samestep import errors
from samestep.errors import JobError, WorkerError
from samestep.job import Job
from samestep.runtime.processes import workers
from samestep.runtime.processes.join import resolve_device
from samestep.runtime.processes.local_workers import LocalWorkers
from samestep.runtime.processes.worker import LaunchOptions
from samestep.training import rank_part, run_folder
from samestep.training.check import AUTO, Checked, check, shares
from samestep.training.elastic import Elasticity
from samestep.training.run_folder import Summary
from samestep.training.train import lead_workers
from samestep.wings.cluster.hosts.distant_workers import Away, Follower, Order
from samestep.wings.cluster.hosts.meeting import Meeting, Rendezvous, meet


def identity(job: Job, flags: Mapping[str, object]) -> dict[str, str]:
    """Return the settings that must be equal on all hosts of a run, by name."""
    versions = {name: metadata.version(name) for name in ("samestep", "torch")}
    digest = hashlib.sha256(job.to_toml().encode()).hexdigest()[:16]
    texts = {f"--{name.replace('_', '-')}": str(value) for name, value in flags.items()}
    return {**versions, "python": platform.python_version(), "a job of digest": digest, **texts}


@dataclass(frozen=True)
class LedHosts:
    """The hosts that this one leads, as a run sees them that may go on without some of them (`training/elastic.py`)."""

    meeting: Meeting

    @property
    def num_hosts(self) -> int:
        """The number of hosts, this one included."""
        return self.meeting.num_hosts

    def drop_lost(self) -> Sequence[object]:
        """Leave out the hosts whose connection is lost, and return them."""
        return self.meeting.drop_lost()

    def away(self, checked: Checked) -> Away:
        """Return the part that the other hosts take in one start of a run's workers."""
        order = {
            "layout": str(checked.layout),
            "folder": str(checked.folder.absolute()),
            "until": checked.until,
            "resume_from": str(checked.resume_from.absolute()) if checked.resume_from else "",
            "lock": run_folder.lock_of(checked.folder),
        }
        return Away(self.meeting, shares(checked.layout.world_size, self.meeting.num_hosts), order)


def train_on_hosts(
    job: Job, arguments: Mapping[str, Any], prove: bool, least_ranks: int | None, rendezvous: Rendezvous
) -> Summary:
    """Lead a run on several hosts, or follow the one that does.

    Raises:
        WorkerError: the leading host is lost.
    """
    settings = identity(job, {**arguments, "prove": prove, "least_ranks": least_ranks})
    with meet(rendezvous, settings, job.run.timeout_s) as meeting:
        if meeting.leader is not None:
            words = {"allow_code": arguments["allow_code"]}
            return Summary.of(follow(meeting, job, arguments["init_from"], rank_part.work, **words))
        elastic = Elasticity(least_ranks, arguments["layout"] == AUTO, LedHosts(meeting))
        summary = lead_workers(job, arguments, None, prove, elastic, rendezvous.num_hosts)
        assert summary is not None
        meeting.dismiss(json.loads(summary.to_json()))
        return summary


def follow(
    meeting: Meeting, job: Job, init_from: str | Path | None, work: Callable[..., Any], *, allow_code: bool = False
) -> dict[str, Any]:
    """Start workers of `work` as the leading host says, until the run is over, and return its summary.

    Raises:
        SamestepError: the run failed; class and text are those of the leading host.
        WorkerError: the leading host is lost.
        SystemExit: the run was killed.
    """
    assert meeting.leader is not None
    print(f"follows {meeting.leader.peer}, over {meeting.interface}", flush=True)

    known: dict[str, Checked] = {}

    def workers_of(order: Order) -> LocalWorkers:
        layout, until, folder = order.layout, order.until, Path(order.folder)
        if run_folder.lock_of(folder) != order.lock:
            raise JobError(
                "host-lost", f"--out {folder} is not the leading host's folder. Use one that all hosts share"
            )
        if layout not in known:
            size: dict[str, Any] = {"ranks": order.ranks, "num_hosts": order.ranks // order.local_ranks}
            keywords: dict[str, Any] = {"layout": layout, "steps": until, "out": folder, "init_from": init_from}
            keywords["allow_code"] = allow_code
            known[layout] = check(job, **keywords, **size, auto_resume=True)
        checked = _apply_order(known[layout], order)
        device = resolve_device(job.run.device)
        workers.check_gpus(device, order.local_ranks)
        options = LaunchOptions(
            ranks=order.ranks,
            first_rank=order.first_rank,
            local_ranks=order.local_ranks,
            ranks_per_node=order.ranks_per_node,
            device_type=device,
            threads=job.run.threads,
            timeout_s=job.run.timeout_s,
            hang_s=job.run.hang_s,
            quiet=True,
            isolated=False,
            interface=meeting.interface,
            store=order.store,
        )
        return LocalWorkers(options, work, (checked,))

    last = Follower(meeting.leader, workers_of).follow()
    if last is None:
        raise WorkerError(
            "host-lost",
            f"the leading host {meeting.leader.peer} is gone: {meeting.leader.lost}. Use --auto-resume to continue the run",
        )
    if "status" in last:
        raise SystemExit(last["status"] if isinstance(last["status"], int) else 1)
    if "error" in last:
        raise errors.of_words(str(last["error"]), [str(last.get("code")), str(last.get("text"))])
    summary: dict[str, Any] = last["summary"]
    return summary


def _apply_order(checked: Checked, order: Order) -> Checked:
    """Return a run that has passed its checks here, from the checkpoint that the leading host names."""
    resume_from = Path(order.resume_from) if order.resume_from else None
    return dataclasses.replace(
        checked, resume_from=resume_from, first_weights=None if resume_from else checked.first_weights
    )
