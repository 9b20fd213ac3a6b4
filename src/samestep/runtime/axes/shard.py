"""Sharded weights: ZeRO-2 and ZeRO-3 by FSDP2 (twin of `strategies/shard.py`; the only file that touches FSDP2).

The program's units become FSDP2 groups. FSDP2's hooks gather a unit before its forward and before its backward, and free
it after its forward; which unit is gathered ahead of need, the program says. What ends a unit's backward is ours: once
the gradients of all its inputs are known, or else at the end of the task, `_RunningUnit.complete` lets FSDP2 free the
weights and, where the program has a reduce_scatter, reduce the gradients. So nothing depends on which forward a backward
follows: in a pipeline those of other micro-batches and of other virtual stages stand between the two.

```
task      F of chunk 0           B of chunk 1                                    end of the step
FSDP2     gather, run, free      gather, gather ahead, run
ours                             complete each unit: free, reduce_scatter        sums over tied stages, tp
```
Gradients are summed, never averaged. Each rank updates the rows of every weight that FSDP2 gave it, as plain tensors.

Traps, met here: FSDP2 frees what zero=2 keeps over several micro-batches, or uses stale weights in the next step, unless
each backward is told anew; and a forward without a backward (held-out loss) leaves the last unit gathered, so it is
resharded by hand. An in-place op on a view that a unit returned would drop the hook that gathers its weights again, so
such a unit returns a copy. A weight that this rank's samples did not use has no gradient, and FSDP2 reduces only those
there are, which then lie elsewhere in the buffer than on another rank: each unit's gradients are completed with zeros
first, and a unit that did not run at all is an error. A module that is called several times ends several backwards: FSDP2
by itself would reduce a part of the gradient after each.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.errors import LayoutError
from samestep.models.spec import ParamSpec
from samestep.program.bodies import UPDATE_BODY, ends_step
from samestep.program.ops import BYTES_OF, Kind, Op, Task
from samestep.program.program import Program
from samestep.program.units import Unit, partial_sizes
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.ledger import owned
from samestep.runtime.optimizer_step import Piece, squared_norm
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weight_store import Materialize
from samestep.schedules import TaskKind


class Sharded:
    """A `WeightStore` of weights, gradients and optimizer cut over `dp_shard` along their first dimension."""

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> None:
        self.program, self.mesh = program, mesh
        self.model = model
        places = _reshape(model, program)
        self._units = [_RunningUnit(model, unit, program, places) for unit in program.units]
        _wrap(model, self._units, program, mesh)
        _keep_order(self._units)
        self.pieces: list[Piece] = []
        self._params: dict[str, DTensor] = {}
        self._fill(places, materialize)
        # By hand: a stage's first forward has stand-ins in the places of its other virtual stages.
        self._root._get_fsdp_state()._lazy_init()
        self._root.set_is_last_backward(False)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    @torch.no_grad()
    def _fill(self, places: dict[str, _ParamSlots], materialize: Materialize) -> None:
        """Allocate this rank's rows, and fill them from each whole parameter in turn, which is freed at once."""
        device = self.mesh.device
        self.model._apply(lambda t: torch.empty_like(t, device=device) if isinstance(t, DTensor) else t)
        step = self.program.step
        for spec in step.model.params:
            value = materialize(spec.name, DTYPES[step.master_dtype])
            if not spec.numel:
                _put(places[spec.name], nn.Parameter(value, requires_grad=spec.trainable))
                continue
            param = _at(places[spec.name][0])
            assert isinstance(param, DTensor), f"{spec.name} is in no unit of the program"
            self._params[spec.name] = param
            holding = step.holding(spec)
            rows = _rows(spec, holding.num_shards, self.mesh.index(holding.data_axis))
            local = param._local_tensor
            local.copy_(value[rows])
            if spec.trainable and local.numel():
                start = rows.start * (spec.numel // spec.shape[0])
                self.pieces.append(self._piece(spec.name, start, start + local.numel(), param))

    def _piece(self, name: str, start: int, stop: int, param: DTensor) -> Piece:
        def gradient() -> Tensor:
            return _gradient(param)

        local = param._local_tensor.detach()
        if not self.program.step.layout.offload:
            return Piece(name, start, stop, local, gradient)
        return Piece(name, start, stop, local.to("cpu", copy=True), gradient, target=local)

    # -- a step ------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        for param in self._params.values():
            param.grad = None
        for unit in self._units:
            unit.reset()

    @contextmanager
    def running(self, task: Task) -> Iterator[None]:
        """Gather, free and reduce, while a task runs inside, what the program says.

        Raises:
            LayoutError: a unit did not run in the forward, so this rank did not gather its weights with the others.
        """
        step = self.program.step
        units = [unit for unit in self._units if unit.chunk == task.chunk]
        last = ends_step(task.body)
        for unit in units:
            if task.kind is TaskKind.FORWARD:
                unit.begin_forward(task.microbatch)
            else:
                unit.begin_backward(
                    task.microbatch,
                    reduces=last or step.layout.accumulate == "sharded",
                    all_reduces=last,
                    frees=last or step.zero == 3,
                )
        yield
        for unit in units:
            if task.kind is TaskKind.FORWARD:
                unit.end_forward()
            else:
                unit.complete(task.microbatch)

    def finish_gradients(self) -> None:
        """Wait for FSDP2's reductions; sum over stages that share a weight, and what is partial over the ranks of the others.

        Collective over these stages and `tp`: if a rank does not call it, the others wait for it.

        Raises:
            LayoutError: a unit took no part in a backward, so this rank did not reduce its gradients with the others.
        """
        for unit in self._units:
            unit.check_backward()
        self._root.set_is_last_backward(True)
        self._root._get_fsdp_state()._root_post_backward_final_callback()
        self._root.set_is_last_backward(False)
        step = self.program.step
        units = {unit.name: unit for unit in self.program.units}
        partial_axes = {axis for param in step.model.params for axis in step.holding(param).partial_over}
        for op in self.program.bodies[UPDATE_BODY]:
            if op.axis in partial_axes:
                self._sum_shards(op, partial_sizes(step, units[op.owner], op.axis))
            elif op.kind is Kind.ALL_REDUCE and op.owner in self._params:
                self._sum_shards(op, {op.owner: op.size_bytes // BYTES_OF[op.dtype]})

    def _sum_shards(self, op: Op, sizes: Mapping[str, int]) -> None:
        """All_reduce this rank's shards of some gradients, padded as every rank pads them."""
        assert op.axis is not None
        gradients = [_gradient(self._params[name]) for name in sizes]
        whole = torch.zeros(sum(sizes.values()), dtype=gradients[0].dtype, device=gradients[0].device)
        places = [
            place[: gradient.numel()].view_as(gradient)
            for place, gradient in zip(whole.split([*sizes.values()]), gradients, strict=True)
        ]
        torch._foreach_copy_(places, gradients)
        with owned(op.owner):
            dist.all_reduce(whole, group=self.mesh.groups[op.axis])
        torch._foreach_copy_(gradients, places)

    def norm_squared(self) -> Tensor:
        """This rank's share of the squared gradient norm: the shares of all ranks add up to the whole."""
        step = self.program.step
        copies = {param.name: step.holding(param).num_copies for param in step.model.params}
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for number in sorted(set(copies.values())):
            alike = [piece.gradient() for piece in self.pieces if copies[piece.name] == number]
            total += squared_norm(alike, self.mesh.device) / number
        return total / self.mesh.size("dp_replicate")

    def publish(self) -> None:
        """Nothing to send: the next forward gathers the updated rows."""

    def end_forward_only(self) -> None:
        """Free what a forward without a backward left gathered."""
        for unit in self._units:
            unit.fsdp.reshard()
            unit.reset()


_ParamSlots = list[tuple[nn.Module, str]]
"""Modules of a unit that have a weight, and its name there."""


class _RunningUnit:
    """One unit in the forwards and backwards of a step: what ran, and what ends its backward.

    A run is a call of one of its modules. It is over in the backward once the gradients of its inputs are known, which a
    hook on an input tells; where no input takes a gradient it stays open to the end of the task. Runs are counted by
    micro-batch, since in a pipeline several are under way.
    """

    def __init__(self, model: nn.Module, unit: Unit, program: Program, places: dict[str, _ParamSlots]) -> None:
        self.unit = unit
        self.params = {_at(places[name][0]) for name in unit.params}
        """Still on meta, before FSDP2 cuts them."""
        self._path = unit.modules[0]
        self._zero = program.step.zero
        self.chunk = next((i for i, layers in enumerate(program.chunks) if unit.first_layer in layers), 0)
        self.is_layer = set(unit.modules) <= {path for layer in program.step.model.layers for path in layer.modules}
        """Its modules all ran when the model was traced; a name of a shared weight may be of one that never runs."""
        self.modules = dict.fromkeys(model.get_submodule(path) for path in unit.modules)
        for module in self.modules:
            # Before fully_shard, which puts its hook in front of this one.
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        self.reset()

    @property
    def fsdp(self) -> FSDPModule:
        """Its handle: modules of one unit share one FSDP2 state."""
        module = next(iter(self.modules))
        assert isinstance(module, FSDPModule)
        return module

    @property
    def _group(self) -> FSDPParamGroup:
        group = self.fsdp._get_fsdp_state()._fsdp_param_group
        assert group is not None
        return group

    def reset(self) -> None:
        """Forget what ran."""
        self._open = Counter[int]()
        self._microbatch = 0
        self._in_backward = self._ran = self._left_out = False
        self._reduces = self._all_reduces = self._frees = False

    # -- forward -----------------------------------------------------------------------------------

    def begin_forward(self, microbatch: int) -> None:
        """Count the runs that follow to a micro-batch."""
        self._microbatch, self._ran = microbatch, False

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a run, whose backward is over once the gradient of an input is known."""
        if torch._C._current_graph_task_id() != -1:
            return  # repeated inside a backward
        self._ran = True
        if not torch.is_grad_enabled():
            return
        self._open[self._microbatch] += 1
        inputs = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad}
        waiting = set(inputs)
        for key, leaf in inputs.items():
            handle = leaf.register_hook(functools.partial(self._close_run, self._microbatch, waiting, key))
            # In front of FSDP2's hook, which gathers for the module that gave the tensor.
            hooks: OrderedDict[int, Any] = leaf._backward_hooks  # type: ignore[assignment]
            hooks.move_to_end(handle.id, last=False)

    def end_forward(self) -> None:
        """Free what was held for several calls, and raise if the unit did not run."""
        self.check_ran()
        if self.unit.is_called_again and not self.unit.keep_after_forward:
            self.fsdp.reshard()

    # -- backward ----------------------------------------------------------------------------------

    def begin_backward(self, microbatch: int, *, reduces: bool, all_reduces: bool, frees: bool) -> None:
        """Know what the program says of the backward that follows."""
        self._microbatch, self._in_backward = microbatch, True
        self._reduces, self._all_reduces, self._frees = reduces, all_reduces, frees

    def _close_run(self, microbatch: int, waiting: set[int], key: int, _: Tensor) -> None:
        if waiting == {key}:  # an input that is added late has its gradient before the weights have theirs
            self._open[microbatch] -= 1
            if self._open[microbatch] == 0:
                self.complete(microbatch)
        waiting.discard(key)

    def complete(self, microbatch: int) -> None:
        """End the unit's backward, once: give trained weights that were not used a gradient of zeros, free, reduce."""
        self._open.pop(microbatch, None)
        if not self._in_backward:
            return
        self._in_backward = False
        weights = [weight for weight in self._group.fsdp_params if weight.sharded_param.requires_grad]
        # FSDP2 has raised the gradient of a half-precision weight, where its own hook came first.
        missing = [w for w in weights if w._unsharded_param.grad is None and w.unsharded_accumulated_grad is None]
        self._left_out |= bool(missing) and len(missing) == len(weights) and self._path != ""
        for weight in missing:
            weight._unsharded_param.grad = torch.zeros_like(weight._unsharded_param)
        self._end_backward()

    def _end_backward(self) -> None:
        """Let FSDP2 free the weights and reduce the gradients, which it does at no other time."""
        self.fsdp.set_requires_gradient_sync(self._reduces, recurse=False)
        self.fsdp.set_requires_all_reduce(self._all_reduces, recurse=False)
        self.fsdp.set_reshard_after_backward(self._frees, recurse=False)
        self._group.post_backward()
        _keep_still(self.fsdp)

    # -- what a rank must not leave out ------------------------------------------------------------

    def check_order(self, before: list[_RunningUnit], *_: Any) -> None:
        """Raise, before this unit is gathered, if one before it was passed by."""
        if torch._C._current_graph_task_id() == -1:
            for unit in before:
                unit.check_ran()

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
            layers.setdefault(unit.unit.first_layer, []).append(unit)
    for before, layer in itertools.pairwise(sorted(layers)):
        passed = [unit for unit in layers[before] if unit.chunk == layers[layer][0].chunk]
        for unit in layers[layer]:
            for module in unit.modules:
                module.register_forward_pre_hook(functools.partial(unit.check_order, passed), prepend=True)


def _reshape(model: nn.Module, program: Program) -> dict[str, _ParamSlots]:
    """Give every parameter, still on meta, the shape and dtype that this rank's program has of it; return its places."""
    dtype = DTYPES[program.step.master_dtype]
    mine = {name: {*unit.modules} for unit in program.units for name in unit.params}
    places: dict[str, _ParamSlots] = {}
    for spec in program.step.model.params:
        names = [name.rpartition(".") for name in (spec.name, *spec.aliases)]
        if program.step.holding(spec).tied_over:  # another stage has the weight's other name
            names = [name for name in names if name[0] in mine[spec.name]]
        places[spec.name] = [(model.get_submodule(path), leaf) for path, _, leaf in names]
        empty = torch.empty(spec.shape, dtype=dtype, device="meta")
        _put(places[spec.name], nn.Parameter(empty, requires_grad=spec.trainable))
    return places


def _at(place: tuple[nn.Module, str]) -> Tensor:
    owner, leaf = place
    value: Tensor = getattr(owner, leaf)
    return value


def _put(places: _ParamSlots, param: nn.Parameter) -> None:
    for owner, leaf in places:
        setattr(owner, leaf, param)


def _wrap(model: nn.Module, units: list[_RunningUnit], program: Program, mesh: Mesh) -> None:
    """Make an FSDP2 group of each unit, inner modules first and the root last."""
    # Said of units that return a view; those whose weights are gathered again return a copy instead (_whole_outputs).
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    axes = {"dp_shard", *(running.unit.shard_axis for running in units)}
    meshes = {axis: mesh.for_shards(axis) for axis in sorted(axes)}
    everything = set(model.parameters())
    for running in sorted(units, key=lambda u: -max(path.count(".") + bool(path) for path in u.unit.modules)):
        unit, modules = running.unit, list(running.modules)
        if not unit.keep_after_forward:
            for module in modules:
                module.register_forward_hook(_whole_outputs)
        master, dtype, sent = DTYPES[program.step.master_dtype], DTYPES[unit.dtype], DTYPES[unit.reduce_dtype]
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == master else dtype,
            reduce_dtype=None if dtype == sent else sent,
            cast_forward_inputs=False,  # precision.py casts, by one rule for every layout
        )
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=meshes[unit.shard_axis],
            reshard_after_forward=not (unit.keep_after_forward or unit.is_called_again),
            mp_policy=policy,
            ignored_params=everything - running.params,
        )
        running.fsdp.set_gradient_divide_factor(1.0)
        running.fsdp.set_force_sum_reduction_for_comms(True)
        running.fsdp.set_unshard_in_backward(unit.gather_in_backward or unit.keep_after_forward)
        _keep_still(running.fsdp)
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=meshes["dp_shard"], ignored_params=everything)  # no weight: FSDP2 wants a root
    named = {running.unit.name: running.fsdp for running in units}
    for running in units:
        # Itself, which is gathered already, where there is none: without any, FSDP2 would take the last one that ran.
        running.fsdp.set_modules_to_backward_prefetch([named[running.unit.prefetch or running.unit.name]])


def _keep_still(module: FSDPModule) -> None:
    """Let FSDP2 neither reduce nor free by itself what a backward leaves."""
    module.set_requires_gradient_sync(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)


def _whole_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.clone() if t._is_view() and t.requires_grad else t, outputs)


def _rows(spec: ParamSpec, num_shards: int, index: int) -> slice:
    """Rows of a parameter that FSDP2 gives to a rank: equal runs of the first dimension, the last ones shorter."""
    each = -(-spec.shape[0] // num_shards)
    return slice(min(index * each, spec.shape[0]), min((index + 1) * each, spec.shape[0]))


def _gradient(param: DTensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    assert isinstance(param.grad, DTensor)
    return param.grad._local_tensor
