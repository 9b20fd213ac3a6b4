"""Modules in whose names masks and random numbers are drawn, by full name."""

from __future__ import annotations

from torch import nn

WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Components of a module's name that wrappers add; the names in a job do not have them."""

DRAWING_NOTHING = frozenset(
    getattr(nn, name)
    for name in [
        "Linear",
        "Bilinear",
        "Identity",
        "Embedding",
        "EmbeddingBag",
        "LayerNorm",
        "RMSNorm",
        "GroupNorm",
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "ConvTranspose1d",
        "ConvTranspose2d",
        "ConvTranspose3d",
        "ReLU",
        "ReLU6",
        "LeakyReLU",
        "GELU",
        "SiLU",
        "Mish",
        "ELU",
        "SELU",
        "CELU",
        "Tanh",
        "Sigmoid",
        "Softplus",
        "Softmax",
        "LogSoftmax",
        "Hardswish",
        "Hardsigmoid",
        "PReLU",
        "GLU",
        "MaxPool1d",
        "MaxPool2d",
        "MaxPool3d",
        "AvgPool1d",
        "AvgPool2d",
        "AvgPool3d",
        "AdaptiveAvgPool1d",
        "AdaptiveAvgPool2d",
        "AdaptiveAvgPool3d",
        "Flatten",
        "Unflatten",
        "Upsample",
        "ZeroPad2d",
        "PixelShuffle",
    ]
)
"""Modules of torch whose code draws nothing, and calls no other module: a hook would make each call longer."""


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by full name, without the components that wrappers add; a wrapper itself has no name."""
    modules = {}
    for name, module in model.named_modules():
        # A wrapper comes before the module it wraps and has the same name here, so the inner module stays.
        modules[".".join(part for part in name.split(".") if part not in WRAPPERS)] = module
    return modules
