"""The loss that a forward itself returns: `loss="model"`, for models of transformers and others that are given labels.

What one device gives for the whole batch is L(batch), whatever the forward divides by. Of a part p of the batch a forward gives L(p), and
the layout must know how parts add up to the whole. With c(p) what the forward counts of a part there are two ways:

    L(batch) = sum over p of c(p) L(p) / sum over p of c(p)        a mean: over samples, or labels that are not -100, or a count given
    L(batch) = sum over p of L(p)                                  a sum

Which it is, forwards on parts of a batch show (`runtime/guards/forward_loss.py`), among the means that `samestep.mean_over` states. A forward that takes `num_items_in_batch`, as those
of transformers do, divides its sum by that; it is given 1, so that it returns the sum. The labels are those of the batch's "labels" that are
not -100, unless the forward gives `cross_entropy` another tensor of the batch or another `ignore_index`; or a mask of the batch has as many ones
as the forward counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.building.families import CLASSES_FIELD
from samestep.building.loss_result import IGNORED_LABEL, LEAST, OF_SLICE, UNNAMED, LossResult, scalar
from samestep.building.over_samples import num_samples
from samestep.building.predictions import target_in
from samestep.errors import JobError
from samestep.trees import fold, tensors_in


class Rule(StrEnum):
    """The number by which the loss of a part of a batch is divided."""

    COUNT = "the count that is given"
    RETURNED = "the count that the forward returns"
    NEXT_LABELS = "labels of next tokens that are not -100"
    LABELS = "labels that are not -100"
    SAMPLES = "samples"
    SUM = "nothing"
    SLICE = "labels of each rank's slice of the tokens"


MeanOver = Literal["tokens", "samples"]
RETURNS_LOGITS = "Use a forward that returns the logits, and samestep.whole_batch(loss) of these"
_MEANS = {"tokens": (Rule.LABELS, Rule.NEXT_LABELS), "samples": (Rule.SAMPLES,)}


@dataclass(frozen=True, slots=True)
class Labels:
    """The tensor of a batch that holds the labels a forward counts, or the mask whose ones it counts, and the value that does not count."""

    place: int | None = None
    """Its place among the tensors of the batch; None for the batch's "labels", or its second part."""
    ignored: int = IGNORED_LABEL

    def of(self, batch: Any) -> Tensor | None:
        """Return the labels of a batch; None if it has none."""
        return labels_of(batch) if self.place is None else tensors_in(batch)[self.place]


@dataclass(eq=False)
class ModelLoss:
    """The loss that a forward returns, as a function of its outputs: a scalar, `.loss`, a dict's "loss", or a tuple's first."""

    count: Callable[[Any], Any] | None = None
    """What the forward divides by, of a batch; None to find it out."""
    mean_over: MeanOver | None = None
    """What it is a mean over, as the user states; None to find it out."""
    rule: Rule | None = field(default=None, init=False)
    """What it was found to divide by; None before that."""
    labels: Labels = field(default=Labels(), init=False)
    """Which labels it counts, where it counts labels."""
    returns_sum: bool = field(default=False, init=False)
    """Whether it returns the sum, since it was given 1 to divide by, or by itself with a count of its own."""

    @property
    def divisor(self) -> str:
        """The number that it was found to divide by, in words."""
        return str(self.rule).replace(str(IGNORED_LABEL), str(self.labels.ignored))

    @property
    def is_plain_sum(self) -> bool:
        """Whether a step divides the sum by nothing."""
        return self.rule is Rule.SUM

    def may_be(self, rule: Rule) -> bool:
        """Return whether what the user states leaves a rule open."""
        return self.mean_over is None or rule in _MEANS[self.mean_over]

    def __call__(self, outputs: Any, batch: Any) -> LossResult:
        """Return the sum and the count of a part of a batch.

        Raises:
            JobError: the outputs have no loss.
        """
        loss, number = returned_loss(outputs)
        of_slice = vars(loss).get(OF_SLICE)
        if of_slice is not None:
            return LossResult({UNNAMED: of_slice[1:]})
        if self.rule is Rule.SLICE:
            raise JobError(
                "loss-outputs-missing",
                'cp slices sequences, and loss = "model" is then the mean of F.cross_entropy over all labels that the forward returns. '
                f"{RETURNS_LOGITS}, or cp=1",
            )
        by_outputs = Rule.SAMPLES if number is None else Rule.RETURNED
        rule = self.rule or (by_outputs if self.count is None else Rule.COUNT)
        count = self.counted(rule, batch, number, loss.device, self.labels)
        if rule is Rule.RETURNED or self.returns_sum or rule is Rule.SUM:
            guard = vars(number).get(LEAST) if isinstance(number, Tensor) else None
            return LossResult({UNNAMED: (loss, count)}, least={} if guard is None else {UNNAMED: guard[1]})
        is_mean = rule in (Rule.LABELS, Rule.NEXT_LABELS, Rule.COUNT)
        if is_mean and not count:  # over nothing, whose gradient is none
            return LossResult({UNNAMED: (torch.zeros_like(loss.detach()), count)})
        return LossResult({UNNAMED: (loss * count, count)})

    def counted(
        self, rule: Rule, batch: Any, number: Tensor | int | None, device: torch.device, which: Labels
    ) -> Tensor:
        """Return the count of a part of a batch under a rule, for which the forward has returned another count."""
        if rule is Rule.COUNT:
            assert self.count is not None
            count = self.count(batch)
        elif rule is Rule.RETURNED:
            guard = vars(number).get(LEAST) if isinstance(number, Tensor) else None
            count = 0 if number is None else number if guard is None else guard[0]
        elif rule in (Rule.LABELS, Rule.NEXT_LABELS):
            labels = which.of(batch)
            assert labels is not None
            count = (labels[..., 1:] if rule is Rule.NEXT_LABELS else labels).ne(which.ignored).sum()
        else:
            count = num_samples(batch)
        return count.to(device).reshape(()) if isinstance(count, Tensor) else torch.full((), count, device=device)


def model_loss(count: Callable[[Any], Any] | None = None) -> ModelLoss:
    """Return the loss that the forward of the model computes from the labels: the same as `loss="model"`.

    Forward passes on parts of the first batch show the divisor of the loss. If they do not, set it here, or with
    `samestep.mean_over("tokens", "model")`.

    Args:
        count: a function of a part of a batch that returns the count, such as `lambda batch: batch["mask"].sum()`.
    """
    return ModelLoss(count)


def returned_loss(outputs: Any) -> tuple[Tensor, Tensor | int | None]:
    """Return the loss among the outputs of a forward, and the count that it returns with it, if it does.

    Raises:
        JobError: there is none.
    """
    loss = getattr(outputs, "loss", None) if not isinstance(outputs, Tensor) else outputs
    count = None
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif loss is None and isinstance(outputs, tuple | list) and outputs:
        loss = outputs[0]
        second = outputs[1] if len(outputs) == 2 else None
        is_whole = isinstance(second, Tensor) and second.dim() == 0 and not second.is_floating_point()
        count = second if is_whole or (isinstance(second, int) and not isinstance(second, bool)) else None
        scalars = [
            output
            for output in outputs
            if isinstance(output, Tensor) and output.is_floating_point() and output.dim() == 0
        ]
        if len(scalars) == 1 and isinstance(loss, Tensor) and loss.numel() != 1:  # (logits, loss)
            loss, count = scalars[0], None
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return scalar(loss), count
    form = fold(
        outputs,
        lambda item: f"a tensor {list(item.shape)}" if isinstance(item, Tensor) else f"a {type(item).__name__}",
        ", ".join,
    )
    raise JobError(
        "loss-outputs-missing",
        f'loss = "model": the forward returned {form}, and no loss. Use a scalar, an output with .loss or "loss", a tuple that begins '
        "with a scalar or has one only, or (loss, count), or a loss function (outputs, batch) -> (sum, count)",
    )


def labels_of(batch: Any) -> Tensor | None:
    """Return the labels of a batch that are numbers of classes: of a dict, or the second of a tuple; None if it has none."""
    target = target_in(batch)
    is_class = (
        isinstance(target, Tensor) and target.dim() > 0 and target.dtype in (torch.int64, torch.int32, torch.int16)
    )
    return target if is_class else None


def name_in(batch: Any, tensor: Tensor | None) -> str:
    """Return the key of a tensor in a batch that is a dict; empty if it has none."""
    return next((str(key) for key, item in batch.items() if item is tensor), "") if isinstance(batch, Mapping) else ""


_CAUSAL = ("ForCausalLM", "ForConditionalGeneration")
_UNMOVED = ("XLMWithLMHeadModel", "XLNetLMHeadModel")
"""Classes of language models whose loss takes the labels unshifted."""


def moves_labels(module: nn.Module) -> bool:
    """Return whether a model is one of transformers that predicts the next token, or holds one, as an adapter's wrapper does."""
    return any(_is_causal(model) for model in _outermost(module))


def settle_own_loss(module: nn.Module, loss: object, example: Any) -> None:
    """Let a model that returns its loss settle by the labels of a batch like `example` which loss that is."""
    if isinstance(loss, ModelLoss):
        settle_problem_type(module, target_in(example))


def settle_problem_type(module: nn.Module, labels: Any) -> None:
    """Let classifiers of transformers know what their loss is before the first forward, which would write it into their configuration.

    It follows from the number of labels and from their dtype, as in those models' own code.
    """
    for model in _outermost(module):
        config, number = model.config, getattr(model, CLASSES_FIELD, None)
        if number is None or getattr(config, "problem_type", "") is not None or not isinstance(labels, Tensor):
            continue
        several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        config.problem_type = "regression" if number == 1 else several


def _outermost(module: nn.Module) -> Iterator[Any]:
    """Yield the models of transformers in a module that are no part of another one."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    if isinstance(module, modeling.PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _is_causal(model: Any) -> bool:
    if getattr(model.config, "is_encoder_decoder", False):
        return False
    from transformers.models.auto import modeling_auto  # noqa: PLC0415 - the model is one of transformers

    names = {kind.__name__ for kind in type(model).__mro__}
    if not names.isdisjoint(_UNMOVED):
        return False
    known: set[str] = set()
    for classes in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for item in classes.values():
            known.update((item,) if isinstance(item, str) else item)
    return not names.isdisjoint(known) or getattr(model, "loss_type", None) in _CAUSAL
