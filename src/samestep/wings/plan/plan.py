"""The verb `plan`: a job and a number of devices in; the layouts that fit out, the fastest first, and why not the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from samestep import calls
from samestep.errors import InputError
from samestep.hardware import Hardware, resolve_hardware
from samestep.job import Job
from samestep.layout import check_number
from samestep.models import catalog
from samestep.models.published import as_published
from samestep.models.spec import ModelSpec
from samestep.program.update_rules import states_per_param
from samestep.wings.plan import other_numerics, search
from samestep.wings.plan.ranking import SAFE
from samestep.wings.plan.search import Plan
from samestep.wings.plan.simulation.accuracy import class_of, intervals
from samestep.wings.plan.simulation.simulate import Prediction

KEPT_FREE = 0.05
"""Part of each device's memory that a plan keeps free: memory in pieces cannot all be given away, and predictions err."""
LESS_SAFE = (0.8, 0.7, 0.6)
"""The probabilities that are looked for where no layout is safe."""
MOST_ROWS = 50
"""Layouts that a plan ranks at most: each of them, and many that might be among them, are played."""


@calls.checked
def plan(
    job: Job,
    devices: int,
    hardware: Hardware | str | Path | None = None,
    *,
    top: int = 5,
    fewest_devices: bool = False,
    keep_free: float = KEPT_FREE,
) -> Plan:
    """Search the fastest layouts of a job that fit; needs no torch for a preset or a model that was traced before.

    Args:
        job: the computation; its global batch stays as it is, and a preset without one has the published batch and bf16.
        devices: the number of devices; each is used.
        hardware: a profile, its name or its file; by default the measured profile of this machine, or cpu-laptop.
        top: the number of layouts to return.
        fewest_devices: plan for the smallest number of devices, at most `devices`, that the job fits on.
        keep_free: the part of each device's memory that no layout may need.

    Raises:
        InputError: the job, its model or the hardware cannot be understood; nothing has been searched.
    """
    if devices < 1:
        raise InputError("value-out-of-range", f"devices={devices}: a plan needs at least 1")
    check_number("devices", devices)
    if not 1 <= top <= MOST_ROWS:
        raise InputError(
            "value-out-of-range", f"the number of layouts to print must be from 1 to {MOST_ROWS}, got {top}"
        )
    if not 0 <= keep_free < 1:
        raise InputError(
            "value-out-of-range", f"keep_free={keep_free:g} is not a part of a device's memory. Use {KEPT_FREE}"
        )
    where = replace(resolve_hardware(hardware), kept_free=keep_free)
    job, _ = as_published(job)
    states, model = states_per_param(job), catalog.model_spec(job)
    searched = search.fewest if fewest_devices else search.plan
    plan = searched(model, job, where, devices, top=top, states_per_param=states)
    if not plan.best:
        return plan
    plan = replace(plan, safe=_safe(plan, model, job, where, states))
    return replace(plan, other_numerics=tuple(other_numerics.savings(plan.best[0], model, job, where, states)))


def _safe(plan: Plan, model: ModelSpec, job: Job, where: Hardware, states: int) -> Prediction | None:
    """Return the fastest layout that fits with a probability of `SAFE`, or with the largest of `LESS_SAFE` that any has.

    None where the layouts that were found are as likely to fit as any other.
    """
    surest = max(prediction.chance_to_fit for prediction in plan.best)
    for chance in (SAFE, *LESS_SAFE):
        if surest >= chance:
            return next(prediction for prediction in plan.best if prediction.chance_to_fit >= chance)
        room_bytes = intervals(class_of(where, plan.devices))["memory"].safe_below(where.memory_bytes, chance)
        roomy = replace(where, kept_free=max(where.kept_free, 1 - room_bytes / where.memory_bytes))
        others = search.plan(model, job, roomy, plan.devices, top=1, states_per_param=states, may_offload=False)
        if others.best:
            return replace(others.best[0], hardware=where)
    return None
