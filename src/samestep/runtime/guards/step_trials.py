"""What a step relies on, tried while the run goes on: samples that read alike, a loss that is a sum, generators that stand.

What fails is refused at the end of the step on every rank (`refusals.py`), or only remarked on where the layout splits
nothing, so that it changes no result. Each trial's own file says what is tried and why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from samestep.building.loss import target_of
from samestep.building.model import call_model
from samestep.program.program import Program
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision, tensor
from samestep.runtime.guards import data_trial, loss_paths, loss_trial, own_communication, randomness
from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.microbatches import StepBatch
from samestep.runtime.preparation import Loss


def is_split(program: Program) -> bool:
    """Whether the samples of a step are divided, over ranks or into micro-batches."""
    return program.step.layout.dp > 1 or program.step.num_microbatches > 1


class StepTrials:
    """The trials of a run's data and loss on this rank, and the watch over its generators."""

    def __init__(self, held: Assembly, given_loss: Loss, refusals: Refusals, device: torch.device) -> None:
        """Try the steps of a prepared run; `given_loss` is the loss as the user gave it."""
        self.loss_is_tried = False
        self._data_is_tried = False
        self._given_loss, self._refusals, self._device = given_loss, refusals, device
        self._layout = held.parallel.program.step.layout
        self._is_split = is_split(held.parallel.program)
        own = randomness.own_generators(held.model.module, given_loss)
        self._generators = randomness.GeneratorWatch(device, own)
        self._before: tuple[tuple[Any, Any], int] | None = None
        """Outputs and labels of the micro-batches before, if they could not show what the loss is, and the number of their
        samples."""

    @property
    def reading(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context that leaves out the generators that move while samples are read inside a call."""
        return self._generators.reading

    def communication(self, what: str) -> AbstractContextManager[None]:
        """Return a context that refuses calls of torch.distributed by the user's code, while the loss is tried."""
        is_watched = self._layout.world_size > 1 and not self.loss_is_tried
        return own_communication.refused(what) if is_watched else nullcontext()

    def settle(self, *, whole: bool = False) -> None:
        """Take the present states of the generators as those before the next call."""
        self._generators.settle(whole=whole)

    def check_generators(self, held: Assembly, step: int, who: str, samples: Any = None) -> None:
        """Refuse a step, counted from 1, if a generator of the process has moved since they settled, naming who drew."""
        generator = self._generators.moved()
        if not generator:
            return
        layout, model = self._layout, held.model.module
        waits = held.parallel.batch_norms.sends or (layout.num_shards > 1 and layout.zero >= 2)
        if samples is not None and layout.model_ranks == 1 and not waits:
            held.weights.store.settle()
            with held.model.compiled.off():
                path = randomness.first_module_that_draws(model, lambda: call_model(model, samples), self._device)
            who = f"{path} in {who}" if path else who
        reason = randomness.refusal(who, generator)
        if who == "the optimizer" and layout.world_size == 1:  # other layouts refuse it by their own rule
            self._refusals.remark(reason)
        else:
            self._refusals.add("random", f"step {step}: {reason}")
        self._generators.settle()

    def try_data(self, held: Assembly, batch: StepBatch) -> None:
        """Try once whether a sample is the same one whenever and on whichever rank it is read.

        Collective over the world: every rank calls it in its first step; if one does not, the others wait.
        """
        if self._data_is_tried:
            return
        self._data_is_tried = True
        mine, whole = batch.shares(held.parallel.mesh.index("dp"), self._layout.dp, 1)[0], batch.shares(0, 1, 1)[0]
        reason = data_trial.refusal(batch, mine, whole, self._layout.world_size, is_split=self._is_split)
        if reason:
            self._refusals.add("data", reason)

    def try_loss(self, held: Assembly, total: Tensor, outputs: Any, samples: Any, num_samples: int) -> None:
        """Try whether the loss, whose sum is `total`, reads nothing of the model but its outputs, and whether it is a sum over
        the samples, and under cp over the tokens, until a micro-batch has shown it.
        """
        makes_logits = self._layout.loss_chunk is not None  # and so reads the head
        if not makes_logits and (way := loss_paths.beside_outputs(total, outputs, held.model.module)):
            self.loss_is_tried = True
            self._refuse_path(way)
            return
        # What the user gave, unless the logits are cut by vocabulary, which needs the loss that communicates.
        loss = held.objective.loss if tensor.cuts_logits(held.parallel.program) else self._given_loss
        given = precision.for_loss(outputs)
        trial = loss_trial.tried(loss, given, samples, num_samples)
        tried, wanted = num_samples, loss_trial.samples_wanted(given, samples, num_samples)
        before, seen = self._before, (given, samples)
        is_lone = False
        if before is not None and not trial.reason and (tried < wanted or not trial.judged):
            # Two micro-batches say more than one sample and its copy, and than a few samples that agree by chance.
            both = loss_trial.joined(before[0], seen, (before[1], num_samples))
            if both is None:
                is_lone = True
            else:
                seen, tried = both, before[1] + num_samples
                trial = loss_trial.tried(loss, *seen, tried)
                kept = loss_trial.joined(before[0], (given, samples), (before[1], num_samples), keeps_equal=True)
                if trial.reason and kept is not None and not (other := loss_trial.tried(loss, *kept, tried)).reason:
                    seen, trial = kept, other
        is_shown = trial.judged and (tried >= wanted or is_lone)
        kept = seen if tried < wanted else (given, samples)
        self._before = None if is_shown else (loss_trial.detached(kept), tried if tried < wanted else num_samples)
        what, matters = "samples", self._is_split
        if self._layout.cp > 1 and trial.judged and not trial.reason:
            length = target_of(samples).shape[1]
            trial = loss_trial.tried(loss, given, samples, length, dim=1) if length > 1 else trial
            what, matters = "tokens", True
        self.loss_is_tried = bool(trial.reason) or is_shown
        self._generators.settle()
        if trial.reason:
            self._refuse_loss(f"the loss is no sum over the {what} of a batch: {trial.reason}", what, matters)

    def _refuse_path(self, way: str) -> None:
        if self._is_split or self._layout.world_size > 1:
            self._refusals.add("loss", f"{way}; a forward that returns what the loss needs works, and so does one rank")
        else:
            self._refusals.remark(f"{way}; so layouts of several ranks or micro-batches are refused")

    def _refuse_loss(self, text: str, what: str, matters: bool) -> None:
        if not matters:
            self._refusals.remark(
                f"{text}; so a layout that splits the batch would give another result, and is refused"
            )
            return
        one = "cp=1 works" if what == "tokens" else "one rank with the whole batch as its micro-batch works"
        self._refusals.add("loss", f"{text}; (sum over {what}, their number) works, and {one}")
