"""A worker of Ray Train: what it reports, and which layout it takes; and two nodes of Ray on this machine, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

import samestep
from samestep.errors import InputError
from samestep.wings.cluster.engines import ray_job
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
    monkeypatch.setattr(ray_job.manifests, "newest_whole", lambda folder: (newest[0], []))
    for rank, expected in ((0, [(2, ""), (4, "step-3"), (5, "")]), (1, [(2, ""), (4, ""), (5, "")])):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        reported.clear()
        newest[0] = None
        reporter = ray_job._Reporter(samestep.Job(run={"log_every": 2}), tmp_path)
        for step in range(1, 6):
            newest[0] = Path("step-3") if step >= 3 else None
            report = types.SimpleNamespace(step=step, loss=1.0, grad_norm=1.0, lr=1.0)
            reporter(report, step == 5)  # type: ignore[arg-type]
        assert reported == expected


_NODES = """
import json, os, sys, threading, time
from pathlib import Path
from ray.cluster_utils import Cluster
import ray
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
workers = [nodes.add_node(num_cpus=2) for _ in range(2)]
nodes.wait_for_nodes()
ray.init(address=nodes.address, log_to_driver=False)

def kill_behind(checkpoints):
    while not list(checkpoints.glob("step-*")):
        time.sleep(0.1)
    nodes.remove_node(workers[1], allow_graceful=False)

if os.environ.get("KILLED_BEHIND"):
    threading.Thread(target=kill_behind, args=(Path(os.environ["KILLED_BEHIND"]),), daemon=True).start()
from samestep.wings.cluster.engines import ray_job
sys.argv = ["ray_job", *json.loads(os.environ["WORDS"])]
status = ray_job.main()
ray.shutdown()
nodes.shutdown()
sys.exit(status)
"""


def _on_ray(folder: Path, *words: str, **variables: str) -> None:
    """Train on two nodes of Ray, of two ranks each, in processes of their own."""
    environment = {
        **os.environ,
        "WORDS": json.dumps([*words, "--out", str(folder)]),
        "RAY_AUTH_MODE": "disabled",
        **variables,
    }
    environment["PYTHONPATH"] = f"{real.ROOT}/src:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", _NODES]
    ended = subprocess.run(command, cwd=folder.parent, env=environment, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _keys(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.nightly
@pytest.mark.time_limit(900)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (make ray)")
def test_two_nodes_of_ray_give_the_losses_of_one_rank(tmp_path: Path) -> None:
    _on_ray(tmp_path / "run", *_keys(real.settings()), "--layout", "dp=2 tp=2", "--ranks", "4")
    assert small.losses(tmp_path / "run") == pytest.approx(real.one_rank(tmp_path / "one"), abs=1e-9)


@pytest.mark.nightly
@pytest.mark.time_limit(900)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (make ray)")
def test_a_node_of_ray_that_is_lost_is_gone_on_without(tmp_path: Path) -> None:
    keys = {"train.steps": 120, "checkpoint.every": 5}
    words = ["--layout", "dp=2 tp=2", "--ranks", "2:4", "--failures", "3"]
    run = tmp_path / "run"
    _on_ray(run, *_keys(real.settings(**keys)), *words, KILLED_BEHIND=str(run / "checkpoints"))
    assert (run / "layout.txt").read_text() == "dp=1 tp=2\n"
    assert small.train("--layout", "dp=1", "--out", tmp_path / "one", **{**real.FLOAT64, **keys}) == 0
    assert small.losses(run) == pytest.approx(small.losses(tmp_path / "one"), abs=1e-9)
