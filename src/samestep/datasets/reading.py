"""Samples read into tensors, and the random numbers with which reading changes them.

    samples of (dataset, indices)      by the data set's method `read`, or else its items, put together
    numbers that reading draws         of torch's, numpy's and Python's generators: a function of (seed, step, sample)

Whoever draws from a generator of the process while samples are read gets numbers that follow from what is read, and not from what
was read before, by which rank, in which process: an item is read with the generators seeded by its own (seed, step, sample), and a
function that puts samples together with numbers of its own, as one that masks words does, is called for the whole batch of the
step, of which each rank takes its rows. Evaluation has numbers of its own for each sample, the same ones at every call. Afterwards
the generators stand where they stood. A data set that draws nothing is read once, and the states before and after are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from samestep.datasets.generators import drawing_from, put_all_back, states_of
from samestep.datasets.order import Integers, draw_key
from samestep.datasets.values import joined, num_samples, rows_of, with_items_listed
from samestep.errors import DataError, failures_of
from samestep.trees import tree_leaves, tree_map_only


@dataclass(frozen=True, slots=True)
class SampleDraw:
    """The random numbers with which a step changes its samples: a function of (seed, step, sample), in every layout."""

    seed: int
    step: int
    whole_of: Callable[[int], Integers] | None = field(default=None, compare=False)
    """Returns the indices of the whole batch of a step, where they are known."""

    def key(self, index: int) -> int:
        """Return the seed of the numbers of one sample; -1 stands for the whole batch."""
        return draw_key(self.seed, self.step, index)

    def generator(self, index: int) -> torch.Generator:
        """Return the generator of one sample."""
        return torch.Generator().manual_seed(self.key(index))


_EVALUATION = SampleDraw(0, -1)
"""The numbers of samples that are not those of a step of training."""
_WHOLE = -1


class DrawnInThreadError(Exception):
    """Samples that are read in a thread draw from generators of the process, which the thread of the steps uses."""


class SampleReader:
    """A data set that is read, and what is known of the numbers that it draws. One process has one for each stream."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._name = getattr(dataset, "name_of_dataset", type(dataset).__name__)
        self.draws = False
        """Whether its items have drawn from a generator of the process."""
        self.draws_together = False
        """Whether what puts samples together has."""
        self._looks_at_items = False
        """Whether it is found out if items or what puts them together draws: something has."""
        self._whole: tuple[int, Any] | None = None
        """The step whose whole batch was read last, and its values."""

    @property
    def draws_any(self) -> bool:
        """Whether reading draws from a generator of the process."""
        return self.draws or self.draws_together

    def read(self, indices: npt.NDArray[np.int64] | Sequence[int], draw: SampleDraw | None = None) -> Any:
        """Return samples as `read_samples` says.

        Raises:
            DataError: the samples cannot be stacked into tensors.
        """
        rows = np.asarray(indices, dtype=np.int64)
        read_drawn: Callable[..., Any] | None = getattr(self.dataset, "read_drawn", None)
        if read_drawn is not None:
            return read_drawn(rows, draw)
        read, sample = getattr(self.dataset, "read", None), getattr(self.dataset, "sample", None)
        if read is not None and (draw is None or sample is None):
            with failures_of(f"reading samples of a {self._name}", DataError):
                return self._together(read, rows, draw)
        changed = None if draw is None else sample
        return self._together(lambda some: self._stacked(some, self._items(some, draw, changed)), rows, draw)

    def _together(self, read: Callable[[Integers], Any], rows: Integers, draw: SampleDraw | None) -> Any:
        """Return the batch that `read` collates; if it draws random numbers, they are keyed by the whole batch."""
        if not self.draws_together:
            states = states_of()
            values = read(rows)
            if states_of() == states:
                return values
            put_all_back(states)
            _refuse_thread()
            if not self._looks_at_items:
                self._looks_at_items = True
                return self._together(read, rows, draw)
            self.draws_together = True
        indices = draw.whole_of(draw.step) if draw is not None and draw.whole_of is not None else None
        if draw is None or indices is None or not {*rows.tolist()} <= {*indices.tolist()}:
            return self._one_by_one(read, rows, draw or _EVALUATION)
        if self._whole is None or self._whole[0] != draw.step:
            with drawing_from(draw.key(_WHOLE)):
                self._whole = draw.step, read(indices)
        values, count = self._whole[1], len(indices)
        if num_samples(values) != count:
            raise DataError(
                "data-form",
                f"the function that joins the samples of a {self._name} together draws random numbers, so the whole batch is put together "
                "at once, and its result is not divided by samples. Use tensors with the samples first, or numbers of the "
                "generator that sample(index, generator) is given",
            )
        place = {index: number for number, index in reversed([*enumerate(indices.tolist())])}
        return rows_of(values, [place[row] for row in rows.tolist()], count)

    def _one_by_one(self, read: Callable[[Integers], Any], rows: Integers, draw: SampleDraw) -> Any:
        parts = []
        for row in rows.tolist() or [0]:
            with drawing_from(draw.key(row)):
                parts.append(read(np.array([row])))
        return joined(parts, [1] * len(parts)) if len(rows) else rows_of(parts[0], [], 1)

    def _items(
        self, rows: Integers, draw: SampleDraw | None, changed: Callable[[int, torch.Generator], Any] | None
    ) -> list[Any]:
        """Return samples one by one; if they draw random numbers, those of each are keyed by its index."""

        def item(index: int) -> Any:
            try:
                return self.dataset[index] if changed is None or draw is None else changed(index, draw.generator(index))
            except Exception:
                with failures_of(f"reading sample {index} of a {self._name}", DataError):
                    raise

        wanted = [int(index) for index in (rows if rows.size else [0])]
        if not self.draws:
            states = states_of() if self._looks_at_items else None
            at_once = getattr(self.dataset, "__getitems__", None) if changed is None else None
            items = at_once(wanted) if at_once else [item(index) for index in wanted]
            if states is None or states_of() == states:
                return list(items)
            put_all_back(states)
            _refuse_thread()
            self.draws = True
        read_items = []
        for index in wanted:
            with drawing_from((draw or _EVALUATION).key(index)):
                read_items.append(item(index))
        return read_items

    def _stacked(self, rows: Integers, samples: list[Any]) -> Any:
        """Return samples collated by the data set's `collate`, or by torch's `default_collate`."""
        collate = getattr(self.dataset, "collate", None)
        if collate is not None:
            what = f"the collate_fn of a {self._name} for samples {rows.tolist()[:8]}"
            with failures_of(f"{what}, which must take one alone too, and leave none out,", DataError):
                return with_items_listed(collate(samples))
        try:
            first: Any = samples[0] if samples else None
            for sample in samples if isinstance(first, Mapping) else ():
                if (
                    isinstance(sample, Mapping) and sample.keys() != first.keys()
                ):  # torch would drop a key without a word
                    key = min(sample.keys() ^ first.keys(), key=str)
                    raise KeyError(f"{key!r} is in some of them only")
            stacked = default_collate([_with_tensors(sample) for sample in samples])
        except (RuntimeError, TypeError, KeyError) as error:
            raise DataError(
                "data-form",
                f"the samples of a {self._name} cannot be stacked into a batch{_first_other(rows, samples)}: "
                f"{str(error).splitlines()[0]}. Use "
                "samples of equal shapes, or a method read(indices) on the dataset",
            ) from None
        if not rows.size:
            stacked = tree_map_only(Tensor, lambda tensor: tensor[:0], stacked)
        return tuple(stacked) if isinstance(stacked, list) else stacked


def _refuse_thread() -> None:
    """Leave it to the thread of the steps to read what draws from the generators of the process.

    Raises:
        DrawnInThreadError: this is another thread of the process.
    """
    if threading.current_thread() is not threading.main_thread() and threading.current_thread().name.startswith(
        THREAD_NAME
    ):
        raise DrawnInThreadError


THREAD_NAME = "samestep reads ahead"
"""The beginning of the name of threads that read ahead."""


def read_samples(dataset: Any, indices: npt.NDArray[np.int64] | Sequence[int], draw: SampleDraw | None = None) -> Any:
    """Return samples as tensors with the batch dimension first, by `dataset.read` or else torch's `default_collate`.

    With a `draw`, a dataset's method `sample` gives the samples, if it has one; one that stands for other datasets has
    a method `read_drawn(indices, draw)`. Without indices the tensors have no rows, and the other dimensions and dtypes
    of sample 0.

    Raises:
        DataError: the samples cannot be stacked into tensors.
    """
    return SampleReader(dataset).read(indices, draw)


def _first_other(rows: Integers, samples: list[Any]) -> str:
    """Return as text which sample differs in shapes from the first one; empty if none does."""

    def shapes(sample: Any) -> list[Any]:
        leaves = [leaf for leaf in tree_leaves(_with_tensors(sample)) if hasattr(leaf, "shape")]
        return [list(leaf.shape) for leaf in leaves]

    first = shapes(samples[0])
    other = next((place for place, sample in enumerate(samples) if shapes(sample) != first), None)
    if other is None:
        return ""
    return f" (sample {rows[other]} has {_few(shapes(samples[other]))}, and sample {rows[0]} {_few(first)})"


def _few(shapes: list[Any]) -> str:
    return ", ".join(map(str, shapes[:4])) + (", ..." if len(shapes) > 4 else "")


def _with_tensors(sample: Any) -> Any:
    """Return a sample whose lists of numbers are tensors, as the rows of Hugging Face's data sets have them."""
    if not isinstance(sample, dict) or not any(isinstance(value, list) for value in sample.values()):
        return sample
    return {key: _tensor_of(value) if isinstance(value, list) else value for key, value in sample.items()}


def _tensor_of(values: list[Any]) -> Any:
    if not all(isinstance(leaf, int | float) for leaf in tree_leaves(values)) or not values:
        return values
    try:
        return torch.tensor(values)
    except (ValueError, RuntimeError, TypeError):  # lists of unequal lengths
        return values
