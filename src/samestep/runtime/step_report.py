"""The report of one step, and the measurement of peak memory."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one step: equal on every rank except for seconds and bytes."""

    step: int
    """Steps taken so far, this one included."""
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Tokens or samples that the loss counted."""
    step_s: float
    tokens_per_s: float
    data_wait_s: float = 0.0
    """Seconds of the step in which this rank waited for samples."""
    memory_bytes: int
    """Peak bytes on this rank: allocated on its GPU, or the process's resident memory on a CPU."""
    skipped: bool = False
    stop: bool = False
    """Whether some rank was asked to stop."""
    note: str = ""
    """Why the step is not finite, or what a repetition of it showed that `run.allow` waives; mostly empty."""
    remarks: tuple[str, ...] = ()
    """What this rank noticed in this step and did not refuse: refusals that `run.allow` waives, a loss that couples samples."""


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes allocated on a GPU, or on a CPU the peak resident bytes of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
