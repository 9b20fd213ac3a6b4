"""A rank that holds some experts of a stack never has the others in memory, and they are those of one device to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep.building import drawn_rows
from samestep.building.initial_values import blueprint
from samestep.building.replay import replay
from samestep.datasets import batches
from samestep.job import Job
from tests.laboratory import clipped, make_run, on_ranks
from tests.models import Tokens

CPU = torch.device("cpu")


class Stacks(nn.Module):
    """Stacks that are filled in the ways of published models, and two whose rows are not drawn one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.Parameter(torch.empty(5, 4, 8))
        nn.init.normal_(self.normal, std=0.02)
        self.truncated = nn.Parameter(torch.empty(5, 4, 8))
        nn.init.trunc_normal_(self.truncated, std=0.02)
        self.uniform = nn.Parameter(torch.empty(5, 4, 8))
        nn.init.kaiming_uniform_(self.uniform)
        self.changed = nn.Parameter(torch.zeros(5, 4, 8, dtype=torch.float64))
        self.changed.data.normal_().mul_(0.5).add_(1)
        self.narrow = nn.Parameter(torch.empty(5, 4, 8, dtype=torch.bfloat16))
        nn.init.normal_(self.narrow)
        self.made = nn.Parameter(torch.randn(5, 4, 8) * 0.02)
        self.odd = nn.Parameter(torch.empty(5, 3, 5))
        nn.init.normal_(self.odd)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(one.numel() for one in tree_leaves(out) if isinstance(one, torch.Tensor))])
        return out


@pytest.mark.parametrize("name", ["normal", "truncated", "uniform", "changed", "narrow", "made", "odd"])
def test_rows_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_rows, "LARGEST_DRAW", 64)
    plan = blueprint(Stacks, 3)
    ref = plan._refs[name]
    part = plan._slices[ref.memory]
    whole = replay(plan._tape, part, ref, CPU, plan._keys)
    assert torch.equal(plan.materialize(name, CPU), whole)
    with Largest() as largest:
        rows = plan.materialize(name, CPU, None, [(3, 5), (1, 2)])
    assert torch.equal(rows, whole[[3, 4, 1]])
    assert drawn_rows.are_drawn(plan._tape, part, ref) == (name not in ("made", "odd"))
    if name not in ("made", "odd", "truncated"):
        assert largest.numel == rows.numel()  # two rows at a time, and what is returned


def rows_drawn(rank: int, world: int, model: str, layout: str, job: Job) -> set[tuple[tuple[int, int], ...]]:
    found = set()
    draw = drawn_rows.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn_rows, "draw", lambda *args: (found.add(tuple(args[-1])), draw(*args))[1])
        make_run(rank, world, model, layout, job).prepare(next(batches(Tokens(), job)).samples([0]))
    return found


def test_a_rank_draws_its_own_experts() -> None:
    assert on_ranks("dp=2 ep=2", rows_drawn, "mixtral", clipped()) == [{((0, 2),)}, {((2, 4),)}]


def test_a_build_function_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> nn.Module:
        print("building")
        return nn.Linear(2, 2)

    blueprint(build, 0)
    assert capsys.readouterr().out == "building\n"
