"""Losses of preference pairs, teachers and two views, each exact over ranks and micro-batches.

```python
run = samestep.parallelize({"policy": f, "reference": g}, samestep.losses.dpo, optimizer, forward=forward, layout="dp=2 zero=3", job=job)
run = samestep.parallelize(model, functools.partial(samestep.losses.contrastive, temperature=0.1), optimizer, forward=two_views, job=job)
```
Each is a function (outputs, batch) that returns sums with counts, or where it compares all samples of a step with each other the loss
itself (`samestep.whole_batch`). Options are keywords, for `functools.partial`. The two functions of logits serve a forward that returns
numbers of each token in place of logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from samestep.building.loss_result import IGNORED_LABEL, Amount
from samestep.building.over_samples import whole_batch
from samestep.errors import JobError

__all__ = ["contrastive", "distillation", "dpo", "pairwise", "sequence_log_probs", "token_entropy", "token_log_probs"]

Values = dict[str, tuple[Tensor, int]]


def token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, [B, T] of logits [B, T, V]; 0 where the label is -100."""
    rows = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return -rows.view(labels.shape)


def sequence_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each sample's labels but -100, [B] of logits [B, T, V]."""
    return token_log_probs(logits, labels).flatten(1).sum(1)


def token_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the distribution of each token, [B, T] of logits [B, T, V].

    With `loss_chunk` in the layout the logits are made in chunks of tokens, as for `token_log_probs`, and never exist whole.
    """
    if type(logits) is not Tensor and has_torch_function((logits,)):  # a mode of torch's sees the operations below
        entropy: Tensor = handle_torch_function(token_entropy, (logits,), logits)
        return entropy
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def dpo(outputs: Any, batch: Any, *, beta: float = 0.1, label_smoothing: float = 0.0) -> tuple[Tensor, int, Values]:
    """Return the loss of preference pairs against a reference (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    The outputs are log-probabilities of whole answers, [B] each: policy_chosen, policy_rejected, reference_chosen and
    reference_rejected, as a dict or in this order.

    Raises:
        JobError: the outputs have another form.
    """
    names = ("policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected")
    chosen, rejected, reference_chosen, reference_rejected = _named(outputs, names, "dpo")
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return losses.sum(), losses.numel(), _of_margin(margin)


def pairwise(outputs: Any, batch: Any, *, margin: float = 0.0) -> tuple[Tensor, int, Values]:
    """Return the loss of a reward model on pairs (Bradley and Terry): of rewards chosen and rejected, [B] or [B, 1] each.

    Raises:
        JobError: the outputs have another form.
    """
    chosen, rejected = _named(outputs, ("chosen", "rejected"), "pairwise")
    apart = chosen - rejected
    return -F.logsigmoid(apart - margin).sum(), apart.numel(), _of_margin(apart)


def _of_margin(margin: Tensor) -> Values:
    """Return the fraction of the pairs that are ranked right, and the mean margin, as sums with counts."""
    number = margin.numel()
    return {"accuracy": ((margin > 0).sum(), number), "margin": (margin.detach().sum(), number)}


def distillation(outputs: Any, batch: Any, *, temperature: float = 1.0, hard: float = 0.0) -> Amount:
    """Return the divergence of a student from its teacher (Hinton et al. 2015, arXiv:1503.02531), times the squared temperature.

    The outputs are logits of both, student and teacher, as a dict or in this order. Labels of the batch that are -100 leave their
    places out, if it has labels for each row; `hard` is the factor on the cross entropy with them, which is added.

    Raises:
        JobError: the outputs have another form, or there are no labels for `hard`.
    """
    student, teacher = _named(outputs, ("student", "teacher"), "distillation")
    log_probs, wanted = ((one / temperature).log_softmax(-1) for one in (student, teacher.detach()))
    rows = temperature**2 * (wanted.exp() * (wanted - log_probs)).sum(-1)
    labels = _labels_of(batch)
    if labels is None or labels.shape != rows.shape:
        if hard:
            raise JobError(
                "distillation-labels",
                "losses.distillation: hard is above 0, and the batch has no label for each row of logits",
            )
        return rows.sum(), torch.full((), rows.numel(), device=rows.device)
    counts = labels != IGNORED_LABEL
    total = (rows * counts).sum()
    if hard:
        total = total - hard * token_log_probs(student, labels).sum()
    return total, counts.sum()


def _labels_of(batch: Any) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None and isinstance(batch, tuple | list) and len(batch) > 1:
        labels = batch[1]
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None


@whole_batch(rows=True)
def contrastive(outputs: Any, batch: Any, rows: Tensor, *, temperature: float = 0.07) -> tuple[Tensor, int]:
    """Return the symmetric loss of two views of each sample among all samples of the step (CLIP; Radford et al. 2021).

    The outputs are features of both, [B, D] each, as a dict (first, second, and scale if there is one) or in this order. They are
    normalised; their products are divided by `temperature`, or multiplied by the scale that the forward returns third.

    Raises:
        JobError: the outputs have another form.
    """
    size = len(outputs) if isinstance(outputs, Mapping | tuple | list) else 0
    first, second, *scale = _named(outputs, ("first", "second", "scale")[: max(2, size)], "contrastive")
    views = F.normalize(first, dim=-1), F.normalize(second, dim=-1)
    factor = scale[0] if scale else 1 / temperature
    losses = [
        F.cross_entropy(factor * (view[rows] @ other.T), rows, reduction="sum") for view, other in (views, views[::-1])
    ]
    return (losses[0] + losses[1]) / 2, len(rows)


def _named(outputs: Any, names: Sequence[str], word: str) -> list[Tensor]:
    """Return outputs by name, or in their order.

    Raises:
        JobError: they are neither.
    """
    if isinstance(outputs, Mapping) and all(name in outputs for name in names):
        return [outputs[name] for name in names]
    if isinstance(outputs, tuple | list) and len(outputs) == len(names):
        return list(outputs)
    form = (
        f"a dict of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
    )
    raise JobError(
        "loss-outputs-missing",
        f"losses.{word}: the forward returned {form}. Use {', '.join(names)}, as a dict or a tuple in this order",
    )
