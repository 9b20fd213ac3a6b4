"""What reading samples costs a step, and how much of it the thread and the processes of `run.data_workers` hide.

    python benchmarks/data_wait.py [--steps 30] [--share 0.3]

A data set computes in Python for a share of each step, as decoding does. The same run takes its steps without that work, with
a thread that reads ahead, and with processes that do; one rank runs, so that a machine of two cores has one free. Hidden is
the part of the reading's processor time for which the step did not wait:

    hidden = 1 - waited / read

The default job is measured as it is. Exits 1 where two processes hide less than nine tenths, or the default job waits for
one per cent of its time or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from canary import LENGTH, VOCABULARY, build

import samestep
from samestep import job_files as jobs
from samestep.building.loss import cross_entropy, loss_of
from samestep.building.model import model_source
from samestep.building.optimizer import optimizer_of
from samestep.datasets import open_dataset
from samestep.examination.examine import Source
from samestep.output.text import align_columns
from samestep.runtime.processes import join
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport

HIDDEN = 0.9
"""The least part of the reading that two processes must hide."""
WAITS = 0.01
"""The part of a step that the default job may wait."""
BATCH = 16


class Decoded:
    """Random tokens whose reading takes `seconds` of processor time for each sample."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            pass
        ids = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def reports(dataset: samestep.Dataset, workers: int, steps: int) -> list[StepReport]:
    """Take steps and return their reports, without the first ones."""
    job = samestep.Job(
        train={"global_batch": BATCH, "steps": steps + 5, "watch_every": 0},
        run={"device": "cpu", "data_workers": workers},
    )
    run = samestep.parallelize(build, cross_entropy, torch.optim.AdamW, job=job)
    return [run.step(batch) for batch in samestep.batches(dataset, job)][5:]


def default_job(steps: int) -> list[StepReport]:
    """Take steps of the default job on one rank, with its own data."""
    job = jobs.default([f"train.steps={steps + 5}", "train.watch_every=0"])
    source = Source(model_source(job), loss_of(job), optimizer_of(job), job.model.source)
    run = Run(source, samestep.Layout(), job, join.join("cpu"))
    return [run.step(batch) for batch in samestep.batches(open_dataset(job, "train"), job)][5:]


def _row(name: str, taken: Sequence[StepReport], read_s: float) -> tuple[list[str], float, float]:
    step_s = statistics.median(report.step_s for report in taken)
    waited_s = statistics.median(report.data_wait_s for report in taken)
    hidden = 1 - waited_s / read_s if read_s else 0.0
    cells = [name, f"{step_s * 1e3:.2f}", f"{waited_s * 1e3:.3f}", f"{waited_s / step_s:.1%}"]
    return [*cells, f"{hidden:.0%}" if read_s else ""], hidden, waited_s / step_s


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of each run")
    parser.add_argument("--share", type=float, default=0.3, help="part of a step that reading takes")
    chosen = parser.parse_args(words)
    plain = reports(Decoded(0.0), 0, chosen.steps)
    step_s = statistics.median(report.step_s for report in plain)
    read_s = step_s * chosen.share / (1 - chosen.share)
    rows = [["reading", "step, ms", "waited, ms", "of the step", "hidden"], _row("nothing to decode", plain, 0.0)[0]]
    hidden = 0.0
    for name, workers in (("a thread", 0), ("one process", 1), ("two processes", 2)):
        row, hidden, _ = _row(name, reports(Decoded(read_s / BATCH), workers, chosen.steps), read_s)
        rows.append(row)
    row, _, waited = _row("the default job", default_job(chosen.steps), 0.0)
    print(align_columns([*rows, row]))
    print(
        f"two processes hide {hidden:.0%} of reading (aim {HIDDEN:.0%}); the default job waits {waited:.2%} (aim < {WAITS:.0%})"
    )
    return int(hidden < HIDDEN or waited >= WAITS)


if __name__ == "__main__":
    sys.exit(main())
