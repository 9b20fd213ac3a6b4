"""The values of a whole batch: how many samples they are, and those of some samples.

    tensor              samples lie along the first dimension
    dict, tuple,        a part for each key, place or field, each with all samples; as torch's loaders yield it, a list of tensors too, and
    dataclass           one of parts of different kinds, such as a dict and a tensor; other mappings are read as dicts are
    other lists         one item for each sample, of any kind, such as the boxes and labels of an image; tuples that `zip(*samples)`
                        makes are read as such lists
    all else            the same for every sample: None, words, numbers, tensors without dimensions

Numpy's arrays are read as tensors. The number of samples is the one that all parts agree on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.datasets.order import Integers
from samestep.errors import DataError
from samestep.trees import keystr, parts_of, tensors_in, tree_flatten_with_path, tree_map_only, with_parts


def tensors_of_arrays(values: Any) -> Any:
    """Return the values of a batch with a tensor in place of each numpy array of numbers, over the same memory where it is writable, and
    with a list in place of each tuple of one item for each sample."""

    def converted(array: np.ndarray[Any, Any]) -> Any:
        return (
            torch.from_numpy(array if array.flags.writeable else array.copy()) if array.dtype.kind in "biufc" else array
        )

    return with_items_listed(tree_map_only(np.ndarray, converted, values))


def with_items_listed(values: Any) -> Any:
    """Return a batch with a list in place of each tuple of one item for each sample, as `zip(*samples)` makes them.

    Tuples of tensors that all have as many rows stay parts of all samples.
    """
    parts = parts_of(values)
    tuples = {key: part for key, part in parts.items() if type(part) is tuple}
    if not tuples or (type(values) is list and not _are_columns([*parts.values()])):
        return values
    others = tuple(part for key, part in parts.items() if key not in tuples)
    lengths = {len(part) for part in tuples.values()}
    count = num_samples(others) if others else lengths.pop() if len(lengths) == 1 else None
    is_zipped = not others and bool(tensors_in(values)) and not _have_rows(tuples.values())
    items = {
        key: list(part) if len(part) == count and (is_zipped or _are_items(part, count)) else part
        for key, part in tuples.items()
    }
    return with_parts(tuple(values) if type(values) is list else values, parts | items)


def _are_columns(parts: list[Any]) -> bool:
    """Return whether each tuple of a list holds one kind of items, and they differ in it: each tuple of a list of samples holds several."""
    kinds = [{_kind_of(item) for item in part} if type(part) is tuple else set() for part in parts]
    return all(len(some) == 1 for some in kinds) and len({*map(frozenset, kinds)}) > 1


def _have_rows(tuples: Iterable[tuple[Any, ...]]) -> bool:
    """Return whether each of some tuples has tensors, all with as many rows; a single dict is one sample's."""
    tensors = [[tensor for tensor in tensors_in(part) if tensor.dim()] for part in tuples]
    sizes = {tensor.shape[0] for some in tensors for tensor in some}
    return (
        len(sizes) == 1 and all(tensors) and not any(isinstance(part[0], Mapping) for part in tuples if len(part) == 1)
    )


def _are_items(part: tuple[Any, ...], count: int) -> bool:
    tensors = tensors_in(part)
    return bool(tensors) and not (any(tensor.dim() for tensor in tensors) and _fits(part, count))


def num_samples(values: Any) -> int | None:
    """Return the number of samples of which nested values are a batch; None if they show none."""
    candidates = dict.fromkeys([*_tensor_sizes(values), *_list_lengths(values)])
    return next((count for count in candidates if _fits(values, count)), None)


def _tensor_sizes(values: Any) -> Iterator[int]:
    if isinstance(values, Tensor):
        if values.dim():
            yield values.shape[0]
    else:
        for part in parts_of(values).values():
            yield from _tensor_sizes(part)


def _list_lengths(values: Any) -> Iterator[int]:
    if isinstance(values, list):
        yield len(values)
    else:
        for part in parts_of(values).values():
            yield from _list_lengths(part)


def _fits(values: Any, count: int) -> bool:
    """Return whether nested values can be those of `count` samples."""
    if isinstance(values, Tensor):
        return not values.dim() or values.shape[0] == count
    if isinstance(values, list):
        return _is_container(values, count) or len(values) == count
    if isinstance(values, str | bytes | bool | int | float | torch.dtype | torch.device | torch.Size | None):
        return True
    parts = parts_of(values).values()
    return (bool(parts) or isinstance(values, Mapping | tuple)) and all(_fits(part, count) for part in parts)


def _is_container(values: list[Any], count: int) -> bool:
    """Return whether a list holds parts of all samples, and not one item for each sample: tensors, or parts of different kinds."""
    is_of_parts = all(isinstance(part, Tensor) for part in values) or len({_kind_of(part) for part in values}) > 1
    return (
        is_of_parts
        and any(tensor.dim() for part in values for tensor in tensors_in(part))
        and all(_fits(part, count) for part in values)
    )


def _kind_of(part: Any) -> Any:
    """Return what items of a list that stand for one sample each have in common: their type, and the keys of dicts."""
    return (type(part), *part) if isinstance(part, Mapping) else type(part)


def is_of_samples(values: Any) -> bool:
    """Return whether values are a list of one item for each sample, such as a dict of an image and its boxes; a list of tensors is not."""
    if type(values) is not list or not values or isinstance(values[0], Tensor):
        return False
    count = num_samples(values)
    return count is not None and len(values) == count and not _is_container(values, count) and bool(tensors_in(values))


def are_by_sample(parts: Sequence[Any], counts: Sequence[int]) -> bool:
    """Return whether some list in the values of several batches, of `counts` samples each, holds one item for each sample."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return False
    if isinstance(first, list) and _are_lists_by_sample(parts, counts):
        return True
    tables = [parts_of(part) for part in parts]
    return any(are_by_sample([part.get(key) for part in tables], counts) for key in tables[0])


def _are_lists_by_sample(parts: Sequence[list[Any]], counts: Sequence[int]) -> bool:
    """Return whether lists hold one item for each sample: those of a single sample may look like parts of all samples."""
    pairs = [*zip(parts, counts, strict=True)]
    return all(len(part) == count for part, count in pairs) and not all(_is_container(*pair) for pair in pairs)


def has_items(values: Any) -> bool:
    """Return whether tensors of a batch are in lists of one item for each sample, so that they have no dimension of samples."""
    count = num_samples(values)
    return count is not None and _has_items(values, count)


def _has_items(values: Any, count: int) -> bool:
    if isinstance(values, list) and not _is_container(values, count):
        return bool(tensors_in(values))
    return any(_has_items(part, count) for part in parts_of(values).values())


def dims_of(values: Any) -> dict[str, int]:
    """Return the number of dimensions of each number, array and tensor in nested values, by its place."""
    leaves, _ = tree_flatten_with_path(values)
    return {
        keystr(path): getattr(leaf, "ndim", 0)
        for path, leaf in leaves
        if isinstance(leaf, Tensor | np.ndarray | np.generic | int | float)
    }


def rows_of(values: Any, rows: Integers | Sequence[int], count: int) -> Any:
    """Return the values of some of `count` samples, in the order of `rows`; runs of rows are views."""
    if isinstance(values, Parted):
        return values.rows(rows)
    return _rows_of(values, rows, count, _has_by_sample(values, count))


def _rows_of(values: Any, rows: Integers | Sequence[int], count: int, by_sample: bool) -> Any:
    """Return rows; with `by_sample` a list of as many tensors as samples holds one for each, whatever their number of rows is."""
    if isinstance(values, Tensor):
        return _rows_of_tensor(values, rows) if values.dim() else values
    if isinstance(values, list):
        if (by_sample and len(values) == count) or not _is_container(values, count):
            return [values[row] for row in rows]
        return [_rows_of(part, rows, count, by_sample) for part in values]
    if type(values) is dict:
        return {key: _rows_of(part, rows, count, by_sample) for key, part in values.items()}
    if not (parts := parts_of(values)):
        return values
    return with_parts(values, {key: _rows_of(part, rows, count, by_sample) for key, part in parts.items()})


def _has_by_sample(values: Any, count: int) -> bool:
    """Return whether some list holds one item for each of `count` samples, such as dicts, which is no part of all samples."""
    if isinstance(values, list) and not _is_container(values, count):
        return len(values) == count
    return not isinstance(values, Tensor) and any(_has_by_sample(part, count) for part in parts_of(values).values())


def _rows_of_tensor(values: Tensor, rows: Integers | Sequence[int]) -> Tensor:
    first, length = (int(rows[0]), len(rows)) if len(rows) else (0, 0)
    if all(row == first + place for place, row in enumerate(rows)):
        return values.narrow(0, first, length)
    return values.index_select(0, torch.as_tensor(np.asarray(rows), device=values.device))


def first_of(values: Any) -> Any:
    """Return the values of the first sample; all of them where the values do not show how many samples they are."""
    count = num_samples(values)
    return values if count is None or count == 1 else rows_of(values, [0], count)


@dataclass(frozen=True, slots=True)
class Parted:
    """The values of several batches, of `counts` samples each, of which some lack what others have, as a picture."""

    parts: Sequence[Any]
    counts: Sequence[int]

    def rows(self, rows: Integers | Sequence[int]) -> Any:
        """Return the values of some samples in the order of `rows`; what none of them has is left out."""
        ends = np.cumsum(self.counts)
        where = np.searchsorted(ends, rows, side="right")
        runs = np.split(np.arange(len(rows)), np.flatnonzero(np.diff(where)) + 1)
        runs_of_parts = []
        for run in runs:
            part = where[run[0]]
            first = ends[part] - self.counts[part]
            runs_of_parts.append(rows_of(self.parts[part], np.asarray(rows)[run] - first, self.counts[part]))
        return joined(runs_of_parts, [len(run) for run in runs], lacking=True)


def together(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """Return the values of several batches as those of one, in parts where some of them lack what others have.

    Raises:
        DataError: the batches have different kinds or shapes.
    """
    pairs = [pair for pair in zip(parts, counts, strict=True) if pair[1]]
    parts, counts = [part for part, _ in pairs], [count for _, count in pairs]
    lack = any(_keys_of(part) != _keys_of(parts[0]) for part in parts)
    values = joined(parts, counts, lacking=lack)
    return Parted(parts, counts) if lack else values


def _keys_of(values: Any) -> Any:
    """Return the keys of nested values, and which hold something; those of lists may be samples."""
    parts = {} if isinstance(values, list) else parts_of(values)
    return {key: _keys_of(part) for key, part in parts.items()} or values is None


def joined(parts: Sequence[Any], counts: Sequence[int], *, lacking: bool = False) -> Any:
    """Return the values of several batches, of `counts` samples each, as those of one, whose samples stand in their order.

    Where some may be `lacking` a key, or hold None there, it has the values of the others.

    Raises:
        DataError: the batches have different keys, kinds or shapes.
    """
    if lacking and any(part is not None for part in parts):
        pairs = [pair for pair in zip(parts, counts, strict=True) if pair[0] is not None]
        parts, counts = [part for part, _ in pairs], [count for _, count in pairs]
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        kinds = " and ".join(dict.fromkeys(type(part).__name__ for part in parts))
        raise DataError(
            "batches-not-parts",
            f"ranks hold {kinds} at one place of their batches, which are not parts of one batch. Use equal kinds",
        )
    if isinstance(first, Tensor):
        try:
            return torch.cat(list(parts)) if first.dim() else first
        except (RuntimeError, IndexError) as error:
            raise DataError(
                "batches-not-parts",
                f"the batches of ranks are not parts of one batch: {str(error).splitlines()[0]}. Use equal shapes",
            ) from None
    if isinstance(first, list) and _are_lists_by_sample(parts, counts):
        return [item for part in parts for item in part]
    tables = [parts_of(part) for part in parts]
    if any(part.keys() != tables[0].keys() for part in tables) and not (lacking and isinstance(first, Mapping)):
        what = "numbers of parts" if isinstance(first, tuple | list) else "keys"
        raise DataError("batches-not-parts", f"the batches of ranks have different {what}. Use equal ones")
    keys = dict.fromkeys(key for part in tables for key in part)
    each = {key: joined([part.get(key) for part in tables], counts, lacking=lacking) for key in keys}
    return with_parts(first, each) if each else first
