"""Operations that torch refuses for their operands' dtypes, in a forward under bf16 and fp16: rotary tables in float32 and values in bfloat16.

    x.float() @ self.weight                  a product computes in the compute dtype, as each linear layer does
    out = torch.zeros(...); out[mask] = y    what is written takes the dtype of the tensor
    layer_norm(x.float(), ..., weight)       a norm computes in float32
    torch.linalg.inv(y), torch.fft.fft(y)    which no device has in half precision, compute in float32

Operands of one dtype are left as they are, so code that runs without these casts computes what it did. Most models need none of them, and a
function mode costs time at each operation: only the forwards up to the end of the first step are watched where it has met none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.named_tensors import cast_floating
from samestep.runtime.axes.step_part import PartOfStep
from samestep.trees import tensors_in

_Functions = Iterable[Callable[..., Any]]
_PRODUCTS: _Functions = (
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.mv, Tensor.mv,
    torch.dot, Tensor.dot, torch.inner, Tensor.inner, torch.addmm, Tensor.addmm, torch.addmv, Tensor.addmv, torch.baddbmm, Tensor.baddbmm,
    torch.addbmm, Tensor.addbmm, torch.einsum, torch.tensordot, torch.chain_matmul, torch.linalg.multi_dot, torch.linalg.vecdot,
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.scaled_dot_product_attention, torch.lerp, Tensor.lerp, F.grid_sample, torch.cdist,
)  # fmt: skip
_NORMS: _Functions = (F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm)
_WRITES: _Functions = (
    Tensor.__setitem__, Tensor.index_put, Tensor.index_put_, torch.index_put, torch.index_put_, Tensor.index_add, Tensor.index_add_,
    torch.index_add, Tensor.index_copy, Tensor.index_copy_, torch.index_copy, Tensor.scatter, Tensor.scatter_, torch.scatter,
    Tensor.scatter_add, Tensor.scatter_add_, torch.scatter_add, Tensor.scatter_reduce, Tensor.scatter_reduce_, torch.scatter_reduce,
    Tensor.masked_scatter, Tensor.masked_scatter_, torch.masked_scatter,
)  # fmt: skip
_IN_HALF = {"cross", "diagonal", "matmul", "matrix_norm", "multi_dot", "norm", "vecdot", "vector_norm"}
_IN_HALF |= {"fftfreq", "fftshift", "ifftshift", "rfftfreq"}
"""Functions of torch.linalg and torch.fft that every device has in half precision, or that take no tensor."""


def _in_full(module: ModuleType) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a module that no device has in half precision."""
    for name, function in vars(module).items():
        if isinstance(function, BuiltinFunctionType) and not name.startswith("_") and name not in _IN_HALF:
            yield function


_IN_FULL: _Functions = (
    *_in_full(torch.linalg), *_in_full(torch.fft), torch.cholesky, torch.cholesky_inverse, torch.cholesky_solve, torch.det, torch.inverse,
    torch.logdet, torch.lu_solve, torch.matrix_exp, torch.pinverse, torch.qr, torch.slogdet, torch.svd, torch.triangular_solve, torch.stft,
    torch.istft, Tensor.cholesky, Tensor.det, Tensor.inverse, Tensor.logdet, Tensor.matrix_exp, Tensor.pinverse, Tensor.qr, Tensor.slogdet,
    Tensor.svd, Tensor.stft, Tensor.istft,
)  # fmt: skip


class MixedProducts(TorchFunctionMode):
    """A function mode in which such operations compute."""

    def __init__(self, compute: torch.dtype, master: torch.dtype) -> None:
        super().__init__()
        self._compute, self._master = compute, master
        self.num_casts = 0
        """Operations whose operands were cast."""
        rules = {self._of_product: _PRODUCTS, self._of_norm: _NORMS, self._of_write: _WRITES, self._of_full: _IN_FULL}
        rules[self._of_attention] = (F.multi_head_attention_forward,)
        self._rules = {function: rule for rule, functions in rules.items() for function in functions}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, rule = kwargs or {}, self._rules.get(func)
        to = None if rule is None else rule([*args, *kwargs.values()])
        if to is not None:
            self.num_casts += 1
            args, kwargs = cast_floating(args, to), cast_floating(kwargs, to)
        return func(*args, **kwargs)

    def _dtypes(self, values: Any) -> set[torch.dtype]:
        """Return which of the two dtypes tensors have."""
        return {tensor.dtype for tensor in tensors_in(values)} & {self._compute, self._master}

    def _of_product(self, values: list[Any]) -> torch.dtype | None:
        """Return the dtype to which operands are cast, as the other rules do; None if they stay as they are."""
        return self._compute if len(self._dtypes(values[:3])) > 1 else None  # an attention's mask is its fourth

    def _of_attention(self, values: list[Any]) -> torch.dtype | None:
        """Return the dtype of an attention with its projections, whose products within no function mode sees."""
        return self._compute if len(self._dtypes(values)) > 1 else None

    def _of_norm(self, values: list[Any]) -> torch.dtype | None:
        is_mixed = self._dtypes(values[:1]) == {self._master} and self._compute in self._dtypes(values)
        return self._master if is_mixed else None

    def _of_write(self, values: list[Any]) -> torch.dtype | None:
        return values[0].dtype if len(self._dtypes(values)) > 1 and self._dtypes(values[:1]) else None

    def _of_full(self, values: list[Any]) -> torch.dtype | None:
        return self._master if self._compute in self._dtypes(values) else None


class ForwardCasts(PartOfStep):
    """The casts of a run's forwards, as far as its model needs any."""

    def __init__(self, compute: torch.dtype, master: torch.dtype) -> None:
        self.mode = MixedProducts(compute, master)
        self._is_known = False

    def of_forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        return nullcontext() if self._is_known and not self.mode.num_casts else self.mode

    def end_backwards(self) -> None:
        """Know by the first step whether forwards need any."""
        self._is_known = True
