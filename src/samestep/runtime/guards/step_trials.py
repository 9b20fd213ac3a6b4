"""Trials of what a step relies on, while the run goes on: samples that read alike, a loss that is a sum, generators that stand.

What fails is refused at the end of the step on every rank (`refusals.py`), or only remarked on where the layout splits
nothing, so that it changes no result. Each trial's own file says what is tried and why; here stand when each one runs, and that
the user's forward and loss call nothing of torch.distributed.

Code that was written for DDP gathers the features of a batch, adds up a count or divides by the number of ranks. Here the
layout does that: a loss is a sum and a count of its own samples. Until the loss is tried, the functions of torch.distributed look
who calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.building.loss import OF_GRAPHS, OWN_SUMS, target_of
from samestep.building.model import call_model, loss_within
from samestep.building.model_loss import ModelLoss, Rule
from samestep.errors import JobError, ModelError, UnprovenError
from samestep.examination.examine import Loss
from samestep.program.program import Program
from samestep.randomness.mode import needs_mode
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision, tensor
from samestep.runtime.axes.whole_batch import WholeBatch
from samestep.runtime.guards import loss_parts, loss_paths, loss_trial, model_loss_trial, randomness
from samestep.runtime.guards.data_trial import data_refusal
from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.guards.repeat import NamedSamples, has_own_graph
from samestep.runtime.step_batch import StepBatch

_CALLS = (
    "get_rank", "get_world_size", "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_object", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "broadcast_object_list", "barrier", "send", "recv", "isend", "irecv",
)  # fmt: skip
_BETWEEN = ("torch.distributed", "torch.autograd", "torch.utils._contextlib", "contextlib", "functools")
"""Modules that pass a call on."""
_OURS = ("torch", "samestep")
OPTIMIZER = "the optimizer"
"""The caller that stands for updates in `StepTrials.check_generators`."""


@contextmanager
def refuse_collectives(what: str) -> Iterator[None]:
    """Refuse, inside, calls of torch.distributed by the user's code, which is `what` runs.

    Raises:
        ModelError: there is one.
    """
    before = {name: getattr(dist, name) for name in _CALLS}
    for name, function in before.items():
        setattr(dist, name, _watch_calls(function, name, what))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _watch_calls(function: Callable[..., Any], name: str, what: str) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        if _is_called_by_user():
            raise ModelError(
                f"{what} calls torch.distributed.{name}, so that the result would depend on the layout: it sees the samples of its "
                "own micro-batch, and the layout adds up sums and counts, so code without that works"
            )
        return function(*args, **named)

    return called


def _is_called_by_user() -> bool:
    """Return whether the user's code makes this call outside of a data set, which has another check."""
    frame = sys._getframe(2)
    by_user = False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if by_user and module.startswith("samestep."):
            return not module.startswith("samestep.datasets.")
        if not by_user and not module.startswith(_BETWEEN):
            if module.partition(".")[0] in _OURS:
                return False
            by_user = True
        frame = frame.f_back  # type: ignore[assignment]
    return by_user


def is_split(program: Program) -> bool:
    """Whether the samples of a step are divided, over ranks or into micro-batches."""
    return program.step.layout.dp > 1 or program.step.num_microbatches > 1


class _Trying:
    """The context of a call of the user's code; a class, since a generator takes twice as many calls."""

    __slots__ = ("_given", "_refused", "_trials")

    def __init__(self, trials: StepTrials, given: tuple[Assembly, int, str, Any]) -> None:
        self._trials, self._given = trials, given
        self._refused = None if trials.loss_is_tried or trials.is_alone else refuse_collectives(given[2])

    def __enter__(self) -> None:
        if self._refused is not None:
            self._refused.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self._refused is not None:
            self._refused.__exit__(kind, *error)
        if kind is None:
            self._trials.check_generators(*self._given)


class StepTrials:
    """The trials of a run's data and loss on this rank, and the watch over its generators."""

    def __init__(self, held: Assembly, given_loss: Loss, refusals: Refusals, device: torch.device) -> None:
        """Try the steps of a prepared run; `given_loss` is the loss as the user gave it."""
        self.loss_is_tried = False
        self._data_is_tried = False
        self._given_loss, self._refusals, self._device = given_loss, refusals, device
        self._layout = held.parallel.program.step.layout
        self._is_split = is_split(held.parallel.program)
        self.is_alone = self._layout.world_size == 1
        """Whether there is no other rank."""
        own = randomness.own_generators(held.model.module, given_loss)
        self._generators = randomness.GeneratorWatch(device, own)
        self._has_drawn = False
        """Whether code of this step has drawn from a generator of the process."""
        self._before: tuple[tuple[Any, Any], int] | None = None
        """Outputs and labels of the micro-batches before, if they could not show what the loss is, and the number of their
        samples."""

    @property
    def reading(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context that leaves out the generators that move while samples are read inside a call."""
        return self._generators.reading

    def trying(self, held: Assembly, step: int, what: str, samples: Any = None) -> AbstractContextManager[None]:
        """Return a context that refuses, inside, calls of torch.distributed by the user's code while the loss is tried, and then random numbers it has drawn.

        `samples` are those of a forward, which may run once more to name the module.
        """
        return _Trying(self, (held, step, what, samples))

    def watch_closely(self) -> None:
        """Look at the generators around each call of the next step, and not around all of them at once."""
        self._generators.is_close = True

    def begin_step(self) -> None:
        """Begin a step: the loop's code has run, which may draw."""
        self._has_drawn = False
        self._generators.leave()

    def settle(self) -> None:
        """Take the present states of the generators as those before the next call."""
        self._generators.settle()

    def check_generators(self, held: Assembly, step: int, who: str, samples: Any = None) -> None:
        """Refuse a step, counted from 1, if a generator of the process has moved since they settled, naming who drew."""
        if generator := self._generators.moved(ends=who == OPTIMIZER):
            self._refuse_draws(held, step, who, generator, samples)
        if who == OPTIMIZER:
            self._generators.leave()  # to the loop

    def end_backwards(self, held: Assembly, step: int, samples: Callable[[], Any], *, leaves: bool) -> None:
        """Refuse a step, counted from 1, if a generator has moved in its forwards and backwards; `samples` returns some of its samples,
        and it `leaves` the generators to the loop if the update is a call of its own.
        """
        if generator := self._generators.moved(ends=True):
            self._refuse_draws(held, step, "a forward, a loss or a backward", generator, samples())
        self._generators.is_close = self._has_drawn
        if leaves:
            self._generators.leave()

    def _refuse_draws(self, held: Assembly, step: int, who: str, generator: str, samples: Any) -> None:
        layout, model, self._has_drawn = self._layout, held.model.module, True
        if who != OPTIMIZER and needs_mode(model):
            self._refusals.asks_again = True
            self._generators.settle(anew=True)
            return
        waits = held.parallel.batch_norms.sends or layout.gathers_weights
        if samples is not None and layout.model_ranks == 1 and not waits:
            held.weights.store.settle()
            with held.model.compiled.off():
                path = randomness.first_module_that_draws(model, lambda: call_model(model, samples), self._device)
            who = f"{path} in the forward" if path else who
        reason = randomness.refusal(who, generator)
        if who == OPTIMIZER and layout.world_size == 1:  # other layouts refuse it by their own rule
            self._refusals.remark(reason)
        else:
            self._refusals.add("random", f"step {step}: {reason}")
        self._generators.settle(anew=True)

    def try_data(self, held: Assembly, batch: StepBatch) -> None:
        """Try once whether a sample is the same one whenever and on whichever rank it is read.

        Collective over the world: every rank calls it in its first step; if one does not, the others wait.
        """
        if self._data_is_tried:
            return
        self._data_is_tried = True
        if reason := data_refusal(NamedSamples(held, batch), self._layout.world_size, is_split=self._is_split):
            self._refusals.add("data", reason)

    def try_model_loss(self, held: Assembly, batch: StepBatch, seed: int) -> None:
        """Find out once what the loss is divided by that the forward returns.

        Collective over the world: every rank calls it before its first step; if one does not, the others wait.

        Raises:
            UnprovenError: nothing fits.
        """
        loss = self._given_loss
        if not isinstance(loss, ModelLoss) or loss.rule is not None:
            return
        reason = model_loss_trial.find_rule(loss, held, batch, seed)
        if reason and self._is_split:
            raise UnprovenError(reason, "loss")
        if reason:  # the batch is one part, whose loss is the step's
            loss.rule, loss_within(held.model.module).items = Rule.SAMPLES, 0
            self._refusals.remark(reason)

    def try_loss(self, held: Assembly, total: Tensor, outputs: Any, samples: Any, num_samples: int) -> None:
        """Try whether the loss, whose sum is `total`, reads nothing of the model but its outputs, and whether it is a sum over
        the samples, and under cp over the tokens, until a micro-batch has shown it.
        """
        if isinstance(scope := held.objective.sums, WholeBatch):  # no sum over samples, on any rank
            self.loss_is_tried = True
            if scope.graph is not None:
                self._try_paths(held, *scope.graph)
            scope.graph = None
            return
        # The parts of the former were tried by forwards; the latter are sums over what they are given.
        if isinstance(self._given_loss, ModelLoss) or self._given_loss in OWN_SUMS:
            self.loss_is_tried = True
            return
        makes_logits = self._layout.loss_chunk is not None  # and so reads the head
        if not makes_logits and self._try_paths(held, total, outputs):
            self.loss_is_tried = True
            return
        # What the user gave, unless the logits are cut by vocabulary, which needs the loss that communicates.
        loss = held.objective.loss if tensor.cuts_logits(held.parallel.program) else self._given_loss
        given = precision.for_loss(outputs)
        trial = loss_trial.try_loss_on_halves(loss, given, samples, num_samples)
        if held.objective.sums.reads_ahead and held.parallel.program.step.num_microbatches > 1:
            self.refuse_moved_counts(loss_trial.term_with_moving_count(loss, given, samples))
        tried, wanted = num_samples, loss_trial.samples_wanted(given, samples, num_samples)
        before, seen = self._before, (given, samples)
        is_lone = False
        if before is not None and not trial.reason and (tried < wanted or not trial.judged):
            # Two micro-batches say more than one sample and its copy, and than a few samples that agree by chance.
            both = loss_parts.join_samples(before[0], seen, (before[1], num_samples))
            if both is None:
                is_lone = True
            else:
                seen, tried = both, before[1] + num_samples
                trial = loss_trial.try_loss_on_halves(loss, *seen, tried)
                kept = loss_parts.join_samples(before[0], (given, samples), (before[1], num_samples), keeps_equal=True)
                if (
                    trial.reason
                    and kept is not None
                    and not (other := loss_trial.try_loss_on_halves(loss, *kept, tried)).reason
                ):
                    seen, trial = kept, other
        is_shown = trial.judged and (tried >= wanted or is_lone)
        kept = seen if tried < wanted else (given, samples)
        self._before = None if is_shown else (loss_parts.detach_tensors(kept), tried if tried < wanted else num_samples)
        what, matters = "samples", self._is_split
        if self._layout.cp > 1 and trial.judged and not trial.reason:
            length = target_of(samples).shape[1]
            trial = loss_trial.try_loss_on_halves(loss, given, samples, length, dim=1) if length > 1 else trial
            what, matters = "tokens", True
        self.loss_is_tried = bool(trial.reason) or is_shown
        self._generators.settle(anew=True)
        if trial.reason:
            reason = f"the loss is no sum over the {what} of a batch: {trial.reason}"
            self._refuse_loss(reason, what, matters, may_pass=trial.is_indivisible)

    def refuse_moved_counts(self, name: str) -> None:
        """Refuse the step if the count of a term, which is named then, does not follow from the batch."""
        if name:
            self._refusals.add(
                "loss",
                f"the count of {name} depends on the outputs, and a step of several micro-batches needs it before their forwards: "
                "one micro-batch a rank works, and so does samestep.whole_batch(loss), which is given all samples at once, or a count "
                "that follows from the batch",
            )

    def _try_paths(self, held: Assembly, total: Tensor, outputs: Any) -> bool:
        """Return whether the loss reaches a weight of the model by another way than its outputs, and refuse it.

        Raises:
            JobError: it takes gradients of a compiled graph's gradients.
        """
        if held.model.compiled.num_blocks and loss_paths.differentiates_graphs(total):
            raise JobError(OF_GRAPHS)
        way = loss_paths.beside_outputs(total, outputs, held.model.module)
        if not way and (remark := loss_paths.own_weight(total, outputs)):
            self._refusals.remark(remark)
        if not way:
            return False
        if self._is_split or self._layout.world_size > 1:
            text = f"{way}; a forward that returns what the loss needs works, and so does one rank"
            if self._layout.zero > 1 and self._layout.world_size == self._layout.dp:
                text += ", and zero=1"
            may_pass = has_own_graph(held) and not held.objective.sums.is_whole
            self._refusals.add("loss", text, may_pass=may_pass)
        else:
            self._refusals.remark(f"{way}; so layouts of several ranks or micro-batches are refused")
        return True

    def _refuse_loss(self, text: str, what: str, matters: bool, *, may_pass: bool) -> None:
        if not matters:
            self._refusals.remark(
                f"{text}; so a layout that splits the batch would give another result, and is refused"
            )
            return
        one = "cp=1 works" if what == "tokens" else "one rank with the whole batch as its micro-batch works"
        self._refusals.add("loss", f"{text}; (sum over {what}, their number) works, and {one}", may_pass=may_pass)
