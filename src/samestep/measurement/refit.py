"""Layouts run for a few real steps, where the machine is at hand: what was predicted against what is.

Two constants are refitted to that, and no more, since a few steps cannot tell more apart: how much slower than its
profile the machine computes (products, memory, launches alike), and how much slower it sends. With a and b those factors,

    minimise   sum over layouts of  log^2 (predicted(a, b) / measured)      by turns in a and in b

and what is found goes into the user's own profile, with its source beside every number; shipped profiles stay as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from samestep import hardware
from samestep.datasets import batches
from samestep.errors import InputError, LayoutError
from samestep.hardware import Hardware, Link
from samestep.job import Job
from samestep.layout import Layout
from samestep.output.output_file import write_whole
from samestep.output.text_table import aligned
from samestep.runtime.optimizer_step import check_optimizer
from samestep.runtime.processes import join, workers
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.simulation import clock
from samestep.strategies import programs_of
from samestep.training.workload import Workload

STEPS = 5
"""That are timed, after one that is not."""
_FACTORS = tuple(tuple(2 ** (power / parts) for power in range(-6, 7)) for parts in (2, 12, 72))
"""Of times, tried one after the other: an eighth to eight times by halves of a doubling, then what is between."""
_COMPUTE = ("flops_per_s", "memory_bytes_per_s", "kernel_s", "kernel_launch_s", "host_step_s")
_LINKS = ("intra", "inter")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one layout's step: predicted with the profile as it was and as it was refitted, and measured."""

    layout: Layout
    predicted_s: float
    measured_s: float
    """Median of the timed steps."""
    refitted_s: float

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {**asdict(self), "layout": str(self.layout)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Step times of several layouts on this machine, and the profile that was refitted to them."""

    rows: tuple[StepTime, ...]
    hardware: Hardware
    path: Path
    """Where the refitted profile was written."""

    def to_text(self) -> str:
        """Write what was predicted beside what was measured, and where the profile lies."""
        head = ("layout", "predicted s", "measured s", "error", "refitted s", "error")
        cells = [
            (
                str(row.layout), f"{row.predicted_s:.4g}", f"{row.measured_s:.4g}",
                f"{row.predicted_s / row.measured_s - 1:+.0%}", f"{row.refitted_s:.4g}",
                f"{row.refitted_s / row.measured_s - 1:+.0%}",
            )
            for row in self.rows
        ]  # fmt: skip
        written = f"refitted: {self.path}; plan, simulate and train --layout auto read it"
        return f"{aligned([head, *cells])}\n{written}"


def step_times(job: Job, layouts: Sequence[Layout]) -> StepTimes:
    """Run layouts on this machine, one after the other, and refit the machine's own profile to their step times.

    A layout that the optimizer cannot follow is left out.

    Raises:
        InputError: a layout needs more devices than there are, or the job cannot run.
    """
    device, machine = join.resolve_device(job.run.device), hardware.resolve_hardware(None)
    workload = Workload(job)
    measured_s: dict[Layout, float] = {}
    for layout in layouts:
        workload.slice(layout)
        try:
            check_optimizer(workload.source.optimizer, workload.spec, layout)
        except LayoutError:
            continue  # the search knows nothing of optimizers that a layout cannot follow
        times = workers.run_workers(
            _times,
            (workload, layout),
            ranks=layout.world_size,
            device=device,
            threads=job.run.threads,
            timeout_s=job.run.timeout_s,
            quiet=True,
        )
        measured_s[layout] = statistics.median(times)
    if not measured_s:
        raise InputError(f"optimizer {job.optimizer.name} can follow none of these layouts: nothing was run")

    per_node = job.run.ranks_per_node or machine.devices_per_node
    programs = [programs_of(workload.spec, job, layout, per_node) for layout in measured_s]

    def predicted(candidate: Hardware) -> list[float]:
        return [clock.play(of_stages, candidate).step_s for of_stages in programs]

    before_s = predicted(machine)
    fitted, factors = refit(machine, [*measured_s.values()], predicted)
    path = hardware.own_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, as_toml(fitted, machine, factors, ", ".join(f'"{layout}"' for layout in measured_s)))
    rows = zip(measured_s.items(), before_s, predicted(fitted), strict=True)
    return StepTimes(
        rows=tuple(
            StepTime(layout=layout, predicted_s=before, measured_s=taken_s, refitted_s=after)
            for (layout, taken_s), before, after in rows
        ),
        hardware=fitted,
        path=path,
    )


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
    """Return the machine with compute and links slower by the two factors that fit best, and the factors."""
    compute = links = 1.0

    def error(compute: float, links: float) -> float:
        said = predicted(slower(machine, compute, links))
        misses = sum(math.log(a / b) ** 2 for a, b in zip(said, measured_s, strict=True))
        # Where nothing tells a factor, as that of links for one rank, it stays.
        return misses + 1e-9 * (math.log(compute) ** 2 + math.log(links) ** 2)

    for factors in (factors for factors in _FACTORS for _ in range(4)):
        compute = min((compute * factor for factor in factors), key=lambda value: error(value, links))
        links = min((links * factor for factor in factors), key=lambda value: error(compute, value))
    return slower(machine, compute, links), (compute, links)


def slower(machine: Hardware, compute: float, links: float) -> Hardware:
    """Return a machine on which compute and sending take so many times as long."""

    def link(one: Link) -> Link:
        return replace(
            one,
            latency_s=one.latency_s * links,
            collective_s=one.collective_s * links,
            bytes_per_s=one.bytes_per_s / links,
            all_reduce_bytes_per_s=one.all_reduce_bytes_per_s and one.all_reduce_bytes_per_s / links,
            by_ranks={ranks: rate / links for ranks, rate in one.by_ranks.items()},
        )

    return replace(
        machine,
        name=f"{machine.name} {compute:.6g} {links:.6g}",  # prices are remembered by the machine
        flops_per_s={dtype: rate / compute for dtype, rate in machine.flops_per_s.items()},
        memory_bytes_per_s=machine.memory_bytes_per_s / compute,
        kernel_s=machine.kernel_s * compute,
        kernel_launch_s=machine.kernel_launch_s * compute,
        host_step_s=machine.host_step_s * compute,
        intra=link(machine.intra),
        inter=link(machine.inter),
    )


def as_toml(fitted: Hardware, machine: Hardware, factors: tuple[float, float], layouts: str) -> str:
    """Write a profile; what was refitted says so before where it came from."""
    table: dict[str, Any] = _plain(asdict(fitted))
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


def _plain(value: Any) -> Any:
    """Leave out what is not set: TOML has no word for it."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items() if one is not None and one != {}}
    return value
