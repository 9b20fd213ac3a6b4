"""Optimizers that stack or join weights, and that hold other optimizers: which rule a trial reads."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.errors import LayoutError, ModelError
from samestep.layout import Layout
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec
from samestep.runtime.optimizers.optimizer_source import check_optimizer, optimizer_source

NAMES = ("first", "second", "third", "bias")
MODEL = ModelSpec(
    name="model",
    layers=(LayerSpec(name="all", modules=("",)),),
    params=tuple(
        ParamSpec(name=name, shape=(12,) if name == "bias" else (8, 5), layer=0, trainable=True) for name in NAMES
    ),
)
Moves = Callable[[list[Tensor]], list[Tensor]]


class Stacking(Optimizer):
    """Descends along what a function makes of the gradients of all weights of one shape at once."""

    def __init__(self, params: Any, moves: Moves, least: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.moves, self.least = moves, least

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for shape in dict.fromkeys(param.shape for param in group["params"]):
                params = [param for param in group["params"] if param.shape == shape]
                gradients = [param.grad for param in params]
                moves = self.moves(gradients) if len(shape) >= self.least else gradients
                for param, move in zip(params, moves, strict=True):
                    param.sub_(move, alpha=group["lr"])


def row(gradients: list[Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    flat = change(torch.cat([gradient.flatten() for gradient in gradients]))
    sizes = [gradient.numel() for gradient in gradients]
    return [move.view_as(one) for move, one in zip(flat.split(sizes), gradients, strict=True)]


def stacked(gradients: list[Tensor], change: Callable[[Tensor], Tensor], dim: int = 0) -> list[Tensor]:
    return list(change(torch.stack(gradients, dim)).unbind(dim))


def in_place(gradients: list[Tensor]) -> list[Tensor]:
    x = torch.stack(gradients)
    for part in x:
        part.mul_(2.0)
    return [part.clone() for part in x]


def mixed_in_place(gradients: list[Tensor]) -> list[Tensor]:
    x = torch.stack(gradients)
    x[-1].add_(x[0])
    return list(x)


BY_ELEMENTS: dict[str, Moves] = {
    "signs of a row": lambda g: row(g, torch.sign),
    "a stack in half": lambda g: stacked(g, lambda x: 0.5 * x),
    "a part of a stack in place": in_place,
}
WHOLE: dict[str, Moves] = {
    "products of each": lambda g: stacked(g, lambda x: x @ x.mT @ x),
    "norms of each": lambda g: stacked(g, lambda x: x / (1 + x.norm(dim=(-2, -1), keepdim=True))),
    "running sums of each": lambda g: stacked(g, lambda x: x.cumsum(1)),
    "a matrix beside its transposed one": lambda g: stacked(g, lambda x: x + 0.1 * x.mT.reshape(x.shape)),
}
TOGETHER: dict[str, Moves] = {
    "the mean of all": lambda g: stacked(g, lambda x: x - x.mean(dim=0)),
    "the next one": lambda g: stacked(g, lambda x: x.roll(1, 0)),
    "running sums": lambda g: stacked(g, lambda x: x.cumsum(0)),
    "a product of all": lambda g: stacked(g, lambda x: (x.view(-1, 5) @ x.view(-1, 5).mT @ x.view(-1, 5)).view_as(x)),
    "sums over a row": lambda g: row(g, lambda x: x / (1 + x.abs().sum())),
    "sorted in a row": lambda g: row(g, lambda x: x.sort().values),
    "one added to another": mixed_in_place,
}


def whole_of(moves: Moves, least: int = 2) -> list[str]:
    """Return what is updated whole, where weights of fewer dimensions descend along their gradients."""
    source = optimizer_source(lambda params: Stacking(params, moves, least))
    return [p.name for p in check_optimizer(source, MODEL, Layout("dp=2 zero=1")).params if p.is_updated_whole]


@pytest.mark.parametrize("name", BY_ELEMENTS)
def test_what_is_joined_and_changed_element_by_element_may_be_cut(name: str) -> None:
    assert whole_of(BY_ELEMENTS[name], least=1) == []


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_computed_of_each_of_a_stack_needs_that_one_whole(name: str) -> None:
    assert whole_of(WHOLE[name]) == ["first", "second", "third"]


@pytest.mark.parametrize("name", TOGETHER)
def test_what_mixes_the_parts_of_a_stack_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match=r"does not update every weight separately .*Use .*zero=0$"):
        whole_of(TOGETHER[name])


# -- optimizers in optimizers ----------------------------------------------------------------------


@dataclass(slots=True)
class Slots:
    muon: Optimizer


class Holding(Optimizer):
    """Calls a Muon over the matrices that `keep` has put somewhere, and descends along the rest."""

    def __init__(self, params: Any, keep: Callable[[Optimizer], Any], step: Callable[[Any], None]) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        matrices = [param for param in params if param.dim() == 2]
        self.kept, self.take = keep(torch.optim.Muon(matrices, lr=0.1)) if matrices else None, step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.kept is not None:
            self.take(self.kept)
        for param in self.param_groups[0]["params"]:
            if param.dim() == 1:
                param.sub_(param.grad)


PLACES: dict[str, tuple[Callable[[Optimizer], Any], Callable[[Any], None]]] = {
    "an attribute": (lambda muon: muon, lambda kept: kept.step()),
    "a list in a list": (lambda muon: [[muon]], lambda kept: kept[0][0].step()),
    "a dictionary by number": (lambda muon: {0: muon}, lambda kept: kept[0].step()),
    "a closure": (lambda muon: lambda: muon.step(), lambda kept: kept()),
    "a bound method": (lambda muon: muon.step, lambda kept: kept()),
    "a partial function": (
        lambda muon: functools.partial(Optimizer.__getattribute__, muon, "step"),
        lambda kept: kept()(),
    ),
    "a namespace": (lambda muon: types.SimpleNamespace(muon=muon), lambda kept: kept.muon.step()),
    "slots": (Slots, lambda kept: kept.muon.step()),
    "a queue": (lambda muon: collections.deque([muon]), lambda kept: kept[0].step()),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_is_followed_wherever_another_one_holds_it(place: str) -> None:
    source = optimizer_source(lambda params: Holding(params, *PLACES[place]))
    for text in ("dp=2 zero=1", "dp=2 zero=3"):
        checked = check_optimizer(source, MODEL, Layout(text))
        assert [p.name for p in checked.params if p.is_updated_whole] == ["first", "second", "third"]


class Sending(Optimizer):
    """Sums gradients itself, whether there are other processes or not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            torch.distributed.all_reduce(param.grad)
            param.sub_(param.grad)


def asking(params: list[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1 / torch.distributed.get_world_size())


@pytest.mark.parametrize("function", [Sending, asking])
def test_an_optimizer_that_needs_a_process_group_is_refused_in_one_line(function: Any) -> None:
    with pytest.raises(ModelError, match=r"calls torch.distributed itself.*Use .*the optimizer's form for one process"):
        check_optimizer(optimizer_source(function), MODEL, Layout("dp=2"))


# -- sparse gradients ------------------------------------------------------------------------------


class Lazy(Optimizer):
    """Moves the rows alone that a sparse gradient has, if `of_rows`, or else adds the gradient."""

    def __init__(self, params: Any, of_rows: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.of_rows = of_rows

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
            if self.of_rows and param.grad.is_sparse:
                rows, values = param.grad.coalesce().indices()[0], param.grad.coalesce().values()
                momentum[rows] = 0.9 * momentum[rows] + values
                param[rows] -= 0.1 * momentum[rows]
            else:
                momentum.mul_(0.9).add_(param.grad)
                param.sub_(momentum, alpha=0.1)


SPARSE = replace(MODEL, params=tuple(replace(param, sparse_gradient=param.name == "first") for param in MODEL.params))


def _by_rows(kind: Any, layout: str) -> list[str]:
    model = check_optimizer(optimizer_source(kind), SPARSE, Layout(layout))
    return [param.name for param in model.params if param.is_updated_by_rows]


@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
def test_an_optimizer_is_given_sparse_gradients_if_it_updates_only_their_rows(layout: str) -> None:
    assert _by_rows(functools.partial(Lazy, of_rows=True), layout) == ["first"]
    assert not _by_rows(functools.partial(Lazy, of_rows=False), layout)
    assert not _by_rows(torch.optim.Adagrad, layout)


@pytest.mark.parametrize("layout", ["dp=2 zero=1", "dp=2 zero=3"])
def test_weights_that_are_updated_by_rows_are_not_cut(layout: str) -> None:
    with pytest.raises(LayoutError, match=r"update of first by Lazy has only the rows of its sparse gradient"):
        _by_rows(functools.partial(Lazy, of_rows=True), layout)
