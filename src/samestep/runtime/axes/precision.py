"""One precision rule in every layout, one device included (twin of `strategies/precision.py`).

No autocast. Under bf16 and fp16 weights are held in the compute dtype, and floating inputs of blocks and of modules
that own weights are cast to it; a module without weights, such as a table of sines, computes in the dtype it is given.
Norms compute in float32 and return the dtype they were given (`fused_norms.py`: as one kernel where that gives the same); a shared weight
stays in float32 and is cast at each use, so that its gradients are added in float32. The loss gets float32. Under float64, a model's own
float32 islands (`.float()`, `dtype=torch.float32`) are raised to float64, so that two layouts differ only in the order of their sums.

Torch refuses operands of several dtypes, such as rotary tables in float32 and values in bfloat16. `MixedProducts` casts them:

    x.float() @ self.weight                  a product computes in the compute dtype, as each linear layer does
    out = torch.zeros(...); out[mask] = y    what is written takes the dtype of the tensor
    layer_norm(x.float(), ..., weight)       a norm computes in float32
    torch.linalg.inv(y), torch.fft.fft(y)    which no device has in half precision, compute in float32

Operands of one dtype are left as they are, so code that runs without these casts computes what it did. Most models need none of them, and a
function mode costs time at each operation: only the forwards up to the end of the first step are watched where it has met none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.building.families import is_norm
from samestep.building.named_tensors import cast_floating
from samestep.errors import ModelError
from samestep.examination.traced_model import TracedModel
from samestep.job_tables import NumericsTable
from samestep.program.program import Program
from samestep.runtime.axes import fused_norms
from samestep.runtime.axes.folded_hooks import after_forward, before_forward, with_hooks
from samestep.runtime.axes.step_part import PartOfStep
from samestep.tracing.checkpointed import Contexts
from samestep.trees import map_tensors, tensors_in

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


DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


_HALF = (torch.float16, torch.bfloat16)


def set_products(numerics: NumericsTable) -> None:
    """Let matrix products on GPUs multiply as the job says, and add in float32, also where blocks of a kernel share a sum.

    In half precision torch lets them add up such parts rounded, and how a sum is divided depends on the shapes of a layout.
    """
    products = torch.backends.cuda.matmul
    products.allow_tf32 = torch.backends.cudnn.allow_tf32 = numerics.tf32
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False


def apply(traced: TracedModel, program: Program, device: torch.device) -> None:
    """Install the casts. Call it before sharding: a hook of ours must end before FSDP2 frees the weights it cast.

    Raises:
        ModelError: a parameter is not a floating-point number, so it cannot be held in another dtype.
    """
    model = traced.module
    for name, param in model.named_parameters():
        if not param.is_floating_point():
            dtype = str(param.dtype).removeprefix("torch.")
            works = "view_as_complex of a real parameter" if param.is_complex() else "a buffer"
            raise ModelError(
                "tensor-form", f"parameter {name} is {dtype}; parameters are floating-point numbers. Use {works}"
            )
    step = program.step
    compute, master = DTYPES[step.compute_dtype], DTYPES[step.master_dtype]
    if compute == master:
        return
    for layer in step.model.layers:
        for path in layer.modules:
            for module in model.get_submodule(path).modules():
                is_block = layer.is_block and module is model.get_submodule(path)
                if (is_block or any(True for _ in module.parameters(recurse=False))) and not is_norm(module):
                    _cast_inputs(module, compute)
    shared = {name.rpartition(".")[0] for p in step.model.params if p.shared for name in (p.name, *p.aliases)}
    for path, module in model.named_modules():
        if is_norm(module):
            call = fused_norms.fused_call(module, compute, master, device)
            if call is None:
                _compute_in(module, master, cast_inputs=True)
            else:
                _call_fused(module, call, compute, master)
        elif path in shared:
            _compute_in(module, compute, cast_inputs=False)


def for_loss(outputs: Any) -> Any:
    """Return outputs with half-precision tensors raised to float32, in which losses are computed."""
    if isinstance(outputs, Tensor):  # most often
        return outputs.float() if outputs.dtype in _HALF else outputs
    return map_tensors(outputs, lambda t: _raised(t) if t.dtype in _HALF else t)


def _raised(tensor: Tensor) -> Tensor:
    raised = tensor.float()
    if isinstance(tensor, nn.Parameter):
        raised.is_weight = True  # type: ignore[attr-defined]  # for the trial of the loss, which cuts none
    return raised


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating(args, dtype), cast_floating(kwargs, dtype) if kwargs else kwargs

    before_forward(module, cast, unless_in=dtype)


def _compute_in(module: nn.Module, dtype: torch.dtype, *, cast_inputs: bool) -> None:
    """Make `module` compute in `dtype`: its weights are replaced by casts while its forward runs."""
    enter, leave = _island(dtype, cast_inputs=cast_inputs)
    before_forward(module, enter)
    # always_call: a recomputed forward ends with an exception once it has what backward needs.
    after_forward(module, leave, always_call=True)


def _island(dtype: torch.dtype, *, cast_inputs: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what replaces a module's weights by casts before its forward, and what puts them back after it."""
    originals: dict[str, tuple[nn.Parameter, Tensor]] = {}
    """The module's own weights, each with its cast."""
    dtypes: list[torch.dtype] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        for name, param in list(module._parameters.items()):
            if param is not None and param.is_floating_point() and param.dtype != dtype:
                originals[name] = param, param.to(dtype)
                module._parameters[name] = originals[name][1]  # type: ignore[assignment]
        _relist(module)
        if not cast_inputs:
            return None
        dtypes.append(_floating_dtype((*args, *kwargs.values()), dtype))
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        for name, (param, cast) in originals.items():
            if module._parameters[name] is cast:  # else the forward has replaced it
                module._parameters[name] = param
        originals.clear()
        _relist(module)
        dtype_given = dtypes.pop() if dtypes else None
        return cast_floating(output, dtype_given) if dtype_given and output is not None else None

    return before, after


def _call_fused(module: nn.Module, call: fused_norms.Call, dtype: torch.dtype, master: torch.dtype) -> None:
    """Let a norm be the call where it is given one tensor and nothing else, and has it and its weight in this dtype; elsewhere it
    is an island of its class's forward."""
    inner = with_hooks(type(module).forward, *_island(master, cast_inputs=True))

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            x, weight = args[0], module._parameters.get("weight")
            if isinstance(x, Tensor) and weight is not None and x.dtype == weight.dtype == dtype:
                return call(module, x)
        return inner(module, *args, **kwargs)

    module.forward = MethodType(forward, module)


def _relist(module: nn.Module) -> None:
    """Update the list of weights that torch's recurrent layers keep."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _floating_dtype(values: Iterable[Any], default: torch.dtype) -> torch.dtype:
    return next((v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()), default)


def with_islands_raised(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that raises islands by itself: in a graph the body of a checkpoint is traced without the modes around it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with RaiseIslands():
            return forward(*args, **kwargs)

    return call


class PreciseForwards:
    """The contexts of a run's forwards: float32 islands are raised under float64, and operands of two dtypes are cast under bf16 and fp16."""

    def __init__(self, program: Program) -> None:
        step = program.step
        self._raises = step.compute_dtype == "float64"
        self.casts: ForwardCasts | None = None
        if DTYPES[step.compute_dtype] in _HALF:
            self.casts = ForwardCasts(DTYPES[step.compute_dtype], DTYPES[step.master_dtype])

    def of_forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        if self.casts is not None:
            return self.casts.of_forward()
        return RaiseIslands() if self._raises else _AS_IT_IS

    def recompute_contexts(self) -> Contexts:
        """Return the contexts of a forward, which has entered it already, and of its recomputation, which enters it again."""
        return nullcontext(), self.of_forward()


_DEFAULTS: list[torch.dtype] = []
"""The default dtypes in front of which islands are raised, from the outermost on."""


def default_outside() -> AbstractContextManager[None]:
    """Return a context whose code, as that of a data set, sees the default dtype from outside a forward: it draws other numbers in
    float64."""
    return _default_of(_DEFAULTS[0]) if _DEFAULTS else _AS_IT_IS


_AS_IT_IS = nullcontext()


@contextmanager
def _default_of(dtype: torch.dtype) -> Iterator[None]:
    now = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(now)


class RaiseIslands(TorchFunctionMode):
    """A function mode that raises a model's float32 islands to float64, for training in float64 and for proofs.

    A tensor that is made without a dtype is an island too: inside, torch's default dtype is float64.
    """

    def __enter__(self) -> RaiseIslands:
        _DEFAULTS.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(_DEFAULTS.pop())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to or func is Tensor.type:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if not kwargs:
            return func(*args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
