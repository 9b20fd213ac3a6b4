"""The loss of a job: cross entropy, mean squared error, or a function that the user names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.building.loss_result import IGNORED_LABEL as IGNORED_LABEL
from samestep.building.loss_result import Amount, Loss, LossResult, describe_form, loss_result, measured
from samestep.building.model_loss import model_loss
from samestep.building.over_samples import scoped
from samestep.building.predictions import at_least_float32, prediction_of, target_of
from samestep.building.torch_losses import TorchLoss, torch_loss
from samestep.datasets.imported import import_function
from samestep.errors import DataError, JobError, ModelError, did_you_mean, failures_of
from samestep.job import Job
from samestep.trees import tensors_in, tree_leaves

# -- the loss --------------------------------------------------------------------------------------


def loss_of(job: Job) -> Loss:
    """Return the job's loss: (outputs, batch) -> (sum, count), or another form of `loss_result`, never a mean.

    Raises:
        JobError: there is no loss of this name, or torch's loss of this name has no known count.
    """
    return loss_from(job.train.loss, job.run.folder, functools.partial(scoped, job=job))


def loss_from(loss: Loss | str, folder: str | None = None, scope: Callable[[Loss], Loss] = lambda loss: loss) -> Loss:
    """Return a loss as a function (outputs, batch) -> (sum, count): of a function, of a loss of torch, or of a word of `train.loss`.

    A module is also looked for in `folder`. `scope` marks a loss over the whole batch.

    Raises:
        JobError: there is no loss of this name, or torch's loss has no known count.
    """
    if not isinstance(loss, str):
        return scope(torch_loss(loss))
    if loss == "model":
        return model_loss()
    if loss in _BY_NAME:
        return scope(_BY_NAME[loss])
    if ":" not in loss:
        words = (*_BY_NAME, "model")
        raise JobError(
            "none-nor-module-function",
            f"train.loss = {loss!r} must be one of {', '.join(words)}{did_you_mean(loss, words)}, or module:function",
        )
    return check_results_of(scope(torch_loss(import_function(loss, "train.loss", JobError, folder))))


CallOf = Callable[[Loss, Callable[[], Any], str], LossResult]
"""Makes a call of a loss, which it is given too, and returns its result; the last is what names the loss in errors."""


def check_results_of(loss: Loss, call_of: CallOf | None = None) -> Callable[[Any, Any], LossResult]:
    """Return the loss, whose results are in one form.

    Raises:
        JobError: raised by the returned function where the loss fails, or returns something else, such as a mean.
    """

    what = f"the loss {_name_of(loss)}"

    @functools.wraps(loss)
    def called(outputs: Any, batch: Any) -> LossResult:
        if call_of is None:
            return loss_result(_result_of(loss, "loss", outputs, batch), what)
        return call_of(loss, lambda: _result_of(loss, "loss", outputs, batch), what)

    return called


def values_of(measure: Loss) -> Callable[[Any, Any], Mapping[str, Amount]]:
    """Return a measure with results {"name": (sum, count), ...}; (sum, count) alone has its name, that of a lambda "measure".

    Raises:
        JobError: raised by the returned function where the measure fails, or returns something else.
    """
    name = getattr(measure, "__name__", "")
    alone = name if name.isidentifier() else "measure"

    def called(outputs: Any, batch: Any) -> Mapping[str, Amount]:
        result = _result_of(measure, "measure", outputs, batch)
        return measured(result if isinstance(result, Mapping) else {alone: result}, f"the measure {_name_of(measure)}")

    return called


def _result_of(function: Loss, word: str, outputs: Any, batch: Any) -> Any:
    """Return what a user's loss or measure returns.

    Raises:
        JobError: it fails, or takes gradients through a model whose blocks torch has compiled.
    """
    try:
        return function(outputs, batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if any(words in str(error) for words in _TWICE):
            raise JobError("loss-differentiates-graph", OF_GRAPHS) from error
        name, form = _name_of(function), describe_form(batch)
        if isinstance(error, IndexError) and (words := _TARGET.match(str(error))):
            label = int(words[1])
            rows = (labels == label for labels in tensors_in(batch) if labels.dim() and not labels.is_floating_point())
            row = next((int(is_label.nonzero()[0][0]) for is_label in rows if is_label.any()), None)
            if row is not None:
                raise LabelError(f"the {word} {name}", row, label) from error
        with failures_of(
            f"the {word} {name}, a function (outputs, batch) -> (sum, count) with batch = {form},", JobError
        ):
            raise


_TWICE = ("double backward", "create_graph=False")
"""Words of torch's errors where code differentiates a compiled graph again."""
_TARGET = re.compile(r"Target (-?\d+) is out of bounds")
"""The text of torch's losses for a label that is no class."""
OF_GRAPHS = (
    "the loss takes gradients through the model, and a graph of run.compile is differentiated once, by the step. Set "
    "run.compile = 'none'"
)
"""The refusal of a loss that does."""


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def with_graph(total: Tensor, result: LossResult, outputs: Any) -> Tensor:
    """Return a sum of the result of a loss with a graph for a backward; a constant sum, of a part without labels, adds no gradient.

    Raises:
        JobError: the sum does not depend on the outputs, though it counts something.
        ModelError: no output depends on a parameter that is trained.
    """
    if total.requires_grad:
        return total
    roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not roots:
        raise ModelError(
            "nothing-to-train",
            "no output of the model depends on a parameter that takes a gradient, so nothing is trained. Use "
            "requires_grad_(True) on one that the forward uses",
        )
    if float(result.counted):
        raise JobError(
            "nothing-to-train",
            "the sum that the loss returned has no gradient, so nothing is trained. Use a loss without .detach(), .item(), "
            "argmax and torch.no_grad()",
        )
    return total + sum(root.flatten()[:0].sum().to(total.dtype) for root in roots)


RunFunction = Callable[..., Any]
"""Calls a function of tensors, which it is given first, with the arguments behind it: as it is, or as a graph of a compiler."""


def run_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Return the function's result: the `RunFunction` of a run that compiles nothing."""
    return function(*args)


def cross_entropy(outputs: Any, batch: Any, run: RunFunction = run_uncompiled) -> tuple[Tensor, Tensor]:
    """Return the cross entropy summed over all labels but -100, in float32 at least, and the number of these labels.

    `run` calls what a step computes of logits and labels. Classes are the last dimension of the logits, [B, T, V] for labels [B, T], or else the second, [B, V, ...].

    Raises:
        JobError: the shapes do not fit, or fit in two ways, or outputs or batch lack logits or labels.
        DataError: a label is no class.
    """
    logits = prediction_of(outputs)
    labels = class_numbers(target_of(batch), logits)
    shape, second = logits.shape, logits.shape[:1] + logits.shape[2:]
    if shape[:-1] == labels.shape == second and len(shape) > 2 and not hasattr(outputs, "logits"):
        raise JobError(
            "cross-entropy-shapes",
            f"train.loss = 'cross_entropy': classes may be the last or the second dimension of logits {list(shape)}, with labels "
            f"{list(labels.shape)}. Use a loss of your own that names it, as F.cross_entropy(outputs, labels, reduction='sum') with the "
            "number of labels, or an output with .logits, with the classes in its last dimension",
        )
    if shape[:-1] == labels.shape:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    elif second != labels.shape:
        raise JobError(
            "cross-entropy-shapes",
            f"train.loss = 'cross_entropy': logits {list(logits.shape)} do not fit labels {list(labels.shape)}. Use "
            "[B, T, V] with [B, T], or [B, C] with [B]",
        )
    run = run if torch.is_grad_enabled() else run_uncompiled
    try:
        total, count = run(_summed, logits, labels)
    except IndexError:  # of a CPU; on a GPU the host would have to wait for it
        raise _outside(target_of(batch), shape[-1] if shape[:-1] == target_of(batch).shape else shape[1]) from None
    return total, count


class LabelError(DataError):
    """A label is not a class of the outputs."""

    def __init__(
        self, loss: str, row: int, label: int, num_classes: int | None = None, index: int | None = None
    ) -> None:
        """Take the row of the sample in its micro-batch, and its index in the data set if it is known."""
        sample = f"sample {row} of its micro-batch" if index is None else f"sample {index}"
        classes = "which is not a class" if num_classes is None else f"and the classes are 0 to {num_classes - 1}"
        super().__init__(
            "label-out-of-range",
            f"{loss}: {sample} has the label {label}, {classes}. Use labels among the classes, and {IGNORED_LABEL} for labels that do not "
            "count",
        )
        self._loss, self._row, self._label, self._num_classes = loss, row, label, num_classes

    def of(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> LabelError:
        """Return the error with the sample's index in the data set; `indices` are those of the micro-batch."""
        index = int(indices[self._row]) if self._row < len(indices) else None
        return LabelError(self._loss, self._row, self._label, self._num_classes, index)


def _outside(labels: Tensor, num_classes: int) -> LabelError:
    """Return the refusal of the first label that is no class."""
    place = ((labels != IGNORED_LABEL) & ((labels < 0) | (labels >= num_classes))).nonzero()[0].tolist()
    return LabelError("train.loss = 'cross_entropy'", place[0], int(labels[tuple(place)]), num_classes)


def _summed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy summed over labels, and their number."""
    total = F.cross_entropy(at_least_float32(logits), labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return total, (labels != IGNORED_LABEL).sum()


def class_numbers(labels: Tensor, logits: Tensor) -> Tensor:
    """Return labels as int64, as torch takes them.

    Raises:
        JobError: they are no whole numbers.
    """
    if labels.is_floating_point() or labels.is_complex():
        raise JobError(
            "cross-entropy-shapes",
            f"train.loss = 'cross_entropy': labels {list(labels.shape)} are {str(labels.dtype).removeprefix('torch.')}, and numbers of classes "
            f"are whole. Use labels.long(). For probabilities of the shape of the logits {list(logits.shape)}, use a loss of your own",
        )
    return labels.long()


def right_answers(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return how many samples have their largest logit at their class, and the number of labels but -100.

    Logits are [B, C] for classes [B].
    """
    logits, labels = prediction_of(outputs), target_of(batch)
    is_counted = labels != IGNORED_LABEL
    return ((logits.argmax(-1) == labels) & is_counted).sum(), is_counted.sum()


mse = torch_loss(F.mse_loss)
"""The mean squared error of a job."""
_BY_NAME = {"cross_entropy": cross_entropy, "mse": mse}


def is_known_sum(loss: Loss) -> bool:
    """Return whether a loss is a sum over the samples and tokens that it is given, and reads nothing else."""
    return loss is cross_entropy or (isinstance(loss, TorchLoss) and loss.is_known)
