"""The interface by which all replacements of torch's random functions get hashed bits and masks (`mode.DropoutMode` implements it), and the
full names of the modules in whose names they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.building.attention import AttentionCall, DroppedWeights
from samestep.building.torch_seams import current_function_modes
from samestep.errors import ModelError


def dropped_weights(call: AttentionCall, source: MaskSource | None, num_keys: int) -> DroppedWeights | None:
    """Return what makes the masks of dropped weights of the queries of a call and so many keys; None where none are dropped.

    The mask source is the one of the function modes that are active where none is given.
    """
    if not call.dropout_p:
        return None
    if source is None:
        source = next((mode for mode in reversed(current_function_modes()) if isinstance(mode, MaskSource)), None)
    assert source is not None, "a training forward that may drop weights runs under a mode"
    shape = torch.Size((*call.heads, call.query.size(-2), num_keys))
    return source.drop_weights(call.query, shape, call.dropout_p, "scaled_dot_product_attention")


class MaskSource(TorchFunctionMode):
    """A function mode that computes the masks and random numbers of one forward; `mode.DropoutMode` implements it."""

    sees_all = False
    """Whether it must see every function of the model, those of compiled blocks too."""
    allows_random = False
    """Whether numbers that it does not compute are drawn from the process's generators instead of being refused."""

    def drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Return a mask for x of this shape, bool, True where an element is dropped."""
        raise NotImplementedError

    def drop_elements(self, x: Tensor, p: float, what: str, *, inplace: bool) -> Tensor | None:
        """Return x with elements dropped and scaled by one kernel; None, and no mask is drawn, where `drop` is to be called."""
        return None

    def drop_weights(self, x: Tensor, shape: torch.Size, p: float, what: str) -> DroppedWeights:
        """Return such a mask of the weights of an attention, which is drawn in parts, or by a kernel, at any time."""
        raise NotImplementedError

    def drop_in_graph(
        self, x: Tensor, shape: torch.Size, p: float, what: str, mask: tuple[str, int, int], entries: dict[str, int]
    ) -> Tensor:
        """Return the mask that a graph draws: of a module, the index of its call in the graph, and the draw.

        `entries` has the number of calls of each module before the graph began, and is added to.
        """
        raise NotImplementedError

    def hashes(
        self, like: Tensor | None, shape: Sequence[int], device: torch.device, what: str, *, is_shared: bool = False
    ) -> Tensor:
        """Return hashed bits of random numbers, int32 [shape].

        `like` is the tensor whose samples are at the same places as those of the result; without one the shape decides.
        Shared numbers are refused where there are some for each sample.
        """
        raise NotImplementedError

    def refuse(self, reason: str) -> ModelError:
        """Return the error that refuses an operation of the innermost module."""
        raise NotImplementedError


WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Components of a module's name that wrappers add; the names in a job do not have them."""

DRAWING_NOTHING: frozenset[type[nn.Module]] = frozenset(
    {
        nn.Linear,
        nn.Bilinear,
        nn.Identity,
        nn.Embedding,
        nn.EmbeddingBag,
        nn.LayerNorm,
        nn.RMSNorm,
        nn.GroupNorm,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.ELU,
        nn.SELU,
        nn.CELU,
        nn.Tanh,
        nn.Sigmoid,
        nn.Softplus,
        nn.Softmax,
        nn.LogSoftmax,
        nn.Hardswish,
        nn.Hardsigmoid,
        nn.PReLU,
        nn.GLU,
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
        nn.AvgPool1d,
        nn.AvgPool2d,
        nn.AvgPool3d,
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d,
        nn.AdaptiveAvgPool3d,
        nn.Flatten,
        nn.Unflatten,
        nn.Upsample,
        nn.ZeroPad2d,
        nn.PixelShuffle,
    }
)
"""Modules of torch whose code draws nothing, and calls no other module: a hook would make each call longer."""


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by full name, without the components that wrappers add; a wrapper itself has no name."""
    modules = {}
    for name, module in model.named_modules():
        # A wrapper comes before the module it wraps and has the same name here, so the inner module stays.
        modules[".".join(part for part in name.split(".") if part not in WRAPPERS)] = module
    return modules
