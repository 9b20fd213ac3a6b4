"""One pipeline stage of any decoder, without changes to its code (twin of `strategies/pipeline.py`).

Every stage runs the model's own forward, in which stand-ins replace the layers of other stages: a block returns its
input, an embedding returns zeros of the right shape. So the model's own code makes masks, positions and rotary angles
on each stage. In front of the first block of a chunk the stage replaces that tensor by the received activation, after
whatever the model does to embeddings; behind the last block of the chunk it takes the result out.

```
model.forward:   embed     block 0   block 1   block 2   block 3   norm, head
stage 1 of 2     (shape)   (pass)    (pass)    recv ►    ► out     own
```
Sends leave while the stage goes on computing, and receives are posted ahead of need: gloo moves bytes only once both
ends have asked for them. A *link* is all messages of one direction, forward or backward, between neighbours, or around
the end of the axis between the last stage and the first. Each has a process group of its own: NCCL runs the messages
between two ranks of a group one after the other, both directions alike, and would wait forever for a receive that was
posted ahead. Both ends of a link issue its messages in one order, which the schedules keep.

A buffer that was sent is kept until a message comes back that its receiver can only have sent after receiving it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import schedules
from samestep.building.families import FamilyFacts
from samestep.errors import LayoutError
from samestep.models.spec import ModelSpec, is_below
from samestep.program.program import Program
from samestep.runtime.axes.context import Slicing, WholeSequences
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh, link_name
from samestep.schedules import Action, TaskKind
from samestep.tracing.sequence_boundaries import with_first
from samestep.tracing.traced_model import TracedModel

_FIRST_TAG = 2**29

ShapesOf = Callable[[int], Hashable]
"""Returns, for a micro-batch, the shapes of its samples, which determine the shapes of activations."""


@dataclass(slots=True)
class _MessageQueue:
    """The messages that one link still has to deliver in this step, and the receives that are posted already."""

    due: list[Action] = field(default_factory=list)
    """Actions of this stage that wait for a message; the next one last."""
    posted: dict[Action, tuple[dist.Work, Tensor]] = field(default_factory=dict)


class WholeModel:
    """The counterpart of `Stage` in a layout without a pipeline: it has all layers, and sends nothing."""

    num_chunks = 1

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk ends the model, and so has the loss: the only one does."""
        return True

    def begin_step(self, shapes_of: ShapesOf) -> None:
        """Do nothing: no message will come."""

    def forward(self, microbatch: int, chunk: int, call: Callable[[nn.Module], Any]) -> Any:
        """Run all layers on a micro-batch; return the model's outputs."""
        return call(self._model)

    def backward(self, microbatch: int, chunk: int, loss: Tensor | None) -> None:
        """Run the backward of the whole model."""
        assert loss is not None
        loss.backward()

    def finish(self) -> None:
        """Do nothing: nothing was sent."""

    def finish_forward(self) -> None:
        """Do nothing: nothing was kept."""

    def from_last(self, outputs: Any) -> Any:
        """Return the outputs: this is the last stage."""
        return outputs


class Stage:
    """The chunks of layers of this rank, and the messages between it and other ranks."""

    def __init__(self, traced: TracedModel, program: Program, mesh: Mesh, slicing: Slicing | WholeSequences) -> None:
        self._program, self._mesh, self._slicing = program, mesh, slicing
        model = traced.module
        self._model, self._facts = model, traced.facts
        self.num_chunks = len(program.chunks)
        layers = program.step.model.layers
        self._slots = [(index, path) for index, layer in enumerate(layers) for path in layer.modules if path]
        self._real = {path: model.get_submodule(path) for _, path in self._slots}
        self._stand_ins = {path: _StandIn(self._real[path], self._facts) for i, path in self._slots}
        self._parents = {path: model.get_submodule(path.rpartition(".")[0]) for path in self._real}
        self._arrivals = _arrivals_of(program)
        self._links: dict[str, _MessageQueue] = {}
        self._sent: dict[Action, tuple[dist.Work, Tensor]] = {}
        """Sends under way, by the action that made the tensor."""
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._shapes: dict[tuple[int, Hashable], tuple[int, ...]] = {}
        """Shape of the input of a chunk, by chunk and by the shapes of the samples."""
        self._shapes_of: ShapesOf = lambda _: None

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk ends the model, and so has the loss."""
        return self._program.chunks[chunk].stop == len(self._program.step.model.layers)

    def begin_step(self, shapes_of: ShapesOf) -> None:
        """Set the messages of the step; `shapes_of` gives the shapes of each micro-batch's samples."""
        self._shapes_of = shapes_of
        self._links = {}
        for action in reversed(self._arrivals):
            self._links.setdefault(self._link_of(action), _MessageQueue()).due.append(action)

    def forward(self, microbatch: int, chunk: int, call: Callable[[nn.Module], Any]) -> Any:
        """Run the layers of one chunk on a micro-batch; return the model's outputs where the chunk ends the model.

        Receives from the previous stage and sends to the next: every stage calls it for each forward of its program, in
        that order. If one does not, its neighbours wait until the time limit.
        """
        layers = self._program.chunks[chunk]
        action = Action(TaskKind.FORWARD, microbatch, chunk)
        handles = []
        if layers.start > 0:
            first = self._real[self._first_block(layers)]
            # In front of all other hooks: those that cut, cast or gather for the block must see the received tensor.
            hook = self._receive(action)
            handles.append(first.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        if not self.is_last(chunk):
            last = self._real[self._program.step.model.layers[layers.stop - 1].modules[-1]]
            handles.append(last.register_forward_hook(functools.partial(self._send_result, action)))
        self._post_receives_ahead()
        try:
            with self._with_stand_ins(layers):
                outputs = call(self._model)
        finally:
            for handle in handles:
                handle.remove()
        return outputs if self.is_last(chunk) else None

    def backward(self, microbatch: int, chunk: int, loss: Tensor | None) -> None:
        """Run the backward of one chunk: from the loss, or from the gradient that the next chunk sends.

        Communicates as `forward` does, in the other direction.
        """
        action = Action(TaskKind.BACKWARD, microbatch, chunk)
        if loss is not None:
            self._post_receives_ahead()
            loss.backward()
        else:
            output = self._outputs[microbatch, chunk]
            gradient = self._received(action, tuple(output.shape), output)
            del self._outputs[microbatch, chunk]
            output.backward(gradient)
        given = self._inputs.pop((microbatch, chunk), None)
        if given is not None:
            assert given.grad is not None, "no gradient reached the activation that was received"
            self._send(action, given.grad)

    def finish(self) -> None:
        """Wait until every send has completed, which it does once the neighbour has received it."""
        for action in list(self._sent):
            self._release(action)

    def finish_forward(self) -> None:
        """End a forward that no backward follows: wait for its sends and free its tensors."""
        self.finish()
        self._inputs.clear()
        self._outputs.clear()

    def from_last(self, outputs: Any) -> Any:
        """Return the last stage's logits on all stages; the `outputs` of the others are None.

        Collective over `pp`: every stage calls it; if one does not, the others wait until the time limit.
        """
        held = [getattr(outputs, "logits", outputs)]
        ranks = self._mesh.members("pp")
        dist.broadcast_object_list(held, src=ranks[-1], group=self._mesh.groups["pp"])
        return held[0]

    def _send_result(self, action: Action, _: nn.Module, args: Any, output: Any) -> Any:
        """Send the result of a chunk; the code after it computes nothing, but sees the whole sequence's shape."""
        result = self._outputs[action.microbatch, action.chunk] = _hidden(output)
        self._send(action, result.detach())
        layout = self._program.step.layout
        if not layout.sequence_parallel:
            return None
        return with_first(output, lambda x: x.new_zeros(()).expand(x.shape[0], x.shape[1] * layout.tp, *x.shape[2:]))

    def _first_block(self, layers: range) -> str:
        return self._program.step.model.layers[layers.start].modules[0]

    def _receive(self, action: Action) -> Callable[..., Any]:
        """Return the hook that replaces a stand-in's output by the received activation."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = "" if args else self._facts.name_of_hidden(kwargs)
            stand_in = args[0] if args else kwargs[name]
            shape = self._passed_shape(stand_in.shape)
            received = self._received(action, shape, stand_in)
            if torch.is_grad_enabled():
                self._shapes[action.chunk, self._shapes_of(action.microbatch)] = shape
                self._inputs[action.microbatch, action.chunk] = received.requires_grad_()
            return ((received, *args[1:]), kwargs) if args else (args, {**kwargs, name: received})

        return hook

    def _passed_shape(self, whole: torch.Size) -> tuple[int, ...]:
        """Return the shape of what blocks pass on in this layout, given that on one device."""
        layout = self._program.step.layout
        shape = self._slicing.shape_of(whole)
        return (shape[0], shape[1] // layout.tp, *shape[2:]) if layout.sequence_parallel else tuple(shape)

    # -- messages ----------------------------------------------------------------------------------

    def _send(self, action: Action, tensor: Tensor) -> None:
        kept = tensor.contiguous()
        boundary, step = self._boundary(action, sends=True)
        with owned(self._program.step.model.layers[boundary - 1].name):
            group = self._mesh.groups[self._link_of(action, sends=True)]
            work = dist.isend(kept, self._peer(step), group=group, tag=self._tag(boundary, action))
        assert work is not None
        self._sent[action] = (work, kept)

    def _received(self, action: Action, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Wait for the message of an action, in the compute dtype; then post the receives that follow."""
        link = self._links.get(self._link_of(action), _MessageQueue()) if torch.is_grad_enabled() else _MessageQueue()
        if link.due and link.due[-1] == action:
            link.due.pop()
        posted = link.posted.pop(action) if action in link.posted else None
        work, into = posted or self._post_receive(action, shape, like.device)
        assert into.shape == shape, f"{action} is given {list(shape)}, and {list(into.shape)} was awaited"
        work.wait()
        for sent in self._arrivals[action] if torch.is_grad_enabled() else ():
            self._release(sent)
        self._post_receives_ahead()
        return into

    def _post_receives_ahead(self) -> None:
        """Post the next receive of each link, where its shape is known."""
        if not torch.is_grad_enabled():
            return
        for link in self._links.values():
            action = link.due[-1] if link.due else None
            if action is not None and action not in link.posted and (shape := self._shape_for(action)):
                link.posted[action] = self._post_receive(action, shape, self._mesh.device)

    def _shape_for(self, action: Action) -> tuple[int, ...] | None:
        if action.kind is TaskKind.FORWARD:
            return self._shapes.get((action.chunk, self._shapes_of(action.microbatch)))
        output = self._outputs.get((action.microbatch, action.chunk))
        return None if output is None else tuple(output.shape)

    def _post_receive(self, action: Action, shape: tuple[int, ...], device: torch.device) -> tuple[dist.Work, Tensor]:
        into = torch.empty(shape, dtype=DTYPES[self._program.step.compute_dtype], device=device)
        boundary, step = self._boundary(action, sends=False)
        with owned(self._program.step.model.layers[boundary - 1].name):
            group = self._mesh.groups[self._link_of(action)]
            work = dist.irecv(into, self._peer(step), group=group, tag=self._tag(boundary, action))
        assert work is not None
        return work, into

    def _release(self, action: Action) -> None:
        """Free the tensor that an action has sent, once its send has completed."""
        work, _ = self._sent.pop(action)
        work.wait()

    def _boundary(self, action: Action, *, sends: bool) -> tuple[int, int]:
        """Return the layer before which an action's message passes, and the direction to the other rank: 1 or -1."""
        layers = self._program.chunks[action.chunk]
        is_forward = action.kind is TaskKind.FORWARD
        return (layers.stop, 1) if sends == is_forward else (layers.start, -1)

    def _link_of(self, action: Action, *, sends: bool = False) -> str:
        """Return the name of the link of an action's message, which is that of its process group."""
        _, step = self._boundary(action, sends=sends)
        pp, stage = self._program.step.layout.pp, self._program.step.stage
        return link_name(is_forward=action.kind is TaskKind.FORWARD, is_around=not 0 <= stage + step < pp)

    def _peer(self, step: int) -> int:
        """Return the global rank of the next or previous rank on the axis, around its end."""
        ranks = self._mesh.members("pp")
        return ranks[(ranks.index(self._mesh.rank) + step) % len(ranks)]

    def _tag(self, boundary: int, action: Action) -> int:
        # gloo counts its collectives by the same tags, from 0: higher ones, or a send would be taken for a collective.
        backward = action.kind is TaskKind.BACKWARD
        return _FIRST_TAG + (action.microbatch * len(self._program.step.model.layers) + boundary) * 2 + backward

    @contextmanager
    def _with_stand_ins(self, layers: range) -> Iterator[None]:
        """Replace all layers but those of one chunk by stand-ins."""
        for index, path in self._slots:
            self._put(path, self._real[path] if index in layers else self._stand_ins[path])
        try:
            yield
        finally:
            for path, real in self._real.items():
                self._put(path, real)

    def _put(self, path: str, module: nn.Module) -> None:
        self._parents[path]._modules[path.rpartition(".")[2]] = module


def _arrivals_of(program: Program) -> dict[Action, list[Action]]:
    """Return this stage's actions that need a message, with those whose sends must have arrived by then.

    The sender of the message has executed its own order up to it, and so has received everything this needed.
    """
    layout, stage, count = program.step.layout, program.step.stage, program.step.num_microbatches
    chunks = layout.virtual_stages
    orders = [schedules.order(layout.schedule, s, layout.pp, count, chunks) for s in range(layout.pp)]
    known: dict[int, int] = {}  # by sender: how far it must have come in its order
    found: dict[Action, list[Action]] = {}
    for action in orders[stage]:
        for sender, needed in schedules.needs(action, stage, layout.pp, chunks):
            if sender != stage:
                before, after = known.get(sender, 0), orders[sender].index(needed) + 1
                known[sender] = max(before, after)
                passed = [
                    sent
                    for theirs in orders[sender][before:after]
                    for owner, sent in schedules.needs(theirs, sender, layout.pp, chunks)
                    if owner == stage
                ]
                found[action] = passed
    return found


class _StandIn(nn.Module):
    """Replaces a layer that another stage runs; attributes that the model's code reads are those of the layer."""

    def __init__(self, real: nn.Module, facts: FamilyFacts) -> None:
        super().__init__()
        object.__setattr__(self, "_real", real)
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_real"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input; an embedding returns zeros that take no memory."""
        real = object.__getattribute__(self, "_real")
        given = args[0] if args else kwargs[self._facts.name_of_hidden(kwargs)]
        if not any(True for _ in real.parameters()):
            return real(*args, **kwargs)  # rotary angles and the like, which every stage computes for itself
        if isinstance(real, nn.Embedding):
            dtype = next(real.parameters()).dtype
            return torch.zeros((), dtype=dtype, device=given.device).expand(*given.shape, real.embedding_dim)
        return given


def check(model: nn.Module, program: Program) -> None:
    """Refuse a model that is not embeddings, then blocks, then a head.

    Raises:
        LayoutError: a layer before the blocks cannot be replaced by a stand-in, or several layers share a dropout.
    """
    layers = program.step.model.layers
    first = next(index for index, layer in enumerate(layers) if layer.is_block)
    for layer in layers[:first]:
        for path in layer.modules:
            module = model.get_submodule(path)
            if any(True for _ in module.parameters()) and not isinstance(module, nn.Embedding):
                raise LayoutError(
                    f"{path} before the blocks is a {type(module).__name__}, not an Embedding: pp=1 works"
                )
    _check_masks(model, program.step.model)


def _check_masks(model: nn.Module, spec: ModelSpec) -> None:
    """Refuse a module with dropout that several layers call: a stage cannot know how often the others called it."""
    drawing = {mask.owner for mask in spec.masks}
    layers_of: dict[nn.Module, set[int]] = {}
    names: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, path)
        layers = {index for index, layer in enumerate(spec.layers) for root in layer.modules if is_below(path, root)}
        layers_of.setdefault(module, set()).update(layers)
    for module, layers in layers_of.items():
        if len(layers) > 1 and names[module] in drawing:
            raise LayoutError(
                f"{names[module]} draws the dropout masks of several layers: pp=1 works, and so does a module for each"
            )


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
