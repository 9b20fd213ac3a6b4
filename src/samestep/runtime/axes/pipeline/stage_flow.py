"""A forward in which one stage computes its part of a recorded flow (`tracing/flow.py`), and nothing else.

The model's code runs whole on every stage. Outside of the events of this stage, a module call or a function of values
is not carried out: it returns tensors of the recorded shapes that take no memory and that nothing reads. Where the
stage begins, the tensors that cross its boundary are received *into these objects*, wherever the model's code holds
them: in variables, lists or data classes. Where it ends, the tensors that cross the next boundary are sent.

```
events     0 .. 3            4 .. 9              10 ..
stage 1    stand-ins   recv ► computes ► send    stand-ins
```
A forward that takes another way than the recorded one ends with an error.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from samestep.building.named_tensors import copy_module
from samestep.building.torch_seams import current_function_mode, is_transformed, pop_function_mode_temporarily
from samestep.errors import ModelError
from samestep.examination.traced_model import TracedModel
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.runtime.axes import precision
from samestep.runtime.axes.context import slicing as context
from samestep.tracing import experts
from samestep.tracing.arranged_layers import containers_of, opened_modules
from samestep.tracing.backward import roots_of_loss
from samestep.tracing.checkpointed import record_checkpointed
from samestep.tracing.flow import (
    Container,
    Event,
    Flow,
    changes_of,
    containers_in,
    contents_of,
    given_to,
    name_of,
    reads_shape_alone,
    tensors_made_by,
)
from samestep.tracing.forward import ForwardTracer
from samestep.tracing.meta_tensors import KnownValues, NeedsValuesError
from samestep.tracing.stage_events import StageEvents
from samestep.tracing.watched_forward import watch_forward
from samestep.trees import map_tensors, tensors_in, tree_map_only


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device, value: float = 0.0) -> Tensor:
    """Return a tensor of one value that takes no memory, and is no view, so that it can be given other data."""
    number = torch.full((1,), value if dtype.is_floating_point else 0, dtype=dtype, device=device)
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(number.untyped_storage(), 0, tuple(shape), (0,) * len(shape))


_HOOKS = (Tensor.register_hook, Tensor.retain_grad)
"""What code does with the gradient of a tensor once it is there."""


class StageForward(TorchFunctionMode):
    """The forward of one chunk on one micro-batch: a function mode, to which its modules with weights report their calls.

    `receive` returns the messages that cross the boundary before its events, and `send` is given those after them, each in the
    order of `StageEvents`. The values of several items are one message, one after the other in a flat tensor.
    """

    def __init__(
        self,
        flow: Flow,
        events: StageEvents,
        device: torch.device,
        receive: Callable[[], Sequence[Tensor]],
        send: Callable[[Sequence[Tensor]], None],
    ) -> None:
        super().__init__()
        self._flow, self._events, self._device = flow, events, device
        self._start, self._stop = events.start, events.stop
        self._receive, self._send = receive, send
        self._written = {value for event in flow.events for value in event.reads if event.writes}
        """Values that some event may write into."""
        self._numbers = WeakIdKeyDictionary()
        self._tensors: dict[int, weakref.ref[Tensor]] = {}
        self._outgoing = {value for values in events.outgoing for value in values}
        self._kept: dict[int, Tensor] = {}
        """Values that are sent once the events are over: the model's code may have let go of those of earlier items."""
        self._early: dict[int, Tensor] = {}
        """Values that were received before the model's code comes to the events that make them."""
        self._next, self._depth = 0, 0
        self.received: list[Tensor] = []
        """The tensors of autograd that begin this stage's graph, in the order of what crosses the boundary at `start`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth or is_transformed():
            return func(*args, **kwargs)
        if func in _HOOKS and not self._makes(args[0]):
            return RemovableHandle(OrderedDict()) if func is Tensor.register_hook else None
        tensors = given_to(func, args, kwargs)
        reads = tuple(self._numbers[tensor] for tensor in tensors if tensor in self._numbers)
        if not reads or reads_shape_alone(func) or not self._is_next(name_of(func), reads, is_call=False):
            outcome = func(*args, **kwargs)
            # After the last event come hooks of the run, such as those of FSDP2.
            ends = self._next == len(self._flow.events)
            if reads and not ends and not reads_shape_alone(func) and tensors_in(outcome):
                raise self._differs(name_of(func), is_of_hook=func is Tensor.view_as and args[0] is args[1])
            return outcome
        return self._follow(name_of(func), func, tensors, args, kwargs)

    def call(self, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module with weights, if that is one of this stage's events; if not, return stand-ins of its results."""
        if self._depth:
            return call(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        reads = tuple(self._numbers[tensor] for tensor in tensors if tensor in self._numbers)
        if not self._is_next(path, reads, is_call=True):
            raise self._differs(path)
        return self._follow(path, call, tensors, args, kwargs)

    def reads(self, weight: str) -> bool:
        """Return whether one of this stage's events uses a weight."""
        return self._flow.uses_within(weight, self._events.numbers)

    def holds(self, tensor: Tensor, value: int) -> None:
        """Let a tensor be the value of a weight, which no event makes."""
        self._is(tensor, value)

    def finish(self) -> None:
        """Check that the forward has had all events.

        Raises:
            ModelError: it has not.
        """
        if self._next != len(self._flow.events):
            raise self._differs("its end")

    @property
    def lacks_input(self) -> bool:
        """Whether the forward has not come to where it receives what crosses the boundary before its stage."""
        return bool(self._events.incoming) and self._next <= self._start

    @property
    def lacks_output(self) -> bool:
        """Whether the forward has not come to where it sends what crosses the boundary after its stage."""
        return bool(self._events.outgoing) and self._next <= self._stop

    def _makes(self, tensor: Tensor) -> bool:
        """Return whether this stage computes the value of a tensor, so that its whole gradient is computed here."""
        return tensor not in self._numbers or self._flow.values[self._numbers[tensor]].event in self._events.numbers

    def _is_next(self, name: str, reads: tuple[int, ...], *, is_call: bool) -> bool:
        if self._next >= len(self._flow.events):
            return False
        event = self._flow.events[self._next]
        return (event.name, event.reads, event.is_call) == (name, reads, is_call)

    def _differs(self, name: str, *, is_of_hook: bool = False) -> ModelError:
        """Return the error that ends a forward which comes to something else than the next event; a hook on the gradients of a module has
        torch pass on views of its inputs and outputs."""
        if is_of_hook:
            return ModelError(
                "pp-hook",
                "a full backward hook is on a module that several stages of the pipeline compute, and needs the gradients of its inputs and "
                "outputs in one place. Use pp=1, or hooks on modules that one stage computes, such as blocks, and a hook on a "
                "tensor (x.register_hook)",
            )
        expected = self._flow.events[self._next].name if self._next < len(self._flow.events) else "its end"
        return ModelError(
            "pp-forward-differs",
            f"the forward ran {name}, and the traced forward ran {expected} at this point, so the tensors between the stages of a pipeline are not known. Use pp=1, or a forward that runs the same modules in the same order in every call, for all samples of one shape",
        )

    def _follow(
        self, name: str, func: Callable[..., Any], tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Carry out the next event, or return stand-ins of its results; calls within it are no events."""
        self._depth += 1
        # Off the stack, where it is on top: torch.compile would trace it.
        is_active = current_function_mode() is self
        try:
            with pop_function_mode_temporarily() if is_active else nullcontext():
                return self._run_call(name, func, tensors, args, kwargs)
        finally:
            self._depth -= 1

    def _run_call(
        self, name: str, func: Callable[..., Any], tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        number, event = self._next, self._flow.events[self._next]
        if number == self._stop:
            crossing = [[self._tensor(value) for value in values] for values in self._events.outgoing]
            self._send([first if not more else flat([first, *more]) for first, *more in crossing])
        if number == self._start and self._events.incoming:
            self._fill()
        self._next += 1
        containers = containers_in((args, kwargs)) if event.is_call else []
        contents = contents_of(containers)
        if number not in self._events.numbers:
            outcome = self._stand_in(event, func, tensors, args, kwargs, containers)
        else:
            outcome = self._apart(event, tensors, func(*args, **kwargs))
        self._number(event, tensors, tensors_made_by(outcome, changes_of(containers, contents)), name)
        return outcome

    def _stand_in(
        self,
        event: Event,
        func: Callable[..., Any],
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        containers: Sequence[Container],
    ) -> Any:
        if event.is_random and not event.is_call:  # so that later draws of the same module have the same numbers
            zeros = tree_map_only(Tensor, self._whole_zeros, (args, kwargs))
            with torch.no_grad():
                func(*zeros[0], **zeros[1])
        results = iter(zip(event.makes, event.given, strict=True))
        stand_ins: dict[int | None, Tensor] = {}

        def stand_in(recorded: Tensor) -> Tensor:
            value, place = next(results)
            if place >= 0:
                return tensors[place]
            if value not in stand_ins:  # one tensor may be returned twice, or be returned and kept in a list
                early = None if value is None else self._early.pop(value, None)
                stand_ins[value] = placeholder(recorded.shape, recorded.dtype, self._device) if early is None else early
            return stand_ins[value]

        outcome = map_tensors(event.outcome, stand_in)
        for change in event.changes:
            change.make(containers, map_tensors(change.items, stand_in))
        return outcome

    def _whole_zeros(self, tensor: Tensor) -> Tensor:
        return (
            torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if tensor in self._numbers else tensor
        )

    def _apart(self, event: Event, tensors: list[Tensor], outcome: Any) -> Any:
        """Return an outcome in which a new value differs from every argument: `x.contiguous()` may return x itself,
        or not."""
        values = iter(event.makes)
        ours = {id(tensor) for tensor in tensors}

        def apart(tensor: Tensor) -> Tensor:
            return tensor.view_as(tensor) if next(values, None) is not None and id(tensor) in ours else tensor

        is_apart = all(
            value is None or id(tensor) not in ours
            for value, tensor in zip(event.makes, tensors_in(outcome), strict=False)
        )
        return outcome if is_apart else map_tensors(outcome, apart)

    def _number(self, event: Event, tensors: list[Tensor], results: Sequence[Tensor], name: str) -> None:
        """Note which values an event's results are, and the arguments that it has written into."""
        for place, value in event.writes:
            self._is(tensors[place], value)
        if len(results) != len(event.makes):
            raise self._differs(f"other results of {name}")
        for tensor, made_value, place in zip(results, event.makes, event.given, strict=True):
            if made_value is not None:
                self._is(tensor, made_value)
            elif tensor not in self._numbers and tensors[place] in self._numbers:
                self._is(tensor, self._numbers[tensors[place]])

    def _is(self, tensor: Tensor, value: int) -> None:
        self._numbers[tensor] = value
        self._tensors[value] = weakref.ref(tensor)
        if value in self._early:  # an event of another stage has written it into what stands for its argument
            self._copy_into(tensor, self._early.pop(value))
        if value in self._outgoing:
            self._kept[value] = tensor

    def _tensor(self, value: int) -> Tensor:
        tensor = self._tensors[value]()
        assert tensor is not None, "what a later event reads is held by the model's code"
        return tensor

    def _fill(self) -> None:
        """Put the tensors that are received into the objects that stood for them."""
        for (value, *more), tensor in zip(self._events.incoming, self._receive(), strict=True):
            stands = self._held(value)
            if more:
                self._fill_items((value, *more), tensor)
            elif stands is None:
                self.received.append(tensor)
            elif value in self._written:  # a leaf of autograd cannot be written into, a copy of it can
                self._copy_into(stands, tensor)
                self.received.append(tensor)
            else:
                stands.data = tensor.detach()
                self.received.append(stands.requires_grad_(tensor.requires_grad))

    def _fill_items(self, values: Sequence[int], message: Tensor) -> None:
        """Put the values of several items, which came as one message, into the objects that stand for them, or will."""
        self.received.append(message)
        shapes = [torch.Size(self._flow.values[value].shape) for value in values]
        with torch.enable_grad():
            parts = [
                part.view(size) for part, size in zip(message.split([s.numel() for s in shapes]), shapes, strict=True)
            ]
            for value, part in zip(values, parts, strict=True):
                if value not in self._tensors:
                    self._early[value] = part.clone() if value in self._written else part
                elif (stands := self._held(value)) is not None:
                    self._copy_into(stands, part)

    def _held(self, value: int) -> Tensor | None:
        """Return the tensor of a value, if the model's code has computed it and holds it."""
        return self._tensors[value]() if value in self._tensors else None

    def _copy_into(self, stands: Tensor, tensor: Tensor) -> None:
        stands.data = torch.empty_like(tensor)
        with torch.enable_grad():  # the boundary may be within the model's `torch.no_grad()`
            stands.copy_(tensor)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of tensors, one tensor after the other, with their graph."""
    with torch.enable_grad() if any(tensor.requires_grad for tensor in tensors) else nullcontext():
        return torch.cat([tensor.flatten() for tensor in tensors])


# -- the flow of a micro-batch ---------------------------------------------------------------------


class Flows:
    """The flow of every shape of samples, recorded on a copy of the model on the meta device in the run's dtypes.

    Blocks are given the slices of one rank of `parts`. `recorded` holds the flows that are known, and is given each new one.
    """

    def __init__(self, traced: TracedModel, step: StepSpec, recorded: dict[Hashable, Flow], parts: int = 1) -> None:
        self._parts, self._traced = parts, traced
        self._value_of = functools.cache(functools.partial(traced.blueprint.materialize, device=torch.device("cpu")))
        self._program = Program(step=step, bodies={})
        self._name = step.model.name
        self._experts = traced.analysis.experts
        self._opened = opened_modules(traced.module, containers_of(traced.module), traced.analysis.stages)
        self._recorded = recorded
        self._dtypes = (step.compute_dtype, step.master_dtype, *(step.working_dtype(p) for p in step.model.params))
        self._is_training = traced.module.training

    @functools.cached_property
    def _module(self) -> nn.Module:
        """The copy; who only asks for flows that are known needs none."""
        step, module = self._program.step, copy_module(self._traced.module)
        for param in step.model.params:
            _put_in_dtype(module, (param.name, *param.aliases), precision.DTYPES[step.working_dtype(param)])
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point() and step.compute_dtype == "float64":
                    part._buffers[name] = buffer.to(torch.float64)
        blueprint = replace(self._traced.blueprint, module=module)
        precision.apply(replace(self._traced, blueprint=blueprint), self._program, torch.device("meta"))
        return module

    def hold(self) -> nn.Module:
        """Return the copy, creating it now: after this a run may cut and fill the model, and ask for more flows."""
        return self._module

    def follow(self, model: nn.Module) -> None:
        """Put the copy into the modes (training or evaluation) of the model."""
        self._is_training = model.training
        theirs = dict(model.named_modules())
        for path, part in self._module.named_modules():
            if path in theirs:  # a loop may have taken it out
                part.training = theirs[path].training

    def known(self, shapes: Hashable) -> Flow | None:
        """Return the flow of samples of these shapes, if it has been recorded."""
        return self._recorded.get(self._key(shapes, with_loss=False))

    def _key(self, shapes: Hashable, *, with_loss: bool) -> Hashable:
        return self._dtypes, self._parts, self._is_training, with_loss, shapes

    def of(self, samples: Any, shapes: Hashable, loss: Callable[[Any, Any], Any] | None = None) -> Flow:
        """Return the flow of samples of these shapes; with `loss`, tensors on which it does not depend take no
        gradient.

        Raises:
            ModelError: the forward cannot be followed.
        """
        key = self._key(shapes, with_loss=loss is not None)
        if key not in self._recorded:
            tracer = ForwardTracer(self._module, {})
            tracer.flow_recorder.norms_any_size = True
            if self._program.step.model.varies_at:  # within blocks, so that any values show the tensors between them
                tracer.values = KnownValues(keeps_all=False, draws=True)
            try:
                checkpointed = record_checkpointed(self._module)  # reentrant ones would hide gradients
                sliced = context.on_meta(self._module, self._program.step.model, samples, self._parts)
                followed = experts.compute_by_groups(self._module, self._experts)
                raised = precision.PreciseForwards(self._program).of_forward()
                with _without_modes(), checkpointed, followed, raised, sliced:
                    outputs = watch_forward(self._module, samples, 1, tracer, self._value_of, self._name, self._opened)
                    if loss is not None and not (tracer.looks.varies or tracer.looks.has_looked):
                        tracer.flow_recorder.take_idle(roots_of_loss(outputs, samples, loss)[0])
            except NeedsValuesError:
                raise ModelError(
                    "pp-forward-differs",
                    f"{self._name} looks at the values of a tensor at {tracer.reached}, so the tensors between the stages of a pipeline are not known. Use pp=1",
                ) from None
            except ModelError as error:
                raise ModelError(
                    "pp-forward-differs",
                    f"the tensors between the stages of a pipeline cannot be recorded on a copy of the model: {error}. Use pp=1, "
                    "or a forward that passes tensors by arguments and results, and none through a hook or another object",
                ) from error
            assert tracer.flow_recorder.flow is not None
            self._recorded[key] = tracer.flow_recorder.flow
        return self._recorded[key]


@contextmanager
def _without_modes() -> Iterator[None]:
    """Suspend the function modes of the run, such as that of dropout, which would act on the copy."""
    with ExitStack() as stack:
        while current_function_mode() is not None:
            stack.enter_context(pop_function_mode_temporarily())
        yield


def _put_in_dtype(module: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
    """Put a weight of a module on the meta device, under all its names, in a dtype."""
    weight = module.get_parameter(names[0])
    if weight.dtype == dtype:
        return
    param = nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, param)
