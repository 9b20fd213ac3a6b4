"""What is remembered of operations on meta tensors is what torch returns, and what shares a storage is not remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep.tracing import meta_tensors


class Run(TorchDispatchMode):
    """Runs operations by `result_shapes`, and keeps what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome = meta_tensors.run(func, args, kwargs or {})
        self.seen.append((func, outcome))
        return outcome


def forms(outcome: Any) -> list[Any]:
    tensors = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
    return [(t.shape, t.stride(), t.dtype, t.device, t.untyped_storage().nbytes()) for t in tensors]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


X, Y = meta(2, 3, 4), meta(2, 3, 4).transpose(1, 2)
CALLS: dict[str, Callable[[], Any]] = {
    "promotion by a number": lambda: [meta(3, dtype=torch.int64) * 2, meta(3, dtype=torch.int64) * 2.0],
    "broadcast": lambda: X + meta(3, 1, dtype=torch.float64),
    "strides are kept": lambda: [Y.exp(), X.exp(), Y.contiguous()],
    "several results": lambda: torch.nn.functional.layer_norm(X, (4,), meta(4), meta(4)),
    "results of two dtypes": lambda: X.max(dim=1),
    "list of tensors": lambda: [torch.cat([X, X], dim=1), torch.cat([X, X], dim=2), torch.stack([X, X])],
    "casts": lambda: [X.to(torch.bfloat16), X.to(torch.float64)],
    "comparison": lambda: X > 0,
    "embedding": lambda: torch.nn.functional.embedding(meta(2, 5, dtype=torch.int64), meta(7, 3)),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(*(meta(1, 2, 5, 4) for _ in range(3))),
    "views": lambda: [X.view(6, 4), X[0], X.expand(2, 3, 4)],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_have_the_form_that_torch_gives(call: Callable[[], Any]) -> None:
    expected = forms(call())
    with Run() as first:
        assert forms(call()) == expected
    with Run() as again:
        assert forms(call()) == expected
    assert [forms(outcome) for _, outcome in first.seen] == [forms(outcome) for _, outcome in again.seen]


def test_what_is_known_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_tensors, "_forms", {})
    calls: list[Any] = []

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Run():
        X.exp(), X.exp(), Y.exp()
    assert len(meta_tensors._forms) == 2
    with Below(), Run():  # a mode further out sees the operation, not what stands for it
        X.exp()
    assert calls == [torch.ops.aten.exp.default]


def test_views_and_writes_are_run() -> None:
    x = meta(4, 4)
    with Run():
        for _ in range(2):
            assert torch.ops.aten._unsafe_view(x, [16]).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.t().untyped_storage()._cdata == x.untyped_storage()._cdata
            version = x._version
            x.add_(1)
            assert x._version == version + 1
            ours, other = x.exp(), x.exp()
            assert ours.untyped_storage()._cdata != other.untyped_storage()._cdata
