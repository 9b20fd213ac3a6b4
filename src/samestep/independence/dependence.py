"""The dependences of a traced forward along one axis: on which rows (samples, or tokens) each value depends, and how it was computed.

The head of the package has the notation. Merged dimensions, as [samples * tokens, features], have `inner` elements of each row side by side. Where
two operands meet with different rows, the result is mixed. Rows may also be picked by an index tensor whose values are not known, as `x[mask]` or
`x[chosen]`: their order is then that `Pick`, and writing them back by the same index restores the order. The rules of rows see an operation (`Call`) as
its operands, their dependences, and those of its results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.independence.dimension_maps import MOVED, SUMMED, Blocks, Operand, Target, place_of
from samestep.trees import operands

NO_DIM = -1
"""The dimension of rows of a tensor that depends on one row alone."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The order of rows that an index tensor of unknown values has picked."""

    index: tuple[object, ...]
    """Identity of the index tensor, as a view of its storage; of a mask that of its elements in their order, whatever its shape."""
    picked: Along
    """Where the rows were, before they were picked, along the one dimension that the covered dimensions are together."""
    size: int
    """Elements of the dimensions that the index, or the mask, covers."""


@dataclass(frozen=True, slots=True)
class Wide:
    """The order of rows that are more than tokens, since there are some for tokens of neighbours (`token_moves.py`): as many as there are
    tokens, from one of the first rows on, belong to these each."""

    rows: int
    last: int
    """Last row at which they may begin."""
    where: str
    """Path of the module whose code has made them, and the operation, as text."""


class Along(NamedTuple):
    """Dependence of a tensor: position i of dimension `dim` depends on row i // inner + start, modulo the number of rows."""

    dim: int
    inner: int
    start: int | Pick | Wide


@dataclass(frozen=True, slots=True)
class Mixed:
    """Dependence on several rows, or in a way that is not known."""

    where: str
    """Path of the module whose code runs, and the operation, as text."""
    shown: bool
    """Whether the rule of an operation shows that rows are mixed; if not, it is not known whether they are."""


Dependence = Along | Mixed | None
"""Dependence of one tensor; None if it depends on no row."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a storage: byte o (of units: element o) belongs to row ((o mod span) // stride + start) mod n."""

    stride: int
    span: int
    start: int | Pick | Wide = 0
    sources: frozenset[str] = frozenset()
    """Of units the names of the weights whose units these are."""


class Form(NamedTuple):
    """The places of a tensor's elements in its storage."""

    dims: tuple[tuple[int, int], ...]
    """Extent and stride in bytes of each dimension but that of rows; strides over all rows are negative and count them once."""
    offset: tuple[int, ...]
    """Byte at which the tensor begins; with rows, how often all rows stand before it, and the byte within a row."""


class Dependences:
    """The dependences of all storages of one forward along one axis."""

    def __init__(self, num_rows: int, key_of: Callable[[Tensor], int]) -> None:
        self.num_rows = num_rows
        self.are_placed = True
        """Whether integers that are given name the same places as in a batch: a function that puts samples together may count them on."""
        self._key_of = key_of
        self._found: dict[int, Rows | Mixed] = {}
        self._empty: dict[int, tuple[torch.Size, Dependence]] = {}
        """Shapes and dependences of tensors without elements, such as the rows of an expert that nobody chose."""

    def of(self, tensor: Tensor) -> Dependence:
        """Return the dependence of a tensor, which may be a view."""
        if not self._found and not self._empty:
            return None
        key = tensor.untyped_storage()._cdata
        if tensor.numel() == 0:
            shape, of_empty = self._empty.get(key, (tensor.shape, None))
            return of_empty if shape == tensor.shape else Mixed("a view of no rows", False)
        stored = self._found.get(key)
        return self._along(stored, tensor) if isinstance(stored, Rows) else stored

    def learn(self, tensor: Tensor, dependence: Dependence) -> None:
        """Set the dependence of a tensor's elements, which were written just now; others of its storage keep theirs."""
        key = self._key_of(tensor)
        earlier = self._found.get(key)
        covers = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if (
            not covers and isinstance(earlier, Rows) and isinstance(earlier.start, Wide)
        ):  # those of neighbours are others on each rank
            self._found[key] = Mixed("a tensor that is written in parts", shown=False)
            return
        if dependence is None:
            if covers:
                self._found.pop(key, None)
            return
        if tensor.numel() == 0:
            self._empty[key] = tensor.shape, dependence
            return
        new = self._stored(dependence, tensor)
        if not covers and earlier is not None and earlier != new:
            new = earlier if isinstance(earlier, Mixed) else Mixed("a tensor that is written in parts", shown=False)
        self._found[key] = new

    def _stored(self, dependence: Along | Mixed, tensor: Tensor) -> Rows | Mixed:
        """Return the description of a storage whose elements in `tensor` have this dependence."""
        if isinstance(dependence, Mixed):
            return dependence
        dim, inner, start = dependence
        size, nbytes = tensor.element_size(), max(tensor.untyped_storage().nbytes(), 1)
        offset = tensor.storage_offset() * size
        if dim == NO_DIM or tensor.shape[dim] == 1:
            stride, span = max(tensor.numel(), 1) * size, nbytes
            if not tensor.is_contiguous() or offset % stride:
                stride, offset = nbytes, 0
        else:
            step = tensor.stride(dim) * size
            stride = inner * step
            outer = [s * size for s, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
            span = min((s for s in outer if s >= step * tensor.shape[dim]), default=nbytes)
            if (span != nbytes and span % stride) or offset % stride >= step:
                return Mixed("a tensor written from within a row on", shown=False)
        shift = offset % span // stride
        if isinstance(start, int):
            return Rows(stride, span, (start - shift) % self.num_rows)
        return Mixed("picked rows written side by side", shown=False) if shift else Rows(stride, span, start)

    def _along(self, rows: Rows, tensor: Tensor) -> Along | Mixed:
        """Return which dimension of a view holds the rows of its storage."""
        size, shape = tensor.element_size(), tuple(tensor.shape)
        strides = tuple(stride * size for stride in tensor.stride())
        along = _wide_along if isinstance(rows.start, Wide) else rows_along
        return along(rows, self.num_rows, int(tensor.storage_offset()) * size, shape, strides)

    def form_of(self, tensor: Tensor) -> Form:
        """Return how a tensor, which may be a view, stands in its storage, without what follows from the number of rows."""
        rows, size = self._found.get(tensor.untyped_storage()._cdata), tensor.element_size()
        steps = [*zip(tensor.shape, (stride * size for stride in tensor.stride()), strict=True)]
        offset = int(tensor.storage_offset()) * size
        if not isinstance(rows, Rows) or not tensor.numel():
            return Form(tuple(steps), (offset,))
        at, dims = self._along(rows, tensor), []
        within = (
            rows.span if isinstance(rows.start, Wide) else rows.stride
        )  # which of more rows it shows says what is computed
        for dim, (extent, step) in enumerate(steps):
            if isinstance(at, Along) and dim == at.dim:
                dims += [(at.inner, step)] if at.inner > 1 else []
            else:
                dims.append((extent, step if step < within else -(step // rows.span)))
        return Form(tuple(dims), (offset // rows.span, offset % within))

    def is_ordered(self, tensor: Tensor, dependence: Dependence = None) -> bool:
        """Return whether a tensor depends on no row, or has all rows in their order along one dimension; with `dependence`, if it has this one."""
        dependence = dependence or self.of(tensor)
        if not isinstance(dependence, Along):
            return dependence is None
        has_all = dependence.dim != NO_DIM and tensor.shape[dependence.dim] % (self.num_rows * dependence.inner) == 0
        return has_all and dependence.start == 0

    def has_rows(self, tensor: Tensor, dim: int) -> bool:
        """Return whether each position along `dim` depends on the row of its number, and there are no others."""
        return self.of(tensor) == Along(dim, 1, 0) and tensor.shape[dim] == self.num_rows


@functools.lru_cache(maxsize=4096)
def rows_along(
    rows: Rows, num_rows: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Along | Mixed:
    """Return which dimension of a view holds the rows of its storage; offset and strides are bytes, as those of the rows."""
    first, rest = divmod(offset % rows.span, rows.stride)
    unclear = Mixed("a view that crosses rows", shown=False)
    along, below, reach = None, rest, 1
    period = rows.span
    if is_periodic := rows.span // rows.stride % num_rows == 0 and isinstance(rows.start, int):
        period = rows.stride * num_rows
    for step, extent, dim in sorted((s, e, d) for d, (s, e) in enumerate(zip(strides, shape, strict=True))):
        if extent == 1 or step == 0 or step % period == 0:
            continue
        if step < rows.stride and below + step * (extent - 1) < rows.stride:
            below += step * (extent - 1)  # stays within a row
        elif along is not None:
            return unclear
        elif step < rows.stride and rows.stride % step == 0 and below < step:
            along, reach = Along(dim, rows.stride // step, 0), -(-extent * step // rows.stride)
        elif step == rows.stride:
            along, reach = Along(dim, 1, 0), extent
        else:
            return unclear
    if first + reach > max(rows.span // rows.stride, 1) and not is_periodic:
        return unclear
    start = rows.start
    if isinstance(start, int):
        start = (start + first) % num_rows
    elif first:
        return unclear  # a part of picked rows is another pick
    return Along(NO_DIM, 1, start) if along is None else Along(along.dim, along.inner, start)


def _wide_along(
    rows: Rows, num_tokens: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Along | Mixed:
    """Return which dimension of a view holds all rows of a storage that has more than tokens, or as many of them as there are tokens.

    A second dimension may hold the neighbours of each, as of windows.
    """
    wide = rows.start
    assert isinstance(wide, Wide)
    mixed = Mixed(wide.where, shown=True)
    below, along = 0, list[int]()
    for dim, (extent, step) in enumerate(zip(shape, strides, strict=True)):
        if extent == 1 or step % rows.span == 0:
            continue
        if step == rows.stride:
            along.append(dim)
        elif step < rows.stride:
            below += step * (extent - 1)
        else:
            return mixed
    place, within = divmod(offset % rows.span, rows.stride)
    if within + below >= rows.stride:
        return mixed
    if len(along) == 1 and shape[along[0]] == wide.rows:
        return Along(along[0], 1, wide)
    of_tokens = [dim for dim in along if shape[dim] == num_tokens]
    reach = sum(shape[dim] - 1 for dim in along if dim not in of_tokens)
    if len(of_tokens) != 1 or len(along) > 2 or place + reach > wide.last:
        return mixed
    return Along(of_tokens[0], 1, 0)


def identity_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what identifies a tensor as a view of its storage, while that lives."""
    shape = tuple(tensor.shape)
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), shape, tensor.stride(), tensor._version


def join_dependences(parts: Sequence[Along | Mixed], where: str) -> Dependence:
    """Return the dependence of a value that is computed from values of these dependences."""
    shown = next((part for part in parts if isinstance(part, Mixed) and part.shown), None)
    unclear = next((part for part in parts if isinstance(part, Mixed)), None)
    if shown or unclear or not parts:
        return shown or unclear
    if all(part == parts[0] for part in parts):
        return parts[0]
    # Picked rows, or one row beside all of them, may be copies of equal rows: what that means is not known.
    is_clear = all(isinstance(part, Along) and part.dim != NO_DIM and isinstance(part.start, int) for part in parts)
    return Mixed(where, shown=is_clear)


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a traced forward, and the dependences before it."""

    func: Any
    """An operator of torch, or the name of what else computes the results."""
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
        return f"{self.where} by {self.func if isinstance(self.func, str) else self.func.overloadpacket.__name__}"

    @property
    def given(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [tensor for tensor in operands(*self.args, *self.kwargs.values()) if tensor.is_meta]


Rule = Callable[[Call], Iterable[Dependence]]
"""Returns the dependence of each result."""
Moves = Callable[[int, Along], Dependence]
"""Returns what the rows of an operand, told by its number, become that lie along a MOVED dimension or are of one row."""


def map_dependence(call: Call, mapped_operands: Sequence[Operand], moves: Moves | None = None) -> Dependence:
    """Return the dependence of a result from the dimensions that its operands become.

    Those without elements give nothing, unless rows are mixed in what says that they have none: with other values they may.
    """
    parts: list[Along | Mixed] = []
    constants: list[Operand] = []
    has_elements = all(result.numel() for result in call.results)
    for at, (tensor, dims) in enumerate(mapped_operands):
        dependence = call.known.of(tensor)
        if has_elements and not tensor.numel() and not isinstance(dependence, Mixed):
            continue
        if dependence is None:
            constants.append((tensor, dims))
            continue
        if isinstance(dependence, Along):
            is_moved = dependence.dim == NO_DIM or dims[dependence.dim] == MOVED
            dependence = moves(at, dependence) if moves is not None and is_moved else _become(call, dependence, dims)
        if dependence is not None:
            parts.append(dependence)
    result = join_dependences(parts, call.text)
    if isinstance(result, Along) and result.dim != NO_DIM:
        for tensor, dims in constants:
            _check_constant(call, tensor, dims, result)
    return result


def _become(call: Call, along: Along, dims: Sequence[Target]) -> Along | Mixed:
    """Return what rows along a dimension of an operand become."""
    if along.dim == NO_DIM:
        return along
    to = dims[along.dim]
    if isinstance(to, Blocks):
        if along.inner % to.each == 0:
            return Along(to.dim, along.inner // to.each * to.gives, along.start)
        return Mixed(call.text, shown=True)
    return Mixed(call.text, shown=to == SUMMED) if to in (SUMMED, MOVED) else along._replace(dim=to)


def _check_constant(call: Call, tensor: Tensor, dims: Sequence[Target], result: Along) -> None:
    """Report a constant that has several positions along the dimension of rows of a result."""
    at = place_of(dims, result.dim)
    if at is not None and tensor.shape[at] > 1:
        to, inner = dims[at], result.inner
        call.on_constant(tensor, at, inner // to.gives * to.each if isinstance(to, Blocks) else inner, call.where)


def nothing_known(call: Call) -> Iterator[Dependence]:
    """Rule of an operation without one: nothing is known of its results."""
    dependences = filter(None, map(call.known.of, call.given))
    parts = [part if isinstance(part, Mixed) else Mixed(call.text, shown=False) for part in dependences]
    for _ in call.results:
        yield join_dependences(parts, call.text)
