"""Whether a tensor is computed on by our Triton kernels, or by the formulas in torch that they equal.

Importing this file imports no Triton. The files whose kernels run are imported by `kernels_of` when the first one runs. Triton compiles
them on the machine, which needs a C compiler there: a device on which the first mask is not the one that is known goes by the formulas.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

_LEAST_CAPABILITY = (8, 0)
"""The oldest CUDA devices on which kernels run: older ones have no bfloat16."""
IS_INTERPRETED = False
"""Whether kernels compute on CPUs too, in Triton's interpreter: the tests of kernels set it."""
_PLAIN = (Tensor, nn.Parameter)
_HERE: AbstractContextManager[Any] = nullcontext()
TRIED_HALVES = ((1103515245, -987654321), (-2043190987, 52428807), (77788891, -13), (-5, 2**31 - 1))
"""The halves of the rows of the first mask that is drawn on a device."""
TRIED_COLUMNS = tuple(place * 134775813 - 2**30 for place in range(16))
TRIED_THRESHOLD = -(2**29)
KNOWN_MASK = (0x1A12, 0x8A00, 0x55D6, 0x2D5B)
"""The elements that it drops, a bit of a number for each column of a row."""


def runs_kernels(x: Tensor) -> bool:
    """Return whether kernels compute on this tensor: on a CUDA device if Triton is installed, and on a CPU in Triton's interpreter.

    Subclasses, among them tensors without values, are left to the formulas.
    """
    if type(x) not in _PLAIN:
        return False
    return _has_kernels(x.device) if x.is_cuda else IS_INTERPRETED and x.device.type == "cpu"


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    # A build of torch without CUDA has no such device, whatever a tensor says.
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY and draws_known_mask(device)


def draws_known_mask(device: torch.device) -> bool:
    """Return whether a kernel compiles and runs on a device, and draws there the mask that is known."""
    rows, columns = len(TRIED_HALVES), len(TRIED_COLUMNS)
    try:
        halves = torch.tensor(TRIED_HALVES, dtype=torch.int32, device=device)
        hashed = torch.tensor(TRIED_COLUMNS, dtype=torch.int32, device=device)
        dropped = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        with on_device_of(dropped):
            kernel = kernels_of("hashed_dropout").write_mask
            kernel[(1,)](dropped, halves, hashed, rows, columns, TRIED_THRESHOLD, ROWS=rows, COLUMNS=columns)
        return tuple(sum(bit << place for place, bit in enumerate(row)) for row in dropped.tolist()) == KNOWN_MASK
    except Exception:  # whatever the compilers of a machine raise
        return False


@functools.cache
def kernels_of(file: str) -> Any:
    """Return one of the files of this folder that need Triton, imported."""
    return importlib.import_module(f"{__package__}.{file}")


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on the device of a tensor."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else _HERE
