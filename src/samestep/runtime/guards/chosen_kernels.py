"""The kernels that a job chooses: of attention by `run.attention`, and deterministic ones by `numerics.deterministic`.

`run.attention` sets torch's own switches (`torch.nn.attention.sdpa_kernel`) within a step, so `scaled_dot_product_attention` runs
that kernel or fails; what torch has no switch for, such as dropout and capped scores, goes on by the formula. Kernels of GPUs but
`math` compute no float64, so a proof in float64 on one leaves the choice to torch.

Some kernels of GPUs add in the order in which threads arrive, so that one step, run twice, differs in its last bits. torch
has a slower one without that for most of them, and raises an error for the rest. It is switched on within a step and off
after it, since the switch is one of the whole process, in which a user's own code may want the other.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from samestep.errors import JobError, line_of
from samestep.job import Job

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_ON_CPUS = ("flash", "math")
_NO_KERNEL = re.compile(r"No (viable backend for scaled_dot_product_attention|available kernel)")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_HAS_NONE = re.compile(r"(?P<operation>\S+) does not have a deterministic implementation")


def of_job(job: Job, device: torch.device) -> Callable[[], AbstractContextManager[None]] | None:
    """Return what makes the context in which a step runs with the kernels of a job; None if it chooses none.

    Raises:
        JobError: the device has no such kernel of attention.
    """
    word, contexts = job.run.attention, list[Callable[[], AbstractContextManager[None]]]()
    if word != "auto" and device.type == "cpu" and word not in _ON_CPUS:
        raise JobError(
            "attention-kernel",
            f"run.attention = {word!r}: torch has no such kernel on CPUs. Use {', '.join(map(repr, _ON_CPUS))} and 'auto'",
        )
    if job.numerics.deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")  # unless the user has; cuBLAS reads it before its first product
        contexts.append(functools.partial(_deterministic, device))
    if word != "auto" and (word == "math" or device.type == "cpu" or job.numerics.precision != "float64"):
        contexts.append(functools.partial(_attention, word))
    if len(contexts) < 2:
        return contexts[0] if contexts else None
    return functools.partial(_within_all, contexts)


@contextmanager
def _within_all(contexts: list[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@contextmanager
def _attention(word: str) -> Iterator[None]:
    """Return a context in which attention runs by one kernel.

    Raises:
        JobError: the kernel does not compute an attention of the model; it is named with the line of the user's code.
    """
    try:
        with sdpa_kernel(_BACKENDS[word]):
            yield
    except RuntimeError as error:
        if not _NO_KERNEL.match(str(error)):
            raise
        raise JobError(
            "attention-kernel",
            f"run.attention = {word!r}: this kernel does not compute the attention{line_of(error)} (its mask, dtype or width of heads). Set "
            "run.attention = 'auto'",
        ) from error


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
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
