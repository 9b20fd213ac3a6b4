"""The verb `calibrate`: a hardware profile refitted to measured steps of any framework, with a prior that pulls every factor to one.

`plan --measure-top` runs layouts on this machine, and refits its profile in the same way.

The factors are the figures of a profile that measured steps can distinguish, each as a multiple of the time that it takes:

    products, attention, memory     matrix products, fused attention, and elementwise kernels
    launches, host                  one launch of a kernel, and the host's work once a step
    collectives, links              what each collective takes however small, and the bytes of all links

A profile with these factors computes what the same data sheet gives, at other efficiencies: peaks, sizes and latencies stay.
Those are chosen that are most probable, given log-normal errors of a step and of a factor:

    minimise   sum over steps of (log (predicted(f) / measured) / 0.1)^2  +  sum over factors of (log f / 0.35)^2

0.1 is what predictions of well described steps are off, and 0.35 what profiles are (docs/foresight.md). So five steps move what they
show, and leave the rest. What it is worth is said by steps that had no part in it: each is predicted from a fit to the others.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from samestep import calls
from samestep.errors import InputError, LayoutError
from samestep.hardware import Hardware, profiles, resolve_hardware
from samestep.job import Job
from samestep.memory.memory_use import at_rest
from samestep.output.durable_files import check_writable, write_whole
from samestep.output.text import align_columns, readable
from samestep.program.ops import COMPUTE_DTYPE
from samestep.program.program import Program
from samestep.strategies import programs_of
from samestep.wings.plan.measured_steps import TimedStep, read_steps
from samestep.wings.plan.simulation import clock

STEP_ERROR = 0.1
"""Standard deviation of the logarithm of predicted over measured seconds of a well described step."""
FACTOR_ERROR = 0.35
"""Standard deviation of the logarithm of a factor of a profile."""
_STRIDES = (1.6, 1.25, 1.1, 1.03)
"""Multiples by which each factor is tried larger and smaller, one after the other."""
_MOST = 8.0
"""The largest factor, and one over the smallest."""
_MOST_FOLDS = 10
"""Fits that leave some of the steps out."""
FACTORS = ("products", "attention", "memory", "launches", "host", "collectives", "links")
_Factors = Mapping[str, float]
"""Multiples of time by the names of `FACTORS`; what is missing is 1."""
_KEYS = {
    "efficiency.attention": "attention",
    "efficiency": "products",
    "memory_efficiency": "memory",
    "kernel_launch_s": "launches",
    "host_step_s": "host",
    "fsdp_unit_s": "host",
    "intra.collective_s": "collectives",
    "inter.collective_s": "collectives",
    "intra": "links",
    "inter": "links",
}
"""The factor of each key of a profile, the most specific key first."""
_RATES = ("bytes_per_s", "all_reduce_bytes_per_s", "by_ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedStep:
    """One measured step, predicted with the profile as it was, with the new one, and with one that had not seen it."""

    origin: str
    layout: str
    measured_s: float
    before_s: float
    after_s: float
    left_out_s: float
    """Seconds that a profile predicts which was refitted to the other steps alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A profile refitted to measured steps, and what it is worth."""

    steps: tuple[CalibratedStep, ...]
    factors: Mapping[str, float]
    """Multiples of time, by what they change."""
    hardware: Hardware
    path: Path | None
    """The file that was written; None if none was."""
    kept: str
    """Why the profile is kept as it was, and nothing was written; empty where it was refitted."""
    skipped: tuple[str, ...]
    """Steps that cannot be predicted, and what was ignored, a line each."""

    def off(self, which: str) -> float:
        """Return the median part by which steps are off: `before`, `after`, or `left_out` of the fit."""
        return float(statistics.median(abs(getattr(step, f"{which}_s") / step.measured_s - 1) for step in self.steps))

    def to_record(self) -> dict[str, Any]:
        """Return the calibration as JSON values."""
        return {
            "steps": [asdict(step) for step in self.steps],
            "factors": dict(self.factors),
            "median_error": {which: self.off(which) for which in ("before", "after", "left_out")},
            "file": None if self.path is None else str(self.path),
            "kept": self.kept,
            "skipped": list(self.skipped),
        }

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.to_text())

    def to_text(self) -> str:
        """Return a table of the steps, the factors that moved, and what was written, as text."""
        head = ("step", "layout", "measured s", "before", "after", "left out")
        cells = [
            (step.origin, step.layout, f"{step.measured_s:.4g}", *(f"{getattr(step, f'{which}_s') / step.measured_s - 1:+.0%}" for which in ("before", "after", "left_out")))
            for step in self.steps
        ]  # fmt: skip
        moved = ", ".join(f"{name} {value:.2f}" for name, value in self.factors.items() if abs(math.log(value)) > 0.02)
        lines = [
            align_columns([head, *cells]).rstrip(),
            f"median error {self.off('before'):.1%} before, {self.off('after'):.1%} after; {self.off('left_out'):.1%} of steps that "
            "the fit has not seen",
            f"times as long as in the profile: {moved or 'nothing moved'}",
            *self.skipped,
        ]
        lines.append(
            f"kept as it is, and nothing written: {self.kept}"
            if self.kept
            else f"written: {self.path}; --hardware {self.path} takes it"
        )
        return "\n".join(lines)


@calls.checked
def calibrate(
    rows: str | Path | Sequence[str | Path],
    hardware: Hardware | str | Path | None = None,
    out: str | Path | None = None,
    *,
    job: Job | None = None,
) -> Calibration:
    """Refit a hardware profile to measured steps, of any framework; needs no torch for presets.

    Args:
        rows: CSV files with a line for each step (the columns are in docs/hardware.md), or folders of runs.
        hardware: the profile of the measured machine, by name or file.
        out: the file of the new profile; without it nothing is written.
        job: job that supplies the columns missing from the CSV.

    Raises:
        InputError: a row cannot be a measured step, or is faster than the machine's peak; all are named.
    """
    paths = [Path(path) for path in ([rows] if isinstance(rows, (str, Path)) else rows)]
    machine, file = resolve_hardware(hardware), None if out is None else Path(out)
    if file is not None:
        check_writable(file)
    read, said = read_steps(paths, job)
    _refuse_other_machine(read, machine)
    _refuse(_impossible(read, machine))
    steps, programs = [], []
    for step in read:
        try:
            programs.append(programs_of(step.model, step.job, step.layout, machine.devices_per_node))
            steps.append(step)
        except LayoutError as error:
            said.append(f"{step.origin} is left out: {error}")
    if len(steps) < 2:
        raise InputError(
            "measured-steps",
            "\n".join([f"{len(steps)} of {len(read)} steps can be predicted; 2 are the least that a fit needs", *said]),
        )
    _refuse(_too_large(steps, programs, machine))
    fit = fit_of(steps, programs, machine)
    _refuse(_far(steps, fit.seconds({}), machine))
    return calibrated(steps, fit, machine, file, said)


def fit_of(steps: Sequence[TimedStep], programs: Sequence[tuple[Program, ...]], machine: Hardware) -> Fit:
    """Return the fit of a machine to measured steps, given the programs of each."""
    predictors = [functools.partial(_played_s, program) for program in programs]
    return Fit([machine] * len(steps), predictors, [step.step_s for step in steps])


def calibrated(
    steps: Sequence[TimedStep], fit: Fit, machine: Hardware, file: Path | None, said: Sequence[str]
) -> Calibration:
    """Return a machine refitted to measured steps, and write its profile if it is worth more than the one before."""
    factors = fit.best(range(len(steps)))
    left_out_s = fit.left_out(factors)
    fitted = scaled(machine, factors)
    calibrated_steps = tuple(
        CalibratedStep(origin=step.origin, layout=str(step.layout), measured_s=step.step_s, before_s=predicted_s, after_s=after, left_out_s=left_out)
        for step, predicted_s, after, left_out in zip(steps, fit.seconds({}), fit.seconds(factors), left_out_s, strict=True)
    )  # fmt: skip
    result = Calibration(
        steps=calibrated_steps, factors=factors, hardware=fitted, path=None, kept="", skipped=tuple(said)
    )
    if reason := _why_kept(result):
        return replace(result, hardware=machine, kept=reason)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, _as_toml(fitted, machine, factors, f"{len(steps)} measured steps"))
    return replace(result, path=file)


def _played_s(programs: tuple[Program, ...], machine: Hardware) -> float:
    """Return the predicted seconds of a step."""
    return clock.Score(programs, machine).step_s(machine)


def _why_kept(calibration: Calibration) -> str:
    """Return why a refitted profile is worth no more than the one before; empty if it is worth more."""
    if len(calibration.steps) < 2:
        return "one step shows nothing about others. Use two layouts or more"
    if far := [name for name, value in calibration.factors.items() if not 1.01 / _MOST < value < 0.99 * _MOST]:
        return f"{far[0]} would take {calibration.factors[far[0]]:.3g} times as long, which no machine of this data sheet does: another --hardware, or other rows, may be right"
    errors, left_out = calibration.off("before"), calibration.off("left_out")
    if left_out >= errors:
        return f"steps that a fit has not seen are {left_out:.1%} off with it, and {errors:.1%} without"
    return ""


def _refuse(mistakes: Iterable[str]) -> None:
    """Raise an error that names all mistakes of the measured steps, if there are any."""
    if text := "\n".join(mistakes):
        raise InputError("measured-steps", text)


def _impossible(steps: Sequence[TimedStep], machine: Hardware) -> Iterator[str]:
    """Yield the steps whose products alone would need more than the peak of all devices."""
    for step in steps:
        dtype = COMPUTE_DTYPE[step.job.numerics.precision]
        flops = 3 * step.model.forward_flops * step.job.train.global_batch
        share = flops / (step.step_s * step.layout.world_size * machine.flops_per_s.get(dtype, math.inf))
        if share > 1:
            yield (
                f"{step.origin}: {step.step_s:.4g} s per step would need {share:.0%} of the peak of {machine.name} in {dtype}: another "
                f"batch ({step.job.train.global_batch} samples), precision, number of devices or --hardware may be right"
            )


def _refuse_other_machine(steps: Sequence[TimedStep], machine: Hardware) -> None:
    """Refuse steps of a machine that another profile describes."""
    for step in steps:
        if step.hardware in profiles() and machine.name in profiles() and step.hardware != machine.name:
            raise InputError(
                "measured-hardware",
                f"{step.origin} was measured on {step.hardware}. Use --hardware {step.hardware}, not {machine.name}",
            )


def _too_large(steps: Sequence[TimedStep], programs: Sequence[tuple[Program, ...]], machine: Hardware) -> Iterator[str]:
    """Yield the steps whose weights, gradients and states alone do not fit, held in half the bytes: no such run was measured."""
    for step, stages in zip(steps, programs, strict=True):
        size = max(at_rest(stage).total for stage in stages)
        if size > 2 * machine.memory_bytes:
            yield (
                f"{step.origin}: weights, gradients and optimizer states alone are {readable(size)} of a device that has "
                f"{readable(machine.memory_bytes)}: another layout, such as a ZeRO stage that is missing, or --hardware may be right"
            )


def _far(steps: Sequence[TimedStep], predicted_s: Sequence[float], machine: Hardware) -> Iterator[str]:
    """Yield the steps that no factors explain: a unit, a batch or a machine is another one."""
    for step, before_s in zip(steps, predicted_s, strict=True):
        ratio = step.step_s / before_s
        if not 1 / _MOST < ratio < _MOST:
            unit = "milliseconds, " if 300 < ratio < 5000 else ""
            yield (
                f"{step.origin}: {step.step_s:.4g} s per step are {ratio:.3g} times the {before_s:.4g} s that {machine.name} is predicted to "
                f"take. No profile is that far off. The reason may be {unit}tokens of one device given as the tokens of all {step.layout.world_size}, "
                "another batch, precision or --hardware"
            )


class Fit:
    """The factors that are most probable, given the machines of some steps, what predicts each on a machine, and their measured seconds."""

    def __init__(
        self,
        machines: Sequence[Hardware],
        predictors: Sequence[Callable[[Hardware], float]],
        measured_s: Sequence[float],
    ) -> None:
        self._machines, self._predictors, self._measured_s = machines, predictors, measured_s
        every = [_limits(machine) for machine in machines]
        self._least = {name: max(row[name] for row in every) for name in every[0]}
        self._known: dict[tuple[float, ...], list[float]] = {}

    def seconds(self, factors: _Factors) -> list[float]:
        """Return the predicted seconds of all steps."""
        key = tuple(factors.get(name, 1.0) for name in FACTORS)
        if key not in self._known:
            pairs = zip(self._predictors, self._machines, strict=True)
            self._known[key] = [predicted_s(scaled(machine, factors)) for predicted_s, machine in pairs]
        return self._known[key]

    def best(self, which: Sequence[int], start: _Factors | None = None) -> dict[str, float]:
        """Return the most probable factors for some of the steps, walking along one factor after the other."""
        factors = {name: (start or {}).get(name, 1.0) for name in FACTORS}
        least = self._score(factors, which)
        for stride in _STRIDES[1:3] if start else _STRIDES:
            is_better = True
            while is_better:
                is_better = False
                for name in FACTORS:
                    for ratio in (stride, 1 / stride):
                        tried = {**factors, name: factors[name] * ratio}
                        if self._is_possible(name, tried[name]) and (score := self._score(tried, which)) < least - 1e-9:
                            least, factors, is_better = score, tried, True
        return factors

    def left_out(self, factors: _Factors) -> list[float]:
        """Return the seconds of each step, predicted by a fit to the others; of many steps several are left out at once."""
        count = len(self._predictors)
        predicted_s = [0.0] * count
        folds = min(count, _MOST_FOLDS)
        for fold in range(folds):
            others = [index for index in range(count) if index % folds != fold]
            seconds = self.seconds(self.best(others, factors))
            for index in range(fold, count, folds):
                predicted_s[index] = seconds[index]
        return predicted_s

    def _is_possible(self, name: str, factor: float) -> bool:
        return max(1 / _MOST, self._least.get(name, 0.0)) <= factor <= _MOST

    def _score(self, factors: _Factors, which: Sequence[int]) -> float:
        """Return minus twice the logarithm of the probability, but for a constant."""
        predicted_s = self.seconds(factors)
        steps = sum((math.log(predicted_s[index] / self._measured_s[index]) / STEP_ERROR) ** 2 for index in which)
        return steps + sum((math.log(value) / FACTOR_ERROR) ** 2 for value in factors.values())


def scaled(machine: Hardware, factors: _Factors) -> Hardware:
    """Return a machine on which each kind of work takes `factors` times as long; no efficiency is larger than 1."""
    of = {name: factors.get(name, 1.0) for name in FACTORS}
    return replace(
        machine,
        name=f"{machine.name} {' '.join(f'{of[name]:.6g}' for name in FACTORS)}",  # prices are cached by the name
        flops_per_s={
            dtype: rate if dtype in machine.efficiency else rate / of["products"]
            for dtype, rate in machine.flops_per_s.items()
        },
        efficiency={
            key: min(1.0, rate / of["attention" if key == "attention" else "products"])
            for key, rate in machine.efficiency.items()
        },
        memory_efficiency=min(1.0, machine.memory_efficiency / of["memory"]),
        kernel_launch_s=machine.kernel_launch_s * of["launches"],
        host_step_s=machine.host_step_s * of["host"],
        fsdp_unit_s=machine.fsdp_unit_s * of["host"],
        intra=machine.intra.delayed(transfer=of["links"], collective=of["collectives"]),
        inter=machine.inter.delayed(transfer=of["links"], collective=of["collectives"]),
    )


def _limits(machine: Hardware) -> dict[str, float]:
    """Return the smallest factor of those figures that are fractions of a peak: with it all of the peak is reached."""
    products = [rate for key, rate in machine.efficiency.items() if key != "attention"]
    return {
        "products": max(products, default=0.0),
        "attention": machine.efficiency.get("attention", 0.0),
        "memory": machine.memory_efficiency,
    }


def _as_toml(fitted: Hardware, machine: Hardware, factors: _Factors, what: str) -> str:
    """Return a refitted profile as TOML; the source of a refitted number names its factor, the steps and its former source."""
    table: dict[str, Any] = _plain(asdict(fitted))
    del table["name"]
    sources = dict(machine.sources)
    for key, source in machine.sources.items():
        factor = factors.get(_factor_of(key, machine), 1.0)
        if not math.isclose(factor, 1.0):
            sources[key] = (
                f"refitted: takes {factor:.3g} times as long as in {machine.name}, on {what}; before: {source}"
            )
    return tomli_w.dumps({**table, "sources": sources})


def _factor_of(key: str, machine: Hardware) -> str:
    """Return the factor that changes a key of a profile; empty if none does."""
    first, _, last = key.partition(".")
    if first == "flops_per_s":
        return "" if last in machine.efficiency else "products"
    if first in ("intra", "inter") and last not in ("collective_s", *_RATES):
        return ""  # latencies stay
    return _KEYS.get(key) or _KEYS.get(first, "")


def _plain(value: Any) -> Any:
    """Return nested data without the values that are not set: TOML cannot write None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None and item != {}}
    return value
