"""One forward of a model on the meta device, traced under a list of observers, and the means to run it again.

One observer records masks and random numbers: which module draws them, their shapes, and the dimension of their samples. Another one
refuses a forward that reads weights which its run does not train. A run puts parameters of its own into modules, or the same parameters
with other values, and a variable around a function that holds a parameter itself, or a view of one, has the first values in every step.
So has a global variable that holds a module of another call of the build function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.initial_values import Blueprint
from samestep.building.loss_result import Loss
from samestep.building.named_tensors import cast_batch
from samestep.building.outside_reads import FirstRead
from samestep.building.torch_seams import disable_current_modes
from samestep.datasets import blame_samples
from samestep.datasets.values import first_of
from samestep.errors import ModelError
from samestep.independence import kept_state, tensor_plan
from samestep.independence.samples import Place, RowsOf
from samestep.models.layer_parts import ExpertDispatch
from samestep.models.spec import ExpertModules, MaskSpec, ModelSpec
from samestep.randomness.distributions import DRAWS
from samestep.randomness.masks import MaskSource
from samestep.randomness.mode import IN_ORDER, Draw, DrawKey, DropoutMode, track_modules
from samestep.randomness.replacements import HANDLERS
from samestep.randomness.row_hashes import OF_NO_SAMPLE
from samestep.state import snapshot
from samestep.tracing import experts as experts_module
from samestep.tracing.checkpointed import Checkpointed, record_checkpointed
from samestep.tracing.custom_functions import follow_calls
from samestep.tracing.module_inputs import ForwardCalls
from samestep.tracing.operations import Analysis, Events, Recorder
from samestep.tracing.trace import samples_traced, trace, trace_whole_batch
from samestep.tracing.watched_forward import outputs_on_meta
from samestep.trees import tensors_in, tree_map_only


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on the meta device with its loss, and one real sample that its forward is run on."""

    name: str
    blueprint: Blueprint
    loss: Loss
    example: Any
    sample: Any
    """A batch of the first sample of the example, its floating tensors in the dtype of the weights."""
    keeps_double: bool
    """Whether the forward takes float64 values of a batch as they are."""
    stages: Sequence[str]
    """The modules with which pipeline stages begin, if others than blocks."""
    experts: ExpertModules
    global_batch: int = 1
    """Samples of a step, on which a forward is traced that takes no fewer."""

    @classmethod
    def of(
        cls,
        name: str,
        blueprint: Blueprint,
        loss: Loss,
        example: Any,
        stages: Sequence[str],
        experts: ExpertModules | None = None,
    ) -> BuiltModel:
        """Return a model with the first sample of an example; its experts are looked for unless they are known."""
        module = blueprint.module
        dtype = next((param.dtype for param in module.parameters() if param.is_floating_point()), torch.float32)
        keeps = _keeps_double(module, first_of(example), dtype)
        sample = cast_batch(first_of(example), dtype, keeps_double=keeps)
        return cls(name, blueprint, loss, example, sample, keeps, stages, experts or experts_module.experts_of(module))

    @property
    def module(self) -> nn.Module:
        """The model, on the meta device."""
        return self.blueprint.module

    @property
    def num_samples(self) -> int:
        """Number of copies of the sample in a traced forward."""
        return samples_traced(self.module)

    def value_of(self, name: str) -> Tensor:
        """Return the values of a weight or buffer, on the CPU."""
        return self.blueprint.materialize(name, device=torch.device("cpu"))

    def trace(
        self,
        styles: Mapping[str, str] | None = None,
        analysis: Analysis | None = None,
        *,
        keeps_all: bool = False,
        events: Events | None = None,
    ) -> ModelSpec:
        """Return the spec that one forward gives, with what a tensor plan adds to it; the parameters are those of `tracing.trace`.

        Raises:
            ModelError: the forward fails, or needs values that are not known.
        """
        with blame_samples(self.example):
            return trace(
                self.module, self.sample, self.name, self.value_of, styles, analysis,
                loss=self.loss, stages=self.stages, keeps_all=keeps_all, events=events,
            )  # fmt: skip

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Let a forward of the whole model run once more, from the state that the modules have now.

        At their first forward modules make tables, and install hooks that record their outputs: both are taken back.
        """
        with (
            snapshot.preserve_modules(self.module),
            record_checkpointed(self.module),
            experts_module.compute_by_groups(self.module, self.experts),
        ):
            yield


def _keeps_double(module: nn.Module, sample: Any, dtype: torch.dtype) -> bool:
    """Return whether a forward runs on float64 values of a sample as they are, beside weights of another dtype.

    Torch refuses operations on several floating dtypes unless it promotes them; the meta device computes products of them.
    """
    refused = list[Any]()

    def ran(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        dtypes = {leaf.dtype for leaf in tensors_in((args, kwargs)) if leaf.is_floating_point() and leaf.dim()}
        is_promoted = torch.Tag.pointwise in func.tags or func is torch.ops.aten.copy_.default
        refused.extend([func] if len(dtypes) > 1 and not is_promoted else [])

    if dtype is not torch.float64 and any(leaf.dtype is torch.float64 for leaf in tensors_in(sample)):
        try:
            with snapshot.preserve_modules(module), follow_calls(ran):
                outputs_on_meta(module, sample, 1, None, keeps_all=False)
        except Exception:  # as of a convolution of several dtypes; the trace will raise any other error too
            return False
    return not refused


@dataclass(frozen=True, slots=True)
class TracedForward:
    """A traced forward: the spec that its trace gives, and the records of its observers."""

    spec: ModelSpec
    keeps: bool
    """Whether it has changed the content of modules."""
    masks: MaskRecorder
    dispatches: list[ExpertDispatch]
    expert_calls: dict[str, tuple[Any, Any]]
    checkpointed: Checkpointed
    calls: ForwardCalls
    recorder: Recorder | None
    """None of a forward that was traced without a tensor plan."""


def trace_forward(built: BuiltModel, planned: tensor_plan.Cuts | None) -> TracedForward:
    """Trace one forward of a model under all observers; those of cuts watch it only where there is a tensor plan.

    Raises:
        ModelError: the forward fails, or needs values that are not known.
    """
    state, few = snapshot.Snapshot(built.module), built.num_samples
    try:
        return _trace_forward(built, planned, state)
    except ModelError as error:
        if few >= built.global_batch or error.__cause__ is None:
            raise
        state.restore()
        trace_whole_batch(built.module, built.global_batch)
        with suppress(ModelError):
            return _trace_forward(built, planned, state)
        trace_whole_batch(built.module, few)
        raise
    finally:
        state.restore()


def _trace_forward(built: BuiltModel, planned: tensor_plan.Cuts | None, state: snapshot.Snapshot) -> TracedForward:
    module, expert_calls, events = built.module, dict[str, tuple[Any, Any]](), Events(costs=[])
    with ExitStack() as observers:
        observe = observers.enter_context
        observe(refused_reads(built.blueprint))
        plan = planned or tensor_plan.Cuts()
        recorder = None if planned is None else Recorder(plan.styles, plan.looking)
        masks = observe(MaskRecorder(module, built.num_samples))
        dispatches = observe(experts_module.record_dispatches(module, built.experts, expert_calls, events.places))
        checkpointed = observe(record_checkpointed(module))
        spec = built.trace(plan.styles, recorder, keeps_all=bool(plan.looking), events=events)
    assert events.modules is not None, "it has run"
    checkpointed.entered |= events.places.covered
    keeps = kept_state.has_changed(state, module, events)
    return TracedForward(spec, keeps, masks, dispatches, expert_calls, checkpointed, events.modules, recorder)


class _RecordedError(ModelError):
    """Random numbers have been recorded, and need not be drawn."""


def _on_one_device(arguments: Any) -> Any:
    """Return the arguments of a call, with masks of the host moved to the meta device of the other tensors.

    Whole numbers stay where they are: recurrent layers take the sizes of a packed sequence on the host.
    """
    tensors = tensors_in(arguments)
    if len({tensor.is_meta for tensor in tensors}) < 2:
        return arguments
    of_masks = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta") if tensor.dtype in of_masks else tensor, arguments)


class MaskRecorder(DropoutMode):
    """A mode that records the shape of each draw, and leaves the forward unchanged."""

    def __init__(self, model: nn.Module, num_samples: int, placing: Placing | None = None) -> None:
        track_modules(model)
        super().__init__(model, Draw(0, 0, torch.zeros(num_samples, dtype=torch.int64)))
        self.masks: list[MaskSpec] = []
        self.shapes: dict[DrawKey, tuple[int, ...]] = {}
        """Shape of each draw, for all samples."""
        self.num_samples = num_samples
        self._placing = placing

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        num_recorded = len(self.masks)
        if handler is not None:
            # A step raises its own errors, so none is raised here; nor may a trace of costs see what is only tried here.
            unseen = disable_current_modes() if self._placing is None else nullcontext()
            with suppress(ModelError), unseen, torch.no_grad():
                positional, named = _on_one_device((args, kwargs or {}))
                handler(self, func, *positional, **{**named, **({"inplace": False} if named.get("inplace") else {})})
        outcome = func(*args, **(kwargs or {}))
        if self._placing is not None and func in DRAWS and len(self.masks) > num_recorded:
            index = len(self.masks) - 1
            self._placing.place(
                outcome,
                self.masks[-1].rows,
                lambda rows: operator.setitem(self.masks, index, replace(self.masks[index], rows=rows)),
            )
        return outcome

    def _enter_module(self, name: str) -> None:
        """Begin anew with each forward of the whole model: a trace that needs values runs it again."""
        if not name and len(self._frames) == 1:
            self._entries.clear()
            self.masks.clear()
            self.shapes.clear()
        super()._enter_module(name)

    def drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Record a mask, and return one that has no values."""
        self._record(self._next_draw(), x, shape)
        return torch.empty(shape, dtype=torch.bool, device=x.device)

    drop_elements, drop_weights = MaskSource.drop_elements, MaskSource.drop_weights
    """What asks `drop` for a mask."""

    def hashes(
        self, like: Tensor | None, shape: Sequence[int], device: torch.device, what: str, *, is_shared: bool = False
    ) -> Tensor:
        """Record random numbers; the function that draws them goes on to make them itself."""
        self._record(self._next_numbers(), like, shape)
        raise _RecordedError("numbers-recorded", "the numbers are recorded, and not drawn")

    def _record(self, draw: DrawKey, like: Tensor | None, shape: Sequence[int]) -> None:
        """Record a draw of this shape, which has the sample dimension of the tensor that it is modelled on."""
        self.shapes[draw] = tuple(shape)
        rows: tuple[int, int] | None = IN_ORDER
        if self._placing is not None:
            rows = (OF_NO_SAMPLE, 0) if like is None else self._placing.rows_of(like)
            rows = rows if rows is None or rows[0] < len(shape) else None  # of a mask of channels
            if rows is not None and rows[0] == OF_NO_SAMPLE:
                rows = (self._dim_by_shape(draw), 0)
        dim = 0 if rows is None else rows[0]
        each = tuple(shape)
        if shape and dim != OF_NO_SAMPLE:
            each = (*shape[:dim], shape[dim] // self.num_samples, *shape[dim + 1 :])
        owner, entry, index = draw
        self.masks.append(MaskSpec(owner=owner, entry=entry, draw=index, shape=each, rows=rows))

    def _dim_by_shape(self, draw: DrawKey) -> int:
        """Return the dimension of a draw that grows with the number of samples, if there is one.

        `torch.rand(len(x), 1)` depends on no sample's values, but its shape, beside that for another number, tells.
        """
        fewer, shape = self._placing.fewer if self._placing else self, self.shapes[draw]
        other = fewer.shapes.get(draw, ())
        differs = [dim for dim, (a, b) in enumerate(zip(other, shape, strict=False)) if a != b]
        if len(other) != len(shape) or len(differs) != 1:
            return OF_NO_SAMPLE
        grows = other[differs[0]] * self.num_samples == shape[differs[0]] * fewer.num_samples
        return differs[0] if grows else OF_NO_SAMPLE


@dataclass(frozen=True, slots=True)
class Placing:
    """The places of samples in tensors, as far as a traced forward of several samples knows them."""

    rows_of: RowsOf
    place: Place
    fewer: MaskRecorder
    """The draws of a forward of fewer samples."""


@contextmanager
def refused_reads(plan: Blueprint) -> Iterator[None]:
    """Return the context of traced forwards, which must not read weights of which the run trains a copy.

    Raises:
        ModelError: one has.
    """
    trained = {id(param) for param in plan.module.parameters()}
    weights = ((name, weight()) for name, weight in (*plan.given.items(), *plan.others))
    originals = [
        (name, weight)
        for name, weight in weights
        if weight is not None and weight.requires_grad and id(weight) not in trained
    ]
    if not originals:
        yield
        return
    reads = FirstRead(originals)
    with reads.within(plan.module):
        yield
    if reads.name:
        whose = (
            "a module that another call of the build function has made"
            if reads.name in dict(plan.others)
            else "the model itself"
        )
        raise ModelError(
            "instance-read-elsewhere",
            f"the forward reads {reads.name} of {whose}, from a global variable or an object outside of the model. A run trains the parameters "
            "in the modules, so the forward would see the first values in every step. Use a module that is read from self",
        )
