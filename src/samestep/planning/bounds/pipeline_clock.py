"""The clock of a pipeline: the order of all stages played with one time for each body, as a bound of what the clock finds op by op.

A stage runs one body after the other; a forward waits for that of the virtual stage before it, and a backward for that of the next one, each
with the seconds in which its result is sent. So it knows what sums do not: that two neighbours wait for each other's messages in every turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samestep.schedules import Order, TaskKind


class RunSeconds(NamedTuple):
    """Least seconds of the bodies of a run of layers, micro-batch by micro-batch."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weight_s: Sequence[float]
    """Where the schedule splits the backward."""


def play(
    orders: Sequence[Order], runs: Sequence[RunSeconds], sends_s: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    """Return for each run when each micro-batch's gradients are complete, and for each stage when it ends, in seconds from the start.

    Args:
        orders: the actions of each stage.
        runs: the bodies of each run of layers: number i, i + p, ... are those of stage i of p.
        sends_s: seconds of a message between each stage and the next one, of the last to the first.
    """
    stages, last = len(orders), len(runs) - 1
    forwards = [[-1.0] * len(run.forward_s) for run in runs]
    backwards = [[-1.0] * len(run.forward_s) for run in runs]
    complete = [[-1.0] * len(run.forward_s) for run in runs]
    places, ends_s = [0] * stages, [0.0] * stages
    waiting = list(range(stages))
    while waiting:
        for stage in waiting:
            now, order, place = ends_s[stage], orders[stage], places[stage]
            while place < len(order):
                kind, index, chunk = order[place]
                run = chunk * stages + stage
                if kind is TaskKind.FORWARD:
                    if run:
                        arrived_s = forwards[run - 1][index]
                        if arrived_s < 0:
                            break
                        now = max(now, arrived_s + sends_s[stage - 1])
                    forwards[run][index] = now = now + runs[run].forward_s[index]
                elif kind is TaskKind.BACKWARD:
                    if run < last:
                        arrived_s = backwards[run + 1][index]
                        if arrived_s < 0:
                            break
                        now = max(now, arrived_s + sends_s[stage])
                    backwards[run][index] = complete[run][index] = now = now + runs[run].backward_s[index]
                else:
                    complete[run][index] = now = now + runs[run].weight_s[index]
                place += 1
            ends_s[stage], places[stage] = now, place
        waiting = [stage for stage in waiting if places[stage] < len(orders[stage])]
    return complete, ends_s
