"""`samestep launch SCRIPT.py`: the script of a user on the ranks of this machine, with equal losses in each layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.errors import InputError, JobError, LayoutError
from tests import small

SCRIPT = """
import sys
import torch
import samestep

class Points(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index):
        x = torch.sin(torch.arange(4.0, dtype=torch.float64) * (index + 1))
        return {"x": x, "labels": x.sum(0, keepdim=True)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    def forward(self, x): return self.outer(torch.tanh(self.inner(x)))

def loss(outputs, batch):
    return ((outputs - batch["labels"]) ** 2).sum(), len(outputs)

job = samestep.Job(train={"steps": 3, "global_batch": 8}, numerics={"precision": "float64"})
model = Model().double()
run = samestep.parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=float(sys.argv[1])), job=job)
for batch in samestep.batches(Points(), job):
    report = run.step(batch)
if torch.distributed.get_rank() == 0 if torch.distributed.is_initialized() else True:
    print(f"layout {run.layout} loss {report.loss:.10f}")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own_script.py"
    path.write_text(SCRIPT)
    (tmp_path / "own_job.toml").write_text("[train]\nsteps = 3\n")
    return path


def test_a_script_runs_in_the_layout_of_the_command_line(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = {}
    for words in (["--ranks", "1"], ["--layout", "dp=2 zero=3"], ["--ranks", "2"]):
        assert small.main("launch", script, *words, "--", "0.1") == 0
        found = re.search(r"layout (.*) loss (\S+)", capfd.readouterr().out)
        assert found
        seen[found[1]] = found[2]
    assert list(seen) == ["dp=1", "dp=2 zero=3", "dp=2"]
    assert len(set(seen.values())) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nope.py", "--ranks", "2"], "there is no script nope.py. Use the path of a Python script"),
        (
            ["own_job.toml", "--ranks", "2"],
            "own_job.toml is a job, and no Python script. Use samestep train own_job.toml",
        ),
        (
            ["own_script.py"],
            "launch needs the number of ranks. Use ranks=2, or layout='dp=2' (--ranks 2, or --layout dp=2)",
        ),
        (["own_script.py", "0.1"], "unknown argument 0.1. Use -- before arguments of the script: SCRIPT.py -- 0.1"),
        (["own_script.py", "--ranks", "2", "--rate=3"], "Use -- before arguments of the script: SCRIPT.py -- --rate=3"),
        (["own_script.py", "--rnaks", "2"], "unknown argument --rnaks (did you mean '--ranks'?)"),
        (["own_script.py", "--layout", "fsdp=2"], "use dp=N zero=3"),
        (["own_script.py", "--layout", "dp=2", "--ranks", "3"], "has 2 ranks, and ranks=3"),
    ],
)
@pytest.mark.usefixtures("script")
def test_a_mistake_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main("launch", *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def _trains(place: object) -> None:
    samestep.train(samestep.Job(), layout="dp=1")


def _launches(place: object) -> int:
    return samestep.launch(_rank, ranks=2)


def _rank(place: Any) -> int:
    return 10 + place.rank


def test_a_launched_function_may_launch_and_may_not_train() -> None:
    assert samestep.launch(_launches, layout="dp=2") == 10
    with pytest.raises(JobError, match="Run this script with `python`"):
        samestep.launch(_trains, ranks=1)
    with pytest.raises(LayoutError, match="use dp=N"):
        samestep.launch(_rank, layout="ddp=2")
    with pytest.raises(InputError, match="Use one of them"):
        samestep.launch(_rank, layout="dp=2", ranks=3)
