"""One pipeline stage of any model, without changes to its code (twin of `strategies/pipeline.py`).

Every stage runs the model's forward, in which calls of other stages' layers are not carried out. So the model's code
computes masks, positions and rotary angles on each stage. Where each block passes one tensor to the next, such a
block returns its input, and an embedding zeros of the right shape; before the first block of a chunk the stage replaces
that tensor by the received activation, after whatever the model does to embeddings; after the last block of the chunk
it takes the result out.

```
model.forward:   embed     block 0   block 1   block 2   block 3   norm, head
stage 1 of 2     (shape)   (pass)    (pass)    recv ►    ► out     own
```
Where later layers read more than that (`LayerSpec.crossings`), the forward follows a recorded flow (`stage_flow.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.families import name_of_hidden
from samestep.building.model import call_model
from samestep.building.torch_seams import distributions_unchecked
from samestep.errors import LayoutError, ModelError
from samestep.examination.traced_model import TracedModel
from samestep.models.layer_parts import Crossing
from samestep.program.program import Program
from samestep.randomness import mode as dropout
from samestep.runtime.axes.context.slicing import Slicing, WholeSequences
from samestep.runtime.axes.forward_only import is_forward_only
from samestep.runtime.axes.pipeline.recorded_flows import shapes_in
from samestep.runtime.axes.pipeline.stage_flow import Flows, StageForward
from samestep.runtime.axes.pipeline.stage_messages import Awaited, Messages
from samestep.runtime.axes.pipeline.stand_ins import ReadWeights, StageLayers
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.axes.step_part import PartOfStep, ShapesOf
from samestep.runtime.axes.weight_gradients import Deferred
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.processes.messages import broadcast_from
from samestep.runtime.step_observer import StepBatch
from samestep.schedules import Action, TaskKind
from samestep.strategies.pipeline import crossings_at
from samestep.tracing.custom_functions import seen_by
from samestep.tracing.flow import CannotPassError, Flow, Value
from samestep.tracing.module_inputs import with_first
from samestep.tracing.stage_events import StageEvents, is_of_maker, passed_before


class Stage(PartOfStep):
    """The chunks of layers of this rank, and the tensors that pass between it and other ranks."""

    def __init__(
        self,
        traced: TracedModel,
        program: Program,
        mesh: Mesh,
        slicing: Slicing | WholeSequences,
        flows: Flows | None,
        deferred: Deferred,
        running: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._running, self._deferred = running, deferred
        self._program, self._mesh, self._slicing, self._flows = program, mesh, slicing, flows
        self._model = traced.module
        self.num_chunks = len(program.chunks)
        self._layers = program.step.model.layers
        self._entered = [program.step.model.entered_before(layers.start) for layers in program.chunks]
        """How often modules have been entered where each chunk begins."""
        self._modules = StageLayers(traced, program.step, mesh.device)
        self._weights = ReadWeights(traced, program, mesh.device)
        self._messages = Messages(program, mesh)
        model = program.step.model
        self._crossings = {at: crossings_at(model, at) for at in range(1, len(self._layers))}
        """What crosses the boundary before each layer but the first."""
        self._inputs: dict[tuple[int, int], list[Tensor]] = {}
        """Received tensors, by micro-batch and chunk, in the order of what crosses the boundary."""
        self._outputs: dict[tuple[int, int], list[Tensor]] = {}
        self._shapes: dict[tuple[int, Hashable], tuple[int, ...]] = {}
        """Shape of the input of a chunk that is given one tensor, by chunk and by the shapes of the samples."""
        self._shapes_of: ShapesOf = lambda _: None
        self._events_of = functools.cache(lambda chunk, flow: StageEvents.of(self._layers, program.chunks[chunk], flow))
        self._passed_before = functools.cache(lambda boundary, flow: passed_before(self._layers, boundary, flow))

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk ends the model, and so has the loss."""
        return self._program.chunks[chunk].stop == len(self._layers)

    def begin_step(self, batch: StepBatch, shapes_of: ShapesOf) -> None:
        """Set the messages of the step; `shapes_of` gives the shapes of each micro-batch's samples."""
        self._shapes_of = shapes_of
        self._messages.begin_step()

    def forward(self, microbatch: int, chunk: int, samples: Any) -> Any:
        """Run the layers of one chunk on a micro-batch; return the model's outputs where the chunk ends the model.

        Receives from the previous stage and sends to the next: every stage calls it for each forward of its program, in
        that order. If one does not, its neighbours wait until the time limit.

        Raises:
            ModelError: the model's own code needs a value that is on another stage.
        """
        action = Action(TaskKind.FORWARD, microbatch, chunk)
        try:
            with self._running():
                outputs = self._run(action, samples)
        except (KeyError, AttributeError, TypeError, IndexError, UnboundLocalError) as error:  # of the model's own code
            raise ModelError(
                "pp-forward-differs",
                f"the forward, which runs on one device, fails on a stage of pp={self._mesh.size('pp')} ({type(error).__name__}: "
                f"{error}): what its code keeps elsewhere than in results of modules is on another stage. Use pp=1, or a "
                "module that returns it",
            ) from error
        return outputs if self.is_last(chunk) else None

    def _run(self, action: Action, samples: Any) -> Any:
        flow = None
        if self._flows is not None:
            self._flows.follow(self._model)
            flow = self._flows.of(samples, shapes_in(samples))
        self._messages.post_ahead(self._tensors_awaited_by)
        return self._pass_on(action, samples) if flow is None else self._follow(flow, action, samples)

    def backward(self, microbatch: int, chunk: int, loss: Tensor | None) -> None:
        """Run the backward of one chunk: from the loss, or from the gradients that the next chunk sends.

        Communicates as `forward` does, in the other direction.
        """
        self._deferred.microbatch = microbatch
        action = Action(TaskKind.BACKWARD, microbatch, chunk)
        layers = self._program.chunks[chunk]
        if loss is not None:
            self._messages.post_ahead(self._tensors_awaited_by)
            if loss.requires_grad:
                loss.backward()
        elif awaited := self._gradients_awaited(action):
            outputs = self._taking_gradient(microbatch, layers.stop, self._outputs[microbatch, chunk])
            gradients = self._received(action, awaited)
            del self._outputs[microbatch, chunk]
            taken = [index for index, output in enumerate(outputs) if output.requires_grad]
            if taken:
                # Of views: torch runs no hook of several gradients on the root of a backward.
                roots = [outputs[index].view_as(outputs[index]) for index in taken]
                torch.autograd.backward(roots, [gradients[index] for index in taken])
        else:
            del self._outputs[microbatch, chunk]
        inputs = self._inputs.pop((microbatch, chunk), None)
        if inputs is not None:
            self._check_idle(microbatch, layers.start, inputs)
            inputs = self._taking_gradient(microbatch, layers.start, inputs)
        if inputs:
            gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs]
            self._messages.send(action, gradients, self._awaited(microbatch, layers.start, inputs, backward=True))

    def weight_gradients(self, microbatch: int) -> None:
        """Compute the weight gradients that the backward of a micro-batch has postponed."""
        self._deferred.add_up(microbatch)

    def end_backwards(self) -> None:
        """Wait until every send has completed, which it does once the neighbour has received it."""
        self._messages.finish()

    def finish_forward(self) -> None:
        """End a forward that no backward follows: wait for its sends and free its tensors."""
        self.end_backwards()
        self._inputs.clear()
        self._outputs.clear()

    def from_last(self, outputs: Any) -> Any:
        """Return the last stage's logits on all stages; the `outputs` of the others are None.

        Collective over `pp`, see [Note: collective calls].
        """
        last = self._mesh.members("pp")[-1]
        logits = getattr(outputs, "logits", outputs)
        return broadcast_from(last, logits, self._mesh.groups["pp"], self._mesh.device)

    # -- a recorded flow ---------------------------------------------------------------------------

    def _follow(self, flow: Flow, action: Action, samples: Any) -> Any:
        """Run the model's forward with the events of one chunk, and return its outputs."""
        layers = self._program.chunks[action.chunk]
        key = action.microbatch, action.chunk
        awaited = self._crossing(flow, layers.start)

        def receive() -> list[Tensor]:
            """Return the tensors that cross the boundary before the chunk."""
            tensors = self._received(action, awaited)
            dropout.begin_after(self._model, self._entered[action.chunk])
            is_differentiated = torch.is_grad_enabled() or not is_forward_only()
            for tensor, (value, *_) in zip(tensors, events.incoming, strict=True):
                tensor.requires_grad_(flow.values[value].takes_gradient and is_differentiated)
            return tensors

        def send(tensors: Sequence[Tensor]) -> None:
            """Send the tensors that cross the boundary after the chunk."""
            self._outputs[key] = list(tensors)
            self._messages.send(action, [tensor.detach() for tensor in tensors], self._crossing(flow, layers.stop))

        with _or_refuse(self._layers[layers.start].name):
            events = self._events_of(action.chunk, flow)
        mode = StageForward(flow, events, self._mesh.device, receive, send)
        reporting = self._modules.called(lambda path, _: functools.partial(mode.call, path))
        try:
            with reporting, self._weights.placed(flow, mode), distributions_unchecked(), mode, seen_by(mode):
                outputs = call_model(self._model, samples)
            mode.finish()
        except Exception:
            if (
                is_forward_only()
            ):  # of a part of the samples, which the model may not take: its neighbours wait for its messages
                if mode.lacks_input:
                    self._messages.receive(action, awaited)
                if mode.lacks_output:
                    shapes, device = self._crossing(flow, layers.stop), self._mesh.device
                    send([torch.zeros(c.shape, dtype=c.dtype, device=device) for c in shapes])
            raise
        if layers.start > 0 and not is_forward_only():
            self._inputs[key] = mode.received
        return outputs

    def _crossing(self, flow: Flow, boundary: int) -> list[Awaited]:
        """Return the tensors that cross the boundary before a layer."""
        if boundary in (0, len(self._layers)):
            return []
        return [
            Awaited(
                c.owner,
                (sum(torch.Size(value.shape).numel() for value in (first, *more)),) if more else first.shape,
                first.dtype,
            )
            for c, (first, *more) in self._values_of(flow, boundary)
        ]

    def _values_of(self, flow: Flow, boundary: int) -> list[tuple[Crossing, list[Value]]]:
        """Return the crossings before a layer with their values in a flow; without those that a part makes which the samples pass over.

        Raises:
            LayoutError: other values cross there.
        """
        with _or_refuse(self._layers[boundary].name):
            values = [[flow.values[value] for value in values] for values in self._passed_before(boundary, flow)]
        crossings = self._crossings[boundary]
        left = iter(crossings)
        if len(values) < len(crossings):
            crossings = tuple(
                c for first, *_ in values if (c := next((c for c in left if is_of_maker(c, first)), None))
            )
        if len(values) != len(crossings):
            raise LayoutError(
                "pp-shapes-vary",
                f"{len(values)} tensors cross the boundary before {self._layers[boundary].name} for these samples, and "
                f"{len(crossings)} for the traced one. Use pp=1",
            )
        return list(zip(crossings, values, strict=True))

    def _crossings_in(self, microbatch: int, boundary: int) -> Sequence[Crossing]:
        """Return what crosses the boundary before a layer in a micro-batch."""
        flow = None if self._flows is None else self._flows.known(self._shapes_of(microbatch))
        return self._crossings[boundary] if flow is None else [c for c, _ in self._values_of(flow, boundary)]

    # -- one tensor --------------------------------------------------------------------------------

    def _pass_on(self, action: Action, samples: Any) -> Any:
        """Run the model's forward with the layers of one chunk; others return their input."""
        layers = self._program.chunks[action.chunk]
        handles = []
        if layers.start > 0:
            first = self._modules[self._layers[layers.start].modules[0]]
            # In front of all other hooks: those that cut, cast or gather for the block must see the received tensor.
            hook = self._receive(action)
            handles.append(first.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        ends: dict[str, Callable[..., Any]] = {}
        if not self.is_last(action.chunk):
            last = self._modules[path := self._layers[layers.stop - 1].modules[-1]]
            if last._backward_hooks or last._backward_pre_hooks:  # which torch puts behind all other hooks
                ends[path] = functools.partial(self._call_and_send, action)
            else:
                hook = lambda _, args, output: self._send_result(action, args, output)  # noqa: E731
                handles.append(last.register_forward_hook(hook))
        try:
            with self._modules.called(lambda path, at: ends.get(path) if at in layers else self._modules.pass_on(path)):
                outputs = call_model(self._model, samples)
        finally:
            for handle in handles:
                handle.remove()
        self._check_passed(action)
        return outputs

    def _check_passed(self, action: Action) -> None:
        """Check that the forward has run the first and the last layer of a chunk, which receive and send.

        Raises:
            ModelError: it has passed over one.
        """
        layers, key = self._program.chunks[action.chunk], (action.microbatch, action.chunk)
        lacks_input = layers.start > 0 and not is_forward_only() and key not in self._inputs
        if lacks_input or (not self.is_last(action.chunk) and key not in self._outputs):
            missing = self._layers[layers.start if lacks_input else layers.stop - 1].name
            raise ModelError(
                "pp-forward-differs",
                f"the forward skipped {missing}, where a stage of the pipeline receives or sends. Use pp=1, or a "
                "forward that runs it in every step",
            )

    def _refuse_again(self, layer: int, *, is_known: bool) -> None:
        """Refuse a layer that receives or sends, if the forward has run it before.

        Raises:
            ModelError: it has.
        """
        if is_known:
            raise ModelError(
                "pp-forward-differs",
                f"the forward runs {self._layers[layer].name} twice, where a stage of the pipeline receives or sends. Use pp=1, or a "
                "forward that runs it once in every step",
            )

    def _call_and_send(self, action: Action, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        sent = self._send_result(action, args, output)
        return output if sent is None else sent

    def _send_result(self, action: Action, args: Any, output: Tensor) -> Any:
        """Send the result of a chunk; the code after it computes nothing, but sees the whole sequence's shape."""
        boundary, key = self._program.chunks[action.chunk].stop, (action.microbatch, action.chunk)
        self._refuse_again(boundary - 1, is_known=key in self._outputs)
        self._outputs[key] = [output]
        if args and isinstance(args[0], Tensor) and output.shape != args[0].shape:
            raise ModelError(
                "pp-shapes-vary",
                f"{self._layers[boundary - 1].name} is given a tensor of shape {tuple(args[0].shape)} and returns one of "
                f"{tuple(output.shape)}, and the stages of a pipeline send tensors of one shape. Use pp=1",
            )
        self._messages.send(action, [output.detach()], self._awaited(action.microbatch, boundary, [output]))
        layout = self._program.step.layout
        if not layout.sequence_parallel:
            return None
        return with_first(output, lambda x: x.new_zeros(()).expand(x.shape[0], x.shape[1] * layout.tp, *x.shape[2:]))

    def _receive(self, action: Action) -> Callable[..., Any]:
        """Return the hook that replaces a stand-in's output by the received activation."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name, key = "" if args else name_of_hidden(kwargs), (action.microbatch, action.chunk)
            self._refuse_again(self._program.chunks[action.chunk].start, is_known=key in self._inputs)
            shape = self._passed_shape((args[0] if args else kwargs[name]).shape)
            (received,) = self._received(action, self._one_awaited(self._program.chunks[action.chunk].start, shape))
            dropout.begin_after(self._model, self._entered[action.chunk])
            received.requires_grad_(torch.is_grad_enabled())
            if not is_forward_only():
                self._shapes[action.chunk, self._shapes_of(action.microbatch)] = shape
                self._inputs[key] = [received]
            return ((received, *args[1:]), kwargs) if args else (args, {**kwargs, name: received})

        return hook

    def _passed_shape(self, shape_of_all: torch.Size) -> tuple[int, ...]:
        """Return the shape of the blocks' output in this layout, given that on one device."""
        layout = self._program.step.layout
        shape = self._slicing.shape_of(shape_of_all)
        return (shape[0], shape[1] // layout.tp, *shape[2:]) if layout.sequence_parallel else tuple(shape)

    def _one_awaited(self, boundary: int, shape: tuple[int, ...]) -> list[Awaited]:
        return [Awaited(self._layers[boundary - 1].name, shape, DTYPES[self._program.step.compute_dtype])]

    # -- expected messages -------------------------------------------------------------------------

    def _received(self, action: Action, awaited: Sequence[Awaited]) -> list[Tensor]:
        received = self._messages.receive(action, awaited)
        self._messages.post_ahead(self._tensors_awaited_by)
        return received

    def _tensors_awaited_by(self, action: Action) -> Sequence[Awaited] | None:
        """Return the tensors that an action waits for, where their shapes are known."""
        if action.kind is not TaskKind.FORWARD:
            return self._gradients_awaited(action)
        boundary, shapes = self._program.chunks[action.chunk].start, self._shapes_of(action.microbatch)
        if self._flows is None:
            shape = self._shapes.get((action.chunk, shapes))
            return None if shape is None else self._one_awaited(boundary, shape)
        flow = self._flows.known(shapes)
        return None if flow is None else self._crossing(flow, boundary)

    def _gradients_awaited(self, action: Action) -> list[Awaited] | None:
        outputs = self._outputs.get((action.microbatch, action.chunk))
        boundary = self._program.chunks[action.chunk].stop
        return (
            None
            if outputs is None
            else self._awaited(
                action.microbatch, boundary, self._taking_gradient(action.microbatch, boundary, outputs), backward=True
            )
        )

    def _taking_gradient(self, microbatch: int, boundary: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the tensors that cross a boundary of which a gradient is sent back."""
        crossings = self._crossings_in(microbatch, boundary)
        return [tensor for tensor, crossing in zip(tensors, crossings, strict=True) if crossing.takes_gradient]

    def _check_idle(self, microbatch: int, boundary: int, tensors: Sequence[Tensor]) -> None:
        """Check that the loss has no gradient for tensors on which it did not depend in the trace."""
        crossings = self._crossings_in(microbatch, boundary)
        for tensor, crossing in zip(tensors, crossings, strict=True):
            # FSDP2 fills in gradients of zeros.
            if not crossing.takes_gradient and tensor.grad is not None and bool(tensor.grad.any()):
                raise ModelError(
                    "pp-forward-differs",
                    f"the loss depends on {crossing.owner}, which one stage of the pipeline sends to the next, and did not depend on it when "
                    "the model was traced. Use pp=1, or add 0 * tensor.sum() to the output",
                )

    def _awaited(
        self, microbatch: int, boundary: int, tensors: Sequence[Tensor], *, backward: bool = False
    ) -> list[Awaited]:
        """Describe the tensors that cross a boundary, or the gradients that do."""
        compute = self._program.step.compute_dtype
        crossings = [c for c in self._crossings_in(microbatch, boundary) if c.takes_gradient or not backward]
        pairs = zip(tensors, crossings, strict=True)
        return [Awaited(c.owner, tuple(tensor.shape), DTYPES[c.dtype or compute]) for tensor, c in pairs]


@contextmanager
def _or_refuse(name: str) -> Iterator[None]:
    """Refuse a stage that begins with a layer, where the flow of some samples says why none can."""
    try:
        yield
    except CannotPassError as reason:
        raise LayoutError("pp-stage-begin", f"no stage can begin with {name}: {reason}. Use pp=1") from None
