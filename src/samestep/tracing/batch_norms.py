"""Calls of batch norm that take the statistics of samples, as a traced forward shows them.

What is replaced in a layout are the functions of Python, `torch.nn.functional.batch_norm` and `torch.batch_norm`, which
torch's own modules call too (`runtime/axes/batch_norm.py`). A trace sees the operation below them, so it must be known
which operations such a call has made; one that is called directly is refused, as other code that mixes samples.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.models.layer_parts import BatchNormCall
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec
from samestep.tracing.meta_tensors import arguments

FUNCTIONS: tuple[Callable[..., Any], ...] = (nn.functional.batch_norm, torch.batch_norm)
"""The functions of Python that a layout replaces."""
OPERATIONS = (
    torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit,
    torch.ops.aten._native_batch_norm_legit_functional, torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten._batch_norm_with_update, torch.ops.aten._batch_norm_no_update, torch.ops.aten.miopen_batch_norm,
)  # fmt: skip
"""The operations that they become."""


_DEFAULTS = {
    parameter.name: parameter.default for parameter in inspect.signature(nn.functional.batch_norm).parameters.values()
}
_NAMES = tuple(_DEFAULTS)
_NATIVE_NAMES = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "training",
    "momentum",
    "eps",
    "cudnn_enabled",
)


def bind_batch_norm(func: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of one of these functions by the names of `torch.nn.functional.batch_norm`."""
    if func is torch.batch_norm:
        return {**dict(zip(_NATIVE_NAMES, args, strict=False)), **kwargs}
    return {**_DEFAULTS, **dict(zip(_NAMES, args, strict=False)), **kwargs}


def channels_first(x: Tensor) -> int:
    """Return the channels of a tensor that has them before its pixels in memory; 0 for others."""
    return x.shape[1] if x.dim() > 2 and x.is_contiguous() else 0


def find_batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> BatchNormCall | None:
    """Describe one of these operations that takes the statistics of samples, in the code of the module `where`; None for others."""
    named = arguments(func, args, kwargs)
    if not named.get("training", True):
        return None
    return BatchNormCall(
        owner=where,
        channels=named["input"].shape[1],
        keeps_statistics=named.get("running_mean") is not None,
        takes_gradient=named["input"].requires_grad,
    )


def run_of_any_size(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run batch norm, also on one value per channel: a group of samples has more than the traced part."""
    call = bind_batch_norm(func, *args, **kwargs)
    x: Tensor = call["input"]
    if call["training"] and x.numel() == x.shape[1]:
        return torch.batch_norm(x, call["weight"], call["bias"], None, None, True, 0.0, call["eps"], False)
    return func(*args, **kwargs)


def with_groups(spec: ModelSpec, owners: Mapping[str, int]) -> ModelSpec:
    """Return the spec with only the calls whose samples are known to be along the first dimension: those of
    `owners`, each with its number of views."""
    if not any(layer.batch_norms for layer in spec.layers):
        return spec

    def layer_with(layer: LayerSpec) -> LayerSpec:
        calls = (replace(call, views=owners[call.owner]) for call in layer.batch_norms if call.owner in owners)
        return replace(layer, batch_norms=tuple(calls))

    return replace(spec, layers=tuple(map(layer_with, spec.layers)))


def without_own_groups(model: nn.Module) -> nn.Module:
    """Let torch's synchronised batch norms compute as plain ones: a layout decides over which ranks statistics are taken."""
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) and type(module).forward is nn.SyncBatchNorm.forward:
            module.forward = functools.partial(_BatchNorm.forward, module)  # type: ignore[method-assign]
    return model
