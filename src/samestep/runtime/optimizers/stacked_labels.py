"""Weights that an optimizer stacks or joins, so that one operation updates several, as a batched Muon does.

```
torch.stack([a, b])      │ a │ b │            one part of the memory for each weight, along the first dimension
parts @ parts.mT         │ a a^T │ b b^T │    batched products, norms of each part and arithmetic do not mix them
parts.unbind()           a, b                 a view within one part depends on its weight alone
```
Any other operation mixes the parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

Label = Any
"""The dependences of a tensor: a `followed_step.UpdateLabel`."""


class StackedPart(NamedTuple):
    """The elements of a memory that one label holds for."""

    start: int
    stop: int
    label: Label


_JOINS = ("stack", "cat")


def label_joined_parts(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], labels: Sequence[Label]
) -> list[StackedPart] | None:
    """Return the parts of what an operation makes of a list of tensors along the first dimension; None if it does not."""
    if name not in _JOINS or not isinstance(args[0], list | tuple):
        return None
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if dim not in (0, -1 - args[0][0].dim() if name == "stack" else -args[0][0].dim()):
        return None
    ends = [0, *itertools.accumulate(tensor.numel() for tensor in args[0])]
    return [StackedPart(*span, label) for span, label in zip(itertools.pairwise(ends), labels, strict=True)]


def within(tensor: Tensor, parts: Sequence[StackedPart]) -> StackedPart | None:
    """Return the part of a memory to which all elements of a view of it belong; None if they belong to several."""
    if not tensor.numel():
        return parts[0]
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return next((part for part in parts if part.start <= first and last < part.stop), None)


def is_batch(tensor: Tensor, parts: Sequence[StackedPart]) -> bool:
    """Return whether the first dimension of a tensor counts the parts of its memory."""
    size = parts[0].stop - parts[0].start
    return (
        tensor.dim() > 0
        and len(parts) == len(tensor)
        and tensor.numel() == parts[-1].stop
        and all(part.stop - part.start == size for part in parts)
        and (tensor.stride(0) == size or len(parts) == 1)
    )


def parts_of_result(
    target: Tensor,
    read: Sequence[tuple[Tensor, Label, Sequence[StackedPart] | None]],
    label_of: Callable[[list[tuple[Any, Label]], Any], Label],
) -> list[StackedPart] | None:
    """Return the parts of what such an operation has written, or None if its operands mix them.

    `label_of` returns the label of one part, of a shape, from the operands' shapes and labels for it.
    """
    count = len(target) if target.dim() else 0
    stacked = [(tensor, parts) for tensor, _, parts in read if parts is not None]
    if stacked and all(tensor.dim() == 1 and _spans(parts) == _spans(stacked[0][1]) for tensor, parts in stacked):
        return _parts_of_row(target, read, stacked[0][1], label_of)
    if not stacked or not all(is_batch(tensor, parts) and len(parts) == count for tensor, parts in stacked):
        return None
    if any(tensor.dim() != target.dim() and not _is_reduced(tensor, target) for tensor, _ in stacked):
        return None
    size = target.numel() // count
    found = []
    for index in range(count):
        mine = [
            (
                tensor[0] if parts is not None else tensor,
                label if parts is None else _of_view(tensor, parts[index].label),
            )
            for tensor, label, parts in read
        ]
        found.append(StackedPart(index * size, (index + 1) * size, label_of(mine, target.shape[1:])))
    return found


def _spans(parts: Sequence[StackedPart]) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in parts]


def _parts_of_row(
    target: Tensor,
    read: Sequence[tuple[Tensor, Label, Sequence[StackedPart] | None]],
    like: Sequence[StackedPart],
    label_of: Callable[[list[tuple[Any, Label]], Any], Label],
) -> list[StackedPart] | None:
    """Return the parts of what an operation makes of weights joined in one row, element by element."""
    if target.shape != (like[-1].stop,) or any(
        tensor.shape != target.shape if parts is not None else tensor.numel() != 1 for tensor, _, parts in read
    ):
        return None
    return [
        StackedPart(part.start, part.stop, label_of([
            (tensor, label) if parts is None else (tensor[part.start : part.stop], _of_view(tensor, parts[index].label))
            for tensor, label, parts in read
        ], (part.stop - part.start,)))
        for index, part in enumerate(like)
    ]  # fmt: skip


def _is_reduced(tensor: Tensor, target: Tensor) -> bool:
    return target.numel() == len(tensor) * math.prod(target.shape[1:]) and target.dim() < tensor.dim()


def _of_view(tensor: Tensor, label: Label) -> Label:
    """Return a part's label for a view in which its elements may have another order."""
    if tensor.is_contiguous() or label.beside is None:
        return label
    return label._replace(beside=None, entered=label.weights, is_uniform=False)
