"""Code between blocks that computes shapes from a whole sequence, adapted to slices of its tokens.

A model's code may reshape to the length of the sequence, and add what it made before the blocks to what they return. Both are
adapted where blocks run on slices: in the proof (`token_slices.py`) and in a rank of `cp` alike.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.attention import multi_head_attention
from samestep.building.loss_result import IGNORED_LABEL, OF_SLICE
from samestep.building.predictions import at_least_float32, prediction_of, target_in, target_of
from samestep.errors import InputError
from samestep.tracing.flow import reads_shape_alone
from samestep.trees import operands, tensors_in, tree_leaves, tree_map_only


def tokens_of(batch: Any) -> Tensor:
    """Return the tensor of a batch that has the tokens of its samples along dimension 1: labels [B, T], else the longest whole numbers
    [B, T] or features [B, T, F], whatever their names.

    Raises:
        JobError: the batch has none, and no labels.
    """
    labels = target_in(batch)
    if isinstance(labels, Tensor) and labels.dim() == 2:
        return labels
    every = [tensor for tensor in tensors_in(batch) if tensor.dim() == (3 if tensor.is_floating_point() else 2)]
    return (
        max(every, key=lambda tensor: (not tensor.is_floating_point(), tensor.shape[1])) if every else target_of(batch)
    )


def token_rows_of(outputs: Any) -> Tensor:
    """Return the prediction of a model, or the one output that may have a row for each token.

    Raises:
        JobError: there is none, or several.
    """
    rows = [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point() and tensor.dim() == 3]
    return rows[0] if len(rows) == 1 else prediction_of(outputs)


_RESHAPES = (torch.reshape, Tensor.reshape, Tensor.view)


def fit_reshape(func: Any, args: tuple[Any, ...], length: int, size: int) -> tuple[Any, ...]:
    """Return the arguments of a reshape on slices, where the code computed the shape from whole sequences.

    A reshape of [B, size, ...] to [B, length, ...] keeps its shape, as at the end of GPT-2.
    """
    if func not in _RESHAPES or len(args) < 2:
        return args
    tensor, *shape = args
    wanted = tuple(shape[0]) if isinstance(shape[0], list | tuple) else tuple(shape)
    alike = len(wanted) == tensor.dim() > 1 and wanted[2:] == tuple(tensor.shape[2:])
    if alike and wanted[1] == length and tensor.shape[1] == size and wanted[0] in (-1, tensor.shape[0]):
        return tensor, (wanted[0], size, *wanted[2:])
    return args


_BY_ELEMENT = frozenset((
    "add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "mul", "rmul", "imul", "multiply", "div", "rdiv", "truediv", "rtruediv",
    "itruediv", "divide", "true_divide", "where", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "pow", "rpow", "cat", "concat",
    "concatenate", "stack",
))  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _is_by_element(func: Any) -> bool:
    return getattr(func, "__name__", "").strip("_") in _BY_ELEMENT


def slice_whole_operands(
    func: Any, args: tuple[Any, ...], length: int, size: int, slice_of: Callable[[Tensor], Tensor]
) -> tuple[Any, ...]:
    """Return the arguments of an operation by elements, with slices of those that have rows for the whole sequence.

    What the model made before the blocks and adds to what they return, as `x = x0 + block(x)` between blocks, is whole.
    """
    if size == length or not _is_by_element(func):
        return args
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    if {size, length} - {leaf.shape[1] for leaf in tensors}:
        return args

    def sliced(leaf: Tensor) -> Tensor:
        return slice_of(leaf) if leaf.dim() > 1 and leaf.shape[1] == length else leaf

    arguments: tuple[Any, ...] = tree_map_only(Tensor, sliced, args)
    return arguments


_LOSS = inspect.signature(F.cross_entropy)


def loss_of_slice(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    length: int,
    size: int,
    slice_of: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Return torch's mean cross entropy of the logits [N, V] or [B, V, N] of slices, of which the code gives the labels of all tokens,
    with its sum and count; None for another call.
    """
    if func is not F.cross_entropy:
        return None
    arguments = _LOSS.bind(*args, **kwargs).arguments
    logits, labels = at_least_float32(arguments.pop("input")), arguments.pop("target")
    shape = logits.shape[:1] + logits.shape[2:]
    is_plain = all(arguments.get(name) is None for name in ("weight", "size_average", "reduce"))
    is_mean = arguments.pop("reduction", "mean") == "mean" and is_plain and logits.dim() > 1
    if not is_mean or labels.is_floating_point() or labels.numel() * size != math.prod(shape) * length:
        return None
    slice_labels = slice_of(labels.reshape(-1, length)).reshape(shape)
    total = F.cross_entropy(logits, slice_labels, **arguments, reduction="sum")
    count = (slice_labels != arguments.get("ignore_index", IGNORED_LABEL)).sum()
    mean = total / count
    setattr(mean, OF_SLICE, (logits, total, count))
    return mean


class Reshaping(TorchFunctionMode):
    """A function mode that adapts the code between blocks to slices of `size` of a sequence's `length` tokens.

    It acts once blocks are given slices.
    """

    def __init__(
        self, length: int, size: int, has_begun: Callable[[], bool], slice_of: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self._length, self._size, self._has_begun = length, size, has_begun
        self._slice_of = slice_of or (lambda tensor: tensor.narrow(1, 0, size))
        self._written: list[weakref.ref[Tensor]] = []
        """Whole tensors whose slices alone were written in place."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self, *args, **(kwargs or {}))
        if not self._has_begun():
            return func(*args, **(kwargs or {}))
        loss = loss_of_slice(func, args, kwargs or {}, self._length, self._size, self._slice_of)
        if loss is not None:
            return loss
        arguments = fit_reshape(func, args, self._length, self._size)
        arguments = slice_whole_operands(func, arguments, self._length, self._size, self._slice_of)
        outcome = func(*arguments, **(kwargs or {}))
        if self._written and operands(outcome) and not reads_shape_alone(func):
            self._check_unwritten(args)
        if arguments is not args and arguments[0] is not args[0] and _writes(func):
            self._written.append(weakref.ref(args[0]))
        return outcome

    def _check_unwritten(self, args: tuple[Any, ...]) -> None:
        if any(reference() is leaf for leaf in operands(*args) for reference in self._written):
            raise InputError(
                "tensor-read-after-slices",
                "a full tensor is read after a write in place into slices of it. Use x = x + y for x += y",
            )


def _writes(func: Any) -> bool:
    """Return whether a function writes into its first argument, as add_ and the operator += do."""
    name: str = getattr(func, "__name__", "")
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def sequence_dim(shape: torch.Size, length: int) -> int | None:
    """Return the dimension with `length` rows, one for each token; None without one, or for pairs of tokens."""
    if length not in shape or (len(shape) in (2, 4) and shape[-1] == shape[-2]):
        return None
    return list(shape).index(length) if len(shape) < 2 or shape[1] != length else 1
