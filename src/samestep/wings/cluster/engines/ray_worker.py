"""The part of a rank that Ray Train starts: the job is trained as under any launcher, and what it does is reported Ray's way.

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

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep.errors import InputError
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.checkpoints import manifests
from samestep.runtime.step_report import StepReport
from samestep.training import run_folder
from samestep.training.elastic import fitted_layout
from samestep.training.train import train


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
                "ray-worker",
                "ray_worker is a function for ray.train.torch.TorchTrainer, which makes the process group",
            )
        where = fitted_layout(
            layout if layout is not None else Layout(**job.layout) if job.layout else None, dist.get_world_size()
        )
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
