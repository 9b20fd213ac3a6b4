"""The parts of a torch DataLoader: its data set, the order of its sampler, its collate_fn and the size of its batches.

    data set      read here, by every rank the samples of its own micro-batches
    batch_size    is the job's global batch; with a DistributedSampler of R ranks, an R-th of it
    collate_fn    is called with the samples of a micro-batch
    sampler       gives the order, one in every layout and after a resume: the samples of batch b of epoch e are a function of
                  (seed, e, b). A sampler of torch's is drawn from a generator that (seed, e) seeds, and so are the generators of the
                  process while another one yields. A torch.Generator that was given is followed instead, from its state when the loop
                  begins: the order is that of a plain loop over the loader. A DistributedSampler's is that of one rank
    drop_last     leaves out the last batch of an epoch where it is smaller; else that step has fewer samples
    num_workers   processes that read, where `run.data_workers` asks for none

An epoch ends as the loader's does: no batch has samples of two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from samestep.datasets.generators import Generators, generators_in, seeded
from samestep.datasets.order import Integers, draw_key, permute_epoch
from samestep.errors import DataError
from samestep.job import Job

_KEPT = 64
"""So many steps back a batch's indices are kept, since micro-batches are read ahead of the step."""


class CollatedDataset:
    """The data set of a loader, whose micro-batches are put together by the loader's collate_fn."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate, self.name_of_dataset = dataset, collate, type(dataset).__name__
        if getattr(dataset, "__getitems__", None):
            self.__getitems__ = dataset.__getitems__

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> Any:
        return self.dataset[index]


@dataclass(frozen=True, slots=True)
class LoaderParts:
    """The parts of a loader that a run uses."""

    dataset: CollatedDataset
    indices: Callable[[int], Integers]
    """Returns the indices of the samples of a step; the steps asked for come in order, up to a few back."""
    num_workers: int
    remark: str
    """What was taken and what was not, in one line."""


def parts_of(loader: DataLoader[Any], job: Job) -> LoaderParts:
    """Split a loader over a map-style data set into its parts.

    Raises:
        DataError: its batches are of another size than the job's, or it has no batch.
    """
    sampler, by_batch = _sampler_of(loader)
    if not by_batch:
        _check_size(loader, sampler, job)
    order = _order_of(loader, job.train.global_batch, job.train.seed)
    dataset = CollatedDataset(loader.dataset, loader.collate_fn)
    workers = job.run.data_workers or loader.num_workers
    return LoaderParts(dataset, order.indices, workers, _remark(loader, sampler, by_batch, workers))


def one_epoch_of(loader: DataLoader[Any]) -> tuple[CollatedDataset, Integers]:
    """Return the data set of a loader, and the indices of the samples of one epoch in order."""
    order = _order_of(loader, _batch_size(loader), 0)
    count = order.per_epoch or len(loader)
    return CollatedDataset(loader.dataset, loader.collate_fn), np.concatenate(
        [order.indices(step) for step in range(count)]
    )


def _sampler_of(loader: DataLoader[Any]) -> tuple[Any, bool]:
    """Return what yields the indices of a loader, and whether it yields those of whole batches."""
    batches: Any = loader.batch_sampler
    by_batch = type(batches) is not BatchSampler
    return (batches if by_batch else batches.sampler), by_batch


def _batch_size(loader: DataLoader[Any]) -> int:
    return int(getattr(loader.batch_sampler, "batch_size", 1))


def _drops_last(loader: DataLoader[Any]) -> bool:
    return bool(getattr(loader.batch_sampler, "drop_last", False))


def last_batch(drops_last: bool | None) -> str:
    """Return when the last batch of an epoch is taken, in words."""
    return "only if it is full" if drops_last else "also if it is smaller"


def _check_size(loader: DataLoader[Any], sampler: Any, job: Job) -> None:
    ranks = sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1
    size, wanted = _batch_size(loader) * ranks, job.train.global_batch
    if size != wanted:
        of_ranks = f" on each of the {ranks} ranks of its DistributedSampler" if ranks > 1 else ""
        raise DataError(
            "batch-size-differs",
            f"the DataLoader has batch_size = {_batch_size(loader)}{of_ranks}, and train.global_batch = {wanted} samples are one step of all ranks together. Set train.global_batch = {size}, or a loader with batches of {wanted}",
        )


def _remark(loader: DataLoader[Any], sampler: Any, by_batch: bool, workers: int) -> str:
    taken = [f"its data set ({type(loader.dataset).__name__})"]
    if loader.collate_fn is not default_collate:
        name = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
        taken.append(f"collate_fn {name} for each micro-batch")
    if by_batch:
        taken.append(f"the batches of its {type(sampler).__name__}")
    elif isinstance(sampler, DistributedSampler):
        taken.append("the order of its DistributedSampler on one rank")
    else:
        taken.append(f"the order of its {type(sampler).__name__}")
    if type(sampler) in _OF_TORCH and sampler.generator is None:
        taken[-1] += " (seeded by train.seed)"
    elif type(sampler) not in (*_OF_TORCH, SequentialSampler, DistributedSampler) and not [*generators_in(sampler)]:
        taken[-1] += " (seeded by train.seed, if it draws from generators of the process)"
    if hasattr(sampler, "set_epoch"):
        taken[-1] += ", with set_epoch(0) and so on"
    if not by_batch:
        taken.append(f"the last batch of an epoch {last_batch(_drops_last(loader))}")
    if workers:
        taken.append(f"{workers} reader processes")
    left = [
        name
        for name, value in (
            ("worker_init_fn", loader.worker_init_fn), ("timeout", loader.timeout), ("generator", loader.generator),
            ("persistent_workers", loader.persistent_workers), ("prefetch_factor", loader.num_workers and loader.prefetch_factor != 2),
        )
        if value
    ]  # fmt: skip
    left = [name for name in left if name != "generator" or loader.generator is not getattr(sampler, "generator", None)]
    if any(not isinstance(generator, torch.Generator) for generator in generators_in(sampler)):
        left.append("the seeds of its sampler's generators (train.seed replaces them)")
    return f"used from the DataLoader: {', '.join(taken)}" + (f"; ignored: {', '.join(left)}" if left else "")


# -- the order -------------------------------------------------------------------------------------


class _Order:
    """The batches of a sampler, epoch after epoch."""

    def __init__(self, size: int, drops_last: bool) -> None:
        self._size, self._drops_last = size, drops_last
        self.per_epoch = 0
        """The number of batches of an epoch; 0 where epochs may differ."""

    def indices(self, step: int) -> Integers:
        """Return the indices of the samples of a step."""
        raise NotImplementedError


class _Computed(_Order):
    """Epochs of one length, each of which can be computed without those before it."""

    def __init__(self, length: int, take: Callable[[int, int, int], Integers], size: int, drops_last: bool) -> None:
        """Make the order of epochs of `length` samples; `take` returns those of an epoch between two places."""
        super().__init__(size, drops_last)
        self._length, self._take = length, take
        self.per_epoch = length // size if drops_last else -(-length // size)
        if not self.per_epoch:
            raise DataError("dataloader-sampler", _NO_BATCH)

    def indices(self, step: int) -> Integers:
        """Return the indices of the samples of a step."""
        epoch, place = divmod(step, self.per_epoch)
        start = place * self._size
        return self._take(epoch, start, min(start + self._size, self._length))


class _Replayed(_Order):
    """The batches that a sampler yields, which are asked for in order from its first epoch on."""

    def __init__(self, sampler: Iterable[Any], size: int, drops_last: bool, seed: int, *, by_batch: bool) -> None:
        super().__init__(size, drops_last)
        self._sampler, self._seed, self._by_batch = sampler, seed, by_batch
        self._batches = self._all()
        self._own: Sequence[Any] = ()
        """The states of the generators that the sampler holds, after the last epoch."""
        self._count = 0
        self._found: dict[int, Integers] = {}

    def indices(self, step: int) -> Integers:
        """Return the indices of the samples of a step."""
        while self._count <= step:
            self._found[self._count] = next(self._batches)
            self._found.pop(self._count - _KEPT, None)
            self._count += 1
        return self._found[step].copy()

    def _all(self) -> Iterator[Integers]:
        epoch = 0
        while True:
            is_empty = True
            for batch in self._epoch(epoch):
                is_empty = False
                yield batch
            if is_empty:
                raise DataError("dataloader-sampler", _NO_BATCH)
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[Integers]:
        """Yield the batches of an epoch; the generators are those of the epoch while the sampler runs alone."""
        generators = Generators.seeded_by(draw_key(self._seed, epoch, _OF_EPOCHS), self._sampler, self._own)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        items: Iterator[Any] | None = None
        item: Any
        indices: list[int] = []
        while True:
            with generators.in_place():
                items = iter(self._sampler) if items is None else items
                item = next(items, _END)
            if item is _END:
                break
            indices += [_index(index) for index in item] if self._by_batch else [_index(item)]
            if self._by_batch or len(indices) == self._size:
                yield np.array(indices, dtype=np.int64)
                indices = []
        self._own = generators.state[3:]
        if indices and not self._drops_last:
            yield np.array(indices, dtype=np.int64)


_END = object()
_OF_EPOCHS = -2
"""The sample by which the key of an epoch is told from those of the random changes of samples."""
_NO_BATCH = "the DataLoader has no batch in an epoch. Use a sampler that yields as many indices as a batch has, and drop_last=False"


def _index(index: Any) -> int:
    try:
        return int(index)
    except (TypeError, ValueError):
        raise DataError(
            "dataloader-sampler",
            f"the DataLoader's sampler yields a {type(index).__name__} and not indices. Use whole numbers",
        ) from None


def _order_of(loader: DataLoader[Any], size: int, seed: int) -> _Order:
    drops, (sampler, by_batch) = _drops_last(loader), _sampler_of(loader)
    if by_batch:
        return _Replayed(sampler, size, False, seed, by_batch=True)
    length = len(sampler) if type(sampler) in (SequentialSampler, RandomSampler) else 0
    if type(sampler) is SequentialSampler:
        return _Computed(length, lambda _, start, stop: np.arange(start, stop, dtype=np.int64), size, drops)
    if getattr(sampler, "generator", None) is not None and type(sampler) in _OF_TORCH:
        return _Computed(len(sampler), _of_whole_epochs(_following(loader, sampler)), size, drops)
    if type(sampler) is RandomSampler and not sampler.replacement and length == len(sampler.data_source):
        return _Computed(
            length, lambda epoch, start, stop: permute_epoch(epoch, start, stop, length, seed), size, drops
        )
    if isinstance(sampler, DistributedSampler):
        return _of_one_rank(sampler, size, drops)
    if type(sampler) in _OF_TORCH:
        copied = copy.copy(sampler)

        def drawn(epoch: int) -> list[int]:
            copied.generator = seeded(draw_key(seed, epoch, _OF_EPOCHS))
            return list(copied)

        return _Computed(len(sampler), _of_whole_epochs(drawn), size, drops)
    return _Replayed(sampler, size, drops, seed, by_batch=False)


_OF_TORCH = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)


def _following(loader: DataLoader[Any], sampler: Any) -> Callable[[int], list[int]]:
    """Return what draws an epoch of a sampler as a loop over the loader does, from a copy of the generator that it was given."""
    copied, states = copy.copy(sampler), [sampler.generator.get_state()]
    copied.generator = torch.Generator(sampler.generator.device)
    is_shared = loader.generator is sampler.generator

    def drawn(epoch: int) -> list[int]:
        known, indices = min(epoch, len(states) - 1), list[int]()
        copied.generator.set_state(states[known])
        for number in range(known, epoch + 1):
            if is_shared and not (number and loader.persistent_workers):
                draw_base_seed(copied.generator)
            indices = list(copied)
            states[number + 1 :] = states[number + 1 :] or [copied.generator.get_state()]
        return indices

    return drawn


def draw_base_seed(generator: torch.Generator | None) -> None:
    """Draw the seed of processes that read, as torch does at the beginning of a loop over a loader."""
    if generator is not None:
        torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)


def _of_one_rank(sampler: DistributedSampler[Any], size: int, drops: bool) -> _Order:
    """Return the order that a sampler which divides samples among ranks has on one rank, by its seed."""
    copied = copy.copy(sampler)
    copied.num_replicas, copied.rank = 1, 0
    copied.num_samples = copied.total_size = len(sampler.dataset)  # type: ignore[arg-type]

    def drawn(epoch: int) -> list[int]:
        copied.set_epoch(epoch)
        return list(copied)

    return _Computed(copied.num_samples, _of_whole_epochs(drawn), size, drops)


def _of_whole_epochs(drawn: Callable[[int], list[int]]) -> Callable[[int, int, int], Integers]:
    epochs: dict[int, Integers] = {}

    def take(epoch: int, start: int, stop: int) -> Integers:
        if epoch not in epochs:
            epochs[epoch] = np.array(drawn(epoch), dtype=np.int64)
            for old in [e for e in epochs if e < epoch - 1]:
                del epochs[old]
        return epochs[epoch][start:stop].copy()

    return take
