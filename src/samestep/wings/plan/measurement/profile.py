"""The verb `measure`: the hardware profile of the machine it runs on, in a minute or two, every number with its source.

`microbenchmarks.py` measures on all devices at once; this file turns the figures into a profile.

    flops_per_s  the best rate of the products of a dtype; all rates are listed in its source
    intra        T = c + w (n-1) (a + S/(nB)) for a collective of S bytes on n ranks, with w = 2 passes round the ring for
                 all_reduce and 1 for all_gather; c, a and B minimise the sum of relative deviations, which a few
                 disturbed measurements do not move
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import tomli_w
import torch

from samestep import calls, hardware
from samestep.datasets import batches
from samestep.errors import InputError, LayoutError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout, layout_from
from samestep.output.durable_files import check_writable, write_whole
from samestep.output.text import readable
from samestep.program.program import Program
from samestep.runtime.optimizers.optimizer_source import check_optimizer
from samestep.runtime.processes import join, workers
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.strategies import programs_of
from samestep.training.workload import Workload
from samestep.wings.plan.calibrate import Calibration, calibrated, fit_of
from samestep.wings.plan.measured_steps import TimedStep
from samestep.wings.plan.measurement import microbenchmarks
from samestep.wings.plan.measurement.microbenchmarks import Device, Figures
from samestep.wings.plan.simulation.cost import ATTENTION_REACHED
from samestep.wings.plan.simulation.kernel_rates import unit_over

STEPS = 5
"""The number of steps of a layout that are timed, after a first one that is not."""
_MOST_RANKS = 8  # ranks on a CPU: more would share the memory that they measure
_OVERLAPS_BELOW = 0.75  # of the sum of two equal times; 0.5 would hide one of them completely


@calls.checked
def benchmark_hardware(*, out: str | Path | None = None, ranks: int | None = None, device: str = "auto") -> Hardware:
    """Measure the compute, memory and links of this machine, and write its hardware profile.

    Args:
        out: a TOML file for the profile; by default the user's own, `hardware.own_path()`, where `plan` looks for it.
        ranks: the number of devices that measure at once; by default all GPUs, or one rank a core and at least two.
        device: `cpu`, `cuda` or `auto`.

    Raises:
        InputError: the file cannot be written; nothing has been measured.
    """
    path = Path(out) if out is not None else hardware.own_path()
    if out is None:
        _make_folder(path)
    check_writable(path)
    count = _default_ranks(device) if ranks is None else ranks
    device_found, figures = workers.run_workers(_measure_rank, ranks=count, device=device, quiet=True)
    write_whole(path, as_toml(device_found, figures, count))
    return hardware.load(path)


@calls.checked
def benchmark_layouts(job: Job, layouts: Iterable[Layout | str]) -> Calibration:
    """Run each layout for a few steps on this machine, and refit its hardware profile to the measured times, as `calibrate` does.

    Layouts that the optimizer of the job does not support are left out. The result has the predicted and measured seconds of each layout, and
    the refitted profile.

    Raises:
        InputError: the job cannot run, or no layout is given; nothing has been measured.
    """
    chosen = [*map(layout_from, layouts)]
    if not chosen:
        raise InputError("command-options", "benchmark_layouts needs a layout to run, such as layouts=['dp=2', 'tp=2']")
    device, machine = join.resolve_device(job.run.device), hardware.resolve_hardware(None)
    workload, load = Workload(job), busy()
    steps, programs = list[TimedStep](), list[tuple[Program, ...]]()
    for layout in chosen:
        workload.trace_for(layout)
        try:
            check_optimizer(workload.source.optimizer, workload.spec, layout)
        except LayoutError:
            continue  # the search does not know which layouts an optimizer supports
        times = workers.run_workers(
            _times,
            (workload, layout),
            ranks=layout.world_size,
            device=device,
            threads=job.run.threads,
            timeout_s=job.run.timeout_s,
            quiet=True,
        )
        step_s = statistics.median(times)
        steps.append(TimedStep(origin=f"{STEPS} steps", job=job, model=workload.spec, layout=layout, step_s=step_s))
        per_node = job.run.ranks_per_node or machine.devices_per_node
        programs.append(programs_of(workload.spec, job, layout, per_node))
    if not steps:
        raise InputError(
            "nothing-to-measure",
            f"optimizer {job.optimizer.name} supports none of these layouts, so nothing was run. Use a layout that cuts no weights, such as dp=2",
        )
    return calibrated(steps, fit_of(steps, programs, machine), machine, hardware.own_path(), load)


def busy() -> list[str]:
    """Return a line on the load of other programs, which slow a measurement down; none if this process explains the load."""
    load, cores = psutil.getloadavg()[0], os.cpu_count() or 1
    if load <= 1 + cores / 2:
        return []
    return [
        f"other programs were running: the load was {load:.1f} on {cores} CPU cores. Repeat the measurement without them"
    ]


def _times(place: RankInfo, workload: Workload, layout: Layout) -> list[float]:
    """Return the seconds of a few steps, without the first one."""
    run = Run(workload.source, layout, workload.job, place)
    run.prepare(workload.example)
    steps = itertools.islice(batches(workload.dataset, workload.job), STEPS + 1)
    return [run.step(batch).step_s for batch in steps][1:]


def as_text(machine: Hardware) -> str:
    """Return the most important numbers of a measured profile as text."""
    rates = ", ".join(f"{dtype} {rate / 1e9:.4g}" for dtype, rate in machine.flops_per_s.items())
    count, link = machine.devices_per_node, machine.intra
    links = "no link measured: one device sends nothing, so the links in the profile are assumed"
    if count > 1:
        links = (
            f"link {link.bytes_per_s / 1e9:.4g} GB/s, {link.latency_s * 1e6:.4g} us a hop, "
            f"{link.collective_s * 1e6:.4g} us a call"
        )
    return (
        f"{count} device{'s' * (count > 1)} of {readable(machine.memory_bytes)}; GFLOP/s: {rates}\n"
        f"memory {machine.memory_bytes_per_s / 1e9:.4g} GB/s, launch {machine.kernel_launch_s * 1e6:.3g} us, {links}"
    )


def _default_ranks(device: str) -> int:
    if device != "cpu" and torch.cuda.device_count():
        return torch.cuda.device_count()
    return max(2, min(os.cpu_count() or 1, _MOST_RANKS))


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("output-unwritable", f"{path} cannot be written: {error.strerror}") from None


def _measure_rank(place: RankInfo) -> tuple[Device, Figures]:
    return microbenchmarks.device_of(place), microbenchmarks.measure_figures(place)


def _attention_unit(device: Device) -> float:
    """Return the rate of attention that a profile gives, over the one that is measured."""
    heads = microbenchmarks.ATTENDED_HEADS
    return unit_over(microbenchmarks.ATTENDED_WIDTH, microbenchmarks.ATTENDED_TOKENS, heads, device.num_units)


def as_toml(device: Device, figures: Figures, ranks: int) -> str:
    """Return the profile of the figures as TOML, with a source for every number."""
    best = {name: max(rates.values()) for name, rates in figures.products.items()}
    on_gpu = device.num_units > 0
    table, sources = _machine(device, figures, ranks)
    table["overlap"], sources["overlap"] = _overlap(figures)
    table["flops_per_s"] = {name: _round_digits(rate) for name, rate in best.items()}
    for name, rates in figures.products.items():
        curve = ", ".join(f"{edge}^3 {rate:.3g}" for edge, rate in rates.items())
        sources[f"flops_per_s.{name}"] = f"measured: FLOP/s of products {curve}; the best"
    part = figures.attention_flops_per_s / best["bfloat16" if on_gpu else "float32"]
    attention = _round_digits(min(1.0, part * _attention_unit(device) if on_gpu else part / ATTENTION_REACHED))
    if on_gpu:
        table["efficiency"] = dict.fromkeys(best, 1.0) | {"attention": attention}
        sources |= {
            f"efficiency.{name}": "measured: the peak given here is the rate of the best matmul" for name in best
        }
        sources["efficiency.attention"] = (
            "measured: causal, 16 heads of 128, 4,096 tokens, forward; as it is for longer ones without a mask, and backward"
        )
    else:
        table["efficiency"] = {"attention": attention}
        table["efficiency_by_shortest_side"] = {name: _sides(rates) for name, rates in figures.products.items()}
        sources |= dict.fromkeys(
            (f"efficiency_by_shortest_side.{name}" for name in best), "measured: the products above, beside the best"
        )
        sources["efficiency.attention"] = "measured: causal, 4 heads of 32, 128 tokens, forward and backward"
    table["intra"], about = _intra(figures, ranks)
    sources |= {f"intra.{key}": text for key, text in about.items()}
    table["inter"] = {"latency_s": max(table["intra"]["latency_s"], 20e-6), "bytes_per_s": 0.125e9}
    sources["inter.latency_s"] = "assumed: no less than inside the machine, and 20 us"
    sources["inter.bytes_per_s"] = "assumed: gigabit Ethernet; write the rate of your network here"
    return tomli_w.dumps({**table, "sources": sources})


def _machine(device: Device, figures: Figures, ranks: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures of the memory, the host and the launch of kernels, and their sources."""
    on_gpu = device.num_units > 0
    table: dict[str, Any] = {
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": _round_digits(figures.copied_bytes_per_s),
        "devices_per_node": ranks,
        "kernel_launch_s": _round_digits(figures.kernel_launch_s),
        "library": "nccl" if on_gpu else "gloo",
    }
    sources = {
        "memory_bytes": f"measured: {device.name}" if on_gpu else f"measured: the machine's by {ranks}",
        "memory_bytes_per_s": "measured: copy of a large buffer, bytes read and written, all devices at once",
        "devices_per_node": f"measured: {ranks} devices of this machine",
        "kernel_launch_s": f"measured: {microbenchmarks.TINY} operations on one element, one after the other",
        "library": f"measured: torch.distributed's on {'GPUs' if on_gpu else 'CPUs'}",
    }
    if on_gpu:
        table |= {"num_units": device.num_units, "kernel_s": _round_digits(figures.kernel_s)}
        sources["num_units"] = f"measured: from the driver, of {device.name}"
        sources["kernel_s"] = "measured: kernels on one element after a long matmul"
    else:
        elementwise = min(1.0, figures.elementwise_bytes_per_s / figures.copied_bytes_per_s)
        table |= {
            "kernel_s": _round_digits(figures.kernel_s),
            "host_step_s": _round_digits(figures.host_step_s),
            "memory_efficiency": _round_digits(elementwise),
        }
        sources["memory_efficiency"] = "measured: activation, softmax and norm of one MiB, bytes read and written"
        sources["kernel_s"] = (
            f"measured: operations of two blocks of width {microbenchmarks.WIDTH} on a few tokens, forward and backward"
        )
        sources["host_step_s"] = f"measured: AdamW and the norm of {microbenchmarks.SMALL} small gradients"
        if ranks > 1:
            table["fsdp_unit_s"] = _round_digits(figures.fsdp_unit_s)
            sources["fsdp_unit_s"] = (
                f"measured: {microbenchmarks.UNITS} blocks of width {microbenchmarks.WIDTH} under FSDP2, without their gathers"
            )
    return table, sources


def _sides(rates: dict[int, float]) -> dict[str, float]:
    """Return the fraction of the best rate by size; a larger product can be split into smaller ones, so it is never less."""
    best, reached, parts = max(rates.values()), 0.0, {}
    for edge, rate in sorted(rates.items()):
        reached = max(reached, rate / best)
        parts[str(edge)] = min(1.0, _round_digits(reached))
    return parts


def _round_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _overlap(figures: Figures) -> tuple[bool, str]:
    if not figures.beside_s:
        return True, "assumed: one device sends nothing"
    compute_s, send_s, both_s = figures.beside_s
    said = f"products {compute_s:.3g} s, all_reduce {send_s:.3g} s, both at once {both_s:.3g} s"
    return both_s < _OVERLAPS_BELOW * (compute_s + send_s), f"measured: {said}"


def _intra(figures: Figures, ranks: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return the link of the ring model that fits the collectives best, and sources with the times and the fit's error."""
    if ranks == 1:
        link = {"latency_s": 10e-6, "bytes_per_s": 25e9}
        return link, dict.fromkeys(link, "assumed: one device sends nothing; PCI Express 4.0, 16 lanes")
    terms, times = [], []
    for name, by_size in figures.sent.items():
        for size, taken_s in by_size.items():
            hops = microbenchmarks.WAYS[name] * (ranks - 1)
            terms.append((1.0, float(hops), hops / ranks * size))
            times.append(taken_s)
    (collective_s, latency_s, byte_s), off = _least_deviations(terms, times)
    link = {"collective_s": collective_s, "latency_s": latency_s, "bytes_per_s": 1 / byte_s}
    said = "; ".join(
        f"{name} on {ranks} ranks "
        + ", ".join(f"{size:,} B {taken_s * 1e6:.4g} us" for size, taken_s in by_size.items())
        for name, by_size in figures.sent.items()
    )
    about = {
        key: f"measured: fitted to the {len(times)} times listed at bytes_per_s, {off:.0%} off on average"
        for key in link
    }
    return {key: _round_digits(value) for key, value in link.items()}, about | {"bytes_per_s": f"measured: {said}"}


def _least_deviations(terms: Sequence[tuple[float, ...]], times: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Return the factors of the terms with the least mean relative deviation from the times, and that deviation.

    No factor is below zero, and the last one is above it. This is a linear program: a best solution meets as many of the
    times exactly as it has factors that are not zero. There are so few times that all such solutions are tried.
    """
    relative = torch.tensor(terms, dtype=torch.float64) / torch.tensor(times, dtype=torch.float64)[:, None]
    count, width = relative.shape
    best: tuple[float, tuple[float, ...]] = (math.inf, ())
    for size in range(1, width + 1):
        corners = itertools.combinations(range(width - 1), size - 1), itertools.combinations(range(count), size)
        for others, met in itertools.product(*corners):
            columns = [*others, width - 1]
            square = relative[list(met)][:, columns]
            solved, info = torch.linalg.solve_ex(square, torch.ones(size, dtype=torch.float64))
            if int(info) or not bool((solved[:-1] >= 0).all()) or float(solved[-1]) <= 0:
                continue
            factors = torch.zeros(width, dtype=torch.float64)
            factors[columns] = solved
            off = float((relative @ factors - 1).abs().mean())
            best = min(best, (off, tuple(factors.tolist())))
    return best[1], best[0]
