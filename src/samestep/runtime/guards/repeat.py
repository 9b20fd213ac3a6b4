"""Named samples of a step run again, from the state with which the step began.

The samples are read anew and run as a recomputation does: without gradients, with the dropout masks and experts that the
step gave them, from the buffers and attributes that the modules had when the step began. Which samples, whether alone, in
pairs or as a whole micro-batch, and how often, are arguments. Afterwards buffers and attributes are put back.
Where nothing runs, `NamedSamples` only reads them again.

    samples twice, alone and together                               against each other (`data_trial.py`)
    forward of one sample alone, or of its micro-batch              against the step's own (`canary.py`)
    the loss twice on the same outputs                              against each other (`canary.py`)
    two samples padded to one size, and each of them alone          the sums (`canary.py`)
    any of these with every module's output off by one rounding     how far roundings go (`independence/roundings.py`)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.building.loss_result import as_number, loss_result
from samestep.building.model import call_model
from samestep.errors import SamestepError
from samestep.examination.examine import Loss
from samestep.independence.roundings import nudge_outputs
from samestep.randomness import mode as dropout
from samestep.randomness.dropout_state import Dropout
from samestep.runtime import evaluation, microbatches
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision
from samestep.runtime.axes.expert import RouteMode, Routes, tokens_of_first
from samestep.runtime.step_batch import Indices, StepBatch
from samestep.runtime.step_observer import MakeMode
from samestep.runtime.weights.unit_order import CalledAgainError
from samestep.state.snapshot import ModelState, preserve_function
from samestep.trees import tensors_in

FAILURES = (SamestepError, RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""Errors of code that takes no samples of this number or size."""
Nudge = tuple[float, int]
"""A relative rounding by which the output of every module with weights is off, and a seed of its signs."""


_Context = Callable[[], AbstractContextManager[None]]


def has_own_graph(assembly: Assembly) -> bool:
    """Return whether a rank's gradients reach its weights on any way through the graph: no rank holds a part of its weights, nor gathers them."""
    layout = assembly.parallel.program.step.layout
    return layout.zero <= 1 and layout.cp == layout.pp == layout.model_ranks == 1


class NamedSamples:
    """The samples of one step, read again by their indices, as the step reads them."""

    def __init__(self, assembly: Assembly, batch: StepBatch) -> None:
        self._assembly, self._batch = assembly, batch

    @property
    def everyone(self) -> Indices:
        """The indices of the samples of all ranks."""
        return self._batch.shares(0, 1, 1)[0]

    @property
    def mine(self) -> Indices:
        """The indices of this rank's samples; there may be none."""
        return self._batch.shares(*self._assembly.parallel.mesh.data_share, 1)[0]

    def read(self, indices: list[int] | Indices) -> Any:
        """Return samples, read together."""
        return microbatches.read(self._assembly, self._batch, np.asarray(indices, dtype=np.int64))[0]

    def few(self, number: int) -> Indices:
        """Return the first samples of this rank's share, at least two: one is taken twice, and a rank without runs the batch's first."""
        found = self.mine[:number] if len(self.mine) else self.everyone[:1]
        return found if len(found) > 1 else np.concatenate([found, found])

    def shapes(self, indices: list[int] | Indices) -> list[torch.Size]:
        """Return the shapes of samples that are read together, without the dimension of the samples."""
        return [leaf.shape[1:] for leaf in tensors_in(self.read(indices))]


class Repeat(NamedSamples):
    """Forwards of named samples of one step, which run when the step begins."""

    def __init__(
        self, assembly: Assembly, batch: StepBatch, loss: Loss, seed: int, make_mode: Callable[[], MakeMode | None]
    ) -> None:
        super().__init__(assembly, batch)
        self.state = ModelState(assembly.model.module)
        self.routes: Routes = {}
        """The experts that the step chose, if they are to be chosen again."""
        self._loss_of_user, self._seed = loss, seed
        self._make_mode = make_mode

    def run(
        self,
        indices: Indices,
        samples: Any,
        *,
        microbatch: int | None = None,
        nudge: Nudge | None = None,
        num_losses: int = 0,
    ) -> tuple[Any, list[Tensor]]:
        """Return the outputs of samples, None on a stage that does not end the model, and their loss, computed so many times.

        `microbatch` is the number of the step's micro-batch that the samples are, whose batch norms share their statistics.
        Collective over the ranks that share the model: if one does not call it, the others wait until the time limit.

        Raises:
            Exception: one of `FAILURES`, the model takes no such samples.
        """
        modes = functools.partial(self._modes, indices)
        around = functools.partial(self._around, indices, samples, microbatch)
        shaken = nudge_outputs(self._assembly.model.module, *nudge) if nudge else nullcontext()
        with self.state.restored(), self._assembly.parallel.precise.of_forward(), shaken:
            outputs = self._forward(samples, around)
            if outputs is None or not num_losses or self._assembly.objective.sums.is_whole:
                return outputs, []
            with preserve_function(self._loss_of_user):
                return outputs, self._losses(outputs, samples, (modes, around), num_losses)

    def _forward(self, samples: Any, around: Callable[[], AbstractContextManager[None]]) -> Any:
        """Return the outputs of samples; once more where a rank has found only then which weights its samples need again."""
        while True:
            outputs, gave_up = None, False
            try:
                outputs = evaluation.forward(self._assembly, samples, around)
            except CalledAgainError:
                self._assembly.weights.store.calls.give_up_forward()
                gave_up = True
            if self._assembly.parallel.program.step.zero < 3 or not self.largest(float(gave_up)):
                return outputs

    def _losses(self, outputs: Any, samples: Any, contexts: tuple[_Context, _Context], number: int) -> list[Tensor]:
        """Return the loss of outputs, so many times; one that takes gradients through the model is given outputs with a graph."""
        modes, around = contexts
        try:
            return [self._loss(outputs, samples, modes) for _ in range(number)]
        except FAILURES:
            if not has_own_graph(self._assembly):
                raise
        with torch.enable_grad(), around():
            given = precision.for_loss(call_model(self._assembly.model.module, samples))
        with torch.enable_grad():
            return [self._loss(given, samples, modes).detach() for _ in range(number)]

    def largest(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        mesh = self._assembly.parallel.mesh
        if mesh.size("world") == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64, device=mesh.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return float(number)

    def _loss(self, outputs: Any, samples: Any, modes: Callable[[], AbstractContextManager[None]]) -> Tensor:
        """Return the sums and counts of the loss's terms and values on outputs of samples, float64, concatenated."""
        like = torch.zeros((), dtype=torch.float64, device=self._assembly.parallel.mesh.device)
        with modes():
            found = loss_result(self._assembly.objective.loss(outputs, self._assembly.parallel.slicing.part(samples)))
        return torch.stack([as_number(number, like) for amount in found.amounts.values() for number in amount])

    @contextmanager
    def _around(self, indices: Indices, samples: Any, microbatch: int | None) -> Iterator[None]:
        """Return the context of one forward of samples."""
        parallel = self._assembly.parallel
        norms: AbstractContextManager[Any] = (
            nullcontext() if microbatch is None else parallel.batch_norms.of(microbatch)
        )
        with self._modes(indices), parallel.slicing.of(samples), parallel.pending(), norms:  # masks: of exchanged heads
            yield

    @contextmanager
    def _modes(self, indices: Indices) -> Iterator[None]:
        """Return the context of one forward: the masks and experts that the step had for these samples."""
        model = self._assembly.model
        make: Callable[..., dropout.DropoutMode] | None = self._make_mode()
        if make is None and self.routes:
            make = functools.partial(RouteMode, routes=self.routes, own=tokens_of_first, replays=True)
        if make is None and model.dropout.dropout is Dropout.ABSENT:
            yield
            return
        samples = torch.as_tensor(indices, device=self._assembly.parallel.mesh.device)
        draw = dropout.Draw(self._seed, self._batch.step, samples)
        with model.dropout.mode(draw, make):
            yield
