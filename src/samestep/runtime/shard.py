"""Sharded weights: ZeRO-2 and ZeRO-3 by FSDP2 (twin of `strategies/shard.py`; the only file that touches FSDP2).

The program's units become FSDP2 groups; what is gathered, freed and reduced when is set from the program, and nothing is
left to FSDP2's own defaults. Gradients are summed, never averaged. Each rank updates the rows of every weight that
FSDP2 gave it, as plain tensors.

Four traps, met here: FSDP2 keeps weights gathered over several backwards only by `set_reshard_after_backward(False)`,
and would then use stale ones in the next step, so the step's last backward always reshards; and a forward without a
backward (held-out loss) leaves the last unit gathered, so it is resharded by hand. An in-place op on a view that a unit
returned would drop the hook that gathers its weights again, so such a unit returns a copy. A weight that this rank's
samples did not use has no gradient, and FSDP2 reduces only those there are, which then lie elsewhere in the buffer than
on another rank: each unit's gradients are completed with zeros first, and a unit that did not run at all is an error.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.errors import LayoutError
from samestep.model import ParamSpec
from samestep.program import Program, Task, Unit, ends_step, is_replicated
from samestep.runtime.data import Materialize
from samestep.runtime.mesh import Mesh
from samestep.runtime.precision import DTYPES
from samestep.runtime.update import Piece, squared_norm


class Sharded:
    """Weights, gradients and optimizer cut over `dp_shard` along their first dimension."""

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> None:
        self.program, self.mesh = program, mesh
        self.model = model
        _reshape(model, program)
        self._units = [_RunningUnit(model, unit, program) for unit in program.units]
        self._modules = _wrap(model, program, mesh)
        _keep_order(self._units)
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
        for unit in self._units:
            unit.reset()

    def begin_backward(self, task: Task, loss: Tensor | None) -> None:
        """Tell FSDP2 what the program says of the backward of `loss`, which follows.

        Raises:
            LayoutError: a unit did not run in the forward, so this rank did not gather its weights with the others.
        """
        for unit in self._units:
            unit.end_forward()
        # FSDP2 ends a backward by a callback too, queued later: of units whose inputs take no gradient.
        assert loss is not None, "FSDP2 runs whole models"
        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(self._complete))
        step = self.program.step
        last = ends_step(task.body)
        if step.num_microbatches == 1 and last:
            return  # as FSDP2 starts out
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last or step.layout.accumulate == "sharded")
        self.model.set_requires_all_reduce(last)
        self.model.set_reshard_after_backward(last or step.zero == 3)

    def _complete(self) -> None:
        for unit in self._units:
            unit.complete()

    def finish_gradients(self) -> None:
        """FSDP2 has waited for its own reductions at the end of backward.

        Raises:
            LayoutError: a unit took no part in a backward, so this rank did not reduce its gradients with the others.
        """
        for unit in self._units:
            unit.check_backward()

    def norm_squared(self) -> Tensor:
        """This rank's share of the squared gradient norm: the shares of all ranks add up to the whole."""
        step = self.program.step
        whole = {param.name for param in step.model.params if is_replicated(step, param)}
        cut = [piece.gradient() for piece in self.pieces if piece.name not in whole]
        held = [piece.gradient() for piece in self.pieces if piece.name in whole]
        total = squared_norm(cut, self.mesh.device) + squared_norm(held, self.mesh.device) / self.mesh.tp
        return total / self.mesh.dp_replicate

    def publish(self) -> None:
        """Nothing to send: the next forward gathers the updated rows."""

    def end_forward_only(self) -> None:
        """Free what a forward without a backward left gathered."""
        for module in self._modules:
            module.reshard()
        for unit in self._units:
            unit.reset()


class _RunningUnit:
    """One unit in the forward and backward of a micro-batch: what ran, and gradients of zeros for weights left out.

    Where an input takes a gradient, FSDP2 reduces the unit right after that gradient is known, so a hook on the input
    comes just before; else at the end of the backward. A unit that runs several times is complete after its first run.
    """

    def __init__(self, model: nn.Module, unit: Unit, program: Program) -> None:
        trainable = {param.name for param in program.step.model.params if param.trainable}
        owned = [name.rpartition(".") for name in unit.params if name in trainable]
        self._places = [(model.get_submodule(path), leaf) for path, _, leaf in owned]
        self._path = unit.modules[0]
        self._zero = program.step.zero
        self._is_root = "" in unit.modules
        self._weights: list[Tensor] = []
        self._runs_open = 0
        self._is_complete = False
        self._left_out = False
        self._ran = False
        self.first_layer = unit.first_layer
        self.is_layer = set(unit.modules) <= {path for layer in program.step.model.layers for path in layer.modules}
        """Its modules all ran when the model was traced; a name of a shared weight may be of one that never runs."""
        self.modules = dict.fromkeys(model.get_submodule(path) for path in unit.modules)  # one may have two names
        for module in self.modules:
            # Before fully_shard, which puts its hook in front of this one: what is given here comes from FSDP2.
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)

    def reset(self) -> None:
        """Forget what ran."""
        self._runs_open, self._is_complete, self._left_out = 0, False, False
        self._ran = False

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a forward, whose backward is over once the gradient of an input is known."""
        if torch._C._current_graph_task_id() != -1:
            return  # repeated inside a backward
        self._ran = True
        if not torch.is_grad_enabled():
            return
        self._is_complete = False
        self._runs_open += 1  # stays open to the end of the backward where no input takes a gradient
        self._weights = [getattr(owner, leaf) for owner, leaf in self._places]
        closed: list[bool] = []
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(functools.partial(self._close_run, closed))

    def _close_run(self, closed: list[bool], _: Tensor) -> None:
        if not closed:
            closed.append(True)
            self._runs_open -= 1
            if self._runs_open == 0:
                self.complete()

    def complete(self) -> None:
        """Give each trained weight without a gradient one of zeros, once in a backward."""
        self._runs_open = 0
        if self._is_complete:
            return
        self._is_complete = True
        missing = [weight for weight in self._weights if weight.grad is None]
        self._left_out |= bool(missing) and len(missing) == len(self._weights) and not self._is_root
        for weight in missing:
            weight.grad = torch.zeros_like(weight)

    def check_order(self, before: list[_RunningUnit], *_: Any) -> None:
        """Raise, before this unit is gathered, if one before it was passed by."""
        if torch._C._current_graph_task_id() == -1:
            for unit in before:
                unit.check_ran()

    def end_forward(self) -> None:
        """Raise if the unit did not run in the forward that has ended."""
        self.check_ran()
        self._ran = False

    def check_ran(self) -> None:
        """Raise if the unit has not run in the forward."""
        if self.is_layer and not self._ran:
            raise LayoutError(self._refusal(f"{self._path} did not run in the forward"))

    def check_backward(self) -> None:
        """Raise if a backward did not reach the unit."""
        if self._left_out:
            raise LayoutError(self._refusal(f"{self._path} ran, but the loss does not depend on it"))

    def _refusal(self, what: str) -> str:
        return (
            f"{what} of a micro-batch, and zero={self._zero} gathers and reduces its weights on all ranks at once, "
            "so a rank may not pass it by; zero=1 works"
        )


def _keep_order(units: list[_RunningUnit]) -> None:
    """Let each layer's unit make sure that the layer before it has run, in front of FSDP2's gather."""
    layers: dict[int, list[_RunningUnit]] = {}
    for unit in units:
        if unit.is_layer:
            layers.setdefault(unit.first_layer, []).append(unit)
    order = sorted(layers)
    for layer, before in zip(order[1:], order, strict=False):
        for unit in layers[layer]:
            for module in unit.modules:
                module.register_forward_pre_hook(functools.partial(unit.check_order, layers[before]), prepend=True)


def _reshape(model: nn.Module, program: Program) -> None:
    """Give every parameter, still on meta, the shape that this rank's program has of it, in the master dtype."""
    dtype = DTYPES[program.step.master_dtype]
    for spec in program.step.model.params:
        param = nn.Parameter(torch.empty(spec.shape, dtype=dtype, device="meta"), requires_grad=spec.trainable)
        for name in (spec.name, *spec.aliases):
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, param)


def _wrap(model: nn.Module, program: Program, mesh: Mesh) -> list[FSDPModule]:
    """Make an FSDP2 group of each unit, inner modules first and the root last."""
    # Said of units that return a view; those whose weights are gathered again return a copy instead (_whole_outputs).
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    device_mesh = mesh.for_shards()
    master = DTYPES[program.step.master_dtype]
    wrapped: list[FSDPModule] = []
    for unit in sorted(program.units, key=lambda unit: -max(path.count(".") + bool(path) for path in unit.modules)):
        modules = list(dict.fromkeys(model.get_submodule(path) for path in unit.modules))
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
