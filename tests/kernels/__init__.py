"""Tests that run in Triton's interpreter, in which float32 is rounded to bfloat16 as devices do: to the nearest, ties to even.

Of its own the interpreter cuts the last 16 bits off.
"""

import numpy as np
import torch
import triton.experimental.gluon  # a first launch imports it, as code that a test runs
import triton.language as tl
from triton.runtime import interpreter

from samestep.kernels import kernel_choice

kernel_choice.IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
_CONVERTED = interpreter._convert_float


def _rounded(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
    if (source, target) != (tl.float32, tl.bfloat16):
        return _CONVERTED(data, source, target, rounding)
    numbers = torch.from_numpy(np.array(data, dtype=np.float32))
    return numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


interpreter._convert_float = _rounded
