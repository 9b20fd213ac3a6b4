"""What a stage sends over the data axes, in seconds: of a kind of layer, of the gradients of a run of layers, and of all of it."""

from __future__ import annotations

from typing import NamedTuple


class Reductions(NamedTuple):
    """The reductions of the gradients of a run of layers: when they can start, and how long they take."""

    behind_s: float
    """Seconds from the start of the run's last backward until its first gradients are whole."""
    streams_s: tuple[float, ...]
    """Seconds that they take of each stream."""


class Sending(NamedTuple):
    """Seconds that a stage sends over data axes."""

    first_s: float = 0.0
    """Before its first forward."""
    reduced_s: float = 0.0
    """From when the first gradients are whole."""
    behind_s: float = 0.0
    """Behind its last backward."""
    all_s: float = 0.0
    """In all, over one axis, or with all that it computes."""
    update_s: float = 0.0
    """The update, and what is gathered behind it."""
    left_s: float = 0.0
    """What is computed from when the first gradients are whole."""
    exposed_s: float = 0.0
    """The part of it that is sent in the queue of compute."""
    of_runs: tuple[Reductions, ...] = ()
    beside_s: float = 0.0
    """The part of `reduced_s` that is issued between the last backwards: the clock lets it slow those behind it."""


class LayerTraffic(NamedTuple):
    """The communication of layers of a kind over an axis along which they are cut: seconds of one layer."""

    kind: int
    number: int
    gather_s: float
    scatter_s: float
    reads: bool
    """Their backward reads the weights, so that they are gathered for it."""
