"""Held-out loss of replicas that are trained apart, against synchronous training on the same tokens.

    python benchmarks/fewer_exchanges.py                     the default job, two replicas, an exchange every 20 steps, three seeds
    python benchmarks/fewer_exchanges.py --seeds 1 --every 50 --replicas 4 --steps 300

One device runs the replicas one after the other, which gives what any layout of theirs does. Bytes are those that a rank sends
to other replicas in a step, without the step's scalars: a float32 all_reduce against the program's exchange.
"""

from __future__ import annotations

import argparse

import torch

from samestep import job as jobs
from samestep.datasets import batches
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.ops import OpKind
from samestep.program.program import Program
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.strategies import program_of
from samestep.training.workload import Workload, held_out_losses

WAYS = {
    "synchronous": (),
    "DiLoCo": ("numerics.exchange_every={every}",),
    "DiLoCo, int8": ("numerics.exchange_every={every}", "numerics.compression=int8"),
    "DiLoCo, int4": ("numerics.exchange_every={every}", "numerics.compression=int4"),
    "momentum 0.5": ("numerics.exchange_every={every}", "numerics.outer_momentum=0.5"),
    "warmed up": ("numerics.exchange_every={every}", "numerics.outer_momentum=0.5", "schedule.warmup_steps=150"),
    "local SGD": ("numerics.exchange_every={every}", "numerics.outer_lr=1.0", "numerics.outer_momentum=0.0"),
}
"""What is compared, as settings of the default job."""


def job_of(settings: tuple[str, ...], seed: int, given: argparse.Namespace) -> Job:
    """Return the default job with the settings of one way of training."""
    common = [f"train.steps={given.steps}", f"train.seed={seed}", "train.watch_every=0"]
    replicas = given.replicas if settings else 1
    mine = [setting.format(every=given.every) for setting in settings]
    return jobs.default([*common, f"numerics.replicas={replicas}", *mine])


def held_out(job: Job) -> float:
    """Train a job on one device, and return its held-out loss."""
    work = Workload(job)
    run = Run(work.source, Layout(), job, RankInfo(0, 0, 1, 1, torch.device("cpu")))
    for batch in batches(work.dataset, job):
        run.step(batch)
    return held_out_losses(run, work)["held_out"]


def bytes_a_step(job: Job, replicas: int) -> float:
    """Return the bytes that a rank of `dp=replicas` sends to other replicas, over the steps of an exchange."""
    program = program_of(Workload(job).spec, job, Layout(dp_replicate=replicas))
    return _sent(program, replicas) / job.numerics.exchange_every


def _sent(program: Program, replicas: int) -> float:
    every_step = [op for _, op in program.ops() if op.axis is not None and op.owner != "scalars"]
    return sum(
        (2 if op.kind is OpKind.ALL_REDUCE else 1) * op.size_bytes * (replicas - 1) / replicas
        for op in (*every_step, *program.exchange)
    )


def main() -> None:
    """Print the table, a row for each way of training, as each seed is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("seeds", 3), ("every", 20), ("replicas", 2), ("steps", 700)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, settings in WAYS.items():
        size = bytes_a_step(job_of(settings, 0, given), given.replicas)
        print(f"{name:14} {size:12,.0f} bytes a step between replicas")
    for seed in range(given.seeds):
        plain = None
        for name, settings in WAYS.items():
            loss = held_out(job_of(settings, seed, given))
            plain = plain or loss
            print(f"seed {seed}  {name:14} held-out loss {loss:.4f} ({loss / plain - 1:+.2%})", flush=True)


if __name__ == "__main__":
    main()
