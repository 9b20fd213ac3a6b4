"""Sharded weights: ZeRO-2 and ZeRO-3 by FSDP2 (twin of `strategies/shard.py`; the only file that touches FSDP2).

The program's units become FSDP2 groups; what is gathered, freed and reduced when is set from the program, and nothing is
left to FSDP2's own defaults. Gradients are summed, never averaged. Each rank updates the rows of every weight that
FSDP2 gave it, as plain tensors.

Three traps, met here: FSDP2 keeps weights gathered over several backwards only by `set_reshard_after_backward(False)`,
and would then use stale ones in the next step, so the step's last backward always reshards; and a forward without a
backward (held-out loss) leaves the last unit gathered, so it is resharded by hand. An in-place op on a view that a unit
returned would drop the hook that gathers its weights again, so such a unit returns a copy.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from samestep.model import ParamSpec
from samestep.program import Program, Task, Unit, ends_step
from samestep.runtime.data import Materialize
from samestep.runtime.mesh import Mesh
from samestep.runtime.precision import DTYPES
from samestep.runtime.update import Piece, squared_norm


class Sharded:
    """Weights, gradients and optimizer cut over `dp_shard` along their first dimension."""

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> None:
        self.program, self.mesh = program, mesh
        self.model = model
        _retype(model, DTYPES[program.step.master_dtype])
        self._modules = _wrap(model, program, mesh)
        self.pieces: list[Piece] = []
        self._fill(materialize)

    @torch.no_grad()
    def _fill(self, materialize: Materialize) -> None:
        """Allocate this rank's rows, and fill them from each whole parameter in turn, which is freed at once."""
        device = self.mesh.device
        self.model._apply(lambda t: torch.empty_like(t, device=device) if isinstance(t, DTensor) else t)
        step = self.program.step
        params = dict(self.model.named_parameters())
        for spec in step.model.params:
            param = params[spec.name]
            assert isinstance(param, DTensor), f"{spec.name} is in no unit of the program"
            rows = _rows(spec, step.layout.dp_shard, self.mesh.shard_index)
            local = param._local_tensor
            local.copy_(materialize(spec.name, DTYPES[step.master_dtype])[rows])
            width = spec.numel // spec.shape[0] if spec.shape[0] else 0
            if spec.trainable and local.numel():
                start = rows.start * width
                self.pieces.append(self._piece(spec.name, start, start + local.numel(), param))

    def _piece(self, name: str, start: int, stop: int, param: DTensor) -> Piece:
        def gradient() -> Tensor:
            return _gradient(param)

        local = param._local_tensor.detach()
        if not self.program.step.layout.offload:
            return Piece(name, start, stop, local, gradient)
        return Piece(name, start, stop, local.to("cpu", copy=True), gradient, target=local)

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        for param in self.model.parameters():
            param.grad = None

    def begin_backward(self, task: Task) -> None:
        """Tell FSDP2 what the program says of the backward that follows."""
        step = self.program.step
        last = ends_step(task.body)
        if step.num_microbatches == 1 and last:
            return  # as FSDP2 starts out
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last or step.layout.accumulate == "sharded")
        self.model.set_requires_all_reduce(last)
        self.model.set_reshard_after_backward(last or step.zero == 3)

    def finish_gradients(self) -> None:
        """FSDP2 has waited for its own reductions at the end of backward."""

    def norm_squared(self) -> Tensor:
        """This rank's share of the squared gradient norm: the shares of all ranks add up to the whole."""
        gradients = [piece.gradient() for piece in self.pieces]
        return squared_norm(gradients, self.mesh.device) / self.mesh.dp_replicate

    def publish(self) -> None:
        """Nothing to send: the next forward gathers the updated rows."""

    def end_forward_only(self) -> None:
        """Free what a forward without a backward left gathered."""
        for module in self._modules:
            module.reshard()


def _retype(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every parameter, still on meta, the dtype of the master values that FSDP2 will hold."""
    retyped: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if param not in retyped:
                    retyped[param] = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
                setattr(module, name, retyped[param])


def _wrap(model: nn.Module, program: Program, mesh: Mesh) -> list[FSDPModule]:
    """Make an FSDP2 group of each unit, inner modules first and the root last."""
    # Said of units that return a view; those whose weights are gathered again return a copy instead (_whole_outputs).
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    device_mesh = mesh.for_shards()
    master = DTYPES[program.step.master_dtype]
    wrapped: list[FSDPModule] = []
    for unit in sorted(program.units, key=lambda unit: -max(path.count(".") + bool(path) for path in unit.modules)):
        modules = [model.get_submodule(path) for path in unit.modules]
        dtype = DTYPES[unit.dtype]
        if not unit.keep_after_forward:
            for module in modules:
                module.register_forward_hook(_whole_outputs)
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == master else dtype,
            reduce_dtype=None if dtype == master else master,
            cast_forward_inputs=False,  # precision.py casts, by one rule for every layout
        )
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=device_mesh,
            reshard_after_forward=not unit.keep_after_forward,
            mp_policy=policy,
        )
        wrapped += [_configured(module, unit) for module in modules]
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=device_mesh)  # holds no weight: FSDP2 wants a root to end a backward
        wrapped.append(_configured(model, None))
    return wrapped


def _whole_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.clone() if t._is_view() and t.requires_grad else t, outputs)


def _configured(module: nn.Module, unit: Unit | None) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    if unit is not None:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_unshard_in_backward(unit.gather_in_backward or unit.keep_after_forward)
    return module


def _rows(spec: ParamSpec, num_shards: int, index: int) -> slice:
    """Rows of a parameter that FSDP2 gives to a rank: equal runs of the first dimension, the last ones shorter."""
    each = -(-spec.shape[0] // num_shards)
    return slice(min(index * each, spec.shape[0]), min((index + 1) * each, spec.shape[0]))


def _gradient(param: DTensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    assert isinstance(param.grad, DTensor)
    return param.grad._local_tensor
