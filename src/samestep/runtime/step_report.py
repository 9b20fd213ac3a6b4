"""The report of one step, and the measurement of its peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from samestep.output import process_limits


class _Late:
    """The function that completes a report, kept next to the report's fields."""

    __slots__ = ("_complete",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(_Late):
    """The result of one step: equal on every rank except for seconds and bytes.

    On a GPU the report may be returned before the device has done the step. Code that reads one of its numbers then waits for
    them, and gets the error that the step raises; a rank that reads none gets it before its next step.
    """

    step: int
    """Steps taken so far, this one included."""
    loss: float
    """The loss of the whole step: its sum over the global batch divided by its count; with several terms the sum of their means."""
    grad_norm: float
    """The norm of the gradient of all weights, before clipping; nan in the report of a `run.backward`."""
    lr: float
    """The learning rate of the update, from the first parameter group of the optimizer."""
    tokens: int
    """Tokens or samples that the loss counted."""
    step_s: float
    """Seconds that the step took on this rank."""
    tokens_per_s: float
    """Throughput: tokens or samples that the loss counted, over all ranks, per second."""
    data_wait_s: float = 0.0
    """Seconds that this rank waited for samples in the step."""
    memory_bytes: int
    """Peak bytes on this rank since the step began: allocated on its GPU; on a CPU the process's resident memory so far."""
    reserved_bytes: int | None = None
    """Peak bytes that torch's allocator has taken from this rank's GPU since the step began; None on a CPU."""
    skipped: bool = False
    """Whether the update was skipped: a number was not finite, no label counted, or the loss was a spike."""
    spike: bool = False
    """Whether the update was skipped because the loss is a spike (`numerics.on_spike`)."""
    stop: bool = False
    """Whether a rank has received a signal to stop (Ctrl-C, SIGTERM)."""
    save: bool = False
    """Whether a rank has received SIGUSR1, the signal to save a checkpoint and continue."""
    note: str = ""
    """The reason if a number is not finite, the loss is a spike, or a skipped check (`run.allow`) has failed; otherwise empty."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """The mean of each named term of the loss: sum over count of the full step; nan if the count is 0."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The mean of each metric that the loss also returns, such as an accuracy."""
    held_out: Mapping[str, float] = field(default_factory=dict)
    """The validation loss of each set by name, if the loop evaluates after this step (`train.evaluate_every`)."""
    remarks: tuple[str, ...] = ()
    """Warnings of this rank for this step: checks that `run.allow` skips, a loss that couples samples."""

    @classmethod
    def late(cls, step: int, complete: Callable[[], None]) -> StepReport:
        """Return the report of a step whose numbers are not known; reading one calls `complete`, which fills them in."""
        made = object.__new__(cls)
        object.__setattr__(made, "step", step)
        object.__setattr__(made, "_complete", complete)
        return made

    def fill(self, complete: StepReport) -> None:
        """Complete a late report with the values of another one; no attribute is asked for by `_complete` any more."""
        for attribute in fields(self):
            object.__setattr__(self, attribute.name, getattr(complete, attribute.name))
        object.__delattr__(self, "_complete")

    def fail(self, error: BaseException) -> None:
        """Let a late report raise what its step has raised, whenever it is read."""

        def again() -> None:
            raise error

        object.__setattr__(self, "_complete", again)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Complete the report, where a field has no value yet."""
            if name.startswith("_") or name not in self.__dataclass_fields__:
                raise AttributeError(f"a StepReport has no {name!r}")
            self._complete()
            return object.__getattribute__(self, name)


def peaks_of(device: torch.device) -> tuple[int, int | None]:
    """Return the peak bytes allocated on a GPU, and those that torch's allocator has taken from it; on a CPU the peak resident bytes of
    this process, and None, since nobody counts the others.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return process_limits.peak_resident_bytes(), None
