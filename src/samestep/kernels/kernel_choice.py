"""Whether a tensor is computed on by our Triton kernels, or by the formulas in torch that they equal.

Importing this file imports no Triton. The files whose kernels run are imported by `kernels_of` when the first one runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

_LEAST_CAPABILITY = (8, 0)
"""The oldest CUDA devices on which kernels run: older ones have no bfloat16."""
_PLAIN = (Tensor, nn.Parameter)
_HERE: AbstractContextManager[Any] = nullcontext()


def runs_kernels(x: Tensor) -> bool:
    """Return whether kernels compute on this tensor: on a CUDA device if Triton is installed, and on a CPU in Triton's interpreter.

    Subclasses, among them tensors without values, are left to the formulas.
    """
    if type(x) not in _PLAIN:
        return False
    return _has_kernels(x.device) if x.is_cuda else x.device.type == "cpu" and is_interpreted()


def is_interpreted() -> bool:
    """Return whether this process has imported Triton to interpret kernels on a CPU, as our tests do."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    # A build of torch without CUDA has no such device, whatever a tensor says.
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


@functools.cache
def kernels_of(file: str) -> Any:
    """Return one of the files of this folder that need Triton, imported."""
    return importlib.import_module(f"{__package__}.{file}")


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on the device of a tensor."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else _HERE
