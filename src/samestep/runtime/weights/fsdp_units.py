"""One unit of the program while a step runs: which calls of it ran, and when its backward ends.

FSDP2 would do the following by itself, which this file prevents:
- It frees the weights that zero=2 keeps over several micro-batches, or uses stale ones in the next step, unless
  resharding is set again before each backward.
- It reduces only gradients that exist. A weight that this rank's samples did not use has none, and all others would have
  another offset in the buffer than on another rank: missing gradients become zeros.
- It gathers and reduces only what runs, in the order in which it runs: `unit_order.py` keeps the program's.
- A module that is called several times ends several backwards, after each of which it would reduce a part of the gradient.

The file also knows which attributes of a rank's modules hold each weight, and which shape FSDP2 is given of it.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from samestep.building.torch_seams import current_backward_id
from samestep.errors import LayoutError
from samestep.models.param_spec import ParamSpec, packed_bytes
from samestep.models.spec import is_below
from samestep.program.program import Program
from samestep.program.units import Unit
from samestep.runtime.axes.forward_only import has_backward
from samestep.runtime.axes.precision import DTYPES
from samestep.state.writes import Marks, exact_norms, marks_of
from samestep.trees import tensors_in, tree_leaves

ParamSlots = list[tuple[nn.Module, str]]
"""Modules of a unit that hold a weight, each with the weight's name in it."""


def reshape_params(model: nn.Module, program: Program) -> dict[str, ParamSlots]:
    """Give every parameter, still on meta, the shape and dtype that this rank's program has of it; return its slots."""
    dtype = DTYPES[program.step.master_dtype]
    modules_of = {name: {*unit.modules} for unit in program.units for name in unit.params}
    slots: dict[str, ParamSlots] = {}
    for spec in program.step.model.params:
        names = [name.rpartition(".") for name in (spec.name, *spec.aliases)]
        if (
            program.step.holding(spec).tied_over and spec.name in modules_of
        ):  # other names of the weight are on other stages
            names = [name for name in names if any(is_below(name[0], module) for module in modules_of[spec.name])]
        slots[spec.name] = [(model.get_submodule(path), leaf) for path, _, leaf in names]
        shape = (spec.rows, packed_bytes(spec.row_numel)) if spec.held_as else sharded_shape(spec)
        empty = torch.empty(shape, dtype=torch.uint8 if spec.held_as else dtype, device="meta")
        put_param(slots[spec.name], nn.Parameter(empty, requires_grad=spec.trainable))
    return slots


def param_at(slot: tuple[nn.Module, str]) -> Tensor:
    """Return the parameter that a slot holds."""
    owner, leaf = slot
    value: Tensor = getattr(owner, leaf)
    return value


def put_param(slots: ParamSlots, param: nn.Parameter) -> None:
    """Let all slots of a weight hold the same parameter."""
    for owner, leaf in slots:
        setattr(owner, leaf, param)


def sharded_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of a parameter as FSDP2 is given it, which has a first dimension."""
    return spec.shape or (1,)


class RunningUnit:
    """The state of one unit during a step: which calls of it ran, and when its backward ends.

    A call of one of its modules is complete in the backward once the gradients of its inputs are known, which a hook on
    each input reports; where no input takes a gradient it stays open to the end of the task. Calls are counted by
    micro-batch, since a pipeline has several under way.
    """

    def __init__(self, model: nn.Module, unit: Unit, program: Program, slots: dict[str, ParamSlots]) -> None:
        self.unit = unit
        self.params = {param_at(slots[name][0]) for name in unit.params}
        """The unit's parameters, still on the meta device, before FSDP2 shards them."""
        self.names: list[str] = []
        """Names of these in FSDP2's order."""
        self.path = unit.modules[0] or "the model itself"
        self.chunk = next((i for i, layers in enumerate(program.chunks) if unit.first_layer in layers), 0)
        self.hooks: dict[int, Callable[[Tensor], Tensor]] = {}
        """The user's hooks on gradients, by the id of the sharded weight."""
        self.trained = {
            param.name for param in program.step.model.params if param.trainable and param.name in unit.params
        }
        self._stays = unit.is_called_again
        """Whether its weights stay gathered between calls of its modules in a forward."""
        self.is_kept = False
        """Whether they stay gathered from a forward to the end of its backward, on this rank alone."""
        self._frozen: set[str] = set()
        """Names of the trained weights that code has frozen."""
        self._watched: set[int] = set()
        """The ids of gathered weights whose gradients are noted."""
        self._compares = False
        self.after_backward: Callable[[RunningUnit], None] = RunningUnit.complete
        """Called once the unit's part of a micro-batch's backward is over."""
        self.modules = dict.fromkeys(model.get_submodule(path) for path in unit.modules)
        for module in self.modules:
            # Before fully_shard, which puts its hook in front of this one.
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave)  # before fully_shard, whose hook frees the weights
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
        self._calls: dict[int, int] = {}
        """The number, among all calls of units in a forward, of the first call in each micro-batch."""
        self._partly: set[int] = set()
        """The micro-batches whose forward has called some of its modules, and not all."""
        self._without_graph: set[int] = set()
        """Those whose forward has called it under the model's own `torch.no_grad()`: a backward of the model's own may run it again."""
        self._microbatch = 0
        self._in_backward = self.is_waiting = False
        self.written: set[str] = set()
        self.made: set[str] = set()
        """Names of the weights to which a micro-batch that counts has given a gradient."""
        self._counts = True
        self._left_out: Set[int] = frozenset()
        self._known: Marks | None = None
        self._reduces = self._all_reduces = self._frees = False

    def compare_values(self, compares: bool) -> None:
        """Compare the values of gathered weights too, from the next step on."""
        self._compares, self._known = compares, None

    # -- forward -----------------------------------------------------------------------------------

    def begin_forward(self, microbatch: int) -> None:
        """Count the calls that follow as those of a micro-batch."""
        self._microbatch = microbatch

    def gather_for_others(self) -> None:
        """Take part in a gather that the program lists before this rank uses the weights; free them unless it will use them.

        Collective over the unit's axes, see [Note: collective calls].
        """
        if self._in_backward and self.is_kept:
            self.fsdp.reshard()  # what others wait for is a gather
        self.fsdp.unshard()
        if self._in_backward:
            if self.is_passed_over and self._microbatch not in self._without_graph:
                self.fsdp.reshard()
        elif self.unit.is_freed_after_forward and not self._is_held:
            self.fsdp.reshard()

    @property
    def is_gathered(self) -> bool:
        """Whether its weights are gathered, or being gathered."""
        return self.group.is_unsharded or self.group._all_gather_result is not None

    @property
    def is_passed_over(self) -> bool:
        """Whether no forward of this micro-batch that is followed by a backward has called it on this rank."""
        return not self._open[self._microbatch]

    @property
    def call(self) -> int:
        """The number of its first call among all calls of units in the micro-batch's forward."""
        return self._calls.get(self._microbatch, 0)

    def note_call(self, number: int) -> None:
        """Note the number of a call, of which the first one of a forward counts."""
        self._calls.setdefault(self._microbatch, number)

    @property
    def prefetches(self) -> bool:
        """Whether FSDP2 gathers the next unit ahead in this backward: not if a kept unit ran only some of its modules."""
        return not self.unit.keep_after_forward or self._microbatch not in self._partly

    @property
    def _is_held(self) -> bool:
        return self._stays or self.is_kept or self.unit.is_read_by_loss

    def keep_for_backward(self) -> None:
        """Keep its weights gathered from each forward to the end of its backward from now on, whenever its modules are called."""
        self.is_kept = True
        self.fsdp.set_reshard_after_forward(False, recurse=False)
        self.fsdp.set_modules_to_backward_prefetch(
            [self.fsdp]
        )  # what it would gather ahead comes in the program's order

    def stay_gathered(self, stays: bool) -> None:
        """Let its weights stay gathered between its calls in the forwards to come, or free them after each as the program does."""
        if stays is not self._stays and not (self.unit.is_called_again or self.is_kept):
            self._stays = stays
            frees = not (self.unit.keep_after_forward or stays or self.unit.is_read_by_loss)
            self.fsdp.set_reshard_after_forward(frees, recurse=False)

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record a call, whose backward is complete once the gradients of its inputs are known."""
        if current_backward_id() != -1:  # recomputed inside a backward
            if self._microbatch in self._without_graph and has_backward():  # by an autograd.Function of the model's own
                self._watch_gradients()
            return
        self._compare()
        if not has_backward():
            self._without_graph.add(self._microbatch)
            return
        self._watch_gradients()
        self._open[self._microbatch] += 1
        if not self.unit.input_takes_gradient:
            return  # its gradients are reduced at the end of the task, also where an input takes one this time
        inputs = {id(x): x for x in tensors_in((args, kwargs)) if x.requires_grad}
        if any(x.is_leaf for x in inputs.values()):
            return  # received from a stage: autograd gives leaves their gradients in any order, so the input's may come first
        waiting = set(inputs)
        for key, leaf in inputs.items():
            handle = leaf.register_hook(functools.partial(self._close_call, self._microbatch, waiting, key))
            # In front of FSDP2's hook, which gathers the module that produced the tensor.
            hooks: OrderedDict[int, Any] = leaf._backward_hooks  # type: ignore[assignment]
            hooks.move_to_end(handle.id, last=False)

    def _leave(self, _: nn.Module, args: Any, outputs: Any) -> None:
        if current_backward_id() == -1:
            self._compare()
            self._freeze_alike()
        # FSDP2 gathers at the first gradient of a tensor that pytree finds, and finds none in an object of the user's own.
        if objects := [leaf for leaf in tree_leaves(outputs) if not isinstance(leaf, Tensor)]:
            self.gather_again(_, args, tensors_in(objects))

    def gather_again(self, _: nn.Module, args: Any, outputs: Any) -> Any:
        """Gather the weights at the first gradient of any of the unit's modules; FSDP2 waits for one of the last module."""
        return self.fsdp._get_fsdp_state()._register_pre_backward_hook(outputs)

    def _compare(self) -> None:
        """Note the weights that were written since the step gathered them first; gathering them again does not count."""
        gathered = [weight._unsharded_param for weight in self.group.fsdp_params]
        now = marks_of(gathered, norms=exact_norms if self._compares else None)
        self.written |= {*itertools.compress(self.names, now.since(self._known or now))}
        self._known = now
        for name, weight in zip(self.names, self.group.fsdp_params, strict=True):
            if not all(param is weight._unsharded_param for param in _at(weight)):
                self.written.add(name)

    def check_places(self, *_: Any) -> None:
        """Note the weights that code has replaced before the unit's forward, whose attributes a gather is about to set."""
        for name, weight in zip(self.names, self.group.fsdp_params, strict=True):
            known = (weight.sharded_param, getattr(weight, "_unsharded_param", None))
            if not all(any(param is other for other in known) for param in _at(weight)):
                self.written.add(name)

    def _watch_gradients(self) -> None:
        """Note gradients of gathered trained weights."""
        self._freeze_alike()
        for name, weight in zip(self.names, self.group.fsdp_params, strict=True):
            gathered = weight._unsharded_param
            if name not in self.trained:
                continue
            if gathered.requires_grad and id(gathered) not in self._watched:
                self._watched.add(id(gathered))
                gathered.register_post_accumulate_grad_hook(functools.partial(self._note_gradient, name))

    def _freeze_alike(self) -> None:
        """Freeze or thaw the gathered weights as code has frozen or thawed their shards, and the shards as the gathered ones.

        A module holds one of the two at a time, so what differs from before is what the code has set.
        """
        for name, weight in zip(self.names, self.group.fsdp_params, strict=True):
            gathered = getattr(weight, "_unsharded_param", None)
            if gathered is None or name not in self.trained:
                continue
            trained = name not in self._frozen
            if trained is not weight.sharded_param.requires_grad or trained is not gathered.requires_grad:
                self._frozen ^= {name}
                for param in (gathered, weight.sharded_param):
                    param.requires_grad_(not trained)

    def _note_gradient(self, name: str, gathered: Tensor) -> None:
        if self._counts and id(gathered) not in self._left_out:
            self.made.add(name)

    def end_calls(self) -> None:
        """End a forward that has called only some of the unit's modules: FSDP2 ends it when the last of them has run."""
        state = self.fsdp._get_fsdp_state()
        if not state._modules_to_run_forward:
            return
        state._modules_to_run_forward.clear()
        self._partly.add(self._microbatch)
        state._training_state = self.group._training_state = TrainingState.IDLE
        if self.unit.is_freed_after_forward and not self._is_held:
            self.fsdp.reshard()

    def end_forward(self) -> None:
        """Reshard a unit that stayed gathered over several calls, or for the loss."""
        if self._is_held and not (self.unit.keep_after_forward or self.is_kept):
            self._freeze_alike()
            self.fsdp.reshard()

    def give_up_forward(self) -> None:
        """End a forward of the unit, if one was under way, that an error has ended."""
        state = self.fsdp._get_fsdp_state()
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        state._training_state = self.group._training_state = TrainingState.IDLE

    # -- backward ----------------------------------------------------------------------------------

    def begin_backward(
        self,
        microbatch: int,
        *,
        reduces: bool,
        all_reduces: bool,
        frees: bool,
        counts: bool = True,
        left_out: Set[int] = frozenset(),
    ) -> None:
        """Set what the end of the unit's backward does: whether it reduces, over all axes or not, and frees the weights; and
        whether its gradients count as uses of them, but for those of tensors whose ids are `left_out`."""
        self._microbatch, self._in_backward, self.is_waiting = microbatch, True, False
        self._counts, self._left_out = counts, left_out
        self._reduces, self._all_reduces, self._frees = reduces, all_reduces, frees
        self.fsdp.set_unshard_in_backward(self.unit.gather_in_backward or self.unit.keep_after_forward)

    def _close_call(self, microbatch: int, waiting: set[int], key: int, _: Tensor) -> None:
        if waiting == {key}:  # an input used late has its gradient before the weights have theirs
            self._open[microbatch] -= 1
            if self._open[microbatch] == 0 and self._in_backward:
                self.after_backward(self)
        waiting.discard(key)

    def complete(self) -> None:
        """End the unit's backward, once: set missing gradients of trained weights to zeros, then free and reduce."""
        if not self._in_backward:
            return
        self._in_backward = False
        self._freeze_alike()
        self._open.pop(self._microbatch, None)
        self._calls.pop(self._microbatch, None)
        self._without_graph.discard(self._microbatch)
        self.group.wait_for_unshard()  # gathered ahead by another unit, and not used
        if self._reduces:
            named = zip(self.names, self.group.fsdp_params, strict=True)
            weights = [weight for name, weight in named if name in self.trained]
            self._fill(weights)
            self._apply_hooks(weights)
        self._end_backward()

    def check_late(self) -> None:
        """Check, at the end of a backward that reduces, that no gradient came once it was over here.

        Raises:
            LayoutError: one did.
        """
        for name, weight in zip(self.names, self.group.fsdp_params, strict=True) if self._reduces else ():
            if getattr(weight, "_unsharded_param", None) is not None and weight._unsharded_param.grad is not None:
                raise LayoutError(
                    "zero-call-order",
                    f"a gradient of {name} came after the backward of {self.path}, which the inputs of its calls had ended, so "
                    "it was not summed over the ranks that share it (zero=2 and 3). Use zero=1",
                )

    def _fill(self, weights: Sequence[FSDPParam]) -> None:
        """Let missing gradients be zeros."""
        # The second one is the gradient of a half-precision weight, where FSDP2's hook has already cast it.
        missing = [w for w in weights if w._unsharded_param.grad is None and w.unsharded_accumulated_grad is None]
        raised = next(
            (w.unsharded_accumulated_grad.dtype for w in weights if w.unsharded_accumulated_grad is not None), None
        )
        for weight in missing:  # in the dtype of the other gradients, if FSDP2 has cast them already
            zeros = torch.zeros_like(weight._unsharded_param, dtype=raised)
            if raised is None:
                weight._unsharded_param.grad = zeros
            else:
                weight.unsharded_accumulated_grad = zeros

    @torch.no_grad()
    def _apply_hooks(self, weights: Sequence[FSDPParam]) -> None:
        for weight in weights:
            hook = self.hooks.get(id(weight.sharded_param))
            if hook is not None and weight.unsharded_accumulated_grad is not None:
                weight.unsharded_accumulated_grad = hook(weight.unsharded_accumulated_grad).to_dense()
            elif hook is not None and weight._unsharded_param.grad is not None:
                weight._unsharded_param.grad = hook(weight._unsharded_param.grad).to_dense()

    def _end_backward(self) -> None:
        """Let FSDP2 free the weights and reduce the gradients, which it does at no other time."""
        self.fsdp.set_requires_gradient_sync(self._reduces, recurse=False)
        self.fsdp.set_requires_all_reduce(self._all_reduces, recurse=False)
        self.fsdp.set_reshard_after_backward(self._frees, recurse=False)
        for weight in self.group.fsdp_params if self._reduces else ():
            _give_row(weight)
        self.group.post_backward()
        keep_still(self.fsdp)
        self.fsdp.set_unshard_in_backward(False)  # also not ahead of need, by the gradient of a module's further output


def _at(weight: FSDPParam) -> Iterator[nn.Parameter | None]:
    """Yield the parameter in each attribute of a weight, in its module and in those that share it."""
    info = weight._module_info
    yield info.module._parameters.get(info.param_name)
    for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
        yield module._parameters.get(name)


def _give_row(weight: FSDPParam) -> None:
    """Give the gradient of a single number the dimension along which FSDP2 divides gradients."""
    gathered = weight._unsharded_param
    if gathered.dim():
        return
    if weight.unsharded_accumulated_grad is None:
        weight.unsharded_accumulated_grad, gathered.grad = gathered.grad, None
    if weight.unsharded_accumulated_grad is not None:
        weight.unsharded_accumulated_grad = weight.unsharded_accumulated_grad.view(1)


def keep_still(module: FSDPModule) -> None:
    """Prevent FSDP2 from reducing or freeing by itself after a backward."""
    module.set_requires_gradient_sync(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)
