"""The program that `samestep submit --on ray` hands to a cluster: a `TorchTrainer` whose workers are the ranks of a job."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from samestep import job_files as jobs
from samestep.errors import InputError
from samestep.wings.cluster.engines.ray_worker import ray_worker


def main() -> int:
    """Train a job on the cluster that this program is started on, and return the exit status, a number from 0 to 255."""
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
    sys.exit(main())
