"""One operation of a traced forward as the rules of rows see it: its operands, their dependences, and those of its results.

The dimensions that operands become are stated in `dimension_maps.py`. A result with an operand whose rows lie along a
dimension that is SUMMED is mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from samestep.tracing.dependence.dimension_maps import MOVED, SUMMED, Blocks, Operand, Target, place_of
from samestep.tracing.dependence.independence import NO_DIM, Along, Dependence, Dependences, Mixed, joined
from samestep.tracing.meta_tensors import operands


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

    @property
    def given(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [tensor for tensor in operands(*self.args, *self.kwargs.values()) if tensor.is_meta]


Rule = Callable[[Call], Iterable[Dependence]]
"""Returns the dependence of each result."""
Moves = Callable[[int, Along], Dependence]
"""Returns what the rows of an operand, told by its number, become that lie along a MOVED dimension or are of one row."""


def mapped(call: Call, given: Sequence[Operand], moves: Moves | None = None) -> Dependence:
    """Return the dependence of a result from the dimensions that its operands become.

    Those without elements give nothing, unless rows are mixed in what says that they have none: with other values they may.
    """
    parts: list[Along | Mixed] = []
    constants: list[Operand] = []
    has_elements = all(result.numel() for result in call.results)
    for at, (tensor, dims) in enumerate(given):
        found = call.known.of(tensor)
        if has_elements and not tensor.numel() and not isinstance(found, Mixed):
            continue
        if found is None:
            constants.append((tensor, dims))
            continue
        if isinstance(found, Along):
            is_moved = found.dim == NO_DIM or dims[found.dim] == MOVED
            found = moves(at, found) if moves is not None and is_moved else _become(call, found, dims)
        if found is not None:
            parts.append(found)
    result = joined(parts, call.text)
    if isinstance(result, Along) and result.dim != NO_DIM:
        for tensor, dims in constants:
            _check_constant(call, tensor, dims, result)
    return result


def _become(call: Call, found: Along, dims: Sequence[Target]) -> Along | Mixed:
    """Return what rows along a dimension of an operand become."""
    if found.dim == NO_DIM:
        return found
    to = dims[found.dim]
    if isinstance(to, Blocks):
        if found.inner % to.each == 0:
            return Along(to.dim, found.inner // to.each * to.gives, found.start)
        return Mixed(call.text, shown=True)
    return Mixed(call.text, shown=to == SUMMED) if to in (SUMMED, MOVED) else found._replace(dim=to)


def _check_constant(call: Call, tensor: Tensor, dims: Sequence[Target], result: Along) -> None:
    """Report a constant that has several positions along the dimension of rows of a result."""
    at = place_of(dims, result.dim)
    if at is not None and tensor.shape[at] > 1:
        to, inner = dims[at], result.inner
        call.on_constant(tensor, at, inner // to.gives * to.each if isinstance(to, Blocks) else inner, call.where)


def unknown(call: Call, tensor: Tensor) -> Mixed | None:
    """Return what an operand makes of a result of which nothing else is known."""
    found = call.known.of(tensor)
    if found is None or isinstance(found, Mixed):
        return found
    return Mixed(call.text, shown=False)


def nothing_known(call: Call) -> Iterator[Dependence]:
    """Rule of an operation without one: nothing is known of its results."""
    parts = [part for tensor in call.given if (part := unknown(call, tensor))]
    for _ in call.results:
        yield joined(parts, call.text)
