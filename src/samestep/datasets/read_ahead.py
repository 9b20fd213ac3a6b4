"""Micro-batches that are read while earlier ones compute: in a thread of this process, or in worker processes.

The samples of a step are a function of (seed, step), so what a rank will read is known before it asks: the shares of this
step's micro-batches, of the next step's, and so on. They are read in that order, a few ahead of the one in use:

    run.data_workers = 0    a thread reads the next two micro-batches, once two reads one after the other have taken a
                            millisecond or more (a first one is slow by itself, and handing one over takes as long as a
                            quick one), unless reading draws from a generator
                            of the process (`reading.py`): a forward meanwhile would be blamed for it;
                            and not in float64, whose forwards change the default dtype of the process
    run.data_workers = N    N processes read two micro-batches each, as torch's DataLoader distributes them

Only where the work is done changes: a micro-batch that was not predicted, such as one that the canary reads again, is
read at once by the caller. So a resumed run may have another number of workers and reads the same samples.
"""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import stat
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from samestep.datasets.order import Integers
from samestep.datasets.reading import THREAD_NAME, DrawnInThreadError
from samestep.errors import DataError, SamestepError, WorkerError
from samestep.trees import map_tensors


class Wanted(NamedTuple):
    """The samples that a step will ask for."""

    step: int
    indices: Integers

    def is_same(self, other: Wanted) -> bool:
        """Return whether these are the same samples of the same step."""
        return self.step == other.step and self.indices.tobytes() == other.indices.tobytes()


Read = Callable[[Wanted], Any]
"""Reads samples into tensors with the batch dimension first."""

AHEAD = 2
"""Micro-batches that the thread, or each process, holds ready."""
WORTH_A_THREAD_S = 1e-3
"""Seconds that each of `SLOW_READS` must take before a thread reads ahead."""
SLOW_READS = 2
"""Reads one after the other that must be slow: the first one of a process is, and any one during which others run."""


class ReadAhead:
    """The micro-batches of one rank in the order in which its steps take them, read before they are taken."""

    def __init__(
        self,
        read: Read,
        coming: Iterator[Wanted],
        *,
        num_workers: int,
        pin: bool,
        threads: bool = True,
        draws: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read `coming`, the samples of each micro-batch, in a thread if `threads` and it pays; `pin` puts tensors
        into memory that a GPU copies from, and `draws` says whether reading has drawn from a generator of the process."""
        self._lock = threading.Lock()  # a data set is read by one thread at a time
        self._read, self._pin, self._threads = read, pin, threads
        self._coming = coming
        self._next: Wanted | None = next(coming, None)
        self._draws = draws
        self._num_slow = 0
        """The number of slow reads since the last quick one."""
        self._ready: _InThread | _InProcesses | None = None
        if num_workers:
            self._ready = _InProcesses(read, self._foreseen(), num_workers, pin)

    def take(self, wanted: Wanted) -> Any:
        """Return these samples, which were read ahead if they are the next ones predicted."""
        if self._next is None or not wanted.is_same(self._next):
            return self._read_here(wanted)
        if self._ready is not None:
            try:
                samples, self._next = self._ready.take()
                return samples
            except DrawnInThreadError:
                assert isinstance(self._ready, _InThread), "processes have generators of their own"
                self._coming = self._ready.foreseen()
                self._next = next(self._coming, None)
                self._ready.close()
                self._ready = None
                return self.take(wanted)
        self._next = next(self._coming, None)
        began = time.perf_counter()
        samples = self._read_here(wanted)
        self._num_slow = self._num_slow + 1 if time.perf_counter() - began >= WORTH_A_THREAD_S else 0
        if self._num_slow >= SLOW_READS and self._threads and self._next is not None and not self._draws():
            self._ready = _InThread(self._read_here, self._foreseen())
        return samples

    def close(self) -> None:
        """Stop reading."""
        if self._ready is not None:
            self._ready.close()
        self._ready = self._next = None

    def _foreseen(self) -> Iterator[Wanted]:
        """Yield the samples of every micro-batch that is still to be taken."""
        assert self._next is not None
        yield self._next
        yield from self._coming

    def _read_here(self, wanted: Wanted) -> Any:
        with self._lock:
            samples = self._read(wanted)
        return map_tensors(samples, lambda tensor: tensor.pin_memory()) if self._pin else samples


class _InThread:
    """The next micro-batches, read by a thread."""

    def __init__(self, read: Read, foreseen: Iterator[Wanted]) -> None:
        self._read, self._foreseen = read, foreseen
        self._pool = ThreadPoolExecutor(1, THREAD_NAME)
        self._held: deque[tuple[Wanted, Future[Any]]] = deque()
        self._fill()

    def take(self) -> tuple[Any, Wanted | None]:
        """Return the next micro-batch, and the samples of the one after it."""
        _, future = self._held[0]
        if isinstance(future.exception(), DrawnInThreadError):
            raise DrawnInThreadError
        self._held.popleft()
        self._fill()
        return future.result(), self._held[0][0] if self._held else None

    def foreseen(self) -> Iterator[Wanted]:
        """Yield the samples of every micro-batch that is still to be taken."""
        yield from [wanted for wanted, _ in self._held]
        yield from self._foreseen

    def _fill(self) -> None:
        while len(self._held) < AHEAD and (wanted := next(self._foreseen, None)) is not None:
            self._held.append((wanted, self._pool.submit(self._read, wanted)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _InProcesses:
    """The next micro-batches, read by worker processes of torch's DataLoader."""

    def __init__(self, read: Read, foreseen: Iterator[Wanted], num_workers: int, pin: bool) -> None:
        self._asked: deque[Wanted] = deque()
        loader: DataLoader[Any] = DataLoader(
            _Reads(read),
            batch_size=None,
            sampler=_Asked(foreseen, self._asked),
            collate_fn=_identity,
            num_workers=num_workers,
            prefetch_factor=AHEAD,
            pin_memory=pin,
            worker_init_fn=_begin_worker,
            multiprocessing_context="fork",  # a data set need not be picklable, and is not copied
            generator=torch.Generator(),  # its seeds for workers come from here, not from the process's generator
        )
        # torch raises an error wherever the main thread is when a worker dies, which may be in a forward; here `take`
        # raises it.
        handler, is_main = signal.getsignal(signal.SIGCHLD), threading.current_thread() is threading.main_thread()
        self._iterator: Iterator[Any] | None = iter(loader)
        if is_main and handler is not None:
            signal.signal(signal.SIGCHLD, handler)

    def take(self) -> tuple[Any, Wanted | None]:
        """Return the next micro-batch, and the samples of the one after it.

        Raises:
            WorkerError: a worker process ended.
            SamestepError: the samples cannot be a batch; other errors of a dataset carry the worker's traceback.
        """
        assert self._iterator is not None
        self._asked.popleft()
        try:
            samples = next(self._iterator)
        except (RuntimeError, EOFError, OSError) as error:
            if str(error).startswith("Caught "):  # raised in the worker, by the data set
                raise
            why = (str(error).splitlines() or ["while it handed samples over"])[0]
            raise WorkerError(
                "data-memory",
                f"a process that reads data ended ({why}); it may have run out of memory. Use fewer run.data_workers, or "
                "0",
            ) from error
        if isinstance(samples, SamestepError):
            raise samples
        return samples, self._asked[0] if self._asked else None

    def close(self) -> None:
        self._iterator = None  # whose end stops the workers


class _Asked:
    """The samples that a DataLoader asks for, kept until they are taken."""

    def __init__(self, foreseen: Iterator[Wanted], asked: deque[Wanted]) -> None:
        self._foreseen, self._asked = foreseen, asked

    def __iter__(self) -> Iterator[Wanted]:
        for wanted in self._foreseen:
            self._asked.append(wanted)
            yield wanted


class _Reads(TorchDataset[Any]):
    """A dataset whose items are whole micro-batches."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def __getitem__(self, wanted: Wanted) -> Any:
        try:
            return self._read(wanted)
        except SamestepError as error:  # which a DataLoader would give another text
            return error


def _identity(samples: Any) -> Any:
    return samples


def _begin_worker(number: int) -> None:
    """Leave Ctrl-C to the rank, which ends its workers, and so the signals that ask it for something."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def refuse_shared_files(dataset: Any, num_workers: int) -> None:
    """Refuse a data set with a file that several processes read: a fork shares the position in it with the others.

    Raises:
        DataError: a rank has inherited it from the process that started the ranks, or processes that read are forked from here.
    """
    is_forked = dist.is_initialized() and dist.get_world_size() > 1
    for name, file in _open_files(dataset) if num_workers or is_forked else ():
        if num_workers or _is_inherited(file):
            raise DataError(
                "data-file-shared",
                f"{name} of {type(dataset).__name__} is a file that was opened before processes were forked, which then share its "
                "position and read each other's samples. Use a file that __getitem__ opens in each process",
            )


def _is_inherited(file: Any) -> bool:
    """Return whether the process that this one was forked from has the file too, under the same number."""
    with suppress(OSError, ValueError):  # it is closed, or in memory
        number = file.fileno()
        return os.readlink(f"/proc/{os.getppid()}/fd/{number}") == os.readlink(f"/proc/self/fd/{number}")
    return False


def _has_position(part: Any) -> bool:
    """Return whether something is an open file, or holds one that its `fileno` names."""
    with suppress(OSError, ValueError, TypeError):  # it is closed, or in memory
        return hasattr(type(part), "fileno") and stat.S_ISREG(os.fstat(part.fileno()).st_mode)
    return False


def _open_files(owner: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield the open files among the attributes of a data set, of what it holds, and of what its functions have around them."""
    variables = dict(getattr(owner, "__dict__", {}))
    with suppress(TypeError, ValueError):  # it is no function, or a variable around it has no value yet
        variables |= inspect.getclosurevars(owner).nonlocals
    for name, value in variables.items():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for part in itertools.islice(parts, 1000):
            if _has_position(part):
                yield name, part
            elif depth and hasattr(part, "__dict__") and not isinstance(part, type | types.ModuleType):
                yield from _open_files(part, depth - 1)
