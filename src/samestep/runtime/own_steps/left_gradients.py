"""What a backward has left in `param.grad` of a run's module, which a loop may not change there.

Between `run.backward` and `run.update` these are gradients of this rank's own samples, or of its part of a weight, and of a sum that no
count has divided yet. What a plain loop does to `param.grad` (`clip_grad_norm_`, a new tensor in its place) would be done to each rank's
part by itself, or to nothing. `run.gradients()` returns the gradients of the whole step; where it was called, they may be changed in place.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.runtime.assembly import Assembly
from samestep.runtime.weights.weights_in_loops import WeightsInLoops
from samestep.state.writes import version_of


class _Left(NamedTuple):
    """A weight's gradient at one moment."""

    param: nn.Parameter
    gradient: Tensor | None
    version: int


class LeftGradients:
    """The gradients that stand in `param.grad` of a module while some wait for an update."""

    def __init__(self) -> None:
        self._left: dict[str, _Left] = {}
        self._in_loops: WeightsInLoops | None = None
        self._may_be_written = False

    def note(self, held: Assembly, *, may_be_written: bool = False) -> None:
        """Note what stands there now, and let its values be refused; `may_be_written` of gradients that the loop was given to change in
        place.
        """
        self._may_be_written, self._in_loops = may_be_written, held.weights.in_loops
        self._in_loops.wait(True)
        self._left = {
            name: _Left(param, param.grad, _version(param.grad))
            for name, param in held.model.module.named_parameters()
            if param.requires_grad
        }

    def forget(self) -> None:
        """Forget what was noted, where nothing waits."""
        self._left = {}
        if self._in_loops is not None:
            self._in_loops.wait(False)

    def refuse_changes(self, method: str) -> None:
        """Refuse that a loop has changed what stands there.

        Raises:
            ModelError: it has.
        """
        for name, (param, gradient, version) in self._left.items():
            is_replaced = param.grad is not gradient
            if is_replaced or (not self._may_be_written and _version(gradient) != version):
                raise ModelError(
                    f"{name}.grad of run.model was {'replaced' if is_replaced else 'changed'} between run.backward and {method}, where a rank "
                    "has the gradient of its own samples, or a part of it: the same change in place of the tensors of run.gradients() "
                    "works, and so do clip_norm in the job and run.zero_grad()"
                )


def _version(gradient: Tensor | None) -> int:
    """Return how often a gradient was written, of a sharded one as such or in this rank's part."""
    if gradient is None:
        return 0
    part = getattr(gradient, "_local_tensor", gradient)
    return version_of(gradient) + (version_of(part) if part is not gradient else 0)
