"""The batches of a run: which samples each step reads, how they are shared out, and how they become tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from samestep import calls
from samestep.datasets import loaders
from samestep.datasets.loaders import LoaderParts
from samestep.datasets.order import Integers, sample_indices
from samestep.datasets.read_ahead import ReadAhead, Wanted
from samestep.datasets.reading import SampleDraw, SampleReader, read_samples
from samestep.errors import DataError, ModelError
from samestep.job import Job
from samestep.shares import Shares
from samestep.trees import tree_leaves


class Dataset(Protocol):
    """A map-style dataset: an index gives a sample, the same one at every call.

    One with a method `read(indices)`, which returns a dict or tuple of tensors with the batch dimension first, is read
    one micro-batch at a time. One with a method `sample(index, generator)` is trained on the results of that method, a
    function of the index and of numbers drawn from the generator, and evaluated on its items.

    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample, without a batch dimension."""
        ...


INDICES_AT_ONCE = 1024
"""Samples whose indices are computed at once."""


class BatchStream(Iterator["Batch"]):
    """The batches of the remaining steps; the stream ends early once the ranks have agreed, in a step, to stop."""

    def __init__(self, dataset: Dataset, job: Job, first_step: int, parts: LoaderParts | None = None) -> None:
        """Make the stream of a data set in samestep's own order, or in that of a loader which was taken apart."""
        self._dataset, self._job, self._next = dataset, job, first_step
        self._loader = parts
        self.remarks = () if parts is None else (parts.remark,)
        """What the user of the stream should know, as lines of text."""
        self._by_microbatch = job.numerics.coupled_samples is not None
        self._length, self._stopped = len(dataset), False
        self._steps_at_once = max(1, INDICES_AT_ONCE // job.train.global_batch)
        self._block: tuple[int, Integers] | None = None
        """The number of the block of steps that was computed last, and its indices [steps, samples]."""
        self._reader = SampleReader(dataset)
        self._ahead: ReadAhead | None = None
        self._ahead_in = first_step
        """The step whose micro-batches are being taken."""
        self.before_next: Callable[[], None] | None = None
        """Called before the next batch is yielded: a step that is still under way may end the stream."""
        self.is_over = False
        """Whether the loop over the batches has ended."""

    def __next__(self) -> Batch:
        if self.before_next is not None:
            self.before_next()
        if self._stopped or self._next >= self._job.train.steps:
            self.stop()
            self.is_over = True
            raise StopIteration
        self._next += 1
        step, seed = self._next - 1, self._job.train.seed
        return Batch(step, self._indices(step), self._dataset, self, self._by_microbatch, seed)

    def stop(self) -> None:
        """End the stream after the batch that it yielded last."""
        self._stopped = True
        if self._ahead is not None:
            self._ahead.close()

    def __del__(self) -> None:
        self.stop()

    def read_ahead(self, step: int, rank: int, num_ranks: int, num_microbatches: int, *, pin: bool) -> None:
        """Begin to read one data rank's micro-batches of `step` and of later steps ahead, unless that has begun."""
        if self._ahead is not None and step not in (self._ahead_in, self._ahead_in + 1):
            self._ahead.close()
            self._ahead = None
        self._ahead_in = step
        if self._ahead is None:
            coming = (
                Wanted(later, indices)
                for later in range(step, self._job.train.steps)
                for indices in shares(
                    self._indices(later), rank, num_ranks, num_microbatches, by_microbatch=self._by_microbatch
                )
                if len(indices)
            )
            threads = self._job.numerics.precision != "float64"
            workers = self._job.run.data_workers if self._loader is None else self._loader.num_workers
            self._ahead = ReadAhead(
                self._read, coming, num_workers=workers, pin=pin, threads=threads, draws=lambda: self._reader.draws_any
            )

    def read(self, wanted: Wanted) -> Any:
        """Return samples of the dataset, which may have been read ahead."""
        return self._read(wanted) if self._ahead is None else self._ahead.take(wanted)

    def _read(self, wanted: Wanted) -> Any:
        return self._reader.read(wanted.indices, SampleDraw(self._job.train.seed, wanted.step, self._indices))

    def _indices(self, step: int) -> Integers:
        """Return the indices of a step; those of a block of steps are computed at once, since a few take numpy as
        long as many."""
        if self._loader is not None:
            return self._loader.indices(step)
        block, place = divmod(step, self._steps_at_once)
        if self._block is None or self._block[0] != block:
            train, size = self._job.train, self._steps_at_once
            found = sample_indices(block, size * train.global_batch, self._length, train.seed).reshape(size, -1)
            self._block = block, found
        return self._block[1][place].copy()


@dataclass(frozen=True, eq=False)
class Batch:
    """The global batch of one step as sample indices; every rank reads only its shares of them."""

    step: int
    """The step's index, counted from 0."""
    indices: Integers
    """The dataset indices of the global batch, in order."""
    dataset: Dataset
    stream: BatchStream | None = None
    """The stream that yielded it."""
    by_microbatch: bool = False
    """Whether micro-batch i of all ranks together is one contiguous range of the global batch, as grouped batch norm
    needs."""
    seed: int | None = None
    """Seed of the random changes of a training step's samples; None where they are read unchanged."""

    @property
    def num_samples(self) -> int:
        """The number of samples of the global batch."""
        return len(self.indices)

    def shares(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Integers]:
        """Return the sample indices of each micro-batch of one data rank."""
        return shares(self.indices, rank, num_ranks, num_microbatches, by_microbatch=self.by_microbatch)

    @property
    def is_over(self) -> bool:
        """Whether the loop over the stream that yielded this batch has ended."""
        return self.stream is not None and self.stream.is_over

    def end_stream(self) -> None:
        """End the stream that yielded this batch: it yields no further one."""
        if self.stream is not None:
            self.stream.stop()

    def before_next(self, function: Callable[[], None]) -> None:
        """Call a function before the stream that yielded this batch yields the next one, or ends."""
        if self.stream is not None:
            self.stream.before_next = function

    def samples(self, indices: npt.NDArray[np.int64] | Sequence[int]) -> dict[str, Tensor] | tuple[Tensor, ...]:
        """Return the samples of the given dataset indices as tensors with the batch dimension first.

        Raises:
            DataError: the samples cannot be stacked into tensors.
        """
        rows = np.asarray(indices, dtype=np.int64)
        if self.stream is not None:
            return self.stream.read(Wanted(self.step, rows))
        draw = None if self.seed is None else SampleDraw(self.seed, self.step, lambda _: self.indices)
        return read_samples(self.dataset, rows, draw)

    def read_ahead(self, rank: int, num_ranks: int, num_microbatches: int, *, pin: bool = False) -> None:
        """Begin to read a data rank's micro-batches, of this step and the later ones, before `samples` is asked for them.

        With `pin` their tensors lie in memory from which a GPU copies while the caller goes on.
        """
        if self.stream is not None:
            self.stream.read_ahead(self.step, rank, num_ranks, num_microbatches, pin=pin)


def check_batch(given: Any, method: str) -> str:
    """Return why `given`, which a `method` was given, is neither a batch nor the values of one; empty if it may be."""
    if given is None or (hasattr(given, "shares") and hasattr(given, "samples")) or isinstance(given, VALUES):
        return ""
    is_dataset = hasattr(given, "__getitem__") and not isinstance(given, str | bytes)
    what = "a data set itself" if is_dataset else f"a {type(given).__name__}"
    return (
        f"{method} takes a batch of samestep.batches, or the values of a whole batch in tensors, dicts, tuples and lists, and was "
        f"given {what}: `for batch in samestep.batches(dataset, job): {method}(batch)` works, with a data set whose items are single samples"
    )


def batch_to_evaluate(given: Any, method: str) -> Any:
    """Return the batch of all samples of a data set; a batch, or the values of one, is returned as it is.

    Raises:
        DataError: it is neither a batch, nor values, nor a dataset.
    """
    if given is None or hasattr(given, "shares") or isinstance(given, VALUES):
        return given
    if isinstance(given, type):
        raise DataError(f"{method} was given the class {given.__name__}: a data set works, such as {given.__name__}()")
    if (
        isinstance(given, DataLoader)
        and not isinstance(given.dataset, IterableDataset)
        and given.batch_sampler is not None
    ):
        dataset, indices = loaders.one_epoch_of(given)
        return Batch(0, indices, dataset)
    check_map_style(given, f"{method} was given")
    if not len(given):
        raise DataError(f"{method} was given a data set without samples; one sample is the least that works")
    return Batch(0, np.arange(len(given), dtype=np.int64), given)


VALUES = (Mapping, list, tuple, Tensor, np.ndarray)
"""Types in which torch's loaders yield the values of samples, and not their indices."""


@calls.checked
def batches(source: Dataset | DataLoader[Any], job: Job, first_step: int = 0) -> BatchStream:
    """Yield the batches of steps `first_step` to `job.train.steps - 1` of a data set or a DataLoader; nothing is read yet.

    A DataLoader is taken apart: its data set, the order of its sampler, its collate_fn, drop_last and num_workers.

    After Ctrl-C or SIGTERM the stream ends after the step in which the ranks agreed to stop (`StepReport.stop`), the
    same one on every rank, so that a loop over it can save its results.

    Raises:
        DataError: the dataset is empty, or its samples cannot be read by their indices.
    """
    if first_step < 0:
        raise DataError(f"first_step = {first_step}: steps are counted from 0, and run.steps_taken goes on with a run")
    if (
        isinstance(source, DataLoader)
        and not isinstance(source.dataset, IterableDataset)
        and source.batch_sampler is not None
    ):
        parts = loaders.parts_of(source, job)
        return BatchStream(parts.dataset, job, first_step, parts)
    check_map_style(source, "the dataset is")
    if len(source) < 1:
        raise DataError("the dataset has no samples; one sample is the least that works")
    return BatchStream(cast(Dataset, source), job, first_step)


def check_map_style(dataset: Any, what: str) -> None:
    """Raise an error unless `dataset` is map-style; `what` names its origin in the text.

    Raises:
        DataError: it has no length, or no samples by index.
    """
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{what} a DataLoader, and which samples a step reads is a function of its number: the loader's dataset works, with "
            "a method read(indices) in place of its collate_fn, and run.data_workers in place of num_workers"
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{what} a {type(dataset).__name__} without __len__ and __getitem__; the samples of a step must be a function of its "
            "number, so only a map-style dataset works"
        )


@contextmanager
def blame_samples(example: Any) -> Iterator[None]:
    """Blame samples that cannot be a batch, instead of the model, where the model fails on them.

    Raises:
        DataError: the model failed, and no tensor of `example` has a dimension besides that of the samples.
    """
    try:
        yield
    except ModelError as error:
        if reason := _misshapen(example):
            raise DataError(f"{reason}; {error}") from None
        raise


def _misshapen(example: Any) -> str:
    """Return why `example` is hardly a batch of samples; empty where it may be one."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.dim() > 1 for tensor in tensors):
        return ""
    if isinstance(example, (tuple, list)) and len(tensors) > 2:
        return (
            f"a sample of {len(tensors)} single numbers becomes a batch of {len(tensors)} tensors, and not of one: "
            "samples that are a tensor, torch.tensor(numbers), or a dict or a pair of tensors work"
        )
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:4])
    return (
        f"a batch of tensors {shapes} has no dimension behind that of its samples: a sample of the dataset is no batch, "
        "batch.samples([0]) is a batch of one"
    )


def shares(
    indices: npt.NDArray[np.int64], rank: int, num_ranks: int, num_microbatches: int, *, by_microbatch: bool = False
) -> list[Integers]:
    """Return the sample indices of each micro-batch of one data rank (`samestep/shares.py`)."""
    assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
    assert num_microbatches >= 1, f"{num_microbatches} micro-batches"
    places = Shares(len(indices), num_ranks, num_microbatches, by_microbatch)
    mine = (places.positions(rank, microbatch) for microbatch in range(num_microbatches))
    return [indices[where.start : where.stop] for where in mine]
