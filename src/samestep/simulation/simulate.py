"""The verb `simulate`: a job and a layout in, the step played on a clock out."""

from __future__ import annotations

from pathlib import Path

from samestep.errors import LayoutError
from samestep.hardware import Hardware, resolve_hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import catalog
from samestep.simulation.memory import states_per_param
from samestep.simulation.prediction import Prediction, predict


def simulate(
    job: Job,
    layout: Layout | str | None = None,
    hardware: Hardware | str | Path | None = None,
    *,
    devices: int | None = None,
) -> Prediction:
    """Predict step time and memory of a layout; needs no torch for a preset or a model that was traced before.

    Args:
        job: what is computed.
        layout: where; without it the job's own, and without that replicas over `devices`, or one device.
        hardware: on what: a profile, its name or its file; without it what was measured here, or cpu-laptop.
        devices: how many there are, which must be as many as a given layout has ranks.

    Raises:
        InputError: the job, its model, the layout or the hardware cannot be understood, or a strategy refuses the layout.
    """
    given = Layout.parse(layout) if isinstance(layout, str) else layout
    where = Layout.of(job.layout) if given is None else given
    if devices not in (None, where.world_size):
        if given is not None or job.layout:
            raise LayoutError(
                f"--devices {devices}, but layout {str(where)!r} has {where.world_size} ranks: "
                "leave --devices out, or let the degrees multiply to it"
            )
        where = Layout(dp_replicate=devices)
    return predict(catalog.model_spec(job), job, where, resolve_hardware(hardware), states_per_param(job))
