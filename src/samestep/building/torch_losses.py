"""Losses of torch as sums with their counts: each class of `torch.nn.modules.loss` and its function, with torch's own shapes.

A mean over a part of the batch is no part of the mean over all of it. So torch computes the losses with `reduction="none"`, and a step gets

    sum      of these losses
    count    the number by which torch divides this sum: elements, samples, or the weights of the labels that count

The quotient over all ranks and micro-batches is the number that torch returns for the full batch. With `reduction="sum"` a step divides by
nothing. A loss of the user's own that returns a mean gets its count from `mean_over`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep import calls
from samestep.building.loss_result import IGNORED_LABEL, Amount, Loss
from samestep.building.model_loss import ModelLoss, labels_of
from samestep.building.over_samples import num_samples
from samestep.building.predictions import at_least_float32, prediction_of, target_of
from samestep.errors import JobError

Inputs = Mapping[str, Tensor]
"""The tensors of a call by the names that torch's function gives them."""
Count = Tensor | int
_LEGACY = ("size_average", "reduce")

# -- what torch divides by -------------------------------------------------------------------------


def _elements(losses: Tensor, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Tensor, Count]:
    """Return the sum and the number of the losses."""
    return losses.sum(), losses.numel()


def _labels(losses: Tensor, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Tensor, Count]:
    """Return the sum over labels and the weights of those that count; probabilities as targets all count."""
    labels, weight = inputs["target"], options.get("weight")
    if labels.is_floating_point():
        return losses.sum(), losses.numel()
    is_counted = labels != options.get("ignore_index", IGNORED_LABEL)
    if weight is None:
        return losses.sum(), is_counted.sum()
    return losses.sum(), (weight[labels.where(is_counted, 0)] * is_counted).sum()


def _divergence(losses: Tensor, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Tensor, Count]:
    """Return the sum over elements, and their number or with `batchmean` that of the samples."""
    is_by_sample = options["reduction"] == "batchmean"
    return losses.sum(), len(inputs["input"]) if is_by_sample else losses.numel()


def _sequences(losses: Tensor, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Tensor, Count]:
    """Return the sum of the losses per label of the target, and the number of sequences."""
    return (losses / inputs["target_lengths"].to(losses.device).clamp(min=1)).sum(), losses.numel()


@dataclass(frozen=True, slots=True)
class _Form:
    """A loss of torch: its function, the inputs that the outputs and the batch give, and the mean that it returns."""

    function: Callable[..., Tensor]
    predictions: tuple[str, ...] = ("input",)
    targets: tuple[str, ...] = ("target",)
    mean: Callable[[Tensor, Inputs, Mapping[str, Any]], tuple[Tensor, Count]] = _elements
    is_by_element: bool = False
    """Whether it pairs the elements of prediction and target, so that both have the same number of dimensions."""

    @property
    def options(self) -> list[str]:
        """The names of its options."""
        names = inspect.signature(self.function).parameters
        return [name for name in names if name not in (*self.predictions, *self.targets, *_LEGACY)]


_TRIPLET = ("anchor", "positive", "negative")
_FORMS: Mapping[type[nn.Module], _Form] = {
    nn.L1Loss: _Form(F.l1_loss, is_by_element=True),
    nn.MSELoss: _Form(F.mse_loss, is_by_element=True),
    nn.SmoothL1Loss: _Form(F.smooth_l1_loss, is_by_element=True),
    nn.HuberLoss: _Form(F.huber_loss, is_by_element=True),
    nn.PoissonNLLLoss: _Form(F.poisson_nll_loss, is_by_element=True),
    nn.GaussianNLLLoss: _Form(F.gaussian_nll_loss, predictions=("input", "var"), is_by_element=True),
    nn.KLDivLoss: _Form(F.kl_div, mean=_divergence, is_by_element=True),
    nn.BCELoss: _Form(F.binary_cross_entropy, is_by_element=True),
    nn.BCEWithLogitsLoss: _Form(F.binary_cross_entropy_with_logits, is_by_element=True),
    nn.HingeEmbeddingLoss: _Form(F.hinge_embedding_loss, is_by_element=True),
    nn.SoftMarginLoss: _Form(F.soft_margin_loss, is_by_element=True),
    nn.CrossEntropyLoss: _Form(F.cross_entropy, mean=_labels),
    nn.NLLLoss: _Form(F.nll_loss, mean=_labels),
    nn.MultiMarginLoss: _Form(F.multi_margin_loss),
    nn.MultiLabelMarginLoss: _Form(F.multilabel_margin_loss),
    nn.MultiLabelSoftMarginLoss: _Form(F.multilabel_soft_margin_loss),
    nn.CosineEmbeddingLoss: _Form(F.cosine_embedding_loss, predictions=("input1", "input2")),
    nn.MarginRankingLoss: _Form(F.margin_ranking_loss, predictions=("input1", "input2")),
    nn.TripletMarginLoss: _Form(F.triplet_margin_loss, predictions=_TRIPLET, targets=()),
    nn.TripletMarginWithDistanceLoss: _Form(F.triplet_margin_with_distance_loss, predictions=_TRIPLET, targets=()),
    nn.CTCLoss: _Form(
        F.ctc_loss, predictions=("log_probs",), targets=("targets", "input_lengths", "target_lengths"), mean=_sequences
    ),
}
_BY_FUNCTION: Mapping[Any, _Form] = {form.function: form for form in _FORMS.values()} | {
    kind.forward: form for kind, form in _FORMS.items()
}


# -- a loss of torch -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TorchLoss:
    """A loss of torch as a function (outputs, batch) -> (sum, count)."""

    loss: Callable[..., Any]
    """The user's module, function or `functools.partial`."""
    form: _Form = field(compare=False)

    def __post_init__(self) -> None:
        name = type(self.loss).__name__ if isinstance(self.loss, nn.Module) else self.form.function.__name__
        object.__setattr__(self, "__name__", name)
        object.__setattr__(self, "__qualname__", name)

    @property
    def options(self) -> dict[str, Any]:
        """The options of torch's function, as they are now."""
        if isinstance(self.loss, nn.Module):
            return {name: getattr(self.loss, name) for name in self.form.options if hasattr(self.loss, name)}
        return {"reduction": "mean", **(self.loss.keywords if isinstance(self.loss, functools.partial) else {})}

    @property
    def is_known(self) -> bool:
        """Whether torch's code alone computes it, and no distance of the user's."""
        return "distance_function" not in self.form.options

    @property
    def is_plain_sum(self) -> bool:
        """Whether a step divides the sum by nothing."""
        return bool(self.options["reduction"] == "sum")

    def __call__(self, outputs: Any, batch: Any) -> Amount:
        """Return the sum and the count of a part of a batch.

        Raises:
            JobError: outputs or batch lack an input of torch's function, or the shapes pair different samples.
        """
        inputs = _inputs(self.form, outputs, batch)
        device = inputs[self.form.predictions[0]].device
        options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in self.options.items()}
        losses = self.form.function(**inputs, **{**options, "reduction": "none"})
        total, count = self.form.mean(losses, inputs, options)
        if self.is_plain_sum:
            total, count = losses.sum(), num_samples(batch)
        return total, count if isinstance(count, Tensor) else torch.full((), count, device=device)


def torch_loss(loss: Callable[..., Any]) -> Loss:
    """Return a loss of torch as exact sums with counts: a class of `torch.nn.modules.loss`, its instance, its function, or a
    `functools.partial` of the function with options. Any other loss is returned as it is.

    Raises:
        JobError: the count of torch's loss is unknown.
    """
    if isinstance(loss, type) and loss in _FORMS:
        loss = loss()
    function: Any = loss.func if isinstance(loss, functools.partial) and not loss.args else loss
    if isinstance(loss, nn.Module):
        function = type(loss).forward
    form = _BY_FUNCTION.get(function)
    if form is None:
        home = type(loss).__module__ if isinstance(loss, nn.Module) else str(getattr(function, "__module__", ""))
        if home.startswith(("torch.nn.", "torch._C._nn")):
            _reject(loss, "a loss of torch with an unknown count")
        return loss
    wrapped = TorchLoss(loss, form)
    if legacy := [name for name in _LEGACY if name in wrapped.options]:
        _reject(loss, f"an option {legacy[0]} that torch has replaced by reduction")
    if wrapped.options["reduction"] == "none":
        _reject(loss, "reduction='none', which gives no number to minimize. Use reduction='mean' or 'sum'")
    return wrapped


def _reject(loss: Any, reason: str) -> None:
    name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", "functools.partial")
    raise JobError(
        "loss-not-a-pair",
        f"loss={name} is {reason}. Use a function (outputs, batch) -> (sum, count), or samestep.mean_over for a mean over samples or tokens",
    )


def _inputs(form: _Form, outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Return the inputs of torch's function by name.

    Raises:
        JobError: outputs or batch lack one, or the shapes pair different samples.
    """
    name = form.function.__name__
    if len(form.predictions) == 1:
        inputs = {form.predictions[0]: prediction_of(outputs)}
    else:
        inputs = _by_name(outputs, form.predictions, f"F.{name}: the outputs")
    inputs = {name: at_least_float32(tensor) for name, tensor in inputs.items()}
    if form.targets:
        first, *others = form.targets
        inputs[first] = target_of(batch)
        rest = batch if isinstance(batch, Mapping) else batch[2:]
        inputs |= _by_name(rest, others, f"F.{name}: the batch after its labels") if others else {}
    first_prediction = inputs[form.predictions[0]]
    if form.is_by_element and first_prediction.dim() != inputs["target"].dim():
        raise JobError(
            "cross-entropy-shapes",
            f"F.{name}: the model gives {list(first_prediction.shape)} and the target is {list(inputs['target'].shape)}, so torch would "
            "pair each sample with all others. Use equal shapes, for example labels[:, None]",
        )
    return {name: x.to(first_prediction.dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def _by_name(values: Any, names: tuple[str, ...] | list[str], what: str) -> dict[str, Tensor]:
    """Return tensors by name, of a dict or in their order.

    Raises:
        JobError: some are missing.
    """
    if isinstance(values, Mapping) and all(isinstance(values.get(name), Tensor) for name in names):
        return {name: values[name] for name in names}
    if isinstance(values, tuple | list) and len(values) == len(names):
        return dict(zip(names, values, strict=True))
    raise JobError(
        "loss-outputs-missing",
        f"{what} must have {', '.join(names)}, as a dict or a tuple in this order, got a {type(values).__name__}",
    )


# -- a mean of the user's own ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Mean:
    """A loss of the user's own that returns a mean, as a function (outputs, batch) -> (sum, count)."""

    over: Literal["samples", "tokens"]
    loss: Loss
    ignore_index: int

    def __call__(self, outputs: Any, batch: Any) -> tuple[Tensor, Count]:
        """Return the sum and the count of a part of a batch.

        Raises:
            JobError: the loss returns no scalar, or the batch has no labels.
        """
        mean = self.loss(outputs, batch)
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            raise JobError(
                "loss-not-a-pair",
                f"samestep.mean_over needs a loss that returns a mean, a tensor of one number, and it returned a {type(mean).__name__}",
            )
        if self.over == "samples":
            size = num_samples(batch)
            return mean.reshape(()) * size, size
        labels = labels_of(batch)
        if labels is None:
            raise JobError(
                "batch-labels-missing",
                'samestep.mean_over("tokens") counts the labels of the batch, and it has none that are int64, int32 or int16. Use a dict '
                "with `labels`, or a tuple (inputs, labels)",
            )
        count = labels.ne(self.ignore_index).sum()
        if not count.is_meta and not count:  # the mean over nothing is nan
            return torch.zeros_like(mean.detach()).reshape(()), count
        return mean.reshape(()) * count, count


@calls.checked
def mean_over(
    over: Literal["samples", "tokens"], loss: Loss | Literal["model"], *, ignore_index: int = IGNORED_LABEL
) -> Loss:
    """Return a loss of (outputs, batch) that returns a mean, as an exact sum with its count.

    A step tests it on parts of its first batch, also with masked labels, so that a mean over something else is rejected.

    Args:
        over: "samples", or "tokens" for the labels of the batch but `ignore_index`.
        loss: a function of (outputs, batch) that returns a mean as a scalar tensor, or "model" for the mean that the forward returns.
        ignore_index: the label that the mean leaves out.

    Raises:
        JobError: `over` is another word, or the loss is not a function.
    """
    of_model = loss == "model" and ignore_index == IGNORED_LABEL  # the labels of a forward show theirs
    if over not in ("samples", "tokens") or not (callable(loss) or of_model):
        raise JobError(
            "model-loss-mean-over",
            f'samestep.mean_over({over!r}, {loss!r}): use "samples" or "tokens", then a function of (outputs, batch), or "model" without an ignore_index',
        )
    return ModelLoss(None, over) if isinstance(loss, str) else _Mean(over, loss, ignore_index)
