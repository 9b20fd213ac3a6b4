"""The page of a prediction: whether it fits, how fast it is, its step on a timeline, its parts and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.output.page.charts import Bar, MemoryCurve, bars
from samestep.output.page.charts import memory as memory_chart
from samestep.output.page.page import Answer, Page, Section, words
from samestep.output.page.quantities import count, duration, share, size
from samestep.output.page.timeline_figure import Box, Lane, TimelineFigure, most_groups, some_of
from samestep.program.ops import OpKind
from samestep.simulation import bound_by, memory
from samestep.simulation.memory_curve import memory_over_step
from samestep.simulation.partition import TRANSFER, WAIT, row_name
from samestep.simulation.prediction import Prediction, intervals
from samestep.simulation.spans import COMPUTE
from samestep.simulation.timeline import Timeline

MOST_CHARTS = 8
"""Number of stages whose memory is drawn."""
_PASSES = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.WEIGHT)
"""Kinds of ops on the compute stream that have a colour each; all others have that of their row."""


def page_of(found: Prediction, *, small: bool = False) -> Page:
    """Return the page of a prediction; a small one has neither boxes to zoom into nor a record."""
    return Page(
        verb="simulate",
        title=title_of(found),
        subject=subject_of(found),
        answers=answers_of(found),
        verdict=f"Bound by {bound_by.binds(found)}",
        reasons=bound_by.reasons(found),
        sections=[*figures_of(found, small=small), described(found.job, found.layout, found.hardware)],
        notes=notes_of(found.labels),
        record=None if small else found.to_record(),
    )


def title_of(found: Prediction) -> str:
    """Return the answer in one sentence."""
    fits = ("Fits" if found.chance_to_fit >= 0.5 else "May fit") if found.fits else "Does not fit"
    return f"{fits}: {duration(found.step_s).text} a step on {found.devices:,} device{'s' * (found.devices > 1)}"


def subject_of(found: Prediction) -> str:
    """Return model, layout and machine in one line."""
    return f'{found.job.model.source} · "{found.layout}" · {found.hardware.name}'


def answers_of(found: Prediction) -> list[Answer]:
    """Return whether a layout fits, and its step, its speed and its MFU, each with the interval of the record of predictions."""
    low_s, high_s = intervals()["time"].of(found.step_s)
    least, most = intervals()["memory"].of(found.peak.total)
    per_s = found.tokens / found.step_s
    room = f"with a chance of {found.chance_to_fit:.0%}, of {size(found.hardware.memory_bytes).text}"
    tone = "good" if found.fits and found.chance_to_fit >= 0.5 else "unsure" if found.fits else "bad"
    return [
        Answer("fits" if found.fits else "does not fit", size(found.peak.total), (size(least), size(most)), room, tone),
        Answer("step", duration(found.step_s), (duration(low_s), duration(high_s))),
        Answer(
            f"{found.unit} a second",
            count(per_s),
            (count(found.tokens / high_s), count(found.tokens / low_s)),
            f"{count(found.tokens_per_s_per_device).text} a device",
        ),
        Answer(
            "MFU", share(found.mfu), (share(found.mfu * found.step_s / high_s), share(found.mfu * found.step_s / low_s))
        ),
    ]


def figures_of(found: Prediction, *, small: bool = False) -> Iterator[Section]:
    """Yield the figures of a prediction: the step, its parts, its memory."""
    stages, peak = found.timeline.stages, found.memory.index(found.peak)
    drawn = some_of(stages, [peak], most_drawn(found.timeline))
    some = "" if len(drawn) == len(stages) else f" {len(drawn)} of {len(stages)} stages are drawn."
    figure = TimelineFigure([*lanes_of(found.timeline, drawn)], found.timeline.step_s)
    yield Section(
        "The step",
        figure.to_html(small=small),
        f"One lane for each pipeline stage and stream, all ranks of a stage at once.{some}",
    )
    parts = [Bar(row_label(row.name, row.axis), row_kind(row.name, row.axis), None, row.seconds) for row in found.parts]
    if found.exchange_s:
        parts.append(Bar("exchange of replicas", "dp", None, found.step_s - found.timeline.step_s))
    caption = f"The rows of stage {found.parts[0].stage if found.parts else 0}, which computes longest; they add up to the step."
    yield Section("Where the time goes", bars(parts, found.step_s), caption)
    charts = [
        memory_chart(predicted_memory(found, stage), found.timeline.step_s)
        for stage in some_of(stages, [peak], MOST_CHARTS)
    ]
    keys = dict.fromkeys(name for use in found.memory for name, held in use.parts().items() if held)
    legend = "".join(f'<span><i class="{name.replace(" ", "-")}"></i>{name}</span>' for name in keys)
    caption = "A rank of each stage over the step, against the capacity of its device (dashed)."
    kept = memory.allocator_summary(found.peak, found.reserved_bytes, found.hardware)
    caption = " ".join([caption, *(f"{line[0].upper()}{line[1:]}." for line in kept)])
    yield Section("Memory", f'<div class="grid">{"".join(charts)}</div><p class="legend">{legend}</p>', caption)


def most_drawn(timeline: Timeline) -> int:
    """Return the number of stages or ranks of a timeline that a page draws."""
    groups = max(1, len(timeline.stages))
    streams = sum(len(timeline.streams(stage)) for stage in timeline.stages)
    return most_groups(streams / groups)


def lanes_of(timeline: Timeline, drawn: list[int], *, predicted: bool = False) -> Iterator[Lane]:
    """Yield a lane for each stream of some stages or ranks."""
    for stage in drawn:
        boxes: dict[str, list[Box]] = {stream: [] for stream in timeline.streams(stage)}
        for span in timeline.spans_of(stage):
            if span.end_s > span.start_s:
                boxes[span.stream].append(
                    Box(span.start_s, span.end_s, _kind(span.stream, span.name), span.name, span.task)
                )
        for stream, found in boxes.items():
            found.sort(key=lambda box: box.start_s)
            yield Lane(f"{timeline.lane} {stage}", stream, found, predicted)


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


def row_label(name: str, axis: str | None) -> str:
    """Return the name of a part of a step with its axis."""
    return name if axis is None else f"{name} {axis}"


def predicted_memory(found: Prediction, stage: int, label: str = "") -> MemoryCurve:
    """Return the predicted memory of a rank of one stage over the step."""
    moments, use = memory_over_step(found, stage), found.memory[stage]
    held = [one.held.parts() for one in moments]
    parts = {name: [one[name] for one in held] for name in use.parts()}
    return MemoryCurve(
        label or f"stage {stage}",
        parts,
        [one.time_s for one in moments],
        found.hardware.memory_bytes,
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
    named = {f"layout.{key}": value for key, value in _changed(_words(Layout()), _words(layout)).items()}
    return Section(
        "Job and layout", words({**keys_of(job), **named, **machine}), "Keys that differ from their defaults."
    )


def keys_of(job: Job) -> dict[str, object]:
    """Return the keys of a job that differ from their defaults."""
    usual, mine = (
        Job().model_dump(mode="json"),
        job.model_dump(mode="json", exclude={"layout": True, "run": {"folder"}}),
    )
    changed = {table: _changed(usual[table], row) for table, row in mine.items()}
    return {key: value for key, value in _flat("", changed) if value not in (None, [], "")}


def _flat(path: str, tables: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{path}{key}.", value)
        else:
            yield f"{path}{key}", value


def _words(layout: Layout) -> dict[str, object]:
    return {field.name: getattr(layout, field.name) for field in fields(Layout)}


def _changed(usual: Mapping[str, object], mine: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in mine.items() if usual.get(key) != value}


def notes_of(labels: Mapping[str, str]) -> list[str]:
    """Return notes on how the numbers of a prediction were computed."""
    time, held = intervals()["time"], intervals()["memory"]
    return [
        *(f"{subject}: {origin}." for subject, origin in labels.items()),
        f"Intervals hold 8 in 10 of {time.rows:,} published steps and of {held.rows:,} published peaks of memory.",
    ]
