"""Several datasets as one, in which each gives a fixed share of the samples.

With weights w_k that sum to 1, and parts of n_k samples, one pass over the mixture has

    L = max_k ceil(n_k / w_k)        samples, of which part k gives  m_k = round(w_k L) >= n_k

so in a pass every sample of every part occurs at least once, and those of a part equally often, up to one. The mixture is
itself a map-style dataset, so the order of its samples, which rank reads which, and a resume are as with one source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.datasets.batch import Dataset
from samestep.datasets.reading import SampleDraw, read_samples
from samestep.errors import DataError


@dataclass(frozen=True, eq=False)
class Mixture:
    """A dataset whose samples are those of several datasets, one part after another; the order of samples mixes them."""

    parts: tuple[Dataset, ...]
    lengths: tuple[int, ...]
    """The number of samples of each part."""
    ends: npt.NDArray[np.int64]
    """The index in the mixture after the last sample of each part."""

    @classmethod
    def of(cls, parts: Mapping[str, Dataset], weights: Mapping[str, float]) -> Mixture:
        """Return the mixture of named datasets by their weights.

        Raises:
            DataError: their samples differ in kind, so that they cannot be in one batch.
        """
        kinds = {name: kind_of(part) for name, part in parts.items()}
        first, *others = kinds
        for name in others:
            if kinds[name] != kinds[first]:
                raise DataError(
                    f"data.mixture: a sample of {name} has {kinds[name]}, one of {first} has {kinds[first]}; sources whose "
                    "samples have the same tensors work, as several of text:, or several of jsonl:, parquet: and hf:"
                )
        lengths = {name: len(part) for name, part in parts.items()}
        total = math.fsum(weights[name] for name in parts)
        length = max(math.ceil(lengths[name] * total / weights[name]) for name in parts)
        ends = np.cumsum([max(lengths[name], round(length * weights[name] / total)) for name in parts])
        return cls(tuple(parts.values()), tuple(lengths.values()), ends)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which, place = self._places(np.array([index]))
        return self.parts[which[0]][int(place[0])]

    def read_drawn(
        self, indices: npt.NDArray[np.int64], draw: SampleDraw | None
    ) -> dict[str, Tensor] | tuple[Tensor, ...]:
        """Return samples as tensors with the batch dimension first."""
        which, places = self._places(indices)
        draw = None if draw is None else SampleDraw(draw.seed, draw.step)  # whose whole batch is of all parts
        if not len(indices):
            return read_samples(self.parts[0], indices, draw)
        order = np.argsort(which, kind="stable")
        read = [read_samples(self.parts[part], places[which == part], draw) for part in np.unique(which)]
        back = torch.from_numpy(np.argsort(order))
        if isinstance(read[0], dict):
            return {name: torch.cat([samples[name] for samples in read])[back] for name in read[0]}
        return tuple(torch.cat(tensors)[back] for tensors in zip(*read, strict=True))

    def _places(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the part of each sample, and its index there."""
        which = np.searchsorted(self.ends, indices, side="right")
        begins = np.concatenate([[0], self.ends[:-1]])
        return which, (indices - begins[which]) % np.array(self.lengths)[which]


def kind_of(part: Dataset) -> str:
    """Return the names, shapes and dtypes of a sample's tensors."""
    samples = read_samples(part, np.array([0]))
    named = samples.items() if isinstance(samples, dict) else enumerate(samples)
    return ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape[1:])}" for name, tensor in named
    )
