"""Kernels that give the same bits each time they run, for `numerics.deterministic`.

Some kernels of GPUs add in the order in which threads arrive, so that one step, run twice, differs in its last bits. torch
has a slower one without that for most of them, and raises an error for the rest. It is switched on within a step and off
after it, since the switch is one of the whole process, in which a user's own code may want the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samestep.errors import JobError, line_of

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_HAS_NONE = re.compile(r"(?P<operation>\S+) does not have a deterministic implementation")


def reserve_workspace() -> None:
    """Give cuBLAS workspaces of fixed sizes, unless the user has; it reads the variable before its first product."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")


@contextmanager
def kernels(device: torch.device) -> Iterator[None]:
    """Return a context in which only deterministic kernels run.

    Raises:
        JobError: an operation has no deterministic kernel; it is named with the line of the user's code that calls it.
    """
    switches = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tries_kernels = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        match = _HAS_NONE.match(str(error))
        if match:
            raise JobError(
                "deterministic",
                f"numerics.deterministic = true: {match['operation']} has no deterministic kernel on {device.type}"
                f"{line_of(error)}. Use another operation, or numerics.deterministic = false",
            ) from error
        if _WORKSPACE in str(error):
            raise JobError(
                "deterministic",
                f"numerics.deterministic = true: matrix products ran before samestep could fix their workspaces. Use "
                f"{_WORKSPACE}=:4096:8 in the environment",
            ) from error
        raise
    finally:
        torch.use_deterministic_algorithms(switches[0], warn_only=switches[1])
        torch.backends.cudnn.benchmark = tries_kernels
