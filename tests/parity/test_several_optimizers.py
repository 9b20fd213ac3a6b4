"""Optimizers as a list or by name are those of a plain loop with several, in every layout and after a resume in another."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.errors import InputError
from samestep.job import Job
from tests.laboratory import in_loop
from tests.plain import Trained, assert_trained, train_plainly, whole_batches
from tests.pool import pool

STEPS = 5


class Net(nn.Module):
    """Blocks of matrices and biases, with a head: what Muon and AdamW share."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


class Points(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(8, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return drawn[:6], drawn[6:]


def build() -> nn.Module:
    torch.manual_seed(5)
    return Net()


def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), outputs.numel()


def job_of(**tables: Any) -> Job:
    return Job(
        train={"global_batch": 4, "steps": STEPS, "watch_every": 0},
        numerics={"precision": "float64"},
        run={"device": "cpu"},
        **{"optimizer": {"clip_norm": 0.3}, **tables},
    )


def is_matrix(name: str) -> bool:
    return name.startswith("body") and name.endswith("weight")


def muon(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for n, p in named if is_matrix(n)], lr=0.02, weight_decay=0.05)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for n, p in named if not is_matrix(n)], lr=0.01, weight_decay=0.1, eps=1e-3)


def _adamw_of_list(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-3)


def _sgd_of_list(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda model: [muon, adamw],
    "names": lambda model: {"matrices": muon, "others": adamw},
    "mixed": lambda model: {"matrices": muon([*model.named_parameters()]), "others": adamw},
    "modules": lambda model: {"body": _adamw_of_list, "head": _sgd_of_list},
    "one function of names": lambda model: lambda named: torch.optim.AdamW(
        [{"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0}, {"params": [p for n, p in named if "bias" not in n]}],
        lr=0.01, eps=1e-3,
    ),
}  # fmt: skip


def plain_optimizers(form: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    named = [*model.named_parameters()]
    if form == "modules":
        return [
            _adamw_of_list([p for n, p in named if n.startswith("body")]),
            _sgd_of_list([p for n, p in named if n.startswith("head")]),
        ]
    return [FORMS[form](model)(named)] if form.startswith("one") else [muon(named), adamw(named)]


@functools.cache
def plain(form: str) -> Trained:
    model = build().double()
    optimizers = plain_optimizers(form, model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 - step / (STEPS - 1)) for one in optimizers]
    batches = whole_batches(Points(), job_of())
    return train_plainly(model, batches, lambda batch: loss(model(batch[0]), batch), optimizers, 0.3, schedules)


def trained(rank: int, world: int, form: str, layout: str, folder: Path | None, first: int, last: int) -> Trained:
    model = build()
    job = job_of(schedule={"name": "linear"})
    run = samestep.parallelize(model, loss, FORMS[form](model), layout=layout, job=in_loop(job))
    if first:
        assert folder is not None
        run.load(folder)
    losses = [run.step(batch).loss for batch in samestep.batches(Points(), job, first_step=first) if batch.step < last]
    if folder is not None and last < STEPS:
        run.save(folder)
    return losses, run.state_dict(on_every_rank=True)


@pytest.mark.parametrize("form", FORMS)
def test_several_optimizers_are_those_of_a_plain_loop(form: str) -> None:
    assert_trained([trained(0, 1, form, "dp=1 microbatch=2", None, 0, STEPS)], plain(form))


def test_a_run_with_several_optimizers_is_resumed_in_another_layout(tmp_path: Path) -> None:
    pool(2).run(trained, "names", "dp=2 zero=3", tmp_path, 0, 2)
    for form, layout, ranks in (("names", "dp=1", 1), ("list", "tp=2", 2)):
        losses, weights = plain(form)
        assert_trained(pool(ranks).run(trained, form, layout, tmp_path, 2, STEPS), (losses[2:], weights))


REFUSED: dict[str, tuple[Any, str]] = {
    "twice": ({"a": adamw, "b": _sgd_of_list}, r"body.0.bias is held by the optimizers 'a' and 'b'"),
    "a list of one": ([adamw], r"body.0.weight is held by none of the optimizers 0"),
    "left out": ({"a": adamw}, r"body.0.weight is held by none of the optimizers 'a'"),
    "empty": ([], r"optimizer is empty"),
    "a number": ({"a": 3}, r"optimizer\['a'\] = 3 is an int. Use a function of the parameters"),
    "no name": ({1: adamw}, r"optimizer has 1 as a name"),
    "no optimizer": (lambda params: 3, r"the optimizer function returned a int"),
    "its own error": (lambda params: torch.optim.Adam(params, lr=-1.0), "Invalid learning rate"),
}


def refused(rank: int, world: int, case: str) -> str:
    try:
        run = samestep.parallelize(build, loss, REFUSED[case][0], job=in_loop(job_of()))
        run.step(next(samestep.batches(Points(), job_of())))
    except (InputError, ValueError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_that_are_no_partition_are_refused_in_one_line(case: str) -> None:
    text = refused(0, 1, case)
    assert re.search(REFUSED[case][1], text), text
    assert "\n" not in text


def test_every_rank_refuses_optimizers_that_are_no_partition() -> None:
    for text in pool(2).run(refused, "left out"):
        assert re.search(REFUSED["left out"][1], text), text
