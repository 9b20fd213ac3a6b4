"""Labels of a causal language model: which token the label at a position is, and how all become labels of the next token.

    next        labels[t] is the token after input_ids[t]; samestep's own sources of text give this
    aligned     labels[t] is input_ids[t] or -100: collators and processors for transformers give this, since the loss of
                transformers pairs the output at t with labels[t + 1]

A loss here pairs the output at t with the label at t. Aligned labels are therefore moved one place to the left on the host,
before any rank cuts a sequence: labels[t] becomes labels[t + 1], and -100 at the last token of a sample and of a packed
document. A document begins where transformers sees one begin: by position_ids that do not rise by one, without attention_mask.

A dataset's attribute `label_convention` names its convention, or `data.labels` does, or samples that are spread over
the dataset show it. A target that is the input at the same position is refused: a causal model would learn to copy
it. Every batch is held against what has been decided, and a sample that contradicts it is refused where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.datasets.batch import Dataset
from samestep.datasets.reading import read_samples
from samestep.datasets.source import Mixture
from samestep.errors import DataError
from samestep.job_tables import Convention

LOOKED_AT = 8
"""Number of samples, spread over a dataset, whose labels are compared with their inputs."""
MOST_LOOKED_AT = 64
"""Number of samples that are compared where the first ones count no label."""
_NOT_COUNTED = -100
_SHOWN = 8
"""The number of labels from which a sample shows a convention that contradicts the word of `data.labels`."""


def convention_of(dataset: Dataset, word: Convention | None) -> Convention:
    """Return the convention of a dataset's labels; `word` is the key `data.labels`.

    Samples without a label for each token stay as they are: "next".

    Raises:
        DataError: the samples show neither and there is no word, they contradict the word, or they have no `input_ids`
            of the labels' shape.
    """
    if isinstance(dataset, Mixture):
        return _of_mixture(dataset, word)
    said = getattr(dataset, "label_convention", None)
    if said is not None:
        if word == "aligned":
            raise DataError(
                "labels-shift", 'this source gives labels of the next token, and data.labels = "aligned". Use "next"'
            )
        return said
    comparison = _LabelComparison.of_none()
    for count in (LOOKED_AT, MOST_LOOKED_AT):
        places = np.unique(np.linspace(0, len(dataset) - 1, count).astype(np.int64))
        each = [_LabelComparison.of(read_samples(dataset, places[places == place]), word) for place in places]
        comparison = _LabelComparison(*map(torch.cat, zip(*each, strict=True)))
        if comparison.counted.any():
            break
    return comparison.convention(word)


def convention_of_samples(samples: Any, word: Convention | None) -> Convention:
    """Return the convention of some samples' labels, as `convention_of` does for a dataset."""
    return _LabelComparison.of(samples, word).convention(word)


def _of_mixture(dataset: Mixture, word: Convention | None) -> Convention:
    conventions = {convention_of(part, word) for part in dataset.parts}
    if len(conventions) == 1:
        return conventions.pop()
    raise DataError(
        "labels-shift",
        "the labels of some sources in data.mixture are the inputs at their own place, and the labels of others are the next tokens. Use sources of one kind, for example a data set of your own with the next tokens as labels",
    )


class _LabelComparison(NamedTuple):
    """The comparison of the labels of some samples with their inputs, each [samples]."""

    counted: Tensor
    """Labels that count."""
    has_next: Tensor
    """Labels that count and whose next token is in the sample and the document."""
    has_previous: Tensor
    """Labels that count and whose token before is in the sample and the document."""
    is_own: Tensor
    """Whether every label that counts is the input at the same position."""
    is_next: Tensor
    """Whether every label that counts and has a next token is that token."""
    is_previous: Tensor
    """Whether every label that counts and has a token before is that token."""

    @classmethod
    def of_none(cls) -> _LabelComparison:
        """Return the comparison of no samples."""
        return cls(*[torch.zeros(0, dtype=torch.int64)] * 3, *[torch.zeros(0, dtype=torch.bool)] * 3)

    @classmethod
    def of(cls, samples: Any, word: Convention | None) -> _LabelComparison:
        """Compare the labels of some samples with their inputs, where they have one for each token.

        Raises:
            DataError: they are batches of one sample, or have no `input_ids` of the labels' shape and there is no word.
        """
        if labels_of_tokens(samples) is None:
            _refuse_batches(samples)
            return cls.of_none()
        if (pair := inputs_and_labels(samples)) is None and word is None:
            raise DataError(
                "labels-shift",
                "the samples have no input_ids of the labels' shape, which would show whether they are the next tokens. Set "
                'data.labels = "next", or "aligned" if labels[t] is the token at t',
            )
        return cls.of_none() if pair is None else cls.of_pair(samples, *pair)

    @classmethod
    def of_pair(cls, samples: Any, inputs: Tensor, labels: Tensor) -> _LabelComparison:
        """Compare the inputs and labels [samples, T] of some samples."""
        counts, same_document = labels != _NOT_COUNTED, _same_document(samples, labels)
        has_next, has_previous = counts[:, :-1] & same_document, counts[:, 1:] & same_document
        return cls(
            counted=counts.sum(1),
            has_next=has_next.sum(1),
            has_previous=has_previous.sum(1),
            is_own=~(counts & (labels != inputs)).any(1),
            is_next=~(has_next & (labels[:, :-1] != inputs[:, 1:])).any(1),
            is_previous=~(has_previous & (labels[:, 1:] != inputs[:, :-1])).any(1),
        )

    def convention(self, word: Convention | None) -> Convention:
        """Return the convention that the samples show, or the word where they do not contradict it.

        Raises:
            DataError: they show neither and there is no word, or they contradict it.
        """
        is_own, is_next = bool(self.is_own.all()), bool(self.is_next.all())
        shows_next = is_next and bool(self.has_next.any())
        shows_own = is_own and bool(self.counted.any()) and not shows_next
        if word == "next" and shows_own:
            raise DataError(
                "labels-shift",
                'data.labels = "next", and the labels are the input_ids at their own place, so a causal model would learn to copy its input. Set data.labels = "aligned", which pairs the output at t with labels[t + 1]',
            )
        if word == "aligned" and not is_own:
            if shows_next:
                raise DataError(
                    "labels-shift",
                    'data.labels = "aligned", and the labels are the next tokens already. Set data.labels = "next"',
                )
            if self.is_previous.all() and self.has_previous.any():
                raise DataError(
                    "labels-shift",
                    'data.labels = "aligned", and labels[t + 1] is input_ids[t], so a causal model would learn to copy its input. Use labels[t] = input_ids[t]',
                )
        if word is not None:
            return word
        if shows_own:
            return "aligned"
        if is_next:
            return "next"
        raise DataError(
            "labels-shift",
            "the labels are neither the input_ids at their own place, as transformers takes them, nor the next tokens. "
            'Use data.labels = "next" if the output at t is to be labels[t], or "aligned" if it is to be labels[t + 1]',
        )


def inputs_and_labels(samples: Any) -> tuple[Tensor, Tensor] | None:
    """Return token ids and labels [samples, T] of a dict, or of a tuple its first two; None where their shapes differ."""
    labels = labels_of_tokens(samples)
    inputs = samples.get("input_ids") if isinstance(samples, Mapping) else samples[0] if labels is not None else None
    if labels is None or not isinstance(inputs, Tensor) or inputs.shape != labels.shape or inputs.is_floating_point():
        return None
    return inputs, labels


def labels_of_tokens(samples: Any) -> Tensor | None:
    """Return the labels of samples that have one for each token: whole numbers [samples, T]; else None."""
    labels = samples.get("labels") if isinstance(samples, Mapping) else None
    if isinstance(samples, (tuple, list)) and len(samples) > 1:
        labels = samples[1]
    return labels if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point() else None


def _refuse_batches(samples: Any) -> None:
    """Refuse samples that are batches of one, as a tokenizer that returns tensors gives them.

    Raises:
        DataError: they are.
    """
    if not isinstance(samples, Mapping):
        return
    inputs, labels = samples.get("input_ids"), samples.get("labels")
    if isinstance(inputs, Tensor) and isinstance(labels, Tensor) and inputs.dim() == 3 and inputs.shape == labels.shape:
        raise DataError(
            "data-form",
            f"a sample has input_ids {list(inputs.shape[1:])}, and a sample is not a batch. Use the row input_ids[0], and labels[0] too",
        )


def _same_document(samples: Any, labels: Tensor) -> Tensor:
    """Return whether each token but the last is in one document with the next one, as bool [samples, T - 1]."""
    positions = samples.get("position_ids") if isinstance(samples, Mapping) else None
    if isinstance(positions, Tensor) and positions.shape == labels.shape and "attention_mask" not in samples:
        return positions.diff(dim=1) == 1
    return torch.ones_like(labels[:, 1:], dtype=torch.bool)


def with_next_labels(samples: Any) -> Any:
    """Return samples whose aligned labels are moved one place to the left, so that each is the token after its input."""
    labels = labels_of_tokens(samples)
    if labels is None:
        return samples
    moved = torch.full_like(labels, _NOT_COUNTED)
    moved[:, :-1] = labels[:, 1:].masked_fill(~_same_document(samples, labels), _NOT_COUNTED)
    if isinstance(samples, Mapping):
        return {**samples, "labels": moved}
    return samples[0], moved, *samples[2:]


def check_samples(
    samples: Any, indices: Sequence[int] | npt.NDArray[np.int64], convention: Convention, word: Convention | None
) -> None:
    """Refuse samples whose labels contradict the convention that was found in others, or that the word names.

    Raises:
        DataError: one does.
    """
    both = inputs_and_labels(samples)
    if both is None or both[1].device.type != "cpu":  # a look at what a device holds would wait for it
        return
    rows = _LabelComparison.of_pair(samples, *both)
    if convention == "aligned":
        are_bad = ~rows.is_own if word is None else rows.is_next & ~rows.is_own & (rows.has_next >= _SHOWN)
    else:
        are_bad = ~rows.is_next if word is None else rows.is_own & ~rows.is_next & (rows.counted >= _SHOWN)
    if not bool(are_bad.any()):
        return
    row = int(are_bad.nonzero()[0])
    here = _MEANT["aligned"] if rows.is_own[row] else _MEANT["next"] if rows.is_next[row] else "neither"
    known = f"data.labels is {word!r}" if word else f"the labels of other samples are {_MEANT[convention]}"
    raise DataError(
        "labels-shift",
        f"the labels of sample {indices[row]} are {here}, and {known}. Use samples of one kind, or data.labels, which states the kind",
    )


_MEANT: Mapping[Convention, str] = {"aligned": "the input_ids at their own place", "next": "the next tokens"}


@dataclass(frozen=True, eq=False, slots=True)
class LabelBatch:
    """A batch of a step whose labels are checked, and shifted where they are aligned, when its samples are read."""

    batch: Any
    """The batch that the caller of a run has given, as `Batch` is one."""
    found: Convention = "aligned"
    word: Convention | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "stream":
            return getattr(self.batch, name, None)
        if name not in _OF_BATCH:  # what the batch holds besides has the labels as they were
            raise AttributeError(name)
        return getattr(self.batch, name)

    def samples(self, indices: npt.NDArray[np.int64] | Sequence[int]) -> Any:
        """Return the samples of the given indices, with labels of the next token."""
        samples = self.batch.samples(indices)
        check_samples(samples, indices, self.found, self.word)
        return with_next_labels(samples) if self.found == "aligned" else samples


_OF_BATCH = ("step", "num_samples", "shares", "read_ahead", "before_next", "end_stream")
"""What a batch is asked for besides its samples."""
