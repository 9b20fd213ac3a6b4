"""Named samples of a step run again, from the state with which the step began.

The samples are read anew and run as a recomputation does: without gradients, with the dropout masks and experts that the
step gave them, from the buffers and attributes that the modules had when the step began. Which samples, whether alone, in
pairs or as a whole micro-batch, and how often, are arguments. Afterwards buffers and attributes are put back.
Where nothing runs, `NamedSamples` (`named_samples.py`) only reads them again.

    samples read twice, alone, together and by all ranks            against each other (`named_samples.py`)
    samples as one, and as two halves                               the loss of the whole against that of the halves (`loss_of_parts.py`)
    forward of one sample alone, or of its micro-batch              against the step's own (`canary.py`)
    the loss twice on the same outputs                              against each other (`canary.py`)
    two samples padded to one size, and each of them alone          the sums (`canary.py`)
    any of these with every module's output off by one rounding     how far roundings go (`independence/roundings.py`)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.building.loss_result import as_number, loss_result
from samestep.building.model import call_model
from samestep.errors import SamestepError
from samestep.examination.examine import Loss
from samestep.independence.roundings import LEAST_MEAN, LIMITS_OF_SUMS, NUM_PERTURBED, allowance, nudge_outputs
from samestep.independence.sliced_shapes import tokens_of
from samestep.randomness import mode as dropout
from samestep.randomness.dropout_state import Dropout
from samestep.runtime import evaluation
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision, tensor
from samestep.runtime.axes.expert import RouteMode, Routes, tokens_of_first
from samestep.runtime.guards import loss_of_parts
from samestep.runtime.guards.divided_samples import Samples
from samestep.runtime.guards.loss_of_parts import LossTrial
from samestep.runtime.guards.named_samples import NamedSamples
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import Indices, MakeMode, StepBatch
from samestep.runtime.weights.unit_order import CalledAgainError
from samestep.state.snapshot import KeptValues, ModelState, preserve_function, preserve_generators
from samestep.state.writes import Marks, exact_norms, marks_of
from samestep.trees import tensors_in

FAILURES = (SamestepError, RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""Errors of code that takes no samples of this number or size."""
Nudge = tuple[float, int]
"""A relative rounding by which the output of every module with weights is off, and a seed of its signs."""


_AT_ONCE = 8
"""Samples on which a measure is tried at once."""
_WINDOWS = 3
"""So many times other samples are run where some show nothing, as if all their labels are masked."""
_Context = Callable[[], AbstractContextManager[None]]


def has_own_graph(assembly: Assembly) -> bool:
    """Return whether a rank's gradients reach its weights on any way through the graph: no rank holds a part of its weights, nor gathers them."""
    layout = assembly.parallel.program.step.layout
    return layout.zero <= 1 and layout.cp == layout.pp == layout.model_ranks == 1


class TriedLoss(NamedTuple):
    """A loss that is tried, and the micro-batch in which it has done what was not tried yet."""

    loss: Loss
    graded: Sequence[bool] = ()
    """Through which tensors of the outputs its backward goes."""
    way: str = ""
    """By which way it reaches a weight of the model but by the outputs; empty if by none."""
    indices: Indices | None = None
    num_samples: int = 0
    """Number of samples on which it is tried."""
    pairs: frozenset[Any] = frozenset()
    """The functions that it has called (`LossWatch.pairs`)."""
    is_new: bool = True
    """Whether some of them were not called when it was tried before."""
    began: KeptValues | None = None
    """What it keeps between its calls, as it was before a step of several micro-batches."""


class HalvedRun(NamedTuple):
    """Samples that were run as one and as two halves."""

    indices: Indices
    together: Samples
    halves: tuple[Samples, Samples]
    losses: list[Tensor]
    """Sums and counts of the whole and of the halves, where they were asked for; none on other stages than the last."""


def _sums_off(*losses: Tensor) -> float:
    """Return by how much the sums and counts of parts are off those of the whole, which is the first, if there are any."""
    if not losses:
        return 0.0
    together, *parts = losses
    if len({*map(len, losses)}) > 1:  # a term that counts nothing may be left out
        return 1.0
    scale = torch.stack([loss.abs() for loss in losses]).amax(0)
    scale[::2] = scale[::2].maximum(LEAST_MEAN * scale[1::2])  # each sum is in front of its count
    off = (together - torch.stack(parts).sum(0)).abs() / scale.clamp(min=1e-300)
    return float(off.nan_to_num(0.0).max())


def marks_of_weights(assembly: Assembly) -> Marks:
    """Return the marks of the weights of this rank's stages, which a forward may write."""
    return marks_of([param for param in assembly.model.module.parameters() if not param.is_meta], norms=exact_norms)


class Repeat(NamedSamples):
    """Forwards of named samples of one step, which run when the step begins."""

    def __init__(
        self,
        assembly: Assembly,
        batch: StepBatch,
        loss: Loss,
        seed: int,
        make_mode: Callable[[], MakeMode | None] = lambda: None,
        *,
        measure: Loss | None = None,
        weights: Marks | None = None,
    ) -> None:
        """Run samples as the step does, whose loss the user gave as `loss` and which began with these `weights`; or as an evaluation does,
        with a `measure` of whole logits.
        """
        super().__init__(assembly, batch)
        self._weights = weights
        self._measure = measure
        self.state = ModelState(assembly.model.module, weights=False)
        self.routes: Routes = {}
        """The experts that the step chose, if they are to be chosen again."""
        self._loss_of_user, self._seed = loss, seed
        self._make_mode = make_mode
        self.failure: Exception | None = None
        """The first error of a part that the model does not take."""
        self.latest: HalvedRun | None = None
        """The last run of `divided`, which the trial of a loss leaves to the canary."""

    @functools.cached_property
    def weights_were_written(self) -> bool:
        """Whether a forward of the step has written weights on some rank, which one that is repeated would write once more."""
        here = self._weights is not None and any(marks_of_weights(self.assembly).since(self._weights))
        return self.largest(float(here)) > 0

    def run(
        self,
        indices: Indices,
        samples: Any,
        *,
        microbatch: int | None = None,
        nudge: Nudge | None = None,
        with_loss: bool = False,
    ) -> tuple[Any, Tensor | None]:
        """Return the outputs of samples, None on a stage that does not end the model, and if asked for the sums and counts of their loss.

        `microbatch` is the number of the step's micro-batch that the samples are, whose batch norms share their statistics.
        Collective over the ranks that share the model: if one does not call it, the others wait until the time limit.

        Raises:
            Exception: one of `FAILURES`, the model takes no such samples.
        """
        modes = functools.partial(self._modes, indices)
        around = functools.partial(self._around, indices, samples, microbatch)
        shaken = nudge_outputs(self.assembly.model.module, *nudge) if nudge else nullcontext()
        # The lists of weights that recurrent layers keep are restored to those of the beginning, so weights must be where they were.
        self.assembly.weights.store.end_forward_only()
        with self.state.restored(), self.assembly.parallel.precise.of_forward(), shaken:
            outputs = self._forward(samples, around)
            if outputs is not None and self._measure is not None:
                parallel = self.assembly.parallel
                outputs = tensor.whole_logits(outputs, parallel.program, parallel.mesh)
            if outputs is None or not with_loss or self.assembly.objective.sums.is_whole:
                return outputs, None
            with preserve_function(self._loss_of_user):
                return outputs, self._loss_of(outputs, samples, (modes, around))

    def halves(self, indices: Indices, *, with_loss: bool = False) -> HalvedRun | None:
        """Run samples as one and as two halves; return None if some rank's model takes no such part, or its loss.

        Collective over the world, see [Note: collective calls].
        """
        runs: list[Samples] = []
        losses: list[Tensor] = []
        half = len(indices) // 2
        parts = [(few, self._attempt(self.read, few)) for few in (indices, indices[:half], indices[half:])]
        self.assembly.weights.store.end_forward_only()  # as `run` does
        with self.state.restored():  # what there is now is noted once for all three
            for few, samples in parts:
                if samples is not None and (result := self._attempt(self.run, few, samples, with_loss=with_loss)):
                    losses += [] if result[1] is None else [result[1]]
                    runs.append(
                        Samples(
                            result[0],
                            samples if result[0] is None else self.assembly.parallel.slicing.part(samples),
                            len(few),
                        )
                    )
        return None if self.largest(float(len(runs) < 3)) else HalvedRun(indices, runs[0], (runs[1], runs[2]), losses)

    def _attempt(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what an action returns; None where the model or the data take no such part, whose first error is kept."""
        try:
            return act(*args, **kwargs)
        except FAILURES as error:
            self.failure = self.failure or error

    def divided(self, indices: Indices) -> HalvedRun | None:
        """Run samples and their halves; those of two micro-batches if the model takes whole micro-batches alone."""
        step = self.assembly.parallel.program.step
        self.latest = None  # before further forwards
        self.latest = self.halves(indices) or self.halves(self.few(2 * step.microbatch_samples, indices))
        return self.latest

    def divided_first(self, indices: Indices) -> HalvedRun | None:
        """Return the latest run if it begins with these samples on all ranks, and run them and their halves otherwise."""
        run, size = self.latest, len(indices)
        if run is None or self.largest(float(not np.array_equal(run.indices[:size], indices))):
            return self.divided(self.few(size, indices))
        return run

    def excess_of_halves(self, indices: Indices, rounding: float) -> float | None:
        """Return by how much sums and counts of the loss of two halves, each of its own forward, are off those of both; 0 up to roundings, and
        None if the model or the loss takes no such part.

        A sum is compared to at least a hundredth of its count. Collective over the world, see [Note: collective calls].
        """
        run = self.halves(indices, with_loss=True)
        if run is None:
            return None
        deviation = self.largest(_sums_off(*run.losses))
        if deviation <= allowance(rounding):
            return 0.0
        samples = self.read(indices)
        nudges = [(rounding, seed) for seed in range(NUM_PERTURBED)]
        shaken = [self.run(indices, samples, nudge=nudge, with_loss=True)[1] for nudge in nudges]
        measured = self.largest(max(0.0 if loss is None else _sums_off(run.losses[0], loss) for loss in shaken))
        return deviation if deviation > allowance(rounding, measured) else 0.0

    def try_loss(self, tried: TriedLoss | None) -> LossTrial:
        """Return whether a loss is a sum over samples, of the first that show it; a rank that asks for nothing (None) runs as many.

        In 16 bits a coupled loss may differ by less than roundings, if its outputs cannot be divided. Collective over the world, see
        [Note: collective calls].
        """
        dtype = precision.DTYPES[self.assembly.parallel.program.step.compute_dtype]
        trial = LossTrial(judged=False)
        for few in self._windows(tried):
            run = self.divided(few)
            trial = LossTrial(judged=False) if tried is None else self._judged(tried, run)
            if self.largest(float(trial.is_indivisible)):
                is_sum = self.excess_of_halves(few, torch.finfo(dtype).eps) == 0.0 and dtype in LIMITS_OF_SUMS
                trial = LossTrial() if trial.is_indivisible and is_sum else trial
            if not self.largest(float(tried is not None and not trial.judged)):
                break
        return self._with_slices(trial, run) if self.assembly.parallel.program.step.layout.cp > 1 else trial

    def _with_slices(self, trial: LossTrial, run: HalvedRun | None) -> LossTrial:
        """Return a trial with a reason against outputs without a row for each token that differ between slices of the same samples.

        Collective over the world, see [Note: collective calls].
        """
        mesh, together = self.assembly.parallel.mesh, Samples((), (), 0) if run is None else run.together
        length = tokens_of(together.batch).shape[1] if together.size else 0
        others = [
            leaf for leaf in tensors_in(together.outputs) if leaf.is_floating_point() and length not in leaf.shape[1:]
        ]
        norms = [float(leaf.detach().double().norm()) for leaf in others]
        everyone = gather_values((mesh.data_share[0], norms), self.world_size)
        if (trial.reason and trial.of_tokens) or all(
            np.allclose(theirs, norms) for share, theirs in everyone if share == mesh.data_share[0] and theirs
        ):
            return trial
        text = "the forward returns a tensor without a row for each token, which is computed from a rank's slice of the tokens"
        return LossTrial(text, of_tokens=True)

    def _judged(self, tried: TriedLoss, run: HalvedRun | None) -> LossTrial:
        """Return what samples and their halves show of a loss, if its outputs can be divided."""
        if run is None or tried.way:
            error = self.failure
            text = f"the forward fails on a part of a micro-batch ({type(error).__name__}: {error})"
            return LossTrial(tried.way or text, is_indivisible=True)
        if run.together.outputs is None:
            return LossTrial()
        loss, of_user = tried.loss, self._loss_of_user
        number = 0 if self.assembly.parallel.program.step.layout.cp > 1 else self.batch.num_samples
        trial = loss_of_parts.judge(
            loss,
            run.together,
            run.halves,
            tried.graded,
            of_user,
            is_new=tried.is_new,
            num_samples=number,
            began=tried.began,
        )
        if self.assembly.parallel.program.step.layout.cp == 1 or not trial.judged:
            return trial
        length, loss_of_tokens = tokens_of(run.together.batch).shape[1], loss_of_parts.judge_tokens
        of_tokens = loss_of_tokens(tried.loss, run.together, length, self._loss_of_user) if length > 1 else trial
        return of_tokens if of_tokens.reason else trial

    def _windows(self, tried: TriedLoss | None) -> Iterator[Indices]:
        """Yield samples on which a loss is tried: first those that one of the ranks names that share the model and the data, as its last stage,
        which run the same; then others, if they show nothing. A measure is tried on all samples of this rank.

        Collective over the world, see [Note: collective calls].
        """
        number, starts = _AT_ONCE, range(0, self.batch.num_samples, _AT_ONCE)
        if self._measure is None:
            share, _ = self.assembly.parallel.mesh.data_share
            indices = None if tried is None or tried.indices is None else tried.indices.tolist()
            answers = gather_values((share, indices, 0 if tried is None else tried.num_samples), self.world_size)
            number = min((number for *_, number in answers if number), default=0)
            first = next((some for other, some, _ in answers if other == share and some is not None), None)
            yield self.few(number, None if first is None else np.array(first, dtype=np.int64))
            starts = range(0, _WINDOWS * number, number)
        for start in starts:
            yield self.few(number, self.mine[start : start + number])

    def _forward(self, samples: Any, around: Callable[[], AbstractContextManager[None]]) -> Any:
        """Return the outputs of samples; once more where a rank has found only then which weights its samples need again."""
        while True:
            outputs, gave_up = None, False
            try:
                outputs = evaluation.forward(self.assembly, samples, around)
            except CalledAgainError:
                self.assembly.weights.store.give_up_forward()
                gave_up = True
            if self.assembly.parallel.program.step.zero < 3 or not self.largest(float(gave_up)):
                return outputs

    def _loss_of(self, outputs: Any, samples: Any, contexts: tuple[_Context, _Context]) -> Tensor:
        """Return the loss of outputs; one that takes gradients through the model is given outputs with a graph."""
        modes, around = contexts
        try:
            return self._loss(outputs, samples, modes)
        except FAILURES:
            if not has_own_graph(self.assembly):
                raise
        with torch.enable_grad():
            with around():
                with_graph = precision.for_loss(call_model(self.assembly.model.module, samples))
            return self._loss(with_graph, samples, modes).detach()

    def largest(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        if self.world_size == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64, device=self.assembly.parallel.mesh.device)
        with outside_step():
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return float(number)

    def _loss(self, outputs: Any, samples: Any, modes: Callable[[], AbstractContextManager[None]]) -> Tensor:
        """Return the sums and counts of the loss's terms and values on outputs of samples, float64, concatenated."""
        like = torch.zeros((), dtype=torch.float64, device=self.assembly.parallel.mesh.device)
        with modes():
            loss = self._measure or self.assembly.objective.loss
            result = loss_result(loss(outputs, self.assembly.parallel.slicing.part(samples)))
        return torch.stack([as_number(number, like) for amount in result.amounts.values() for number in amount])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return the context of repetitions, which leave no trace in the step: what the modules hold is noted once for all of them."""
        self.assembly.weights.store.end_forward_only()  # as `run` does
        with (
            outside_step(),
            torch.no_grad(),
            preserve_generators(self.state.generators),
            self.state.restored(),
            self.assembly.parallel.checkpoints,
        ):
            yield
            self.assembly.weights.store.end_forward_only()

    @contextmanager
    def _around(self, indices: Indices, samples: Any, microbatch: int | None) -> Iterator[None]:
        """Return the context of one forward of samples."""
        parallel = self.assembly.parallel
        norms: AbstractContextManager[Any] = (
            nullcontext() if microbatch is None else parallel.batch_norms.of(microbatch)
        )
        pending = nullcontext() if self._measure is not None else parallel.pending()
        with self._modes(indices), parallel.slicing.of(samples), pending, norms:  # masks: of exchanged heads
            yield

    @contextmanager
    def _modes(self, indices: Indices) -> Iterator[None]:
        """Return the context of one forward: the masks and experts that the step had for these samples."""
        model = self.assembly.model
        make: Callable[..., dropout.DropoutMode] | None = self._make_mode()
        if make is None and self.routes:
            make = functools.partial(RouteMode, routes=self.routes, own=tokens_of_first, replays=True)
        if make is None and model.dropout.dropout is Dropout.ABSENT:
            yield
            return
        samples = torch.as_tensor(indices, device=self.assembly.parallel.mesh.device)
        draw = dropout.Draw(self._seed, self.batch.step, samples)
        with model.dropout.mode(draw, make):
            yield
