"""The page of a prediction: whether it fits, how fast it is, its step on a timeline, its parts and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory import memory_use
from samestep.memory.memory_use import MemoryUse
from samestep.output.text import count, duration, share, size
from samestep.program.ops import OpKind
from samestep.wings.pages import charts
from samestep.wings.pages.charts import Bar, Box, Lane, MemoryCurve, TimelineFigure, bars, most_groups, some_of
from samestep.wings.pages.page import Answer, Page, Section, words
from samestep.wings.plan.ranking import SAFE
from samestep.wings.plan.simulation import simulate
from samestep.wings.plan.simulation.accuracy import describe_accuracy
from samestep.wings.plan.simulation.partition import COMPUTE, TRANSFER, WAIT, row_label, row_name
from samestep.wings.plan.simulation.simulate import Prediction
from samestep.wings.plan.simulation.timeline import Timeline

MOST_CHARTS = 8
"""Number of stages whose memory is drawn."""
_PASSES = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.WEIGHT)
"""Kinds of ops on the compute stream that have a colour each; all others have that of their row."""


def page_of(step: Prediction, *, small: bool = False) -> Page:
    """Return the page of a prediction; a small one has neither boxes to zoom into nor a record."""
    return Page(
        verb="simulate",
        title=title_of(step),
        subject=subject_of(step),
        answers=answers_of(step),
        verdict=f"Bound by {simulate.binds(step)}",
        reasons=simulate.reasons(step),
        sections=[*figures_of(step, small=small), described(step.job, step.layout, step.hardware)],
        notes=notes_of(step.labels, step.hardware, step.devices),
        record=None if small else step.to_record(),
    )


def title_of(step: Prediction) -> str:
    """Return the answer in one sentence."""
    likely = "Fits" if step.chance_to_fit >= SAFE else f"{step.chance_to_fit:.0%} likely to fit"
    fits = likely if step.fits else "Does not fit"
    return f"{fits}: {duration(step.step_s).text} per step on {step.devices:,} device{'s' * (step.devices > 1)}"


def subject_of(step: Prediction) -> str:
    """Return model, layout and machine in one line."""
    return f'{step.job.model.source} · "{step.layout}" · {step.hardware.name}'


def answers_of(step: Prediction) -> list[Answer]:
    """Return whether a layout fits, and its step, its speed and its MFU, each with the interval of the record of predictions."""
    low_s, high_s = step.intervals["time"].of(step.step_s)
    least, most = step.intervals["memory"].of(step.peak.total)
    per_s = step.tokens / step.step_s
    room = f"{step.chance_to_fit:.0%} likely to fit in {size(step.hardware.memory_bytes).text}"
    tone = "good" if step.fits and step.chance_to_fit >= SAFE else "unsure" if step.fits else "bad"
    return [
        Answer("fits" if step.fits else "does not fit", size(step.peak.total), (size(least), size(most)), room, tone),
        Answer("step", duration(step.step_s), (duration(low_s), duration(high_s))),
        Answer(
            f"{step.unit}/s",
            count(per_s),
            (count(step.tokens / high_s), count(step.tokens / low_s)),
            f"{count(step.tokens_per_s_per_device).text} per device",
        ),
        Answer("MFU", share(step.mfu), (share(step.mfu * step.step_s / high_s), share(step.mfu * step.step_s / low_s))),
    ]


def figures_of(step: Prediction, *, small: bool = False) -> Iterator[Section]:
    """Yield the figures of a prediction: the step, its parts, its memory."""
    stages, peak = step.timeline.stages, step.memory.index(step.peak)
    drawn = some_of(stages, [peak], most_drawn(step.timeline))
    figure = TimelineFigure([*lanes_of(step.timeline, drawn, amounts_of(step))], step.timeline.step_s)
    yield Section(
        "The step",
        figure.to_html(small=small),
        f"One track for each pipeline stage and stream; all ranks of a stage are equal.{charts.left_out(drawn, stages, 'stages')}",
    )
    parts = [Bar(row_label(row.name, row.axis), row_kind(row.name, row.axis), None, row.seconds) for row in step.parts]
    if step.exchange_s:
        parts.append(Bar("exchange of weights", "dp", None, step.step_s - step.timeline.step_s))
    caption = f"Stage {step.parts[0].stage if step.parts else 0}, the slowest stage. The parts add up to the step."
    yield Section("Where the time goes", bars(parts, step.step_s), caption)
    drawn_memory = [
        charts.memory(predicted_memory(step, stage), step.timeline.step_s)
        for stage in some_of(stages, [peak], MOST_CHARTS)
    ]
    keys = {name: name.replace(" ", "-") for use in step.memory for name, held in use.parts().items() if held}
    caption = "One rank of each stage over the step, and the capacity of its device (dashed)."
    caption = " ".join([caption, *(f"{line[0].upper()}{line[1:]}." for line in simulate.memory_lines(step))])
    yield Section("Memory", f'<div class="grid">{"".join(drawn_memory)}</div>{charts.legend(keys)}', caption)


def most_drawn(timeline: Timeline) -> int:
    """Return the number of stages or ranks of a timeline that a page draws."""
    groups = max(1, len(timeline.stages))
    streams = sum(len(timeline.streams(stage)) for stage in timeline.stages)
    return most_groups(streams / groups)


def amounts_of(step: Prediction) -> dict[int, dict[str, int]]:
    """Return the FLOPs or bytes of each op by its name, for each stage."""
    return {
        stage: {f"{op.kind}:{op.owner}": op.size_bytes or op.flops for _, op in program.ops()}
        for stage, program in enumerate(step.programs)
    }


def lanes_of(
    timeline: Timeline, drawn: list[int], amounts: Mapping[int, Mapping[str, int]], *, predicted: bool = False
) -> Iterator[Lane]:
    """Yield a lane for each stream of some stages or ranks; `amounts` are the FLOPs or bytes of their ops by name."""
    for stage in drawn:
        boxes: dict[str, list[Box]] = {stream: [] for stream in timeline.streams(stage)}
        known = amounts.get(stage, {})
        for span in timeline.spans_of(stage):
            if span.end_s > span.start_s:
                head, *rest = span.name.split(":", 1)
                name, kind = ":".join([row_label(head, None), *rest]), _kind(span.stream, span.name)
                boxes[span.stream].append(Box(span.start_s, span.end_s, kind, name, span.task, known.get(span.name, 0)))
        for stream, lane_boxes in boxes.items():
            lane_boxes.sort(key=lambda box: box.start_s)
            meets = stream.partition("-")[0] in ("pp", "tie", "world")
            yield Lane(f"{timeline.lane} {stage}", stream, lane_boxes, predicted, stream * meets)


def _kind(stream: str, name: str) -> str:
    if stream != COMPUTE:
        return axis_kind(stream)
    kind = name.partition(":")[0]
    return kind if kind in _PASSES else row_name(kind)


def axis_kind(axis: str) -> str:
    """Return the colour of an axis."""
    first = axis.partition("_")[0]
    return first if first in ("dp", *Layout().inner_degrees) else "world"


def row_kind(name: str, axis: str | None) -> str:
    """Return the colour of a part of a step."""
    if axis is not None and name in (TRANSFER, WAIT):
        return axis_kind(axis) + " waiting" * (name == WAIT)
    return name


def predicted_memory(step: Prediction, stage: int) -> MemoryCurve:
    """Return the predicted memory of a rank of one stage over the step."""
    moments, use = memory_over_step(step, stage), step.memory[stage]
    sizes = [moment.held.parts() for moment in moments]
    parts = {name: [each[name] for each in sizes] for name in use.parts()}
    return MemoryCurve(
        f"stage {stage}",
        parts,
        [moment.time_s for moment in moments],
        step.hardware.memory_bytes,
        size(use.total),
        use.peak_at,
    )


def described(job: Job, layout: Layout, hardware: Hardware | None) -> Section:
    """Return the job, the layout and the machine as a table: the keys that differ from their defaults."""
    machine: dict[str, object] = {}
    if hardware is not None:
        machine = {
            "hardware": hardware.name,
            "devices per node": hardware.devices_per_node,
            "memory of a device": size(hardware.memory_bytes).text,
        }
    named = {f"layout.{key}": value for key, value in _changed(asdict(Layout()), asdict(layout)).items()}
    return Section(
        "Job and layout",
        words({**keys_of(job), **named, **machine}),
        "Keys that differ from their defaults.",
        is_folded=True,
    )


def keys_of(job: Job) -> dict[str, object]:
    """Return the keys of a job that differ from their defaults."""
    usual = Job().model_dump(mode="json")
    values = job.model_dump(mode="json", exclude={"layout": True, "run": {"folder"}})
    changed = {table: _changed(usual[table], row) for table, row in values.items()}
    return {key: value for key, value in _flat("", changed) if value not in (None, [], "")}


def _flat(path: str, tables: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{path}{key}.", value)
        else:
            yield f"{path}{key}", value


def _changed(usual: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in values.items() if usual.get(key) != value}


def notes_of(labels: Mapping[str, str], hardware: Hardware, devices: int) -> list[str]:
    """Return notes on how the numbers of a prediction were computed, and how far such numbers have been off."""
    return [*(f"{subject}: {origin}." for subject, origin in labels.items()), *describe_accuracy(hardware, devices)]


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """The bytes that a rank holds from one time of a step on, by part."""

    time_s: float
    task: str
    held: MemoryUse


def memory_over_step(step: Prediction, stage: int) -> list[MemoryMoment]:
    """Return what a rank of one stage holds at each op of a step, in the order of time."""
    times: dict[tuple[str, str], float] = {}
    for span in step.timeline.spans_of(stage):
        times.setdefault((span.task, span.name), span.start_s)
    last_s = max((span.start_s for span in step.timeline.spans_of(stage) if span.stream == COMPUTE), default=0.0)
    moments: list[MemoryMoment] = []
    now_s = 0.0
    for task, use in memory_use.over_step(step.programs[stage], step.states_per_param):
        label = f"{task.kind}{task.microbatch}"
        at_s = times.get((label, use.peak_at), last_s if use.peak_at == "update:optimizer" else now_s)
        now_s = max(now_s, at_s)
        use = replace(use, overhead=step.hardware.reserved_bytes)
        if moments and moments[-1].time_s == now_s and moments[-1].held.total >= use.total:
            continue
        moments.append(MemoryMoment(now_s, label, use))
    return moments
