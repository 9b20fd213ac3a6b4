"""Handwritten digits that come with this package: 1,797 images of 8 x 8 pixels, in an order that does not depend on the writer.

They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak 1998, UCI Machine Learning
Repository, CC BY 4.0), in the file that scikit-learn distributes: 64 pixels of 0 to 16 and the digit in each line.
"""

from __future__ import annotations

import functools
import gzip
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.datasets.order import permute_positions
from samestep.datasets.split import Split, part_of
from samestep.job_tables import DataTable

SIDE = 8
LARGEST = 16


@dataclass(frozen=True, eq=False)
class Digits:
    """One part of the digits: pairs of an image, float32 [1, 8, 8] of 0 to 1, and its digit."""

    images: npt.NDArray[np.float32]
    digits: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.images[index]), torch.tensor(self.digits[index])

    def read(self, indices: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Return images [N, 1, 8, 8] and digits [N]."""
        return torch.from_numpy(self.images[indices]), torch.from_numpy(self.digits[indices])


def digits_part(data: DataTable, split: Split) -> Digits:
    """Return one part of the digits.

    Raises:
        DataError: nothing is held out.
    """
    images, digits = _everything()
    part = part_of(len(digits), data.held_out, split)
    return Digits(images[part.start : part.stop], digits[part.start : part.stop])


@functools.cache
def _everything() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return all images and digits, shuffled once: the lines of one writer follow each other in the file."""
    text = gzip.decompress(resources.files("samestep.datasets").joinpath("digits.csv.gz").read_bytes()).decode()
    table: npt.NDArray[Any] = np.array([line.split(",") for line in text.split()], dtype=np.float64)
    table = table[permute_positions(np.arange(len(table)), len(table), 0)]
    images = (table[:, :-1] / LARGEST).astype(np.float32).reshape(-1, 1, SIDE, SIDE)
    return images, table[:, -1].astype(np.int64)
