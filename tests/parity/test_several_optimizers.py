"""Optimizers as a list or by name are those of a plain loop with several; `code_array.py` has them in every layout, with a resume."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import InputError
from tests.parity.loops import LOOPS, Loop, Points, both, built, job_of
from tests.plain import assert_trained, train_plainly, whole_batches
from tests.pool import pool

LOOP: Loop = LOOPS["one backward"]
JOB = job_of(LOOP, schedule={"name": "linear"})


def is_matrix(name: str) -> bool:
    return name.startswith("body") and name.endswith("weight")


def muon(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for n, p in named if is_matrix(n)], lr=0.02, weight_decay=0.05)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for n, p in named if not is_matrix(n)], lr=0.01, weight_decay=0.1, eps=1e-3)


_adamw_of_list = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-3)


_sgd_of_list = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda model: [muon, adamw],
    "mixed": lambda model: {"matrices": muon([*model.named_parameters()]), "others": adamw},
    "modules": lambda model: {"body": _adamw_of_list, "one": _sgd_of_list, "two": _sgd_of_list},
    "one function of names": lambda model: lambda named: torch.optim.AdamW(
        [{"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0}, {"params": [p for n, p in named if "bias" not in n]}],
        lr=0.01, eps=1e-3,
    ),
}  # fmt: skip


def plain_optimizers(form: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    named = [*model.named_parameters()]
    if form == "modules":
        of_module = FORMS[form](model).items()
        return [kind([p for n, p in named if n.startswith(f"{name}.")]) for name, kind in of_module]
    return [FORMS[form](model)(named)] if form.startswith("one") else [muon(named), adamw(named)]


@pytest.mark.parametrize("form", FORMS)
def test_several_optimizers_are_those_of_a_plain_loop(form: str) -> None:
    model, given = built(LOOP).double(), built(LOOP)
    optimizers = plain_optimizers(form, model)
    last = JOB.train.steps - 1
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 - step / last) for one in optimizers]
    loss = lambda batch: both(model(batch["x"]), batch)  # noqa: E731
    expected = train_plainly(model, whole_batches(Points(), JOB), loss, optimizers, LOOP.clip_norm, schedules)
    run = samestep.parallelize(given, both, FORMS[form](given), layout="dp=1 microbatch=2", job=JOB)
    losses = [run.step(batch).loss for batch in samestep.batches(Points(), JOB)]
    assert_trained([(losses, run.state_dict())], expected)


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
        run = samestep.parallelize(lambda: built(LOOP), both, REFUSED[case][0], job=JOB)
        run.step(next(samestep.batches(Points(), JOB)))
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
