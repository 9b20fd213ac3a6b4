"""Batches whose labels are those of the next token, for a loss that pairs the output at a place with the label there.

Only labels that a causal model of transformers is trained on with the cross entropy can stand for the tokens at their own
place; which they do is found out once for each dataset (`datasets/labels.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import nn

from samestep.building.loss import cross_entropy
from samestep.building.model_loss import ModelLoss, moves_labels
from samestep.datasets.labels import (
    LOOKED_AT,
    LabelBatch,
    convention_of,
    convention_of_samples,
)
from samestep.errors import DataError
from samestep.examination.examine import Loss
from samestep.job import Job
from samestep.job_tables import Convention
from samestep.runtime.step_observer import StepBatch

_KEPT = 8
"""Datasets whose convention is kept: those that a run trains on and evaluates."""


def check_labels(module: nn.Module, loss: Loss, job: Job, dataset: Any) -> None:
    """Refuse a dataset that does not show which token its labels are, before a process starts.

    Raises:
        DataError: it does not, or its labels contradict `data.labels`.
    """
    if loss is cross_entropy and moves_labels(module):
        convention_of(dataset, job.data.labels)
    if isinstance(loss, ModelLoss) and moves_labels(module):
        _refuse_next_labels(dataset)


def _refuse_next_labels(dataset: Any) -> None:
    """Refuse a source whose labels are the next tokens already, for a model whose loss shifts them.

    Raises:
        DataError: it is one.
    """
    if any(getattr(part, "label_convention", None) == "next" for part in (dataset, *getattr(dataset, "parts", ()))):
        raise DataError(
            "labels-shift",
            'loss = "model": the labels of this source are the next tokens, and the model shifts labels itself: loss = '
            '"cross_entropy" works, or a data set with labels that are the inputs at the same place',
        )


class NextLabels:
    """The datasets of a run, and which token the labels of each are."""

    def __init__(self, loss: Loss, job: Job) -> None:
        self._is_cross_entropy, self._word = loss is cross_entropy, job.data.labels
        self._is_within = isinstance(loss, ModelLoss)
        self._moves: bool | None = None
        self._found: deque[tuple[Any, Convention]] = deque(maxlen=_KEPT)

    def of(self, batch: StepBatch, module: nn.Module) -> StepBatch:
        """Return the batch with labels of the next token: itself, if its dataset says that it has them.

        Raises:
            DataError: the samples do not show which token their labels are, or contradict `data.labels`.
        """
        if self._moves is None:
            self._moves = self._is_cross_entropy and moves_labels(module)
            self._is_within &= moves_labels(module)
        if self._is_within:
            _refuse_next_labels(getattr(batch, "dataset", None))
        if not self._moves or isinstance(batch, LabelBatch):
            return batch
        if getattr(getattr(batch, "dataset", None), "label_convention", None) is not None and self._word != "aligned":
            return batch
        return LabelBatch(batch, self._convention(batch), self._word)

    def _convention(self, batch: StepBatch) -> Convention:
        dataset = getattr(batch, "dataset", None)
        found = next((convention for one, convention in self._found if one is dataset), None)
        if found is None:
            if dataset is None:
                samples = batch.samples(batch.shares(0, 1, 1)[0][:LOOKED_AT])
                found = convention_of_samples(samples, self._word)
            else:
                found = convention_of(dataset, self._word)
            self._found.append((dataset, found))
        return found
