"""Starting a function or a script on the ranks of this machine, and writing the script with which an engine trains a job."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from samestep import calls, wings
from samestep.errors import InputError
from samestep.job import Job
from samestep.layout import Layout, layout_from
from samestep.runtime.processes import join, workers
from samestep.runtime.processes.join import RankInfo

T = TypeVar("T")


@calls.checked
def launch(
    main: Callable[..., T],
    args: tuple[Any, ...] = (),
    *,
    ranks: int | None = None,
    layout: str | Layout | None = None,
    device: str = "auto",
    threads: int = 1,
    timeout_s: float = 600.0,
) -> T:
    """Run `main(place, *args)` on every rank of this machine, as `torchrun` runs a script.

    The function runs in workers of this machine. If a launcher has already started a process for each rank, it runs here, and the
    launcher decides on the number of ranks. So the same script runs by itself on a laptop and under a launcher on many machines.

    Collective over the world under a launcher, until `timeout_s`: see [Note: collective calls] in runtime/processes/mesh.py.

    Args:
        main: a function of a `place` and of `args`.
        args: further arguments of the function.
        ranks: the number of ranks; by default the ranks of the layout.
        layout: the layout that `samestep.parallelize` uses in the function if it is given none.
        device: cpu, cuda or auto.
        threads: CPU threads of one rank.
        timeout_s: seconds that the start may take, and later any collective.

    Returns:
        The value that rank 0 returned; under a launcher the value of this rank, or of the first rank of this host.

    If SIGINT, SIGTERM or SIGHUP has ended the loops of the workers, this process ends with status 130, 143 or 129 when its script ends,
    as after a signal without a handler. Under torchrun it ends with 0, because torchrun would start it again at once.

    Raises:
        SamestepError: a worker raised it; class and text are the same.
        WorkerError: a worker died or failed otherwise; the text names it and ends with the last lines of its stderr.
        InputError: the arguments do not fit each other or this machine.
    """
    where = None if layout is None else layout_from(layout)
    if where is None and ranks is None:
        text = "launch needs the number of ranks. Use ranks=2, or layout='dp=2' (--ranks 2, or --layout dp=2)"
        raise InputError("command-options", text)
    if where is not None and ranks not in (None, where.world_size):
        raise InputError(
            "command-options", f"layout {str(where)!r} has {where.world_size} ranks, and ranks={ranks}. Use one of them"
        )
    count = ranks if where is None else where.world_size
    work = (main, args, "" if where is None else str(where))
    return workers.launch(_in_layout, work, ranks=cast(int, count), device=device, threads=threads, timeout_s=timeout_s)


def _in_layout(place: RankInfo, main: Callable[..., T], args: tuple[Any, ...], layout: str) -> T:
    """Call a function on a rank; `parallelize` then takes the layout by default."""
    with join.default_layout(layout):
        return main(place, *args)


def launch_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    *,
    ranks: int | None = None,
    layout: str | Layout | None = None,
    device: str = "auto",
) -> None:
    """Run a Python script on every rank of this machine, as `python SCRIPT ARGUMENTS` runs it in one process.

    Raises:
        SamestepError: as by `launch`.
    """
    if not Path(path).is_file():
        raise InputError("command-options", f"there is no script {path}. Use the path of a Python script")
    if Path(path).suffix == ".toml":
        raise InputError("command-options", f"{path} is a job, and no Python script. Use samestep train {path}")
    launch(_run_script, (str(path), tuple(arguments)), ranks=ranks, layout=layout, device=device)


def _run_script(_: RankInfo, path: str, arguments: tuple[str, ...]) -> None:
    """Run a script in this process, with its folder first on the path, as Python does."""
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise InputError("script-failed", f"{path} ended with status {end.code}") from None


def write_submission(
    job: Job | str | Path,
    on: str,
    *,
    nodes: int | str | None = None,
    ranks_per_node: int | None = None,
    layout: str | None = None,
    out: str | Path | None = None,
    cluster: str | Path | None = None,
    path: str | Path | None = None,
    submit: bool = False,
) -> str:
    """Return the script that trains a job on several machines with a scheduler or launcher.

    Args:
        job: a job, or the path of a job file.
        on: slurm, ray, kubernetes, mpi, ssh or torchrun.
        nodes: the number of nodes, or their names as in "h1,h2"; by default 1.
        ranks_per_node: the ranks on each node; by default the ranks of the layout, divided equally.
        layout: the layout; by default the job's own.
        out: the run folder.
        cluster: a TOML file with the settings of the cluster (`wings/cluster/engines/launch_request.py`).
        path: the file to write the script to.
        submit: hand the script to the scheduler.

    Raises:
        InputError: the job, the scheduler or the settings do not fit each other.
        RunError: the command of the scheduler failed.
    """
    if not isinstance(job, Job | str | os.PathLike):
        text = f"job is a {type(job).__name__}. Use a samestep.Job, or the path of a job file"
        raise InputError("argument-type", text)
    scripts = wings.required("cluster", "engines.scripts")
    settings: dict[str, Any] = {"nodes": nodes, "ranks_per_node": ranks_per_node, "layout": layout, "out": out}
    return cast(str, scripts.write_script(job, on, path, submit, cluster=cluster, **settings)[0])
