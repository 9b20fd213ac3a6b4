"""The `Prediction` of a layout on given hardware: its programs played on the clock, and their memory summed."""

from __future__ import annotations

import functools
import math
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Literal

from samestep.hardware import Hardware, origins
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.output.page.page import in_notebook
from samestep.program.between_steps import hiding
from samestep.program.program import Program
from samestep.simulation import clock, memory, reserved_memory
from samestep.simulation.cost import dtype_on
from samestep.simulation.memory import MemoryUse
from samestep.simulation.partition import BUBBLE, IMBALANCE, REST, WAIT, TimeRow, seconds_of
from samestep.simulation.timeline import Timeline
from samestep.strategies import programs_of


def labels(job: Job, hardware: Hardware) -> dict[str, str]:
    """Return the origin of a prediction's numbers: of the model, the hardware, the time and the memory."""
    of_each = ", ".join(f"{count} {origin}" for origin, count in origins(hardware).items())
    return {
        "model": "analytical: counted from hyperparameters" if job.model.preset is not None else "traced",
        "hardware": of_each or "given without sources",
        "time": "; ".join(["analytical: played on a clock", *unpriced(job)]),
        "memory": "analytical: added up over the program",
    }


def unpriced(job: Job) -> list[str]:
    """Return a line for each word of a job that changes the seconds or the bytes of a step, and that no price knows."""
    if job.run.compile == "none":
        return []
    if job.run.compile_backend != "inductor":
        return [
            f"run.compile_backend = {job.run.compile_backend!r} is not priced: seconds and bytes are those of code that is not compiled"
        ]
    return ["of run.compile what is kept is not priced: bytes are those of code that is not compiled"]


_TENTH = statistics.NormalDist().inv_cdf(0.9)
"""The standard deviations from the middle of a normal distribution beyond which a tenth of it is."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The range of measured / predicted that covers 8 of 10 published rows of a source that had no part in it."""

    rows: int
    """Number of published rows."""
    low: float
    """Lower end of measured / predicted."""
    high: float
    """Upper end of measured / predicted."""

    def of(self, predicted: float) -> tuple[float, float]:
        """Return the interval in which the measured value is to be expected, in the unit of the predicted one."""
        return self.low * predicted, self.high * predicted

    def chance_below(self, limit: float, predicted: float) -> float:
        """Return the probability that the measured value is at most `limit`: its logarithm is taken to be normal."""
        if limit <= 0 or predicted <= 0:
            return float(predicted <= limit)
        middle = (math.log(self.low) + math.log(self.high)) / 2
        deviation = (math.log(self.high) - math.log(self.low)) / (2 * _TENTH)
        return statistics.NormalDist(middle, deviation).cdf(math.log(limit / predicted))

    def safe_below(self, limit: float, chance: float) -> float:
        """Return the largest prediction whose measured value is at most `limit` with a probability of `chance`, in the unit of `limit` (seconds or bytes)."""
        middle = (math.log(self.low) + math.log(self.high)) / 2
        deviation = (math.log(self.high) - math.log(self.low)) / (2 * _TENTH)
        return limit / math.exp(statistics.NormalDist(middle, deviation).inv_cdf(chance))


@functools.cache
def intervals() -> dict[str, Interval]:
    """Return the intervals of `time` and `memory` from the record of predictions (docs/foresight.md)."""
    found = tomllib.loads(resources.files("samestep").joinpath("record.toml").read_text(encoding="utf-8"))
    return {name: Interval(**figures) for name, figures in found.items()}


PASSES = 3
"""FLOPs of a step over those of its forward: one for the forward, two for the backward, none for recompute
(Chowdhery et al. 2022, arXiv:2204.02311)."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted step time and memory of one layout on given hardware."""

    job: Job
    layout: Layout
    hardware: Hardware
    timeline: Timeline
    programs: tuple[Program, ...]
    """Program of each pipeline stage."""
    memory: tuple[MemoryUse, ...]
    """Peak memory of a rank of each pipeline stage, in bytes."""
    states_per_param: int
    """Number of tensors that the optimizer keeps for each weight."""
    tokens: int
    """Number of tokens of one step, or of samples if these are no sequences."""
    unit: Literal["tokens", "samples"]
    """Unit of `tokens`."""
    model_flops: int
    """FLOPs of one step over all ranks, without recompute."""
    dtype: str
    """Dtype of the factors of matrix products on this hardware."""
    labels: Mapping[str, str]
    """Origin of the numbers: `labels`."""
    exchange_s: float = 0.0
    """Seconds by which the exchanges of all parts of the weights make steps longer, each after the steps that hide it, where
    replicas are trained independently."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step, with its share of the exchanges."""
        return self.timeline.step_s + self.exchange_s / self.programs[0].step.sharing.every

    @property
    def devices(self) -> int:
        """Number of devices: one for each rank."""
        return self.layout.world_size

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens (or samples) per second and device."""
        return self.tokens / self.step_s / self.devices

    @property
    def tflops_per_device(self) -> float:
        """Useful FLOP/s of a device, in units of 10^12: recompute is not counted."""
        return self.model_flops / self.step_s / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: useful FLOP/s as a fraction of the peak of the job's dtype."""
        return self.tflops_per_device * 1e12 / self.hardware.flops_per_s[self.dtype]

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the step in which a stage waits for others, averaged over the stages."""
        stages = self.timeline.stages
        idle_s = seconds_of(self.timeline.rows, BUBBLE, IMBALANCE, WAIT, REST)
        return idle_s / len(stages) / self.step_s if stages and self.step_s else 0.0

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of exposed communication on the stage that has most of it."""
        return max((self.timeline.exposed_s(stage) for stage in self.timeline.stages), default=0.0)

    @property
    def parts(self) -> tuple[TimeRow, ...]:
        """The parts of the step on the stage that computes longest; with the share of exchanges they add up to `step_s`."""
        rows = self.timeline.rows
        stages = self.timeline.stages
        busiest = max(stages, key=lambda stage: seconds_of(rows, "compute", "recompute", stage=stage), default=0)
        return tuple(row for row in rows if row.stage == busiest)

    @property
    def peak(self) -> MemoryUse:
        """Memory, in bytes, of the stage with the highest peak."""
        return max(self.memory, key=lambda use: use.total)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that tensors have at most of a device of the stage with the highest peak: it without its overhead."""
        return self.peak.total - self.peak.overhead

    @functools.cached_property
    def reserved_bytes(self) -> int | None:
        """Bytes that torch's allocator takes of a device of the stage with the highest peak; None where there is none, on CPUs."""
        if self.hardware.library == "gloo":
            return None
        program = self.programs[self.memory.index(self.peak)]
        return reserved_memory.reserved_bytes(program, self.states_per_param).reserved

    @property
    def fits(self) -> bool:
        """Whether the peak of every stage is within the memory of a device, without what is kept free of it."""
        return self.peak.total <= self.hardware.room_bytes

    @property
    def chance_to_fit(self) -> float:
        """Probability that a rank needs no more than the memory of a device, by the record of predictions."""
        return intervals()["memory"].chance_below(self.hardware.memory_bytes, self.peak.total)

    def _repr_html_(self) -> str:
        return in_notebook("samestep.simulation.prediction_page", self)

    def to_record(self) -> dict[str, object]:
        """Return the prediction as plain data for JSON."""
        return {
            "layout": str(self.layout),
            "hardware": self.hardware.name,
            "devices": self.devices,
            "step_s": self.step_s,
            "step_s_interval": intervals()["time"].of(self.step_s),
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "unit": self.unit,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.mfu,
            "bubble_fraction": self.bubble_fraction,
            "exposed_comm_s": self.exposed_comm_s,
            "parts": [row.to_record() for row in self.parts],
            "memory_bytes": [use.to_record() for use in self.memory],
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "init_bytes": [memory.during_init(one).total + self.hardware.reserved_bytes for one in self.programs],
            "checkpoint_host_bytes": [memory.saving_host_bytes(one, self.states_per_param) for one in self.programs],
            "peak_bytes_interval": [round(size) for size in intervals()["memory"].of(self.peak.total)],
            "fits": self.fits,
            "chance_to_fit": self.chance_to_fit,
            "labels": dict(self.labels),
        }


def predict(model: ModelSpec, job: Job, layout: Layout, hardware: Hardware, states_per_param: int = 2) -> Prediction:
    """Return the prediction of one layout on given hardware.

    Raises:
        LayoutError: a strategy refuses the layout.
        InputError: the hardware has no speed for the job's dtype.
    """
    per_node = job.run.ranks_per_node or hardware.devices_per_node
    programs = programs_of(model, job, layout, per_node)
    uses = memory_of(programs, hardware, states_per_param)
    return predict_programs(programs, model, job, hardware, uses, states_per_param)


def memory_of(programs: tuple[Program, ...], hardware: Hardware, states_per_param: int) -> tuple[MemoryUse, ...]:
    """Return the peak memory of a rank of each stage, with the bytes that the hardware reserves as overhead."""
    return tuple(
        replace(memory.during_step(program, states_per_param), overhead=hardware.reserved_bytes) for program in programs
    )


def predict_programs(
    programs: tuple[Program, ...],
    model: ModelSpec,
    job: Job,
    hardware: Hardware,
    uses: tuple[MemoryUse, ...],
    states_per_param: int,
) -> Prediction:
    """Return the prediction of a layout from its programs and their memory.

    Raises:
        InputError: the hardware has no speed for the job's dtype.
    """
    length = model.length if job.model.preset is not None else job.data.sequence_length
    timeline = clock.play(programs, hardware)
    return Prediction(
        job=job,
        layout=programs[0].step.layout,
        hardware=hardware,
        programs=programs,
        timeline=timeline,
        exchange_s=_exchange_s(programs, hardware),
        memory=uses,
        states_per_param=states_per_param,
        tokens=job.train.global_batch * (length or 1),
        unit="tokens" if length else "samples",
        model_flops=PASSES * model.forward_flops * job.train.global_batch,
        dtype=dtype_on(hardware, programs[0].step.product_dtype),
        labels=labels(job, hardware),
    )


def _exchange_s(programs: tuple[Program, ...], hardware: Hardware) -> float:
    """Return the seconds of the exchanges of all parts of the weights, played with the steps that hide them, which these do not."""
    if not any(program.exchanges for program in programs):
        return 0.0

    def played_s(part: int | None) -> float:
        return clock.play(tuple(hiding(program, part) for program in programs), hardware).step_s

    alone_s = played_s(None)
    return sum(played_s(part) - alone_s for part in range(programs[0].step.sharing.num_parts))
