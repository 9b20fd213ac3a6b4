"""A move that several modules share lets go of what it has moved: in a backward nothing of a repeated forward outlives its use."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from samestep.runtime.axes import rank_crossings
from samestep.runtime.axes.sequence import Shared


@pytest.mark.parametrize("there", ["keep", "copy"])
@pytest.mark.parametrize("is_repeated", [True, False])
def test_what_was_moved_is_free_once_its_backward_is_over(
    there: Any, is_repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def awaited(gradient: Tensor, wire: Any) -> Tensor:
        wire.meanwhile()
        return gradient

    monkeypatch.setitem(rank_crossings._MOVES, "copy", lambda x, wire: x.clone())
    monkeypatch.setitem(rank_crossings._MOVES, "sum", awaited)
    shared = Shared(None, there, "sum")  # type: ignore[arg-type]
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
