"""Trials of what a step relies on, while the run goes on: samples that read alike, a loss that is a sum, generators that stand.

What fails is refused at the end of the step on every rank (`refusals.py`), or only remarked on where the layout splits
nothing, so that it changes no result. Each trial's own file says what is tried and why; here stand when each one runs, and that
the user's code calls nothing of torch.distributed.

Code that was written for DDP gathers the features of a batch, adds up a count or divides by the number of ranks. Here the
layout does that: a loss is a sum and a count of its own samples. Until the loss is tried, the functions of torch.distributed look
who calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.building.loss import OF_GRAPHS, cross_entropy, is_known_sum
from samestep.building.model import call_model, loss_within
from samestep.building.model_loss import ModelLoss, Rule
from samestep.errors import JobError, ModelError, UnprovenError
from samestep.examination.examine import Loss
from samestep.program.program import Program
from samestep.randomness.mode import needs_mode
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes.whole_batch import WholeBatch
from samestep.runtime.guards import forward_loss, loss_paths
from samestep.runtime.guards.divided_samples import tensors_in
from samestep.runtime.guards.loss_of_parts import LossTrial
from samestep.runtime.guards.named_samples import NamedSamples
from samestep.runtime.guards.randomness import GeneratorWatch, own_generators, refusal
from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.guards.repeat import Repeat, TriedLoss, has_own_graph
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.step_observer import Indices, StepBatch
from samestep.state.writes import Marks

_CALLS = (
    "get_rank", "get_world_size", "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_object", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "broadcast_object_list", "barrier", "send", "recv", "isend", "irecv",
)  # fmt: skip
_BETWEEN = ("torch.distributed", "torch.autograd", "torch.utils._contextlib", "contextlib", "functools")
"""Modules that pass a call on."""
_OURS = ("torch", "samestep")
_READERS = ("samestep.datasets.", "samestep.runtime.microbatches")
"""Modules that read samples, whose code has another check."""
_ELEMENTS = 2**22
"""A loss is tried on about so many elements of outputs and batch."""
_SAMPLES = 8
"""So many samples are tried, if they have no more elements than that, and a whole micro-batch if it has more."""
_UNJUDGED = 8
"""After so many trials that show nothing a loss is tried again only where steps are watched."""


@contextmanager
def refuse_collectives() -> Iterator[None]:
    """Refuse, inside, calls of torch.distributed by the user's code.

    Raises:
        ModelError: there is one.
    """
    functions = {name: getattr(dist, name) for name in _CALLS}
    for name, function in functions.items():
        setattr(dist, name, _watch_calls(function, name))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


def _watch_calls(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        if caller := _calling_user():
            raise ModelError(
                "own-collective",
                f"{caller} calls torch.distributed.{name}, so that the result would depend on the layout: it sees the samples of its "
                "own micro-batch, and the layout adds up sums and counts. Remove the call",
            )
        return function(*args, **named)

    return called


def _calling_user() -> str:
    """Return the name of the function of the user that makes this call outside of a data set; empty if none does."""
    frame, name = sys._getframe(2), ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if name and module.startswith("samestep."):
            return "" if module.startswith(_READERS) else name
        if not name and not module.startswith(_BETWEEN):
            if module.partition(".")[0] in _OURS:
                return ""
            name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
        frame = frame.f_back  # type: ignore[assignment]
    return name


def is_split(program: Program) -> bool:
    """Whether the samples of a step are divided, over ranks or into micro-batches."""
    return program.step.layout.dp > 1 or program.step.num_microbatches > 1


def _samples_of(outputs: Any, samples: Any, size: int) -> int:
    """Return the number of samples on which a loss is tried: a micro-batch, or what has about so many elements, but at least two."""
    each = sum(leaf.numel() for leaf in tensors_in((outputs, samples))) // max(1, size)
    return max(2, min(max(size, _SAMPLES), _ELEMENTS // max(1, each)))


class StepTrials:
    """The trials of a run's data and loss on this rank, and the watch over its generators."""

    def __init__(
        self, assembly: Assembly, given_loss: Loss, refusals: Refusals, device: torch.device, seed: int
    ) -> None:
        """Try the steps of a prepared run; `given_loss` is the loss as the user gave it."""
        self.loss_is_tried = False
        self._data_is_tried = False
        self._given_loss, self._refusals, self._seed = given_loss, refusals, seed
        self._layout = assembly.parallel.program.step.layout
        self._is_split = is_split(assembly.parallel.program)
        self.generators = GeneratorWatch(device, own_generators(assembly.model.module, given_loss))
        self._asked: list[TriedLoss] = []
        """The trials of the loss of this step for which this rank asks."""
        self._num_unjudged = 0
        self.weights: Marks | None = None
        """The marks of the weights at the beginning of a watched step, and of the first one."""
        self.again: Repeat | None = None
        """The repetitions of a watched step, which the canary goes on with."""

    def refusing_collectives(self) -> AbstractContextManager[None]:
        """Return a context that refuses, inside, calls of torch.distributed by the user's code while the loss is tried."""
        return nullcontext() if self.loss_is_tried or self._layout.world_size == 1 else refuse_collectives()

    def check_generators(self, assembly: Assembly, step: int, samples: Callable[[], Any] | None = None) -> None:
        """Refuse a step, counted from 1, if a generator has moved since they settled: in its forwards and backwards, some of which
        `samples` returns; or without them in its update.
        """
        generator, layout, model = self.generators.moved(), self._layout, assembly.model.module
        if not generator:
            return
        if samples is None:
            reason = refusal("the optimizer", generator)
            if layout.world_size == 1:  # other layouts refuse it by their own rule
                self._refusals.remark(reason)
                return
        elif needs_mode(model):
            self._refusals.asks_again = True
            return
        else:
            path = ""
            if layout.model_ranks == 1 and not assembly.parallel.batch_norms.sends and not layout.gathers_weights:
                assembly.weights.store.settle()
                again = samples()
                with assembly.model.compiled.off():
                    path = self.generators.first_module_that_draws(model, lambda: call_model(model, again))
            reason = refusal(f"{path} in the forward" if path else "a forward, a loss or a backward", generator)
        self._refusals.add("random", "random-numbers", f"step {step}: {reason}")

    def try_data(self, assembly: Assembly, batch: StepBatch) -> None:
        """Try once whether a sample is the same one whenever and on whichever rank it is read.

        Collective over the world: every rank calls it in its first step; if one does not, the others wait.
        """
        if self._data_is_tried:
            return
        self._data_is_tried = True
        if reason := NamedSamples(assembly, batch).refusal(is_split=self._is_split):
            self._refusals.add("data", "data-differs", reason)

    def try_model_loss(self, assembly: Assembly, batch: StepBatch, seed: int) -> None:
        """Find out once what the loss is divided by that the forward returns.

        Collective over the world: every rank calls it before its first step; if one does not, the others wait.

        Raises:
            UnprovenError: nothing fits.
        """
        loss = self._given_loss
        if not isinstance(loss, ModelLoss) or loss.rule is not None:
            return
        if self._layout.cp > 1:
            loss.rule = Rule.SLICE
            return
        reason = forward_loss.find_rule(loss, assembly, batch, seed)
        if reason and self._is_split:
            raise UnprovenError("loss-not-a-sum", reason, "loss")
        if reason:  # the batch is one part, whose loss is the step's
            loss.rule, loss_within(assembly.model.module).items = Rule.RETURNED if loss.returns_sum else Rule.SAMPLES, 0
            self._refusals.remark(reason)

    def sees_new_loss(self, watch: LossWatch, total: Tensor) -> bool:
        """Return whether the loss has done what was not tried, in the sum of a micro-batch; that of a forward shows by how its graph ends."""
        if isinstance(self._given_loss, ModelLoss) and self._is_split:
            watch.pairs.add(loss_paths.last_operations(total))
        return watch.is_new or not self.loss_is_tried

    def ask_for_trial(self, assembly: Assembly, total: Tensor, outputs: Any, samples: Any, indices: Indices) -> None:
        """Ask for a trial of the loss, whose sum of a micro-batch is `total`, at the end of the step's backward, if it has one: whether it is a sum
        over the samples, and under cp over the tokens. What it reads of the model but the outputs shows here.
        """
        watch, loss = assembly.objective.watch, self._given_loss
        if isinstance(scope := assembly.objective.sums, WholeBatch):  # no sum over samples, on any rank
            if scope.graph is not None:
                self._refuse_way(self._way_beside(assembly, *scope.graph))
            scope.graph = None
            self._settle(watch, watch.pairs)
            return
        # The parts of the former were tried by forwards; the latter are sums over what they are given.
        is_of_forward, is_sliced = isinstance(loss, ModelLoss), self._layout.cp > 1
        is_other = watch.tried and (watch.is_new or not self.loss_is_tried)
        is_known = loss is cross_entropy if is_sliced else is_known_sum(loss)
        if is_known or (is_of_forward and (is_sliced or not is_other)):
            self._settle(watch, watch.pairs)
            return
        makes_logits = self._layout.loss_chunk is not None  # and so reads the head
        way = "" if makes_logits or is_of_forward else self._way_beside(assembly, total, outputs)
        if way and not (has_own_graph(assembly) and self._matters):
            self._refuse_way(way)
            self._settle(watch, watch.pairs)
            return
        # Of micro-batches that are alike the last one is tried, which the canary repeats in the first step.
        self._asked = [
            tried._replace(indices=indices) if tried.pairs == watch.pairs else tried for tried in self._asked
        ]
        if any(watch.pairs <= other.pairs for other in self._asked):
            return
        graded, pairs = tuple(leaf.requires_grad for leaf in tensors_in(outputs)), frozenset(watch.pairs)
        size = _samples_of(outputs, samples, len(indices))
        self._asked.append(TriedLoss(assembly.objective.loss, graded, way, indices, size, pairs, watch.is_new))
        self._refusals.asks = len(self._asked)

    def try_loss(self, assembly: Assembly, batch: StepBatch, asks: int) -> None:
        """Try the loss on samples of this step, as often as some rank has asked.

        Collective over the world, see [Note: collective calls].
        """
        asked, self._asked, self._refusals.asks = self._asked, [], 0
        again = self.again or Repeat(assembly, batch, self._given_loss, self._seed, weights=self.weights)
        if again.weights_were_written:
            self._refusals.remark(
                "the loss is not compared with the loss of parts of the batch, since the forward writes into weights"
            )
            self._settle(assembly.objective.watch, *(tried.pairs for tried in asked))
            return
        with again.running():
            if isinstance(self._given_loss, ModelLoss):
                self._compare_rule(self._given_loss, assembly, batch)
                self._settle(assembly.objective.watch, *(tried.pairs for tried in asked))
                return
            for tried in [*asked, *[None] * asks][:asks]:
                trial = again.try_loss(tried, again.windows(*again.agree_on_samples(tried)))
                if tried is not None:
                    self._conclude(assembly, tried, trial)

    def _settle(self, watch: LossWatch, *pairs: Iterable[Any]) -> None:
        """Note that the loss needs no further trial while it calls these functions."""
        self.loss_is_tried = True
        watch.tried.update(*pairs)

    def _compare_rule(self, loss: ModelLoss, assembly: Assembly, batch: StepBatch) -> None:
        """Refuse the step if a forward now divides its loss by something else than in the first step."""
        now = replace(loss)
        reason = forward_loss.find_rule(now, assembly, batch, self._seed)
        if now.rule not in (None, loss.rule) or (now.rule and now.labels != loss.labels):
            reason = (
                f"the forward has begun to compute another loss, which is divided by {now.rule}, and the loss of the first step was divided by "
                f"{loss.rule}. Use a loss function (outputs, batch) -> (sum, count), or one rank with the whole batch"
            )
        if reason:
            self._refusals.add("loss", "loss-not-a-sum", reason)

    def _conclude(self, assembly: Assembly, tried: TriedLoss, trial: LossTrial) -> None:
        """Note what a trial has shown, and refuse the step if it is no sum."""
        watch, is_parted = assembly.objective.watch, assembly.parallel.program.step.num_microbatches > 1
        self._num_unjudged = 0 if trial.judged else self._num_unjudged + 1
        self.loss_is_tried = trial.judged or self._num_unjudged >= _UNJUDGED
        if self.loss_is_tried:
            watch.tried |= tried.pairs
        if assembly.objective.sums.reads_ahead and is_parted:
            self.refuse_moved_counts(trial.moving)
        if trial.acts_by_calls and is_parted:
            text = "the loss acts by the number of its calls, and each micro-batch calls it, where a plain loop does once a step"
            self._refusals.add(
                "loss", "loss-not-a-sum", f"{text}. Use one micro-batch per rank, or report.step of the loop"
            )
        if trial.keeps and self._is_split:
            self._refusals.remark(
                f"the loss keeps {trial.keeps} between its calls, of the samples of this rank or micro-batch alone. Use a third result, "
                '{"name": (sum, count)}: report.values has the means over all samples of a step'
            )
        if not trial.reason:
            return
        if tried.way:
            self._refuse_way(tried.way)
            return
        what = "tokens" if trial.of_tokens else "samples"
        text = f"the loss is not a sum over the {what} of a batch: {trial.reason}"
        if not (trial.of_tokens or self._is_split):
            self._refusals.remark(
                f"{text}; so a layout that splits the batch would give another result, and is rejected"
            )
            return
        leaf = "cp=1" if trial.of_tokens else "one rank with the whole batch as its micro-batch"
        sums = f"(sum over {what}, their number), as of F.cross_entropy(outputs, labels, reduction='sum')"
        self._refusals.add("loss", "loss-not-a-sum", f"{text}. Use {sums}, or {leaf}")

    def refuse_moved_counts(self, name: str) -> None:
        """Refuse the step if the count of a term, which is named then, does not follow from the batch."""
        if name:
            self._refusals.add(
                "loss",
                "loss-count-from-outputs",
                f"the count of {name} depends on the outputs, and a step of several micro-batches needs it before their forwards. Use "
                "one micro-batch a rank, or samestep.whole_batch(loss), which is given all samples at once, or a count "
                "that follows from the batch",
            )

    @property
    def _matters(self) -> bool:
        """Whether a layout divides what the loss reads."""
        return self._is_split or self._layout.world_size > 1

    def _way_beside(self, assembly: Assembly, total: Tensor, outputs: Any) -> str:
        """Return by which other way than its outputs the loss reaches a weight of the model; empty if by none.

        Raises:
            JobError: it takes gradients of a compiled graph's gradients.
        """
        if assembly.model.compiled.num_blocks and loss_paths.differentiates_graphs(total):
            raise JobError("loss-differentiates-graph", OF_GRAPHS)
        way, remark = loss_paths.beside_outputs(total, outputs, assembly.model.module)
        if remark:
            self._refusals.remark(remark)
        return way

    def _refuse_way(self, way: str) -> None:
        if not way:
            return
        if not self._matters:
            self._refusals.remark(f"{way}; so layouts of several ranks or micro-batches are rejected")
            return
        text = f"{way}. Use a forward that returns all tensors of the loss, or one rank"
        if self._layout.zero > 1 and self._layout.world_size == self._layout.dp:
            text += ", and zero=1"
        self._refusals.add("loss", "loss-beside-outputs", text)
