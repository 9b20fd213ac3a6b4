"""The events of a flow that a stage carries out, and the values that pass to it and from it.

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
from dataclasses import dataclass

from samestep.models.layer_spec import LayerSpec
from samestep.tracing.flow import CannotPassError, Flow

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
        mine = {number for number, place in enumerate(places) if place in chunk}
        return cls(frozenset(mine | {end} if is_last else mine), incoming, outgoing)

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
    found: dict[object, list[int]] = {}
    for number, one in flow.passed.items():
        is_read = flow.last_reads[number] == end or furthest.get(number, -1) >= index
        if is_read and places[one.event] < index:
            found.setdefault((one.maker, one.dtype, one.takes_gradient), []).append(number)
    return tuple(map(tuple, found.values()))


def boundary_before(layers: Sequence[LayerSpec], index: int, flow: Flow) -> int:
    """Return the event before which a stage begins with a layer.

    Raises:
        CannotPassError: none can.
    """
    found = beginnings(layers, flow)[index]
    if found is None:
        raise CannotPassError("the calls of the model's modules are others than in the trace")
    flow.check_passed(lambda event: event < found)
    return found


def beginnings(layers: Sequence[LayerSpec], flow: Flow) -> tuple[int | None, ...]:
    """Return the event at which each layer begins; None after a call that differs from the trace."""
    calls = flow.calls
    found: list[int | None] = []
    count, is_known = 0, True
    for layer in layers:
        mine = [flow.events[call].name for call in calls[count : count + layer.calls]]
        is_known = is_known and len(mine) == layer.calls and {*mine} <= {*layer.called}
        found.append(calls[count] if is_known and layer.calls else None)
        count += layer.calls
    return tuple(found)


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
    made = {value: 0 for _, value in flow.weights}
    earliest = _earliest_readers(flow, of_modules)
    found: list[int] = []
    called = 0
    for event, before in zip(flow.events, earliest, strict=True):
        latest = max((made[value] for value in event.reads), default=0)
        # A function stays behind the call before it, as it does for one item, unless an earlier layer of the next item needs it.
        place = of_modules.get(event.name, -1) if event.is_call else max(latest, min(called, before))
        called = place if event.is_call else called
        if place < latest:
            raise CannotPassError(f"{event.name} reads what a later layer has computed for another item of the batch")
        found.append(place)
        values = (*event.makes, *(value for _, value in event.writes))
        made.update({value: place for value in values if value is not None and value not in made})
    return tuple(found)


def _earliest_readers(flow: Flow, of_modules: Mapping[str, int]) -> list[int]:
    """Return for each event the first layer that needs its results, directly or through functions."""
    needed: dict[int, int] = {}
    found: list[int] = []
    for event in reversed(flow.events):
        made = (*event.makes, *(value for _, value in event.writes))
        first = min((needed[value] for value in made if value in needed), default=len(of_modules))
        found.append(first)
        by = of_modules.get(event.name, -1) if event.is_call else first
        for value in event.reads:
            needed[value] = min(by, needed.get(value, by))
    return found[::-1]
