"""Deterministic kernels within steps, what reaches the kernels of attention, and the cores near a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep.datasets import Batch, batches
from samestep.errors import JobError
from samestep.job import Job
from samestep.runtime.processes import this_host
from samestep.runtime.processes.join import leave
from tests.laboratory import clipped, make_run
from tests.models import Tokens


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


class Attentive(nn.Module):
    """Attends as told, and says which kernels of torch have run."""

    def __init__(self, of_heads: bool = True, **how: Any) -> None:
        super().__init__()
        self.linear, self.of_heads, self.how = nn.Linear(2, 12), of_heads, how

    def forward(self, input: Tensor) -> Tensor:
        one = (1, 1) if self.of_heads else (1,)
        q, k, v = self.linear(input).view(-1, 3, 4).unbind(1)
        given = (x.view(-1, *one, 4) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*given, **self.how)


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__.startswith(("_scaled_dot_product", "_safe_softmax.")):
            self.calls.append((func.__name__, args[3:5], kwargs.get("attn_mask")))
        return func(*args, **kwargs)


def _attending(word: str, **how: Any) -> list[tuple[str, Any, Any]]:
    job = Job(train={"global_batch": 4}, run={"device": "cpu", "attention": word})
    run = samestep.parallelize(lambda: Attentive(**how), _loss, lambda params: torch.optim.SGD(params, lr=0.1), job=job)
    run.step(Batch(0, np.arange(4), Rows()))
    with Kernels() as seen:
        run.step(Batch(1, np.arange(4), Rows()))
    return seen.calls


@pytest.mark.parametrize("model", ["llama", "deep_gemma", "attentive", "dropping_llama"])
def test_no_dense_mask_and_no_dropout_reach_a_fused_kernel(model: str) -> None:
    """Where causality says what a mask would; dropout is computed by the formula, with masks of our own."""
    run = make_run(0, 1, model, "dp=1", clipped())
    with Kernels() as seen:
        run.step(next(batches(Tokens(), clipped())))
    fused = [(given, mask) for name, given, mask in seen.calls if "backward" not in name]
    assert not any("_math" in name for name, *_ in seen.calls), "a fused kernel computes it"
    assert fused == ([] if model.startswith("dropping") else [((0.0, True), None)] * len(fused))
    assert bool(fused) != model.startswith("dropping")


def test_the_kernel_of_attention_is_chosen_within_a_step_alone() -> None:
    assert {name.partition(".")[0] for name, *_ in _attending("flash")} == {
        name.partition(".")[0] for name, *_ in _attending("auto")
    }
    assert {name.partition(".")[0] for name, *_ in _attending("math")} == {"_safe_softmax"}
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_kernel_that_is_not_there_is_refused_in_one_line() -> None:
    for word in ("cudnn", "efficient"):
        with pytest.raises(
            JobError,
            match=rf"^run.attention = '{word}': torch has no such kernel on CPUs. Use 'flash', 'math' and 'auto'$",
        ):
            _attending(word)
    if TorchVersion(torch.__version__) < "2.14":  # flash takes four dimensions there, and three too from 2.14 on
        with pytest.raises(
            JobError, match=r"^run.attention = 'flash': this kernel does not compute the attention.*'auto'$"
        ):
            _attending("flash", of_heads=False)
