"""Layouts run for a few real steps on this machine, and its hardware profile refitted to the measured step times.

Only two constants are refitted, since a few step times cannot tell more apart: the factor by which the machine computes
slower than its profile (products, memory and launches alike), and the factor by which it sends slower. With factors a and b,

    minimise   sum over layouts of  log^2 (predicted(a, b) / measured)      alternately in a and in b

The result is written to the user's own profile, with a source for every number; shipped profiles stay as they are. Nothing is
written where steps on a busy machine tell nothing:

    spread      root mean square, over layouts, of half the logarithm of the longest over the shortest repeated step
    kept if     the root mean square error falls by more than the spread, and no pair of layouts is ranked wrongly anew

and no factors are tried that leave a machine which cannot exist, as one whose links are faster than its memory.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from samestep import hardware
from samestep.datasets import batches
from samestep.errors import InputError, LayoutError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.output.durable_files import write_whole
from samestep.output.text import align_columns
from samestep.runtime.optimizers.optimizer_source import check_optimizer
from samestep.runtime.processes import join, workers
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.strategies import programs_of
from samestep.training.workload import Workload
from samestep.wings.plan.calibrate import plain
from samestep.wings.plan.simulation import clock

STEPS = 5
"""The number of steps that are timed, after a first one that is not."""
_FACTORS = tuple(tuple(2 ** (power / parts) for power in range(-6, 7)) for parts in (2, 12, 72))
"""The grids of factors that are tried: an eighth to eight times in steps of the square root of 2, then two finer grids."""
_MOST = 8.0
"""The largest factor that a refit may change a figure by, and one over the smallest."""
_LEAST_LATENCY_S = 1e-8
"""The least seconds of a hop or a launch that a profile may hold: some cycles of a processor."""
_COMPUTE = (
    "flops_per_s", "memory_bytes_per_s", "host_update_bytes_per_s", "kernel_s", "kernel_launch_s", "host_step_s", "fsdp_unit_s",
)  # fmt: skip
_LINKS = ("intra", "inter")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The seconds of one layout's step: predicted, measured, and predicted again with the refitted profile."""

    layout: Layout
    predicted_s: float
    """The prediction of the profile before it was refitted."""
    measured_s: float
    """The median of the timed steps."""
    refitted_s: float
    """The prediction of the refitted profile."""

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {**asdict(self), "layout": str(self.layout)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The step times of several layouts on this machine, and the profile that was refitted to them."""

    rows: tuple[StepTime, ...]
    hardware: Hardware
    """The refitted profile, or the one from before where it was kept as it is."""
    path: Path
    """The file of this machine's profile."""
    factors: tuple[float, float]
    """The times that compute and links take, over those of the profile from before."""
    kept: str = ""
    """Why the profile was kept as it is, and nothing was written; empty where it was refitted."""
    busy: str = ""
    """The load of other programs before the measurement, in words; empty if there was little."""

    def to_text(self) -> str:
        """Return a table of predicted and measured seconds, and what was written where, as text."""
        head = ("layout", "predicted s", "measured s", "error", "refitted s", "error")
        cells = [
            (
                str(row.layout), f"{row.predicted_s:.4g}", f"{row.measured_s:.4g}",
                f"{row.predicted_s / row.measured_s - 1:+.0%}", f"{row.refitted_s:.4g}",
                f"{row.refitted_s / row.measured_s - 1:+.0%}",
            )
            for row in self.rows
        ]  # fmt: skip
        if self.kept:
            table = align_columns([head[:4], *(row[:4] for row in cells)])
            return f"{table}\nnot refitted, and nothing written: {self.kept}{self.busy}"
        compute, links = self.factors
        written = (
            f"refitted: {self.path}, in which compute takes {compute:.3g} and links {links:.3g} times as long as before; plan, "
            "simulate and train --layout auto read it, and without the file a shipped profile"
        )
        return f"{align_columns([head, *cells])}\n{written}{self.busy}"


def busy(load: float, cores: int) -> str:
    """Return a line that says how busy a machine was, given its load average and its CPU cores; empty if this process explains it."""
    if load <= 1 + cores / 2:
        return ""
    return f"\nother programs were running: the load was {load:.1f} on {cores} CPU cores. Repeat the measurement without them"


def step_times(job: Job, layouts: Sequence[Layout]) -> StepTimes:
    """Run layouts on this machine, one after the other, and refit its profile to their step times.

    A layout that the job's optimizer does not support is left out.

    Raises:
        InputError: a layout needs more devices than there are, or the job cannot run in any of the layouts.
    """
    device, machine = join.resolve_device(job.run.device), hardware.resolve_hardware(None)
    load = busy(psutil.getloadavg()[0], os.cpu_count() or 1)
    workload = Workload(job)
    taken_s: dict[Layout, list[float]] = {}
    for layout in layouts:
        workload.trace_for(layout)
        try:
            check_optimizer(workload.source.optimizer, workload.spec, layout)
        except LayoutError:
            continue  # the search does not know which layouts an optimizer supports
        taken_s[layout] = workers.run_workers(
            _times,
            (workload, layout),
            ranks=layout.world_size,
            device=device,
            threads=job.run.threads,
            timeout_s=job.run.timeout_s,
            quiet=True,
        )
    if not taken_s:
        raise InputError(
            "nothing-to-measure",
            f"optimizer {job.optimizer.name} supports none of these layouts, so nothing was run. Use a layout that cuts no weights, such as dp=2",
        )

    per_node = job.run.ranks_per_node or machine.devices_per_node
    programs = [programs_of(workload.spec, job, layout, per_node) for layout in taken_s]

    def predicted(candidate: Hardware) -> list[float]:
        return [clock.play(of_stages, candidate).step_s for of_stages in programs]

    before_s = predicted(machine)
    measured_s = {layout: statistics.median(times) for layout, times in taken_s.items()}
    fitted, factors = refit(machine, [*measured_s.values()], predicted)
    after_s = predicted(fitted)
    path, kept = hardware.own_path(), why_not(before_s, after_s, [*taken_s.values()])
    if not kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, as_toml(fitted, machine, factors, ", ".join(f'"{layout}"' for layout in measured_s)))
    rows = zip(measured_s.items(), before_s, before_s if kept else after_s, strict=True)
    return StepTimes(
        rows=tuple(
            StepTime(layout=layout, predicted_s=before, measured_s=taken_s, refitted_s=after)
            for (layout, taken_s), before, after in rows
        ),
        hardware=machine if kept else fitted,
        path=path,
        factors=(1.0, 1.0) if kept else factors,
        kept=kept,
        busy=load,
    )


def why_not(before_s: Sequence[float], after_s: Sequence[float], taken_s: Sequence[Sequence[float]]) -> str:
    """Return why predictions after a refit are no better than those before it, given repeated steps; empty if they are."""
    measured_s = [statistics.median(times) for times in taken_s]
    before, after = _error(before_s, measured_s), _error(after_s, measured_s)
    spread = math.hypot(*(math.log(max(times) / min(times)) / 2 for times in taken_s)) / math.sqrt(len(taken_s))
    if before - after <= spread:
        return (
            f"the error would fall from {before:.0%} to {after:.0%}, and repeated steps differ by {spread:.0%}: longer steps, or "
            "a machine that does nothing else, tell more"
        )
    for first, other in itertools.combinations(range(len(measured_s)), 2):
        is_longer = measured_s[first] > measured_s[other]
        if (before_s[first] > before_s[other]) is is_longer and (after_s[first] > after_s[other]) is not is_longer:
            return "two layouts that are predicted in the right order would be predicted in the wrong one"
    return ""


def _error(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float:
    """Return the root mean square of the logarithms of predicted over measured seconds."""
    logs = [math.log(predicted / other) for predicted, other in zip(predicted_s, measured_s, strict=True)]
    return math.hypot(*logs) / math.sqrt(len(logs))


def _times(place: RankInfo, workload: Workload, layout: Layout) -> list[float]:
    run = Run(workload.source, layout, workload.job, place)
    run.prepare(workload.example)
    times = []
    for batch in batches(workload.dataset, workload.job):
        times.append(run.step(batch).step_s)
        if len(times) > STEPS:
            break
    return times[1:]


def refit(
    machine: Hardware, measured_s: Sequence[float], predicted: Callable[[Hardware], Sequence[float]]
) -> tuple[Hardware, tuple[float, float]]:
    """Return the machine with its compute and its links slower by the two factors that fit best, and the two factors."""
    compute = links = 1.0

    def error(compute: float, links: float) -> float:
        """Return the sum of squared logarithms of predicted over measured seconds."""
        candidate = slower(machine, compute, links)
        if not is_possible(machine, candidate, compute, links):
            return math.inf
        predictions_s = predicted(candidate)
        squares = sum(math.log(a / b) ** 2 for a, b in zip(predictions_s, measured_s, strict=True))
        # A factor without influence, such as that of links on one rank, stays at 1.
        return squares + 1e-9 * (math.log(compute) ** 2 + math.log(links) ** 2)

    for factors in (factors for factors in _FACTORS for _ in range(4)):
        compute = min((compute * factor for factor in factors), key=lambda value: error(value, links))
        links = min((links * factor for factor in factors), key=lambda value: error(compute, value))
    return slower(machine, compute, links), (compute, links)


def is_possible(machine: Hardware, candidate: Hardware, compute: float, links: float) -> bool:
    """Return whether a machine can be what another one is with these factors.

    A figure that is beyond a bound already may not go further beyond it.
    """
    if not all(1 / _MOST <= factor <= _MOST for factor in (compute, links)):
        return False
    pairs = ((machine.intra, candidate.intra), (machine.inter, candidate.inter))
    for initial, after in pairs:
        most = max(candidate.memory_bytes_per_s, initial.bytes_per_s if compute <= 1 else 0.0)
        if after.bytes_per_s > most:
            return False
        if after.latency_s < min(_LEAST_LATENCY_S, initial.latency_s):
            return False
    return candidate.kernel_launch_s >= min(_LEAST_LATENCY_S, machine.kernel_launch_s)


def slower(machine: Hardware, compute: float, links: float) -> Hardware:
    """Return a machine on which compute and links take the given multiples of the time."""
    return replace(
        machine.slowed(compute),
        name=f"{machine.name} {compute:.6g} {links:.6g}",  # a name of its own, since prices are cached by machine
        intra=machine.intra.delayed(transfer=links, collective=links, latency=links),
        inter=machine.inter.delayed(transfer=links, collective=links, latency=links),
    )


def as_toml(fitted: Hardware, machine: Hardware, factors: tuple[float, float], layouts: str) -> str:
    """Return a refitted profile as TOML; the source of a refitted number names the factor, then its former source."""
    table: dict[str, Any] = plain(asdict(fitted))
    del table["name"]
    sources = dict(machine.sources)
    for key in sources:
        first = key.partition(".")[0]
        factor = factors[0] if first in _COMPUTE else factors[1] if first in _LINKS else 1.0
        if factor != 1.0 and not sources[key].startswith("refitted"):
            sources[key] = (
                f"refitted: times {factor:.3g} those of {machine.name}, on steps of {layouts}; before: {sources[key]}"
            )
    return tomli_w.dumps({**table, "sources": sources})
