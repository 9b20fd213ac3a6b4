"""The verb `simulate`: it predicts one step of a job in a layout by playing its programs on a clock."""

from __future__ import annotations

from pathlib import Path

from samestep import calls
from samestep.errors import LayoutError
from samestep.hardware import Hardware, resolve_hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import catalog
from samestep.models.published import as_published
from samestep.program.update_rules import states_per_param
from samestep.simulation.prediction import Prediction, predict


@calls.checked
def simulate(
    job: Job,
    layout: Layout | str | None = None,
    hardware: Hardware | str | Path | None = None,
    *,
    devices: int | None = None,
) -> Prediction:
    """Return the predicted step time and memory of a layout, without torch for a preset or a cached model.

    Args:
        job: the job to compute; a preset without precision or batch has bf16 and its published batch.
        layout: the layout; by default the job's own, and for a job without one `devices` replicas or one device.
        hardware: a profile, its name or its file; by default this machine's measured profile, or cpu-laptop.
        devices: the number of devices, which must equal the number of ranks of a given layout; by default that number.

    Raises:
        InputError: job, model, layout or hardware cannot be understood, or a strategy refuses the layout.
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
    job, _ = as_published(job)
    return predict(catalog.model_spec(job), job, where, resolve_hardware(hardware), states_per_param(job))
