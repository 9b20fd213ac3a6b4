"""The events of a flow that a stage carries out, and the tensors that cross the boundaries of stages (`tracing/flow.py`).

An event belongs to the layer of its call, or a function to the layer of the call before it, and a stage carries out the events of its
layers, which most often stand side by side. A forward that takes the items of a batch one by one calls all layers for the first item
before it comes to the second one. Then a function belongs to the latest layer whose values it reads, or to an earlier one than that of
the call before it, which needs its result for the next item:

```
for item in batch: ...      a1  b1  a2  b2  a3  b3  stack
stage 0                     a1      a2      a3                 sends a1 a2 a3 as one message
stage 1                         b1      b2      b3  stack
```
So the values of one kind pass as one message, as they do where the forward takes a batch of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        places, _ = layers_of_events(layers, flow)
        return cls(frozenset(at for at, place in enumerate(places) if place in chunk), incoming, outgoing)

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
    places, num_known = layers_of_events(layers, flow)
    if index >= num_known:
        raise CannotPassError("the calls of the model's modules are others than in the trace")
    flow.check_passed(lambda event: event < 0 or (event < len(places) and places[event] < index))
    by_items, groups = _is_item_by_item(layers, flow), dict[object, list[int]]()
    for number in _crossing(flow, places, index):
        passed = flow.values[number]
        groups.setdefault((passed.maker, passed.dtype, passed.takes_gradient) if by_items else number, []).append(
            number
        )
    return tuple(map(tuple, groups.values()))


def _crossing(flow: Flow, places: Sequence[int], index: int) -> list[int]:
    """Return the values that are computed before a layer and read by it or later; a weight is held where it is read."""
    furthest = {number: places[-1] + 1 for number, last in enumerate(flow.last_reads) if last == len(flow.events)}
    for place, event in zip(places, flow.events, strict=False):
        furthest.update((value, max(place, furthest.get(value, 0))) for value in event.reads)
    passed = flow.passed.items()
    return [number for number, value in passed if places[value.event] < index <= furthest.get(number, -1)]


def _is_item_by_item(layers: Sequence[LayerSpec], flow: Flow) -> bool:
    """Return whether a flow has more calls than that of one item, from which the layers were computed."""
    return len(flow.calls) > sum(layer.calls for layer in layers)


def _layers_of_calls(layers: Sequence[LayerSpec], flow: Flow) -> tuple[list[int], int]:
    """Return the index of the layer to which each call belongs, and the number of layers up to the first with other calls than in the trace.

    Raises:
        CannotPassError: more than one layer calls a module for each of several items.
    """
    names = [flow.events[call].name for call in flow.calls]
    if _is_item_by_item(layers, flow):
        of_modules: dict[str, int] = {}
        for index, layer in enumerate(layers):
            for path in layer.called:
                if of_modules.setdefault(path, index) != index:
                    raise CannotPassError(f"the forward calls {path} several times for each item of a batch")
        return [of_modules.get(name, -1) for name in names], len(layers)
    places = list[int]()
    for index, layer in enumerate(layers):  # samples may pass over a layer, or over some of its calls
        left = names[len(places) : len(places) + layer.calls]
        places += [index] * [*(name in layer.called for name in left), False].index(False)
    is_known = len(places) == len(names)
    num_known = len(layers) if is_known else places[-1] + 1 if places else 0
    return [*places, *[len(layers) - 1] * (len(names) - len(places))], num_known


def layers_of_events(layers: Sequence[LayerSpec], flow: Flow) -> tuple[list[int], int]:
    """Return the index of the layer to which each event belongs, and the end of the forward; and the number of layers whose calls are known.

    Raises:
        CannotPassError: a layer needs what a later one has computed, or more than one calls a module for each item.
    """
    of_calls, num_known = _layers_of_calls(layers, flow)
    place_of_call = dict(zip(flow.calls, of_calls, strict=True))
    made_by = [(*event.makes, *(value for _, value in event.writes)) for event in flow.events]
    needed, first_readers = dict[int | None, int](), dict[int, int]()
    for number, event in reversed([*enumerate(flow.events)]):
        readers = (needed[value] for value in made_by[number] if value in needed)
        first_readers[number] = min(readers, default=len(layers))
        by = place_of_call.get(number, first_readers[number])
        needed.update((value, min(by, needed.get(value, by))) for value in event.reads)
    layer_of, places, called = dict[int | None, int](), list[int](), 0
    for number, event in enumerate(flow.events):
        latest = max((layer_of.get(value, 0) for value in event.reads), default=0)  # no event makes weights
        called = place_of_call.get(number, called)
        place = called if event.is_call else max(latest, min(called, first_readers[number]))
        if place < latest:
            raise CannotPassError(f"{event.name} reads a result of a later layer for another item of the batch")
        places.append(place)
        layer_of.update((value, place) for value in made_by[number] if value not in layer_of)
    return [*places, len(layers) - 1], num_known


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
    return with_exact_crossings(layers, (flow, num_samples))


def with_cut_crossings(layers: Sequence[LayerSpec], flow: Flow, cut: Collection[int]) -> tuple[LayerSpec, ...]:
    """Return layers with the maker of what a tensor cut leaves in parts where it crosses a boundary; `cut` are such values."""
    specs = []
    try:
        places, num_known = layers_of_events(layers, flow)
    except CannotPassError:  # no stage can begin anywhere
        places, num_known = [], 0
    for index, layer in enumerate(layers):
        crossing = _crossing(flow, places, index) if index < num_known and layer.is_beginning else []
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


def with_exact_crossings(
    layers: Sequence[LayerSpec], fewer: Sized, more: Sized | None = None, compute: torch.dtype | None = None
) -> tuple[LayerSpec, ...]:
    """Return layers with the tensors that cross each boundary, from flows of two numbers of samples in a run's dtypes, or from one flow."""
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
        values = [value for message in passed_before(layers, index, flow) for value in message]
    except CannotPassError:
        return False
    maker = flow.events[flow.values[values[0]].event] if len(values) == 1 else None
    places, _ = layers_of_events(layers, flow)
    begins = next(event for place, event in zip(places, flow.events, strict=False) if place >= index)
    return (
        maker is not None
        and maker.is_call
        and maker.name == layers[index - 1].modules[-1]
        and begins.name == layers[index].modules[0]
        and begins.first == values[0]
        and dtype in (None, flow.values[values[0]].dtype)
    )
