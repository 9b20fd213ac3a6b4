"""What a snapshot of a model's code takes note of, and puts back: enumerations, dicts of classes of their own, installed packages."""

from __future__ import annotations

import enum
import importlib
import random
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from samestep.datasets.generators import put_back, state_of
from samestep.state.reachable import Home, Reached, home_of
from samestep.state.snapshot import preserve_modules
from samestep.state.step_code import StepCode


class Mode(enum.Enum):
    DOUBLED = "doubled"
    WHOLE = "whole"


class Made(OrderedDict[str, Any]):
    """Makes a value when it is asked for, as maps from names to classes do that are imported late."""

    def __getitem__(self, key: str) -> Any:
        return [super().__getitem__(key)]

    def keys(self) -> Any:
        return [f"{key}?" for key in super().__iter__()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())


KNOWN = Made(one=1, two=2)


class Chooses(nn.Module):
    mode = Mode.WHOLE

    def forward(self, x: Tensor) -> Tensor:
        KNOWN["three"] = 3
        KNOWN.pop("one", None)
        return 2 * x if self.mode is Mode.DOUBLED else x


def test_a_model_may_use_enumerations_and_dicts_of_its_own() -> None:
    model = Chooses()
    with preserve_modules(model):
        model(torch.ones(1))
        assert OrderedDict.__contains__(KNOWN, "three")
    assert list(OrderedDict.__iter__(KNOWN)) == ["two", "one"]
    assert [dict.__getitem__(KNOWN, key) for key in ("one", "two")] == [1, 2]
    assert model.mode is Mode.WHOLE


def test_installed_packages_are_no_code_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `pip install --target FOLDER` or `--user` puts them."""
    for folder, name in (("installed", "bought"), ("mine", "written")):
        package = tmp_path / folder / name / "inner"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "part.py").touch()
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "installed" / "bought-1.0.dist-info").mkdir()
    for name, is_own in (("bought", False), ("written", True)):
        for module in (name, f"{name}.inner", f"{name}.inner.part"):
            importlib.import_module(module)
            assert home_of(module) is (Home.USER if is_own else Home.PACKAGE)


KINDS = (np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64)
DRAWS = {
    "torch's": (torch.Generator, lambda own: float(torch.rand(1, generator=own))),
    "Python's": (lambda: random.Random(1), lambda own: own.random()),
    **{
        f"numpy's {kind.__name__}": (lambda kind=kind: np.random.Generator(kind(3)), lambda own: own.random())
        for kind in KINDS
    },
    **{
        f"numpy's old {kind.__name__}": (lambda kind=kind: np.random.RandomState(kind(3)), lambda own: own.rand())
        for kind in KINDS
    },
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_state_of_a_generator_shows_a_draw_and_is_put_back(name: str) -> None:
    make, draw = DRAWS[name]
    own = make()
    before = state_of(own)
    assert state_of(own) == before
    drawn = draw(own)
    assert state_of(own) != before
    put_back(own, before)
    assert state_of(own) == before
    assert draw(own) == drawn


class Node:
    """An item of a chain, longer than Python's stack is deep."""

    __slots__ = ("number", "rest")

    def __init__(self, number: int, rest: Node | None) -> None:
        self.number, self.rest = number, rest


class Counting(SGD):
    """Keeps what decides how it updates in a class, in an object with slots, in a list and in a default value."""

    taken = 3
    late = None

    def __init__(self, params: Any, chain: Node) -> None:
        super().__init__(params, lr=0.1)
        self.chain, self.marks = chain, [5]

    def step(self, closure: Any = None, *, at: int = 77) -> Any:  # type: ignore[override]
        Counting.taken += 1
        self.marks.append(self.chain.number)
        self.late = torch.ones(1)
        return super().step(closure) if Counting.taken < at else None


def _chain(length: int) -> Node:
    node = None
    for number in range(length):
        node = Node(number + 1000, node)
    assert node is not None
    return node


def test_an_optimizers_numbers_are_found_wherever_it_keeps_them_and_are_put_back() -> None:
    optimizer = Counting([nn.Parameter(torch.zeros(2))], _chain(3000))
    code = StepCode(optimizer)
    assert {3, 5, 77, 1000, 3999, 0.1} <= code.numbers
    assert code.optimizers == [optimizer]
    assert "taken" in {place.key for place in code.places if place.holder is Counting}
    with code.put_back():
        optimizer.step()
        assert (Counting.taken, optimizer.marks) == (4, [5, 3999])
    assert (Counting.taken, optimizer.marks, optimizer.late) == (3, [5], None)


def test_what_a_function_reaches_is_named_and_a_library_is_not_followed() -> None:
    chain = _chain(3)

    @torch.no_grad()
    def loss(x: Tensor, *, most: list[int] = [9]) -> Tensor:  # noqa: B006
        return x * chain.number + most[0] + KNOWN["one"] + 1234

    found = Reached(loss)
    where = "test_what_a_function_reaches_is_named_and_a_library_is_not_followed.<locals>.loss"
    names = {one.name for one in found.variables}
    assert {f"chain around {where}", f"the default of most in {where}", f"KNOWN of {__name__}"} <= names
    assert 1234 in found.constants
    assert not any("torch" in name for name in names)
