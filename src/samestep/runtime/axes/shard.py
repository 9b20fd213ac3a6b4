"""Sharded weights: ZeRO-2 and ZeRO-3 by FSDP2 (twin of `strategies/shard.py`; no other part of a run touches FSDP2).

The program's units become FSDP2 groups. FSDP2's hooks gather a unit before its forward and before its backward, and
reshard it after its forward; the program says which unit is gathered ahead of need. We end a unit's backward: once the
gradients of all its inputs are known, or else at the end of the task, `_RunningUnit.complete` lets FSDP2 free the
weights and, where the program has a reduce_scatter, reduce the gradients. So nothing depends on which forward preceded
a backward: in a pipeline those of other micro-batches and of other chunks run between the two.

```
task      F of chunk 0           B of chunk 1                                    end of the step
FSDP2     gather, run, free      gather, gather ahead, run
ours                             complete each unit: free, reduce_scatter        sums over tied stages, tp
```
Where ranks scatter codes, FSDP2 calls `encoded_scatters.py` in place of its reduce_scatter.
Gradients are summed, never averaged. Each rank updates the rows of every weight that FSDP2 gave it, as plain tensors.

Traps met here:
- FSDP2 frees the weights that zero=2 keeps over several micro-batches, or uses stale ones in the next step, unless
  resharding is set again before each backward.
- A forward without a backward (held-out loss) leaves the last unit gathered, so we reshard it.
- An in-place op on a view that a unit returned would drop the hook that gathers its weights in backward, so such a
  unit returns a copy.
- A weight that this rank's samples did not use has no gradient, and FSDP2 reduces only existing gradients, which then
  lie elsewhere in the buffer than on another rank: each unit's gradients are completed with zeros first, and a unit
  that did not run at all is an error.
- A module that is called several times ends several backwards: FSDP2 by itself would reduce a part of the gradient
  after each.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.building import nf4
from samestep.errors import LayoutError
from samestep.models.packing import packed_bytes
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import is_below
from samestep.program.bodies import UPDATE_BODY, Task, ends_step
from samestep.program.exchange_times import Phase
from samestep.program.ops import BYTES_OF, Op, OpKind
from samestep.program.program import Program
from samestep.program.units import Unit, partial_sizes
from samestep.runtime.axes.encoded_scatters import EncodedScatter, EncodedScatters
from samestep.runtime.axes.encoded_shards import EncodedShards
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.codecs.rests import Directions, GivenBack
from samestep.runtime.forward_only import has_backward
from samestep.runtime.host_copies import master_on_host
from samestep.runtime.ledger import owned
from samestep.runtime.optimizers.optimizer_step import squared_norm
from samestep.runtime.optimizers.pieces import Piece
from samestep.runtime.parameter_hooks import GradientHooks
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weight_store import Materialize
from samestep.schedules import TaskKind


class Sharded:
    """A `WeightStore` of weights, gradients and optimizer sharded over `dp_shard` along their first dimension."""

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> None:
        self.program, self.mesh = program, mesh
        self.model = model
        slots = _reshape(model, program)
        self._units = [_RunningUnit(model, unit, program, slots) for unit in program.units]
        _wrap(model, self._units, slots, program, mesh)
        _keep_order(self._units)
        self.pieces: list[Piece] = []
        self.frozen: list[Piece] = []
        self._params: dict[str, DTensor] = {}
        self.frozen_params: dict[str, DTensor] = {}
        self._fill(slots, materialize)
        # Explicitly: in a stage's first forward stand-ins replace the modules of its other chunks.
        self._root._get_fsdp_state()._lazy_init()
        self._root.set_is_last_backward(False)
        self._encoded = EncodedShards(program, mesh, self.pieces)
        self._scatters = EncodedScatters(program, mesh, [(running.unit, running.names) for running in self._units])
        for running in self._units:
            if (scatter := self._scatters.of_unit.get(running.unit.name)) is not None:
                running.fsdp.set_custom_reduce_scatter(_EncodedReduceScatter(scatter))

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    @torch.no_grad()
    def _fill(self, slots: dict[str, _ParamSlots], materialize: Materialize) -> None:
        """Allocate this rank's rows, and fill them from each whole parameter in turn, which is freed at once."""
        device = self.mesh.device
        self.model._apply(lambda t: torch.empty_like(t, device=device) if isinstance(t, DTensor) else t)
        step = self.program.step
        for spec in step.model.params:
            value = materialize(spec.name, DTYPES[step.master_dtype])
            if spec.held_as:
                value = nf4.packed(value)
            if not spec.numel:
                _put(slots[spec.name], nn.Parameter(value, requires_grad=spec.trainable))
                continue
            param = _param_at(slots[spec.name][0])
            assert isinstance(param, DTensor), f"{spec.name} is in no unit of the program"
            self._params[spec.name] = param
            holding = step.holding(spec)
            rows = _rows(spec, holding.num_shards, self.mesh.index(holding.data_axis))
            local = param._local_tensor
            local.copy_((value if spec.held_as else value.view(_shape(spec)))[rows])
            start = rows.start * spec.row_numel
            if not spec.trainable:
                stop = start + len(local) * spec.row_numel
                self.frozen_params[spec.name] = param
                self.frozen.append(
                    Piece(spec.name, start, stop, local, lambda: torch.zeros(0), is_packed=bool(spec.held_as))
                )
                continue
            if local.numel():
                self.pieces.append(self._piece(spec, start, start + local.numel(), param))

    def _piece(self, spec: ParamSpec, start: int, stop: int, param: DTensor) -> Piece:
        def gradient() -> Tensor:
            return _gradient(param)

        local = param._local_tensor.detach()
        is_lent = spec.is_updated_whole and bool(self.program.owners)  # the owner has the copy on the host
        if is_lent or not self.program.step.layout.offload:
            return Piece(spec.name, start, stop, local, gradient)
        return Piece(spec.name, start, stop, master_on_host(local), gradient, target=local)

    def hook_gradients(self, hooks: GradientHooks) -> None:
        """Let the user's hooks change whole gradients, in front of their reduction."""
        for name, hook in hooks.items():
            for unit in self._units:
                if name in unit.unit.params:
                    unit.hooks[id(self._params[name])] = hook

    # -- a step ------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Discard the gradients of the previous step."""
        for param in self._params.values():
            param.grad = None
        if not self.program.step.trains_apart:
            self._encoded.begin_step(0)
            self._scatters.begin_step()
        for unit in self._units:
            unit.reset()

    def take_back(self) -> None:
        """Do nothing: a DTensor takes no other storage, and what is written into it is written into this rank's rows."""

    @contextmanager
    def running(self, task: Task) -> Iterator[None]:
        """Let the units gather, free and reduce as the program says, while a task runs inside.

        Collective over the axes of the units, as `WeightStore.running` says.

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

    def compare_values(self, compares: bool) -> None:
        """Compare the values of gathered weights too, from the next step on: `.data` lets code change them without a trace."""
        for unit in self._units:
            unit.compares, unit._known = compares, None

    def written(self) -> list[str]:
        """Return the weights that a forward of this step has written while they were gathered, which is lost."""
        return [name for unit in self._units for name in sorted(unit.written)]

    def hook_idle(self, hooks: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Call a function once a weight that took no part in the trace has a gradient."""
        for name, hook in hooks.items():
            for unit in self._units:
                if name in unit.unit.params:
                    unit.idle[id(self.frozen_params[name])] = hook

    def finish_gradients(self) -> None:
        """Wait for FSDP2's reductions; sum gradients over tied stages, and over axes on which they are partial.

        Collective over these stages and `tp`: if a rank does not call it, the others wait until the time limit.

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
            if op.codec is not None:
                self._encoded.send(op)
            elif op.axis in partial_axes:
                self._sum_shards(op, partial_sizes(step, units[op.owner], op.axis))
            elif op.kind is OpKind.ALL_REDUCE and op.owner in self._params:
                self._sum_shards(op, {op.owner: op.size_bytes // BYTES_OF[op.dtype]})
        if not step.trains_apart:
            self._encoded.finish(0)

    def start_exchange(self, part: int, fill: Callable[[int], None]) -> None:
        """Start to sum over all replicas what `fill` writes into the gradients; collective as `WeightStore` says."""
        step = self.program.step
        mine = [piece.gradient() for piece in self.pieces if step.exchange_part(piece.name) == part]
        kept = [gradient.clone() for gradient in mine] if step.exchange_delay else []
        self._encoded.begin_step(part)
        fill(0)
        self._send_moves(part, Phase.START)
        for gradient, before in zip(mine, kept, strict=False):
            gradient.copy_(before)

    def sum_exchange(self, part: int) -> None:
        """Issue the collectives that follow an exchange's first; collective as `WeightStore` says."""
        self._send_moves(part, Phase.SUM)

    def end_exchange(self, part: int) -> None:
        """Wait for an exchange, and set the gradients to its sums."""
        self._encoded.finish(part)

    def _send_moves(self, part: int, phase: Phase) -> None:
        for op in self.program.exchanges[part][phase]:
            if op.axis is not None:
                self._encoded.send(op, part)

    def given_back(self) -> Iterator[GivenBack]:
        """Yield what codes have lost of each weight."""
        yield from self._encoded.given_back()
        yield from self._scatters.given_back()

    def directions(self) -> Iterator[Directions]:
        """Yield the directions along which the next gradients are projected."""
        return self._encoded.directions()

    def scale_given_back(self, factor: float) -> None:
        """Multiply what codes have lost."""
        self._encoded.scale_given_back(factor)
        self._scatters.scale_given_back(factor)

    def _sum_shards(self, op: Op, sizes: Mapping[str, int]) -> None:
        """All_reduce this rank's shards of some gradients, padded as every rank pads them."""
        assert op.axis is not None
        gradients = [_gradient(self._params[name]) for name in sizes]
        whole = torch.zeros(sum(sizes.values()), dtype=gradients[0].dtype, device=gradients[0].device)
        windows = [
            window[: gradient.numel()].view_as(gradient)
            for window, gradient in zip(whole.split([*sizes.values()]), gradients, strict=True)
        ]
        torch._foreach_copy_(windows, gradients)
        with owned(op.owner):
            dist.all_reduce(whole, group=self.mesh.groups[op.axis])
        torch._foreach_copy_(gradients, windows)

    def norm_squared(self) -> Tensor:
        """Return this rank's share of the squared gradient norm: the shares of all ranks add up to the whole."""
        step = self.program.step
        copies = {param.name: step.holding(param).num_copies for param in step.model.params}
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for number in sorted(set(copies.values())):
            alike = [piece.gradient() for piece in self.pieces if copies[piece.name] == number]
            total += squared_norm(alike, self.mesh.device) / number
        return total if step.trains_apart else total / self.mesh.size("dp_replicate")

    def publish(self, *, waits: bool = True, part: int | None = None) -> None:
        """Do nothing: the next forward gathers the rows that the ranks have updated."""

    def settle(self) -> None:
        """Do nothing: no gather goes on between two steps."""

    def end_forward_only(self) -> None:
        """Reshard the units that a forward without a backward left gathered."""
        for unit in self._units:
            unit.fsdp.reshard()
            unit.reset()


class _EncodedReduceScatter(ReduceScatter):
    """What FSDP2 calls to reduce_scatter the gradients of a unit, where they are sent encoded."""

    def __init__(self, scatter: EncodedScatter) -> None:
        self._scatter = scatter

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._scatter.scatter(output_tensor, input_tensor)


_ParamSlots = list[tuple[nn.Module, str]]
"""Modules of a unit that hold a weight, each with the weight's name in it."""


class _RunningUnit:
    """The state of one unit during a step: which calls of it ran, and when its backward ends.

    A call of one of its modules is complete in the backward once the gradients of its inputs are known, which a hook on
    each input reports; where no input takes a gradient it stays open to the end of the task. Calls are counted by
    micro-batch, since a pipeline has several under way.
    """

    def __init__(self, model: nn.Module, unit: Unit, program: Program, slots: dict[str, _ParamSlots]) -> None:
        self.unit = unit
        self.params = {_param_at(slots[name][0]) for name in unit.params}
        """The unit's parameters, still on the meta device, before FSDP2 shards them."""
        self.names: list[str] = []
        """Names of these in FSDP2's order."""
        self._path = unit.modules[0]
        self._zero = program.step.zero
        self.chunk = next((i for i, layers in enumerate(program.chunks) if unit.first_layer in layers), 0)
        self.is_layer = set(unit.modules) <= {path for layer in program.step.model.layers for path in layer.modules}
        """Whether its modules all ran in the trace; a shared weight's unit may include a module that never runs."""
        self.hooks: dict[int, Callable[[Tensor], Tensor]] = {}
        """The user's hooks on gradients, by the id of the sharded weight."""
        self.idle: dict[int, Callable[[Tensor], None]] = {}
        """What is called if a weight has a gradient that had none in the trace, by the id of the sharded weight."""
        self.compares = False
        self.modules = dict.fromkeys(model.get_submodule(path) for path in unit.modules)
        for module in self.modules:
            # Before fully_shard, which puts its hook in front of this one.
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave)  # before fully_shard, whose own frees the weights
        self.reset()

    @property
    def fsdp(self) -> FSDPModule:
        """The unit's FSDP2 handle: its modules share one FSDP2 state."""
        module = next(iter(self.modules))
        assert isinstance(module, FSDPModule)
        return module

    @property
    def group(self) -> FSDPParamGroup:
        """FSDP2's parameter group of the unit: the weights that it gathers and reduces together."""
        group = self.fsdp._get_fsdp_state()._fsdp_param_group
        assert group is not None
        return group

    def reset(self) -> None:
        """Clear the record of calls, before a step."""
        self._open = Counter[int]()
        self._microbatch = 0
        self._in_backward = self._ran = self._left_out = False
        self.written: set[str] = set()
        self._known: list[Any] | None = None
        self._reduces = self._all_reduces = self._frees = False

    # -- forward -----------------------------------------------------------------------------------

    def begin_forward(self, microbatch: int) -> None:
        """Count the calls that follow as those of a micro-batch."""
        self._microbatch, self._ran = microbatch, False

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record a call, whose backward is complete once the gradients of its inputs are known."""
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed inside a backward
        self._ran = True
        self._compare()
        if not has_backward():
            return
        self._watch_idle()
        self._open[self._microbatch] += 1
        inputs = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad}
        waiting = set(inputs)
        for key, leaf in inputs.items():
            handle = leaf.register_hook(functools.partial(self._close_call, self._microbatch, waiting, key))
            # In front of FSDP2's hook, which gathers the module that produced the tensor.
            hooks: OrderedDict[int, Any] = leaf._backward_hooks  # type: ignore[assignment]
            hooks.move_to_end(handle.id, last=False)

    def _versions(self) -> list[Any]:
        """Return the versions of the gathered weights, and their norms where values are compared."""
        gathered = [weight._unsharded_param for weight in self.group.fsdp_params]
        versions: list[Any] = [param._version for param in gathered]
        if self.compares and gathered:
            values = [
                one.detach() if one.is_floating_point() else one.new_zeros(1, dtype=torch.float32) for one in gathered
            ]
            norms = torch.stack(torch._foreach_norm(values, 2.0, torch.float64))
            versions += norms.nan_to_num(math.inf).tolist()  # what is no number equals itself here
        return versions

    def _leave(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._compare()

    def gather_again(self, _: nn.Module, args: Any, outputs: Any) -> Any:
        """Let a gradient of any of the unit's modules gather the weights; FSDP2 waits for one of the last module."""
        return self.fsdp._get_fsdp_state()._register_pre_backward_hook(outputs)

    def _compare(self) -> None:
        """Note the weights that were written since the step gathered them first: to gather them again writes none."""
        now, count = self._versions(), len(self.group.fsdp_params)
        for index, (old, new) in enumerate(zip(self._known or now, now, strict=True)):
            if old != new:
                self.written.add(self.names[index % count])
        self._known = now

    def _watch_idle(self) -> None:
        """Let the gradient of a weight that took no part in the trace be noticed, once it has been gathered."""
        for weight in self.group.fsdp_params if self.idle else ():
            hook, whole = self.idle.get(id(weight.sharded_param)), weight._unsharded_param
            if hook is not None and not whole.requires_grad:
                whole.requires_grad_(True).register_post_accumulate_grad_hook(hook)

    def end_forward(self) -> None:
        """Reshard a unit that stayed gathered over several calls, or for the loss.

        Raises:
            LayoutError: the unit did not run.
        """
        self.check_ran()
        if (self.unit.is_called_again or self.unit.is_read_by_loss) and not self.unit.keep_after_forward:
            self.fsdp.reshard()

    # -- backward ----------------------------------------------------------------------------------

    def begin_backward(self, microbatch: int, *, reduces: bool, all_reduces: bool, frees: bool) -> None:
        """Set what ends the unit's backward: whether it reduces, over all axes or not, and frees the weights."""
        self._microbatch, self._in_backward = microbatch, True
        self._reduces, self._all_reduces, self._frees = reduces, all_reduces, frees

    def _close_call(self, microbatch: int, waiting: set[int], key: int, _: Tensor) -> None:
        if waiting == {key}:  # an input used late has its gradient before the weights have theirs
            self._open[microbatch] -= 1
            if self._open[microbatch] == 0:
                self.complete(microbatch)
        waiting.discard(key)

    def complete(self, microbatch: int) -> None:
        """End the unit's backward, once: set missing gradients of trained weights to zeros, then free and reduce."""
        self._open.pop(microbatch, None)
        if not self._in_backward:
            return
        self._in_backward = False
        weights = [weight for weight in self.group.fsdp_params if weight.sharded_param.requires_grad]
        # The second one is the gradient of a half-precision weight, where FSDP2's own hook has already cast it.
        missing = [w for w in weights if w._unsharded_param.grad is None and w.unsharded_accumulated_grad is None]
        self._left_out |= bool(missing) and len(missing) == len(weights) and self._path != ""
        raised = next(
            (w.unsharded_accumulated_grad.dtype for w in weights if w.unsharded_accumulated_grad is not None), None
        )
        for weight in missing:  # beside gradients that FSDP2 has cast already, in their dtype
            zeros = torch.zeros_like(weight._unsharded_param, dtype=raised)
            if raised is None:
                weight._unsharded_param.grad = zeros
            else:
                weight.unsharded_accumulated_grad = zeros
        if self._reduces:
            self._apply_hooks(weights)
        self._end_backward()

    @torch.no_grad()
    def _apply_hooks(self, weights: Sequence[FSDPParam]) -> None:
        for weight in weights:
            hook = self.hooks.get(id(weight.sharded_param))
            if hook is not None and weight.unsharded_accumulated_grad is not None:
                weight.unsharded_accumulated_grad = hook(weight.unsharded_accumulated_grad)
            elif hook is not None and weight._unsharded_param.grad is not None:
                weight._unsharded_param.grad = hook(weight._unsharded_param.grad)

    def _end_backward(self) -> None:
        """Let FSDP2 free the weights and reduce the gradients, which it does at no other time."""
        self.fsdp.set_requires_gradient_sync(self._reduces, recurse=False)
        self.fsdp.set_requires_all_reduce(self._all_reduces, recurse=False)
        self.fsdp.set_reshard_after_backward(self._frees, recurse=False)
        for weight in self.group.fsdp_params if self._reduces else ():
            _give_row(weight)
        self.group.post_backward()
        _keep_still(self.fsdp)

    # -- units that every rank must run ------------------------------------------------------------

    def check_order(self, before: list[_RunningUnit], *_: Any) -> None:
        """Check, before this unit is gathered, that each unit of the previous layer has run.

        Raises:
            LayoutError: one has not.
        """
        if torch._C._current_graph_task_id() == -1:
            for unit in before:
                unit.check_ran()

    def check_ran(self) -> None:
        """Check that the unit has run in the forward.

        Raises:
            LayoutError: it has not.
        """
        if self.is_layer and not self._ran:
            raise LayoutError(self._refusal(f"{self._path} did not run in the forward"))

    def check_backward(self) -> None:
        """Check that every backward has reached the unit.

        Raises:
            LayoutError: one has not.
        """
        if self._left_out:
            raise LayoutError(self._refusal(f"{self._path} ran, but the loss does not depend on it"))

    def _refusal(self, what: str) -> str:
        return (
            f"{what} of a micro-batch, and zero={self._zero} gathers and reduces its weights on all ranks at once, "
            "so no rank may skip it; zero=1 works"
        )


def _keep_order(units: list[_RunningUnit]) -> None:
    """Make each layer's unit check that the previous layer has run, in front of FSDP2's gather."""
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
    """Give every parameter, still on meta, the shape and dtype that this rank's program has of it; return its slots."""
    dtype = DTYPES[program.step.master_dtype]
    mine = {name: {*unit.modules} for unit in program.units for name in unit.params}
    slots: dict[str, _ParamSlots] = {}
    for spec in program.step.model.params:
        names = [name.rpartition(".") for name in (spec.name, *spec.aliases)]
        if program.step.holding(spec).tied_over and spec.name in mine:  # other names of the weight are on other stages
            names = [name for name in names if any(is_below(name[0], module) for module in mine[spec.name])]
        slots[spec.name] = [(model.get_submodule(path), leaf) for path, _, leaf in names]
        shape = (spec.rows, packed_bytes(spec.row_numel)) if spec.held_as else _shape(spec)
        empty = torch.empty(shape, dtype=torch.uint8 if spec.held_as else dtype, device="meta")
        _put(slots[spec.name], nn.Parameter(empty, requires_grad=spec.trainable))
    return slots


def _param_at(slot: tuple[nn.Module, str]) -> Tensor:
    owner, leaf = slot
    value: Tensor = getattr(owner, leaf)
    return value


def _put(slots: _ParamSlots, param: nn.Parameter) -> None:
    for owner, leaf in slots:
        setattr(owner, leaf, param)


def _wrap(
    model: nn.Module, units: list[_RunningUnit], slots: dict[str, _ParamSlots], program: Program, mesh: Mesh
) -> None:
    """Make an FSDP2 group of each unit, inner modules first and the root last."""
    # FSDP2 warns of units that return a view; those whose weights are gathered again return a copy (_whole_outputs).
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    axes = {"dp_shard", *(running.unit.shard_axis for running in units)}
    # Shards that are encoded between replicas are summed by us.
    sums_over = () if program.step.contributions else ("dp_replicate",)
    meshes = {axis: mesh.for_shards(axis, sums_over) for axis in sorted(axes)}
    everything = set(model.parameters())
    single = {param.name for param in program.step.model.params if not param.shape}
    for running in sorted(units, key=lambda u: -max(path.count(".") + bool(path) for path in u.unit.modules)):
        unit, modules = running.unit, list(running.modules)
        if not unit.keep_after_forward:
            for module in modules:
                module.register_forward_hook(_whole_outputs)
                if len(modules) > 1:
                    module.register_forward_hook(running.gather_again)
        master, dtype = DTYPES[program.step.master_dtype], DTYPES[unit.dtype]
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == master else dtype,
            reduce_dtype=None if dtype == master else master,
            cast_forward_inputs=False,  # precision.py casts, by one rule for every layout
        )
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=meshes[unit.shard_axis],
            reshard_after_forward=not (unit.keep_after_forward or unit.is_called_again or unit.is_read_by_loss),
            mp_policy=policy,
            ignored_params=everything - running.params,
        )
        named = {id(_param_at(slots[name][0])): name for name in unit.params}
        running.names = [named[id(weight.sharded_param)] for weight in running.group.fsdp_params]
        for name, weight in zip(running.names, running.group.fsdp_params, strict=True):
            if name in single:  # gathered in its own shape, so that the forward sees what the model has
                weight._orig_size, weight._contiguous_orig_stride = torch.Size(), ()
        running.fsdp.set_gradient_divide_factor(1.0)
        running.fsdp.set_force_sum_reduction_for_comms(True)
        running.fsdp.set_unshard_in_backward(unit.gather_in_backward or unit.keep_after_forward)
        _keep_still(running.fsdp)
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=meshes["dp_shard"], ignored_params=everything)  # FSDP2 needs a root; it has no weight
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _keep_name(type(module))
    handles = {running.unit.name: running.fsdp for running in units}
    for running in units:
        # Without another unit, the unit itself, which is gathered already: else FSDP2 would gather the last that ran.
        running.fsdp.set_modules_to_backward_prefetch([handles[running.unit.prefetch or running.unit.name]])


def _keep_name(made: type[nn.Module]) -> None:
    """Give a class that FSDP2 derives from a module's class the names of that one.

    Libraries look classes up by them: transformers records no outputs of a model whose class has another name.
    """
    original = made.__bases__[1]
    made.__name__, made.__qualname__, made.__module__ = original.__name__, original.__qualname__, original.__module__


def _give_row(weight: FSDPParam) -> None:
    """Give the gradient of a single number the dimension along which FSDP2 divides gradients."""
    whole = weight._unsharded_param
    if whole.dim():
        return
    if weight.unsharded_accumulated_grad is None:
        weight.unsharded_accumulated_grad, whole.grad = whole.grad, None
    if weight.unsharded_accumulated_grad is not None:
        weight.unsharded_accumulated_grad = weight.unsharded_accumulated_grad.view(1)


def _keep_still(module: FSDPModule) -> None:
    """Keep FSDP2 from reducing or freeing by itself after a backward."""
    module.set_requires_gradient_sync(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)


def _whole_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.clone() if t._is_view() and t.requires_grad else t, outputs)


def _rows(spec: ParamSpec, num_shards: int, index: int) -> slice:
    """Return the rows of a parameter that FSDP2 gives to a rank: equal runs, the last ones shorter."""
    each = -(-spec.rows // num_shards)
    return slice(min(index * each, spec.rows), min((index + 1) * each, spec.rows))


def _shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of a parameter as FSDP2 is given it, which has a first dimension."""
    return spec.shape or (1,)


def _gradient(param: DTensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    assert isinstance(param.grad, DTensor)
    return param.grad._local_tensor
