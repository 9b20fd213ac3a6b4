"""Which labels of a batch a forward counts in the loss that it returns, and copies of the batch in which fewer count.

A forward that calls `cross_entropy` or `nll_loss` shows there which tensor its labels are, or are made of, and which label does not count
(`ignore_index`). More labels may be masked in a trial where the forward looks up nothing by them, as an embedding of the same tensor does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


class GivenLabels(TorchFunctionMode):
    """Notes the labels that a forward gives to its loss, and the numbers by which it looks something up."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[tuple[Tensor, int]] = []
        self._looked_up: list[Tensor] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
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


def masked(samples: Any, labels: Tensor | None, ignored: int, first: int) -> Any:
    """Return samples of which the first ones have the later half of their labels masked, or the first one its only label."""
    assert labels is not None
    changed = labels.clone()
    rows = changed[:first].flatten(1) if labels.dim() > 1 else changed[:first, None]
    place = rows.ne(ignored).cumsum(1)
    left = place > (place[:, -1:] + 1) // 2
    if not left.any() and first > 1:
        left = left.clone()
        left[0] = True
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
