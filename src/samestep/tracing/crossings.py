"""The tensors that cross the boundary before each block, by the flow of a forward (`tracing/flow.py`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from samestep.models.layer_parts import Crossing
from samestep.models.layer_spec import LayerSpec
from samestep.program.ops import BYTES_OF
from samestep.tracing.flow import CannotPassError, Event, Flow
from samestep.tracing.stage_events import Passed, beginnings, boundary_before, passed_before

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
    layers: Sequence[LayerSpec], one: Sized, more: Sized, compute: torch.dtype
) -> tuple[LayerSpec, ...]:
    """Return layers with the tensors that cross each boundary, from flows of two numbers of samples in a run's
    dtypes."""
    return _add_crossings(layers, one, more, compute)


def with_cut_crossings(layers: Sequence[LayerSpec], flow: Flow, cut: Collection[int]) -> tuple[LayerSpec, ...]:
    """Return layers with the maker of what a tensor cut leaves in parts where it crosses a boundary; `cut` are such values."""
    found = []
    for layer, begin in zip(layers, beginnings(layers, flow), strict=True):
        crossing = flow.crossing(begin) if begin is not None and layer.is_beginning else ()
        maker = next((flow.values[value].maker for value in crossing if value in cut), "")
        found.append(replace(layer, cut_crossing=maker))
    return tuple(found)


def with_slices_of(layers: Sequence[LayerSpec], whole: Flow, sliced: Flow) -> tuple[LayerSpec, ...]:
    """Return layers of which each crossing says whether slices of sequences leave a rank a part of it.

    `whole` and `sliced` are flows of one batch, of whole sequences and of a slice of each.

    Raises:
        CannotPassError: other tensors cross a boundary where sequences are sliced.
    """
    found = []
    for index, layer in enumerate(layers):
        if layer.crossings:
            of_whole, of_slices = (crossing_values(layers, index, flow) for flow in (whole, sliced))
            if not len(layer.crossings) == len(of_whole) == len(of_slices):
                raise CannotPassError(
                    f"other tensors cross the boundary before {layer.name} where sequences are sliced"
                )
            values = zip(layer.crossings, of_whole, of_slices, strict=True)
            parts = [
                replace(crossing, is_sliced=whole.values[one[0]].shape != sliced.values[other[0]].shape)
                for crossing, one, other in values
            ]
            layer = replace(layer, crossings=tuple(parts))
        found.append(layer)
    return tuple(found)


def _add_crossings(
    layers: Sequence[LayerSpec], one: Sized, more: Sized | None, compute: torch.dtype | None
) -> tuple[LayerSpec, ...]:
    found: list[LayerSpec] = []
    for index, layer in enumerate(layers):
        crossings: tuple[Crossing, ...] = ()
        refusal = ""
        if layer.is_beginning and any(before.is_beginning for before in found):
            try:
                crossings = _crossings(layers, index, one, more, compute)
            except CannotPassError as reason:
                refusal = str(reason)
        found.append(replace(layer, crossings=crossings, crossing_refusal=refusal))
    return tuple(found)


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
    layers: Sequence[LayerSpec], index: int, one: Sized, more: Sized | None, compute: torch.dtype | None
) -> tuple[Crossing, ...]:
    """Describe the tensors that cross the boundary before a layer; a single one is named as the layer before it.

    Raises:
        CannotPassError: no stage can begin there, or what crosses depends on the number of samples.
    """
    before, (flow, few) = layers[index - 1].name, one
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
    found = []
    for number, value in enumerate(values):
        name = before if len(values) == 1 else f"{before}+{value.maker.rpartition(' ')[2]}.{number}"
        dtype = "" if compute in (None, value.dtype) else str(value.dtype).removeprefix("torch.")
        if dtype and dtype not in BYTES_OF:
            raise CannotPassError(f"{value.maker} makes a tensor of {dtype}, which is read there or later")
        found.append(
            Crossing(
                owner=name, elements=each[number], fixed_elements=fixed[number], dtype=dtype,
                takes_gradient=value.takes_gradient,
            )
        )  # fmt: skip
    return tuple(found)


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
    given, made = flow.values[event.first], flow.values[event.makes[0]]
    return given.shape == made.shape and given.dtype == made.dtype and made.takes_gradient


def _can_be_left_out(event: Event, flow: Flow) -> bool:
    """Return whether the code after a call would run on the call's first argument too: it returns one tensor, of that
    shape,
    or of another one, such as logits, of which code makes tensors of that other shape alone, element by element."""
    given = event.reads[0] if event.first is None and len(event.reads) == 1 else event.first  # a cast copy of it, say
    if not isinstance(event.outcome, Tensor) or given is None:
        return False
    shape = tuple(event.outcome.shape)
    if shape == flow.values[given].shape:
        return True
    made = {value for value in event.makes if value is not None}
    for later in flow.events:
        if made.isdisjoint(later.reads):
            continue
        results = {value for value in later.makes if value is not None}
        if later.is_call or any(flow.values[value].shape != shape for value in results):
            return False
        made |= results
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
