"""The charts of the documents, each as a function that returns its data and one that draws them as SVG.

`python docs/pictures.py` writes them to docs/pictures/; each file holds a digest of its data, so a test can tell which are stale.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from svg import COLOURS, GRID, INK, MUTED, Axes, arrow, box, legend, line, picture, text

from samestep import Layout, simulate
from samestep import job_files as jobs
from samestep.memory.memory_use import held_bytes_per_param
from samestep.program.ranks import Ranks

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "benchmarks" / "rows"
WIDTH = 760


class Chart(NamedTuple):
    """A picture: its title, its data, and how they are drawn."""

    title: str
    data: Callable[[], Any]
    draw: Callable[[Any], tuple[int, list[str]]]
    """From the data to the height and the parts of the picture."""

    def svg(self) -> str:
        data = self.data()
        height, parts = self.draw(data)
        return picture(WIDTH, height, parts, self.title, digest(data))


def digest(data: Any) -> str:
    """Return a digest of data, floats to six digits."""
    rounded = re.sub(r"-?\d+\.\d+(e[-+]\d+)?", lambda found: f"{float(found[0]):.6g}", json.dumps(data, sort_keys=True))
    return hashlib.sha256(rounded.encode()).hexdigest()[:16]


def architecture_data() -> Any:
    """Return the boxes of the drawing."""
    return {
        "above": [["job", "model, data, loss, optimizer", "what is computed"], ["layout", "dp=2 tp=2 pp=2 zero=1", "on which ranks"]],
        "middle": ["one step as a program", "every computation and every collective of every rank, in order"],
        "below": [["plan", "finds the fastest that fits"], ["simulate", "predicts time and memory"], ["train", "executes it"], ["verify", "compares with one device"]],
    }  # fmt: skip


def architecture(data: Any) -> tuple[int, list[str]]:
    parts = []
    for index, (name, example, about) in enumerate(data["above"]):
        left = 110 + index * 300
        parts += [
            box(left, 20, 240, 74, "#eef3ff", stroke=COLOURS[0], round_=8),
            text(left + 120, 42, name, anchor="middle", size=15, bold=True),
        ]
        parts += [
            text(left + 120, 62, example, anchor="middle"),
            text(left + 120, 80, about, anchor="middle", fill=MUTED),
        ]
        parts.append(arrow(left + 120, 94, 340 + index * 80, 130))
    parts += [
        box(140, 132, 480, 60, "#effaf4", stroke=COLOURS[2], round_=8),
        text(380, 156, data["middle"][0], anchor="middle", size=15, bold=True),
    ]
    parts.append(text(380, 176, data["middle"][1], anchor="middle", fill=MUTED))
    for index, (name, about) in enumerate(data["below"]):
        left = 20 + index * 183
        parts += [
            arrow(200 + index * 120, 192, left + 85, 232),
            box(left, 234, 170, 56, "#fff6ee", stroke=COLOURS[1], round_=8),
        ]
        parts += [
            text(left + 85, 256, name, anchor="middle", size=15, bold=True),
            text(left + 85, 276, about, anchor="middle", fill=MUTED, size=11),
        ]
    return 306, parts


def memory_data() -> Any:
    """Return the bytes of a parameter in mixed precision with Adam on 8 ranks."""
    return {f"zero={zero}": [held_bytes_per_param(zero, ranks) for ranks in (2, 8, 64)] for zero in range(4)}


def memory(data: Any) -> tuple[int, list[str]]:
    names = [("2 ranks", COLOURS[0]), ("8 ranks", COLOURS[1]), ("64 ranks", COLOURS[2])]
    parts = [
        text(
            20,
            24,
            "Bytes per parameter on one rank: bf16 weights, float32 gradients, masters and Adam states",
            bold=True,
        ),
        *legend(120, 48, names, columns=3),
    ]
    for row, (layout, values) in enumerate(data.items()):
        top = 66 + row * 62
        parts.append(text(110, top + 26, layout, anchor="end"))
        for index, value in enumerate(values):
            parts += [
                box(120, top + index * 17, value * 36, 14, names[index][1]),
                text(126 + value * 36, top + index * 17 + 11, f"{value:.2f}", size=11),
            ]
    return 66 + 62 * len(data), parts


def grid_data() -> Any:
    """Return the rank of each place of `dp=2 tp=2 pp=2`."""
    ranks = Ranks.of(Layout("dp=2 tp=2 pp=2"))
    return [[rank, {axis: ranks.coordinate(rank, axis) for axis in ("pp", "dp_replicate", "tp")}] for rank in range(8)]


def grid(data: Any) -> tuple[int, list[str]]:
    parts = [text(20, 24, 'The ranks of "dp=2 tp=2 pp=2": which part of the model, and which samples', bold=True)]
    for rank, place in data:
        left, top = 40 + place["tp"] * 150 + place["dp_replicate"] * 350, 60 + place["pp"] * 100
        parts += [
            box(left, top, 140, 76, "#eef3ff" if place["pp"] == 0 else "#fff6ee", stroke=COLOURS[place["pp"]], round_=6)
        ]
        parts += [
            text(left + 70, top + 24, f"rank {rank}", anchor="middle", size=14, bold=True),
            text(left + 70, top + 44, f"layers: half {place['pp'] + 1}", anchor="middle", size=11),
        ]
        parts.append(text(left + 70, top + 60, f"heads, columns: half {place['tp'] + 1}", anchor="middle", size=11))
    for replica in range(2):
        parts.append(text(185 + replica * 350, 48, f"samples: half {replica + 1} (dp)", anchor="middle", fill=MUTED))
    parts += [
        text(185, 256, "neighbours: tp, most communication", anchor="middle", fill=MUTED, size=11),
        text(535, 256, "rows: pp, activations between stages", anchor="middle", fill=MUTED, size=11),
    ]
    return 272, parts


SCHEDULES = {
    "gpipe": "pp=4 microbatch=1 schedule=gpipe",
    "1f1b": "pp=4 microbatch=1 schedule=1f1b",
    "interleaved": "pp=4 microbatch=1 schedule=interleaved virtual_stages=2",
    "zero-bubble": "pp=4 microbatch=1 schedule=zero-bubble",
}


def schedules_data() -> Any:
    """Return the time, the bubble and the passes of each stage, as the simulator predicts them for a small decoder."""
    settings = ["model.config.num_hidden_layers=8", "train.global_batch=8"]
    job = jobs.load(ROOT / "jobs" / "default.toml", settings)
    found = {}
    for name, layout in SCHEDULES.items():
        prediction = simulate(job, layout, "cpu-laptop")
        timeline = prediction.timeline
        lanes = []
        for stage in timeline.stages:
            lane: list[list[Any]] = []
            for span in timeline.spans_of(stage):
                if span.stream == "compute" and span.end_s > span.start_s:
                    kind = span.task[:1]
                    if lane and lane[-1][3] == span.task and span.start_s - lane[-1][1] < 1e-9:
                        lane[-1][1] = span.end_s
                    else:
                        lane.append([span.start_s, span.end_s, kind, span.task])
            lanes.append(
                [
                    [round(start / timeline.step_s, 5), round(end / timeline.step_s, 5), kind, task]
                    for start, end, kind, task in lane
                ]
            )
        found[name] = {"bubble": prediction.bubble_fraction, "step_ms": prediction.step_s * 1e3, "lanes": lanes}
    return found


PASSES = {
    "F": ("forward", "#2f5fd0"),
    "B": ("backward", "#c2571a"),
    "W": ("weight gradients", "#12805c"),
    "U": ("update", "#5c5f66"),
}


def schedules(data: Any) -> tuple[int, list[str]]:
    parts = [
        text(20, 24, "Pipeline schedules: 4 stages, 8 micro-batches, drawn by the simulator", bold=True),
        *legend(20, 48, [*PASSES.values()], columns=4),
    ]
    longest = max(one["step_ms"] for one in data.values())
    for row, (name, one) in enumerate(data.items()):
        top = 70 + row * 92
        parts.append(text(20, top + 10, f"{name}: {one['step_ms']:.0f} ms, bubble {one['bubble']:.0%}"))
        width = (WIDTH - 100) * one["step_ms"] / longest
        for stage, lane in enumerate(one["lanes"]):
            parts.append(text(72, top + 26 + stage * 15, f"stage {stage}", anchor="end", size=10, fill=MUTED))
            parts += [box(80, top + 16 + stage * 15, width, 13, "#f0f2f4")]
            parts += [
                box(
                    80 + width * start,
                    top + 16 + stage * 15,
                    width * (end - start) - 0.6,
                    13,
                    PASSES.get(kind, ("", INK))[1],
                )
                for start, end, kind, _ in lane
            ]
    return 74 + 92 * len(data), parts


def predictions_data() -> Any:
    """Return measured and predicted seconds of a step of the published bests."""
    rows = json.loads((ROWS / "published_bests.json").read_text(encoding="utf-8"))
    return [
        [row["measured_s"], row["theirs"]["step_s"]]
        for row in rows
        if row.get("measured_s") and (row.get("theirs") or {}).get("step_s")
    ]


def predictions(data: Any) -> tuple[int, list[str]]:
    axes = Axes((70, 50, WIDTH - 30, 400), (0.03, 1000.0), (0.03, 1000.0), log_x=True, log_y=True)
    within = sum(1 / 1.3 <= predicted / measured <= 1.3 for measured, predicted in data)
    parts = axes.frame(
        (0.1, 1, 10, 100), (0.1, 1, 10, 100), "measured seconds per step, published", "predicted seconds per step"
    )
    for by, dash in ((1.0, ""), (1 / 1.3, "4 4"), (1.3, "4 4")):
        parts.append(
            line(
                [axes.at(0.03 / min(by, 1), 0.03 * max(by, 1)), axes.at(1000 / max(by, 1), 1000 * min(by, 1))],
                MUTED,
                dash=dash,
            )
        )
    for measured, predicted in data:
        x, y = axes.at(measured, predicted)
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{COLOURS[0]}' fill-opacity='0.55'/>")
    parts.append(
        text(
            70,
            24,
            f"{len(data)} published bests on GPUs: {within} of {len(data)} predictions within 30 % (dashed)",
            bold=True,
        )
    )
    return 446, parts


def losses_data() -> Any:
    return json.loads((ROWS / "layout_losses.json").read_text(encoding="utf-8"))["losses"]


def losses(data: Any) -> tuple[int, list[str]]:
    one = data["dp=1"]
    steps = len(one)
    apart = {
        name: [abs(loss / other - 1) for loss, other in zip(curve, one, strict=True)]
        for name, curve in data.items()
        if name != "dp=1"
    }
    worst = max(max(gaps) for gaps in apart.values())
    upper = Axes((70, 50, WIDTH - 30, 230), (0, steps), (0, 6))
    parts = upper.frame(range(0, steps + 1, 20), (0, 2, 4, 6), "step", "loss: each dash is another layout")
    for index, curve in enumerate(data.values()):
        points = [upper.at(step, loss) for step, loss in enumerate(curve, 1)]
        dash = f"0 {8 * index} 8 {8 * (len(data) - 1 - index)}"
        parts.append(line(points, COLOURS[index % len(COLOURS)], width=2, dash=dash))
    parts.append(
        text(
            70,
            24,
            f"One job in {len(data)} layouts: the curves lie on top of each other; at most {worst:.0e} apart",
            bold=True,
        )
    )
    parts.append(text(20, 296, "relative difference from one device in float32, from 1e-9 to 1e-5", size=12))
    parts.append(text(WIDTH - 30, 296, "largest", anchor="end"))
    for row, (name, gaps) in enumerate(apart.items()):
        top = 306 + row * 26
        strip = Axes((290, top, WIDTH - 90, top + 22), (0, steps), (1e-9, 1e-5), log_y=True)
        parts += [
            box(290, top, WIDTH - 380, 22, "#f0f2f4"),
            line([strip.at(0, 1e-7), strip.at(steps, 1e-7)], GRID, width=1),
            line(
                [strip.at(step, min(max(gap, 1e-9), 1e-5)) for step, gap in enumerate(gaps, 1)], COLOURS[0], width=1.2
            ),
            text(282, top + 15, name, anchor="end", size=11),
            text(WIDTH - 30, top + 15, f"{max(gaps):.1e}", anchor="end", size=11),
        ]
    return 306 + 26 * len(apart), parts


def errors_data() -> Any:
    return json.loads((ROWS / "layout_losses.json").read_text(encoding="utf-8"))["errors"]


def errors(data: Any) -> tuple[int, list[str]]:
    checks = [*dict.fromkeys(name for one in data.values() for name in one)]
    bottom = 56 + 20 * len(checks)
    axes = Axes((140, 50, WIDTH - 30, bottom), (1e-17, 1e-8), (0, 1), log_x=True)
    parts = [text(20, 24, "samestep verify: error of each check against one device, in float64", bold=True)]
    parts += axes.frame(
        (1e-17, 1e-15, 1e-13, 1e-11, 1e-9),
        (),
        "relative error; 0 is drawn at 1e-17, and the dashed line is the limit",
        "",
    )
    parts.append(line([axes.at(1e-9, 0), axes.at(1e-9, 1)], COLOURS[4], dash="5 4"))
    for row, name in enumerate(checks):
        top = 64 + row * 20
        parts += [text(132, top + 4, name, anchor="end", size=11), line([(140, top), (WIDTH - 30, top)], GRID, width=1)]
        for index, (_, one) in enumerate(data.items()):
            if name in one:
                x, _ = axes.at(max(one[name], 1e-17), 0)
                parts.append(f"<circle cx='{x:.1f}' cy='{top + (index - 1.5) * 3:.1f}' r='3' fill='{COLOURS[index]}'/>")
    parts += legend(140, bottom + 56, [(name, COLOURS[index]) for index, name in enumerate(data)], columns=4)
    return bottom + 70, parts


def overhead_data() -> Any:
    """Return the ratios of `make bench`."""
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"\| two ranks \| step time, ([^|]+? / [^|]+?) \| ([\d.]+) \| ([\d.]+) to ([\d.]+)", page)
    return [[what, *map(float, numbers)] for what, *numbers in found]


def overhead(data: Any) -> tuple[int, list[str]]:
    bottom = 60 + 34 * len(data)
    axes = Axes((290, 50, WIDTH - 30, bottom), (0.9, 1.1), (0, 1))
    parts = axes.frame((0.9, 0.95, 1.0, 1.05, 1.1), (), "step time, ratio (median and quartiles)", "")
    parts.append(text(20, 24, "Step time on two CPU ranks, measured by turns", bold=True))
    for row, (what, median, low, high) in enumerate(data):
        top = 74 + row * 34
        (left, _), (middle, _), (right, _) = (axes.at(value, 0) for value in (low, median, high))
        parts += [text(280, top + 4, what, anchor="end"), line([(left, top), (right, top)], COLOURS[0], width=4)]
        parts += [
            f"<circle cx='{middle:.1f}' cy='{top}' r='6' fill='{COLOURS[0]}'/>",
            text(middle, top - 9, f"{median:.3f}", anchor="middle", size=11),
        ]
    return bottom + 46, parts


CHARTS = {
    "architecture": Chart("Job and layout become a program, which four commands read", architecture_data, architecture),
    "losses": Chart("Loss curves of one job in twelve layouts", losses_data, losses),
    "errors": Chart("Errors of samestep verify", errors_data, errors),
    "predictions": Chart("Predicted and measured step times", predictions_data, predictions),
    "ranks": Chart("The grid of ranks of dp=2 tp=2 pp=2", grid_data, grid),
    "zero": Chart("Memory of a parameter by ZeRO stage", memory_data, memory),
    "schedules": Chart("Four pipeline schedules", schedules_data, schedules),
    "overhead": Chart("Step time beside DDP, Accelerate and Fabric", overhead_data, overhead),
}
"""The charts by the names of their files."""
