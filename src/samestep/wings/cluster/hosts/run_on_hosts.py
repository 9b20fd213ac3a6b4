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

_LOCK_PATIENCE_S = 120.0
"""Seconds within which a shared folder releases the lock of a host that is gone: on NFS it waits for 90 s."""
_AGAIN_S = 30.0
"""Seconds in which hosts connect again; they find out within 10 s of each other that the leading one is lost."""


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
            "hosts": [follower.peer for follower in self.meeting.followers],
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
    """Lead a run on several hosts, or follow the one that does; if that one is lost, go on with those that are left.

    Raises:
        WorkerError: the leading host is lost, and the run does not go on without it.
    """
    settings = identity(job, {**arguments, "prove": prove, "least_ranks": least_ranks})
    meeting = meet(rendezvous, settings, job.run.timeout_s)
    while True:
        with meeting:
            if meeting.leader is None:
                elastic = Elasticity(least_ranks, arguments["layout"] == AUTO, LedHosts(meeting))
                summary = lead_workers(job, arguments, None, prove, elastic, rendezvous.num_hosts)
                assert summary is not None
                meeting.dismiss(json.loads(summary.to_json()))
                return summary
            last = follow(meeting, job, arguments["init_from"], rank_part.work, allow_code=arguments["allow_code"])
        if not isinstance(last, Lost):
            return Summary.of(last)
        if least_ranks is None:
            raise WorkerError(
                "host-lost",
                f"{last.why}; --ranks MIN:MAX lets the others continue, and --auto-resume continues with all of them later",
            )
        meeting = meet_again(last, rendezvous, settings)
        arguments, prove = {**arguments, "out": last.folder, "resume": False, "auto_resume": True}, False


@dataclass(frozen=True)
class Lost:
    """A run whose leading host is lost, as a follower knows it: enough to go on without that host."""

    why: str
    folder: Path | None
    """The run folder; None where no workers were started."""
    lock: str
    """The text of its lock, which the leading host held."""
    hosts: tuple[str, ...]
    """The addresses of all followers, in the order in which they lead."""
    is_told: bool
    """Whether this host sees who holds the lock of the folder."""


def follow(
    meeting: Meeting, job: Job, init_from: str | Path | None, work: Callable[..., Any], *, allow_code: bool = False
) -> dict[str, Any] | Lost:
    """Start workers of `work` as the leading host says, until the run is over, and return its summary.

    Where the leading host is lost, returns the `Lost` run.

    Raises:
        SamestepError: the run failed; class and text are those of the leading host.
        SystemExit: the run was killed.
    """
    assert meeting.leader is not None
    print(f"follows {meeting.leader.peer}, over {meeting.interface}", flush=True)

    known: dict[str, Checked] = {}
    lost = Lost("", None, "", (), is_told=False)

    def workers_of(order: Order) -> LocalWorkers:
        nonlocal lost
        layout, until, folder = order.layout, order.until, Path(order.folder)
        if run_folder.lock_of(folder) != order.lock:
            raise JobError(
                "host-lost",
                f"--out {folder} is not the leading host's folder. Use one that all hosts share",
            )
        lost = Lost("", folder, order.lock, order.hosts, run_folder.is_held(folder))
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
        return dataclasses.replace(lost, why=f"the leading host {meeting.leader.peer} is gone: {meeting.leader.lost}")
    if "status" in last:
        raise SystemExit(last["status"] if isinstance(last["status"], int) else 1)
    if "error" in last:
        raise errors.of_words(str(last["error"]), [str(last.get("code")), str(last.get("text"))])
    summary: dict[str, Any] = last["summary"]
    return summary


def meet_again(lost: Lost, at: Rendezvous, facts: Mapping[str, str]) -> Meeting:
    """Connect the hosts that are left, at the first of them that is there, to go on without the one that led them.

    Only a run that has died is taken over: its lock is left in the folder. A run that is cut off still holds it, and
    one that has ended removes it.

    Raises:
        WorkerError: the run has not died, as far as this host can see, or no host came.
    """
    if lost.folder is None or not lost.is_told:
        told = "no workers were started yet" if lost.folder is None else f"{lost.folder} does not show who else uses it"
        raise WorkerError("host-lost", f"{lost.why}; {told}, so --auto-resume continues when it is there again")
    print(f"{lost.why}; waiting until its run has left {lost.folder}", flush=True)
    if not run_folder.is_left_behind(lost.folder, lost.lock, _LOCK_PATIENCE_S):
        raise WorkerError("host-lost", f"{lost.why}; its run continues or has ended without this host")
    for number, host in enumerate(lost.hosts):
        here = dataclasses.replace(at, host=host, num_hosts=len(lost.hosts) - number)
        try:
            return meet(here, facts, _AGAIN_S, least_hosts=1)
        except WorkerError as error:
            print(error, flush=True)
    raise WorkerError("host-lost", f"{lost.why}; none of {', '.join(lost.hosts)} leads the run instead")


def _apply_order(checked: Checked, order: Order) -> Checked:
    """Return a run that has passed its checks here, from the checkpoint that the leading host names."""
    resume_from = Path(order.resume_from) if order.resume_from else None
    return dataclasses.replace(
        checked, resume_from=resume_from, first_weights=None if resume_from else checked.first_weights
    )
