"""How the workers of a run start: as forks of this process, or as new processes that import what they run.

Forking after torch is imported takes 0.03 s where a new process takes seconds. It is safe only without CUDA, without
an OpenMP pool in use by both sides, and without autograd's device threads; otherwise workers are spawned. Functions of a notebook's
cell or of an interactive session cannot be imported by a new process: their workers are forked even where new processes
are preferred, and refused where a fork could not run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import JobError
from samestep.runtime.processes.join import CUDA_HAS_STARTED


def start_method(device_type: str, threads: int, work: Any) -> str:
    """Return fork where it is safe or where `work` cannot be sent to a new process, else spawn.

    Raises:
        JobError: `work` cannot be sent, and a fork could not run it.
    """
    if _prefers_fork(device_type, threads):
        return "fork"
    if not _is_bound_here(work):
        return "spawn"
    _check_fork(threads)
    return "fork"


def _prefers_fork(device_type: str, threads: int) -> bool:
    if sys.platform != "linux" or device_type == "cuda" or torch.cuda.is_initialized() or dist.is_initialized():
        return False
    # A forked worker whose parent has used an OpenMP pool hangs in its own first parallel region; with one thread it
    # has no such region. There is no way to ask whether the parent has used one.
    return threads == 1 and not _autograd_has_threads()


def _is_bound_here(work: Any) -> bool:
    """Return whether a new process could not import what `work` names: a main module without a file has it."""
    if getattr(sys.modules["__main__"], "__file__", None) is not None:
        return False
    try:
        sent = ForkingPickler.dumps(work)
    except Exception:  # whatever the reduction of a user's object raises
        return True
    return b"__main__" in bytes(sent)


def _check_fork(threads: int) -> None:
    """Refuse to fork where the workers could not run.

    Raises:
        JobError: they could not.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise JobError(
            "main is a function of a notebook's cell, and workers cannot be forked on this system: main in a module of its own works"
        )
    if torch.cuda.is_initialized() or _autograd_has_threads():
        raise JobError(CUDA_HAS_STARTED)
    if threads > 1:
        raise JobError(
            f"threads={threads}: forked workers have one thread, and main is a function of a notebook's cell: threads=1 works, "
            "and so does main in a module of its own"
        )


def _autograd_has_threads() -> bool:
    """Return whether a backward pass ran here on a machine with GPUs: autograd then refuses to run in a fork."""
    for task in Path("/proc/self/task").iterdir() if Path("/proc/self/task").exists() else ():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().startswith("pt_autograd"):
                return True
    return False
