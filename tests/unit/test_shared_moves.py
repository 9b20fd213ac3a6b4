"""A move that several modules share lets go of what it has moved: in a backward nothing of a repeated forward outlives its use."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from samestep.runtime.axes.differentiable import apply_move_overlapping
from samestep.runtime.axes.sequence import Shared


def _view(x: Tensor, *_: Any) -> Tensor:
    return x.view_as(x)


def _copy(x: Tensor, *_: Any) -> Tensor:
    return x.clone()


@pytest.mark.parametrize("there", [_view, _copy])
@pytest.mark.parametrize("is_repeated", [True, False])
def test_what_was_moved_is_free_once_its_backward_is_over(there: Any, is_repeated: bool) -> None:
    def move(x: Tensor, group: Any, owner: str, meanwhile: Any) -> Tensor:
        return apply_move_overlapping(x, group, owner, there, lambda grad, *_: (grad, lambda: None), meanwhile)

    shared: Any = Shared(move, None)  # type: ignore[arg-type]
    made: list[weakref.ref[Any]] = []

    def block(x: Tensor) -> Tensor:
        within = x.sin().exp()
        made.append(weakref.ref(within.untyped_storage()))
        first, second = (shared(path, within) for path in ("q", "k"))
        assert first is second
        return first.cos() * second.exp()

    x = torch.randn(4, 4, requires_grad=True)
    alive: list[bool] = []
    x.register_hook(lambda _: alive.append(made[-1]() is not None))
    result = checkpoint(block, x, use_reentrant=False) if is_repeated else block(x)
    result.sum().backward()
    assert len(made) == 1 + is_repeated
    assert alive == [False]
