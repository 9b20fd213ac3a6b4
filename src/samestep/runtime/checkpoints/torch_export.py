"""Writing a model as a checkpoint of `torch.distributed.checkpoint`, one tensor in memory at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save


class _OneByOne(DefaultSavePlanner):
    """Makes each tensor when it is written; what is planned with are tensors without storage."""

    def __init__(self, kinds: Mapping[str, Tensor], value: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._kinds, self._value = kinds, value

    def lookup_object(self, index: Any) -> Any:
        """Return the tensor of an entry."""
        name = index.fqn.removeprefix("model.")
        return self._value(name).detach().to(self._kinds[name].dtype).contiguous()


def write(model: nn.Module, value: Callable[[str], Tensor], out: Path, dtype: torch.dtype) -> None:
    """Write a model's tensors below `model` into a new folder; those with floating numbers in `dtype`.

    `torch.distributed.checkpoint.load({"model": model.state_dict()}, checkpoint_id=out)` reads them.

    Raises:
        OSError: the folder cannot be written.
    """
    kinds = {
        name: torch.empty_like(held, dtype=dtype if held.is_floating_point() else held.dtype, device="meta")
        for name, held in model.state_dict().items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming.*single process")
        planner = _OneByOne(kinds, value)
        save({"model": kinds}, storage_writer=FileSystemWriter(out), planner=planner, no_dist=True)
