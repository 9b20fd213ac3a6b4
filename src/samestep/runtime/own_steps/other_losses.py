"""The losses that a loop gives to backwards, besides that of its run: each is checked, tried and named once, as that of the run is when it is
prepared.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import replace
from typing import Any

from samestep.building.loss import check_results_of
from samestep.building.loss_result import loss_result
from samestep.building.named_tensors import cast_batch
from samestep.building.over_samples import mark_of
from samestep.errors import ModelError
from samestep.examination.examine import Loss
from samestep.models.spec import LossNames
from samestep.randomness import mode as dropout
from samestep.randomness.dropout_state import Dropout
from samestep.runtime import evaluation
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import loss_terms, tensor
from samestep.runtime.guards.loss_trials import LossTrials, is_split
from samestep.runtime.held_assembly import HeldAssembly
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.objective import watched, watching_reads
from samestep.runtime.step_observer import StepBatch
from samestep.runtime.stepper import Stepper

_OF_BATCH = 8
"""So many samples show the names of what a loss over the whole batch reports, which may need several."""


class OtherLosses:
    """The losses that a loop has given to the backwards of one run."""

    def __init__(self, stepper: Stepper, assemblies: HeldAssembly) -> None:
        self._stepper, self._own = stepper, assemblies
        self._known: dict[object, tuple[LossTrials, LossNames, LossWatch]] = {}
        """The trials of each loss, the names of what it reports, and the watch over its calls, by its code."""

    def of_backward(
        self, assembly: Assembly, loss: Loss | None, batch: StepBatch
    ) -> tuple[Assembly | None, LossTrials | None]:
        """Return the assembly with another loss than the run's, and the trials of that loss, which functions of one code share.

        Raises:
            ModelError: the logits of the run's own loss are cut, or never whole, which another loss needs.
        """
        if loss is None or loss is self._own.source.loss:
            return None, None
        program = assembly.parallel.program
        if tensor.cuts_logits(program) or program.step.layout.loss_chunk is not None:
            word = f"tp={program.step.layout.tp}" if tensor.cuts_logits(program) else "loss_chunk"
            raise ModelError(
                "loss-over-batch",
                f"run.backward was given another loss than the run's, and {word} never makes whole logits. Use a loss of the "
                "run that is a function of (outputs, batch) in place of its word",
            )
        sums = assembly.objective.sums
        if mark_of(loss) is not None and not sums.is_whole and is_split(program):
            raise ModelError(
                "loss-over-batch",
                "run.backward was given a loss over the whole batch, and the loss of the run is a sum over samples, so that nothing is "
                "exchanged for it. Use samestep.whole_batch around the run's own loss too, or one rank with one micro-batch",
            )
        key, seen = _key_of(loss), loss
        if key not in self._known:
            trials = self._stepper.guards.trials_of(loss)
            self._known[key] = trials, self._names_in(assembly, loss, batch), LossWatch()
            seen = watching_reads(loss, self._own.source, assembly.model.module, program)
            if assembly.model.dropout.dropout is Dropout.ABSENT:  # this loss may draw
                assembly.model.dropout.dropout = Dropout.UNKNOWN
                dropout.track_modules(assembly.model.module)
        trials, names, watch = self._known[key]
        checked = check_results_of(seen) if sums.is_whole else watched(seen, program, watch)
        if not sums.is_whole:
            sums = loss_terms.sums_of(loss, program, assembly.parallel.mesh, watch, names)
        objective = replace(assembly.objective, loss=checked, names=names, sums=sums, watch=watch)
        return replace(assembly, objective=objective), trials

    def _names_in(self, assembly: Assembly, loss: Loss, batch: StepBatch) -> LossNames:
        """Return the names of what a loss reports, as one sample shows them, or some of a loss over the whole batch; none where it needs
        gradients to be computed.

        Collective over the world, see [Note: collective calls].
        """
        number = 1 if mark_of(loss) is None else _OF_BATCH
        samples = batch.samples(batch.shares(0, 1, 1)[0][:number])
        outputs = evaluation.outputs_of(assembly, samples, self._stepper.job.train.seed)
        model = assembly.model
        cast = cast_batch(samples, model.master_dtype, keeps_double=model.keeps_double)
        try:
            return loss_result(loss(outputs, cast)).names
        except Exception:  # of the user's own code, which the backward itself will raise, if it does
            return LossNames()


def _key_of(loss: Loss) -> object:
    """Return what tells a loss from others: functions that a loop makes anew in each step are one, unless they hold other numbers."""
    function: Any = inspect.unwrap(loss)
    code = getattr(function, "__code__", None)
    if code is None:
        return function
    contents = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    plain = [
        value for value in (*contents, *(function.__defaults__ or ())) if isinstance(value, str | int | float | bool)
    ]
    return code, repr(plain), mark_of(loss) is not None
