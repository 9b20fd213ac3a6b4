"""What the replacements of torch's random functions draw from: hashed bits, and masks that are made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.errors import ModelError
from samestep.runtime.randomness.dropped_attention import DropPart


class MaskSource(TorchFunctionMode):
    """A function mode that makes the masks and random numbers of one forward; `mode.DropoutMode` is the one that does."""

    sees_all = False
    """Whether it must be shown every function of the model, those of compiled blocks too."""
    allows_random = False
    """Whether what it does not make is drawn from the process's generators instead of being refused."""

    def drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Return a mask for x of this shape, bool, True where an element is dropped."""
        raise NotImplementedError

    def drop_part(self, x: Tensor, shape: torch.Size, p: float, what: str) -> DropPart:
        """Return a function that makes parts of such a mask, at any time."""
        raise NotImplementedError

    def hashes(
        self, like: Tensor | None, shape: Sequence[int], device: torch.device, what: str, *, is_shared: bool = False
    ) -> Tensor:
        """Return hashed bits of random numbers, int32 [shape].

        `like` is the tensor whose samples lie where those of the result do; without one its shape tells. Numbers that
        are shared are refused where there are some for each sample.
        """
        raise NotImplementedError

    def refuse(self, reason: str) -> ModelError:
        """Return the error that refuses what the innermost module does."""
        raise NotImplementedError
