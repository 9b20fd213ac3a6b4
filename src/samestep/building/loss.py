"""The loss of a job: cross entropy, mean squared error, or a function that the user names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.building.imported import import_function
from samestep.building.loss_result import IGNORED_LABEL as IGNORED_LABEL
from samestep.building.loss_result import Amount, Loss, LossResult, loss_result, measured
from samestep.building.loss_scope import scoped
from samestep.building.model_loss import model_loss
from samestep.errors import JobError, ModelError, did_you_mean, failures_of
from samestep.job import Job
from samestep.trees import tree_leaves

# -- the loss --------------------------------------------------------------------------------------


def loss_of(job: Job) -> Loss:
    """Return the job's loss: (outputs, batch) -> (sum, count), or another form of `loss_result`, never a mean.

    Raises:
        JobError: there is no loss of this name.
    """
    return named_loss(job.train.loss, job.run.folder, functools.partial(scoped, job=job))


def named_loss(name: str, folder: str | None = None, scope: Callable[[Loss], Loss] = lambda loss: loss) -> Loss:
    """Return the loss that a word of the key `train.loss` names; a module is looked for in `folder` too.

    `scope` marks a loss that is one of the whole batch.

    Raises:
        JobError: there is no loss of this name.
    """
    if name == "model":
        return model_loss()
    losses = {loss.__name__: loss for loss in OWN_SUMS}
    if name in losses:
        return scope(losses[name])
    if ":" not in name:
        raise JobError(
            f"train.loss = {name!r} is none of {', '.join((*losses, 'model'))}{did_you_mean(name, (*losses, 'model'))}, nor module:function"
        )
    return check_results_of(scope(import_function(name, "train.loss", JobError, folder)))


def check_results_of(loss: Loss) -> Callable[[Any, Any], LossResult]:
    """Return the loss, whose results are in one form.

    Raises:
        JobError: raised by the returned function where the loss fails, or returns something else, such as a mean.
    """

    what = f"the loss {_name_of(loss)}"

    @functools.wraps(loss)
    def called(outputs: Any, batch: Any) -> LossResult:
        return loss_result(_result_of(loss, "loss", outputs, batch), what)

    return called


def values_of(measure: Loss) -> Callable[[Any, Any], Mapping[str, Amount]]:
    """Return a measure with results {"name": (sum, count), ...}; (sum, count) alone has its name, that of a lambda "measure".

    Raises:
        JobError: raised by the returned function where the measure fails, or returns something else.
    """
    own = getattr(measure, "__name__", "")
    alone = own if own.isidentifier() else "measure"

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
            raise JobError(OF_GRAPHS) from error
        with failures_of(f"the {word} {_name_of(function)}, a function (outputs, batch) -> (sum, count),", JobError):
            raise


_TWICE = ("double backward", "create_graph=False")
"""Words of torch's errors where code differentiates a compiled graph again."""
OF_GRAPHS = (
    "the loss takes gradients through the model, and a graph of run.compile is differentiated once, by the step: "
    "run.compile = 'none' works"
)
"""The refusal of a loss that does."""


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def with_graph(total: Tensor, count: Tensor | int, outputs: Any) -> Tensor:
    """Return the sum of a loss with a graph for a backward; a constant sum, of a part without labels, adds no gradient.

    Raises:
        JobError: the sum does not depend on the outputs, though it counts something.
        ModelError: no output depends on a parameter that is trained.
    """
    if total.requires_grad:
        return total
    roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not roots:
        raise ModelError(
            "no output of the model depends on a parameter that takes a gradient, so nothing is trained: "
            "requires_grad_(True) on one that the forward uses works"
        )
    if float(count):
        raise JobError(
            "the sum that the loss returned has no gradient, so nothing is trained: a loss without .detach(), .item(), "
            "argmax and torch.no_grad() works"
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
        JobError: the shapes do not fit, or outputs or batch lack logits or labels.
    """
    logits, labels = prediction_of(outputs), class_numbers(target_of(batch), prediction_of(outputs))
    if logits.shape[:-1] == labels.shape:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    elif logits.shape[:1] + logits.shape[2:] != labels.shape:
        raise JobError(
            f"train.loss = 'cross_entropy': logits {list(logits.shape)} do not fit labels {list(labels.shape)}; "
            "[B, T, V] with [B, T], or [B, C] with [B], works"
        )
    run = run if torch.is_grad_enabled() else run_uncompiled
    total, count = run(_summed, logits, labels)
    return total, count


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
            f"train.loss = 'cross_entropy': labels {list(labels.shape)} are {str(labels.dtype).removeprefix('torch.')}, and numbers of classes "
            f"are whole: labels.long() works, and of probabilities, as logits {list(logits.shape)} are, a loss of your own"
        )
    return labels.long()


def right_answers(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return how many samples have their largest logit at their class, and the number of labels but -100.

    Logits are [B, C] for classes [B].
    """
    logits, labels = prediction_of(outputs), target_of(batch)
    is_counted = labels != IGNORED_LABEL
    return ((logits.argmax(-1) == labels) & is_counted).sum(), is_counted.sum()


def mse(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of squared errors, in float32 at least, and the number of elements; both tensors have one shape.

    Raises:
        JobError: the shapes differ, or outputs or batch lack prediction or target.
    """
    prediction, target = at_least_float32(prediction_of(outputs)), target_of(batch)
    if prediction.shape != target.shape:
        raise JobError(
            f"train.loss = 'mse': the model gives {list(prediction.shape)}, the target is {list(target.shape)}; "
            "equal shapes work"
        )
    total = F.mse_loss(prediction, target.to(prediction.dtype), reduction="sum")
    return total, torch.full((), target.numel(), device=total.device)


OWN_SUMS: tuple[Loss, ...] = (cross_entropy, mse)
"""The losses of samestep, which are sums over the samples and tokens that they are given, and read nothing else."""


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, others unchanged."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def prediction_of(outputs: Any) -> Tensor:
    """Return the model's prediction: a tensor itself, its `logits`, or the first of a tuple.

    Raises:
        JobError: the outputs have another form.
    """
    found = getattr(outputs, "logits", outputs)
    if isinstance(found, Mapping):
        found = found.get("logits")
    elif isinstance(found, (tuple, list)) and found:
        found = found[0]
    if isinstance(found, Tensor):
        return found
    raise JobError(
        f"the model gives a {type(outputs).__name__} without logits; train.loss = 'module:function' can read it"
    )


def with_prediction(outputs: Any, prediction: Tensor) -> Any:
    """Return outputs with another prediction in the place of `prediction_of(outputs)`."""
    if isinstance(outputs, Tensor):
        return prediction
    if isinstance(getattr(outputs, "logits", None), Tensor):
        outputs.logits = prediction
        return outputs
    inner = getattr(outputs, "logits", outputs)
    if isinstance(inner, Mapping):
        return {**inner, "logits": prediction}
    return prediction, *inner[1:]


def target_of(batch: Any) -> Tensor:
    """Return the target of a batch: `labels` of a dict, the second of a tuple.

    Raises:
        JobError: the batch has none.
    """
    found = None
    if isinstance(batch, Mapping):
        found = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[1]
    if isinstance(found, Tensor):
        return found
    raise JobError("the batch has no labels: a dict with `labels`, or a tuple (inputs, labels), works")
