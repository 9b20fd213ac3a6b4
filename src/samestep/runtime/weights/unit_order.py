"""The order of a task's gathers and reductions: the program's, whichever parts of the model a rank's samples use.

FSDP2 gathers a unit where its module is called, and reduces its gradients where its backward ends. A rank whose samples
do not use a part of the model would do neither, while others wait for it. So before a unit's collective a rank issues those
that the program lists before it:

```
program    gather a, gather b, gather c              reduce c, reduce b, reduce a
rank 0     a            b           c                c          b          a
rank 1     a            (b), c                       c          (b), a          (b): taken part in, for the others
```
The weights of a unit that was skipped are freed as the program frees them, and its gradient is zeros. Nothing is issued that
the program does not list. A rank whose samples use every unit issues nothing here.
A unit whose modules are called several times in a forward stays gathered until its end (`program/units.py`), so that a further
call needs no gather. Outside of steps a forward may have more samples than a micro-batch.

Autograd runs the nodes of a graph in the reverse of the order in which the forward created them. So once the backward of a
unit is over, or another one starts, units that were called after it get no more gradients: what is left of them is issued. A
unit that was called before it, though the program lists it later, delays the reduction of the other one.

A rank may find in the middle of a forward that its samples call a unit whose weights are freed: once more, or behind units that
the program lists later. Nobody gathers it now. So the rank gives the step up: it takes part in what is left of the program's
collectives, all ranks learn of it with the step's scalars, and take the step again. From then on the rank keeps this unit from each
forward to the end of its backward, and takes part in the gather for the backward, of which it has no need.

FSDP2 groups of units are made here, inner modules first and the root last. An in-place op on a view that a unit returned would drop the hook that
gathers its weights in backward, so a unit whose weights are gathered again returns a copy. A unit may write into its inputs, as a block that
begins with `nn.ReLU(inplace=True)` does.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.torch_version import TorchVersion

from samestep.building.torch_seams import Replaced, current_backward_id
from samestep.errors import LayoutError
from samestep.program.ops import BodyKey, OpKind, Ops, is_forward, starts_step
from samestep.program.program import Program
from samestep.runtime.axes.forward_only import has_backward, is_forward_only
from samestep.runtime.axes.loop_calls import Asker, asker
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.fsdp_units import ParamSlots, RunningUnit, keep_still, param_at
from samestep.runtime.weights.gradient_codes import may_give_up
from samestep.trees import tree_leaves, tree_map_only

_REDUCING = (OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL)


class CalledAgainError(LayoutError):
    """This rank's samples call a unit whose weights were gathered and freed before in the same forward."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__("zero-call-order", text)
        self.path = path


class _OrderEntry(NamedTuple):
    unit: RunningUnit
    gathers: bool
    """Whether the unit's weights are gathered; else its gradients are reduced."""


class UnitOrder:
    """The gathers and reductions of one task at a time, of which this rank issues each in its place."""

    def __init__(self, program: Program, units: Sequence[RunningUnit]) -> None:
        self._zero = program.step.zero
        self._may_give_up = may_give_up(program)
        """Whether this rank can give a step up and still take part in all that others wait for."""
        named = {running.unit.name: running for running in units}
        self._bodies: Mapping[BodyKey, list[_OrderEntry]] = {
            key: [
                _OrderEntry(named[op.owner], op.kind is OpKind.ALL_GATHER)
                for op in ops
                if op.implied and op.owner in named and op.kind in (OpKind.ALL_GATHER, *_REDUCING)
            ]
            for key, ops in program.bodies.items()
        }
        self._module_exchanges: Mapping[BodyKey, Mapping[str, int]] = {
            key: _places_of_module_exchanges(ops, named) for key, ops in program.bodies.items() if not is_forward(key)
        }
        """The number of entries before the first exchange of each module in a backward, by the module's path."""
        self._alone = [
            next(key for key in self._bodies if is_forward(key) and starts_step(key) and (key.chunk or 0) == chunk)
            for chunk in range(max(1, len(program.chunks)))
        ]
        """The bodies of forwards outside of steps, by chunk."""
        self._units = units
        self._several = [running for running in units if len(running.modules) > 1]
        again = {path for group in program.step.model.called_again for path in group}
        self._called_again = [one for one in units if not again.isdisjoint(one.unit.modules)]
        """The units that several samples call several times, which in steps a micro-batch of one sample calls once."""
        self._body = self._alone[0]
        self._entries: list[_OrderEntry] = []
        self._places: dict[_OrderEntry, int] = {}
        self._next = 0
        self._calls = 0
        self._in_task = self._in_backward = False
        self._chunk = 0

    def begin(self, body: BodyKey) -> None:
        """Start the order of a task."""
        self._in_task, self._in_backward, self._chunk = True, not is_forward(body), 0
        for running in self._called_again:
            running.stay_gathered(False)
        self._start(body)

    def _start(self, body: BodyKey) -> None:
        self._body, self._entries = body, self._bodies[body]
        self._places = {entry: index for index, entry in enumerate(self._entries)}
        self._next = self._calls = 0

    def end(self) -> None:
        """End the order of a task: issue what is left of it.

        Collective over the axes of the units, see [Note: collective calls].
        """
        self._pass_over(len(self._entries))
        self._in_task = self._in_backward = False

    # -- forward -----------------------------------------------------------------------------------

    def begin_forward(self, *_: object) -> None:
        """Start the order of a forward outside of a step."""
        if not self._in_task:
            for running in self._called_again:
                running.stay_gathered(True)
            self._start(self._alone[self._chunk])
            self._chunk = (self._chunk + 1) % len(self._alone)

    def end_forward(self, *_: object) -> None:
        """Gather and free what this rank's samples have not used, once the forward of a chunk has ended."""
        self._pass_over(len(self._entries))
        for running in self._several:
            running.end_calls()
        for running in self._units if not self._in_task else ():
            if running.is_kept:
                running.fsdp.reshard()  # the next forward gathers it again, as on the other ranks

    def end_loop_forward(self, *_: object) -> None:
        """Free the weights that a forward called by the loop has left gathered: the loop would write into them in vain."""
        if not self._in_task and not is_forward_only() and asker({})[0] is Asker.LOOP:
            for running in self._units:
                running.fsdp.reshard()

    def before_forward(self, running: RunningUnit, *_: object) -> None:
        """Issue what the program lists before the gather of a unit that is called.

        Raises:
            CalledAgainError: the unit was gathered and freed before in this forward; the next one will keep it.
            LayoutError: it was, and this rank cannot give the forward up.
        """
        if current_backward_id() != -1:  # repeated inside a backward
            self.before_backward(running, None)
            return
        place = self._places.get(_OrderEntry(running, True))
        if place is not None and place >= self._next:
            self._pass_over(place)
            self._next = place + 1
        elif place is not None and not running.is_gathered:
            running.keep_for_backward()
            text = (
                f"{running.path} runs behind modules that it ran before when the model was traced, or once more, and "
                f"zero={self._zero} gathers weights in that order on all ranks at once: zero=2 works, or zero=1"
            )
            if self._may_give_up:
                raise CalledAgainError(text, running.path)
            raise LayoutError("zero-call-order", text)
        self._calls += 1
        running.note_call(self._calls)

    def follow_outputs(
        self, running: RunningUnit, ahead: RunningUnit | None, _: nn.Module, args: Any, outputs: Any
    ) -> None:
        """Let the first gradient of a unit's outputs call `before_backward`, before FSDP2's hook, which gathers."""
        if not has_backward() or current_backward_id() != -1:
            return
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self.before_backward, running, ahead))

    # -- backward ----------------------------------------------------------------------------------

    def before_backward(self, running: RunningUnit, ahead: RunningUnit | None, *_: object) -> None:
        """Issue what the program lists before the gathers of a unit whose backward starts, and of the unit `ahead`.

        Raises:
            LayoutError: the unit's gradients have been reduced before.
        """
        if not self._in_backward:
            return  # a gradient that the model's forward takes
        done = self._places.get(_OrderEntry(running, False))
        if done is not None and done < self._next and not running.is_waiting:
            raise LayoutError(
                "zero-call-order",
                f"the backward of {running.path} starts after the backward of modules that ran after it when the model was traced, "
                f"and zero={self._zero} reduces gradients in that order on all ranks at once: zero=1 works",
            )
        used = (None, None) if running.is_kept else (running, ahead)
        this_one, next_one = (self._places.get(_OrderEntry(one, True), -1) if one is not None else -1 for one in used)
        if this_one >= self._next:
            self._pass_over(this_one)
            if next_one > this_one + 1:
                self._issue()  # before those in between, after which FSDP2 would issue it
            self._next = this_one + 1
        if next_one >= self._next:
            is_issued = running.prefetches and not (ahead is not None and ahead.is_kept)
            self._pass_over(next_one if is_issued else next_one + 1)
            self._next = next_one + 1

    def before_exchange(self, path: str) -> None:
        """Issue what the program lists before the exchange of a module whose backward starts."""
        if self._in_backward:
            self._pass_over(self._module_exchanges[self._body].get(path, 0))

    def after_backward(self, running: RunningUnit) -> None:
        """Reduce the gradients of a unit whose backward is over, after what the program lists before it."""
        place = self._places.get(_OrderEntry(running, False))
        if place is None:
            running.complete()
            return
        running.is_waiting = True
        while self._next <= place and not self._waits_for(self._entries[self._next], running):
            self._issue()
        while self._next < len(self._entries) and self._is_over(self._entries[self._next]):
            self._issue()

    def _waits_for(self, entry: _OrderEntry, running: RunningUnit) -> bool:
        """Return whether the backward of an entry's unit has yet to run, though that of `running` is over."""
        unit = entry.unit
        return not (entry.gathers or unit.is_waiting or unit.is_passed_over or unit.call > running.call)

    def _is_over(self, entry: _OrderEntry) -> bool:
        return not entry.gathers and entry.unit.is_waiting

    def _pass_over(self, stop: int) -> None:
        while self._next < stop:
            self._issue()

    def _issue(self) -> None:
        entry = self._entries[self._next]
        self._next += 1
        if entry.gathers:
            entry.unit.gather_for_others()
        else:
            entry.unit.complete()


def _places_of_module_exchanges(ops: Ops, named: Mapping[str, RunningUnit]) -> dict[str, int]:
    """Return the number of gathers and reductions of units before the first exchange of each module, by its path."""
    count, found = 0, dict[str, int]()
    for op in ops:
        if op.implied and op.owner in named and op.kind in (OpKind.ALL_GATHER, *_REDUCING):
            count += 1
        elif op.axis is not None and not op.implied:
            found.setdefault(op.owner, count)
    return found


_ANY_CONTAINER = Replaced((_fully_shard, "_validate_module", lambda _: lambda *_: None))
"""A context in which FSDP2 takes a container that has a forward, as newer ones than that of torch 2.11 do."""


def make_groups(
    model: nn.Module,
    units: list[RunningUnit],
    order: UnitOrder,
    slots: dict[str, ParamSlots],
    program: Program,
    mesh: Mesh,
) -> None:
    """Make an FSDP2 group of each unit, inner modules first and the root last; the hooks of `order` run before FSDP2's."""
    # FSDP2 warns of units that return a view; those whose weights are gathered again return a copy (_whole_outputs).
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    axes = {"dp_shard", *(running.unit.shard_axis for running in units)}
    # Shards that are encoded between replicas are summed by us.
    sums_over = () if program.step.contributions else ("dp_replicate",)
    meshes = {axis: _mesh_of_shards(mesh, axis, sums_over) for axis in sorted(axes)}
    everything = set(model.parameters())
    away = {one.unit for one in program.host_modules}
    by_name = {running.unit.name: running for running in units}
    single = {param.name for param in program.step.model.params if not param.shape}
    _refuse_integers(everything)
    model.register_forward_hook(order.end_forward)
    for running in sorted(units, key=lambda u: -max(path.count(".") + bool(path) for path in u.unit.modules)):
        unit, modules = running.unit, list(running.modules)
        ahead = by_name.get(unit.prefetch or "")
        _hook_outputs(running, ahead if ahead is not None and ahead.unit.is_gathered_again else None, order)
        master, dtype = DTYPES[program.step.master_dtype], DTYPES[unit.dtype]
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == master else dtype,
            reduce_dtype=None if dtype == master else master,
            cast_forward_inputs=False,  # precision.py casts, by one rule for every layout
        )
        on_host = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if unit.name in away else OffloadPolicy()
        with _ANY_CONTAINER:
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=meshes[unit.shard_axis],
                reshard_after_forward=not (unit.keep_after_forward or unit.is_called_again or unit.is_read_by_loss),
                mp_policy=policy,
                offload_policy=on_host,
                ignored_params=everything - running.params,
            )
        named = {id(param_at(slots[name][0])): name for name in unit.params}
        running.names = [named[id(weight.sharded_param)] for weight in running.group.fsdp_params]
        for name, weight in zip(running.names, running.group.fsdp_params, strict=True):
            if name in single:  # gathered as a scalar, which the model's forward expects
                weight._orig_size, weight._contiguous_orig_stride = torch.Size(), ()
        running.fsdp.set_gradient_divide_factor(1.0)
        running.fsdp.set_force_sum_reduction_for_comms(True)
        running.fsdp.set_unshard_in_backward(unit.gather_in_backward or unit.keep_after_forward)
        keep_still(running.fsdp)
        # FSDP2 would add a node after every input to end a backward, which we end: it would forbid writes into an input.
        running.group._register_post_backward_hook = _return_arguments  # type: ignore[method-assign]
    if not isinstance(model, FSDPModule):
        with _ANY_CONTAINER:  # FSDP2 needs a root; it has no weight
            fully_shard(model, mesh=meshes["dp_shard"], ignored_params=everything)
    _keep_classes(model)
    handles = {running.unit.name: running.fsdp for running in units}
    for running in units:
        # Without another unit, the unit itself, which is gathered already: else FSDP2 would gather the last that ran.
        running.fsdp.set_modules_to_backward_prefetch([handles[running.unit.prefetch or running.unit.name]])


def _refuse_integers(params: Collection[Tensor]) -> None:
    """Refuse weights in 4 bits where FSDP2 takes every weight to be one that can take a gradient.

    Raises:
        LayoutError: it does, and some are integers.
    """
    if any(not param.is_floating_point() for param in params) and TorchVersion(torch.__version__) < "2.13":
        raise LayoutError(
            "nf4-unsupported",
            f"FSDP2 of torch {torch.__version__} gathers no weights of 4 bits: torch 2.13 works, or zero=1 under this one",
        )


def _hook_outputs(running: RunningUnit, ahead: RunningUnit | None, order: UnitOrder) -> None:
    """Add forward hooks to the modules of a unit, before FSDP2 has any; `ahead` is the unit whose weights are gathered again meanwhile."""
    unit, modules = running.unit, list(running.modules)
    for module in modules:
        module.register_forward_hook(_view_inputs, with_kwargs=True)
        if not unit.keep_after_forward:
            module.register_forward_hook(_whole_outputs)
    for module in modules if unit.is_gathered_again or ahead else ():
        module.register_forward_hook(functools.partial(order.follow_outputs, running, ahead))
    for module in modules if len(modules) > 1 and not unit.keep_after_forward else ():
        module.register_forward_hook(running.gather_again)


def _keep_classes(model: nn.Module) -> None:
    """Let the classes that FSDP2 derives from those of modules have their names, and refuse copies of their instances."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _keep_name(type(module))
            type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]


def keep_order(model: nn.Module, units: list[RunningUnit], order: UnitOrder) -> None:
    """Let every forward and backward issue what the program lists before a unit's gather, before FSDP2 issues that gather."""
    for running in units:
        running.after_backward = order.after_backward
        for module in running.modules:
            module.register_forward_pre_hook(functools.partial(order.before_forward, running), prepend=True)
            module.register_forward_pre_hook(running.check_places, prepend=True)  # in front of it, which may gather
    model.register_forward_pre_hook(order.begin_forward, prepend=True)


def _keep_name(derived: type[nn.Module]) -> None:
    """Restore the original name, qualified name and module on the subclass that FSDP2 makes of a module's class.

    Libraries look classes up by them: transformers records no outputs of a model whose class has another name.
    """
    original = derived.__bases__[1]
    derived.__name__, derived.__qualname__, derived.__module__ = (
        original.__name__,
        original.__qualname__,
        original.__module__,
    )


def _refuse_copy(self: nn.Module, _: dict[int, Any]) -> nn.Module:
    raise LayoutError(
        "copy-of-model",
        f"a copy of run.model ({type(self).__name__}) was asked for, and under zero=2 and 3 a rank has rows of its weights: "
        "within `with run.gathered() as model:` a copy of it works, or train.ema = 0.999 with run.averaged() in the place of "
        "AveragedModel",
    )


def _return_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def _view_inputs(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
    """Return a view of each output that is an input, so that its gradient is not taken for that of the unit's input."""
    given = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad}
    if not any(id(leaf) in given for leaf in tree_leaves(outputs)):
        return outputs
    return tree_map_only(Tensor, lambda t: t.view_as(t) if id(t) in given else t, outputs)


def _whole_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.clone() if t._is_view() and t.requires_grad else t, outputs)


def _mesh_of_shards(mesh: Mesh, axis: str, sums_over: Collection[str]) -> DeviceMesh:
    """Return the mesh that FSDP2 shards over: `dp_shard` or `dp_expert`, after a `dp_replicate` that it sums over."""
    replicas = mesh.members("dp_replicate") if "dp_replicate" in sums_over else (mesh.rank,)
    rows = [mesh.ranks.group(rank, axis) for rank in replicas]
    axes, positions = (["dp_replicate", axis], rows) if len(rows) > 1 else ([axis], rows[0])
    groups = [mesh.groups[axis] for axis in axes]
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        mesh.device.type,
        mesh=torch.tensor(positions),
        mesh_dim_names=tuple(axes),
    )


class NamedAllGather(DefaultAllGather):
    """The all_gather of FSDP2, under a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Issue it as FSDP2 does; collective over the unit's axis."""
        with owned(self._name, "all_gather") as issue:
            work: dist.Work | None = issue.sent(super().__call__(output_tensor, input_tensor, group, async_op))
        return work


class NamedReduceScatter(DefaultReduceScatter):
    """The reduce_scatter of FSDP2, under a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Issue it as FSDP2 does; collective over the unit's axis."""
        with owned(self._name, "reduce_scatter") as issue:
            return issue.sent(super().__call__(output_tensor, input_tensor, group, op, async_op))
