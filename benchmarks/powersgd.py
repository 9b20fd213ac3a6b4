"""PowerSGD beside PyTorch's own hook, `powerSGD_hook` of DistributedDataParallel: milliseconds a step and validation loss, in one run.

    python benchmarks/powersgd.py                        the default job on two ranks of one thread each, rank 4, 300 steps
    python benchmarks/powersgd.py --rows benchmarks/rows/powersgd.json
    python benchmarks/powersgd.py --rank 2 --steps 100 --set model.config.hidden_size=192 --set train.seed=1

Both train from equal weights, on the same samples with the same optimizer, schedule and clipping, and take turns of three steps
in the same two processes, each turn begun by the other one; so do both without compression. Seconds are the medians of the turns,
ratios the medians of those of one turn, with their quartiles; with --rows FILE they are kept, for the table of docs/slow-links.md. The hook is told to factor the same matrices as samestep does
(min_compression_rate = 1), and to begin as soon as it may, in its third step; error feedback and warm start are on, as they
are by default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import circumstances
import torch
import torch.distributed as dist
from peers import ddp_options
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from samestep import Job, Layout, launch
from samestep import job_files as jobs
from samestep.building import drawn_rows
from samestep.building.model import call_model
from samestep.building.optimizer import learning_rate_factor
from samestep.datasets import Batch, batches
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.training.workload import Workload, held_out_losses

ROWS = Path(__file__).parent / "rows" / "powersgd.json"
RANKS, TURN, WARM = 2, 3, 2
"""Ranks; steps of a turn; turns that are not timed."""


class Ours:
    """samestep, with a codec or none."""

    def __init__(self, job: Job, place: RankInfo, compression: str) -> None:
        numerics = {"compression": compression, "replicas": RANKS if compression != "none" else 1}
        self.job = job.model_copy(update={"numerics": job.numerics.model_copy(update=numerics)})
        self.work = Workload(self.job)
        self.run = Run(self.work.source, Layout(dp_replicate=RANKS), self.job, place)
        self.run.prepare(next(batches(self.work.dataset, self.job)).samples([0]))

    def step(self, batch: Batch) -> None:
        """Take a step."""
        _ = self.run.step(batch).loss

    def held_out(self) -> float:
        """Return the validation loss; every rank must call it."""
        return held_out_losses(self.run, self.work)["held_out"]


class Hook:
    """DistributedDataParallel with the weights that samestep begins with, and with the hook or without it."""

    def __init__(self, ours: Ours, rank: int | None) -> None:
        job, source = ours.job, ours.work.source
        model = drawn_rows.call(source.model, job.train.seed)
        model.load_state_dict(ours.run.model.state_dict())
        self._index = ours.run.place.rank
        self._first_lr, self._factor = job.optimizer.lr, learning_rate_factor(job)
        self._clip_norm, self._loss = job.optimizer.clip_norm, source.loss
        self._optimizer = source.optimizer(list(model.named_parameters()))
        self.model = DistributedDataParallel(model, **ddp_options())
        if rank is not None:
            state = powersgd.PowerSGDState(
                None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
            )
            self.model.register_comm_hook(state, powersgd.powerSGD_hook)

    def step(self, batch: Batch) -> None:
        """Take a step."""
        samples = batch.samples(batch.shares(self._index, RANKS, 1)[0])
        loss_sum, count = self._loss(call_model(self.model, samples), samples)
        for group in self._optimizer.param_groups:
            group["lr"] = self._first_lr * self._factor(batch.step)
        self._optimizer.zero_grad()
        (loss_sum / count).backward()
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._optimizer.step()
        _ = loss_sum.item()

    @torch.no_grad()
    def held_out(self, ours: Ours) -> float:
        """Return the validation loss, by way of another contestant that is done; every rank must call it."""
        ours.run.model.load_state_dict(self.model.module.state_dict())
        return ours.held_out()


def turn_s(step: Callable[[Batch], None], steps: Sequence[Batch]) -> float:
    """Return the seconds of a step, taken in a turn of some."""
    dist.barrier()
    began = time.perf_counter()
    for batch in steps:
        step(batch)
    return (time.perf_counter() - began) / len(steps)


def compare(place: RankInfo, job: Job, settings: Sequence[str], rows: Path | None) -> None:
    """Train all contestants, turn by turn, and print and keep what was measured; every rank must call it."""
    measured = circumstances.now()
    ours, plain = (Ours(job, place, compression) for compression in ("powersgd", "none"))
    steps: dict[str, Any] = {
        "samestep": ours.step,
        "torch hook": (hook := Hook(ours, job.numerics.compression_rank)).step,
        "samestep, none": plain.step,
        "DDP, none": (ddp := Hook(ours, None)).step,
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for index, turn in enumerate(_turns(batches(ours.work.dataset, ours.job))):
        order = [*steps][index % len(steps) :] + [*steps][: index % len(steps)]
        for name in order:
            took_s = turn_s(steps[name], turn)
            if index >= WARM:
                taken[name].append(took_s)
    losses = [ours.held_out(), hook.held_out(ours), plain.held_out(), ddp.held_out(plain)]
    if place.rank == 0:
        row = {**row_of(taken, losses, settings), circumstances.KEY: measured}
        print(json.dumps(row))
        if rows is not None:
            kept = json.loads(rows.read_text()) if rows.exists() else []
            kept = [one for one in kept if one["settings"] != row["settings"]]
            rows.write_text(json.dumps([*kept, row], indent=1) + "\n", encoding="utf-8")


def row_of(taken: Mapping[str, Sequence[float]], losses: Sequence[float], settings: Sequence[str]) -> dict[str, Any]:
    """Return what was measured as plain data."""
    ratios = [a / b for a, b in zip(taken["samestep"], taken["torch hook"], strict=True)]
    ways = {
        name: {"step_ms": statistics.median(found) * 1e3, "held_out": loss}
        for (name, found), loss in zip(taken.items(), losses, strict=True)
    }
    return {"settings": [*settings], "ways": ways, "ratio": statistics.quantiles(ratios)}


def markdown(path: Path = ROWS) -> str:
    """Return the table of the kept rows."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    names = [*rows[0]["ways"]]
    lines = [f"| the default job with | {' | '.join(names)} | samestep / torch hook |"]
    lines.append("| --- |" + " ---: |" * (len(names) + 1))
    for row in rows:
        cells = [f"{way['step_ms']:.1f} ms, loss {way['held_out']:.3f}" for way in row["ways"].values()]
        low, middle, high = row["ratio"]
        said = ", ".join(f"`{setting}`" for setting in row["settings"])
        lines.append(f"| {said} | {' | '.join(cells)} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    return "\n".join([*lines, "", circumstances.sentence(rows)])


def _turns(stream: Iterator[Batch]) -> Iterator[list[Batch]]:
    while turn := [*islice(stream, TURN)]:
        yield turn


def main() -> None:
    """Compare on ranks of their own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], help="a setting of the job")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep the figures")
    given = parser.parse_args()
    settings = [f"train.steps={given.steps}", f"numerics.compression_rank={given.rank}", *given.set]
    job = jobs.default([*settings, "train.watch_every=0"])
    launch(compare, (job, settings, given.rows), ranks=RANKS)


if __name__ == "__main__":
    main()
