"""What it costs to hold less: step times with masters and states held in fewer bytes, taken by turns in one process.

Runs of the same small Llama in bf16 take turns of a few steps. Printed are bytes a weight between two steps, the median
time of a step and of an update, and the median over turns of the ratio to the first run, which holds everything in float32.
On a CPU times are processor times, which what else runs on the machine hardly changes.

    python benchmarks/held.py [--device cuda] [--hidden 512] [--layers 8] [--samples 8] [--turns 9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from samestep.datasets import batches
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.step import StepSpec
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.stepper import Stepper
from samestep.training.out_of_memory import held_bytes
from samestep.training.workload import Workload

STEPS = 3
"""Steps of a turn."""
WAYS = {
    "masters whole, states float32": (False, "float32"),
    "masters in halves, states float32": (True, "float32"),
    "masters in halves, states 8bit": (True, "8bit"),
}
"""Whether masters are split, and `numerics.optimizer_states`."""


@contextmanager
def _as_said(splits: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if not splits:
            stack.enter_context(patch.object(StepSpec, "splits_masters", False))
        yield


def _job(args: argparse.Namespace, states: str = "float32") -> Job:
    config = {
        "vocab_size": 256, "hidden_size": args.hidden, "intermediate_size": 11 * args.hidden // 4,
        "num_hidden_layers": args.layers, "num_attention_heads": 8, "num_key_value_heads": 8,
    }  # fmt: skip
    return Job(
        model={"source": "hf:llama", "config": config},
        data={"sequence_length": args.sequence},
        train={"global_batch": args.samples, "steps": 10**6, "watch_every": 0},
        numerics={"precision": "bf16", "optimizer_states": states},
    )


def _opened(job: Job, splits: bool, device: torch.device) -> Run:
    workload = Workload(job)
    run = Run(workload.source, Layout(), job, RankInfo(0, 0, 1, 1, device))
    with _as_said(splits):
        run.prepare(workload.example)
    return run


def _now(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    """Take the turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    for name, value in (("hidden", 512), ("layers", 8), ("samples", 8), ("sequence", 128), ("turns", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    device, jobs = torch.device(args.device), {name: _job(args, states) for name, (_, states) in WAYS.items()}
    runs = {name: _opened(jobs[name], splits, device) for name, (splits, _) in WAYS.items()}
    streams = {name: batches(Workload(job).dataset, job) for name, job in jobs.items()}
    updates: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.turns + 1):
        for name, run in runs.items():
            with patch.object(run._stepper, "change", _timed(run._stepper, device, updates[name])):
                began = _now(device)
                losses[name] += [run.step(next(streams[name])).loss for _ in range(STEPS)]
                times[name].append((_now(device) - began) / STEPS)
        if turn == 0:
            for found in (*times.values(), *updates.values()):
                found.clear()  # the first steps make states and choose kernels
    first = next(iter(runs))
    params = sum(param.numel() for param in runs[first].model.parameters())
    print(f"{params / 1e6:.1f} M weights, {args.samples} samples of {args.sequence} tokens, AdamW, bf16, {device}")
    print("| held | bytes a weight | step, ms | update, ms | step, ratio | losses |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name, run in runs.items():
        ratios = [mine / whole for mine, whole in zip(times[name], times[first], strict=True)]
        step, update = statistics.median(times[name]) * 1e3, statistics.median(updates[name]) * 1e3
        said = "equal" if losses[name] == losses[first] else f"last {losses[name][-1]:.4f} for {losses[first][-1]:.4f}"
        each = sum(held_bytes(run).values()) / params
        print(f"| {name} | {each:.2f} | {step:.1f} | {update:.1f} | {statistics.median(ratios):.3f} | {said} |")


def _timed(steps: Stepper, device: torch.device, found: list[float]):  # type: ignore[no-untyped-def]
    original = Stepper.change

    def change(assembly, do) -> None:  # type: ignore[no-untyped-def]
        began = _now(device)
        original(steps, assembly, do)
        found.append(_now(device) - began)

    return change


if __name__ == "__main__":
    main()
