"""A worker of Ray Train: what it reports, and which layout it takes; and two nodes of Ray on this machine, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch.distributed as dist

import samestep
from samestep.engines import ray_worker
from samestep.errors import InputError
from tests import small
from tests.launchers import real


def test_outside_of_ray_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"for ray\.train\.torch\.TorchTrainer, which makes the process group"):
        samestep.ray_worker(samestep.Job(), out=tmp_path)()


def test_each_logged_step_is_reported_and_a_new_checkpoint_with_it_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reported: list[tuple[int, str]] = []
    stand_in = types.ModuleType("ray.train")
    stand_in.Checkpoint = types.SimpleNamespace(from_directory=lambda path: Path(path).name)  # type: ignore[attr-defined]
    stand_in.report = lambda metrics, checkpoint: reported.append((metrics["step"], checkpoint or ""))  # type: ignore[attr-defined]
    package = types.ModuleType("ray")
    package.train = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.setitem(sys.modules, "ray.train", stand_in)
    newest: list[Path | None] = [None]
    monkeypatch.setattr(ray_worker.manifests, "newest_whole", lambda folder: (newest[0], []))
    for rank, expected in ((0, [(2, ""), (4, "step-3"), (5, "")]), (1, [(2, ""), (4, ""), (5, "")])):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        reported.clear()
        newest[0] = None
        reporter = ray_worker._Reporter(samestep.Job(run={"log_every": 2}), tmp_path)
        for step in range(1, 6):
            newest[0] = Path("step-3") if step >= 3 else None
            report = types.SimpleNamespace(step=step, loss=1.0, grad_norm=1.0, lr=1.0)
            reporter(report, step == 5)  # type: ignore[arg-type]
        assert reported == expected


_NODES = """
import json, os, sys
from ray.cluster_utils import Cluster
import ray
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    nodes.add_node(num_cpus=2)
nodes.wait_for_nodes()
ray.init(address=nodes.address, log_to_driver=False)
from samestep.engines import ray_job
sys.argv = ["ray_job", *json.loads(os.environ["WORDS"])]
status = ray_job.main()
ray.shutdown()
nodes.shutdown()
sys.exit(status)
"""


@pytest.mark.nightly
@pytest.mark.time_limit(900)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (samestep[ray])")
def test_two_nodes_of_ray_give_the_losses_of_one_rank(tmp_path: Path) -> None:
    keys = [word for setting in real.settings() for word in ("--set", setting)]
    words = [*keys, "--layout", "dp=2 tp=2", "--ranks", "4", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "WORDS": json.dumps(words), "RAY_AUTH_MODE": "disabled"}
    environment["PYTHONPATH"] = f"{real.ROOT}/src:{environment.get('PYTHONPATH', '')}"
    ended = subprocess.run(
        [sys.executable, "-c", _NODES], cwd=tmp_path, env=environment, text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert small.losses(tmp_path / "run") == pytest.approx(real.one_rank(tmp_path / "one"), abs=1e-9)
