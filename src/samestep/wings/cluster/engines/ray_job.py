"""Runs on Ray: the worker that Ray Train starts, and the program that `samestep submit --on ray` hands to a cluster.

A worker trains the job as under any launcher, and reports what it does Ray's way:

```python
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

TorchTrainer(samestep.ray_worker(job, "dp=4 tp=2", out="/shared/run"), scaling_config=ScalingConfig(num_workers=8)).fit()
```
Ray has numbered the ranks by the addresses of nodes and made their process group. It is made anew in our order where ranks of one
host are no neighbours (`rank_order.py`). When Ray starts the ranks again after a node was lost, the run resumes from the newest whole
checkpoint in `out`; with fewer ranks, the data degrees of the layout shrink, as with `--ranks MIN:MAX`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep import calls
from samestep import job_files as jobs
from samestep.errors import InputError
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.checkpoints import manifests
from samestep.runtime.step_report import StepReport
from samestep.training import run_folder
from samestep.training.elastic import fitted_layout
from samestep.training.train import train


@calls.checked
def ray_worker(
    job: Job, layout: Layout | str | None = None, *, out: str | Path, steps: int | None = None
) -> Callable[..., None]:
    """Return the function that trains a job in a worker of Ray Train's `TorchTrainer`.

    Args:
        job: the computation.
        layout: by default the job's own, or replicas over all workers. With fewer workers its data degrees shrink.
        out: the run folder, which all nodes share; a run in it is resumed.
        steps: end after this step.

    Raises:
        InputError: the returned function: Ray Train has made no process group, or the job cannot run.
    """

    def train_loop_per_worker(_config: dict[str, Any] | None = None) -> None:
        if not dist.is_initialized():
            raise InputError(
                "ray-worker", "ray_worker is a function for ray.train.torch.TorchTrainer, which makes the process group"
            )
        where = fitted_layout(layout or job.layout or None, dist.get_world_size())
        train(job, layout=where, out=out, steps=steps, auto_resume=True, on_step=_Reporter(job, Path(out)))

    return train_loop_per_worker


class _Reporter:
    """Reports of steps to Ray Train, from every worker alike; a new checkpoint goes with one, from rank 0."""

    def __init__(self, job: Job, out: Path) -> None:
        self._every, self._folder = job.run.log_every or 1, out / run_folder.CHECKPOINTS
        self._reported: Path | None = manifests.newest_whole(self._folder)[0]

    def __call__(self, report: StepReport, is_last: bool) -> None:
        """Report a step, if it is one that is logged."""
        if not is_last and report.step % self._every:
            return
        from ray import train as ray_train  # noqa: PLC0415 - samestep[ray], which other launchers do not need

        numbers = {"step": report.step, "loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr}
        newest = manifests.newest_whole(self._folder)[0] if dist.get_rank() == 0 else None
        checkpoint = None
        if newest is not None and newest != self._reported:
            checkpoint, self._reported = ray_train.Checkpoint.from_directory(str(newest)), newest
        ray_train.report(numbers, checkpoint=checkpoint)


def main() -> int:
    """Train a job on the cluster that this program is started on, and return the exit status, a number from 0 to 255."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: PLC0415 - samestep[ray], as below
    from ray.train.torch import TorchTrainer  # noqa: PLC0415

    parser = ArgumentParser(prog="samestep.wings.cluster.engines.ray_job", allow_abbrev=False)
    parser.add_argument("job", nargs="?", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--layout")
    parser.add_argument("--ranks", required=True, help="N, or MIN:MAX")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--failures", type=int, default=0)
    parser.add_argument("--cpus-per-rank", type=float, default=1.0)
    parser.add_argument("--gpus-per-rank", type=float, default=0.0)
    parser.add_argument("--storage")
    words = parser.parse_args()
    try:
        job = jobs.default(words.set) if words.job is None else jobs.load(words.job, words.set)
    except InputError as error:
        print(f"samestep: {error}", file=sys.stderr)
        return 2
    least, _, most = words.ranks.rpartition(":")
    resources = {"CPU": words.cpus_per_rank} | ({"GPU": words.gpus_per_rank} if words.gpus_per_rank else {})
    scaling = ScalingConfig(
        num_workers=(int(least), int(most)) if least else int(most),
        use_gpu=words.gpus_per_rank > 0,
        resources_per_worker=resources,
    )
    out = words.out.absolute()
    config = RunConfig(
        name=out.name,
        storage_path=str(words.storage or out.parent / ".ray"),
        failure_config=FailureConfig(max_failures=words.failures),
    )
    TorchTrainer(ray_worker(job, words.layout, out=out), scaling_config=scaling, run_config=config).fit()
    return 0


if __name__ == "__main__":
    from samestep.wings.cluster.engines import (
        ray_job,
    )  # so that workers find what they are sent by the name of this file

    sys.exit(ray_job.main())
