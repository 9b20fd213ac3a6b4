"""The layout nearest to one that cannot be, or does not fit, among those that can.

Near is what keeps the degrees: doubling one and halving another is two steps away. Of layouts with the same degrees the
one that changes the fewest other words is nearer, and of equals the fastest is named.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import fields

from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.planning import candidates
from samestep.planning.bounds.layer_costs import Prices
from samestep.planning.bounds.least_memory import Needs
from samestep.simulation.prediction import Prediction, memory_of, predict_programs
from samestep.strategies import ProgramBuilder, refusal_of

MOST_ASKED = 3000
"""Layouts of which it is asked whether they can be."""
MOST_PLAYED = 8
"""Tie-break among equally near layouts."""
_DEGREES = (*Layout().inner_degrees, "dp")
_WORDS = tuple(one.name for one in fields(Layout) if one.name not in _DEGREES)


def distance(one: Layout, other: Layout) -> tuple[float, int]:
    """Return by what powers of two the degrees differ in all, and how many other words do."""
    powers = sum(abs(math.log2(getattr(one, name) / getattr(other, name))) for name in _DEGREES)
    return round(powers, 6), sum(getattr(one, name) != getattr(other, name) for name in _WORDS)


def nearest(
    model: ModelSpec, job: Job, hardware: Hardware, layout: Layout, devices: int, states_per_param: int = 2
) -> Prediction | None:
    """Return the nearest layout of so many devices that no strategy refuses and that fits; None where there is none."""
    builder = ProgramBuilder(model, job, job.run.ranks_per_node or hardware.devices_per_node)
    needs = Needs(Prices(model, job, hardware), states_per_param)
    room = hardware.room_bytes - hardware.reserved_bytes
    far = functools.partial(distance, layout)
    tried = (
        one for one in candidates.layouts_of(devices, model, job, thin=hardware) if one.tp <= hardware.devices_per_node
    )
    asked = itertools.islice(sorted(tried, key=far), MOST_ASKED)
    for _, alike in itertools.groupby(asked, key=far):
        steps = (builder.step(one) for one in alike)
        may_be = (step for step in steps if refusal_of(step) is None and needs.need(step).total <= room)
        found = []
        for step in itertools.islice(may_be, MOST_PLAYED):
            programs = builder.programs(step.layout)
            uses = memory_of(programs, hardware, states_per_param)
            if max(use.total for use in uses) <= hardware.room_bytes:
                found.append(predict_programs(programs, model, job, hardware, uses, states_per_param))
        if found:
            return min(found, key=lambda one: one.step_s)
    return None
