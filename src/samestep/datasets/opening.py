"""From what a loop has, a data set, a loader, a stream or values, to the batches of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from samestep import calls
from samestep.datasets import loaders
from samestep.datasets.batch import Batch, BatchStream, LaneSteps, Steps, check_map_style
from samestep.datasets.reading import read_samples
from samestep.datasets.streams import StreamSteps, check_size, is_batch, of_batches, stream_of, whole_of
from samestep.datasets.values import dims_of, joined, num_samples, tensors_of_arrays
from samestep.errors import DataError, short_repr
from samestep.job import Job
from samestep.trees import parts_of, tensors_in


def check_batch(batch: Any, method: str) -> str:
    """Return why `batch`, which a `method` was given, is neither a batch nor the values of one; empty if it may be."""
    if batch is None or (hasattr(batch, "shares") and hasattr(batch, "samples")):
        return ""
    if is_values(batch):
        sparse = next((leaf for leaf in tensors_in(batch) if leaf.layout not in (torch.strided, torch.jagged)), None)
        if sparse is None:
            return ""
        shape = list(sparse.shape)
        return f"{method} was given a tensor {shape} with the layout {sparse.layout}, which has no rows of samples. Use to_dense()"
    is_dataset = hasattr(batch, "__getitem__") and not isinstance(batch, str | bytes)
    what = "a data set itself" if is_dataset else f"a {type(batch).__name__}"
    return (
        f"{method} takes a batch of samestep.batches, or the values of a whole batch in tensors, dicts, tuples, lists and dataclasses, and was "
        f"given {what}. Use `for batch in samestep.batches(dataset, job): {method}(batch)`, with a data set of single samples"
    )


def batch_to_evaluate(batch: Any, method: str, global_batch: int, trained: Mapping[str, int]) -> Any:
    """Return the batch of all samples of a data set; a batch, or the values of one, is returned as it is.

    A list is a data set where its items are samples of those that the run trains on, or whole batches of them: `trained` has the
    number of dimensions of each tensor of a batch by its place, and is empty before the first step.

    Raises:
        DataError: it is neither a batch, nor values, nor a dataset.
    """
    if type(batch) is list:
        return _of_list(batch, trained)
    if batch is None or hasattr(batch, "shares") or is_values(batch):
        return batch
    if (stream := stream_of(batch)) is not None:
        return whole_of(stream, global_batch)
    if isinstance(batch, DataLoader):
        dataset, indices = loaders.one_epoch_of(batch)
        return Batch(0, indices, dataset)
    check_map_style(batch, f"{method} was given", _WORKS)
    if not len(batch):
        raise DataError("data-empty", f"{method} was given a data set without samples. Use at least one sample")
    return Batch(0, np.arange(len(batch), dtype=np.int64), batch)


def _of_list(values: list[Any], trained: Mapping[str, int]) -> Any:
    """Return the values of all samples of a list of samples or of whole batches; a list that is the values of a batch as it is.

    Samples of different sizes are a batch of the list as a data set.
    """
    items = [tensors_of_arrays(item) for item in values]
    dims = [dims_of(item) for item in items]
    has_one_size = len({tuple(tensor.shape for tensor in tensors_in(item)) for item in items}) == 1
    if (
        not trained and has_one_size and isinstance(values[0], Mapping | tuple)
    ):  # a batch of such items needs a step first
        trained = {place: number + 1 for place, number in dims[0].items()}
    if not values or dims_of(values) == trained or any(not dim or dim.keys() - trained.keys() for dim in dims):
        return values
    more = {trained[place] - number for dim in dims for place, number in dim.items()}
    if more == {0}:
        return joined(items, [num_samples(item) or 0 for item in items])
    if more != {1}:
        return values
    indices = np.arange(len(values), dtype=np.int64)
    return read_samples(values, indices) if has_one_size else Batch(0, indices, values)


_WORKS = (
    "Use a data set with both, a DataLoader, an IterableDataset or another iterable, or a function that yields samples"
)
_VALUES = (Mapping, list, tuple, Tensor, np.ndarray)


def is_values(values: Any) -> bool:
    """Return whether something is the values of samples, as torch's loaders yield them, and neither their indices nor a data set."""
    return isinstance(values, _VALUES) or (bool(parts_of(values)) and not hasattr(values, "__getitem__"))


@calls.checked
def batches(source: Any, job: Job, *, first_step: int = 0, lanes: bool = False) -> Steps:
    """Yield the batches of steps `first_step` to `job.train.steps - 1` of a dataset, a DataLoader or a stream.

    samestep uses the parts of a DataLoader: its dataset, the order of its sampler, its collate_fn, drop_last and num_workers. A stream is an
    IterableDataset, an iterable or a generator of samples or of full batches, or a function that makes one, which can restart. A stream has
    one order in every layout, and its end ends the batches.

    With `lanes`, sample i of a step continues sample i of the step before, and the model's forward is called as
    forward(batch, carried) -> outputs, carried. A dataset is split into one sequence of consecutive samples for each sample of a step.
    A loader and a stream must be in this order already.

    After Ctrl-C or SIGTERM, the ranks agree on a last step (`StepReport.stop`), and the stream ends after it. So a loop over it can save
    its results.

    Raises:
        DataError: the dataset is empty, or its samples cannot be read by their indices.
    """
    if not isinstance(lanes, bool):
        raise DataError("argument-type", f"lanes = {short_repr(lanes)}. Use True or False")
    if first_step < 0:
        raise DataError(
            "value-out-of-range",
            f"first_step = {first_step}: steps are counted from 0, and run.steps_taken continues a run",
        )
    steps = _steps_of(source, job, lanes, first_step)
    steps.has_lanes = lanes
    return steps


def _steps_of(source: Any, job: Job, lanes: bool, first_step: int) -> Steps:
    is_listed = (
        type(source) in (list, tuple) and source and is_batch(tensors_of_arrays(source[0]), job.train.global_batch)
    )
    if (stream := of_batches(source) if is_listed else stream_of(source)) is not None:
        check_size(source, job)
        return StreamSteps(stream, job, first_step)
    if isinstance(source, DataLoader):
        parts = loaders.parts_of(source, job)
        return BatchStream(parts.dataset, job, first_step, parts)
    check_map_style(source, "the dataset is", _WORKS)
    if len(source) < 1:
        raise DataError("data-empty", "the dataset has no samples. Use at least one sample")
    return LaneSteps(source, job, first_step) if lanes else BatchStream(source, job, first_step)
