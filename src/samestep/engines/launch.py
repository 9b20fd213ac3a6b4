"""Starting a function or a job on ranks: of this machine, of the launcher around it, or of an engine that is handed a script."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

from samestep import calls
from samestep.engines import scripts
from samestep.engines.site import read_site
from samestep.engines.wanted import wanted_of
from samestep.errors import InputError
from samestep.job import Job
from samestep.job_files import load
from samestep.output.output_file import write
from samestep.runtime.processes import workers
from samestep.training.summary import Summary
from samestep.training.train import train

T = TypeVar("T")


@overload
def launch(
    main: Callable[..., T],
    args: tuple[Any, ...] = ...,
    *,
    ranks: int,
    device: str = ...,
    threads: int = ...,
    timeout_s: float = ...,
) -> T: ...


@overload
def launch(
    main: Job | str | Path,
    *,
    ranks: int | None = ...,
    layout: str | None = ...,
    out: str | Path | None = ...,
) -> Summary | None: ...


@overload
def launch(
    main: Job | str | Path,
    *,
    on: str,
    nodes: int | str = ...,
    ranks_per_node: int | None = ...,
    layout: str | None = ...,
    out: str | Path | None = ...,
    site: str | Path | None = ...,
    emit: str | Path | None = ...,
    submit: bool = ...,
) -> str: ...


@calls.checked
def launch(
    main: Any,
    args: tuple[Any, ...] = (),
    *,
    ranks: int | None = None,
    device: str = "auto",
    threads: int = 1,
    timeout_s: float = 600.0,
    on: str | None = None,
    nodes: int | str = 1,
    ranks_per_node: int | None = None,
    layout: str | None = None,
    out: str | Path | None = None,
    site: str | Path | None = None,
    emit: str | Path | None = None,
    submit: bool = False,
) -> Any:
    """Run `main(place, *args)` on every rank, or train a job, or write the script with which an engine trains it.

    A function runs in workers of this machine, or here where a launcher has started a process for each rank; so one script runs by
    itself on a laptop and under a launcher on many machines, where the launcher decides on `ranks`. A launcher of one process for
    each host leaves them to us. A job is trained in the same way, as by `train`. With `on`, a job is not trained here: the
    script for that engine is returned, written to `emit`, and handed over only with `submit`.

    Collective over the world under a launcher, until `timeout_s`: see [Note: collective calls] in runtime/processes/mesh.py.

    Args:
        main: a function, a job, or the path of a job file.
        args: further arguments of a function.
        ranks: the number of ranks; of a job by default that of its layout.
        device: cpu, cuda or auto, for a function; a job says it itself.
        threads: CPU threads of one rank of a function.
        timeout_s: seconds that the start of a function may take, and later any collective.
        on: slurm, ray, kubernetes, mpi, ssh or torchrun.
        nodes: the number of nodes, or their names as in "h1,h2".
        ranks_per_node: the ranks on each node; by default the layout's, shared equally.
        layout: the layout of a job; by default its own.
        out: the run folder of a job.
        site: a TOML file with the settings of the site (`engines/site.py`).
        emit: the file to write the script to.
        submit: hand the script over to the engine.

    Returns:
        What rank 0 returned (under a launcher: what this rank, or the first of this host, returned); the result of a job's run; or
        the script.

    Where SIGINT or SIGTERM has ended the loops of the workers, this process ends with status 130 or 143 once its script is
    through, as after a signal that nobody has handled; under torchrun, which would start it again at once, with 0.

    Raises:
        SamestepError: a worker raised it; class and text are the same.
        WorkerError: a worker died or failed otherwise; the text names it and ends with the last lines of its stderr.
        InputError: the arguments do not fit each other or this machine.
    """
    if not isinstance(main, Job | str | os.PathLike):
        given: dict[str, Any] = {"device": device, "threads": threads, "timeout_s": timeout_s}
        return workers.launch(main, args, ranks=_ranks_of_function(on, ranks), **given)
    if on is None:
        return train(main if isinstance(main, Job) else load(Path(main)), layout=layout, ranks=ranks, out=out)
    given = {"nodes": nodes, "ranks_per_node": ranks_per_node, "layout": layout, "out": out}
    return _write_script(main, on, emit, submit, given | {"site": read_site(site)})


def _ranks_of_function(on: str | None, ranks: int | None) -> int:
    """Return the number of ranks that run a function, which no engine does."""
    if on is not None:
        raise InputError(f"on={on!r} takes a job or the path of one, and main is a function: without on it runs here")
    if ranks is None:
        raise InputError("launch needs the number of ranks of a function: ranks=2 works")
    return ranks


def _write_script(
    main: Job | str | os.PathLike[str], on: str, emit: str | Path | None, submit: bool, given: dict[str, Any]
) -> str:
    """Write the script with which an engine trains a job, hand it over with `submit`, and return it."""
    path = _as_file(main, emit, submit) if isinstance(main, Job) else Path(main)
    wanted = wanted_of(path, **given)
    text, file = scripts.emit(wanted, on, emit or (f"{wanted.name}{scripts.engine_of(on).suffix}" if submit else None))
    if submit:
        scripts.submit(on, file)
    return text


def _as_file(job: Job, emit: str | Path | None, submit: bool) -> Path:
    """Write a job into the folder of the script that runs it, and return its path.

    Raises:
        InputError: no script is kept, so that the job has no place.
    """
    if emit is None and not submit:
        raise InputError(
            'a job in memory is written beside its script: emit="run.sbatch" works, or the path of a job file'
        )
    path = Path(emit or "job").with_suffix(".toml")
    write(path, job.to_toml(with_folder=True))
    return path
