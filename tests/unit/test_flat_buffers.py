"""Gradients that are taken into the flat buffer of their bucket together equal those that are added one by one."""

from __future__ import annotations

import functools
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from samestep.runtime.weights.flat_buffers import FlatBuffer, GradientSlot
from samestep.runtime.weights.replicated import BodyGradients, _gradient_hook

SIZE = 4


class Store:
    """What the hook of a gradient reads of its store: a micro-batch that is not the last one."""

    _counts, _waits, _now = True, False, BodyGradients()
    _left_out: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._unused = {"a", "b"}


def bucket_of(params: dict[str, nn.Parameter], store: Store) -> FlatBuffer:
    """Return a bucket of weights of four elements, whose gradients it takes in."""
    flat = FlatBuffer(
        bucket=cast(Any, SimpleNamespace(members=[])), gradients=torch.full((SIZE * len(params),), torch.nan),
        starts=[], finishes=[], gathers=[], names=frozenset(params), mine=slice(0, SIZE * len(params)),
        untouched=set(params),
    )  # fmt: skip
    for (name, param), gradient in zip(params.items(), flat.gradients.split(SIZE), strict=True):
        slot = GradientSlot(flat, name, gradient, is_postponed=False, is_cast=param.dtype != gradient.dtype)
        param.register_post_accumulate_grad_hook(functools.partial(_gradient_hook, cast(Any, weakref.ref(store)), slot))
    return flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_gradient_of_several_backwards_counts_once(dtype: torch.dtype) -> None:
    store = Store()
    params = {name: nn.Parameter(torch.ones(SIZE, dtype=dtype)) for name in ("a", "b")}
    flat = bucket_of(params, store)
    draws = torch.Generator().manual_seed(0)
    expected = {name: torch.zeros(SIZE) for name in params}
    # "a" comes twice before its bucket is whole, then both, then "b" alone, which waits for the end of the task.
    for names in ("a", "a", "ab", "b"):
        given = {name: torch.randn(SIZE, generator=draws).to(dtype) for name in names}
        torch.autograd.backward([params[name] for name in names], [*given.values()])
        for name, gradient in given.items():
            expected[name] += gradient.float()
    flat.take_in()
    for gradient, name in zip(flat.gradients.split(SIZE), params, strict=True):
        torch.testing.assert_close(gradient, expected[name], rtol=0.0, atol=1e-6)
        assert (params[name].grad is None) is (dtype == torch.bfloat16)
    assert not flat.arrived
    assert not flat.untouched
    assert not store._unused


def test_gradients_of_a_backward_that_failed_are_forgotten() -> None:
    store = Store()
    params = {name: nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16)) for name in ("a", "b")}
    flat = bucket_of(params, store)
    params["a"].backward(torch.ones(SIZE, dtype=torch.bfloat16))
    flat.begin_step()
    for name in params:
        params[name].backward(torch.full((SIZE,), 2.0, dtype=torch.bfloat16))
    assert flat.gradients.tolist() == [2.0] * 2 * SIZE
