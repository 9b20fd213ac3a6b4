"""Norms that are called as one function of torch's, where that gives what their float32 island gives.

```
island     cast(x) to float32 -> forward of the module with float32 weights -> cast to the dtype of x        several kernels
fused      F.rms_norm(x, shape, weight, eps) or F.layer_norm(x, shape, weight, bias, eps)                    one kernel on a GPU
raised     the same function of the float32 casts of x, weight and bias -> cast to the dtype of x            no hooks, no swap
```
All compute in float32 and round once. A module is called as the function only if its forward consists of the operations of such
a norm, and if on drawn values its island and the function agree, outputs and gradients, on the device of the run: fused to one
rounding of the compute dtype, raised (`nn.LayerNorm` alone) to the bit. On a CPU fused RMS norms agree to the bit too; layer norms add their weights'
gradients in half precision there, so they are raised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from samestep.building.named_tensors import set_attributes
from samestep.building.torch_seams import DispatchMode

Call = Callable[[nn.Module, Tensor], Tensor]
"""Calls a norm on an input that has the dtype of its weights."""
_Function = Callable[[nn.Module, Tensor, Tensor, Tensor | None], Tensor]
"""Normalises an input as a module does, with this weight and bias."""

_COPIES = ("_to_copy", "alias", "clone", "contiguous", "detach", "expand", "lift_fresh", "unsqueeze", "view")
_ARITHMETIC = ("abs", "add", "div", "mean", "mul", "pow", "reciprocal", "rsqrt", "sqrt", "square", "sub", "sum")
_NORMS = ("_fused_rms_norm", "layer_norm", "native_layer_norm", "rms_norm")
_OPS = frozenset((*_COPIES, *_ARITHMETIC, *_NORMS))
"""Names of aten operations of which the forward of a norm may consist: none has a branch or a limit in its values."""
_SCALES = (1.0, 1e-3, 30.0)
"""Standard deviations of the inputs that are drawn."""
_LEADING = ((4,), (2, 3))
"""Dimensions in front of those of the weight: a norm over the second one of an input would look like one over its features in two alone."""


def fused_call(module: nn.Module, compute: torch.dtype, master: torch.dtype, device: torch.device) -> Call | None:
    """Return the call of torch's function that equals a norm's island on this device; None if there is none.

    `compute` is the dtype of its inputs and weights in the call, `master` the dtype in which its island computes. On the meta
    device, which has no values, there is none.
    """
    weights = dict(module.named_parameters())
    weight = weights.get("weight")
    has_buffers, is_meta = next(module.buffers(), None) is not None, device.type == "meta"
    if "forward" in vars(module) or not {*weights} <= {"weight", "bias"} or weight is None or has_buffers or is_meta:
        return None
    if 1 in weight.shape or not weight.shape:  # one number for many, and nothing says of how many the norm is
        return None
    functions = [*_functions(module, tuple(weight.shape), master)]
    for call in map(_fused, functions):
        if _agrees(module, weights, call, compute, master, device, _is_one_rounding):
            return call
    is_of_torch = type(module).forward is nn.LayerNorm.forward  # code of the user's own may do more than it returns
    for call in (_raised(function, master) for function in functions if is_of_torch):
        if _agrees(module, weights, call, compute, master, device, torch.equal):
            return call
    return None


def _functions(module: nn.Module, shape: tuple[int, ...], master: torch.dtype) -> Iterator[_Function]:
    """Yield the candidates for a module: each function with each number of the module as its epsilon."""
    names = [name for name, value in set_attributes(module).items() if isinstance(value, float)]
    least = torch.finfo(master).eps  # of nn.RMSNorm without an epsilon
    if "bias" not in module._parameters or module._parameters["bias"] is None:
        for name in names:
            yield lambda norm, x, weight, _, name=name: F.rms_norm(x, shape, weight, getattr(norm, name))  # type: ignore[misc]
        if getattr(module, "eps", least) is None:
            yield lambda norm, x, weight, _: F.rms_norm(x, shape, weight, least)
    for name in names:
        yield lambda norm, x, weight, bias, name=name: F.layer_norm(x, shape, weight, bias, getattr(norm, name))  # type: ignore[misc]


def _fused(function: _Function) -> Call:
    """Return the call of a function with the weights as they are held."""

    def call(norm: nn.Module, x: Tensor) -> Tensor:
        weights: Any = norm._parameters
        return function(norm, x, weights["weight"], weights.get("bias"))

    return call


def _raised(function: _Function, master: torch.dtype) -> Call:
    """Return the call of a function in the dtype of the island."""

    def call(norm: nn.Module, x: Tensor) -> Tensor:
        weights: Any = norm._parameters
        bias = weights.get("bias")
        raised = function(norm, x.to(master), weights["weight"].to(master), None if bias is None else bias.to(master))
        return raised.to(x.dtype)

    return call


def _agrees(
    module: nn.Module,
    weights: dict[str, nn.Parameter],
    call: Call,
    compute: torch.dtype,
    master: torch.dtype,
    device: torch.device,
    are_alike: Callable[[Tensor, Tensor], bool],
) -> bool:
    """Return whether island and call agree on drawn values, in the outputs and in all gradients."""
    draws = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=draws).to(device, compute)

    names: set[str] = set()

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.add(func.overloadpacket.__name__.removesuffix("_"))  # in place or not
        return func(*args, **kwargs)

    drawn_weights = {name: (1 + 0.5 * draw(*weight.shape)).requires_grad_() for name, weight in weights.items()}
    for leading, scale in itertools.product(_LEADING, _SCALES):
        x = (scale * draw(*leading, *weights["weight"].shape)).requires_grad_()
        raised = {name: weight.to(master) for name, weight in drawn_weights.items()}
        try:
            with DispatchMode(run), torch.enable_grad():
                expected = functional_call(module, raised, (x.to(master),)).to(compute)
            with torch.enable_grad():
                result = call(_Held(module, drawn_weights), x)  # type: ignore[arg-type]
        except Exception:  # a norm with other arguments, or with an input of another shape
            return False
        if not names <= _OPS or expected.shape != result.shape or expected.dtype != result.dtype:
            return False
        asked, out = [x, *drawn_weights.values()], draw(*result.shape)
        gradients = torch.autograd.grad(expected, asked, out), torch.autograd.grad(result, asked, out)
        if not all(map(are_alike, (expected, *gradients[0]), (result, *gradients[1]))):
            return False
    return True


class _Held:
    """A module with other weights, for one call."""

    def __init__(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        self._module, self._parameters = module, weights

    def __getattr__(self, name: str) -> Any:
        return self._parameters[name] if name in self._parameters else getattr(self._module, name)


def _is_one_rounding(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors differ by at most one rounding of their dtype, and a rounding of float32 of the largest."""
    a, b = first.detach().double(), second.detach().double()
    allowed = torch.finfo(first.dtype).eps * torch.maximum(a.abs(), b.abs()) + 1e-6 * a.abs().max()
    return bool(((a - b).abs() <= allowed).all())
