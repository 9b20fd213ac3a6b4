"""The one sample that is traced as a model of all samples of a dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.datasets.batch import Dataset
from samestep.datasets.reading import read_samples

LOOKED_AT = 64
"""Samples of packed documents among which the example is found."""


def example_of(dataset: Dataset) -> Any:
    """Return a batch of one sample: the first, or of packed documents one with about the mean amount of attention.

    A trace shows a mask of documents only where the example has several of them.

    Raises:
        DataError: the samples cannot be read, or stacked into tensors.
    """
    first = read_samples(dataset, np.arange(1))
    positions = first.get("position_ids") if isinstance(first, dict) else None
    if positions is None or positions.dim() != 2:
        return first
    index = _usual(torch.cat([_positions(dataset, index) for index in range(min(len(dataset), LOOKED_AT))]))
    return read_samples(dataset, np.array([index]))


def _positions(dataset: Dataset, index: int) -> Tensor:
    samples = read_samples(dataset, np.array([index]))
    assert isinstance(samples, dict), "as the first one is"
    return samples["position_ids"]


def _usual(positions: Tensor) -> int:
    """Return the row of positions [samples, T], of those with documents, that is nearest to the mean in pairs of
    tokens."""
    pairs = positions.sum(1).double()  # each token of a document sees as many others as its position says
    far = (pairs - pairs.mean()).abs()
    has_documents = (positions.diff(dim=1) != 1).any(1)
    if has_documents.any():
        far = far.masked_fill(~has_documents, torch.inf)
    return int(far.argmin())
