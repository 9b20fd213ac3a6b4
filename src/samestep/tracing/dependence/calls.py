"""One operation of a traced forward as a rule sees it: its operands, their dependences, and how dimensions become others.

A rule (`rules.py`) says of one call, for each result, which dimension of an operand becomes which dimension of
the result. A result with an operand whose rows lie along a SUMMED dimension is mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from samestep.tracing.dependence.independence import NO_DIM, Along, Dependence, Dependences, Mixed, joined
from samestep.tracing.meta_tensors import operands

SUMMED = -2
"""The dimension of the result of a dimension along which is summed, sorted or compared."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a traced forward, and the dependences before it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    known: Dependences
    where: str
    """Path of the module whose code runs."""
    on_constant: Callable[[Tensor, int, int, str], None]
    """Called with a constant that has several positions along the dimension of rows, that dimension of the constant, its
    elements a row, and the path."""
    value_of: Callable[[Tensor], Tensor | None]
    """Returns the value of a tensor of integers, where it is known."""

    @property
    def text(self) -> str:
        """The module that runs and the operation, as text."""
        return f"{self.where} by {'attention' if self.func is None else self.func.overloadpacket.__name__}"

    def named(self) -> dict[str, Any]:
        """Return all arguments by name, with their defaults."""
        schema = self.func._schema.arguments
        given = {one.name: value for one, value in zip(schema, self.args, strict=False)} | self.kwargs
        return {one.name: given.get(one.name, one.default_value) for one in schema}

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [tensor for tensor in operands(*self.args, *self.kwargs.values()) if tensor.is_meta]


Operand = tuple[Tensor, Sequence[int]]
"""A tensor, and for each of its dimensions the dimension of the result."""
Rule = Callable[[Call], Iterable[Dependence]]
"""Returns the dependence of each result."""


def mapped(call: Call, given: Iterable[Operand], adds: Along | Mixed | None = None) -> Dependence:
    """Return the dependence of a result from the dimensions that its operands become."""
    parts: list[Along | Mixed] = [] if adds is None else [adds]
    constants: list[Operand] = []
    for tensor, dims in given:
        found = call.known.of(tensor)
        if found is None:
            constants.append((tensor, dims))
        elif isinstance(found, Mixed) or found.dim == NO_DIM:
            parts.append(found)
        elif dims[found.dim] == SUMMED:
            parts.append(Mixed(call.text, shown=True))
        else:
            parts.append(Along(dims[found.dim], found.inner, found.start))
    result = joined(parts, call.text)
    if isinstance(result, Along) and result.dim != NO_DIM:
        for tensor, dims in constants:
            if result.dim in dims and tensor.shape[(own := list(dims).index(result.dim))] > 1:
                call.on_constant(tensor, own, result.inner, call.where)
    return result


def broadcast(tensor: Tensor, result: Tensor) -> Operand:
    """Return an operand whose dimensions are aligned from the right with those of a result."""
    return tensor, range(result.dim() - tensor.dim(), result.dim())


def unknown(call: Call, tensor: Tensor) -> Mixed | None:
    """Return what an operand makes of a result of which nothing else is known."""
    found = call.known.of(tensor)
    if found is None or isinstance(found, Mixed):
        return found
    return Mixed(call.text, shown=False)


def nothing_known(call: Call) -> Iterator[Dependence]:
    """Rule of an operation without one: nothing is known of its results."""
    parts = [part for tensor in call.tensors() if (part := unknown(call, tensor))]
    for _ in call.results:
        yield joined(parts, call.text)


def along(call: Call) -> Iterator[Dependence]:
    """Rule of sums, norms, sorts and scans along dimensions."""
    named = call.named()
    first, *others = call.tensors()
    dims = named.get("dim")
    if "normalized_shape" in named:
        dims = list(range(-len(named["normalized_shape"]), 0))
    if dims is None or dims == []:
        dims = list(range(first.dim()))
    chosen = {dim % max(first.dim(), 1) for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    for result in call.results:
        kept = result.dim() == first.dim()
        mine, at = [], 0
        for dim in range(first.dim()):
            mine.append(SUMMED if dim in chosen else dim if kept else at)
            at += dim not in chosen
        given: list[Operand] = [(first, mine)]
        given += [broadcast(other, result) for other in others if other.dim() <= result.dim()]
        yield mapped(call, given)
