"""Modules in whose names masks and random numbers are drawn, by full name."""

from __future__ import annotations

from torch import nn

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
