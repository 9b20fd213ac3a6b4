"""Deterministic kernels within steps, and the cores near a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.datasets import Batch
from samestep.errors import JobError
from samestep.job import Job
from samestep.runtime.processes import this_host
from samestep.runtime.processes.join import leave


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """`parallelize` joins a group of one process; it is left behind."""
    yield
    leave()


class Rows:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": torch.tensor([index, index * 0.5]), "labels": torch.tensor(float(index))}


class Net(nn.Module):
    def __init__(self, puts: bool) -> None:
        super().__init__()
        self.linear, self.puts = nn.Linear(2, 2), puts

    def forward(self, input: Tensor) -> Tensor:
        assert torch.are_deterministic_algorithms_enabled() or input.is_meta
        hidden = self.linear(input)
        if self.puts:
            hidden = hidden.put(torch.tensor([0], device=hidden.device), torch.ones(1, device=hidden.device))
        return hidden


def _loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return outputs.square().sum(), torch.tensor(float(len(batch["labels"])))


def _run(puts: bool) -> tuple[samestep.Run, Batch]:
    job = Job(train={"global_batch": 4}, numerics={"deterministic": True}, run={"device": "cpu"})
    run = samestep.parallelize(lambda: Net(puts), _loss, lambda params: torch.optim.SGD(params, lr=0.1), job=job)
    return run, Batch(0, np.arange(4), Rows())


def test_kernels_are_deterministic_within_a_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run, batch = _run(puts=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    run.step(batch)
    run.evaluate(batch)
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_kernel_is_named() -> None:
    run, batch = _run(puts=True)
    with pytest.raises(
        JobError, match=r"deterministic = true: put_ has no deterministic kernel on cpu.*test_determ.*:\d+"
    ):
        run.step(batch)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_rank_runs_on_the_cores_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    assert this_host.cores_near(gpu, tmp_path) == set()  # a container without sysfs
    assert this_host.cores_near(SimpleNamespace(), tmp_path) == set()  # a torch that does not tell
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-2,8\n")
    assert this_host.cores_near(gpu, tmp_path) == {0, 1, 2, 8}
    bound: list[set[int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append(cores))
    this_host.bind_near(torch.device("cuda", 0), tmp_path)
    this_host.bind_near(torch.device("cpu"), tmp_path)
    (folder / "local_cpulist").write_text("16-31\n")  # a launcher has chosen others
    this_host.bind_near(torch.device("cuda", 0), tmp_path)
    assert bound == [{1, 2}]
