"""Tensors that are known only once all micro-batches of a step have run: sums and rows of all samples, and what is computed from them.

Code that computes the next value of a buffer from such a sum runs with every micro-batch, before the sum is known. So its
operations are noted rather than carried out: each result knows its shape and dtype, and how it is computed from others. The value
that `samestep.after_step` is given is computed behind the step's last backward, with the sums over all micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samestep.building.over_samples import hold_after_step
from samestep.building.torch_seams import DisableTorchFunctionSubclass, disable_current_modes
from samestep.errors import ModelError
from samestep.trees import tree_leaves, tree_map_only


class LaterTensor(Tensor):
    """A tensor whose value is computed later."""

    form: Tensor
    """A tensor of its shape and dtype without values."""
    compute: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, form: Tensor, device: torch.device, compute: Callable[[], Tensor]) -> LaterTensor:
        """Make it; `compute` is asked for its value once that is known."""
        made = Tensor._make_wrapper_subclass(cls, form.shape, dtype=form.dtype, device=device)
        made.form, made.compute = form, compute
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note an operation; what needs a value at once is refused."""
        kwargs = kwargs or {}
        if func is hold_after_step:
            with DisableTorchFunctionSubclass():
                return func(*args)
        later = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LaterTensor)]
        name = getattr(func, "__name__", "")
        with DisableTorchFunctionSubclass():
            if name == "__get__" and not isinstance(func(later[0].form), Tensor):
                return func(*args, **kwargs)  # its shape, dtype or device
            if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in kwargs:
                raise _known_too_late(name)
            form = _forms((args, kwargs))
            try:
                with disable_current_modes(), torch.no_grad():
                    result = func(*form[0], **form[1])
            except (RuntimeError, NotImplementedError):
                raise _known_too_late(name) from None
        if not isinstance(result, Tensor):
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                raise _known_too_late(name)
            return result

        def compute() -> Tensor:
            given_args, given_kwargs = tree_map_only(LaterTensor, value_of, (args, kwargs))
            found: Tensor = func(*given_args, **given_kwargs)
            return found

        with DisableTorchFunctionSubclass():
            return LaterTensor(result, later[0].device, compute)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse an operation below those that are noted."""
        raise _known_too_late(func.overloadpacket.__name__)


def value_of(tensor: Tensor) -> Tensor:
    """Return the value of a tensor, which is known by now."""
    return tensor.compute() if isinstance(tensor, LaterTensor) else tensor


def _forms(given: Any) -> Any:
    return tree_map_only(
        Tensor, lambda one: one.form if isinstance(one, LaterTensor) else torch.empty_like(one, device="meta"), given
    )


def _known_too_late(name: str) -> ModelError:
    return ModelError(
        f"the forward asks for values of all samples of the step (samestep.batch_sum, batch_mean, batch_cat), and {name} needs them before "
        "the later micro-batches have run: one micro-batch a rank works, and so does samestep.after_step for a buffer's next value"
    )
