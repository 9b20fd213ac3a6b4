"""Numbers of the values of a traced forward: values that are computed alike from the same have one number.

Two forwards on the meta device, of the whole sequence and of a slice, share one table of numbers (value numbering, as compilers
find common subexpressions). The number of a result stands for its operation, all other arguments, and the numbers of the operands:

    x * 0.5               (mul, number of x, 0.5)               the same on every slice
    x / x.shape[1]        (div, number of x, 12)                another one on a slice of 6 tokens
    x * table[x.shape[1]] (mul, number of x, table at byte 48)  another one, too

So it does not matter in which way code has used the length: as a number, an index, a key, a count of turns, or to choose what it
does. The number of tokens itself is no part of a number: that of a tensor with a row for each token leaves the dimension of
rows out, so that it says what is computed for each token. Which token a position belongs to is followed beside it (`dependence.py`).

A forward may compute some rows (tokens, or samples) apart from others. That is right if all of them have one number in the end:

    torch.cat([mlp(part) for part in x.chunk(4, 1)], 1)     every token: mlp
    torch.cat([(2 * x)[:, :1], x[:, 1:]], 1)                token 0: mul 2, the others: x
    x[:, 0] = 0                                             token 0: fill 0, the others: x

Otherwise the result of a row depends on its place among the rows, which is another one in a part of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.independence.dependence import Along, Dependence, Dependences, Form, Mixed
from samestep.independence.dimension_maps import (
    FILLS,
    OVERWRITES,
    bind_arguments,
    is_elementwise,
    operands_of,
    place_of,
)
from samestep.tracing.operations import Executed
from samestep.trees import fold, operands

_aten = torch.ops.aten

Table = dict[Hashable, int]
"""The number of each computation, shared by the forwards that are compared."""

_COPIES = (_aten.clone, _aten._to_copy)
_SIZES = frozenset(("size", "sizes", "input_sizes", "input_size"))
"""Arguments that give the shape of the result alone."""
_OTHER_SIZES = {
    **dict.fromkeys((_aten.native_group_norm, _aten.native_group_norm_backward), frozenset(("N", "C", "HxW"))),
    _aten.arange: frozenset(("end",)),
}
"""Arguments of single operations that say no more than the shapes of operands or results."""


class Operand(NamedTuple):
    """A tensor as an operation found it."""

    tensor: Tensor
    number: int
    """Number of its storage."""
    dependence: Dependence
    is_uniform: bool
    takes_gradient: bool
    form: Form
    apart: str
    """The operation that has computed some of its rows otherwise than others, as text; empty if none has."""


class ValueNumbers:
    """The numbers of the values of one forward, by the keys of their storages."""

    def __init__(
        self, table: Table, known: Dependences, key_of: Callable[[Tensor], int], is_uniform: Callable[[Tensor], bool]
    ) -> None:
        self._table, self._known, self._key_of, self._is_uniform = table, known, key_of, is_uniform
        self._of: dict[int, int] = {}
        self._writes: dict[int, tuple[int, tuple[Hashable, ...]]] = {}
        """Of storages that were written in parts, the number before that and what was written."""
        self._of_rows: dict[int, tuple[list[int], str]] = {}
        """Of storages in which some rows alone were written, the number of each row, and the operation as text."""
        self._apart: dict[int, str] = {}
        """The operation that has computed some rows of a storage otherwise than others, as text."""
        self._of_some: dict[int, str] = {}
        """The operation that has computed a storage of some rows alone, as text; joined to others it is one of several parts."""
        self._made_by: dict[int, str] = {}
        """The operation that has computed a value of rows, as text, by its number."""
        self.computed: list[tuple[int, str]] = []
        """Number of each value that was computed of rows, with the path of the module whose code did so."""
        self.history: list[tuple[int, torch.Size]] = []
        """Number and shape of each value that was computed."""

    def name(self, tensor: Tensor, *what: Hashable, where: str = "", apart: str = "") -> None:
        """Set the number of a storage to that of a computation."""
        key = self._key_of(tensor)
        self._forget(key, apart)
        self._of[key] = self._number(what)
        if where:
            self.computed.append((self._of[key], where))

    def take_rows(self, part: Tensor, whole: Tensor, dim: int) -> None:
        """Set the number of some rows of a tensor, which is that of the tensor itself: each row stays what it was."""
        if whole.is_contiguous() and whole.numel() * whole.element_size() == whole.untyped_storage().nbytes():
            self._of[self._key_of(part)] = self._of_storage(self._key_of(whole))
        else:
            self.name(part, "rows", dim, self.of(whole))

    def of(self, tensor: Tensor) -> Hashable:
        """Return what identifies the value of a tensor, which may be a view."""
        return _key(self._seen(tensor), is_elementwise=False, aligned=None)

    def apart(self, *tensors: Tensor) -> str:
        """Return the operation that has computed some rows of one of these tensors alone, or otherwise than others, as text; empty if
        none has."""
        ways = (self._seen(tensor).apart or self._of_some.get(self._key_of(tensor), "") for tensor in tensors)
        return next(filter(None, ways), "")

    def seen_by(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Operand]:
        """Return the operands of an operation as they are now, in their order."""
        return [self._seen(tensor) for _, value in _name_arguments(func, args, kwargs) for tensor in operands(value)]

    def _seen(self, tensor: Tensor) -> Operand:
        """Return a tensor as it is now."""
        dependence, is_uniform = self._known.of(tensor), self._is_uniform(tensor)
        key, apart = self._key_of(tensor), ""
        if not tensor.is_meta:
            number = self._number(_content(tensor) if dependence is None else ("drawn", tensor.dtype))
            is_uniform = _is_uniform(tensor)
        else:
            number, apart = self._of_storage(key), self._apart.get(key, "")
            if key in self._of_rows:
                numbers, text = self._of_rows[key]
                shown = {numbers[row] for row in self._shown(tensor)}
                number, apart = (shown.pop(), apart) if len(shown) == 1 else (number, text)
        # Where no gradient is taken, a slice that was made there has none, and the whole tensor may.
        takes_gradient = tensor.requires_grad and torch.is_grad_enabled()
        return Operand(tensor, number, dependence, is_uniform, takes_gradient, self._known.form_of(tensor), apart)

    def learn_constant(self, tensor: Tensor, real: Tensor) -> None:
        """Set the number of a tensor on the meta device that stands for a real one; random numbers of each row are alike."""
        is_drawn = self._known.of(real) is not None
        self._of[self._key_of(tensor)] = self._number(("drawn", real.dtype) if is_drawn else _content(real))

    def ran(self, op: Executed, seen: list[Operand], where: str) -> None:
        """Set the numbers of the results of an operation; `seen` are its operands as it has found them, in their order."""
        func, results, packet, writes = op.func, op.results, op.func.overloadpacket, op.func._schema.is_mutable
        shared = set() if writes else {self._key_of(operand.tensor) for operand in seen if operand.tensor.is_meta}
        fresh = [(index, result) for index, result in enumerate(results) if self._key_of(result) not in shared]
        if not fresh:
            return
        along = next(
            (dependence.dim for _, result in fresh if isinstance(dependence := self._known.of(result), Along)), None
        )
        aligned = _align_constants(op, seen, fresh[0][1], along) if along is not None else {}
        left_out = _SIZES | _OTHER_SIZES.get(packet, frozenset())
        if packet in FILLS or packet in OVERWRITES:
            left_out |= {"self"}
        named = [(operand, _key(operand, is_elementwise(func), aligned.get(id(operand.tensor)))) for operand in seen]
        keys, text = iter([key for _, key in named]), f"{where} by {packet.__name__}"
        apart = next(filter(None, (operand.apart for operand in seen[packet in OVERWRITES :])), "")
        is_beside = isinstance(self._known.of(fresh[0][1]), Along) and _joins_rows(op, along)
        parts = []
        for name, value in _name_arguments(func, op.args, op.kwargs):
            part = fold(value, lambda leaf: next(keys) if isinstance(leaf, Tensor) else repr(leaf))
            if is_beside and name == "tensors" and isinstance(part, tuple):
                part = tuple(dict.fromkeys(part))
                apart = apart or self._joined(named, fresh[0][1], text)
            if name not in left_out:
                parts.append((name, part))
        for index, result in fresh:
            number = self._number((str(func), index, *parts))
            self.history.append((number, result.shape))
            of_source = self._made_by.get(seen[1].number, "") if packet is _aten.copy_ else ""
            self._set(result, number, apart, of_source or text, is_written=writes, overwrites=packet in OVERWRITES)
            if isinstance(self._known.of(result), Along):
                if not writes and packet not in _COPIES and len(self._shown(result)) < self._known.num_rows:
                    first = (self._of_some.get(self._key_of(operand.tensor), "") for operand in seen)
                    self._of_some[self._key_of(result)] = next(filter(None, first), text)
                self.computed.append((number, where))
                self._made_by.setdefault(number, text)

    def _joined(self, named: list[tuple[Operand, Hashable]], result: Tensor, text: str) -> str:
        """Return the operation that makes one of several rows beside each other another value than the rest, as text; empty if none does."""
        dependence, number = self._known.of(result), self._known.num_rows
        if not isinstance(dependence, Along) or not isinstance(dependence.start, int):
            return ""
        rows = [(operand, key) for operand, key in named if operand.dependence is not None]
        is_full = result.shape[dependence.dim] == number * dependence.inner  # so that a constant stands for some rows
        stands_in = is_full and any(operand.dependence is None and operand.tensor.numel() for operand, _ in named)
        is_part = any(len(self._shown(operand.tensor)) < number for operand, _ in rows)
        if not stands_in and not (is_part and len({key for _, key in rows}) > 1):
            return ""
        return next((self._made_by[operand.number] for operand, _ in rows if operand.number in self._made_by), text)

    def _shown(self, tensor: Tensor) -> Sequence[int]:
        """Return the rows that a tensor shows, all of them where values have picked some."""
        dependence, number = self._known.of(tensor), self._known.num_rows
        if not isinstance(dependence, Along) or not isinstance(dependence.start, int):
            return range(number)
        count = max(1, tensor.shape[dependence.dim] // dependence.inner) if dependence.dim >= 0 else 1
        return [(dependence.start + at) % number for at in range(min(count, number))]

    def _forget(self, key: int, apart: str) -> None:
        """Drop what is known of a storage that is computed as a whole."""
        self._writes.pop(key, None)
        self._of_rows.pop(key, None)
        self._apart.pop(key, None)
        self._of_some.pop(key, None)
        if apart:
            self._apart[key] = apart

    def _set(self, result: Tensor, number: int, apart: str, text: str, *, is_written: bool, overwrites: bool) -> None:
        key = self._key_of(result)
        if is_written and overwrites and not self._is_uniform(result):
            number = self._number((number, self._known.form_of(result)))
        covers = result.numel() * result.element_size() == result.untyped_storage().nbytes()
        if not is_written or covers:
            self._forget(key, apart)
            self._of[key] = number
            return
        old, written = self._writes.get(key, (self._of_storage(key), ()))
        write = number, self._known.form_of(result)
        if apart:
            self._apart[key] = apart
        rows = self._shown(result)
        if key in self._of_rows or len(rows) < self._known.num_rows:
            numbers, text = self._of_rows.setdefault(key, ([self._of_storage(key)] * self._known.num_rows, text))
            for row in rows:
                numbers[row] = self._number(("written", numbers[row], write))
            if len({*numbers}) == 1:
                del self._of_rows[key]
        if write not in written or not isinstance(self._known.of(result), Along):
            written = (*written, write)
        self._writes[key] = old, written
        self._of[key] = self._number(("written", old, written))

    def _of_storage(self, key: int) -> int:
        # What the model holds beside its weights stands at one address in all forwards that are compared.
        return self._of[key] if key in self._of else self._number(("held", key))

    def _number(self, computation: Hashable) -> int:
        return self._table.setdefault(computation, len(self._table))


def first_difference(first: ValueNumbers, second: ValueNumbers) -> str:
    """Return the module whose code first computes, in the second of two forwards, what the first one does not compute."""
    known = {number for number, _ in first.computed}
    return next((where for number, where in second.computed if number not in known), "the model itself")


def _key(operand: Operand, is_elementwise: bool, aligned: int | None) -> Hashable:
    """Return what identifies an operand; `aligned` is the dimension of a constant that goes along the rows."""
    dims, offset = operand.form
    if isinstance(operand.dependence, Mixed):
        return operand.number, "mixed"
    if operand.dependence is None:
        dims = tuple(dim for at, dim in enumerate(dims) if at != aligned)
        if operand.is_uniform:
            dims, offset = () if is_elementwise else tuple((extent, -1) for extent, _ in dims), (0,)
    dims = tuple((extent, step) for extent, step in dims if extent > 1 and (step or not is_elementwise))
    return operand.number, operand.tensor.dtype, dims, offset if any(offset) else (), operand.takes_gradient


def _align_constants(op: Executed, seen: list[Operand], result: Tensor, along: int) -> dict[int, int | None]:
    """Return which dimension of each constant goes along that of the rows of a result."""
    tensors = [operand.tensor for operand in seen]
    maps = operands_of(SimpleNamespace(func=op.func, args=op.args, kwargs=op.kwargs, results=[result], given=tensors))
    return {id(tensor): place_of(dims, along) for tensor, dims in maps[0]} if maps else {}


def _joins_rows(op: Executed, along: int | None) -> bool:
    """Return whether an operation is a cat or stack that joins its tensors along the rows."""
    if op.func.overloadpacket not in (_aten.cat, _aten.stack):
        return False
    size = op.args[0][0].dim() + (op.func.overloadpacket is _aten.stack)
    return bind_arguments(op)["dim"] % size == along


def _name_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    schema = func._schema.arguments
    return [*((argument.name, value) for argument, value in zip(schema, args, strict=False)), *sorted(kwargs.items())]


_LONG = 256
"""Bytes from which on the content of a constant stands for itself by its hash."""


def _content(real: Tensor) -> Hashable:
    """Return what identifies the values of a tensor on the host; the shape of one of equal elements is no part of it."""
    plain = real.detach().resolve_conj().resolve_neg().contiguous()
    if _is_uniform(plain):
        return "constant", plain.dtype, repr(plain.flatten()[0].item())
    content = plain.flatten().view(torch.uint8).numpy().tobytes()
    content = content if len(content) < _LONG else hashlib.sha256(content).digest()
    return "constant", plain.dtype, tuple(plain.shape), content


def _is_uniform(real: Tensor) -> bool:
    return real.numel() > 0 and bool((real == real.flatten()[0]).all())
