"""The user's own dataset: `module:function` names a function without arguments that returns a map-style dataset.

The module is also searched in the working directory. Samples may be whatever torch's `default_collate` stacks: dicts or
tuples of tensors, arrays and numbers.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from samestep.datasets.batch import Dataset, SampleDraw, check_map_style, read_samples
from samestep.datasets.module_search import looked_in, make_importable
from samestep.datasets.split import Split, named, part_of
from samestep.errors import DataError, did_you_mean, failures_of
from samestep.job_tables import DataTable


@dataclass(frozen=True, eq=False)
class DatasetSlice:
    """A contiguous range of the samples of another dataset."""

    dataset: Dataset
    part: range

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.dataset[self.part[index]]

    def read_drawn(
        self, indices: npt.NDArray[np.int64], draw: SampleDraw | None
    ) -> dict[str, Tensor] | tuple[Tensor, ...]:
        """Return samples as tensors with the batch dimension first."""
        return read_samples(self.dataset, indices + self.part.start, draw)


def function_part(data: DataTable, split: Split, folder: str | None = None) -> DatasetSlice:
    """Return one part of the dataset that the user's function returns; its module is looked for in `folder` too.

    Raises:
        DataError: there is no such function, or it returns no map-style dataset.
    """
    source = data.source
    with failures_of(f"data.source: {source}", DataError):
        dataset = _function(source, folder)()
    check_map_style(dataset, f"{source} returned")
    part = DatasetSlice(dataset, part_of(len(dataset), data.held_out, split))
    if not len(part):
        raise DataError(f"{named(split, source)} has none of {len(dataset)} samples; more samples are needed")
    return part


def _function(source: str, folder: str | None) -> Any:
    """Import and return the function that `module:function` names."""
    name, _, attribute = source.partition(":")
    make_importable(name, folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists but imports one that does not: the error names it
        raise DataError(
            f"{source}: there is no module {name!r}, neither in {looked_in(folder)} nor among the installed ones"
        ) from None
    function = getattr(module, attribute, None)
    if callable(function):
        return function
    known = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
    raise DataError(f"{source}: {name} has no function {attribute!r}{did_you_mean(attribute, known)}")
