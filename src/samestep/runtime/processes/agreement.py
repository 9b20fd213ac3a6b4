"""Ranks that are given one job: before they make process groups, they compare what they would run.

A rank whose model was traced otherwise (its code asks for the rank, or draws a number and branches on it), or that was
started with another layout or job, would wait for messages that nobody sends. So would one that kept the groups of a run
which has failed on another rank alone. Ranks of several hosts may have other files of code: those that two ranks have both
imported must be equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from samestep.building.imported import loaded_sources
from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes import mesh
from samestep.runtime.processes.messages import gather_values


def check(spec: ModelSpec, layout: Layout, job: Job, *, several_hosts: bool = False) -> None:
    """Check that all ranks have the same layout, the same numerics and update, and the same traced model, and hosts the same code.

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
        sources = loaded_sources() if several_hosts else {}
        heard = gather_values((mine, mesh.num_forgotten(), sources), layout.world_size)
    mesh.forget_as_often(max(num_forgotten for _, num_forgotten, _ in heard))
    everyone = [theirs for theirs, _, _ in heard]
    for what in mine:
        apart = [rank for rank, theirs in enumerate(everyone) if theirs[what] != everyone[0][what]]
        if not apart:
            continue
        who = f"rank {apart[0]} has" if len(apart) == 1 else f"ranks {', '.join(map(str, apart))} have"
        named = f" ({everyone[apart[0]][what]!r} and {everyone[0][what]!r})" if what == "layout" else ""
        works = ": a forward that runs the same operations on every rank works" if what == "traced model" else ""
        raise LayoutError(f"{who} another {what} than rank 0{named}; ranks of one run need the same one{works}")
    _compare_code([sources for _, _, sources in heard])


def _compare_code(sources: Sequence[Mapping[str, str]]) -> None:
    """Check that a module which several ranks have imported is the same file for all of them.

    Raises:
        LayoutError: it is not.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, digests in enumerate(sources):
        for name, digest in digests.items():
            other, found = first.setdefault(name, (rank, digest))
            if found != digest:
                raise LayoutError(f"rank {rank} has another {name} than rank {other}: the same files on all hosts work")


def _digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
