"""The batches of a run: which samples each step reads, how they are shared out, and how they become tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.datasets.loaders import LoaderParts
from samestep.datasets.order import Integers, sample_indices
from samestep.datasets.read_ahead import ReadAhead, Wanted, refuse_shared_files
from samestep.datasets.reading import SampleDraw, SampleReader, read_samples
from samestep.datasets.values import Parted, rows_of
from samestep.errors import DataError, ModelError
from samestep.job import Job
from samestep.shares import Shares
from samestep.trees import tree_leaves

LOOKED_AT = 64
"""Samples among which the example is found."""


class FileSamples:
    """A dataset that a reader of files has opened, with its remarks for the user."""

    remarks: tuple[str, ...] = ()
    """Remarks for the user about the files."""
    classes: tuple[str, ...] = ()
    """Names of the classes of samples, by number; none of text."""


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


ONE_LOOP = "Set train.steps to the steps of all epochs, and use one loop over samestep.batches, with first_step=run.steps_taken after run.load"
"""The way out of a loop that asks for its batches again in each epoch."""


class Steps(Iterator[Any]):
    """The batches of the remaining steps; they end early once the ranks have agreed, in a step, to stop."""

    def __init__(self, job: Job, first_step: int) -> None:
        self._job, self._next = job, first_step
        self._stopped = False
        self.remarks: tuple[str, ...] = ()
        """What the user of the batches should know, as lines of text."""
        self.before_next: Callable[[], None] | None = None
        """Called before the next batch is yielded: a step that is still under way may end the stream."""
        self.is_over = False
        """Whether the loop over the batches has ended."""
        self.has_lanes = False
        """Whether sample i of a step goes on with sample i of the step before."""

    def __iter__(self) -> Steps:
        """Return the batches that remain.

        Raises:
            DataError: a loop has taken all of them, and another one, as of the next epoch, would take none.
        """
        if self.is_over and self._next >= self._job.train.steps:
            raise DataError(
                "stream-position",
                f"the batches have ended with step {self._next}, the last of train.steps = {self._job.train.steps}. {ONE_LOOP}",
            )
        return self

    def begins_lanes(self, step: int) -> bool:
        """Return whether the lanes of a step go on with nothing."""
        return False

    def __next__(self) -> Any:
        if self.before_next is not None:
            self.before_next()
        try:
            if self._stopped or self._next >= self._job.train.steps:
                raise StopIteration
            batch = self._batch(self._next)
        except StopIteration:
            self.stop()
            self.is_over = True
            raise
        self._next += 1
        return batch

    def _batch(self, step: int) -> Any:
        """Return the batch of a step, or raise StopIteration where there is none."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the stream after the batch that it yielded last."""
        self._stopped = True

    def read_ahead(self, step: int, rank: int, num_ranks: int, num_microbatches: int, *, pin: bool) -> None:
        """Begin to read one data rank's micro-batches of `step` and of later steps ahead, unless that has begun."""

    def read(self, wanted: Wanted) -> Any:
        """Return samples of a step."""
        raise NotImplementedError

    def held(self, step: int) -> Any:
        """Return the samples of a step, where all ranks hold them; else None."""
        return None


class BatchStream(Steps):
    """The batches of a data set."""

    def __init__(self, dataset: Dataset, job: Job, first_step: int, parts: LoaderParts | None = None) -> None:
        """Make the stream of a data set in samestep's order, or in that of a torch DataLoader."""
        super().__init__(job, first_step)
        self._dataset, self._loader = dataset, parts
        self.remarks = () if parts is None else (parts.remark,)
        self._by_microbatch = job.numerics.batch_norm_group is not None
        self._length = len(dataset)
        self._steps_at_once = max(1, INDICES_AT_ONCE // job.train.global_batch)
        self._block: tuple[int, Integers] | None = None
        """The number of the block of steps that was computed last, and its indices [steps, samples]."""
        self._reader = SampleReader(dataset)
        self._ahead: ReadAhead | None = None
        self._ahead_in = first_step
        """The step whose micro-batches are being taken."""

    def _batch(self, step: int) -> Batch:
        return Batch(step, self._indices(step), self._dataset, self, self._by_microbatch, self._job.train.seed)

    def stop(self) -> None:
        """End the stream after the batch that it yielded last."""
        super().stop()
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
            refuse_shared_files(self._dataset, workers)
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
            indices = sample_indices(block, size * train.global_batch, self._length, train.seed).reshape(size, -1)
            self._block = block, indices
        return self._block[1][place].copy()


class LaneSteps(BatchStream):
    """The batches of a data set that is cut into lanes, each of consecutive samples: sample k of lane i is sample i n + k of it.

    A pass has n steps, the number of samples over that of lanes, rounded down; the next pass begins the lanes anew.
    """

    def __init__(self, dataset: Dataset, job: Job, first_step: int) -> None:
        """Make the batches of as many lanes as the job's steps have samples.

        Raises:
            DataError: the data set has fewer samples than lanes.
        """
        super().__init__(dataset, job, first_step)
        self._per_lane = len(dataset) // job.train.global_batch
        if not self._per_lane:
            raise DataError(
                "data-too-short",
                f"the data set has {len(dataset)} samples, and train.global_batch = {job.train.global_batch} lanes take one each in a step. Set "
                f"train.global_batch = {len(dataset)}, and fewer",
            )

    def begins_lanes(self, step: int) -> bool:
        """Return whether the lanes of a step go on with nothing, since a pass begins."""
        return step % self._per_lane == 0

    def _indices(self, step: int) -> Integers:
        return np.arange(self._job.train.global_batch, dtype=np.int64) * self._per_lane + step % self._per_lane


class OfStream:
    """A batch that a stream may have yielded; without one the next step acts in its place."""

    stream: Steps | None
    step: int

    def __getitem__(self, key: Any) -> Any:
        """Return a field of the samples of all ranks, such as `batch["labels"]` or `batch[0]`: a copy, which the first call reads."""
        return self._read_whole[key]

    @functools.cached_property
    def _read_whole(self) -> Any:
        batch: Any = self
        return batch.samples(batch.shares(0, 1, 1)[0])

    def read_ahead(self, rank: int, num_ranks: int, num_microbatches: int, *, pin: bool = False) -> None:
        """Begin to read a data rank's micro-batches, of this step and the later ones, before `samples` is asked for them.

        With `pin` their tensors lie in memory from which a GPU copies while the caller goes on.
        """
        if self.stream is not None:
            self.stream.read_ahead(self.step, rank, num_ranks, num_microbatches, pin=pin)

    def end_stream(self) -> None:
        """End the stream that yielded this batch: it yields no further one, and `StepReport.stop` says so."""
        if self.stream is not None:
            self.stream.stop()

    def before_next(self, function: Callable[[], None]) -> None:
        """Call a function before the stream that yielded this batch yields the next one, or ends."""
        if self.stream is not None:
            self.stream.before_next = function


@dataclass(frozen=True, eq=False)
class Batch(OfStream):
    """The global batch of one step as sample indices; every rank reads only its shares of them."""

    step: int
    """The step's index, counted from 0."""
    indices: Integers
    """The dataset indices of the global batch, in order."""
    dataset: Dataset | None
    """None if a stream yielded the samples."""
    stream: Steps | None = None
    """The stream that yielded it."""
    by_microbatch: bool = False
    """Whether micro-batch i of all ranks together is one contiguous range of the global batch, as grouped batch norm
    needs."""
    seed: int | None = None
    """Seed of the random changes of a training step's samples; None if samples are read unchanged."""

    @property
    def num_samples(self) -> int:
        """The number of samples of the global batch."""
        return len(self.indices)

    @property
    def held(self) -> Any:
        """The samples themselves, where every rank holds those of the whole batch; else None."""
        return None if self.stream is None else self.stream.held(self.step)

    def shares(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Integers]:
        """Return the sample indices of each micro-batch of one data rank."""
        return shares(self.indices, rank, num_ranks, num_microbatches, by_microbatch=self.by_microbatch)

    @property
    def is_over(self) -> bool:
        """Whether the loop over the stream that yielded this batch has ended."""
        return self.stream is not None and self.stream.is_over

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


ONLY_MAP_STYLE = "the samples of a step must be a function of its number. Use a map-style dataset"


def check_map_style(dataset: Any, what: str, works: str = ONLY_MAP_STYLE) -> None:
    """Raise an error unless `dataset` is map-style; `what` names its origin in the text, and `works` what is taken.

    Raises:
        DataError: it has no length, or no samples by index.
    """
    if isinstance(dataset, type):
        raise DataError(
            "argument-type", f"{what} the class {dataset.__name__}. Use a data set, such as {dataset.__name__}()"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError("data-form", f"{what} a {type(dataset).__name__} without __len__ and __getitem__. {works}")
    if isinstance(dataset, str | bytes) or (isinstance(dataset, dict) and 0 not in dataset):
        raise DataError(
            "data-form",
            f"{what} a {type(dataset).__name__} without samples at the numbers 0, 1, .... Use a list of samples, such as "
            "a dict of tensors for each, or torch.utils.data.TensorDataset(x, labels)",
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
            raise DataError(error.code, f"{reason}; {error}") from None
        raise


def _misshapen(example: Any) -> str:
    """Return why `example` is hardly a batch of samples; empty where it may be one."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.dim() > 1 for tensor in tensors):
        return ""
    if isinstance(example, (tuple, list)) and len(tensors) > 2:
        return (
            f"a sample of {len(tensors)} single numbers becomes a batch of {len(tensors)} tensors, and not of one. Use "
            "samples that are a tensor, torch.tensor(numbers), or a dict or a pair of tensors"
        )
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:4])
    return (
        f"a batch of tensors {shapes} has no dimension after the one of its samples: a sample of the dataset is not a batch, "
        "batch.samples([0]) is a batch of one"
    )


def shares(
    indices: npt.NDArray[np.int64], rank: int, num_ranks: int, num_microbatches: int, *, by_microbatch: bool = False
) -> list[Integers]:
    """Return the sample indices of each micro-batch of one data rank (`samestep/shares.py`)."""
    assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
    assert num_microbatches >= 1, f"{num_microbatches} micro-batches"
    return [indices[where] for where in _places(len(indices), rank, num_ranks, num_microbatches, by_microbatch)]


@functools.lru_cache
def _places(count: int, rank: int, num_ranks: int, num_microbatches: int, by_microbatch: bool) -> list[slice]:
    """Return where the samples of each micro-batch of a rank are, which every step asks for."""
    parts = Shares(count, num_ranks, num_microbatches, by_microbatch)
    positions = (parts.positions(rank, microbatch) for microbatch in range(num_microbatches))
    return [slice(where.start, where.stop) for where in positions]


@dataclass(frozen=True, eq=False)
class GivenBatch(OfStream):
    """A batch of one step whose values this process holds: of all samples, or of those of its data rank."""

    step: int
    """The step's index, counted from 0."""
    values: Any
    count: int
    """The number of samples whose values are here."""
    sizes: tuple[int, ...] | None = None
    """The number of samples that each data rank holds, where they hold different ones."""
    rank: int = 0
    """The data rank whose samples are here, where they hold different ones."""
    by_microbatch: bool = False
    """Whether micro-batch i of all ranks together is one contiguous range of the batch."""
    stream: Steps | None = None
    """The stream that yielded it, if one did."""

    @property
    def num_samples(self) -> int:
        """The number of samples of all ranks."""
        return self.count if self.sizes is None else sum(self.sizes)

    @property
    def held(self) -> Any:
        """The values of a stream's batch, which every rank holds; else None."""
        return None if self.stream is None else self.values

    @property
    def _first(self) -> int:
        return 0 if self.sizes is None else sum(self.sizes[: self.rank])

    def shares(self, rank: int, num_ranks: int, num_microbatches: int) -> list[Integers]:
        """Return the positions in the batch of the samples of each micro-batch of one data rank.

        Where ranks hold different samples, the share of one rank of one is what is held here. Samples of ranks that lack what those of
        others have stay separate.
        """
        if self.sizes is not None and isinstance(self.values, Parted) and num_ranks == len(self.sizes):
            return replace(self, rank=rank, count=self.sizes[rank], values=None).shares(0, 1, num_microbatches)
        here = np.arange(self._first, self._first + self.count, dtype=np.int64)
        if self.sizes is not None and not isinstance(self.values, Parted):
            return shares(here, 0, 1, num_microbatches)
        return shares(here, rank, num_ranks, num_microbatches, by_microbatch=self.by_microbatch)

    def samples(self, indices: Integers | Sequence[int]) -> Any:
        """Return the values of the samples at these positions of the batch."""
        return rows_of(self.values, np.asarray(indices) - self._first, self.count)


def example_in(batch: Any) -> Any:
    """Return a batch of one sample of a batch: the first one, or of dicts the first with most of the keys, also of others of its data set.

    A trace shows no tower for pictures where its sample has none.
    """
    dataset = getattr(batch, "dataset", None)
    length = 0 if dataset is None else len(dataset)
    rows: list[int] = list(batch.shares(0, 1, 1)[0][:LOOKED_AT])
    others = [*rows[1:], *range(0, length, -(-length // LOOKED_AT) or 1)]
    return _fullest(batch.samples(rows[:1]), (batch.samples([row]) for row in others))


def _fullest(first: Any, others: Iterator[Any]) -> Any:
    if not isinstance(first, Mapping):
        return first
    return max((first, *others), key=lambda sample: sum(part is not None for part in sample.values()))


def example_of(dataset: Dataset) -> Any:
    """Return a batch of one sample: as `example_in`, or of packed documents one with about the mean amount of attention.

    A trace shows a mask of documents only where the example has several of them.

    Raises:
        DataError: the samples cannot be read, or stacked into tensors.
    """
    first = read_samples(dataset, np.arange(1))
    places = range(1, min(len(dataset), LOOKED_AT))
    positions = first.get("position_ids") if isinstance(first, dict) else None
    if positions is None or positions.dim() != 2:
        return _fullest(first, (read_samples(dataset, np.array([index])) for index in places))
    index = _usual(torch.cat([positions, *(_positions(dataset, index) for index in places)]))
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
