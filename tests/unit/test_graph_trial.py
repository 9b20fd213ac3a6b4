"""Code that a compiler refuses only when its graph runs, or in its backward, runs uncompiled with the same result and a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from samestep.job import Job
from samestep.runtime.axes import graph_compiler
from tests.laboratory import clipped
from tests.models import Plain
from tests.unit.test_compiled_blocks import JOB, stepped


class _Transposed(nn.Module):
    """A batch norm whose input and result are the same values in another order."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)


class _Differentiating(nn.Module):
    """A module that takes a gradient, whose gradient the step needs."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.inner(x).tanh()
            (gradient,) = torch.autograd.grad(y.sum(), x if x.requires_grad else y, create_graph=True)
        return y + 0.01 * gradient.square().mean()


MAKERS: dict[str, type[nn.Module]] = {"transposed": _Transposed, "differentiated": _Differentiating}


class _Mixed(Plain):
    kind: str

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mix = MAKERS[self.kind](block.mix)


def model_of(kind: str) -> type[nn.Module]:
    return type(f"Mixed{kind}", (_Mixed,), {"kind": kind})


def values_of(run: Any) -> list[Tensor]:
    return [*run.model.parameters(), *run.model.buffers()]


def assert_alike(model: type[nn.Module], job: Job) -> list[str]:
    """Hold the weights and buffers of a compiled run against those of one without; return what the run has remarked."""
    run, said = stepped(model, job)
    plainly, _ = stepped(model, clipped("float32"))
    pairs = zip(values_of(run), values_of(plainly), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs), said
    return said


@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_graph_cannot_run_backward_runs_uncompiled_and_alike(kind: str) -> None:
    said = assert_alike(model_of(kind), JOB)
    reason = (
        "takes gradients itself"
        if kind == "differentiated"
        else "aot_eager fails for it and its like: view size is not compatible"
    )
    assert len(said) == 1
    assert reason in said[0], said


def _fails_when_it_runs(graph: Any, inputs: Any) -> Any:
    def run(*args: Any) -> Any:
        raise RuntimeError("no kernel here")

    return make_boxed_func(run)


def _runs(graph: Any, inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


@pytest.mark.parametrize(("forward", "backward"), [(_runs, _fails_when_it_runs), (_fails_when_it_runs, _runs)])
def test_a_backend_that_fails_late_leaves_blocks_uncompiled(forward, backward, monkeypatch):
    failing = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: failing)
    said = assert_alike(Plain, JOB)
    assert len(said) == 1
    assert "uncompiled: aot_eager fails for it and its like: no kernel here" in said[0]


def test_the_first_run_of_a_graph_writes_only_copies() -> None:
    """Inputs keep values, versions and gradients, whatever strides they have and whatever the graph writes."""
    leaf = torch.ones(2, 3, requires_grad=True)
    inputs = [
        leaf, (leaf * 2.0).t(), torch.zeros(3, 1).expand(3, 4), torch.zeros(4), torch.zeros(0, 5), torch.arange(3),
    ]  # fmt: skip
    before = [(one.detach().clone(), one._version) for one in inputs]
    seen: list[list[Tensor]] = []

    def graph(*copies: Tensor) -> Tensor:
        seen.append([*copies])
        copies[1].mul_(3.0)
        copies[3].add_(1.0)
        return copies[0].sum() + copies[1].sum()

    graph_compiler.run_once(graph, inputs)
    assert leaf.grad is None
    assert all(
        torch.equal(one, value) and one._version == version
        for one, (value, version) in zip(inputs, before, strict=True)
    )
    for one, copy in zip(inputs, seen[0], strict=True):
        assert (one.shape, one.stride(), one.requires_grad, one.is_leaf) == (
            copy.shape,
            copy.stride(),
            copy.requires_grad,
            copy.is_leaf,
        )
        assert not one.numel() or one.data_ptr() != copy.data_ptr()
