"""Tensors in nested values: found, and changed in a copy, whatever class nests them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.trees import (
    fold,
    keystr,
    map_tensors,
    operands,
    replace_tensors,
    tensors_in,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

ONE, TWO = torch.ones(1), torch.full((1,), 2.0)


class Rows(list[Any]):
    """A list of a class of its own."""


class Pair(tuple[Any, ...]):
    """A tuple of a class of its own."""


@dataclasses.dataclass(frozen=True)
class Output:
    """What a model returns."""

    logits: Any
    loss: Any = None


NESTED = {
    "a tensor": ONE,
    "a list": [ONE, 3, TWO],
    "a dict in a tuple": ({"x": ONE, "name": "a"}, TWO),
    "an ordered dict": OrderedDict(x=ONE, y=[TWO]),
    "a deque": deque([ONE, TWO]),
    "a named tuple": namedtuple("Named", "x y")(ONE, TWO),
    "what torch returns": torch.stack([ONE, TWO]).max(0),
    "a mapping of its own": UserDict(x=ONE, y=TWO),
    "a list of its own": Rows([ONE, TWO]),
    "a tuple of its own": Pair([ONE, TWO]),
    "a frozen dataclass": Output(ONE, [TWO]),
    "a plain object": SimpleNamespace(x=ONE, y=[TWO], z=3),
    "a dataclass in a mapping of its own": UserDict(x=Output((ONE, TWO)), y=None),
}


@pytest.mark.parametrize("name", NESTED)
def test_tensors_are_found_and_changed_in_one_order(name):
    value = NESTED[name]
    found = tensors_in(value)
    seen: list[Tensor] = []
    twin = map_tensors(value, lambda tensor: seen.append(tensor) or tensor + 1)
    assert found
    assert [*map(id, seen)] == [*map(id, found)]
    assert type(twin) is type(value)
    assert torch.equal(torch.stack(tensors_in(twin)), torch.stack(found) + 1)
    if name != "a plain object":
        assert_every_walk_sees(value, found)
    assert [*map(id, tensors_in(value))] == [*map(id, found)], "the original is as it was"


def assert_every_walk_sees(value: Any, found: list[Tensor]) -> None:
    with_paths, form = tree_flatten_with_path(value)
    leaves, same = tree_flatten(value)
    assert form == same
    assert len({keystr(path) for path, _ in with_paths}) == len(with_paths)
    for walked in (tree_leaves(value), [leaf for _, leaf in with_paths], leaves):
        assert [id(leaf) for leaf in walked if isinstance(leaf, Tensor)] == [*map(id, found)]
    again = tree_unflatten([leaf + 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
    for twin in (again, tree_map_only(Tensor, lambda tensor: tensor + 1, value)):
        assert type(twin) is type(value)
        assert torch.equal(torch.stack(tensors_in(twin)), torch.stack(found) + 1)
        assert tree_flatten(twin)[1] == form


def _in_a_ring(kind: Callable[..., Any]) -> Any:
    one, other = kind(ONE, None), kind(TWO, None)
    one.loss, other.loss = other, one
    return one


@dataclasses.dataclass
class Node:
    """A record that may hold its parent."""

    logits: Any
    loss: Any


@pytest.mark.parametrize("kind", [Node, lambda logits, loss: SimpleNamespace(logits=logits, loss=loss)])
def test_what_holds_itself_is_left_as_it_is(kind):
    ring = _in_a_ring(kind)
    for value in (ring, {"x": ring, "y": TWO}, Output(TWO, ring), [Output(ring, [ONE])]):
        beside = [] if value is ring else [TWO] if not isinstance(value, list) else [ONE]
        assert [*map(id, tensors_in(value))] == [*map(id, beside)]
        twin = map_tensors(value, lambda tensor: tensor + 1)
        assert torch.equal(torch.cat([ONE, *tensors_in(twin)]), torch.cat([ONE, *(one + 1 for one in beside)]))
        assert (twin is value) == (value is ring)
        leaves, form = tree_flatten(value)
        assert any(leaf is ring for leaf in leaves)
        tree_unflatten(leaves, form)
        tree_map_only(Tensor, lambda tensor: tensor + 1, value)


def test_records_with_other_parts_have_other_forms():
    forms = [tree_flatten(one)[1] for one in (Output(ONE, [TWO]), Output(ONE, TWO), UserDict(x=ONE), UserDict(y=ONE))]
    assert all(one != other for place, one in enumerate(forms) for other in forms[:place])


@pytest.mark.parametrize("value", [Rows([1]), Output(3), nn.Linear(1, 1), Output, SimpleNamespace(x=3), "text", None])
def test_what_holds_no_tensor_stays_the_same_object(value):
    assert map_tensors(value, lambda tensor: tensor + 1) is value
    assert not tensors_in(value)


@dataclasses.dataclass
class Guarded:
    """A record of which some fields may not be asked for, as a configuration of transformers with other sizes in each layer."""

    table: Tensor
    head_dim: int = 8
    later: Any = dataclasses.field(init=False)

    def __getattribute__(self, name: str) -> Any:
        if name in ("head_dim", "later"):
            raise RuntimeError(f"{name} is one for each layer")
        return super().__getattribute__(name)


@dataclasses.dataclass(slots=True)
class Slotted:
    table: Tensor
    later: Any = dataclasses.field(init=False)


@pytest.mark.parametrize("kind", [Guarded, Slotted])
def test_what_a_record_stores_is_read_without_asking_it(kind: Any) -> None:
    record = kind(ONE)
    assert tensors_in([record]) == [ONE]
    assert map_tensors(record, lambda tensor: tensor + 1).table == ONE + 1
    assert replace_tensors("config", record, lambda _, tensor: tensor * 3, depth=3) is record
    assert record.table == ONE * 3


def test_operands_are_nested_in_one_list_at_most():
    assert operands(ONE, [TWO, None], 3, (ONE,), [[TWO]]) == [ONE, TWO, ONE]


def test_nested_lists_are_folded():
    assert fold([1, (2, [3])], str) == ("1", ("2", ("3",)))
    assert fold([1, (2,)], str, lambda items: f"<{' '.join(items)}>") == "<1 <2>>"
