"""Function modes that see which labels a forward gives to the loss that it returns, and what it detaches.

A forward that calls `cross_entropy` or `nll_loss` shows there which tensor its labels are, or are made of, and which label does not count
(`ignore_index`). More labels may be masked in a trial where the forward looks up nothing by them, as an embedding of the same tensor does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.model_loss import labels_of
from samestep.trees import tensors_in

_LOOKS_UP = (
    F.embedding, F.one_hot, torch.gather, Tensor.gather, torch.index_select, Tensor.index_select, Tensor.__getitem__,
)  # fmt: skip
_DETACHES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]  # of C


class _Detaching:
    """Knows what code of the user's detaches: by a function, or by what it computes under `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self._without_gradients: list[bool] = []
        """Whether gradients are off in each context of the user's that is entered; a trial runs without any."""

    def _is_detached(self, func: Callable[..., Any], args: Any, frame: FrameType) -> bool:
        """Return whether the result of a function, which a frame calls, is one that the user's code has detached."""
        while frame.f_back is not None and (
            _is_of_mode(frame) or _is_of_mode(frame.f_back)
        ):  # of another mode, and what it calls
            frame = frame.f_back
        if getattr(func, "__name__", "") == "_set_grad_enabled":  # of a class that __enter__ and __exit__ make
            self._enter(frame if frame.f_code.co_name != "__init__" else frame.f_back, is_off=not args[0])
            return False
        is_of_user = _package_of(frame) not in ("torch", "samestep")
        return (func in _DETACHES or any(self._without_gradients[-1:])) and is_of_user

    def _enter(self, frame: FrameType | None, *, is_off: bool) -> None:
        name, user = (frame.f_code.co_name, frame.f_back) if frame is not None else ("", None)
        if name == "__enter__" and user is not None:
            self._without_gradients.append(is_off and _package_of(user) != "samestep")
        elif name == "__exit__" and self._without_gradients:
            self._without_gradients.pop()


def _is_of_mode(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__torch_function__"


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "").partition(".")[0])


class OtherDetached(_Detaching, TorchFunctionMode):
    """Gives code of the user's other values for what it detaches, each element the same function of its own: where a statistic of the
    batch is behind it, as in `s / s.detach()`, the loss of parts no longer adds up.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_detached(func, args, sys._getframe(1)):
            return result
        is_several = isinstance(result, tuple) and type(result).__module__ in ("builtins", "torch.return_types")
        return type(result)([_other(leaf) for leaf in result]) if is_several else _other(result)


def _other(value: Any) -> Any:
    return value + 0.1 * (1.0 + value.sin()) if isinstance(value, Tensor) and value.is_floating_point() else value


class LabelWatch(_Detaching, TorchFunctionMode):
    """Notes the labels that a forward gives to its loss, and the numbers by which it looks something up."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[tuple[Tensor, int]] = []
        self._looked_up: list[Tensor] = []
        self.detaches = False
        """Whether the forward detaches something."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.detaches |= self._is_detached(func, args, sys._getframe(1))
        if func in (F.cross_entropy, F.nll_loss):
            target = args[1] if len(args) > 1 else kwargs.get("target")
            if isinstance(target, Tensor) and not target.is_floating_point() and not target.is_meta:
                ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
                self._losses.append((target.detach().clone(), int(ignored)))
        elif func in _LOOKS_UP:
            self._looked_up += [leaf for leaf in tensors_in((args[1:], args[:1], kwargs)) if _is_whole(leaf)]
        return func(*args, **kwargs)

    def shown(self, samples: Any) -> list[tuple[int | None, int, bool]]:
        """Return each tensor of labels that the forward has shown: its place among the tensors of the batch, None for those that it names
        so, the label that does not count, and whether more may be masked.
        """
        heads: dict[int, tuple[int | None, int, bool]] = {}
        for target, ignored in self._losses:
            for place, leaf in enumerate(tensors_in(samples)):
                label = _ignored_in(leaf, target, ignored) if _is_whole(leaf) else None
                if label is not None:
                    is_free = not any(_same(leaf, numbers) for numbers in self._looked_up)
                    heads.setdefault(place, (None if leaf is labels_of(samples) else place, label, is_free))
                    break
        return list(heads.values())


def _is_whole(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool and value.dim() > 0


def _parts(leaf: Tensor, *, shifted: bool) -> Iterator[Tensor]:
    """Yield the numbers of a tensor, those without the first of each row, and unless they are `shifted` labels those without the last."""
    yield leaf.reshape(-1)
    if leaf.dim() > 1:
        yield leaf[..., 1:].reshape(-1)
        if not shifted:
            yield leaf[..., :-1].reshape(-1)


def _same(leaf: Tensor, other: Tensor) -> bool:
    flat = other.reshape(-1).to(leaf.device, leaf.dtype)
    return any(torch.equal(part, flat) for part in _parts(leaf, shifted=False))


def _ignored_in(leaf: Tensor, target: Tensor, ignored: int) -> int | None:
    """Return the value that does not count in a tensor of the batch, if a loss takes its labels from that tensor."""
    flat = target.reshape(-1).to(leaf.device, leaf.dtype)
    for part in _parts(leaf, shifted=True):
        if part.shape != flat.shape:
            continue
        if torch.equal(part, flat):
            return ignored
        left_out = flat == ignored
        values = part[left_out].unique()
        if len(values) == 1 and torch.equal(part == values[0], left_out):
            return int(values[0])
    return None
