"""Values that decide what a traced forward does: where code looks at them (`.item()`, `if`, `x[mask]`), and the rows that they pick.

A module whose code looks may run other operations for other values, and a trace shows those of one sample alone. What it computes is
still the same on all ranks that give it equal tensors. So a tensor cut leaves the weights of such a module whole, and shows that
everything the module is given is whole (`independence/cut_proof.py`): then all ranks of `tp` take the same branch and compute the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.named_tensors import set_attributes
from samestep.tracing.meta_tensors import FILLED_LIKE, NeedsValuesError, is_mask
from samestep.trees import operands, tensors_in, tree_leaves, tree_map_only

_aten = torch.ops.aten


@dataclass(slots=True)
class Looks:
    """The looks of one forward at values that a sample, a weight or a random number decides, in their order."""

    modules: dict[str, None] = field(default_factory=dict)
    """Paths of the modules whose code looks, each once; empty for the model's own code."""
    unseen: dict[str, None] = field(default_factory=dict)
    """Paths of modules that work on rows of which the sample has none, so that what is done to others cannot be seen."""
    answers: list[Any] = field(default_factory=list)
    """What the code was answered: numbers, or tensors whose shapes follow from values."""
    known: deque[Any] | None = None
    """Answers of an earlier forward, which are given again; None where a forward finds the values itself."""

    data: set[int] = field(default_factory=set)
    """Storages of weights, of floating inputs, and of what is computed of them."""
    tokens: set[int] = field(default_factory=set)
    """Storages of whole numbers of the sample, and of what is computed of them."""
    random: set[int] = field(default_factory=set)
    """Storages of random numbers, and of what is computed of them."""

    has_looked: bool = False
    """Whether code looks at values: with others it may use other weights."""
    varies: str = ""
    """Path of a module whose code may act differently, or make another shape, for other values."""
    varies_within: bool = True
    """Whether what follows from values of weights, or of floating inputs, stays within calls of modules."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules whose code looks, with those of which a look hides what they do; empty where no code looks."""
        return (*(self.modules | self.unseen),) if self.modules else ()

    def follow(self, func: Any, read: Iterable[int], written: Iterable[int]) -> None:
        """Record the sources of an operation's results; a tensor of equal elements has none in the tensor that it is
        like."""
        if func.overloadpacket in FILLED_LIKE:
            return
        sources, results = {*read}, {*written}
        if not sources.isdisjoint(self.data):
            self.data |= results
        if not sources.isdisjoint(self.tokens):
            self.tokens |= results
        if torch.Tag.nondeterministic_seeded in func.tags or not sources.isdisjoint(self.random):
            self.random |= results

    def vary_at(self, path: str) -> None:
        """Record that the code of a module may act differently for other values; the first one is kept."""
        self.varies = self.varies or path or "the model itself"

    def is_open(self, storages: Iterable[int]) -> bool:
        """Return whether other samples, weights or random numbers may change what code finds in some storages."""
        return any(key in self.data or key in self.random for key in storages)

    def answer(self, where: str, find: Callable[[], Any]) -> Any:
        """Return what a look of a module's code is answered; `find` finds it where no earlier forward was answered.

        Raises:
            NeedsValuesError: the code looks more often than in the earlier forward.
        """
        self.modules.setdefault(where)
        if self.known is None:
            answer = find()
        elif self.known:
            answer = self.known.popleft()
        else:
            raise NeedsValuesError
        self.answers.append(answer)
        return tree_map_only(Tensor, _fresh, answer)


def _fresh(tensor: Tensor) -> Tensor:
    """Return a tensor with a new storage in place of one of the meta device, which has no values."""
    if not tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def paths_within(model: nn.Module, looking: Collection[str]) -> frozenset[str]:
    """Return the paths of all modules that those which look may call, and of all modules that share a weight with one of these."""
    parts = {id(part) for path in looking for part in _reached(model.get_submodule(path))}
    weights = {id(param) for _, part in model.named_modules() if id(part) in parts for param in part.parameters()}
    return frozenset(
        path
        for path, part in model.named_modules(remove_duplicate=False)
        if id(part) in parts or any(id(param) in weights for param in part.parameters(recurse=False))
    )


def _reached(root: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, those below it, and those that their attributes hold without owning them."""
    rest, seen = [root], set[int]()
    while rest:
        part = rest.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        rest.extend(part.children())
        for value in set_attributes(part).values():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            rest.extend(item for item in values if isinstance(item, nn.Module))


def tensors_seen_by(root: nn.Module, inputs: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a module is given, and those that it and the modules below it keep as plain attributes."""
    attributes = [
        value for part in root.modules() for value in set_attributes(part).values() if isinstance(value, Tensor)
    ]
    return (*tensors_in(inputs), *attributes)


PACKS = frozenset((_aten._pack_padded_sequence,))
"""Operations that are given a tensor on the host beside one on the device."""


class PickedRows:
    """The storages of one forward whose shapes follow from the values of the sample."""

    def __init__(self, key_of: Callable[[Tensor], int]) -> None:
        self._key_of = key_of
        self._storages: set[int] = set()
        self.path = ""
        """Path of the first module whose code works on such rows: other samples may have more."""
        self.has_none = False
        """Whether the sample has no such row, so that what is done to them cannot be seen."""

    def follow(self, func: Any, args: tuple[Any, ...], inputs: list[Tensor], results: list[Tensor]) -> bool:
        """Follow an operation to its results; return whether it picks rows, or works on some."""
        if not _finds(func, args) and not self.holds(inputs):
            return False
        keeps_shape = func._schema.is_mutable or (func.overloadpacket in _WRITTEN_BACK and not self.holds(args[0]))
        if not keeps_shape:
            self._storages |= {self._key_of(tensor) for tensor in results if tensor.dim()}
        return True

    def holds(self, values: Any) -> bool:
        """Return whether the shape of one of nested tensors follows from values."""
        return any(self._key_of(leaf) in self._storages for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _finds(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the shape of an operation's result follows from values, as that of `x[mask]` does."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func.overloadpacket is _aten.index:
        return any(map(is_mask, operands(args[1])))
    return func.overloadpacket not in _OF_GIVEN_SIZE or len(args) < 2 or args[-1] is None


_OF_GIVEN_SIZE = (_aten.one_hot, _aten.bincount)
"""Operations whose last argument is the number of classes that the result has a place for."""
_WRITTEN_BACK = frozenset(
    (
        _aten.index_add, _aten.index_put, _aten._unsafe_index_put, _aten.index_copy, _aten.index_fill, _aten.scatter,
        _aten.scatter_add, _aten.scatter_reduce, _aten.masked_fill, _aten.masked_scatter,
    )
)  # fmt: skip
"""Operations whose results have the shape of their first operand."""
