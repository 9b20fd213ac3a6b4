"""Gradients that are reduced beside the last backward of a run of layers: how much longer that takes, at least.

The gradients of a layer are reduced from the end of its backward on, on a stream of their own, and what runs there slows
compute by the contention c (`simulation/clock.py`). Layers 1 to n, in the order of their backward, take T_k seconds of compute and E_k
of what compute's own queue sends; their gradients R_k seconds of the stream. Let j be the layer whose gradients the stream
began with when it last had nothing to do. What came before it ran beside compute or beside E, and all compute behind it
is slowed, so that whatever j is the run takes longer by no less than the least over j of

    (1 - 1/c) (R_1 + ... + R_(j-1) - E_1 - ... - E_j)   +   (c - 1) (T_(j+1) + ... + T_n)

Where compute waits within the run, each second beside the stream is one more second of the run, which is more than what it
takes from this. In a bucket that is not full yet some gradients wait for those of later layers: j is then the layer that
fills it, and from the R before it the seconds of one bucket are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Reduced(NamedTuple):
    """The seconds that the last backward of a layer takes: of computing, of sending, and of reducing its gradients."""

    compute_s: float
    sent_s: float
    """Seconds of sending in compute's own queue."""
    reduced_s: float
    """Least seconds that its gradients take of a stream once they are all there."""


def longer_s(layers: Sequence[Reduced], waiting_s: float, contention: float) -> float:
    """Return how much longer the last backward takes beside the reductions of its own layers.

    Args:
        layers: in the order of their backward.
        waiting_s: of the stream, what may wait in a bucket.
        contention: factor by which a collective slows compute beside it.
    """
    slow, slower = 1 - 1 / contention, contention - 1
    behind_s = sum(layer.compute_s for layer in layers)
    sent_s, before_s = 0.0, -waiting_s
    least_s = float("inf")
    for layer in layers:
        behind_s -= layer.compute_s
        sent_s += layer.sent_s
        least_s = min(least_s, slow * max(0.0, before_s - sent_s) + slower * behind_s)
        before_s += layer.reduced_s
    return max(0.0, least_s)
