"""torchrun with fewer agents than before: a run goes on with smaller data degrees, to the losses of one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.training import run_folder


def _last_loss(folder: Path, *command: str, steps: int) -> float:
    words = ["train", "--out", str(folder), "--steps", str(steps), "--set", "checkpoint.every=2"]
    subprocess.run([*command, sys.executable, "-m", "samestep", *words, "--auto-resume"], check=True, timeout=300)
    row = json.loads((folder / run_folder.LOG).read_text().splitlines()[-1])
    assert row["step"] == steps
    return float(row["loss"])


@pytest.mark.nightly
def test_a_run_goes_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for ranks, steps in ((2, 4), (1, 6)):
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--no-python",
        ]
        elastic = tmp_path / f"elastic{ranks}.sh"
        elastic.write_text('exec "$@" --layout dp=2 --ranks 1:2\n')
        loss = _last_loss(folder, *start, "sh", str(elastic), steps=steps)
    assert loss == pytest.approx(_last_loss(tmp_path / "one", steps=6), rel=1e-6)


_WRONG = """
import torch, samestep
def start():
    model = torch.nn.Linear(2, 2)
    samestep.parallelize(model, "mse", torch.optim.SGD(model.parameters(), 0.1), layout="dp=3")
start()
"""


def test_a_mistake_is_told_by_the_lines_of_the_script_and_once_more_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(_WRONG)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    ended = subprocess.run(start, capture_output=True, text=True, timeout=300, check=False)
    of_script = [line for line in ended.stderr.splitlines() if "wrong.py" in line and line.startswith("  File")]
    assert ended.returncode == 1
    assert "/samestep/" not in ended.stderr.partition("torch/distributed/run.py")[0], "no frame of ours"
    assert ended.stderr.count("samestep.errors.LayoutError: layout 'dp=3' has 3 ranks") in (1, 2), "one may be ended"
    assert len(of_script) <= 3, "two lines of rank 0, and the last one of rank 1"
