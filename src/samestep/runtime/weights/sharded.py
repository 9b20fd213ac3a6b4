"""Sharded weights: ZeRO-2 and ZeRO-3 by FSDP2 (twin of `strategies/shard.py`; no other package of a run touches FSDP2).

The program's units become FSDP2 groups (`fsdp_groups.py`). FSDP2's hooks gather a unit before its forward and before its
backward, and reshard it after its forward; the program says which unit is gathered ahead of need. We end a unit's
backward (`fsdp_units.py`): once the gradients of all its inputs are known, or else at the end of the task, FSDP2 frees
the weights and, where the program lists a reduce_scatter, reduces the gradients. So nothing depends on which forward
preceded a backward: in a pipeline those of other micro-batches and of other chunks run between the two. A rank whose
samples use fewer units takes part in the others' gathers and reductions all the same (`unit_order.py`).

```
task      F of chunk 0           B of chunk 1                                    end of the step
FSDP2     gather, run, free      gather, gather ahead, run
ours                             complete each unit: free, reduce_scatter        sums over tied stages, tp
```
Where ranks scatter codes, FSDP2 calls `gradient_codes.py` in place of its reduce_scatter.
Gradients are summed, never averaged. Each rank updates the rows of every weight that FSDP2 gave it, as plain tensors.

A forward without a backward (validation loss) leaves the last unit gathered, so it is resharded here.

A user's loop may mix whole tensors with sharded weights, which DTensor refuses. Here they are what a loop on one device has: every rank writes
the rows that it has, and a weight that is written into a whole tensor is gathered.

    with torch.no_grad():
        for mine, other in zip(run.model.parameters(), weights): mine.copy_(other)          # whole tensors, alike on all ranks
    run.model.load_state_dict(torch.load("weights.pt"))

    nn.init.normal_(run.model.head.weight); p.add_(torch.randn_like(p))        # the numbers that one device draws
    float(run.model.head.weight.norm())                                         # the number of the whole weight
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Shard

from samestep.building.model_changes import format_of
from samestep.errors import LayoutError
from samestep.models.param_spec import ParamSpec
from samestep.program.holding import REPLICATE
from samestep.program.ops import BYTES_OF, UPDATE_BODY, Op, OpKind, Task, ends_step, is_forward
from samestep.program.program import Program
from samestep.program.units import partial_sizes
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.host_copies import master_on_host
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.flat_buffers import norm_of_pieces
from samestep.runtime.weights.fsdp_groups import NamedAllGather, NamedReduceScatter, keep_order, make_groups
from samestep.runtime.weights.fsdp_units import (
    ParamSlots,
    RunningUnit,
    param_at,
    put_param,
    reshape_params,
    sharded_shape,
)
from samestep.runtime.weights.gradient_codes import EncodedScatter, UnitCodes
from samestep.runtime.weights.parameter_hooks import GradientHooks
from samestep.runtime.weights.pieces import Piece
from samestep.runtime.weights.placement import rows_of_shard
from samestep.runtime.weights.unit_order import CalledAgainError, UnitOrder
from samestep.runtime.weights.weight_store import Materialize, WeightStore
from samestep.schedules import TaskKind


class Sharded(WeightStore):
    """A `WeightStore` of weights, gradients and optimizer sharded over `dp_shard` along their first dimension."""

    codes: UnitCodes

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh, materialize: Materialize) -> None:
        self.program, self.mesh = program, mesh
        self.model = model
        slots = reshape_params(model, program)
        self._units = [RunningUnit(model, unit, program, slots) for unit in program.units]
        self._order = UnitOrder(program, self._units)
        make_groups(model, self._units, self._order, slots, program, mesh)
        keep_order(model, self._units, self._order)
        self.pieces: list[Piece] = []
        self.frozen: list[Piece] = []
        self._params: dict[str, DTensor] = {}
        self._trained: dict[str, DTensor] = {}
        self._fill(slots, materialize)
        # Explicitly: in a stage's first forward stand-ins replace the modules of its other chunks.
        self._root._get_fsdp_state()._lazy_init()
        self._root.set_is_last_backward(False)
        model.register_forward_hook(self._order.end_loop_forward, always_call=True)  # behind FSDP2's
        self._storages = {name: param.untyped_storage()._cdata for name, param in self._params.items()}
        """The storage in which torch holds each weight: another one once `param.data = ...` was assigned."""
        self.codes = UnitCodes(program, mesh, self.pieces, [(running.unit, running.names) for running in self._units])
        allow_whole_writes()
        _take_single_numbers(slots, {param.name for param in program.step.model.params if not param.shape})
        for running in self._units:
            running.fsdp.set_custom_all_gather(NamedAllGather(running.unit.name))
            running.fsdp.set_custom_reduce_scatter(NamedReduceScatter(running.unit.name))
            if (scatter := self.codes.scatters.get(running.unit.name)) is not None:
                running.fsdp.set_custom_reduce_scatter(_EncodedReduceScatter(scatter))

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    @torch.no_grad()
    def _fill(self, slots: dict[str, ParamSlots], materialize: Materialize) -> None:
        """Allocate this rank's rows, and fill them from each whole parameter in turn, which is freed at once."""
        device = self.mesh.device
        away = {id(param_at(slots[name][0])) for module in self.program.host_modules for name in module.params}
        self.model._apply(
            lambda t: torch.empty_like(t, device="cpu" if id(t) in away else device) if isinstance(t, DTensor) else t
        )
        step = self.program.step
        for spec in step.model.params:
            value = materialize(spec.name, DTYPES[step.master_dtype])
            if spec.held_as:
                value = format_of(spec.held_as).pack_values(value)
            if not spec.numel:
                put_param(slots[spec.name], nn.Parameter(value, requires_grad=spec.trainable))
                continue
            param = param_at(slots[spec.name][0])
            assert isinstance(param, DTensor), f"{spec.name} is in no unit of the program"
            self._params[spec.name] = param
            holding = step.holding(spec)
            rows = rows_of_shard(spec, holding.num_shards, self.mesh.index(holding.data_axis))
            local = param._local_tensor
            local.copy_((value if spec.held_as else value.view(sharded_shape(spec)))[rows])
            start = rows.start * spec.row_numel
            if not spec.trainable:
                stop = start + len(local) * spec.row_numel
                self.frozen.append(Piece(spec.name, start, stop, local, lambda: torch.zeros(0), held_as=spec.held_as))
                continue
            self._trained[spec.name] = param
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
        """Let the user's hooks change whole gradients before their reduction."""
        for name, hook in hooks.items():
            for unit in self._units:
                if name in unit.unit.params:
                    unit.hooks[id(self._params[name])] = hook

    # -- a step ------------------------------------------------------------------------------------

    def begin_step(self, *, waits: bool = False) -> None:
        """Discard the gradients of the previous step."""
        assert not waits, "a rank has no room for whole gradients: each backward is reduced by itself"
        self.take_back()
        self.gave_up = ""
        for param in self._params.values():
            param.grad = None
        self.codes.begin_step()
        for unit in self._units:
            unit.reset()

    @contextmanager
    def running(self, task: Task, *, counts: bool = True, left_out: Set[int] = frozenset()) -> Iterator[None]:
        """Let the units gather, free and reduce as the program says, while a task runs inside.

        Collective over the axes of the units, see [Note: collective calls].

        Raises:
            LayoutError: this rank's samples call units in another order than the program gathers them, or a gradient came late.
        """
        step = self.program.step
        units = [unit for unit in self._units if unit.chunk == task.chunk]
        last = ends_step(task.body)
        for unit in units:
            if is_forward(task.body):
                unit.begin_forward(task.microbatch)
            else:
                unit.begin_backward(
                    task.microbatch,
                    reduces=last or step.layout.accumulate == "sharded",
                    all_reduces=last,
                    frees=last or step.zero == 3,
                    counts=counts,
                    left_out=left_out,
                )
        self._order.begin(task.body)
        try:
            yield
        except CalledAgainError as error:
            self.gave_up = error.path
            self.give_up_forward()
        except Exception:  # after which the loop may go on, as with an evaluation
            self._order.leave()
            for unit in self._units:
                unit.give_up_forward()
            raise
        self._order.end()
        for unit in units:
            if is_forward(task.body):
                unit.end_forward()
                if task.kind is TaskKind.OUTPUTS and step.zero == 3:  # no backward would free what is kept for it
                    unit.fsdp.reshard()
            else:
                unit.complete()
                unit.check_late()

    def without_gradient(self) -> Mapping[str, bool]:
        """Return the trained weights to which this rank gave no gradient in the step, and whether the loop has frozen them."""
        names = set[str]().union(*(unit.made for unit in self._units))
        return {name: not param.requires_grad for name, param in self._trained.items() if name not in names}

    def finish_gradients(self, *, delivers: bool = True, names: Set[str] | None = None) -> None:
        """Wait for FSDP2's reductions; sum gradients over tied stages, and over axes on which they are partial.

        Collective over these stages and `tp`, see [Note: collective calls].
        """
        self._root.set_is_last_backward(True)
        self._root._get_fsdp_state()._root_post_backward_final_callback()
        self._root.set_is_last_backward(False)
        step = self.program.step
        units = {unit.name: unit for unit in self.program.units}
        partial_axes = {axis for param in step.model.params for axis in step.holding(param).partial_over}
        for op in self.program.bodies[UPDATE_BODY]:
            if self.codes.sends(op):
                self.codes.send(op)
            elif op.kind is OpKind.ALL_REDUCE and op.axis in partial_axes and op.owner in units:
                self._sum_shards(op, partial_sizes(step, units[op.owner], op.axis))
            elif op.kind is OpKind.ALL_REDUCE and op.owner in self._params:
                self._sum_shards(op, {op.owner: op.size_bytes // BYTES_OF[op.dtype]})
        self.codes.finish()

    def _sum_shards(self, op: Op, sizes: Mapping[str, int]) -> None:
        """All_reduce this rank's shards of some gradients, padded as every rank pads them."""
        assert op.axis is not None
        gradients = [_gradient(self._params[name]) for name in sizes]
        buffer = torch.zeros(sum(sizes.values()), dtype=gradients[0].dtype, device=gradients[0].device)
        windows = [
            window[: gradient.numel()].view_as(gradient)
            for window, gradient in zip(buffer.split([*sizes.values()]), gradients, strict=True)
        ]
        torch._foreach_copy_(windows, gradients)
        with owned(op.owner):
            dist.all_reduce(buffer, group=self.mesh.groups[op.axis])
        torch._foreach_copy_(gradients, windows)

    def norm_squared(self, names: Set[str] | None = None) -> Tensor:
        """Return this rank's share of the squared norm of all gradients, or of some: the shares of all ranks add up to the whole."""
        step = self.program.step
        total = norm_of_pieces(self.pieces, step, self.mesh.device, names)
        return total / math.prod(map(self.mesh.size, step.summed_over((REPLICATE,))))

    def finished(self) -> dict[str, Tensor]:
        """Return the gradient of each weight, a DTensor of which this rank has its rows."""
        return {
            name: param.grad
            for name, param in self._trained.items()
            if _gradient(param) is not None and param.grad is not None
        }

    # -- gathered weights --------------------------------------------------------------------------

    def before_exchange(self, path: str) -> None:
        """Reduce what the program lists before the exchange of a module whose backward starts; collective over the units' axes."""
        self._order.before_exchange(path)

    def give_up_forward(self) -> None:
        """Take part in what others wait for in a forward that a `CalledAgainError` has ended on this rank alone.

        Collective over the axes of the units, see [Note: collective calls].
        """
        for unit in self._units:
            unit.give_up_forward()
        self._order.end_forward()

    def end_forward_only(self) -> None:
        """Reshard the units that a forward without a backward left gathered."""
        for unit in self._units:
            unit.fsdp.reshard()
            unit.reset()

    def compare_values(self, compares: bool) -> None:
        """Compare the values of gathered weights too, from the next step on."""
        for unit in self._units:
            unit.compare_values(compares)

    def lost_writes(self) -> list[str]:
        """Return the weights that a forward of this step has written while they were gathered: they are freed, and that is lost."""
        return [name for unit in self._units for name in sorted(unit.written)]

    def take_back(self) -> None:
        """Refuse a weight that a user has given another tensor, which a DTensor takes without its values.

        What is written into the weight itself is written into this rank's rows.

        Raises:
            LayoutError: `param.data = ...` was assigned.
        """
        for name, param in self._params.items():
            if param.untyped_storage()._cdata != self._storages[name]:
                zero = f"zero={self.program.step.zero}"
                raise LayoutError(
                    "write-into-part",
                    f"the weight {name} was given another tensor (param.data = ...), which is not the memory that {zero} shards. Use "
                    "param.copy_(...) within torch.no_grad(), or zero=1",
                )


class _EncodedReduceScatter(ReduceScatter):
    """The function that FSDP2 calls to reduce_scatter the gradients of a unit, where they are sent encoded."""

    def __init__(self, scatter: EncodedScatter) -> None:
        self._scatter = scatter

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._scatter.scatter(output_tensor, input_tensor)


def _gradient(param: DTensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    assert isinstance(param.grad, DTensor)
    return param.grad._local_tensor


_aten = torch.ops.aten
_WRITES = (
    _aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor,
    _aten.lerp_.Scalar, _aten.lerp_.Tensor, _aten.addcmul_.default, _aten.addcdiv_.default,
    _aten.zero_.default, _aten.fill_.Scalar, _aten.clamp_.default,
)  # fmt: skip
"""Operations that write, element by element, into their first argument."""
_WHOLE_WRITES = (
    _aten.fill_.Tensor, _aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor, _aten.index_fill_.int_Scalar, _aten.index_copy_.default,
    _aten.index_add_.default, _aten.scatter_.value, _aten.scatter_.src, _aten.renorm_.default, _aten.cumsum_.default,
    _aten.tril_.default, _aten.triu_.default, _aten.normal_.default, _aten.uniform_.default, _aten.exponential_.default,
    _aten.log_normal_.default, _aten.cauchy_.default, _aten.geometric_.default, _aten.bernoulli_.float, _aten.eye.m_out,
)  # fmt: skip
"""Operations that write into their first argument as a whole, or into `out`, of which DTensor has no rule for rows; drawn numbers are those
of one device."""
_DRAWN_LIKE = (_aten.randn_like.default, _aten.rand_like.default)
"""Operations that draw a tensor of the shape of their first argument."""


def allow_whole_writes() -> None:
    """Let these operations take sharded weights and whole tensors in this process."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(_WRITES, _write) | dict.fromkeys(_WHOLE_WRITES, _write_whole))
    handlers.update(dict.fromkeys(_DRAWN_LIKE, _drawn_like))
    handlers[_aten._local_scalar_dense.default] = _number


def _take_single_numbers(slots: dict[str, ParamSlots], names: set[str]) -> None:
    """Let `load_state_dict` put single numbers into weights that are held as one row."""
    for module, leaf in (slot for name in names for slot in slots[name]):
        module.register_load_state_dict_pre_hook(functools.partial(_view_as_row, leaf))


def _view_as_row(leaf: str, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    value = state.get(prefix + leaf)
    if isinstance(value, Tensor) and not value.dim():
        state[prefix + leaf] = value.view(1)


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the rows of this rank; or on whole tensors, if it writes into one.

    Collective over the ranks that share a weight that is gathered, see [Note: collective calls].
    """
    target, *others = args
    if not isinstance(target, DTensor):
        gathered = [_whole(operand) for operand in others]
        return op(
            target,
            *(
                operand.view(target.shape) if operand is not other and operand.numel() == target.numel() else operand
                for operand, other in zip(gathered, others, strict=True)
            ),
            **kwargs,
        )
    _refuse_lost(target)
    op(target._local_tensor, *(_rows_of(operand, target) for operand in others), **kwargs)
    return target


def _write_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on a whole weight, and write the rows of this rank.

    Collective over the ranks that share the weight, see [Note: collective calls].
    """
    target = kwargs.get("out", args[0])
    if isinstance(target, DTensor):
        _refuse_lost(target)
    result = op(*map(_whole, args), **{key: _whole(value) for key, value in kwargs.items()})
    if isinstance(target, DTensor):
        target._local_tensor.copy_(_rows_of(result, target))
        return target
    return result


def _whole(value: Any) -> Any:
    """Return a cut weight as a whole tensor without a graph, which torch 2.11 gathers alone; other values unchanged.

    Collective over the ranks that share the weight, see [Note: collective calls].
    """
    detached = value.detach() if isinstance(value, DTensor) else value
    return detached.full_tensor() if isinstance(detached, DTensor) else value


def _refuse_lost(target: DTensor) -> None:
    """Refuse a write into a part of a weight, such as `weight[0]`, that was gathered and no longer shares the weight's memory.

    Raises:
        LayoutError: `target` is such a part.
    """
    whole = target._base if target._is_view() else None
    if not isinstance(whole, DTensor):
        return
    rows, part = whole._local_tensor.untyped_storage(), target._local_tensor.untyped_storage()
    if rows.data_ptr() != part.data_ptr():
        raise LayoutError(
            "write-into-part",
            f"a write into a part {list(target.shape)} of a weight {list(whole.shape)}, which ranks share by rows under zero=2|3, "
            "would be lost. Use whole = weight.full_tensor(), write into it, then weight.copy_(whole) within torch.no_grad()",
        )


def _drawn_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw a whole tensor of the shape of a sharded one, and return the rows of this rank as a sharded tensor."""
    like = args[0]
    numbers = op(torch.empty(like.shape, dtype=like.dtype, device=like._local_tensor.device), **kwargs)
    local = _rows_of(numbers, like).contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a scalar tensor as a number.

    Collective over the ranks that share it where they hold summands, see [Note: collective calls].
    """
    return op(args[0].full_tensor())


def _rows_of(value: Any, target: DTensor) -> Any:
    """Return this rank's rows of a whole tensor, cut as the weight `target`; numbers unchanged."""
    if not isinstance(value, Tensor):
        return value
    if not value.dim() and target.numel() != 1:
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor) and value.shape == target.shape:
        return value.redistribute(target.device_mesh, target.placements)._local_tensor
    if isinstance(value, DTensor):  # as a norm of the weight
        value = value.full_tensor()
    rows = value.expand(target.shape)
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            each = -(-rows.shape[placement.dim] // target.device_mesh.size(axis))
            first = min(target.device_mesh.get_local_rank(axis) * each, rows.shape[placement.dim])
            rows = rows.narrow(placement.dim, first, min(each, rows.shape[placement.dim] - first))
    return rows
