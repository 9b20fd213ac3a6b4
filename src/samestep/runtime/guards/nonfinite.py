"""Find the module that first makes a non-finite value, by running the micro-batch once more under hooks.

Forward: a module is at fault when its output is not finite though its input is. Hooks of inner modules run before those
of the modules around them, so the innermost module is named; where the operation is in a module's own forward, between
its children, that module is named. Backward, only if every forward and the loss were finite: each output tensor, and a
view of each input tensor, has a hook on its gradient,

    gradient of the output finite, gradient of an input or a weight not  ->  this module
    gradient of an output is the first that is not                       ->  the innermost module around it whose own
                                                                             output's gradient is finite, or the loss

Views are used, not torch's full backward hooks, which forbid in-place operations on the tensors they wrap.
-inf in a tensor without a gradient is an attention mask and counts as finite.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.errors import module_name
from samestep.randomness.masks import named_modules
from samestep.runtime.assembly import Assembly
from samestep.runtime.optimizers.loss_scale import LARGEST_SUM
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import StepBatch
from samestep.state.writes import KeptTensors
from samestep.tracing.pending_logits import PendingLogits
from samestep.trees import tensors_in

LARGEST_FLOAT16 = 65504
_GROWN = 1e6
"""A weight above it has diverged: no initialisation and no published model has one."""


def first_nonfinite(
    run_forward_backward: Callable[[], Tensor | None], model: nn.Module, masters: Mapping[str, float] | None = None
) -> str | None:
    """Run a micro-batch again; return which module first computed a non-finite value, and how, or None if none did.

    `run_forward_backward` repeats the run, on weights unchanged since (and under a new `DropoutMode`, so that the masks
    are the same). It should return the loss: a bad loss with good gradients, as the log of a negative number, can be
    seen in no other way. Gradients are added to the existing ones.

    `masters` gives max|float32 value| of parameters by full name, where the model holds a float16 cast of them: an
    overflow in the cast is then reported as such.

    `run_forward_backward` is called once and runs to its end. Where it communicates, every rank of its groups must call
    this; each returns what it sees itself.
    """
    finder = _NonFiniteFinder(masters or {})
    modules = named_modules(model)
    try:
        for name, module in modules.items():
            finder.attach(name, module)
        loss = run_forward_backward()
    finally:
        finder.detach()
    if finder.forward_fault:
        return finder.forward_fault
    if isinstance(loss, Tensor) and not _is_finite(loss, masks=False):
        return f"loss: not finite ({loss.detach().flatten()[0].item()}), though every module's output is"
    return finder.backward_fault or finder.backward_fault_outside()


_OF_INPUT = "its input is not finite"


def cause_of_nonfinite(assembly: Assembly, run_forward_backward: Callable[[], Tensor], batch: StepBatch) -> str:
    """Run a step's forwards and backwards again; return the first module at fault, on the first rank that has one, or the
    first samples of the batch at fault.

    Collective over the world: every rank calls it, and returns the same text. If one does not, the others wait until
    the time limit.
    """
    weights, module = assembly.weights, assembly.model.module
    world_size = assembly.parallel.mesh.size("world")
    masters: dict[str, float] = {}
    if weights.updater.loss_scale.is_dynamic:
        for piece in weights.store.pieces:
            masters[piece.name] = max(masters.get(piece.name, 0.0), float(piece.master().abs().max()))
        for others in gather_values(masters, world_size):  # a rank may hold a part of a weight only
            masters |= {name: max(most, masters.get(name, 0.0)) for name, most in others.items()}
    buffers = KeptTensors.of(module.buffers())
    with assembly.model.compiled.off():
        text = first_nonfinite(run_forward_backward, module, masters)
    buffers.restore()
    faults = [f"{text} (rank {rank})" for rank, text in enumerate(gather_values(text, world_size)) if text]
    if faults and _OF_INPUT in faults[0]:
        bad = sorted(
            {index for indices in gather_values(_bad_samples(assembly, batch), world_size) for index in indices}
        )
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        which = f": sample{'s' * (len(bad) > 1)} {', '.join(map(str, bad[:3]))}{more}" if bad else ""
        return faults[0].replace(_OF_INPUT, f"{_OF_INPUT}{which}")
    if faults:
        return faults[0]
    if weights.updater.loss_scale.is_dynamic:
        return f"a gradient under the loss scale {weights.updater.loss_scale.scale:g} is above {LARGEST_SUM:g}"
    return "loss or gradient norm is not finite, though no module's output or gradient is"


def _bad_samples(assembly: Assembly, batch: StepBatch) -> list[int]:
    """Return the samples of this data rank that hold a number which is not finite."""
    indices = batch.shares(*assembly.parallel.mesh.data_share, 1)[0].tolist()
    return [index for index in indices if not all(map(_is_finite, tensors_in(batch.samples([index]))))]


@dataclass(slots=True, eq=False)
class _RunningCall:
    """One running forward of a module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs_are_finite: bool
    handed_through: set[int] = dataclasses.field(default_factory=set)
    """Ids of inputs that are outputs too: a gradient there says nothing about the module."""


class _NonFiniteFinder:
    """The hooks of one repeated run, and the faults they found."""

    def __init__(self, masters: Mapping[str, float]) -> None:
        self.forward_fault: str | None = None
        self.backward_fault: str | None = None
        self._masters = masters
        self._handles: list[RemovableHandle] = []
        self._running: list[_RunningCall] = []
        self._called: set[str] = set()
        self._watched_params: set[int] = set()
        self._bad_output_grads: set[str] = set()
        self._largest_output_grad: dict[str, float] = {}
        self._first_bad_output: tuple[str, ...] | None = None

    def attach(self, name: str, module: nn.Module) -> None:
        """Add hooks to one module, after the hooks it has, so that they see it unsharded and with its inputs cast."""
        enter = functools.partial(self._enter, name)
        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))

    def detach(self) -> None:
        """Remove every hook, those on parameters included."""
        for handle in self._handles:
            handle.remove()

    # Forward ----------------------------------------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.forward_fault:
            return None
        call = _RunningCall(
            name, module, args, kwargs, all(_is_finite(tensor) for tensor in tensors_in((args, kwargs)))
        )
        if not self._running and not call.inputs_are_finite:
            self.forward_fault = f"{_label(name)}: {_OF_INPUT}"
            return None
        self._running.append(call)
        self._called.add(name)
        self._watch_params(call)
        call.args = tuple(self._watch_input(call, arg) for arg in args)
        call.kwargs = {key: self._watch_input(call, arg) for key, arg in kwargs.items()}
        return call.args, call.kwargs

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # After an exception (which ends a recomputation) the hooks of inner modules may not have run.
        if self.forward_fault or not any(call.module is module for call in self._running):
            return
        while (call := self._running.pop()).module is not module:
            pass
        outputs = list(tensors_in(output))
        if bad := [tensor for tensor in outputs if not _is_finite(tensor)]:
            if call.inputs_are_finite:
                self.forward_fault = _explain(call, bad, self._masters)
            return
        around = tuple(outer.name for outer in reversed(self._running))
        call.handed_through = {id(tensor) for tensor in outputs} & {id(x) for x in tensors_in((call.args, call.kwargs))}
        call.args, call.kwargs = (), {}  # the hooks keep the call, which must not keep activations
        for tensor in outputs:
            if tensor.requires_grad:
                see = functools.partial(self._see_output_grad, call.name, around)
                self._handles.append(tensor.register_hook(see))

    def _watch_input(self, call: _RunningCall, value: Any) -> Any:
        """Return a module's input as a view, whose gradient is what this module alone sends back."""
        if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
            return value
        view = value.view_as(value)
        self._handles.append(view.register_hook(functools.partial(self._see_input_grad, call, id(view))))
        return view

    def _watch_params(self, call: _RunningCall) -> None:
        """Add hooks to a module's present parameters; those of a sharded unit are plain tensors only while it runs."""
        for name, param in call.module.named_parameters(prefix=call.name):
            if param.requires_grad and id(param) not in self._watched_params:
                self._watched_params.add(id(param))
                self._handles.append(param.register_hook(functools.partial(self._see_param_grad, name)))

    # Backward ---------------------------------------------------------------------------------------------------------

    def _is_over(self, grad: Tensor) -> bool:
        """Return whether a bad gradient was seen before, or this one is good."""
        return bool(self.backward_fault or self._first_bad_output is not None or _is_finite(grad, masks=False))

    def _see_output_grad(self, name: str, around: tuple[str, ...], grad: Tensor) -> None:
        self._largest_output_grad[name] = max(self._largest_output_grad.get(name, 0.0), _largest([grad]) or 0.0)
        if not self._is_over(grad):
            self._first_bad_output = (name, *around)
        if not _is_finite(grad, masks=False):
            self._bad_output_grads.add(name)

    def _see_input_grad(self, call: _RunningCall, view: int, grad: Tensor) -> None:
        if view in call.handed_through or call.name in self._bad_output_grads or self._is_over(grad):
            return
        self._blame_backward(call.name, "input", grad.dtype)

    def _see_param_grad(self, name: str, grad: Tensor) -> None:
        owner, _, own_name = name.rpartition(".")
        # A parameter may be used by an outer module, whose child is never called (nn.MultiheadAttention.out_proj).
        while owner not in self._called and owner:
            owner, _, head = owner.rpartition(".")
            own_name = f"{head}.{own_name}"
        if owner not in self._bad_output_grads and not self._is_over(grad):
            self._blame_backward(owner, own_name, grad.dtype)

    def _blame_backward(self, name: str, what: str, dtype: torch.dtype) -> None:
        largest = self._largest_output_grad.get(name)
        size = f" (max |gradient of its output| {largest:.1e}, {_name(dtype)})" if largest is not None else ""
        self.backward_fault = f"{_label(name)}: backward gradient of {what} not finite{size}"

    def backward_fault_outside(self) -> str | None:
        """Return where the first bad gradient of an output came from, once the gradients of all outputs are known."""
        if self._first_bad_output is None:
            return None
        first, *around = self._first_bad_output
        for name in around:
            if name not in self._bad_output_grads:
                return f"{_label(name)}: backward gradient not finite between its modules, after the output of {first}"
        return f"loss: its gradient is not finite at the output of {_label(first)}"


def _explain(call: _RunningCall, bad: list[Tensor], masters: Mapping[str, float]) -> str:
    """Return why a module computed non-finite outputs from finite inputs."""
    for name, weight in (*call.module.named_parameters(), *call.module.named_buffers()):
        if _is_finite(weight):
            continue
        largest = masters.get(f"{call.name}.{name}".lstrip("."), 0.0)
        overflow = f": value {largest:.1e} does not fit float16 (largest {LARGEST_FLOAT16})"
        cast = overflow if LARGEST_FLOAT16 < largest < float("inf") else ""
        return f"{_label(call.name)}: {name} is not finite{cast}"
    largest_input = _largest(tensors_in((call.args, call.kwargs)))
    size = f" (max |input| {largest_input:.1e})" if largest_input is not None else ""
    largest_weight = _largest([*call.module.parameters()]) or 0.0
    grown = f": weights of it reach {largest_weight:.1e}. Use a lower learning rate"
    text = f"{_label(call.name)}: forward output not finite{size}{grown * (largest_weight > _GROWN)}"
    is_half = any(tensor.dtype == torch.float16 for tensor in bad)
    return f"{text}, in float16, which holds numbers up to {LARGEST_FLOAT16}" if is_half else text


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a value, without communication; for chunked logits, a tensor that is finite if they are."""
    if isinstance(tensor, PendingLogits):
        return tensor.log_sums_of_own_classes()
    tensor = tensor.detach()
    tensor = tensor._local_tensor if _is_cut(tensor) else tensor  # type: ignore[attr-defined]
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _is_finite(tensor: Tensor, masks: bool = True) -> bool:
    """Return whether this rank's part is finite; with `masks`, -inf in a tensor without gradient is finite."""
    is_mask = masks and not tensor.requires_grad and tensor.is_floating_point()
    tensor = _local(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    finite = tensor.isfinite()
    return bool((finite | (tensor == -float("inf")) if is_mask else finite).all())


def _largest(tensors: Iterator[Tensor] | list[Tensor]) -> float | None:
    """Return max|value| over the finite elements of floating tensors; None without such a tensor."""
    largest = [
        tensor.abs().masked_fill(~tensor.isfinite(), 0).max().item()
        for tensor in map(_local, tensors)
        if tensor.numel() and tensor.is_floating_point()
    ]
    return max(largest, default=None)


def _label(name: str) -> str:
    return module_name(name) or "the model itself"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_cut(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, by its class name: importing DTensor takes a second."""
    return type(tensor).__name__ == "DTensor"
