"""The verb `train`, and `launch`: workers are started for a job, or for a function; a job takes its steps, and writes metrics and checkpoints.

```
train ── check: every mistake that can be found ── run_workers ──► work on every rank
         the model is built and traced once                           (`rank_part.py`)
```
The model is built and traced before the workers are forked, so that importing torch, the build and the trace happen once
instead of once a rank; so it is on each of several hosts (`wings/cluster/hosts/run_on_hosts.py`). Under torchrun or srun this process is a
worker already, and calls `work` itself. An engine, such as Slurm, is handed a script instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from samestep import calls, wings
from samestep.building.pretrained_form import unread_tokenizer
from samestep.errors import JobError, LayoutError, RunError, WorkerError
from samestep.job import Job
from samestep.layout import Layout
from samestep.output.durable_files import LastingStream
from samestep.proof import record
from samestep.proof.record import ProofRecord
from samestep.proof.verify import verify
from samestep.runtime.assembly import store_of
from samestep.runtime.processes import hang_watch, join, local_workers, worker, workers
from samestep.runtime.processes.host_share import share_of
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.launch_info import ALONE, LaunchInfo
from samestep.training import foreign_code, out_of_memory, rank_part, run_folder
from samestep.training.check import AUTO, Checked, check, decide_on_rank_0, resolve_layout
from samestep.training.elastic import Elasticity, RunHosts, fitted_layout, restarting
from samestep.training.rank_part import OnStep
from samestep.training.run_folder import Summary

T = TypeVar("T")


@calls.checked
def train(
    job: Job,
    *,
    layout: Layout | str | None = None,
    ranks: int | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    init_from: str | Path | None = None,
    auto_resume: bool = False,
    prove: bool = False,
    rendezvous: Any = None,
    least_ranks: int | None = None,
    allow_code: bool = False,
    name: str = "",
    on_step: OnStep | None = None,
) -> Summary | None:
    """Train `job` in a layout, on workers of this machine and of other hosts, or as one rank of torchrun or srun.

    Args:
        job: the computation.
        layout: by default the job's own layout, or else replicas over all ranks. `auto` takes the
            layout that is predicted to be the fastest on this machine.
        ranks: the number of worker processes; by default the number of ranks of the layout.
        steps: end after this step; the learning-rate schedule keeps the job's own number of steps.
        out: the run folder; by default a new one below `runs`.
        resume: resume from the newest checkpoint in `out`, or without `out` in the newest run below `runs`.
        init_from: start a new run from the weights of a run folder, a checkpoint (also of torch.distributed.checkpoint), or a
            folder of transformers.
        auto_resume: resume from the newest whole checkpoint in `out` if there is one, or else start there; a run that has
            taken its last step is left as it is.
        prove: first prove, as `verify` does, that the layout gives the result of one device; train nothing if it does not.
        rendezvous: the address for several hosts; each of them calls `train` with the same arguments.
        least_ranks: if ranks are lost permanently, a restart (`run.restarts`) continues with at least this many; by default it
            needs all. The global batch and its samples stay; only data degrees shrink, or `layout="auto"` plans again.
        allow_code: run functions that the checkpoint of `init_from` names, and neither this job nor a run before has named.
        name: the first line that the run prints, such as the path of the job's file.
        on_step: under a launcher of ranks, called on every rank after each step, with its report and whether it is the last.

    Returns:
        The result of the run; None on ranks of torchrun or srun other than 0.

    Raises:
        InputError: the job, layout or data cannot run; nothing has been started or written.
        WorkerError: a worker process died, or under a launcher another rank; the first line of the text says which, and why.
    """
    arguments = {"layout": layout, "ranks": ranks, "steps": steps, "out": out, "resume": resume, "init_from": init_from}
    arguments |= {"auto_resume": auto_resume, "allow_code": allow_code, "name": name}
    streams = redirect_stdout(LastingStream(sys.stdout)), redirect_stderr(LastingStream(sys.stderr))
    with worker.lost_peers(), streams[0], streams[1]:
        return _start(job, arguments, prove, least_ranks, rendezvous, on_step)


def _start(
    job: Job,
    arguments: Mapping[str, Any],
    prove: bool,
    least_ranks: int | None,
    rendezvous: Any,
    on_step: OnStep | None,
) -> Summary | None:
    """Train as one rank of a launcher, as one host of a launcher, with other hosts, or with workers of this host.

    Raises:
        JobError: the flags do not go together, or with the launcher.
    """
    place, info = None, _launched_by(rendezvous)
    if least_ranks is not None and not job.run.restarts and not info.is_engine:
        raise JobError(
            "command-options",
            f"--ranks {least_ranks}:{arguments['ranks']} lets a restart continue with fewer ranks, and run.restarts = 0. Use "
            f"--set run.restarts=3",
        )
    if (info.is_engine or info.num_hosts > 1) and (prove or rendezvous):
        flag = "--prove" if prove else "--rendezvous"
        more = "; prove it with samestep verify: a run finds its proof" if prove else ""
        raise JobError(
            "command-options",
            f"{flag} starts workers of its own, and the launcher has started this one: leave it out{more}",
        )
    if info.num_hosts > 1:
        return _run_share(job, arguments, info, _rank_of_host)
    if info.is_engine:
        run = job.run
        given_to_join: dict[str, Any] = {"timeout_s": run.timeout_s, "ranks_per_node": run.ranks_per_node}
        place = join.join(run.device, **given_to_join, threads=run.threads, may_renew=True)
        if least_ranks is not None:  # the launcher starts again with those that are left
            arguments = {**arguments, "layout": _fitted(job, arguments["layout"], place.world_size, least_ranks)}
    if rendezvous is None:
        workers.say_inside(info)
        elastic = Elasticity(least_ranks, arguments["layout"] == AUTO)
        return lead_workers(job, arguments, place, prove, elastic, on_step=on_step)
    on_hosts = wings.required("cluster", "hosts.run_on_hosts")
    return cast(Summary, on_hosts.train_on_hosts(job, arguments, prove, least_ranks, rendezvous))


def _fitted(job: Job, layout: Layout | str | None, world: int, least: int) -> Layout | str | None:
    """Return the layout for so many ranks of a launcher as it has started, at least so many.

    Raises:
        LayoutError: there are fewer, or the layout cannot be that of so many.
    """
    if world < least:
        raise LayoutError(
            "devices-and-ranks",
            f"the launcher has started {world} ranks, and --ranks {least}:N continues with {least} at least",
        )
    return fitted_layout(layout or job.layout or None, world)


def _rank_of_host(place: RankInfo, job: Job, arguments: Mapping[str, Any]) -> tuple[Summary | None, int]:
    """Do one rank's part as under a launcher of ranks; return its result, and the signal that stopped the run."""
    return lead_workers(job, arguments, place, False, Elasticity(None, plans_anew=False)), join.ended_by()


def lead_workers(
    job: Job,
    arguments: Mapping[str, Any],
    place: RankInfo | None,
    prove: bool,
    elastic: Elasticity,
    num_hosts: int = 1,
    on_step: OnStep | None = None,
) -> Summary | None:
    """Check a run and carry it out: on workers of this host and of those that it leads, or as one rank of a launcher."""
    hosts = elastic.hosts
    checked = check(job, **arguments, place=place, num_hosts=num_hosts)
    if arguments["auto_resume"] and checked.is_finished:
        print(f"{checked.folder} is finished: step {checked.until} was its last", flush=True)
        return Summary(checked.folder, checked.until, None, None, None, stopped=False)
    is_first = place is None or place.rank == 0
    if is_first:
        foreign_code.note(job)
        if checked.why:
            print(checked.why, flush=True)
        _warn(checked, place, hosts)
    proof = _proven(checked) if prove else None
    with contextlib.ExitStack() as stack:
        is_new = not (arguments["resume"] or arguments["auto_resume"])
        decide_on_rank_0(lambda: _claim(checked, stack, is_new=is_new) if is_first else None, place)
        if proof is not None:
            record.keep(proof, checked.folder)
        if place is None:
            return _by_workers(checked, elastic)
        start = decide_on_rank_0(lambda: secrets.token_hex(8), place)
        try:
            with hang_watch.watching(place, job.run.hang_s, start):
                summary = rank_part.work(place, checked, on_step)
                stack.close()
                if join.ended_by():  # a launcher kills the others once one rank ends with the status of a signal
                    decide_on_rank_0(lambda: None, place)
                return _note_stop_signal(summary, join.ended_by())
        finally:
            join.leave()


def _claim(checked: Checked, stack: contextlib.ExitStack, *, is_new: bool) -> None:
    """Keep other runs out of the run folder until the stack is left, and set damaged checkpoints aside."""
    stack.enter_context(run_folder.claim_folder(checked.folder, is_new=is_new))
    for _, wrong in checked.passed_over:
        print(f"{wrong}; it is set aside", flush=True)
    run_folder.set_aside(path for path, _ in checked.passed_over)


def _by_workers(checked: Checked, elastic: Elasticity) -> Summary | None:
    """Run the workers of this host and of those that it leads, again where one fails and `run.restarts` says so, and return the result."""
    run = checked.workload.job.run
    store_of(checked.layout)

    def work(checked: Checked) -> Summary | None:
        return workers.run_workers(
            rank_part.work,
            (checked,),
            ranks=checked.layout.world_size,
            device=run.device,
            threads=run.threads,
            timeout_s=run.timeout_s,
            hang_s=run.hang_s,
            ranks_per_node=run.ranks_per_node,
            away=elastic.hosts.away(checked) if elastic.hosts else None,
        )

    try:
        summary = restarting(work, checked, elastic)
        return _note_stop_signal(summary, workers.last_stop_signal() or signal.SIGTERM)
    except WorkerError as error:
        first, device = str(error).partition("\n")[0], join.resolve_device(run.device)
        is_shortage = local_workers.OUT_OF_MEMORY in first
        # A worker killed by the kernel leaves no report of its own: only the prediction can be shown.
        if is_shortage or ("killed by SIGKILL" in first and out_of_memory.is_too_large(checked, device)):
            raise WorkerError(error.code, f"{error}\n{out_of_memory.less_memory(checked, device)}") from None
        raise WorkerError(error.code, run_folder.with_way_on(str(error), checked.folder)) from None


def _note_stop_signal(summary: Summary | None, number: int) -> Summary | None:
    """Return the result of a run with the signal that stopped it, if it was stopped."""
    return dataclasses.replace(summary, stop_signal=int(number)) if summary and summary.stopped else summary


def _proven(checked: Checked) -> ProofRecord:
    """Prove the run's layout before it is trained, and return the record.

    Raises:
        RunError: the layout differs from one device.
    """
    job = checked.workload.job
    verdict = verify(job, layout=checked.layout)
    if not verdict.proven:
        raise RunError(
            "nothing-to-prove", f"--prove: the layout differs from one device, nothing is trained:\n{verdict.to_text()}"
        )
    print(verdict.to_text(), flush=True)
    return record.record_of(job, verdict)


def _warn(checked: Checked, place: RankInfo | None, hosts: RunHosts | None) -> None:
    """Warn about settings that have no effect on this machine, or a bad one."""
    job = checked.workload.job
    run = job.run
    if folder := unread_tokenizer(job):
        warnings.warn(
            f"text becomes bytes, not tokens of the model: data.tokenizer = {str(folder)!r} reads its own", stacklevel=3
        )
    on_cpu = place.device.type == "cpu" if place else run.device == "cpu" or not torch.cuda.device_count()
    moved = {"offload": "the optimizer's state"} if checked.layout.offload else {}
    if checked.layout.recompute == "offload":
        moved["recompute=offload"] = "the inputs of blocks"
    for word, what in moved.items() if on_cpu else ():
        moves = f"{word} moves {what} to CPU memory; on a CPU it is there already, so nothing is saved"
        warnings.warn(moves, stacklevel=3)
    here = checked.layout.world_size // (hosts.num_hosts if hosts else 1)
    if place is None and on_cpu and (text := workers.oversubscription_warning(here, run.threads)):
        warnings.warn(text, stacklevel=3)


def _launched_by(rendezvous: object | None) -> LaunchInfo:
    """Return the position that another launcher gives to this process; hosts with a rendezvous may have any variables of hosts.

    Raises:
        JobError: the launcher's variables are incomplete, or contradict each other.
    """
    if join.launched_layout() is not None:
        raise JobError(
            "command-options",
            "train starts the ranks of its layout itself. Run this script with `python`, not with `samestep launch`.",
        )
    try:
        info = join.launched_by()
    except JobError:
        if rendezvous is None:
            raise
        return LaunchInfo(ALONE)
    return info if rendezvous is None or info.is_engine else LaunchInfo(ALONE)


def _run_share(
    job: Job, arguments: Mapping[str, Any], info: LaunchInfo, work: Callable[..., tuple[T | None, int]]
) -> T | None:
    """Run this host's ranks of `work`, where another launcher has started one process on each host; return rank 0's result.

    Raises:
        SamestepError: a rank raised it; class and text are the same.
    """
    run, ranks = job.run, arguments["ranks"] or job.run.ranks
    if arguments["layout"] != AUTO and (arguments["layout"] or job.layout):
        ranks = resolve_layout(job, arguments["layout"], ranks, info.num_hosts).world_size
    ranks = ranks or (info.ranks_per_node or workers.default_ranks(run.device)) * info.num_hosts
    result, number = workers.run_workers(
        work,
        (job, {**arguments, "ranks": None}),
        ranks=ranks,
        device=run.device,
        threads=run.threads,
        timeout_s=run.timeout_s,
        away=share_of(info, ranks, run.timeout_s),
    )
    if number:
        join.note_stop()
    return result
