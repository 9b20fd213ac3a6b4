"""Exponential moving averages of weights, beside the masters of the pieces that a rank updates (`train.ema`).

    average = weights                                      after the first update
    average = decay * average + (1 - decay) * weights      after every later one

A step that is skipped updates neither. That is the rule of torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)` and
`use_buffers=False`: the model that is evaluated has the averages for its trained weights and its own buffers. An average has the
dtype of the master and is divided like it, so averaging sends nothing. Models along a training path average to one with a lower
loss (Polyak and Juditsky 1992, doi:10.1137/0330046).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.errors import ModelError
from samestep.runtime.optimizers.pieces import Piece


class WeightAverages:
    """The averages of the pieces that a rank updates."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.are_in_use = False
        """Whether the model has the averages at present, and these hold the weights."""
        self._of: dict[int, Tensor] = {}

    def refuse_in_use(self, word: str) -> None:
        """Refuse what reads or changes the weights while the averages stand in their place.

        Raises:
            ModelError: they do.
        """
        if self.are_in_use:
            raise ModelError(f"run.{word} within run.averaged(): the model has the averages there; behind it, it works")

    def of(self, piece: Piece) -> Tensor | None:
        """Return the average of a piece, of the shape of its value; None before the first update."""
        return self._of.get(id(piece))

    def set(self, piece: Piece, values: Tensor | None) -> None:
        """Set the average of a piece; None forgets it."""
        if values is None:
            self._of.pop(id(piece), None)
            return
        self._of[id(piece)] = values.to(piece.value.device, piece.value.dtype, copy=True).view(piece.value.shape)

    @torch.no_grad()
    def update(self, pieces: Sequence[Piece], held_back: Tensor | None = None) -> None:
        """Take pieces into the average whose `value` has just been updated; none of them where `held_back` is 1."""
        known = [piece for piece in pieces if id(piece) in self._of]
        for piece in pieces if len(known) < len(pieces) else ():
            assert held_back is None, "the host waits for the first update"
            self.set(piece, piece.value.detach())
        if not known:
            return
        averages, values = [self._of[id(piece)] for piece in known], [piece.value.detach() for piece in known]
        if held_back is None:
            torch._foreach_lerp_(averages, values, 1.0 - self.decay)
        else:
            weight = torch.where(held_back > 0, 0.0, 1.0 - self.decay).to(values[0].dtype)
            torch._foreach_lerp_(averages, values, [weight] * len(values))
