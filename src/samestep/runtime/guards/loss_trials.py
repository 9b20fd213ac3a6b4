"""The trials of one loss, while the run goes on: when it is tried, on which samples, and what its trial means for the run.

A loss that is no sum over samples is refused at the end of the step on every rank (`refusals.py`), or only remarked on where the layout
splits nothing, so that it changes no result. It is tried until samples show what it is, whenever it runs what it had not, and in watched steps.

A layout gives the loss the outputs that one device has, whole and for its own samples. What the loss finds elsewhere is what
one rank happens to hold: a feature that a hook has caught is a part of the neurons under tp, and not there at all behind
another stage; and a gradient that the loss takes through the model, as a penalty on it does, runs backward through the
boundaries of ranks in the middle of a forward. Both show in the graph of the loss: it ends at weights of the model without
passing an output.

Code that was written for DDP gathers the features of a batch, adds up a count or divides by the number of ranks. Here the
layout does that: a loss is a sum and a count of its own samples. So the functions of torch.distributed look who calls them.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from samestep.building.autograd_graph import is_end, nodes_from, tensor_of
from samestep.building.loss import OF_GRAPHS, cross_entropy, is_known_sum
from samestep.building.model import loss_within
from samestep.building.model_loss import ModelLoss, Rule
from samestep.building.torch_seams import Replaced, disable_current_modes
from samestep.errors import JobError, ModelError, UnprovenError
from samestep.examination.examine import Loss
from samestep.program.program import Program
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes.whole_batch import WholeBatch
from samestep.runtime.guards import forward_loss
from samestep.runtime.guards.divided_samples import tensors_in
from samestep.runtime.guards.loss_of_parts import LossTrial
from samestep.runtime.guards.refusals import Refusals
from samestep.runtime.guards.repeat import Repeat, TriedLoss, has_own_graph
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.step_observer import Indices
from samestep.state.snapshot import LARGEST_COPY, KeptValues

_ELEMENTS = 2**22
"""A loss is tried on about so many elements of outputs and batch."""
_SAMPLES = 8
"""So many samples are tried, if they have no more elements than that, and a whole micro-batch if it has more."""
_UNJUDGED = 8
"""After so many trials that show nothing a loss is tried again only where steps are watched."""
_LAST = 12
"""So many operations of a loss are compared."""


def is_split(program: Program) -> bool:
    """Whether the samples of a step are divided, over ranks or into micro-batches."""
    return program.step.layout.dp > 1 or program.step.num_microbatches > 1


class LossTrials:
    """The trials of one loss on this rank."""

    def __init__(self, loss: Loss, program: Program, refusals: Refusals) -> None:
        """Try the steps of a prepared run with this loss, as the user gave it."""
        self.is_tried = False
        """Whether the loss needs no trial until it runs what it has not run before; a watched step tries it anew."""
        self.loss, self._refusals, self._layout = loss, refusals, program.step.layout
        self._is_split, self._is_parted = is_split(program), program.step.num_microbatches > 1
        self._asked: list[TriedLoss] = []
        """The trials of this step for which this rank asks."""
        self._num_unjudged = 0
        self._began: KeptValues | None = None
        """What the loss keeps between its calls, as it was before a step of several micro-batches in which it is tried."""

    def begin_step(self) -> AbstractContextManager[None]:
        """Note what the loss keeps, if its trial asks for that; return the context of the step's forwards and backwards, which refuses calls of
        torch.distributed by the user's code while the loss is tried."""
        is_compared = self._is_parted and not (self.is_tried or isinstance(self.loss, ModelLoss))
        self._began = KeptValues(self.loss, LARGEST_COPY) if is_compared else None
        is_alone = self.is_tried or self._layout.world_size == 1
        return nullcontext() if is_alone else refuse_collectives()

    def find_rule(self, again: Repeat) -> None:
        """Find out once what the loss is divided by that the forward returns.

        Collective over the world: every rank calls it before its first step; if one does not, the others wait.

        Raises:
            UnprovenError: nothing fits.
        """
        loss = self.loss
        assert isinstance(loss, ModelLoss), "other losses state their counts"
        if self._layout.cp > 1:
            loss.rule = Rule.SLICE
            return
        reason = forward_loss.find_rule(loss, again)
        if reason and self._is_split:
            raise UnprovenError("loss-not-a-sum", reason, "loss")
        if reason:  # the batch is one part, whose loss is the step's
            loss.rule = Rule.RETURNED if loss.returns_sum else Rule.SAMPLES
            loss_within(again.assembly.model.module).items = 0
            self._refusals.remark(reason)

    # -- in the forwards of a step -----------------------------------------------------------------

    def ask(self, assembly: Assembly, total: Tensor, outputs: Any, samples: Any, indices: Indices) -> None:
        """Ask for a trial of the loss at the end of the step's backward, if it has done what was not tried in the sum `total` of a micro-batch:
        whether it is a sum over the samples, and under cp over the tokens. What it reads of the model but the outputs shows here.
        """
        watch, loss = assembly.objective.watch, self.loss
        if isinstance(loss, ModelLoss) and self._is_split:  # which shows by how its graph ends
            watch.pairs.add(last_operations(total))
        if self.is_tried and not watch.is_new:
            return
        if isinstance(scope := assembly.objective.sums, WholeBatch):  # no sum over samples, on any rank
            if scope.graph is not None:
                self._refuse_way(self._way_beside(assembly, *scope.graph))
            scope.graph = None
            self._settle(watch, watch.pairs)
            return
        # The parts of the former were tried by forwards; the latter are sums over what they are given.
        is_of_forward, is_sliced = isinstance(loss, ModelLoss), self._layout.cp > 1
        is_known = loss is cross_entropy if is_sliced else is_known_sum(loss)
        if is_known or (is_of_forward and (is_sliced or not watch.tried)):
            self._settle(watch, watch.pairs)
            return
        makes_logits = self._layout.loss_chunk is not None  # and so reads the head
        way = "" if makes_logits or is_of_forward else self._way_beside(assembly, total, outputs)
        if way and not (has_own_graph(assembly) and self._matters):
            self._refuse_way(way)
            self._settle(watch, watch.pairs)
            return
        # Of micro-batches that are alike the last one is tried, which a watched step repeats first.
        self._asked = [
            tried._replace(indices=indices) if tried.pairs == watch.pairs else tried for tried in self._asked
        ]
        if any(watch.pairs <= other.pairs for other in self._asked):
            return
        graded, pairs = tuple(leaf.requires_grad for leaf in tensors_in(outputs)), frozenset(watch.pairs)
        size = _samples_of(outputs, samples, len(indices))
        asked = TriedLoss(assembly.objective.loss, graded, way, indices, size, pairs, watch.is_new, self._began)
        self._asked.append(asked)
        self._refusals.asks = len(self._asked)

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

    # -- at the end of a step ----------------------------------------------------------------------

    def run(self, assembly: Assembly, again: Repeat, asks: int) -> None:
        """Try the loss on samples of this step, as often as some rank has asked.

        Collective over the world, see [Note: collective calls].
        """
        asked, self._asked, self._refusals.asks = self._asked, [], 0
        pairs = [tried.pairs for tried in asked]
        if again.weights_were_written:
            self._refusals.remark(
                "the loss is not compared with the loss of parts of the batch, since the forward writes into weights"
            )
            self._settle(assembly.objective.watch, *pairs)
            return
        with again.running():
            if isinstance(self.loss, ModelLoss):
                self._compare_rule(self.loss, again)
                self._settle(assembly.objective.watch, *pairs)
                return
            for tried in [*asked, *[None] * asks][:asks]:
                trial = again.try_loss(tried)
                if tried is not None:
                    self._conclude(assembly, tried, trial)

    def _settle(self, watch: LossWatch, *pairs: Iterable[Any]) -> None:
        """Note that the loss needs no further trial while it calls these functions."""
        self.is_tried = True
        watch.tried.update(*pairs)

    def _compare_rule(self, loss: ModelLoss, again: Repeat) -> None:
        """Refuse the step if a forward now divides its loss by something else than in the first step."""
        now = copy.copy(loss)
        reason = forward_loss.find_rule(now, again)
        if not reason and (now.rule, now.labels) != (loss.rule, loss.labels):
            reason = (
                f"the forward has begun to compute another loss, which is divided by {now.divisor}, and the loss of the first step was divided "
                f"by {loss.divisor}. Use a loss function (outputs, batch) -> (sum, count), or one rank with the whole batch"
            )
        if reason:
            self._refusals.add("loss", "loss-not-a-sum", reason)

    def _conclude(self, assembly: Assembly, tried: TriedLoss, trial: LossTrial) -> None:
        """Note what a trial has shown, and refuse the step if it is no sum."""
        watch = assembly.objective.watch
        self._num_unjudged = 0 if trial.judged else self._num_unjudged + 1
        self.is_tried = trial.judged or self._num_unjudged >= _UNJUDGED
        if self.is_tried:
            watch.tried |= tried.pairs
        if assembly.objective.sums.reads_ahead and self._is_parted:
            self.refuse_moved_counts(trial.moving)
        if trial.acts_by_calls and self._is_parted:
            text = "the loss acts by the number of its calls, and each micro-batch calls it, where a plain loop does once a step"
            self._refusals.add(
                "loss",
                "loss-not-a-sum",
                f"{text}. Use one micro-batch per rank, or a number that the loop sets before each step",
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
        if ". Use " not in text:
            whole = (
                "cp=1"
                if trial.of_tokens
                else "samestep.whole_batch(loss), which is given all samples of the step at once"
            )
            text += f". Use (sum over {what}, their number), as of F.cross_entropy(outputs, labels, reduction='sum'), or {whole}"
        self._refusals.add("loss", "loss-not-a-sum", text)

    # -- ways beside the outputs -------------------------------------------------------------------

    @property
    def _matters(self) -> bool:
        """Whether a layout divides what the loss reads."""
        return self._is_split or self._layout.world_size > 1

    def _way_beside(self, assembly: Assembly, total: Tensor, outputs: Any) -> str:
        """Return by which other way than its outputs the loss reaches a weight of the model; empty if by none.

        Raises:
            JobError: it takes gradients of a compiled graph's gradients.
        """
        if assembly.model.compiled.num_blocks and _differentiates_graphs(total):
            raise JobError("loss-differentiates-graph", OF_GRAPHS)
        way, remark = beside_outputs(total, outputs, assembly.model.module)
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


def _samples_of(outputs: Any, samples: Any, size: int) -> int:
    """Return the number of samples on which a loss is tried: a micro-batch, or what has about so many elements, but at least two."""
    each = sum(leaf.numel() for leaf in tensors_in((outputs, samples))) // max(1, size)
    return max(2, min(max(size, _SAMPLES), _ELEMENTS // max(1, each)))


def beside_outputs(total: Tensor, outputs: Any, model: nn.Module) -> tuple[str, str]:
    """Return the refusal of a loss that reaches a weight of the model by a path around the outputs, and a remark on one with a trainable
    weight that the optimizer of the run does not have; empty if there is none.
    """
    ends = {get_gradient_edge(tensor).node for tensor in tensors_in(outputs) if tensor.requires_grad}
    leaves = [node for node in nodes_from([get_gradient_edge(total).node], known=ends) if is_end(node)]
    names = {id(param): name for name, param in model.named_parameters()} if leaves else {}
    of_model = nodes_from(ends) if leaves else ()
    for node in leaves:
        name = names.get(id(tensor_of(node)), "")
        if name or node in of_model:
            return (
                f"the loss depends on {name or 'a weight'} of the model, but not through the outputs of its forward: for example through a "
                "tensor that a hook keeps, or by torch.autograd.grad through the model"
            ), ""
    weight = next((weight for weight in map(tensor_of, leaves) if isinstance(weight, nn.Parameter)), None)
    return "", "" if weight is None else (
        f"the loss has a weight of its own, of shape {list(weight.shape)}, which is not a part of the model and is not trained. To train it, "
        'parallelize both, {"model": ..., "loss": ...}, with a forward that returns it'
    )


def last_operations(total: Tensor) -> tuple[str, ...]:
    """Return the operations by which a loss ends, and which of them divide by the count by which it was multiplied: others once a forward
    computes another loss. Numbers on an accelerator are not looked at, since the host would wait for them.
    """
    last = [] if total.grad_fn is None else [total.grad_fn]
    for node in last:  # which grows
        nodes = [operand for operand, _ in node.next_functions if operand is not None and operand not in last]
        last += nodes[: _LAST - len(last)]
    with disable_current_modes():  # a mode is given the numbers of Python
        numbers = [_operand_of(node) for node in last]
    counts = {number for node, number in zip(last, numbers, strict=True) if node.name().startswith("Mul")}
    return tuple(f"{node.name()} {number in counts}" for node, number in zip(last, numbers, strict=True))


def _operand_of(node: Any) -> float | None:
    """Return the number by which an operation multiplies or divides; None if there is none on the host, or if a checkpoint would run its
    forward again to return it.
    """
    if getattr(getattr(node, "_raw_saved_other", None), "unpack_hook", None) is not None:
        return None
    other = getattr(node, "_saved_other", None)
    return float(other) if isinstance(other, Tensor) and other.numel() == 1 and other.device.type == "cpu" else None


def _differentiates_graphs(total: Tensor) -> bool:
    """Return whether a loss depends on gradients that it has taken through a graph of torch.compile, which torch cannot differentiate again."""
    start = get_gradient_edge(total).node
    return any(node.name().startswith("CompiledFunctionBackwardBackward") for node in nodes_from([start]))


# -- calls of torch.distributed by the user's code -------------------------------------------------

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


def refuse_collectives() -> Replaced:
    """Refuse, inside, calls of torch.distributed by the user's code.

    Raises:
        ModelError: there is one.
    """
    return Replaced(*((dist, name, functools.partial(functools.partial, _call, name)) for name in _CALLS))


def _call(name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if caller := _calling_user():
        raise ModelError(
            "own-collective",
            f"{caller} calls torch.distributed.{name}, so that the result would depend on the layout: it sees the samples of its "
            "own micro-batch, and the layout adds up sums and counts. Remove the call",
        )
    return function(*args, **named)


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
