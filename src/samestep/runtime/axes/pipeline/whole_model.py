"""All layers of a model on one rank, in a layout without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from samestep.building.model import call_model


class WholeModel:
    """The counterpart of `Stage` in a layout without a pipeline: it has all layers, and sends nothing."""

    num_chunks = 1

    def __init__(self, model: nn.Module, running: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._model, self._running = model, running

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk ends the model, and so has the loss: the only one does."""
        return True

    def forward(self, microbatch: int, chunk: int, samples: Any) -> Any:
        """Run all layers on a micro-batch; return the model's outputs."""
        if self._running is nullcontext:
            return call_model(self._model, samples)
        with self._running():
            return call_model(self._model, samples)

    def backward(self, microbatch: int, chunk: int, loss: Tensor | None) -> None:
        """Run the backward of the whole model."""
        assert loss is not None
        loss.backward()

    def weight_gradients(self, microbatch: int) -> None:
        """Do nothing: nothing was postponed."""

    def finish_forward(self) -> None:
        """Do nothing: nothing was kept."""

    def from_last(self, outputs: Any) -> Any:
        """Return the outputs: this is the last stage."""
        return outputs
