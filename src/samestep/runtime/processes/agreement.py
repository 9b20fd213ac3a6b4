"""Ranks that are given one job: before they make process groups, they compare what they would run.

A rank whose model was traced otherwise (its code asks for the rank, or draws a number and branches on it), or that was
started with another layout or job, would wait for messages that nobody sends. So would one that kept the groups of a run
which has failed on another rank alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes import mesh
from samestep.runtime.processes.messages import gather_values


def check(spec: ModelSpec, layout: Layout, job: Job) -> None:
    """Check that all ranks have the same layout, the same numerics and update, and the same traced model.

    Collective over the world: every rank calls it; if one does not, the others wait until the time limit.

    Raises:
        LayoutError: some rank has another; every rank raises it.
    """
    mine = {
        "layout": str(layout),
        "job": _digest(job.numerics, job.optimizer, job.schedule, job.train.global_batch, job.train.seed),
        "traced model": _digest(spec),
    }
    with outside_step():  # a model is prepared in its first step
        told = gather_values((mine, mesh.num_forgotten()), layout.world_size)
    mesh.forget_as_often(max(num_forgotten for _, num_forgotten in told))
    everyone = [theirs for theirs, _ in told]
    for what in mine:
        apart = [rank for rank, theirs in enumerate(everyone) if theirs[what] != everyone[0][what]]
        if not apart:
            continue
        who = f"rank {apart[0]} has" if len(apart) == 1 else f"ranks {', '.join(map(str, apart))} have"
        named = f" ({everyone[apart[0]][what]!r} and {everyone[0][what]!r})" if what == "layout" else ""
        works = ": a forward that runs the same operations on every rank works" if what == "traced model" else ""
        raise LayoutError(f"{who} another {what} than rank 0{named}; ranks of one run need the same one{works}")


def _digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
