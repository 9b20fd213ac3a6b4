"""The prediction among the outputs of a model, and the target in a batch, as the losses with a name read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from samestep.errors import JobError


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, others unchanged."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def prediction_of(outputs: Any) -> Tensor:
    """Return the model's prediction: a tensor itself, its `logits`, or the first of a tuple.

    Raises:
        JobError: the outputs have another form.
    """
    prediction = getattr(outputs, "logits", outputs)
    if isinstance(prediction, Mapping):
        prediction = prediction.get("logits")
    elif isinstance(prediction, (tuple, list)) and prediction:
        prediction = prediction[0]
    if isinstance(prediction, Tensor):
        return prediction
    raise JobError(
        "loss-outputs-missing",
        f"the output of the model is a {type(outputs).__name__} without logits. Use train.loss = 'module:function', which reads it",
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


def target_in(batch: Any) -> Any:
    """Return the labels of a dict, or the second of a tuple; None where there is none."""
    if isinstance(batch, Mapping):
        return batch.get("labels")
    return batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None


def target_of(batch: Any) -> Tensor:
    """Return the target of a batch: `labels` of a dict, the second of a tuple.

    Raises:
        JobError: the batch has none.
    """
    if isinstance(target := target_in(batch), Tensor):
        return target
    raise JobError(
        "batch-labels-missing", "the batch has no labels. Use a dict with `labels`, or a tuple (inputs, labels)"
    )
