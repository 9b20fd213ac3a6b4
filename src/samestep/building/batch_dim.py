"""Models whose samples are along another dimension than the first, such as recurrent ones over [tokens, samples].

Inside of a run the samples come first. The forward and the loss are given the batch as they know it, with the samples along `batch_dim` of each
tensor that has so many dimensions, and what the forward returns is turned back:

    batch [B, T, ...] ── turned ──► forward([T, B, ...]) ── outputs [T, B, ...] ── turned back ──► [B, T, ...]

Which outputs have their samples there is seen in the first forward; others, of fewer dimensions or with the samples first, stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from samestep.building.model import call_model
from samestep.building.several_models import Built, as_one
from samestep.datasets.values import num_samples
from samestep.trees import map_tensors, tensors_in


class BatchDim:
    """The dimension of the samples in the batches of one run, which is not the first."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._turned: tuple[bool, ...] | None = None
        """Whether each output has its samples there."""

    def first(self, values: Any) -> Any:
        """Return the values of a batch with the samples first."""
        return map_tensors(values, lambda leaf: leaf.movedim(self.dim, 0) if leaf.dim() > self.dim else leaf)

    def there(self, values: Any) -> Any:
        """Return the values of a batch whose samples come first with the samples where the model has them."""
        count = num_samples(values)
        return map_tensors(values, lambda leaf: leaf.movedim(0, self.dim) if self._has(leaf, 0, count) else leaf)

    def _has(self, leaf: Tensor, dim: int, count: int | None) -> bool:
        return leaf.dim() > self.dim and leaf.shape[dim] == count

    def around(self, model: Built, loss: Callable[[Any, Any], Any]) -> tuple[Built, Callable[[Any, Any], Any]]:
        """Return a model and a loss that are given batches with the samples first."""
        return as_one(model, self._forward), self.loss_of(loss)

    def loss_of(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a loss that is given outputs and batches with the samples first."""

        @functools.wraps(loss)
        def of_turned(outputs: Any, batch: Any) -> Any:
            return loss(self._outputs(outputs, 0, self.dim), self.there(batch))

        return of_turned

    def _forward(self, model: Any, samples: Any) -> Any:
        return self.back(call_model(model, self.there(samples)), samples)

    def back(self, outputs: Any, samples: Any) -> Any:
        """Return what a forward gave for samples, which come first in them, with the samples first."""
        if self._turned is None:
            count = num_samples(samples)
            self._turned = tuple(self._has(leaf, self.dim, count) for leaf in tensors_in(outputs))
        return self._outputs(outputs, self.dim, 0)

    def _outputs(self, outputs: Any, source: int, target: int) -> Any:
        turned = iter(self._turned or ())
        return map_tensors(outputs, lambda leaf: leaf.movedim(source, target) if next(turned, False) else leaf)

    def batch(self, batch: Any) -> Any:
        """Return a batch of `samestep.batches` whose samples come first when they are read."""
        dataset = getattr(batch, "dataset", None)
        is_stacked = dataset is not None and not (hasattr(dataset, "collate") or hasattr(dataset, "read"))
        return batch if is_stacked else TurnedBatch(batch, self)


class TurnedBatch:
    """A batch that a collate_fn or a method `read` puts together, with the samples first."""

    def __init__(self, batch: Any, dim: BatchDim) -> None:
        self._batch, self._dim = batch, dim

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batch, name)

    def samples(self, indices: Sequence[int] | Any) -> Any:
        """Return the samples of these indices."""
        return self._dim.first(self._batch.samples(indices))
