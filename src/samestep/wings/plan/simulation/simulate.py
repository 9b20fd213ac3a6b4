"""The verb `simulate` and its `Prediction`: the programs of a layout played on the clock of given hardware, and their memory summed.

What binds the step is the part of it that takes most, with the others that are worth a word.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from samestep import calls, wings
from samestep.errors import LayoutError
from samestep.hardware import Hardware, origins, resolve_hardware
from samestep.job import Job
from samestep.layout import Layout, layout_from
from samestep.memory import memory_use
from samestep.memory.memory_use import MemoryUse, allocator_summary, memory_summary
from samestep.models import catalog
from samestep.models.published import as_published
from samestep.models.spec import ModelSpec
from samestep.output.text import duration, gib, readable, wrap
from samestep.program.ops import COPIES, COPY_STREAMS, Op
from samestep.program.program import Program, with_exchange
from samestep.program.update_rules import states_per_param
from samestep.strategies import programs_of
from samestep.wings.plan.simulation import clock, cost, reserved_memory
from samestep.wings.plan.simulation.accuracy import Interval, class_of, describe_accuracy, intervals
from samestep.wings.plan.simulation.cost import dtype_on
from samestep.wings.plan.simulation.partition import BUBBLE, IMBALANCE, REST, TRANSFER, WAIT, TimeRow, seconds_of
from samestep.wings.plan.simulation.timeline import Timeline

WORTH = 0.03
"""Part of a step from which on a row is worth a word."""
MOST_REASONS = 3
_WORDS = {
    BUBBLE: "the schedule leaves a stage idle",
    IMBALANCE: "another stage computes longer",
    "recompute": "forwards run again in backwards",
    "optimizer": "the update",
}


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
            f"run.compile_backend = {job.run.compile_backend!r} is not modelled: seconds and bytes are for code that is not compiled"
        ]
    return ["run.compile: the memory of compiled code is not modelled: bytes are for code that is not compiled"]


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
    """Number of tokens of one step; for a model without sequences, the number of samples."""
    unit: Literal["tokens", "samples"]
    """Unit of `tokens`."""
    model_flops: int
    """FLOPs of one step over all ranks, without recompute, masked attention, and gradients of frozen weights."""
    dtype: str
    """Dtype of the factors of matrix products on this hardware."""
    labels: Mapping[str, str]
    """Origin of the numbers: `labels`."""
    exchange_s: float = 0.0
    """Seconds of an exchange of weights, if replicas are trained independently (DiLoCo)."""

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
        return self.intervals["memory"].chance_below(self.hardware.memory_bytes, self.peak.total)

    @property
    def intervals(self) -> dict[str, Interval]:
        """The intervals of `time` and `memory` in which measured values of this class of machine are to be expected."""
        return intervals(class_of(self.hardware, self.devices))

    def _repr_html_(self) -> str | None:
        return wings.in_notebook("prediction_page", self)

    def to_record(self) -> dict[str, object]:
        """Return the prediction as plain data for JSON."""
        return {
            "layout": str(self.layout),
            "hardware": self.hardware.name,
            "devices": self.devices,
            "step_s": self.step_s,
            "step_s_interval": self.intervals["time"].of(self.step_s),
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
            "init_bytes": [
                memory_use.during_init(program).total + self.hardware.reserved_bytes for program in self.programs
            ],
            "checkpoint_host_bytes": [
                memory_use.saving_host_bytes(program, self.states_per_param) for program in self.programs
            ],
            "peak_bytes_interval": [round(size) for size in self.intervals["memory"].of(self.peak.total)],
            "fits": self.fits,
            "chance_to_fit": self.chance_to_fit,
            "labels": dict(self.labels),
        }


def predict(model: ModelSpec, job: Job, layout: Layout, hardware: Hardware, states_per_param: int = 2) -> Prediction:
    """Return the prediction of one layout on given hardware.

    Raises:
        LayoutError: a strategy rejects the layout.
        InputError: the hardware has no speed for the job's dtype.
    """
    per_node = job.run.ranks_per_node or hardware.devices_per_node
    programs = programs_of(model, job, layout, per_node)
    uses = memory_use.memory_of(programs, hardware, states_per_param)
    return predict_programs(programs, model, job, hardware, uses, states_per_param)


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
        model_flops=model.sample_flops * job.train.global_batch,
        dtype=dtype_on(hardware, programs[0].step.product_dtype),
        labels=labels(job, hardware),
    )


def _exchange_s(programs: tuple[Program, ...], hardware: Hardware) -> float:
    """Return the seconds by which an exchange of weights makes a step longer."""
    if not any(program.exchange for program in programs):
        return 0.0
    return clock.play(tuple(map(with_exchange, programs)), hardware).step_s - clock.play(programs, hardware).step_s


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
        InputError: job, model, layout or hardware cannot be understood, or a strategy rejects the layout.
    """
    where = layout_from(job.layout if layout is None else layout)
    if devices not in (None, where.world_size):
        if layout is not None or job.layout:
            raise LayoutError(
                "devices-and-ranks",
                f"--devices {devices}, but layout {str(where)!r} has {where.world_size} ranks: "
                "leave --devices out, or let the degrees multiply to it",
            )
        where = Layout(dp_replicate=devices)
    job, _ = as_published(job)
    return predict(catalog.model_spec(job), job, where, resolve_hardware(hardware), states_per_param(job))


def binds(prediction: Prediction) -> str:
    """Return the name of the part that takes most of a predicted step, and its share."""
    busy_s = prediction.step_s * (1 - prediction.bubble_fraction) - prediction.exposed_comm_s
    launched, moved = _fractions(prediction)
    parts = {
        "compute": busy_s * (1 - launched - moved),
        "launches of small kernels": busy_s * launched,
        "memory traffic": busy_s * moved,
        "bubbles": prediction.bubble_fraction * prediction.step_s,
        "exposed communication": prediction.exposed_comm_s,
    }
    name = max(parts, key=lambda part: parts[part])
    needed = prediction.peak.total / prediction.hardware.memory_bytes
    memory = f"{1 - needed:.0%} of the memory is free" if needed <= 1 else f"needs {needed:.3g} times the memory"
    return f"{name} ({parts[name] / prediction.step_s:.0%} of the step); {memory}"


def reasons(prediction: Prediction) -> list[str]:
    """Return what else takes time on the stage that computes longest, the largest first, with the bytes of each axis."""
    sent: dict[str, int] = defaultdict(int)
    rows = [row for row in prediction.parts if row.seconds >= WORTH * prediction.step_s and row.name != "compute"]
    program = prediction.programs[rows[0].stage] if rows else None
    for _, op in program.ops() if program else ():
        sent[op.stream] += op.size_bytes
    lines = []
    for row in sorted(rows, key=lambda row: -row.seconds)[:MOST_REASONS]:
        took = f"{duration(row.seconds).text}, {row.seconds / prediction.step_s:.0%} of the step"
        if row.name == TRANSFER and row.axis is not None:
            who = "the link to the host" if row.axis in COPY_STREAMS.values() else row.axis
            lines.append(f"{who} sends buffers of {readable(sent[row.axis])} per step, and no compute hides {took}")
        else:
            lines.append(f"{row.name}: {_WORDS.get(row.name, row.name)} for {took}")
    return lines


def _fractions(prediction: Prediction) -> tuple[float, float]:
    """Return the fractions of compute that are launches, shortest kernels and the host's work, and that are reads and writes of memory."""
    at_once = replace(prediction.hardware, kernel_launch_s=0.0, kernel_s=0.0, host_step_s=0.0, fsdp_unit_s=0.0)
    in_place = replace(at_once, memory_bytes_per_s=cost.AT_ONCE)
    spent_s = work_s = arithmetic_s = 0.0
    for program in prediction.programs:
        for body, times in Counter(task.body for task in program.tasks).items():
            for op in program.bodies[body]:
                if op.axis is None:
                    spent_s += times * cost.seconds(op, program, prediction.hardware)
                    work_s += times * cost.seconds(op, program, at_once)
                    arithmetic_s += times * cost.seconds(op, program, in_place)
    return (1 - work_s / spent_s, (work_s - arithmetic_s) / spent_s) if spent_s else (0.0, 0.0)


MOST_LINES = 60
"""Number of lines above which a program is only summarised by default, so that the rest stays on the screen."""


def as_text(prediction: Prediction, *, lists_ops: bool = False) -> str:
    """Return a prediction as text; a long program is shortened to its tasks, unless `lists_ops`."""
    lines = program_text(prediction).splitlines()
    if not lists_ops and len(lines) - len(prediction.programs) * (len(prediction.programs) > 1) > MOST_LINES:
        lines = [*_tasks(prediction.programs)]
    fits = "fits" if prediction.fits else "does not fit"
    chance = f"; {prediction.chance_to_fit:.0%} likely to fit, by the errors of past predictions"
    return "\n".join(
        [
            f"{prediction.job.model.source} on {prediction.devices:,} devices of {prediction.hardware.name}",
            wrap(f'"{prediction.layout}" {fits}: {memory_summary(prediction.peak, prediction.hardware)}{chance}'),
            prediction.timeline.to_text(100),
            f"bottleneck: {binds(prediction)}",
            *unpriced(prediction.job),
            *memory_lines(prediction),
            *map(wrap, describe_accuracy(prediction.hardware, prediction.devices)),
            *lines,
        ]
    )


def memory_lines(prediction: Prediction) -> list[str]:
    """Return lines on the memory that the allocator takes for the tensors of a device, and on the CPU memory of all ranks."""
    host_bytes = sum(use.host for use in prediction.memory) * (prediction.devices // len(prediction.memory))
    return [
        *allocator_summary(prediction.peak, prediction.reserved_bytes, prediction.hardware),
        *([f"CPU memory: {gib(host_bytes)} GiB for the offloaded tensors of all ranks"] if host_bytes else []),
    ]


def program_text(prediction: Prediction) -> str:
    """Return the tasks and bodies of every stage as text, one line for each op."""
    several = len(prediction.programs) > 1
    stages = enumerate(prediction.programs)
    return "\n".join(
        line for stage, program in stages for line in (*[f"stage {stage}"][:several], *_list_program(program))
    )


def _list_program(program: Program) -> Iterator[str]:
    """Yield the lines of a program: its tasks, and the ops of each body."""
    tasks = " ".join(f"{task.body}[{task.microbatch}]" for task in program.tasks)
    yield f'program of "{program.step.layout}": {tasks}'
    for key, ops in program.bodies.items():
        yield f"  {key}"
        yield from map(_line, ops)
    if program.exchange:
        yield f"  exchange, every {program.step.sharing.every} steps"
        yield from map(_line, program.exchange)


def _line(op: Op) -> str:
    size = f"{op.flops:>12,} FLOPs"
    if op.axis or op.kind in COPIES:
        size = f"{op.size_bytes:>12,} B {op.dtype} over {op.axis}" if op.axis else f"{op.size_bytes:>12,} B {op.stream}"
    return f"    {op.name:<40} {size}{'  (by FSDP2)' if op.implied else ''}"


def _tasks(programs: Sequence[Program]) -> Iterator[str]:
    """Yield the lines of a summary: how often each body runs and its numbers of ops; equal stages are listed once."""
    num_ops = sum(len(program.bodies[task.body]) for program in programs for task in program.tasks)
    yield f'program of "{programs[0].step.layout}": {num_ops:,} ops; --program lists them'
    first = 0
    for tasks, alike in itertools.groupby(map(_tasks_of, programs)):
        count = len([*alike])
        if len(programs) > 1:
            yield f"stage {first}" if count == 1 else f"stages {first} to {first + count - 1}, each"
        yield from tasks
        first += count


def _tasks_of(program: Program) -> list[str]:
    """Return a line for each body of a program: its key, how often it runs, and its number of ops of each kind."""
    lines = []
    for body, times in Counter(task.body for task in program.tasks).items():
        kinds = Counter(str(op.kind) for op in program.bodies[body])
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        lines.append(f"  {body!s:<12} {'once' if times == 1 else f'{times:,} times':>10}: {counts}")
    return lines
