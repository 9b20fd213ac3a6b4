"""Frozen weights in the host's memory (twin of `strategies/host_weights.py`): each call of their module copies them to the device.

Between two calls a weight is its tensor on the host, which checkpoints, averages and the loop's own code read and write. A call gives it
a tensor on the device, whose storage is allocated for the call and freed behind it:

```
between two calls     weight ─► host        device: a tensor without storage
in a call             weight ─► device      the copy of the host's values
```
Autograd keeps that tensor, or a view of it, for the backward: its storage is filled again once the first gradient of an output is
known, and freed once those of all inputs are. What a forward writes into a weight in its call is copied back.

Under zero=2 and 3 FSDP2 copies a rank's shard for each gather, as its `CPUOffloadPolicy` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from samestep.building.torch_seams import call_after_backward
from samestep.program.program import Program
from samestep.runtime.host_copies import master_on_host
from samestep.runtime.processes.mesh import Mesh
from samestep.state.writes import marks_of
from samestep.trees import tensors_in

_Materialize = Callable[[str, torch.dtype], Tensor]
num_copies = 0
"""Copies of modules' weights to the device in this process, which tests count."""


def on_host(materialize: _Materialize, program: Program) -> _Materialize:
    """Return `materialize` with the values of some weights on the host, where a store leaves those that are frozen."""
    names = {name for host_module in program.host_modules for name in host_module.params}

    def made(name: str, dtype: torch.dtype) -> Tensor:
        value = materialize(name, dtype)
        return master_on_host(value) if name in names else value

    return made if names else materialize


def copy_for_calls(model: nn.Module, program: Program, mesh: Mesh) -> None:
    """Let the calls of modules copy their weights to the device, unless FSDP2 copies them for its gathers."""
    if not program.host_modules or program.units:
        return
    known: dict[str, _HostWeight] = {}
    for host_module in program.host_modules:
        for name in host_module.params:
            if name not in known:
                known[name] = _HostWeight(model.get_parameter(name), mesh.device)
        _Calls([known[name] for name in host_module.params]).watch(model.get_submodule(host_module.path))


class _HostWeight:
    """One weight, its values on the host, and the tensor on the device that it is in calls."""

    def __init__(self, param: nn.Parameter, device: torch.device) -> None:
        values = param.detach()
        if device.type == "cuda" and not values.is_pinned():
            values = values.pin_memory()
        self._param, self._host = param, values
        self._there = torch.empty_like(values, device=device)
        self._num_bytes = self._there.untyped_storage().nbytes()
        self._there.untyped_storage().resize_(0)
        self._num_calls, self._before = 0, marks_of([param])
        param.data = values

    def bring(self) -> None:
        """Copy the values to the device, unless they are there."""
        self._num_calls += 1
        if self._num_calls > 1:
            return
        if self._param.data_ptr() != self._host.data_ptr():  # `param.data = ...` was assigned
            self._host.copy_(self._param.data)
        self._there.untyped_storage().resize_(self._num_bytes)
        self._there.copy_(self._host, non_blocking=True)
        self._param.data = self._there
        self._before = marks_of([self._param], addresses=True)

    def leave(self) -> None:
        """Free the values on the device after the last call that reads them."""
        self._num_calls -= 1
        if self._num_calls:
            return
        if marks_of([self._param], addresses=True).differ(self._before):
            self._host.copy_(self._param.data)
        self._param.data = self._host
        self._there.untyped_storage().resize_(0)


class _Calls:
    """The calls of a module, each of which brings the weights."""

    def __init__(self, weights: list[_HostWeight]) -> None:
        self._weights = weights

    def watch(self, module: nn.Module) -> None:
        """Let each call of the module bring the weights, and each backward through it."""
        module.register_forward_pre_hook(self._enter, prepend=True)
        module.register_forward_hook(self._return, with_kwargs=True, always_call=True)

    def bring(self) -> None:
        """Copy the weights to the device."""
        global num_copies
        num_copies += 1
        for weight in self._weights:
            weight.bring()

    def leave(self) -> None:
        """Free them there."""
        for weight in self._weights:
            weight.leave()

    def _enter(self, *_: Any) -> None:
        self.bring()

    def _return(self, _: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        self.leave()
        if not torch.is_grad_enabled():
            return
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad and not tensor.is_leaf]
        back = _Backward(self)
        for x in tensors:
            x.register_hook(back.begin)
        if tensors and inputs:
            register_multi_grad_hook(inputs, back.end, mode="all")


class _Backward:
    """The backward through one call: from the first gradient of its outputs to the last one of its inputs."""

    def __init__(self, calls: _Calls) -> None:
        self._calls, self._runs = calls, False

    def begin(self, _: Tensor) -> None:
        """Bring the weights, at the latest until the whole backward is over."""
        if not self._runs:
            self._runs = True
            self._calls.bring()
            call_after_backward(self.end)

    def end(self, *_: Any) -> None:
        """Free the weights."""
        if self._runs:
            self._runs = False
            self._calls.leave()
