"""The batches of a stream: an IterableDataset, a loader over one, a generator or a function that makes one, any iterable.

A stream has one order, that of one reader: every rank iterates the whole stream by itself and keeps the samples of its own
micro-batches, so nothing is sent, and another number of ranks, after a resume too, sees the same batches.

    items        single samples, `train.global_batch` of which are a step, or whole batches, of which each is one: of a loader as its
                 batch_size says, else as the first item shows, whose tensors all have global_batch rows, one of them of several numbers
    its end      ends the loop, on every rank after the same step, which ranks compare in each step; a last step of fewer samples is taken, unless the loader has
                 drop_last. The next loop over the same `batches` begins the stream anew, where it can be iterated again
    a resume     by load_state_dict, with the state that `state_dict` gave when the checkpoint was saved, if the batch that came next
                 comes again: a state may lack a shuffle buffer. Else the batches before are read and left out
    generators   those of the process are seeded by (seed, pass) while the stream runs, and stand afterwards where they stood
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from samestep.datasets.batch import Batch, GivenBatch, OfStream, Steps
from samestep.datasets.generators import Generators, plain_states, states_of_plain
from samestep.datasets.loaders import draw_base_seed, last_batch
from samestep.datasets.order import draw_key
from samestep.datasets.read_ahead import Wanted, refuse_shared_files
from samestep.datasets.reading import SampleDraw, SampleReader
from samestep.datasets.stamps import digest_of
from samestep.datasets.values import joined, num_samples, tensors_of_arrays
from samestep.errors import DataError, failures_of
from samestep.job import Job
from samestep.trees import tensors_in

_OF_STREAMS = -3
"""The sample by which the key of a pass is told from those of the random changes of samples."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A source that is iterated, and the kind of its items."""

    name: str
    begin: Callable[[], Iterator[Any]]
    """Returns an iterator from the beginning, or of a generator the one that there is."""
    again: bool
    """Whether it can be iterated more than once."""
    batched: bool | None = None
    """Whether its items are whole batches; None where the first one shows it."""
    collate: Callable[[list[Any]], Any] | None = None
    drops_last: bool = False
    holder: Any = None
    """The object whose `state_dict` is the place in the stream, if it has one."""
    drawing: Any = None
    """What holds generators of its own that are seeded too."""
    remark: str = ""

    @property
    def has_state(self) -> bool:
        """Whether its place can be stored and set."""
        return hasattr(self.holder, "state_dict") and hasattr(self.holder, "load_state_dict")


def stream_of(source: Any) -> Stream | None:
    """Return what a source is as a stream; None if it is a data set, a loader over one, or nothing that can be iterated."""
    if isinstance(source, DataLoader):
        return _of_loader(source)
    name = type(source).__name__
    if isinstance(source, type | str | bytes | dict | Tensor):
        return None
    if hasattr(source, "__next__"):
        return Stream(name, lambda: source, again=False, holder=source)
    if hasattr(source, "__iter__") and (
        isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__"))
    ):
        return Stream(name, lambda: iter(source), again=True, holder=source)
    if callable(source) and not hasattr(source, "__getitem__"):
        called = getattr(source, "__name__", name)
        return Stream(called, lambda: iter(source()), again=True, holder=source)
    return None


def of_batches(batches: Sequence[Any]) -> Stream:
    """Return whole batches, one for each step, as a stream."""
    name = type(batches).__name__
    return Stream(name, lambda: iter(batches), again=True, batched=True, remark=f"{name}: each item is a whole batch")


def _of_loader(loader: DataLoader[Any]) -> Stream | None:
    dataset: Any = loader.dataset
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and loader.batch_sampler is not None:
        return None
    left = "; not taken: num_workers, since a stream has one reader" if loader.num_workers else ""
    if not is_stream:
        sampler: Any = loader.sampler

        def items() -> Iterator[Any]:
            draw_base_seed(loader.generator)
            return (dataset[index] for index in sampler)

        remark = f"used from the DataLoader without batch_size: each item of its {type(dataset).__name__}, a full batch"
        return Stream(type(dataset).__name__, items, again=True, batched=True, drawing=sampler, remark=remark + left)
    if loader.batch_size is None:
        remark = f"used from the DataLoader without batch_size: each item of the stream {type(dataset).__name__}, a full batch"
        return Stream(
            type(dataset).__name__,
            lambda: iter(dataset),
            again=True,
            batched=True,
            holder=dataset,
            remark=remark + left,
        )
    collate = "" if loader.collate_fn is default_collate else ", its collate_fn for each micro-batch"
    remark = f"used from the DataLoader: the samples of the stream {type(dataset).__name__} in the order of one reader{collate}, the last batch {last_batch(loader.drop_last)}"
    return Stream(
        type(dataset).__name__, lambda: iter(dataset), again=True, batched=False, collate=loader.collate_fn,
        drops_last=bool(loader.drop_last), holder=dataset, remark=remark + left,
    )  # fmt: skip


def check_size(source: Any, job: Job) -> None:
    """Refuse a loader over a stream whose batches have another size than the job's.

    Raises:
        DataError: they have.
    """
    size, wanted = getattr(source, "batch_size", None), job.train.global_batch
    if isinstance(source, DataLoader) and size is not None and size != wanted:
        raise DataError(
            "batch-size-differs",
            f"the DataLoader has batch_size = {size}, and train.global_batch = {wanted} samples are one step of all ranks together. Set train.global_batch = {size}, or a loader with batches of {wanted}",
        )


class Window:
    """Some samples by their places in a stream, as a data set."""

    def __init__(self, samples: Sequence[Any], first: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self.samples, self._first = samples, first
        self.indices = np.arange(first, first + len(samples), dtype=np.int64)
        if collate is not None and collate is not default_collate:
            self.collate = collate

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int, /) -> Any:
        return self.samples[index - self._first]


class StreamSteps(Steps):
    """The batches of a stream, one after another."""

    def __init__(self, stream: Stream, job: Job, first_step: int) -> None:
        """Make the batches from `first_step` on; nothing is read before the first one is asked for.

        Raises:
            DataError: they need a generator from its first item, and it has begun.
        """
        super().__init__(job, first_step)
        refuse_shared_files(stream.holder, 0)
        self._stream, self._begins_at = stream, first_step
        self.remarks = (stream.remark,) if stream.remark else ()
        self._items: Iterator[Any] | None = None
        self._generators: Generators | None = None
        self._pass, self._batched = 0, stream.batched
        self._has_begun = self._is_at_end = False
        self._pass_began_at = 0
        """The step with which the pass began."""
        self._stored: Any = None
        """The state of the stream in the checkpoint from which the run goes on."""
        self.at_end: Callable[[int], None] | None = None
        """Called with the first step of which the stream has no batch; set by the run that takes its batches."""
        self.compared = -1
        """The last step of which ranks have compared how many samples they have read."""
        self._windows: dict[int, SampleReader] = {}
        self._waiting: list[Any] = []
        """The next batch, where a checkpoint has looked at it, or None at the end."""
        self._state_before: Any = None
        """The state of the stream before that batch."""
        source = stream.holder
        if first_step and inspect.isgenerator(source) and inspect.getgeneratorstate(source) != inspect.GEN_CREATED:
            raise DataError(
                "stream-position",
                f"the generator has begun, and first_step = {first_step} reads it from its first item. Use a fresh generator, or the function that makes it",
            )

    def __iter__(self) -> StreamSteps:
        if self._is_at_end and self._stream.again:
            self._is_at_end = self._stopped = self.is_over = False
            self._items, self._waiting, self._pass, self._pass_began_at = None, [], self._pass + 1, self._next
        return self

    def begins_lanes(self, step: int) -> bool:
        """Return whether the lanes of a step go on with nothing, since a pass begins."""
        return step == self._pass_began_at

    # -- for a run ---------------------------------------------------------------------------------

    def state(self, step: int) -> Any:
        """Return the state of the stream before the batch of a step; None where it has none, or is at another step."""
        if not self._stream.has_state or self._items is None or self._next != step:
            return None
        assert self._generators is not None
        if self._waiting:  # the last checkpoint of this step has moved the stream
            return self._state_before
        state = {"step": step, "pass": self._pass, "generators": plain_states(self._generators.state)}
        state |= {"stream": copy.deepcopy(self._stream.holder.state_dict())}
        self._state_before = state
        with suppress(DataError):  # which the next step will raise too
            self._waiting = [self._take()]
            self._state_before = state | {"next": digest_of(tensors_of_arrays(self._waiting[0]))}
        return self._state_before

    def resume(self, state: Any) -> None:
        """Begin at the state that a checkpoint holds, if it is of the first step, and nothing is read yet."""
        is_next = state is not None and not self._has_begun and state["step"] == self._begins_at
        if is_next and self._stream.has_state:
            self._stored = state

    def read(self, wanted: Wanted) -> Any:
        """Return samples of a step by their places in the stream."""
        reader = self._windows[wanted.step]
        draw = SampleDraw(self._job.train.seed, wanted.step, lambda step: reader.dataset.indices)
        return reader.read(wanted.indices, draw)

    def held(self, step: int) -> Any:
        """Return the samples of a step, which all ranks hold."""
        return self._windows[step].dataset.samples

    # -- the items ---------------------------------------------------------------------------------

    def _batch(self, step: int) -> Any:
        if not self._has_begun and self._begins_at and self._stream.has_state:
            return FirstBatch(step, self)  # whose run may hold the state with which to begin
        return self.batch(step)

    def batch(self, step: int) -> Any:
        """Return the batch of a step.

        Raises:
            StopIteration: the stream is at its end.
        """
        if self._items is None:
            is_first, self._has_begun = not self._has_begun, True
            has_place = is_first and self._stored is not None and self._continue()
            if not has_place:
                self._start()
            if is_first and not has_place and self._begins_at:
                self._leave_out(self._begins_at)
        if (values := self._waiting.pop() if self._waiting else self._take()) is None:
            self._is_at_end = True
            if self.at_end is not None:
                self.at_end(step)
            raise StopIteration
        by_microbatch = self._job.numerics.batch_norm_group is not None
        if self._batched:
            count = num_samples(values)
            if not count:
                raise DataError(
                    "batch-samples-unknown",
                    f"item {step} of {self._stream.name} is not a batch with a known number of samples. Use tensors with as "
                    "many rows as there are samples",
                )
            return GivenBatch(step, values, count, by_microbatch=by_microbatch, stream=self)
        window = Window(values, step * self._job.train.global_batch, self._stream.collate)
        self._windows = {number: reader for number, reader in self._windows.items() if number == step - 1}
        self._windows[step] = SampleReader(window)
        return Batch(step, window.indices, None, self, by_microbatch, self._job.train.seed)

    def _continue(self) -> bool:
        """Go to where the stored state says; return whether the batch that came there then comes now."""
        holder = self._stream.holder
        try:
            untouched = copy.deepcopy(holder)
        except Exception as error:  # of the user's own class
            untouched = error
        self._start(self._stored)
        self._waiting = [self._take()]
        if self._stored.get("next") in (None, digest_of(tensors_of_arrays(self._waiting[0]))):
            return True
        if isinstance(untouched, Exception):
            raise DataError(
                "stream-position",
                f"load_state_dict of {self._stream.name} does not continue with the batch that came next when the checkpoint was saved, for example because "
                "its state lacks a shuffle buffer. Use a function that makes the stream: samestep then reads it from the beginning",
            ) from untouched
        self._stream = replace(self._stream, begin=lambda: iter(untouched), holder=untouched)
        self._waiting, self._pass, self._batched = [], 0, self._stream.batched
        return False

    def _start(self, state: Any = None) -> None:
        """Begin a pass, or go to where a state says."""
        if state is not None:
            self._pass = state["pass"]
            self._stream.holder.load_state_dict(state["stream"])
        key = draw_key(self._job.train.seed, self._pass, _OF_STREAMS)
        states = () if self._generators is None else self._generators.state[3:]
        self._generators = Generators.seeded_by(key, self._stream.drawing, states)
        if state is not None:
            self._generators.state = (*states_of_plain(state["generators"]), *self._generators.state[3:])
        with self._generators.in_place(), failures_of(f"beginning {self._stream.name}", DataError):
            self._items = self._stream.begin()

    def _leave_out(self, count: int) -> None:
        """Read the batches before the first step, over several passes where there were some."""
        left = f"the {count} batches before step {count + 1} of {self._stream.name} are read and left out"
        self.remarks += (left if self._stream.again else f"{left}; give it a fresh stream",)
        for _ in range(count):
            if self._take() is not None:
                continue
            if not self._stream.again:
                return
            self._pass += 1
            self._start()
            if self._take() is None:
                return

    def _take(self) -> Any:
        """Return the next batch, or the samples of the next step; None at the end."""
        assert self._items is not None
        assert self._generators is not None
        size = self._job.train.global_batch
        with self._generators.in_place(), failures_of(f"reading {self._stream.name}", DataError):
            if self._batched is None:
                first = tensors_of_arrays(next(self._items, _END))
                if first is _END:
                    return None
                self._batched = is_batch(first, size)
                self.remarks += (
                    f"{self._stream.name}: each item is {'a whole batch' if self._batched else 'a sample'}",
                )
                self._items = itertools.chain([first], self._items)
            if self._batched:
                tensors = tensors_of_arrays(next(self._items, _END))
                return None if tensors is _END else tensors
            samples = list(itertools.islice(self._items, size))
        return None if not samples or (len(samples) < size and self._stream.drops_last) else samples


class FirstBatch(OfStream):
    """The batch with which a resumed loop begins, which is read when it is looked at: the run has its place by then."""

    def __init__(self, step: int, stream: StreamSteps) -> None:
        self.step, self.stream, self._steps = step, stream, stream
        self._found: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._found is None:
            try:
                self._found = self._steps.batch(self.step)
            except StopIteration:
                raise DataError(
                    "stream-position",
                    f"the stream has no batch of step {self.step + 1}, the next one of the loop: it ended before. Use a longer stream",
                ) from None
        return getattr(self._found, name)


_END = object()


def is_batch(item: Any, size: int) -> bool:
    """Return whether an item of a stream is a whole batch of `size` samples, and not one sample."""
    tensors = tensors_in(item)
    return (
        bool(tensors)
        and all(tensor.dim() and len(tensor) == size for tensor in tensors)
        and any(tensor.dim() > 1 for tensor in tensors)
    )


def whole_of(stream: Stream, size: int) -> Batch | GivenBatch:
    """Return the batch of all samples of a stream, which is read to its end.

    Raises:
        DataError: it has none.
    """
    with Generators.seeded_by(draw_key(0, 0, _OF_STREAMS), held_by=stream.drawing).in_place():
        items = [*stream.begin()]
    if not items:
        raise DataError("data-empty", f"{stream.name} yields nothing. Use at least one sample")
    batched = is_batch(tensors_of_arrays(items[0]), size) if stream.batched is None else stream.batched
    if not batched:
        window = Window(items, 0, stream.collate)
        return Batch(0, window.indices, window)
    values = [tensors_of_arrays(item) for item in items]
    counts = [num_samples(value) or 0 for value in values]
    return GivenBatch(0, joined(values, counts), sum(counts))
