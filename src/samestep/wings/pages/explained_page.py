"""The page of an explained run: its steps in numbers, the verdict, predicted above measured on one timeline, parts, memory, curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from html import escape

from samestep import hardware
from samestep import job_files as jobs
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import REST
from samestep.output.text import count, duration, share, size
from samestep.program import recorded
from samestep.wings.explain.explain import Explained
from samestep.wings.explain.step_bytes import StepMemory
from samestep.wings.explain.step_parts import StepPart, parts_of
from samestep.wings.pages import prediction_page
from samestep.wings.pages.charts import (
    MOST_BOXES,
    Bar,
    Lane,
    MemoryCurve,
    TimelineFigure,
    bars,
    each_rank,
    left_out,
    legend,
    memory,
    of_steps,
    some_of,
)
from samestep.wings.pages.page import Answer, Page, Section, table
from samestep.wings.pages.prediction_page import lanes_of, most_drawn, row_kind
from samestep.wings.pages.summary_page import LoggedSeries, curves, logged
from samestep.wings.plan.simulation.timeline import Timeline

MOST_BARS = 64
"""Number of ranks above which only some have a bar."""
_MOST_STEPS = 8
"""Steps that have a timeline."""


def page_of(explained: Explained, *, small: bool = False) -> Page:
    """Return the page of an explained run; a small one has neither boxes to zoom into nor a record."""
    ranks = len(explained.found.records)
    keys = ("loss", "tokens_per_s", "samples_per_s", "mfu") if explained.folder.name == recorded.FOLDER else ()
    series = logged(explained.folder.parent, *keys)
    steps = explained.found.steps
    mean = f", mean of {which(steps)}" if len(steps) > 1 else ""
    return Page(
        verb="explain",
        title=f"{duration(explained.step_s).text} per step on {ranks:,} rank{'s' * (ranks > 1)}{mean}",
        subject=" · ".join([*_jobs(explained), f'"{explained.layout}"', _run_name(explained), which(steps)]),
        answers=_answers(explained, series),
        verdict=explained.verdict.line,
        reasons=explained.verdict.reasons,
        tries=explained.verdict.tries,
        sections=[*_figures(explained, small=small), *curves(series), *_described(explained)],
        notes=[
            _machine(explained),
            *(clock.to_line() for clock in explained.found.clocks.values() if clock.width_s),
            *explained.missing,
        ],
        record=None if small else explained.to_record(),
    )


def _machine(explained: Explained) -> str:
    """Return the hosts and devices of the run."""
    heads = [record.head for record in explained.found.records.values()]
    hosts, devices = (sorted({*names}) for names in ([head.host for head in heads], [head.device for head in heads]))
    when = datetime.fromtimestamp(max(path.stat().st_mtime for path in explained.folder.glob("*.jsonl"))).astimezone()
    return f"rank 0 to {len(heads) - 1} on {', '.join(hosts[:8])}: {', '.join(devices)}, recorded on {when:%Y-%m-%d %H:%M %Z}."


def _jobs(explained: Explained) -> dict[str, Job]:
    """Return the job of the run by its model; nothing if the folder has no job."""
    path = explained.folder / recorded.JOB
    return {job.model.source: job for job in (jobs.load(path),)} if path.is_file() else {}


def which(steps: Sequence[int]) -> str:
    """Return some steps in words."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _run_name(explained: Explained) -> str:
    return explained.folder.resolve().parent.name if explained.folder.name == recorded.FOLDER else explained.folder.name


def _answers(explained: Explained, series: dict[str, LoggedSeries]) -> list[Answer]:
    """Return step, speed, MFU and memory, each with the range over the recorded steps and with the prediction."""
    said = explained.predicted
    lasted = explained.steps_s
    answers = [
        Answer(
            "step",
            duration(explained.step_s),
            (duration(min(lasted)), duration(max(lasted))),
            "" if said is None else f"{duration(said.step_s).text} predicted",
        )
    ]
    unit = next((key for key in ("tokens_per_s", "samples_per_s") if key in series), "")
    predicted = (
        {}
        if said is None
        else {"mfu": share(said.mfu).text, f"{said.unit}_per_s": count(said.tokens / said.step_s).text}
    )
    for key, label, form in ((unit, unit.replace("_per_s", "/s"), count), ("mfu", "MFU", share)):
        if values := _over_steps(explained, series.get(key)):
            note = f"{predicted[key]} predicted" if key in predicted else ""
            mean = sum(values) / len(values)
            answers.append(Answer(label, form(mean), (form(min(values)), form(max(values))), note))
    memories = [peak for rank in explained.found.records if (peak := explained.memory_of(rank)) is not None]
    if memories:
        most = max(memories, key=lambda peak: peak.peak_bytes)
        note = f"on rank {most.rank}" + ("" if said is None else f", {size(said.peak.total).text} predicted")
        least = min(peak.peak_bytes for peak in memories)
        answers.append(Answer("memory", size(most.peak_bytes), (size(least), size(most.peak_bytes)), note))
    return answers


def _over_steps(explained: Explained, series: LoggedSeries | None) -> list[float]:
    """Return the values of a series in the steps that are explained."""
    if series is None:
        return []
    return [value for step, value in zip(series.steps, series.values, strict=True) if step in explained.found.steps]


def _figures(explained: Explained, *, small: bool) -> Iterator[Section]:
    ranks = some_of([*explained.found.records], [explained.found.busiest], most_drawn(explained.found.last.timeline))
    yield _timelines(explained, ranks, 1 if small else _MOST_STEPS, small=small)
    parts = [*explained.parts, StepPart("rest", None, explained.rest_s, None if explained.predicted is None else 0.0)]
    rows = [Bar(part.label, row_kind(part.name, part.axis), part.measured_s, part.predicted_s) for part in parts]
    if waits_s := explained.cpu_waits_s:
        rows = [replace(row, measured_s=(row.measured_s or 0.0) - waits_s * (row.label == "compute")) for row in rows]
        rows.append(Bar("compute, waiting for a CPU", "idle", waits_s, None))
    caption = f"Rank {explained.found.busiest}, the slowest rank, {which(explained.found.steps)}. The parts add up to the step."
    yield Section("Where the time goes", bars(rows, explained.found.lasted_s[explained.found.busiest]), caption)
    if len(explained.found.records) > 1:
        yield _each_rank(explained)
    yield from _bytes(explained)
    yield from _memory(explained, ranks)


def _bytes(explained: Explained) -> Iterator[Section]:
    """Yield the bytes of the busiest rank's buffers by axis: those that its program lists, and those that torch was given."""
    sent = explained.bytes_of(explained.found.busiest)
    is_counted = any(row.measured is not None for row in sent)
    rows = [
        (row.axis, size(row.predicted).to_html(), *([size(row.measured or 0).to_html()] if is_counted else []))
        for row in sent
    ]
    if rows:
        head = ("mesh dimension", "predicted", *(["sent"] if is_counted else []))
        caption = f"Bytes of the buffers of rank {explained.found.busiest} in one step, with padding."
        yield Section("Communication", table(head, rows), caption)


def _timelines(explained: Explained, ranks: list[int], most: int, *, small: bool) -> Section:
    """Return the timelines of the last steps, of which a reader chooses one."""
    steps = dict(zip(explained.found.steps, explained.steps_s, strict=True))
    shown = [*steps][-most:]
    longest_s = explained.predicted.timeline.step_s if explained.predicted else 0.0
    figures = {}
    for step in shown:
        timeline = explained.found.timelines[step]
        lanes = [lane for rank in ranks for lane in _lanes(explained, timeline, rank)]
        figure = TimelineFigure(lanes, max(timeline.step_s, longest_s), MOST_BOXES // len(shown))
        figures[step] = (steps[step], figure.to_html(small=small))
    caption = f"Step {shown[-1]} is shown first: {duration(steps[shown[-1]]).text} on its slowest rank. One track for each rank and stream."
    caption += " The thin track above each track is the prediction." if explained.predicted else ""
    return Section("The step", of_steps(figures), caption + left_out(ranks, [*explained.found.records], "ranks"))


def _lanes(explained: Explained, timeline: Timeline, rank: int) -> Iterator[Lane]:
    """Yield the lanes of a rank in one step, each below the predicted one of its stage."""
    head = explained.found.records[rank].head
    amounts = {} if explained.predicted is None else prediction_page.amounts_of(explained.predicted)
    sent = {f"{op.kind}:{op.owner}": op.size_bytes for op in head.ops}
    measured = [*lanes_of(timeline, [rank], {rank: {**amounts.get(head.stage, {}), **sent}})]
    hosts = {record.head.host for record in explained.found.records.values()}
    group = f"rank {rank}" + (f" on {head.host}" if len(hosts) > 1 else "")
    said = {}
    if explained.predicted is not None:
        predicted = lanes_of(explained.predicted.timeline, [head.stage], amounts, predicted=True)
        said = {lane.name: lane for lane in predicted}
    for lane in measured:
        if above := said.pop(lane.name, None):
            yield Lane(group, above.name, above.boxes, is_predicted=True)
        meets = f"{lane.name} {[*head.groups[lane.name]]}" if lane.name in head.groups else ""
        yield Lane(group, lane.name, lane.boxes, team=meets)
    for lane in said.values():
        yield Lane(group, lane.name, lane.boxes, is_predicted=True)


def _each_rank(explained: Explained) -> Section:
    """Return one bar per rank: the parts of its step, end to end."""
    shown = {}
    for rank in some_of([*explained.found.records], [explained.found.busiest], MOST_BARS):
        parts, rest_s = parts_of(explained.found, rank, None)
        parts = (*parts, StepPart("rest", None, rest_s, None))
        shown[rank] = [(part.label, row_kind(part.name, part.axis), part.measured_s) for part in parts]
    caption = "The step of every rank. The others wait for the slowest rank. Compute includes waiting for a CPU."
    return Section("Each rank", each_rank(shown, max(explained.found.lasted_s.values())), caption)


def _memory(explained: Explained, ranks: list[int]) -> Iterator[Section]:
    """Yield the measured memory of some ranks over the step, and its peak by part against the predicted one."""
    shown = some_of(ranks, [explained.found.busiest], prediction_page.MOST_CHARTS)
    memories = [peak for rank in shown if (peak := explained.memory_of(rank)) is not None]
    if not memories:
        return
    charts = "".join(_memory_chart(explained, peak) for peak in memories)
    kinds = {name: _PART_KINDS[name] for name in memories[0].parts}
    kinds |= {"predicted, in all": "said"} if explained.predicted else {}
    of = "of the process, libraries included" if memories[0].is_process else "that the allocator has given away"
    caption = f"Memory {of}, at the end of each layer and task."
    yield Section("Memory", f'<div class="grid">{charts}</div>{legend(kinds)}', caption)
    head = ("peak of memory", "measured", *(["predicted"] if explained.predicted else []))
    rows = [row for peak in memories for row in _memory_rows(peak)]
    yield Section(
        "The peak by part",
        table(head, rows),
        "Weights, gradients and optimizer states are counted from tensors; the rest is everything else that was in use.",
    )


def _memory_chart(explained: Explained, step_memory: StepMemory) -> str:
    """Return the measured memory of a rank over the step, with the predicted total of its stage as a line."""
    lasted_s = explained.found.lasted_s[step_memory.rank]
    if explained.predicted is None:
        return memory(_measured_memory(step_memory), lasted_s)
    said = prediction_page.predicted_memory(explained.predicted, explained.found.records[step_memory.rank].head.stage)
    return memory(_measured_memory(step_memory), lasted_s, said, explained.predicted.timeline.step_s)


_PART_KINDS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", REST: "activations"}


def _memory_rows(step_memory: StepMemory) -> Iterator[tuple[str, ...]]:
    """Yield a row for the peak of a rank, and one for each of its parts."""
    said = [size(step_memory.predicted.total).to_html()] if step_memory.predicted else []
    at = f"<span><b>rank {step_memory.rank}</b> at <code>{escape(step_memory.peak_at)}</code></span>"
    yield (at, size(step_memory.peak_bytes).to_html(), *said)
    for name, part_bytes in step_memory.parts.items():
        yield (
            name,
            size(part_bytes).to_html(),
            *([size(step_memory.predicted_parts[name]).to_html()] if step_memory.predicted else []),
        )
    if step_memory.reserved_bytes is not None:
        yield ("reserved", size(step_memory.reserved_bytes).to_html(), *([""] if step_memory.predicted else []))


def _measured_memory(step_memory: StepMemory) -> MemoryCurve:
    """Return the memory of a rank over the step; of a process, without the part of the rest that is always there."""
    parts = step_memory.over_step()
    base = min(parts[REST], default=0) if step_memory.is_process else 0
    return MemoryCurve(
        f"rank {step_memory.rank}",
        {_PART_KINDS[name]: [value - base * (name == REST) for value in values] for name, values in parts.items()},
        [mark.time_ns / 1e9 for mark in step_memory.marks],
        None,
        size(step_memory.peak_bytes),
        step_memory.peak_at,
        base,
    )


def _described(explained: Explained) -> Iterator[Section]:
    for job in _jobs(explained).values():
        machine = explained.predicted.hardware if explained.predicted else hardware.own()
        yield prediction_page.described(job, Layout(explained.layout), machine)
