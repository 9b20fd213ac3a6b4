"""What a snapshot of a model's code takes note of, and puts back: enumerations, dicts of classes of their own, installed packages."""

from __future__ import annotations

import enum
import importlib
import random
import sys
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
from samestep.state.named_variables import Home, home_of, variables_of
from samestep.state.snapshot import Snapshot, modules_of, preserve_modules
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


KINDS = (np.random.MT19937, np.random.PCG64)
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


def test_what_an_optimizers_step_changes_outside_of_its_states_is_put_back() -> None:
    optimizer = Counting([nn.Parameter(torch.zeros(2))], _chain(3000))
    code = StepCode(optimizer)
    assert code.optimizers == [optimizer]
    assert "taken" in {place.key for place in code.places if place.holder is Counting}
    with code.put_back():
        optimizer.step()
        assert (Counting.taken, optimizer.marks) == (4, [5, 3999])
    assert (Counting.taken, optimizer.marks, optimizer.late) == (3, [5], None)


COUNTERS = """
calls, late, other, mode = [0], None, [0], [0]
def count(): return unrelated
unrelated = [1]
"""
INNER = "deep, shallow = [0], [0]"
USES = """
import sys, pkg, pkg.inner
from pkg import inner as aliased
calls = count = other = deep = shallow = late = [0]
def local_attribute(self): self.calls.append(1); self.count()
def of_module(self): pkg.calls.append(1); self.other = self.mode
def by_augmented(self): pkg.late = 1; pkg.mode[0] += self.count
def deleted(self): del pkg.other
def of_inner(self): pkg.inner.deep.append(1); self.shallow = 1
def by_alias(self): aliased.shallow.append(self.deep)
def given_away(self): mine = pkg; mine.calls.append(1)
def by_text(self): getattr(pkg, "late"); setattr(self, "x", 1)
def within(self): return [pkg.calls for _ in self.other]
def in_closure(): mine = pkg; return lambda self: mine.other.append(self.calls)
def by_modules(self): sys.modules[__name__].other.append(1)
def by_globals(self): globals()["deep"].append(1)
def imports(self):
    from pkg import calls
    from pkg.inner import deep as x
def imports_whole(self):
    import pkg.inner as one
    one.shallow.append(1)
def stores(self):
    global late
    late = self.count
def either(self): (self.calls or pkg).late
in_closure = in_closure()
"""
REACHED = {
    "local_attribute": [],
    "of_module": ["calls of pkg", "mode of pkg", "other of pkg"],
    "by_augmented": ["count of pkg", "late of pkg", "mode of pkg"],
    "deleted": ["other of pkg"],
    "of_inner": ["deep of pkg.inner", "shallow of pkg.inner"],
    "by_alias": ["deep of pkg.inner", "shallow of pkg.inner"],
    "given_away": ["calls of pkg"],
    "by_text": ["late of pkg"],
    "within": ["calls of pkg", "other of pkg"],
    "in_closure": ["calls of pkg", "other of pkg"],
    "by_modules": ["__name__ of uses", "other of uses"],
    "by_globals": ["deep of uses"],
    "imports": ["calls of pkg", "deep of pkg.inner"],
    "imports_whole": ["shallow of pkg.inner"],
    "stores": ["late of uses"],
    "either": ["calls of pkg", "late of pkg"],
}


@pytest.mark.parametrize("name", REACHED)
def test_a_variable_is_named_by_itself_or_by_its_file_and_not_by_an_attribute_of_the_same_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text(COUNTERS)
    (tmp_path / "pkg/inner.py").write_text(INNER)
    (tmp_path / "uses.py").write_text(USES)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        function = vars(importlib.import_module("uses"))[name]
        of_files = [
            one.name
            for one in variables_of(name, function)
            if one.name.endswith((" of pkg", " of pkg.inner", " of uses"))
        ]
        assert (
            sorted(one for one in of_files if not one.startswith(("pkg of", "inner of", "aliased of", "sys of")))
            == REACHED[name]
        )
    finally:
        for module in ("uses", "pkg", "pkg.inner"):
            sys.modules.pop(module, None)


def test_what_a_function_reaches_is_named_and_a_library_is_not_followed() -> None:
    chain = _chain(3)

    @torch.no_grad()
    def loss(x: Tensor, *, most: list[int] = [9]) -> Tensor:  # noqa: B006
        return x * chain.number + most[0] + KNOWN["one"] + 1234

    found = Snapshot(loss)
    where = "test_what_a_function_reaches_is_named_and_a_library_is_not_followed.<locals>.loss"
    names = found.variables.keys()
    assert {f"chain around {where}", f"the default of most in {where}", f"KNOWN of {__name__}"} <= names
    assert 1234 in found.numbers
    assert not any("torch" in name for name in names)


class Terms:
    """A loss that holds modules in a list and in an object, as those of features do."""

    def __init__(self) -> None:
        self.nets = [nn.Linear(2, 1), nn.Linear(2, 2), nn.Linear(2, 3)]
        self.by_name = {"late": {"net": nn.Linear(2, 4)}}

    def __call__(self, outputs: Tensor, batch: Any) -> Any:
        return sum(net(outputs).sum() for net in self.nets), len(outputs)


def _of_closure() -> Any:
    terms = Terms()
    return lambda outputs, batch: terms(outputs, batch)


@pytest.mark.parametrize("make", [Terms, lambda: Terms().__call__, _of_closure])
def test_every_module_that_a_loss_holds_has_a_name_of_its_own(make: Any) -> None:
    """Else a checkpoint holds the last one's buffers alone."""
    of_loss = modules_of(make())
    widths = {name: part.out_features for name, part in of_loss.named_modules() if isinstance(part, nn.Linear)}
    assert sorted(widths.values()) == [1, 2, 3, 4]
    assert [widths[name] for name in sorted(widths) if name.endswith("/nets")] == [3]


@pytest.mark.parametrize("items", [(15, 7), (0, 16, 8, 24)])
def test_a_set_is_gone_through_in_the_same_order_after_a_snapshot_is_put_back(items: tuple[int, ...]) -> None:
    """Numbers that a table of eight places puts into one place stand in the order in which they came."""
    model = nn.Module()
    model.kinds = set()  # type: ignore[assignment]
    for item in items:
        model.kinds.add(item)  # type: ignore[operator]
    before = list(model.kinds)  # type: ignore[call-overload]
    for _ in range(3):
        with preserve_modules(model):
            pass
        assert list(model.kinds) == before  # type: ignore[call-overload]
    with preserve_modules(model):
        model.kinds -= {items[0]}  # type: ignore[operator]
        model.kinds.add(3)  # type: ignore[operator]
    assert model.kinds == {*items}
