"""FSDP2 groups of the units of a program, inner modules first and the root last.

An in-place op on a view that a unit returned would drop the hook that gathers its weights in backward, so a unit whose
weights are gathered again returns a copy. A unit may write into its inputs, as a block that begins with `nn.ReLU(inplace=True)`
does.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.torch_version import TorchVersion

from samestep.building.torch_seams import Replaced
from samestep.errors import LayoutError
from samestep.program.program import Program
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.fsdp_units import ParamSlots, RunningUnit, keep_still, param_at
from samestep.runtime.weights.unit_order import UnitOrder
from samestep.trees import tree_leaves, tree_map_only

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
    # Shards that are encoded, or moves that are summed after some steps, are summed by us.
    sums_over = () if program.step.contributions else ("dp_replicate",)
    meshes = {axis: _mesh_of_shards(mesh, axis, sums_over) for axis in sorted(axes)}
    everything = set(model.parameters())
    away = {host_module.unit for host_module in program.host_modules}
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
            f"FSDP2 of torch {torch.__version__} gathers no weights of 4 bits. Use torch 2.13, or zero=1 under this one",
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
        f"a copy of run.model ({type(self).__name__}) was requested, and under zero=2 and 3 a rank has rows of its weights. "
        "Copy it within `with run.gathered() as model:`, or use train.ema = 0.999 with run.averaged() instead of "
        "AveragedModel",
    )


def _return_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def _view_inputs(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
    """Return a view of each output that is an input, so that its gradient is not taken for that of the unit's input."""
    ids = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad}
    if not any(id(leaf) in ids for leaf in tree_leaves(outputs)):
        return outputs
    return tree_map_only(Tensor, lambda t: t.view_as(t) if id(t) in ids else t, outputs)


def _whole_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.clone() if t._is_view() and t.requires_grad else t, outputs)


def _mesh_of_shards(mesh: Mesh, axis: str, sums_over: Collection[str]) -> DeviceMesh:
    """Return the mesh that FSDP2 shards over: `dp_shard` or `dp_expert`, after a `dp_replicate` that it sums over."""
    members = mesh.members("dp_replicate") if "dp_replicate" in sums_over else (mesh.rank,)
    rows = [mesh.ranks.group(rank, axis) for rank in members]
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
