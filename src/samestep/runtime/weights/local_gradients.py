"""The gradients of a rank as a loop that takes steps in parts asks for them (`own_steps/`): a part of a store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from samestep.program.program import Program
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.flat_buffers import FlatBuffer
from samestep.runtime.weights.gradient_norms import squared_norm


class LocalGradients(Protocol):
    """The gradients of this rank between a backward and an update."""

    @property
    def can_wait(self) -> bool:
        """Whether the gradients of several backwards can be added up on a rank before they are reduced."""
        return False

    def unreduced(self) -> dict[str, Tensor]:
        """Return the gradient of each whole weight on this rank after a backward whose reduction waits, zeros where it gave none: what
        is written there is reduced. Sends nothing.
        """
        return {}

    @abstractmethod
    def finished(self) -> dict[str, Tensor]:
        """Return the finished gradient of each trained weight of which this rank has a part, with that part's shape: what is changed
        in it is changed in `WeightStore.reduced`.

        Called by every rank. Collective over `dp_shard` with zero=1, see [Note: collective calls].
        """
        ...


class BucketGradients(LocalGradients):
    """Those in the buckets of a `Replicated` store."""

    def __init__(
        self, program: Program, mesh: Mesh, flats: Sequence[FlatBuffer], params: Mapping[str, nn.Parameter]
    ) -> None:
        self._program, self._mesh, self._flats, self._params = program, mesh, flats, params

    @property
    def can_wait(self) -> bool:
        """Whether something may be sent for gradients, which are whole on each rank until then; the same on all stages of a pipeline,
        of which some have weights that others hold too."""
        return self._program.step.layout.pp > 1 or any(flat.starts or flat.finishes for flat in self._flats)

    def unreduced(self) -> dict[str, Tensor]:
        """Return the gradient of each weight before ranks are summed, zeros where the backward gave none."""
        for flat in self._flats:
            flat.zero_untouched()
        return self._whole()

    def norm_squared(self, names: Set[str] | None) -> Tensor:
        """Return the squared norm of the unreduced gradients, or of some (float64 []), which shows whether they are finite."""
        own = [one for name, one in self.unreduced().items() if names is None or name in names]
        return squared_norm(own, self._mesh.device)

    def finished(self) -> dict[str, Tensor]:
        """Return the gradient of each weight; under zero=1 the ranks gather it.

        Collective over `dp_shard` with zero=1, see [Note: collective calls].
        """
        for flat in self._flats:
            for op in flat.gathers:
                assert op.axis is not None
                flat.work = flat.send(op, flat.gradients, self._mesh.groups[op.axis])
                flat.wait()
        return self._whole()

    def _whole(self) -> dict[str, Tensor]:
        return {
            member.name: flat.gradients[member.span].view(self._params[member.name].shape)
            for flat in self._flats
            for member in flat.bucket.members
        }


class GradientsInPlace(BucketGradients):
    """Those of an `Unsummed` store, which are where autograd has put them."""

    def _whole(self) -> dict[str, Tensor]:
        return {name: gradient_or_zero(param) for name, param in self._params.items()}


class ShardedGradients(LocalGradients):
    """Those of a `Sharded` store: DTensors, of which each rank has its rows."""

    def __init__(self, trained: Mapping[str, Any], gradient_of: Callable[[Any], Tensor]) -> None:
        self._trained, self._gradient_of = trained, gradient_of

    def finished(self) -> dict[str, Tensor]:
        """Return the gradient of each weight, a DTensor of which this rank has its rows."""
        return {
            name: param.grad
            for name, param in self._trained.items()
            if self._gradient_of(param) is not None and param.grad is not None
        }


def gradient_or_zero(param: nn.Parameter) -> Tensor:
    """Return the gradient of a weight; zeros where it has none."""
    found = param.grad
    if found is None:
        param.grad = found = torch.zeros_like(param)
    elif found.is_sparse:  # the norm, and most optimizers, take dense ones, which give the same step
        param.grad = found = found.to_dense()
    return found
