"""A model's plain state dict as one file of safetensors, which `load_state_dict(load_file(path))` reads into a new model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.models.weight_files import ONE_FILE
from samestep.output import durable_files
from samestep.runtime.checkpoints.pretrained_folder import cast_to


def write(model: nn.Module, value: Callable[[str], Tensor], out: Path, dtype: torch.dtype | None) -> None:
    """Write a model's state dict into a folder; tensors with floating numbers are cast to `dtype`, if one is given.

    A tied tensor is written under each of its names, as a state dict has it. The whole model is in memory meanwhile.

    Raises:
        ModelError: the state dict holds something that is no tensor, or a dtype that the format lacks.
        OSError: the file cannot be written.
    """
    held = model.state_dict()
    if strange := [name for name, one in held.items() if not isinstance(one, Tensor)]:
        raise ModelError(
            f"{strange[0]} in the state dict of {type(model).__name__} is no tensor, and a file of safetensors holds tensors alone: a "
            "registered buffer in place of get_extra_state works"
        )
    tensors = {}
    for name in held:
        tensor = value(name)
        tensors[name] = cast_to(tensor, dtype or tensor.dtype)
    try:
        save_file(tensors, out / ONE_FILE, {"format": "pt"})
    except (SafetensorError, KeyError, ValueError) as error:
        raise ModelError(f"the state dict of {type(model).__name__} is no file of safetensors: {error}") from None
    durable_files.sync(out / ONE_FILE)
    durable_files.sync(out)
