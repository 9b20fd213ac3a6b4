"""Held-out losses of the default job with codecs and with fewer exchanges, on three seeds, beside those of float32.

    python benchmarks/held_out_losses.py codecs                 300 steps, two contributions a step
    python benchmarks/held_out_losses.py exchanges              700 steps, two replicas, an exchange every 20 steps
    python benchmarks/held_out_losses.py exchanges --seeds 0 --ways "every 20" --steps 100 --rows FILE

Two processes make the contributions, or train the replicas.
Each run is kept in the file of rows as it ends, and is not made again; `docs/tables.py` writes the tables of docs/slow-links.md.

How much chance is in a difference is measured beside it: two runs in float32 that differ by one rounding of one weight at the
beginning, or that add the gradients of two micro-batches in place of one sum, are as far apart as their last lines say.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import circumstances
import torch

import samestep
from samestep import Job, Layout
from samestep import job_files as jobs
from samestep.datasets import batches
from samestep.program.codecs import CODECS
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.training.workload import Workload, held_out_losses

ROWS = Path(__file__).parent / "rows" / "held_out_losses.json"
SEEDS = (0, 1, 2)
EVERY = 20


@dataclass(frozen=True)
class Way:
    """One way of training the default job."""

    settings: tuple[str, ...] = ()
    layout: str = "dp=1"
    is_rounded: bool = False
    """Whether one weight begins one rounding away from its value."""
    beside: str = "float32"
    """The way whose loss its own is held against."""


def _apart(warmup: int, *settings: str) -> Way:
    """Return replicas that are trained apart, beside a synchronous run with as many steps of warm-up."""
    beside = f"synchronous, warm-up {warmup}"
    keys = (*_warmed(warmup), "numerics.replicas=2", f"numerics.exchange_every={EVERY}", *settings)
    return Way(keys, layout="dp=2", beside=beside)


def _warmed(warmup: int) -> tuple[str, ...]:
    return (f"schedule.warmup_steps={warmup}",)


CODED: Mapping[str, Way] = {
    "float32": Way(beside=""),
    "float32, one weight rounded another way": Way(is_rounded=True),
    "float32, two micro-batches": Way(layout="dp=1 microbatch=16"),
    **{name: Way(("numerics.replicas=2", f"numerics.compression={name}"), layout="dp=2") for name in CODECS},
}
"""What is compared at an exchange in every step."""
APART: Mapping[str, Way] = {
    **{f"synchronous, warm-up {steps}": Way(_warmed(steps), beside="") for steps in (50, 150, 300)},
    **{
        f"synchronous, warm-up 300, lr {lr}": Way(
            (*_warmed(300), f"optimizer.lr={lr}"), beside="synchronous, warm-up 300"
        )
        for lr in ("4e-3", "9e-3")
    },
    "warm-up 300": _apart(300),
    "warm-up 300, int8": _apart(300, "numerics.compression=int8"),
    "warm-up 300, outer_lr 0.5": _apart(300, "numerics.outer_lr=0.5"),
    "warm-up 300, outer_momentum 0.3": _apart(300, "numerics.outer_momentum=0.3"),
    "warm-up 300, outer_lr 1, outer_momentum 0 (local SGD)": _apart(
        300, "numerics.outer_lr=1.0", "numerics.outer_momentum=0.0"
    ),
    "warm-up 300, outer_lr 0.6, outer_momentum 0.6": _apart(
        300, "numerics.outer_lr=0.6", "numerics.outer_momentum=0.6"
    ),
    "warm-up 300, outer_lr 0.9, outer_momentum 0.4": _apart(
        300, "numerics.outer_lr=0.9", "numerics.outer_momentum=0.4"
    ),
    **{f"warm-up 300, lr {lr}": _apart(300, f"optimizer.lr={lr}") for lr in ("4e-3", "9e-3")},
    "warm-up 150": _apart(150),
    "warm-up 150, outer_lr 1, outer_momentum 0.3": _apart(150, "numerics.outer_lr=1.0", "numerics.outer_momentum=0.3"),
    "warm-up 50": _apart(50),
    "warm-up 50, outer_momentum 0.9 (the paper's)": _apart(50, "numerics.outer_momentum=0.9"),
    "warm-up 50, outer_lr 1": _apart(50, "numerics.outer_lr=1.0"),
    "warm-up 50, outer_lr 1, outer_momentum 0 (local SGD)": _apart(
        50, "numerics.outer_lr=1.0", "numerics.outer_momentum=0.0"
    ),
}
"""What is compared where replicas are trained apart."""
TABLES: Mapping[str, tuple[int, Mapping[str, Way]]] = {"codecs": (300, CODED), "exchanges": (700, APART)}
"""Steps and ways of each table."""


def held_out(job: Job, way: Way) -> float:
    """Train a job in the layout of its way, and return its validation loss."""
    layout = Layout(way.layout)
    loss: float = samestep.launch(functools.partial(_train, job, way), ranks=layout.world_size, device="cpu")
    return loss


def _train(job: Job, way: Way, place: RankInfo) -> float:
    work = Workload(job)
    run = Run(work.source, Layout(way.layout), job, place)
    for batch in batches(work.dataset, job):
        if batch.step == 0 and way.is_rounded:
            run.prepare(batch.samples([0]))
            _round_one(run)
        run.step(batch)
    return held_out_losses(run, work)["held_out"]


@torch.no_grad()
def _round_one(run: Run) -> None:
    """Move one number of the last norm, which every token is multiplied by, to the next float32."""
    weight = [param for param in run.model.parameters() if param.dim() == 1][-1]
    weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))


def missing(table: str, seeds: Sequence[int], ways: Sequence[str], steps: int, rows: Sequence[Any]) -> Iterator[Any]:
    """Yield the way's name and the seed of each run that is not among the rows."""
    made = {(row["table"], row["way"], row["seed"], row["steps"]) for row in rows}
    for seed in seeds:
        for name in ways:
            if (table, name, seed, steps) not in made:
                yield name, seed


def markdown(table: str, path: Path = ROWS) -> str:
    """Return the tables of the kept rows, one for each number of steps, the usual one first."""
    usual, _ = TABLES[table]
    rows = [row for row in json.loads(path.read_text(encoding="utf-8")) if row["table"] == table]
    every = sorted({row["steps"] for row in rows}, key=lambda steps: (steps != usual, steps))
    parts = [_of_steps(table, steps, [row for row in rows if row["steps"] == steps]) for steps in every]
    return "\n\n".join([*parts, circumstances.sentence(rows)])


def _of_steps(table: str, steps: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of rows: each way's validation losses, beside those of the way that it is held against."""
    _, ways = TABLES[table]
    losses = {(row["way"], row["seed"]): row["held_out"] for row in rows}
    seeds = sorted({seed for _, seed in losses})
    head = [f"{steps:,} steps", *(f"seed {seed}" for seed in seeds), "mean"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, way in ways.items():
        mine = {seed: losses[name, seed] for seed in seeds if (name, seed) in losses}
        beside = {seed: losses[way.beside, seed] for seed in mine if (way.beside, seed) in losses}
        cells = [_cell(mine[seed], beside.get(seed)) if seed in mine else "" for seed in seeds]
        mean = _cell(_mean(mine), _mean(beside) if len(beside) == len(mine) else None) if len(mine) > 1 else ""
        lines += [f"| {name} | {' | '.join(cells)} | {mean} |"] if mine else []
    return "\n".join(lines)


def _mean(losses: Mapping[int, float]) -> float:
    return statistics.fmean(losses.values())


def _cell(loss: float, beside: float | None) -> str:
    return f"{loss:.3f}" if beside is None else f"{loss:.3f} ({loss / beside - 1:+.1%})"


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, and keep each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--ways", nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE")
    given = parser.parse_args(words)
    usual, known = TABLES[given.table]
    steps, ways = given.steps or usual, given.ways or list(known)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads(given.rows.read_text()) if given.rows.exists() else []
    for name, seed in [*missing(given.table, given.seeds, ways, steps, rows)]:
        way = known[name]
        job = jobs.default([f"train.steps={steps}", f"train.seed={seed}", "train.watch_every=0", *way.settings])
        began, measured = time.perf_counter(), circumstances.now()
        loss = held_out(job, way)
        row = {"table": given.table, "way": name, "seed": seed, "steps": steps, "held_out": loss}
        rows.append({**row, circumstances.KEY: measured})
        given.rows.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"seed {seed}  {name:40} validation loss {loss:.4f}  ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
