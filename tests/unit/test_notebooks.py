"""Functions and classes of a notebook's cells run on ranks, and mistakes are shown in one line: in a real kernel of Jupyter's."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from samestep.training.metrics import Screen
from samestep.training.trained import Evaluation
from samestep.wings.cluster.diagnosis.report import Report

pytest.importorskip("ipykernel", reason="ipykernel is of the extra `dev`")
pretty = pytest.importorskip("IPython.lib.pretty", reason="IPython comes with ipykernel")

SETUP = """
import torch, samestep
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))
def loss(outputs, batch):
    return (outputs.squeeze(-1) - batch["y"]).square().sum(), len(outputs)
sgd = lambda params: torch.optim.SGD(params, lr=0.1)
generator = torch.Generator().manual_seed(0)
data = [{"x": torch.randn(4, generator=generator), "y": torch.randn((), generator=generator)} for _ in range(16)]
job = samestep.Job(train={"global_batch": 8, "steps": 2}, numerics={"precision": "float64"}, run={"device": "cpu"})
def main(place, layout):
    run = samestep.parallelize(Net, loss, sgd, layout=layout, job=job)
    print("rank", place.rank, "trains")
    return [run.step(batch).loss for batch in samestep.batches(data, job)]
"""


LAUNCH = "samestep.launch(main, ('dp=2 zero=3',), ranks=2)"
ALONE = "run = samestep.parallelize(Net, loss, sgd, job=job)\n[run.step(batch).loss for batch in samestep.batches(data, job)]"
AGAIN = "samestep.launch(main, ('tp=2',), ranks=2)"
VERIFY = "samestep.verify(job, layout='dp=2', model=Net, loss=loss, optimizer=sgd, dataset=data, steps=2).proven"
MISTAKE = "samestep.launch(main, ('dp=2',), ranks=2, threads=2)"
BROKEN = "def broken(place):\n    raise ValueError('of mine')\nsamestep.launch(broken, ranks=2)"

CLIENT = """
import json, sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(startup_timeout=300, extra_arguments=["--log-level=50"])
for code in json.load(sys.stdin):
    heard = []
    client.execute_interactive(code, timeout=400, output_hook=heard.append, allow_stdin=False)
    print(json.dumps([[one["msg_type"], one["content"]] for one in heard]))
client.stop_channels()
manager.shutdown_kernel(now=True)
"""
"""A client in a process of its own, so that the sockets and threads of a kernel's client are not in that of the tests."""


@dataclass
class Shown:
    """What a notebook shows below a cell."""

    value: Any
    printed: str
    error: list[str]


@pytest.fixture(scope="module")
def shown() -> dict[str, Shown]:
    """What a kernel shows below each cell."""
    cells = [f"import sys; sys.path[:] = {sys.path}", SETUP, LAUNCH, ALONE, AGAIN, VERIFY, MISTAKE, BROKEN]
    command = [sys.executable, "-c", CLIENT]
    ended = subprocess.run(command, input=json.dumps(cells), capture_output=True, text=True, timeout=550, check=False)
    assert ended.returncode == 0, ended.stderr
    return {code: _shown(json.loads(line)) for code, line in zip(cells, ended.stdout.splitlines(), strict=True)}


def _shown(heard: list[tuple[str, Any]]) -> Shown:
    values = [ast.literal_eval(content["data"]["text/plain"]) for kind, content in heard if kind == "execute_result"]
    printed = "".join(content["text"] for kind, content in heard if kind == "stream")
    errors = [
        line
        for kind, content in heard
        if kind == "error"
        for text in content["traceback"]
        for line in text.splitlines()
    ]
    return Shown(values[0] if values else None, printed, errors)


@pytest.mark.parametrize(
    "result",
    [
        Report(head="doctor: 2 hosts", lines=(), seconds=0.5),
        Evaluation(Path("run/step-3"), 3, 0.5, 8, {"held_out": 0.5}, "held_out"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_cell_shows_a_result_as_the_command_prints_it(result: Any) -> None:
    assert pretty.pretty(result) == result.to_text()


def test_functions_of_cells_run_on_ranks_and_in_the_kernel_itself(shown: dict[str, Shown]) -> None:
    assert shown[SETUP] == Shown(None, "", [])
    alone = shown[ALONE].value
    assert shown[LAUNCH] == Shown(pytest.approx(alone, rel=1e-12), "rank 0 trains\nrank 1: rank 1 trains\n", [])
    # After ALONE the kernel is a run of one rank, with process groups that forked ranks must leave alone.
    assert shown[AGAIN] == Shown(pytest.approx(alone, rel=1e-12), "rank 0 trains\nrank 1: rank 1 trains\n", [])


def test_what_cells_define_is_proven(shown: dict[str, Shown]) -> None:
    assert shown[VERIFY] == Shown(True, "", [])


def test_a_mistake_in_a_cell_is_the_users_lines_and_one_line_of_text(shown: dict[str, Shown]) -> None:
    first, where, line, text = shown[MISTAKE].error
    assert (first, line.strip()) == ("Traceback (most recent call last):", MISTAKE)
    assert ", line 1, in " in where
    assert text.startswith("samestep.errors.JobError: threads=2: forked workers have one thread")


def test_a_failure_on_a_rank_names_the_line_of_the_cell(shown: dict[str, Shown]) -> None:
    error = "\n".join(shown[BROKEN].error)
    assert "of 2 failed: ValueError: of mine" in error
    assert "line 2, in broken" in error
    assert "samestep/runtime" not in error


@pytest.mark.nightly
def test_the_notebook_of_the_quickstart_runs() -> None:
    cells = json.loads((Path(__file__).parents[2] / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))[
        "cells"
    ]
    codes = [
        f"import sys; sys.path[:] = {sys.path}",
        *("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"),
    ]
    command = [sys.executable, "-c", CLIENT]
    ended = subprocess.run(command, input=json.dumps(codes), capture_output=True, text=True, timeout=550, check=False)
    shown = [_shown(json.loads(line)) for line in ended.stdout.splitlines()]
    assert [one.error for one in shown if one.error] == [], ended.stderr
    assert len(shown) == len(codes), ended.stderr
    assert shown[3].printed.count("loss of the last step") == 4


@pytest.mark.parametrize(("module", "in_cell"), [("_io", False), ("ipykernel.iostream", True)])
def test_a_worker_of_a_notebook_writes_its_progress_as_text(module, in_cell, monkeypatch):
    """A fork has the kernel of its parent in memory, but not its standard output."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(sys, "stdout", type("Stream", (io.StringIO,), {"__module__": module})())
    assert Screen(0, 4)._console.is_jupyter is in_cell
