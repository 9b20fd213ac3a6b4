"""The most bytes of tensors that a process has had alive at one time, by their storages.

Every operation's results are seen by a dispatch mode. A storage counts from the first operation that returns a tensor on it
until nothing holds it any longer, with the size it has been given last: FSDP2 gives a gathered weight's storage back by
resizing it to nothing. On CPUs no allocator says so; there is nothing between a tensor and its memory.

A thread of gloo lets go of a message's tensors a moment after the rank that waited for it goes on. Before a new maximum counts, it
is given that moment; where it is late nevertheless, the maximum is too large, never too small.
"""

from __future__ import annotations

import functools
import gc
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOMENT_S = 0.0005


class Live(TorchDispatchMode):
    """Counts, while it is entered, what is alive; `count_all` begins with what there is already."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def count_all(self) -> int:
        """Count every tensor that Python knows, once those that nobody reaches are gone; return the bytes of all."""
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old names that warn when they are looked at
            for found in gc.get_objects():
                if type(found) in (Tensor, torch.nn.Parameter, DTensor):
                    self._see(found)
        self.most = max(self.most, self.now)
        return self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        for found in tree_leaves(outcome):
            if isinstance(found, Tensor):
                self._see(found)
        self._note()
        return outcome

    def _see(self, tensor: Tensor) -> None:
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, functools.partial(self._gone, key))
            self._sizes[key] = 0
        self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size

    def _note(self) -> None:
        """Raise the maximum to what is alive now, once other threads had the time to let go of what they have sent."""
        if self.now > self.most and torch.distributed.is_initialized():
            time.sleep(_MOMENT_S)
        self.most = max(self.most, self.now)

    def _gone(self, key: int, _: object) -> None:
        del self._watched[key]
        self.now -= self._sizes.pop(key)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Enter the mode, and see storages that are resized."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            outcome = plain(storage, size)
            if storage._cdata in self._watched:
                self._resized(storage._cdata, storage.nbytes())
                self._note()
            return outcome

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
