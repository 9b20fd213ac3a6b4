"""The loss of a job: cross entropy, mean squared error, or a function that the user names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.building.imported import import_function
from samestep.errors import JobError, ModelError, did_you_mean, failures_of
from samestep.job import Job
from samestep.trees import fold, tree_leaves

IGNORED_LABEL = -100
"""The label value that losses do not count."""

Pair = tuple[Tensor, Tensor | int]
"""A sum, and the number of tokens or samples that it sums over."""
LossFunction = Callable[[Any, Any], Pair]
MeasureFunction = Callable[[Any, Any], dict[str, Pair]]


# -- the loss --------------------------------------------------------------------------------------


def loss_of(job: Job) -> LossFunction:
    """Return the job's loss: (outputs, batch) -> (sum, count), never a mean.

    Raises:
        JobError: there is no loss of this name.
    """
    return named_loss(job.train.loss, job.run.folder)


def named_loss(name: str, folder: str | None = None) -> LossFunction:
    """Return the loss that a word of the key `train.loss` names; a module is looked for in `folder` too.

    Raises:
        JobError: there is no loss of this name.
    """
    losses: dict[str, LossFunction] = {"cross_entropy": cross_entropy, "mse": mse}
    if name in losses:
        return losses[name]
    if ":" not in name:
        raise JobError(
            f"train.loss = {name!r} is none of {', '.join(losses)}{did_you_mean(name, losses)}, nor module:function"
        )
    return check_results_of(import_function(name, "train.loss", JobError, folder))


def check_results_of(loss: LossFunction) -> LossFunction:
    """Return the loss, whose results must be a sum that is one number as a tensor, and a count.

    Raises:
        JobError: raised by the returned function where the loss fails, or returns something else, such as a mean.
    """

    @functools.wraps(loss)
    def called(outputs: Any, batch: Any) -> Pair:
        return _pair_of(_result_of(loss, "loss", outputs, batch), loss, "loss")

    return called


def values_of(measure: Callable[[Any, Any], Any]) -> MeasureFunction:
    """Return a measure with results {"name": (sum, count), ...}; (sum, count) alone has its name, that of a lambda "measure".

    Raises:
        JobError: raised by the returned function where the measure fails, or returns something else.
    """
    own = getattr(measure, "__name__", "")
    alone = own if own.isidentifier() else "measure"

    def called(outputs: Any, batch: Any) -> dict[str, Pair]:
        result = _result_of(measure, "measure", outputs, batch)
        named = result if isinstance(result, Mapping) else {alone: result}
        return {str(name): _pair_of(value, measure, "measure") for name, value in named.items()}

    return called


def _result_of(function: Callable[[Any, Any], Any], word: str, outputs: Any, batch: Any) -> Any:
    """Return what a user's loss or measure returns.

    Raises:
        JobError: it fails.
    """
    try:
        with failures_of(f"the {word} {_name_of(function)}, a function (outputs, batch) -> (sum, count),", JobError):
            return function(outputs, batch)
    except JobError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise error.__cause__ from None
        raise


def _pair_of(result: Any, function: Callable[[Any, Any], Any], word: str) -> Pair:
    """Return a sum and its count as scalars.

    Raises:
        JobError: the result is something else.
    """
    if isinstance(result, (tuple, list)) and len(result) == 2:
        total, count = result
        if isinstance(total, Tensor) and total.numel() == 1 and not total.is_complex() and _is_number(count):
            return total.reshape(()), torch.as_tensor(count, device=total.device).reshape(())
    more = ", and so does a dict of names and pairs of these" if word == "measure" else ""
    raise JobError(
        f"the {word} {_name_of(function)} returned {_describe_form(result)}; (sum, count) works: a "
        f"tensor of one number, and the number of tokens or samples that it sums over{more}"
    )


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float | np.number) and bool(
        value >= 0
    )  # of a tensor the host would wait for its device


def _describe_form(value: Any) -> str:
    """Return a text that describes the form of a value."""

    def leaf(one: Any) -> str:
        if isinstance(one, Tensor):
            return f"a tensor {list(one.shape)}{' of complex numbers' * one.is_complex()}"
        return "None" if one is None else f"a {type(one).__name__}"

    return str(fold(value, leaf, lambda items: f"({', '.join(items)})"))


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


def cross_entropy(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the cross entropy summed over all labels but -100, in float32 at least, and the number of these labels.

    Classes are the last dimension of the logits, [B, T, V] for labels [B, T], or else the second, [B, V, ...].

    Raises:
        JobError: the shapes do not fit, or outputs or batch lack logits or labels.
    """
    logits, labels = at_least_float32(prediction_of(outputs)), class_numbers(target_of(batch), prediction_of(outputs))
    if logits.shape[:-1] == labels.shape:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    elif logits.shape[:1] + logits.shape[2:] != labels.shape:
        raise JobError(
            f"train.loss = 'cross_entropy': logits {list(logits.shape)} do not fit labels {list(labels.shape)}; "
            "[B, T, V] with [B, T], or [B, C] with [B], works"
        )
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
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


def as_number(value: Tensor | int | float, like: Tensor) -> Tensor:
    """Return a sum or a count as a scalar with the dtype and on the device of `like`."""
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype).reshape(())
    return like.new_full((), value)  # which is no copy from the host


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
