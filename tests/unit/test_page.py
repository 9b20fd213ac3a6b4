"""The pages of `plan`, `simulate` and `explain`: complete, readable at any width, and made of the numbers that they show."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from dataclasses import replace
from functools import cache
from html import escape, unescape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.presets import preset
from samestep.output.text import SECONDS, digits, duration, gib, share, tick_labels, ticks
from samestep.proof.verdict import Cause, Check, Verdict
from samestep.training.run_folder import Summary
from samestep.wings.explain.differences import Differences, differences
from samestep.wings.explain.explain import explain
from samestep.wings.explain.foreign_traces import ForeignSteps, explain_traces
from samestep.wings.pages import explained_page, plan_page, prediction_page
from samestep.wings.pages.charts import MOST_BOXES, Bar, Box, Lane, TimelineFigure, bars, some_of
from samestep.wings.pages.page import page_of
from samestep.wings.pages.prediction_page import memory_over_step
from samestep.wings.plan import plan
from samestep.wings.plan.simulation.partition import ROWS, WAIT, Span
from samestep.wings.plan.simulation.simulate import Prediction, as_text, predict
from samestep.wings.plan.simulation.timeline import Timeline
from tests.unit import pages
from tests.unit.pages import assert_whole
from tests.unit.test_explain import records, write
from tests.unit.test_foreign_traces import on_cpu, store

LAYOUTS = (
    "dp=2 zero=2 recompute=full microbatch=4",
    "dp=4 zero=3 recompute=selective",
    "pp=2 schedule=zero-bubble microbatch=4",
    "pp=2 schedule=interleaved virtual_stages=2 microbatch=2 tp=2 sequence_parallel",
    "tp=2 cp=2 loss_chunk=256",
)


@cache
def gpt2(layout: str) -> Prediction:
    job = Job(
        model={"source": "preset:gpt2"},
        train={"global_batch": 16},
        data={"sequence_length": 1024},
        numerics={"precision": "bf16"},
    )
    return predict(preset("gpt2"), job, Layout(layout), load("a100-80x8"))


def foreign(folder: Path) -> ForeignSteps:
    folder.mkdir(exist_ok=True)
    store(folder, lambda rank: on_cpu(rank, late_ms=3.0 * rank))
    return explain_traces(folder)


def compared(folder: Path) -> Differences:
    write(records(), folder)
    return differences(str(folder), "dp=4", "cpu-laptop")


def explained(folder: Path) -> str:
    write(records(), folder)
    lines = [f'{{"step": {step}, "loss": {5 / step}, "tokens_per_s": {1000 + step}}}\n' for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "lo')
    return explained_page.page_of(explain(folder, hardware="cpu-laptop")).to_html()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prediction_is_a_whole_page_with_its_ops_and_its_most_memory(layout: str) -> None:
    found = gpt2(layout)
    text = prediction_page.page_of(found).to_html()
    page = assert_whole(text)
    wanted = ["The step", "Where the time goes", "Memory", "Job and layout"]
    assert [heading for heading in page.headings if heading in wanted] == wanted
    record = {key: value for key, value in page.record.items() if key != "page"}
    assert record["step_s"] == found.step_s
    lanes = [(f"stage {stage}", stream) for stage in found.timeline.stages for stream in found.timeline.streams(stage)]
    drawn = [svg.label for svg in page.svgs if svg.label.startswith("stage ")]
    assert drawn == [f"{stage}, {stream}" for stage, stream in lanes]
    assert_boxes_are_ops(found, pages.read(text).boxes)
    for stage, use in enumerate(found.memory):
        moments = memory_over_step(found, stage)
        most = max(moments, key=lambda moment: moment.held.total)
        assert most.held == use
        times = [moment.time_s for moment in moments]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= found.timeline.step_s


def assert_boxes_are_ops(found: Prediction, data: dict[str, Any]) -> None:
    """What a reader zooms into has the name, the task and the times of each op."""
    tick_s, seen = data["unit_s"], []
    for row in data["lanes"]:
        now = 0
        for name, task, gap, length in zip(*(row[place::4] for place in range(4)), strict=True):
            now += gap + length
            seen.append((data["names"][name][0], data["tasks"][task], (now - length) * tick_s, now * tick_s))
    ops = [
        (span.name, span.task, span.start_s, span.end_s) for span in found.timeline.spans if span.end_s > span.start_s
    ]
    assert len(seen) == len(ops)
    for (name, task, start_s, end_s), (its, of, its_start_s, its_end_s) in zip(sorted(seen), sorted(ops), strict=True):
        assert (name, task) == (its, of)
        assert (start_s, end_s) == pytest.approx((its_start_s, its_end_s), abs=2 * tick_s)


def test_each_op_has_the_colour_of_its_row_or_its_own() -> None:
    css = files("samestep.wings.pages").joinpath("page.css").read_text()
    kinds = ("forward", "backward", "weight", "recompute", "update", "outer", "copy", *ROWS)
    spans = [Span(0, "compute", f"{kind}:a", "F0", at, at + 1) for at, kind in enumerate(kinds)]
    (lane,) = prediction_page.lanes_of(Timeline(tuple(spans)), [0], {})
    drawn = [box.kind for box in lane.boxes]
    assert drawn[:7] == ["forward", "backward", "weight", "recompute", "optimizer", "optimizer", "transfer"]
    for kind in {*drawn, *(prediction_page.row_kind(row, None) for row in ROWS)} - {WAIT}:
        assert re.search(rf"\.{kind}[,{{]", css), kind


@pytest.mark.parametrize(
    ("layout", "offloads"),
    [
        ("dp=2 offload", True),
        ("dp=2 zero=1 pp=2 microbatch=4 offload", True),
        ("dp=2 recompute=offload", True),
        ("dp=2 zero=1", False),
    ],
)
def test_offloading_names_the_cpu_memory_that_all_ranks_need(layout: str, offloads: bool) -> None:
    found = gpt2(layout)
    each = [use.host for use in found.memory for _ in range(found.devices // len(found.memory))]
    assert len(each) == Layout(layout).world_size
    line = f"CPU memory: {gib(sum(each))} GiB for the offloaded tensors of all ranks"
    assert bool(sum(each)) is offloads
    for text in (as_text(found), unescape(prediction_page.page_of(found).to_html())):
        assert (line in text) is offloads


def _luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2 of #rgb or #rrggbb."""
    digits = "".join(2 * one for one in colour[1:]) if len(colour) == 4 else colour[1:]
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_a_contrast_of_four_and_a_half(scheme: str) -> None:
    css, script = (files("samestep.wings.pages").joinpath(name).read_text() for name in ("page.css", "page.js"))
    light, dark = (dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r":root\{([^}]*)\}", css)[:2])
    colours = light if scheme == "light" else light | dark
    on = {"ink": ("paper", "card", "track"), "soft": ("paper", "card", "track"), "paper": ("ink",)}
    on |= dict.fromkeys(("good", "unsure", "bad"), ("card",))
    pairs = {
        (text, ground): contrast(colours[text], colours[ground]) for text, grounds in on.items() for ground in grounds
    }
    assert {pair: found for pair, found in pairs.items() if found < 4.5} == {}
    (least,) = re.findall(r"return LIGHT\[kind\] = .* > (\.\d+);", script)
    kinds = set(colours) - {"paper", "card", "ink", "soft", "line", "track", "link", "good", "unsure", "bad"}
    labels = {
        kind: contrast(colours[kind], "#000" if _luminance(colours[kind]) > float(least) else "#fff") for kind in kinds
    }
    assert len(labels) > 15
    assert {kind: found for kind, found in labels.items() if found < 4.5} == {}


def test_a_box_has_the_bytes_or_flops_of_its_op() -> None:
    found = gpt2("dp=2 zero=1 microbatch=2")
    data = pages.read(prediction_page.page_of(found).to_html()).boxes
    known = {(op.kind, op.owner): op.size_bytes or op.flops for _, op in found.programs[0].ops()}
    assert {(name, amount) for name, _, amount in data["names"]} == {
        (f"{kind}:{owner}", amount) for (kind, owner), amount in known.items()
    }


def test_each_recorded_step_has_a_timeline_and_the_last_one_is_shown(tmp_path: Path) -> None:
    write(records(), tmp_path)
    found = explain(tmp_path, hardware="cpu-laptop")
    text = explained_page.page_of(found).to_html()
    steps = re.findall(r'<div class="of-step" data-step="(\d+)" data-seconds="([\d.]+)"( hidden)?>', text)
    assert [int(step) for step, _, _ in steps] == [*found.found.steps]
    assert [float(seconds) for _, seconds, _ in steps] == pytest.approx(found.steps_s, rel=1e-5)
    assert len(steps) > 1
    assert [step for step, _, hidden in steps if not hidden] == [steps[-1][0]]
    assert text.count('class="boxes"') == len(steps)


def test_the_parts_of_a_step_stand_by_size_in_one_unit() -> None:
    text = bars([Bar("b", "dp", 2e-4, None), Bar("none", "tp", 0.0, None), Bar("a", "compute", 0.05, 0.04)], 0.06)
    assert re.findall(r"<li><span>(\w+)</span>", text) == ["a", "b"]
    assert re.findall(r">([\d.]+ \w+)</data>", text) == ["50.00 ms", "40.00 ms", "0.20 ms"]


def test_a_plan_compares_layouts_and_says_why_the_others_fell_out() -> None:
    job = Job(model={"source": "preset:gpt2"}, train={"global_batch": 64})
    found = plan.plan(job, 8, "a100-80x8", top=3)
    page = assert_whole(plan_page.page_of(found).to_html())
    assert [one for one in page.headings if one.startswith("Rejected") or "compared" in one] == [
        "Layouts compared",
        "Rejected layouts",
    ]
    assert sum(page.record["rejections"]["counts"].values()) == found.considered - len(found.best)
    assert [one["layout"] for one in page.record["best"]] == [str(one.layout) for one in found.best]


def test_where_nothing_fits_the_page_says_so() -> None:
    job = Job(model={"source": "preset:gpt2"}, train={"global_batch": 2})
    found = plan.plan(job, 2, replace(load("a10x8"), memory_bytes=2**26))
    assert not found.best
    page = assert_whole(plan_page.page_of(found).to_html())
    assert page.record["page"]["title"] == "No layout of 2 devices fits"


def test_an_explained_run_shows_predicted_above_measured(tmp_path: Path) -> None:
    text = explained(tmp_path)
    page = assert_whole(text)
    wanted = ["The step", "Where the time goes", "Each rank", "The run"]
    assert [heading for heading in page.headings if heading in wanted] == wanted
    labels = [svg.label for svg in page.svgs if svg.label.startswith("rank 0")]
    assert labels[0] == "rank 0, compute, predicted" if "predicted" in page.classes else "rank 0, compute"
    assert {svg.label for svg in page.svgs} >= {"loss", "tokens/s", *(f"rank {rank}" for rank in range(4))}
    assert page.record["verdict"] == page.record["page"]["verdict"]


def test_traces_of_others_and_two_steps_have_their_text_as_a_page(tmp_path: Path) -> None:
    for found in (foreign(tmp_path / "traces"), compared(tmp_path / "run")):
        title, _, rest = found.to_text().partition("\n")
        text = page_of(found).to_html()
        page = pages.read(text)
        assert page.record["page"]["title"] == title
        assert {**page.record, "page": None} == {**json.loads(json.dumps(found.to_record())), "page": None}
        assert all(escape(line) in text for line in rest.splitlines())


def test_many_lanes_of_many_ops_are_drawn_by_tasks_and_stay_small() -> None:
    rng = random.Random(0)
    lanes = []
    for rank in range(16):
        for stream in ("compute", "tp", "dp", "pp"):
            cuts = sorted(rng.random() for _ in range(1400))
            boxes = [
                Box(a, b, "forward", f"forward:layer{n % 90}", f"F{n // 40}") for n, (a, b) in enumerate(pairwise(cuts))
            ]
            lanes.append(Lane(f"rank {rank}", stream, boxes[::2]))
    assert len(TimelineFigure(lanes, 1.0).to_html()) < 350_000
    shown = pages.read(TimelineFigure(lanes, 1.0).to_html()).boxes["lanes"]
    assert sum(map(len, shown)) <= 4 * MOST_BOXES
    assert all(shown)
    assert some_of(range(100), [37], 8) == sorted({*some_of(range(100), [37], 8)})
    assert {0, 37, 99} <= {*some_of(range(100), [37], 8)}
    assert len(some_of(range(100), [37], 8)) == 8


def test_times_have_three_digits_and_a_unit() -> None:
    values = [7.4012, 0.0123, 4.2e-6, -2.8e-17, 0, 12345.6]
    assert [duration(value).text for value in values] == ["7.40 s", "12.3 ms", "4.20 µs", "0 s", "0 s", "12,346 s"]


def test_fractions_and_numbers() -> None:
    assert [share(one).text for one in (0, 0.0004, 0.013, 0.36, 1)] == ["0%", "<0.1%", "1.3%", "36%", "100%"]
    assert [digits(one) for one in (0, 0.00123, 9.999, 425031.2, float("nan"))] == [
        "0",
        "0.00123",
        "10.00",
        "425,031",
        "nan",
    ]


def test_ticks_are_round() -> None:
    for length, most in itertools.product([1e-7, 3.3e-3, 0.1, 1, 7.4, 999, 12345.6], [2, 4, 8]):
        found = ticks(length, most)
        assert 2 <= len(found) <= most + 1
        assert found[-1] <= length * (1 + 1e-9)
        step = found[1] - found[0]
        assert round(float(f"{step:.6e}".split("e")[0]), 6) in (1, 2, 5)
        labels = tick_labels(found, SECONDS)
        assert len({*labels}) == len(labels)


def test_a_notebook_shows_every_result_in_a_frame_of_its_own(tmp_path: Path) -> None:
    write(records(), tmp_path)
    check = Check(what="losses", error=1e-12, allowance=1e-9, compared=4)
    proof = Verdict(layout="dp=2", job="tiny", steps=2, precision="float64", checks=(check,))
    differs = replace(
        proof, checks=(replace(check, error=math.inf, where="step 1"),), cause=Cause.DATA, explanation="other rows"
    )
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": {5 / step}}}\n' for step in (1, 2, 3)))
    trained = Summary(
        tmp_path,
        3,
        1.5,
        1.25,
        0.5,
        stopped=False,
        proof="proven",
        remarks=("a remark",),
        goodput=0.75,
        seconds={"start": 1.0, "steps": 6.0, "saves": 1.0},
    )
    planned = plan.plan(Job(model={"source": "preset:gpt2"}, train={"global_batch": 64}), 2, "a100-80x8", top=1)
    shown: list[tuple[Any, str]] = [
        (gpt2("dp=2"), "per step on 2 devices"),
        (planned, "Layouts compared"),
        (explain(tmp_path), "per step on 4 ranks"),
        (proof, "proven: the same result"),
        (differs, "differs: different data"),
        (foreign(tmp_path / "traces"), "part, ms"),
        (compared(tmp_path / "run"), "difference ms"),
        (trained, "validation accuracy"),
        (trained, "Where the time of the run went"),
    ]
    for found, words in shown:
        frame = found._repr_html_()
        assert frame.startswith('<iframe srcdoc="')
        assert frame.count("<") == 2  # nothing of the page is outside of the frame
        page = unescape(re.findall(r'srcdoc="([^"]*)"', frame)[0])
        assert words in page
        assert len(frame) < 150_000
        pages.read(page)


@pytest.mark.skipif(pages.chromium() is None, reason="no Chromium is installed here")
def test_in_a_browser_nothing_overlaps_scrolls_or_fails(tmp_path: Path) -> None:
    job = Job(model={"source": "preset:gpt2"}, train={"global_batch": 64})
    texts = {
        "simulate": prediction_page.page_of(gpt2("pp=2 dp=2 microbatch=2")).to_html(),
        "plan": plan_page.page_of(plan.plan(job, 8, "a100-80x8", top=3)).to_html(),
        "explain": explained(tmp_path),
    }
    found = pages.looked_at(texts, tmp_path)
    assert {*found} == {f"{name} {width}" for name in texts for width in (390, 1200, "printed")}
    for name, one in found.items():
        assert one["problems"] == [], (name, one["problems"])
        assert one["texts"] > 30
        assert " from " in one["zoomed"]
        assert one["found"] > 0
        assert one["arrows"] > 0 or not name.startswith(("simulate", "explain"))
