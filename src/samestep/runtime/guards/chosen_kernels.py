"""The kernels that a job chooses: of attention by `run.attention`, and deterministic ones by `numerics.deterministic`.

`run.attention` sets torch's own switches (`torch.nn.attention.sdpa_kernel`) within a step, so `scaled_dot_product_attention` runs
that kernel or fails; what torch has no switch for, such as dropout and capped scores, goes on by the formula. Kernels of GPUs but
`math` compute no float64, so a proof in float64 on one leaves the choice to torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from samestep.errors import JobError, line_of
from samestep.job import Job
from samestep.runtime.guards import deterministic

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_ON_CPUS = ("flash", "math")
_NO_KERNEL = re.compile(r"No (viable backend for scaled_dot_product_attention|available kernel)")


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
        deterministic.reserve_workspace()
        contexts.append(functools.partial(deterministic.kernels, device))
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
