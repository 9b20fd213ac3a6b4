"""Which labels of a batch a forward counts in the loss that it returns, and copies of the batch in which fewer count.

A forward that calls `cross_entropy` or `nll_loss` shows there which tensor its labels are, or are made of, and which label does not count
(`ignore_index`). More labels may be masked in a trial where the forward looks up nothing by them, as an embedding of the same tensor does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.model_loss import Labels, labels_of
from samestep.trees import map_tensors, tensors_in

_LOOKS_UP = (
    F.embedding,
    F.one_hot,
    torch.gather,
    Tensor.gather,
    torch.index_select,
    Tensor.index_select,
    Tensor.__getitem__,
)
_DETACHES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]  # of C


def _is_of_user(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "samestep")


class _Detaching(TorchFunctionMode):
    """Knows what code of the user's detaches: by a function, or by what it computes under `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self._without_gradients: list[bool] = []
        """Whether gradients are off in each context of the user's that is entered; a trial runs without any."""

    def _is_detached(self, func: Callable[..., Any], args: Any, frame: FrameType) -> bool:
        """Return whether the result of a function, which a frame calls, is one that the user's code has detached."""
        while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # of another mode
            frame = frame.f_back
        if getattr(func, "__name__", "") == "_set_grad_enabled":  # of a class that __enter__ and __exit__ make
            self._enter(frame if frame.f_code.co_name != "__init__" else frame.f_back, is_off=not args[0])
            return False
        return (func in _DETACHES or any(self._without_gradients[-1:])) and _is_of_user(frame)

    def _enter(self, frame: FrameType | None, *, is_off: bool) -> None:
        name, user = (frame.f_code.co_name, frame.f_back) if frame is not None else ("", None)
        if name == "__enter__" and user is not None:
            is_ours = user.f_globals.get("__name__", "").startswith("samestep.")
            self._without_gradients.append(is_off and not is_ours)
        elif name == "__exit__" and self._without_gradients:
            self._without_gradients.pop()


class OtherDetached(_Detaching):
    """Gives code of the user's other values for what it detaches, each element the same function of its own: where a statistic of the
    batch is behind it, as in `s / s.detach()`, the loss of parts no longer adds up.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self._is_detached(func, args, sys._getframe(1)):
            return found
        is_several = isinstance(found, tuple) and type(found).__module__ in ("builtins", "torch.return_types")
        return type(found)([_other(one) for one in found]) if is_several else _other(found)


def _other(found: Any) -> Any:
    return found + 0.1 * (1.0 + found.sin()) if isinstance(found, Tensor) and found.is_floating_point() else found


class GivenLabels(_Detaching):
    """Notes the labels that a forward gives to its loss, and the numbers by which it looks something up."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[tuple[Tensor, int]] = []
        self._looked_up: list[Tensor] = []
        self.detaches = False
        """Whether the forward detaches something."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self.detaches |= self._is_detached(func, args, sys._getframe(1))
        if func in (F.cross_entropy, F.nll_loss):
            target = args[1] if len(args) > 1 else given.get("target")
            if isinstance(target, Tensor) and not target.is_floating_point() and not target.is_meta:
                ignored = args[4] if len(args) > 4 else given.get("ignore_index", -100)
                self._losses.append((target.detach().clone(), int(ignored)))
        elif func in _LOOKS_UP:
            self._looked_up += [one for one in tensors_in((args[1:], args[:1], given)) if _is_whole(one)]
        return func(*args, **given)

    def found(self, samples: Any) -> list[tuple[int | None, int, bool]]:
        """Return each tensor of labels that the forward has shown: its place among the tensors of the batch, None for those that it names
        so, the label that does not count, and whether more may be masked.
        """
        leaves = tensors_in(samples)
        shown: dict[int, tuple[int | None, int, bool]] = {}
        for target, ignored in self._losses:
            for place, leaf in enumerate(leaves):
                label = _ignored_in(leaf, target, ignored) if _is_whole(leaf) else None
                if label is not None:
                    is_free = not any(_same(leaf, one) for one in self._looked_up)
                    shown.setdefault(place, (None if leaf is labels_of(samples) else place, label, is_free))
                    break
        return list(shown.values())


def telling_rows(heads: Sequence[Labels], samples: Any, num_samples: int) -> list[int]:
    """Return the rows of a few samples that a trial compares: the first ones and the last count a label of each head, so that no mean
    is over nothing, and one between them does not, if there is such a row.
    """
    counts = torch.ones(num_samples, dtype=torch.bool)
    for head in heads:
        labels = head.of(samples)
        if labels is not None:
            counts &= labels.ne(head.ignored).reshape(num_samples, -1).any(1).cpu()
    full, others = counts.nonzero().flatten().tolist(), (~counts).nonzero().flatten().tolist()
    if len(full) < 2:
        return list(range(min(3, num_samples)))
    return [*full[: min(2, len(full) - 1)], *others[:1], full[-1]]


def masks_of(samples: Any, labels: Tensor | None) -> list[tuple[int, int]]:
    """Return the places of tensors of zeros and ones, each with 0 and with 1 as what does not count."""
    leaves = tensors_in(samples)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if leaf.dim() and leaf is not labels and bool(((leaf == 0) | (leaf == 1)).all()) and bool((leaf == 1).any())
    ]
    return [(place, ignored) for place in places for ignored in (0, 1)]


def masked(samples: Any, labels: Tensor | None, ignored: int, first: int, *, entirely: bool = False) -> Any:
    """Return samples of which the first ones have the later half of their labels masked, or the first one its only label; or all `entirely`."""
    assert labels is not None
    changed = labels.clone()
    rows = changed[:first].flatten(1) if labels.dim() > 1 else changed[:first, None]
    place = rows.ne(ignored).cumsum(1)
    left = place > (place[:, -1:] + 1) // 2
    if not left.any() and first > 1:
        left = left.clone()
        left[0] = True
    left = torch.ones_like(left) if entirely else left
    changed[:first] = rows.masked_fill(left, ignored).view_as(changed[:first])
    return _replaced(samples, labels, changed)


def with_first(samples: Any, labels: Tensor, value: Any) -> Any:
    """Return samples whose labels have a value at the first place."""
    changed = labels.clone()
    changed[:, 0] = value
    return _replaced(samples, labels, changed)


def _replaced(samples: Any, leaf: Tensor, changed: Tensor) -> Any:
    return map_tensors(samples, lambda one: changed if one is leaf else one)


def _is_whole(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool and value.dim() > 0


def _parts(leaf: Tensor) -> Iterator[Tensor]:
    """Yield the numbers of a tensor, and those without the first and without the last of each row."""
    yield leaf.reshape(-1)
    if leaf.dim() > 1:
        yield leaf[..., 1:].reshape(-1)
        yield leaf[..., :-1].reshape(-1)


def _same(leaf: Tensor, other: Tensor) -> bool:
    flat = other.reshape(-1).to(leaf.device, leaf.dtype)
    return any(torch.equal(part, flat) for part in _parts(leaf))


def _ignored_in(leaf: Tensor, target: Tensor, ignored: int) -> int | None:
    """Return the value that does not count in a tensor of the batch, if a loss takes its labels from that tensor."""
    flat = target.reshape(-1).to(leaf.device, leaf.dtype)
    for part in (leaf.reshape(-1), *([leaf[..., 1:].reshape(-1)] if leaf.dim() > 1 else [])):
        if part.shape != flat.shape:
            continue
        if torch.equal(part, flat):
            return ignored
        left_out = flat == ignored
        values = part[left_out].unique()
        if len(values) == 1 and torch.equal(part == values[0], left_out):
            return int(values[0])
    return None
