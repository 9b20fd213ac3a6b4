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
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from samestep.building.torch_seams import current_backward_id
from samestep.errors import LayoutError
from samestep.program.ops import BodyKey, OpKind, Ops, is_forward, starts_step
from samestep.program.program import Program
from samestep.runtime.axes.forward_only import has_backward, is_forward_only
from samestep.runtime.axes.loop_calls import Asker, asker
from samestep.runtime.weights.fsdp_units import RunningUnit
from samestep.runtime.weights.gradient_codes import may_give_up
from samestep.trees import tree_leaves

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
        self._called_again = [unit for unit in units if not again.isdisjoint(unit.unit.modules)]
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
        self.leave()

    def leave(self) -> None:
        """Leave the order of a task, which an error may have ended: what runs next begins its own."""
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
                f"{running.path} ran in another order than when the model was traced, or once more, and zero={self._zero} "
                "gathers weights in the traced order on all ranks. Use zero=2, or zero=1"
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
                f"and zero={self._zero} reduces gradients in that order on all ranks at once. Use zero=1",
            )
        used = (None, None) if running.is_kept else (running, ahead)
        this_one, next_one = (
            self._places.get(_OrderEntry(unit, True), -1) if unit is not None else -1 for unit in used
        )
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
    count, places = 0, dict[str, int]()
    for op in ops:
        if op.implied and op.owner in named and op.kind in (OpKind.ALL_GATHER, *_REDUCING):
            count += 1
        elif op.axis is not None and not op.implied:
            places.setdefault(op.owner, count)
    return places
