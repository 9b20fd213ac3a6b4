"""Each rank's part of tensors: a copy of its elements, with their places in the whole tensor.

A cut tensor is recorded with the place of each of its elements, so that a comparison need not know how it was cut.
Replicas that are trained independently have different weights, gradients and states, each recorded as `NAME of replica N`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from samestep.runtime.checkpoints.other_state import runs_elsewhere
from samestep.runtime.run import Run
from samestep.runtime.weights import placement
from samestep.runtime.weights.pieces import Piece


@dataclass(slots=True)
class HeldTensor:
    """The part of one tensor that a rank holds: its elements, and their places in the flattened whole tensor."""

    name: str
    values: Tensor
    places: Tensor | range
    """The index of each element in the flattened whole tensor; -1 for padding."""

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for parts with the same elements of the same tensor."""
        if isinstance(self.places, range):
            return (self.name, self.places.start, self.places.stop)
        return (self.name, xxhash.xxh3_64_intdigest(self.places.numpy().tobytes()))


def suffix_of(run: Run) -> str:
    """Return the suffix of weights' names in the records of a rank; it is empty where all ranks train one model."""
    return of_replica(run.held.index) if run.held.is_apart else ""


def held_gradients(run: Run) -> list[HeldTensor]:
    """Return a copy of the gradients of the last step, or of the averaged moves where an exchange has overwritten
    them."""
    whose = "" if run.held.has_exchanged else suffix_of(run)
    return _copy_to_host((f"{p.name}{whose}", p.gradient(), places_of(run, p)) for p in run.held.pieces)


def held_weights(run: Run) -> list[HeldTensor]:
    """Return a copy of the weights that this rank updates, as the forward uses them, and of the outer ones, if there are."""
    whose, pieces = suffix_of(run), run.held.pieces
    weights = [(f"{piece.name}{whose}", piece.master(), places_of(run, piece)) for piece in pieces]
    if run.held.is_apart:
        weights += [(p.name, run.held.value_of(index), places_of(run, p)) for index, p in enumerate(pieces)]
    return _copy_to_host(weights)


def held_state(run: Run) -> list[HeldTensor]:
    """Return a copy of the optimizer's state: tensors shaped like their weights, and others, such as a number of steps."""
    states: list[tuple[str, Tensor, Tensor | range]] = []
    if run.updater.optimizer is None:
        return []
    whose, updater = suffix_of(run), run.assembly.weights.updater
    for piece in updater.pieces:
        for key, value in updater.state_of(piece).items():
            name = f"{piece.name}{whose}/{key}"
            if isinstance(value, Tensor) and value.shape == piece.value.shape:
                states.append((name, value, places_of(run, piece)))
            elif isinstance(value, Tensor | int | float):
                number = torch.as_tensor(value)  # or the state of a whole weight, such as a number a row
                states.append((name, number, range(number.numel())))
    return _copy_to_host(states)


def held_buffers(run: Run) -> list[HeldTensor]:
    """Return a copy of the buffers of the layers that this rank runs."""
    return _copy_to_host(
        (name, buffer, range(buffer.numel()))
        for name, buffer in run.model.named_buffers()
        if not runs_elsewhere(run.program, name)
    )


def _copy_to_host(rows: Iterable[tuple[str, Tensor, Tensor | range]]) -> list[HeldTensor]:
    """Copy tensors to the CPU, all of one dtype into one storage: thousands of small tensors would be slow to write and read."""
    names, tensors, places = zip(*rows, strict=True) if (rows := list(rows)) else ((), (), ())
    flat = [tensor.detach().flatten().cpu() for tensor in tensors]
    copies = list(flat)
    for dtype in {tensor.dtype for tensor in flat}:
        members = [index for index, tensor in enumerate(flat) if tensor.dtype == dtype]
        parts = torch.split(torch.cat([flat[index] for index in members]), [flat[index].numel() for index in members])
        for index, part in zip(members, parts, strict=True):
            copies[index] = part
    return [HeldTensor(*fields) for fields in zip(names, copies, places, strict=True)]


def places_of(run: Run, piece: Piece) -> Tensor | range:
    """Return the indices of a piece's elements in the flattened whole weight."""
    lies = run.assembly.weights.placements.slice_of(piece)
    if lies == placement.whole(lies.shape):
        return range(piece.start, piece.stop)
    return lies.runs(piece.start, piece.stop).positions()


def copy_whole(tensors: Mapping[str, Tensor]) -> list[HeldTensor]:
    """Return a copy of whole tensors."""
    return [
        HeldTensor(name, tensor.detach().flatten().cpu().clone(), range(tensor.numel()))
        for name, tensor in tensors.items()
    ]


def of_replica(number: int) -> str:
    """Return the suffix of weights' names in the record of an independently trained replica."""
    return f" of replica {number}"
