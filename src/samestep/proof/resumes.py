"""A test of a layout's checkpoint: a run that resumes from it, twice, is compared with the same run that goes on.

```
goes on    ── step N ── saved ── one more step ──────────────────────────────────────────►
resumed         first values ── loaded ── equal? ── one more step ── equal? ── saved
resumed again   first values ─────────────────────────────────────────────── loaded ── equal?
```
The step is one of the job's optimizer, on given gradients, so that it needs no forward. Between saving and loading the
run is reset to its first values: values that a load leaves out then show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from samestep.proof import held_tensors, observation
from samestep.proof.comparison import Comparison
from samestep.proof.held_tensors import HeldTensor
from samestep.proof.observation import Observation
from samestep.proof.verdict import Cause
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.run import Run

WHAT = "resume"
"""The name of the check."""
_NEXT = "the next step"


def compare_resumes(
    run: Run, gradients: Mapping[str, Tensor], unused: Collection[str], folders: tuple[Path, Path]
) -> Iterator[tuple[str, float]]:
    """Resume a run that has just been saved in the first folder, and again from the second; yield each comparison and
    its error.

    The step after a resume uses these gradients, and none for the weights that are `unused`.

    Collective over the world: every rank must iterate; if one does not, the others wait for it when files are written.
    """
    steps, saved = run.steps_taken, _copy_held(run)
    (_,) = observation.feed(run, [dict(gradients)], [unused], steps)
    further = _copy_held(run)
    _load(run, folders[0])
    yield f"{_NEXT} of a run that resumes after step {steps}", float(run.steps_taken - steps)
    yield from _errors(_copy_held(run), saved, "in a resumed run")
    (_,) = observation.feed(run, [dict(gradients)], [unused], steps)
    yield from _errors(_copy_held(run), further, "one step after a resume")
    checkpoint.save(run, folders[1], keep=1)
    _load(run, folders[1])
    yield f"{_NEXT} of a run that resumes again after step {steps + 1}", float(run.steps_taken - steps - 1)
    yield from _errors(_copy_held(run), further, "in a run that has resumed twice")


def _load(run: Run, folder: Path) -> None:
    """Reset a run to values that no file holds, and load the newest checkpoint in a folder."""
    zeros = [torch.zeros_like(piece.master()) for piece in run.updater.pieces]
    observation.restart(run, zeros, [buffer.clone() for buffer in run.model.buffers()])
    checkpoint.load(run, manifests.list_checkpoints(folder)[-1])


def _copy_held(run: Run) -> list[HeldTensor]:
    return [*held_tensors.held_weights(run), *held_tensors.held_state(run)]


def _errors(tensors: Sequence[HeldTensor], right: Sequence[HeldTensor], when: str) -> Iterator[tuple[str, float]]:
    """Yield the error of each tensor, over its largest element."""
    by_name = {tensor.name: tensor.values.double() for tensor in tensors}
    for tensor in right:
        wanted = tensor.values.double()
        values = by_name.get(tensor.name)
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        apart = float("inf") if values is None else float((values - wanted).abs().max()) if wanted.numel() else 0.0
        yield f"{tensor.name} {when}", apart / (largest or 1.0)


def compare(ranks: Sequence[Observation], allowance: float) -> list[Comparison]:
    """Return the comparison of the ranks' resumed runs; none where none resumed."""
    comparison = Comparison(WHAT, None, allowance=allowance)
    for seen in ranks:
        for what, error in seen.resumed:
            comparison.note(what, abs(error), seen.rank)
    return [comparison] if comparison.compared else []


def cause(first: Comparison) -> tuple[Cause, str]:
    """Return the cause of the first difference: a run goes on at another step, or with other values."""
    misfit = first.misfits[0]
    if misfit.name.startswith(_NEXT):
        return Cause.RESUME, f"{misfit.name} is {misfit.error:g} steps from the right one on rank {misfit.rank}"
    return Cause.CHECKPOINT, f"{misfit.name} is off by {misfit.error:.1e} on rank {misfit.rank}"
