"""The page of an explained run: its steps in numbers, the verdict, predicted above measured on one timeline, parts, memory, curves."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, cast

from samestep import hardware
from samestep import job_files as jobs
from samestep.explanation.explain import Explained
from samestep.explanation.step_kernels import RankKernels, seconds_of
from samestep.explanation.step_memory import StepMemory
from samestep.explanation.step_parts import StepPart, parts_of
from samestep.layout import Layout
from samestep.output.page.charts import Bar, MemoryCurve, bars, memory, stacked
from samestep.output.page.page import Answer, Page, Section, table
from samestep.output.page.quantities import count, duration, share, size
from samestep.output.page.timeline_figure import Lane, TimelineFigure, some_of
from samestep.program import recorded
from samestep.simulation import prediction_page
from samestep.simulation.memory import REST
from samestep.simulation.partition import ROWS
from samestep.simulation.prediction_page import lanes_of, most_drawn, row_kind
from samestep.training.logged_steps import LoggedSeries, curves, logged

MOST_BARS = 64
"""Number of ranks above which only some have a bar."""
_MOST_OPS, _MOST_KERNELS = 24, 4
"""Numbers of ops, and of kernels of each, that are listed."""
_MOST_LETTERS = 120
"""Letters of a kernel's name."""


def page_of(found: Explained, *, small: bool = False) -> Page:
    """Return the page of an explained run; a small one has neither boxes to zoom into nor a record."""
    ranks = len(found.found.records)
    keys = ("loss", "tokens_per_s", "samples_per_s", "mfu") if found.folder.name == recorded.FOLDER else ()
    series = logged(found.folder.parent, *keys)
    steps = found.found.steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return Page(
        verb="explain",
        title=f"{duration(found.step_s).text} a step on {ranks:,} rank{'s' * (ranks > 1)}",
        subject=f'{_run_name(found)} · "{found.layout}" · {which}',
        answers=_answers(found, series),
        verdict=found.verdict.line,
        reasons=found.verdict.reasons,
        tries=found.verdict.tries,
        sections=[*_figures(found, small=small), *_kernels(found), *curves(series), *_described(found)],
        notes=[*(one.to_line() for one in found.found.clocks.values() if one.width_s), *found.missing],
        record=None if small else _record(found),
    )


def _record(found: Explained) -> dict[str, object]:
    """Return the numbers of the page: of kernels those that it shows, since those of all ranks would be megabytes."""
    record = found.to_record()
    ranks = [
        {key: value for key, value in rank.items() if key != "kernels"} for rank in cast(list[Any], record["ranks"])
    ]
    known = _shown_kernels(found)
    rows = (
        []
        if known is None
        else [row.to_record() for _, rows in known.by_op[:_MOST_OPS] for row in rows[:_MOST_KERNELS]]
    )
    return {**record, "ranks": ranks, "kernels": rows}


def _shown_kernels(found: Explained) -> RankKernels | None:
    """Return the kernels of the busiest rank, or else of the first that has recorded some."""
    return found.kernels.get(found.found.busiest) or next(iter(found.kernels.values()), None)


def _run_name(found: Explained) -> str:
    return found.folder.resolve().parent.name if found.folder.name == recorded.FOLDER else found.folder.name


def _answers(found: Explained, series: dict[str, LoggedSeries]) -> list[Answer]:
    """Return step, speed, MFU and memory, each with the range over the recorded steps and with the prediction."""
    said = found.predicted
    lasted = found.steps_s
    answers = [
        Answer(
            "step",
            duration(found.step_s),
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
    for key, label, form in ((unit, unit.replace("_per_s", " a second"), count), ("mfu", "MFU", share)):
        if values := _over_steps(found, series.get(key)):
            note = f"{predicted[key]} predicted" if key in predicted else ""
            mean = sum(values) / len(values)
            answers.append(Answer(label, form(mean), (form(min(values)), form(max(values))), note))
    memories = [one for rank in found.found.records if (one := found.memory_of(rank)) is not None]
    if memories:
        most = max(memories, key=lambda one: one.peak_bytes)
        note = f"on rank {most.rank}" + ("" if said is None else f", {size(said.peak.total).text} predicted")
        least = min(one.peak_bytes for one in memories)
        answers.append(Answer("memory", size(most.peak_bytes), (size(least), size(most.peak_bytes)), note))
    return answers


def _over_steps(found: Explained, series: LoggedSeries | None) -> list[float]:
    """Return the values of a series in the steps that are explained."""
    if series is None:
        return []
    return [value for step, value in zip(series.steps, series.values, strict=True) if step in found.found.steps]


def _figures(found: Explained, *, small: bool) -> Iterator[Section]:
    timeline = found.found.last.timeline
    ranks = some_of([*found.found.records], [found.found.busiest], most_drawn(timeline))
    lanes = [lane for rank in ranks for lane in _lanes(found, rank)]
    longest_s = max(timeline.step_s, found.predicted.timeline.step_s if found.predicted else 0.0)
    some = (
        ""
        if len(ranks) == len(found.found.records)
        else f" {len(ranks)} of {len(found.found.records)} ranks are drawn."
    )
    said = " The prediction is the slim lane above." if found.predicted else ""
    caption = f"Step {found.found.last.step}, one lane for each rank and stream, as it was measured.{said}"
    yield Section("The step", TimelineFigure(lanes, longest_s).to_html(small=small), caption + some)
    parts = [*found.parts, StepPart("rest", None, found.rest_s, None if found.predicted is None else 0.0)]
    rows = [Bar(part.label, row_kind(part.name, part.axis), part.measured_s, part.predicted_s) for part in parts]
    caption = f"The rows of rank {found.found.busiest}, which waits least; they add up to its step."
    yield Section("Where the time goes", bars(rows, found.found.lasted_s[found.found.busiest]), caption)
    if len(found.found.records) > 1:
        yield _each_rank(found)
    yield from _bytes(found)
    yield from _memory(found, ranks)


def _bytes(found: Explained) -> Iterator[Section]:
    """Yield the bytes of the busiest rank's buffers by axis: those that its program lists, and those that torch was given."""
    sent = found.bytes_of(found.found.busiest)
    is_counted = any(one.measured is not None for one in sent)
    rows = [
        (one.axis, size(one.predicted).to_html(), *([size(one.measured or 0).to_html()] if is_counted else []))
        for one in sent
    ]
    if rows:
        head = ("axis", "the program lists", *(["torch was given"] if is_counted else []))
        caption = f"Buffers of rank {found.found.busiest} in a step, whole and with their padding."
        yield Section("What is sent", table(head, rows), caption)


def _lanes(found: Explained, rank: int) -> Iterator[Lane]:
    """Yield the lanes of a rank, each below the predicted one of its stage."""
    measured = [*lanes_of(found.found.last.timeline, [rank])]
    host = found.found.records[rank].head.host
    hosts = {record.head.host for record in found.found.records.values()}
    group = f"rank {rank}" + (f" on {host}" if len(hosts) > 1 else "")
    said = {}
    if found.predicted is not None:
        stage = found.found.records[rank].head.stage
        said = {lane.name: lane for lane in lanes_of(found.predicted.timeline, [stage], predicted=True)}
    for lane in measured:
        if above := said.pop(lane.name, None):
            yield Lane(group, above.name, above.boxes, is_predicted=True)
        yield Lane(group, lane.name, lane.boxes)
    for lane in said.values():
        yield Lane(group, lane.name, lane.boxes, is_predicted=True)


def _each_rank(found: Explained) -> Section:
    """Return one bar a rank: the rows of its step, end to end."""
    longest_s = max(found.found.lasted_s.values())
    rows, names = [], dict[str, str]()
    for rank in some_of([*found.found.records], [found.found.busiest], MOST_BARS):
        parts, rest_s = parts_of(found.found, rank, None)
        shown = [(part.label, row_kind(part.name, part.axis), part.measured_s) for part in parts] + [
            ("rest", "rest", rest_s)
        ]
        names |= {label: kind for label, kind, seconds in shown if seconds > 0.002 * longest_s}
        rows.append(stacked(f"rank {rank}", shown, longest_s, duration(found.found.lasted_s[rank])))
    in_order = sorted(names, key=lambda label: ROWS.index(label.partition(" ")[0]))
    legend = "".join(f'<span><i class="{names[label]}"></i>{label}</span>' for label in in_order)
    caption = "The step of every rank: a rank that waits less than the others is waited for."
    return Section("Each rank", f'<ul class="bars">{"".join(rows)}</ul><p class="legend">{legend}</p>', caption)


def _memory(found: Explained, ranks: list[int]) -> Iterator[Section]:
    """Yield the measured memory of some ranks over the step, and its peak by part against the predicted one."""
    shown = some_of(ranks, [found.found.busiest], prediction_page.MOST_CHARTS)
    memories = [one for rank in shown if (one := found.memory_of(rank)) is not None]
    if not memories:
        return
    charts = "".join(_memory_chart(found, one) for one in memories)
    legend = "".join(f'<span><i class="{_PART_KINDS[name]}"></i>{name}</span>' for name in memories[0].parts)
    legend += '<span><i class="said"></i>predicted, in all</span>' if found.predicted else ""
    of = "of the process, libraries included" if memories[0].is_process else "that the allocator has given away"
    caption = f"Memory {of}, at the end of each layer and task."
    yield Section("Memory", f'<div class="grid">{charts}</div><p class="legend">{legend}</p>', caption)
    head = ("peak of memory", "measured", *(["predicted"] if found.predicted else []))
    rows = [row for one in memories for row in _memory_rows(one)]
    yield Section(
        "The peak by part",
        table(head, rows),
        "What is kept between steps is counted from tensors; the rest is what else was in use.",
    )


def _memory_chart(found: Explained, one: StepMemory) -> str:
    """Return the measured memory of a rank over the step, with the predicted total of its stage as a line."""
    lasted_s = found.found.lasted_s[one.rank]
    if found.predicted is None:
        return memory(_measured_memory(one), lasted_s)
    said = prediction_page.predicted_memory(found.predicted, found.found.records[one.rank].head.stage)
    return memory(_measured_memory(one), lasted_s, said, found.predicted.timeline.step_s)


_PART_KINDS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", REST: "activations"}


def _memory_rows(one: StepMemory) -> Iterator[tuple[str, ...]]:
    """Yield a row for the peak of a rank, and one for each of its parts."""
    said = [size(one.predicted.total).to_html()] if one.predicted else []
    at = f"<span><b>rank {one.rank}</b> at <code>{escape(one.peak_at)}</code></span>"
    yield (at, size(one.peak_bytes).to_html(), *said)
    for name, held in one.parts.items():
        yield (name, size(held).to_html(), *([size(one.predicted_parts[name]).to_html()] if one.predicted else []))
    if one.reserved_bytes is not None:
        yield ("reserved", size(one.reserved_bytes).to_html(), *([""] if one.predicted else []))


def _measured_memory(one: StepMemory) -> MemoryCurve:
    return MemoryCurve(
        f"rank {one.rank}",
        {_PART_KINDS[name]: values for name, values in one.over_step().items()},
        [mark.time_ns / 1e9 for mark in one.marks],
        None,
        size(one.peak_bytes),
        one.peak_at,
    )


def _kernels(found: Explained) -> Iterator[Section]:
    """Yield the kernels of the busiest rank that has recorded some, by block."""
    known = _shown_kernels(found)
    if known is None:
        return
    items = "".join(
        f"<li><span><code>{escape(op)}</code> {duration(seconds_of(kernels)).to_html()}</span>"
        + "".join(
            f"<small><code>{escape(row.kernel[:_MOST_LETTERS])}</code> {duration(row.seconds).to_html()}, "
            f"{count(row.calls).to_html()} calls</small>"
            for row in kernels[:_MOST_KERNELS]
        )
        + "</li>"
        for op, kernels in known.by_op[:_MOST_OPS]
    )
    more = "" if len(known.by_op) <= _MOST_OPS else f" {_MOST_OPS} of {len(known.by_op)} ops are shown."
    caption = f"What took the time of each forward and backward of rank {known.rank}, by the kernels' own time.{more}"
    yield Section("Kernels", f'<ul class="reasons">{items}</ul>', caption)


def _described(found: Explained) -> Iterator[Section]:
    path = found.folder / recorded.JOB
    if path.is_file():
        machine = found.predicted.hardware if found.predicted else hardware.own()
        yield prediction_page.described(jobs.load(path), Layout.parse(found.layout), machine)
