"""The events of a flow that a stage carries out, and the tensors that cross the boundaries of stages (`tracing/flow.py`).

Most often a stage is a range of events. A forward that takes the items of a batch one by one calls all layers for the first
item before it comes to the second one. Then an event belongs to the layer of its module, or of the latest layer whose values
it reads, and a stage carries out the events of its layers, wherever they are:

```
for item in batch: ...      a1  b1  a2  b2  a3  b3  stack
stage 0                     a1      a2      a3                 sends a1 a2 a3 as one message
stage 1                         b1      b2      b3  stack
```
So the values of one kind pass as one message, as they do where the forward takes a batch of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from samestep.models.layer_parts import Crossing
from samestep.models.layer_spec import LayerSpec
from samestep.program.ops import BYTES_OF
from samestep.tracing.flow import CannotPassError, Event, Flow, Value

Passed = tuple[tuple[int, ...], ...]
"""The values that cross a boundary, by message: one value each, or one for each item."""


@dataclass(frozen=True, slots=True)
class StageEvents:
    """The events of one stage; that after the last one is the end of the forward."""

    numbers: Collection[int]
    incoming: Passed
    outgoing: Passed

    @classmethod
    def of(cls, layers: Sequence[LayerSpec], chunk: range, flow: Flow) -> StageEvents:
        """Return the events of a run of layers.

        Raises:
            CannotPassError: no stage can begin or end there in this flow.
        """
        incoming, outgoing = (passed_before(layers, index, flow) for index in (chunk.start, chunk.stop))
        end, is_last = len(flow.events), chunk.stop == len(layers)
        if not _is_item_by_item(layers, flow):
            start = boundary_before(layers, chunk.start, flow) if chunk.start else 0
            return cls(
                range(start, end + 1 if is_last else boundary_before(layers, chunk.stop, flow)), incoming, outgoing
            )
        places = _layers_of_events(layers, flow)
        numbers = {number for number, place in enumerate(places) if place in chunk}
        return cls(frozenset(numbers | {end} if is_last else numbers), incoming, outgoing)

    @property
    def start(self) -> int:
        """The number of the first event."""
        return min(self.numbers)

    @property
    def stop(self) -> int:
        """The number after that of the last event."""
        return max(self.numbers) + 1


def passed_before(layers: Sequence[LayerSpec], index: int, flow: Flow) -> Passed:
    """Return the values that cross the boundary before a layer; none at the ends of the model.

    Raises:
        CannotPassError: no stage can begin there.
    """
    if index in (0, len(layers)):
        return ()
    if not _is_item_by_item(layers, flow):
        return tuple((value,) for value in flow.crossing(boundary_before(layers, index, flow)))
    places = _layers_of_events(layers, flow)
    end = len(places)
    flow.check_passed(lambda event: event < 0 or (event < end and places[event] < index))
    furthest: dict[int, int] = {}
    for place, event in zip(places, flow.events, strict=True):
        for value in event.reads:
            furthest[value] = max(place, furthest.get(value, 0))
    groups: dict[object, list[int]] = {}
    for number, passed in flow.passed.items():
        is_read = flow.last_reads[number] == end or furthest.get(number, -1) >= index
        if is_read and places[passed.event] < index:
            groups.setdefault((passed.maker, passed.dtype, passed.takes_gradient), []).append(number)
    return tuple(map(tuple, groups.values()))


def boundary_before(layers: Sequence[LayerSpec], index: int, flow: Flow) -> int:
    """Return the event before which a stage begins with a layer.

    Raises:
        CannotPassError: none can.
    """
    begin = beginnings(layers, flow)[index]
    if begin is None:
        raise CannotPassError("the calls of the model's modules are others than in the trace")
    flow.check_passed(lambda event: event < begin)
    return begin


def beginnings(layers: Sequence[LayerSpec], flow: Flow) -> tuple[int | None, ...]:
    """Return the event at which each layer begins, or would if samples pass over it; None after a call that differs from the trace."""
    calls = flow.calls
    begins: list[int | None] = []
    count = 0
    for layer in layers:
        begins.append(calls[count] if layer.calls and count < len(calls) else None)
        names = [flow.events[call].name in layer.called for call in calls[count : count + layer.calls]]
        count += (*names, False).index(False)
    return tuple(None if count < len(calls) and begin == calls[count] else begin for begin in begins)


def _is_item_by_item(layers: Sequence[LayerSpec], flow: Flow) -> bool:
    """Return whether a flow has more calls than that of one item, from which the layers were computed."""
    return len(flow.calls) > sum(layer.calls for layer in layers)


def _layers_of_events(layers: Sequence[LayerSpec], flow: Flow) -> tuple[int, ...]:
    """Return the index of the layer to which each event belongs.

    Raises:
        CannotPassError: a layer needs what a later one has computed, or more than one calls a module.
    """
    of_modules: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for path in layer.called:
            if of_modules.setdefault(path, index) != index:
                raise CannotPassError(f"the forward calls {path} several times for each item of a batch")
    layer_of = {value: 0 for _, value in flow.weights}
    earliest = _earliest_readers(flow, of_modules)
    places: list[int] = []
    called = 0
    for event, first_reader in zip(flow.events, earliest, strict=True):
        latest = max((layer_of[value] for value in event.reads), default=0)
        # A function stays behind the call before it, as it does for one item, unless an earlier layer of the next item needs it.
        place = of_modules.get(event.name, -1) if event.is_call else max(latest, min(called, first_reader))
        called = place if event.is_call else called
        if place < latest:
            raise CannotPassError(f"{event.name} reads a result of a later layer for another item of the batch")
        places.append(place)
        values = (*event.makes, *(value for _, value in event.writes))
        layer_of.update({value: place for value in values if value is not None and value not in layer_of})
    return tuple(places)


def _earliest_readers(flow: Flow, of_modules: Mapping[str, int]) -> list[int]:
    """Return for each event the first layer that needs its results, directly or through functions."""
    needed: dict[int, int] = {}
    readers: list[int] = []
    for event in reversed(flow.events):
        values = (*event.makes, *(value for _, value in event.writes))
        first = min((needed[value] for value in values if value in needed), default=len(of_modules))
        readers.append(first)
        by = of_modules.get(event.name, -1) if event.is_call else first
        for value in event.reads:
            needed[value] = min(by, needed.get(value, by))
    return readers[::-1]


Sized = tuple[Flow, int]
"""The flow of a batch, and its number of samples."""


def with_crossings(
    layers: Sequence[LayerSpec], flow: Flow, model: nn.Module, num_samples: int
) -> tuple[LayerSpec, ...]:
    """Return layers with what crosses the boundary before each block but the first, or why no stage can begin there.

    Crossings stay empty where each block passes on one tensor to the next, as `passes_one_tensor` says. Dtypes are
    taken for the compute dtype.
    """
    if passes_one_tensor(layers, flow, model):
        return tuple(replace(layer, crossings=(), crossing_refusal="") for layer in layers)
    return _add_crossings(layers, (flow, num_samples), None, None)


def with_exact_crossings(
    layers: Sequence[LayerSpec], fewer: Sized, more: Sized, compute: torch.dtype
) -> tuple[LayerSpec, ...]:
    """Return layers with the tensors that cross each boundary, from flows of two numbers of samples in a run's
    dtypes."""
    return _add_crossings(layers, fewer, more, compute)


def with_cut_crossings(layers: Sequence[LayerSpec], flow: Flow, cut: Collection[int]) -> tuple[LayerSpec, ...]:
    """Return layers with the maker of what a tensor cut leaves in parts where it crosses a boundary; `cut` are such values."""
    specs = []
    for layer, begin in zip(layers, beginnings(layers, flow), strict=True):
        crossing = flow.crossing(begin) if begin is not None and layer.is_beginning else ()
        maker = next((flow.values[value].maker for value in crossing if value in cut), "")
        specs.append(replace(layer, cut_crossing=maker))
    return tuple(specs)


def with_slices_of(layers: Sequence[LayerSpec], whole: Flow, sliced: Flow) -> tuple[LayerSpec, ...]:
    """Return layers of which each crossing says whether slices of sequences leave a rank a part of it.

    `whole` and `sliced` are flows of one batch, of whole sequences and of a slice of each.

    Raises:
        CannotPassError: other tensors cross a boundary where sequences are sliced.
    """
    specs = []
    for index, layer in enumerate(layers):
        if layer.crossings:
            of_whole, of_slices = (crossing_values(layers, index, flow) for flow in (whole, sliced))
            if not len(layer.crossings) == len(of_whole) == len(of_slices):
                raise CannotPassError(
                    f"other tensors cross the boundary before {layer.name} where sequences are sliced"
                )
            values = zip(layer.crossings, of_whole, of_slices, strict=True)
            parts = [
                replace(crossing, is_sliced=whole.values[group[0]].shape != sliced.values[other[0]].shape)
                for crossing, group, other in values
            ]
            layer = replace(layer, crossings=tuple(parts))
        specs.append(layer)
    return tuple(specs)


def _add_crossings(
    layers: Sequence[LayerSpec], fewer: Sized, more: Sized | None, compute: torch.dtype | None
) -> tuple[LayerSpec, ...]:
    specs: list[LayerSpec] = []
    for index, layer in enumerate(layers):
        crossings: tuple[Crossing, ...] = ()
        refusal = ""
        if layer.is_beginning and any(spec.is_beginning for spec in specs):
            try:
                crossings = _crossings(layers, index, fewer, more, compute)
            except CannotPassError as reason:
                refusal = str(reason)
        specs.append(replace(layer, crossings=crossings, crossing_refusal=refusal))
    return tuple(specs)


def crossing_values(layers: Sequence[LayerSpec], index: int, flow: Flow) -> Passed:
    """Return the values that cross the boundary before a layer, by message.

    Raises:
        CannotPassError: no stage can begin there.
    """
    values = passed_before(layers, index, flow)
    if not values:
        raise CannotPassError("nothing of the layers before is read there or later")
    return values


def _crossings(
    layers: Sequence[LayerSpec], index: int, fewer: Sized, more: Sized | None, compute: torch.dtype | None
) -> tuple[Crossing, ...]:
    """Describe the tensors that cross the boundary before a layer; a single one is named as the layer before it.

    Raises:
        CannotPassError: no stage can begin there, or what crosses depends on the number of samples.
    """
    previous, (flow, few) = layers[index - 1].name, fewer
    numbers = crossing_values(layers, index, flow)
    values = [flow.values[first] for first, *_ in numbers]
    sizes = [_numel(flow, group) for group in numbers]
    each = [size // few for size in sizes]
    fixed = [size - few * part for size, part in zip(sizes, each, strict=True)]
    if more is not None:
        more_numbers = crossing_values(layers, index, more[0])
        others = [more[0].values[first] for first, *_ in more_numbers]
        if [(o.maker, len(o.shape), o.dtype) for o in others] != [(v.maker, len(v.shape), v.dtype) for v in values]:
            raise CannotPassError("other tensors cross the boundary for another number of samples")
        each = [
            (_numel(more[0], group) - size) // (more[1] - few) for group, size in zip(more_numbers, sizes, strict=True)
        ]
        fixed = [size - few * part for size, part in zip(sizes, each, strict=True)]
    crossings = []
    for number, value in enumerate(values):
        name = previous if len(values) == 1 else f"{previous}+{_word_of(value)}.{number}"
        dtype = "" if compute in (None, value.dtype) else str(value.dtype).removeprefix("torch.")
        if dtype and dtype not in BYTES_OF:
            raise CannotPassError(f"{value.maker} makes a tensor of {dtype}, which is read there or later")
        crossings.append(
            Crossing(
                owner=name, elements=each[number], fixed_elements=fixed[number], dtype=dtype,
                takes_gradient=value.takes_gradient,
            )
        )  # fmt: skip
    return tuple(crossings)


def is_of_maker(crossing: Crossing, value: Value) -> bool:
    """Return whether a value is made by what makes one of several crossings."""
    return crossing.owner.rpartition("+")[2].rpartition(".")[0] == _word_of(value)


def _word_of(value: Value) -> str:
    return value.maker.rpartition(" ")[2]


def _numel(flow: Flow, values: Sequence[int]) -> int:
    return sum(torch.Size(flow.values[value].shape).numel() for value in values)


def passes_one_tensor(
    layers: Sequence[LayerSpec], flow: Flow, model: nn.Module, dtype: torch.dtype | None = None
) -> bool:
    """Return whether embeddings come first, and each block turns the one tensor of the layer before into one tensor.

    Then a stage can let the layers of others return what they are given, if no code but that of modules reads weights, and
    none looks at the shape of what a layer behind the blocks makes. With `dtype`, that tensor must be of it. Where stages
    begin with other layers than blocks, what passes is recorded for each.
    """
    if sum(layer.is_beginning for layer in layers) < 2:
        return True
    if any(layer.begins_stage for layer in layers):
        return False
    blocks = [index for index, layer in enumerate(layers) if layer.is_block]
    if flow.behind or any(flow.last_reads[value] >= 0 for _, value in flow.weights):
        return False
    starts = {path for layer in layers[: blocks[0]] for path in layer.modules}
    between = {path for layer in layers[blocks[0] : blocks[-1] + 1] for path in layer.modules}
    if any(layer.again for layer in layers):  # a stage receives in front of a module's only call, and sends behind it
        return False
    for event in flow.events:
        if event.is_call and event.name in starts and not isinstance(model.get_submodule(event.name), nn.Embedding):
            return False
        if event.is_call and event.name in between and not _keeps_shape(event, flow):
            return False
        if event.is_call and event.name not in starts | between and not _can_be_left_out(event, flow):
            return False
        if event.writes and not event.is_call:  # what stands in for an embedding's output cannot be written into
            return False
    return all(_passes_one(layers, index, flow, dtype) for index in blocks[1:])


def _keeps_shape(event: Event, flow: Flow) -> bool:
    """Return whether a call makes one tensor, as large as its first argument."""
    if event.first is None or not isinstance(event.outcome, Tensor) or event.makes[0] is None or event.changes:
        return False
    first, result = flow.values[event.first], flow.values[event.makes[0]]
    return first.shape == result.shape and first.dtype == result.dtype and result.takes_gradient


def _can_be_left_out(event: Event, flow: Flow) -> bool:
    """Return whether the code after a call would run on the call's first argument too: it returns one tensor, of that
    shape,
    or of another one, such as logits, of which code makes tensors of that other shape alone, element by element."""
    first = event.reads[0] if event.first is None and len(event.reads) == 1 else event.first  # a cast copy of it, say
    if not isinstance(event.outcome, Tensor) or first is None:
        return False
    shape = tuple(event.outcome.shape)
    if shape == flow.values[first].shape:
        return True
    outputs = {value for value in event.makes if value is not None}
    for later in flow.events:
        if outputs.isdisjoint(later.reads):
            continue
        results = {value for value in later.makes if value is not None}
        if later.is_call or any(flow.values[value].shape != shape for value in results):
            return False
        outputs |= results
    return True


def _passes_one(layers: Sequence[LayerSpec], index: int, flow: Flow, dtype: torch.dtype | None) -> bool:
    """Return whether the only tensor that crosses the boundary before a layer goes from one module to the next."""
    try:
        boundary = boundary_before(layers, index, flow)
    except CannotPassError:
        return False
    values = flow.crossing(boundary)
    maker = flow.events[flow.values[values[0]].event] if len(values) == 1 else None
    begins = flow.events[boundary]
    return (
        maker is not None
        and maker.is_call
        and maker.name == layers[index - 1].modules[-1]
        and begins.name == layers[index].modules[0]
        and begins.first == values[0]
        and dtype in (None, flow.values[values[0]].dtype)
    )
