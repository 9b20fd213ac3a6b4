"""Dropout by a kernel gives the bits of dropout by torch, and so do its gradients. Run by `tests/unit/test_kernels.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from samestep.kernels import dropped_elements, kernel_choice
from samestep.kernels.dropped_elements import HashedMask, drop_elements, mask_of
from samestep.models.spec import MaskSpec
from samestep.randomness import row_hashes
from samestep.randomness.masks import drop_mask, dropped_at, hash_bits, hash_positions, hashed_mask, mix, row_halves
from samestep.randomness.mode import Draw, DropoutMode, place_samples

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PROBABILITIES = (0.0, 2**-33, 1e-9, 0.1, 0.5, 1 - 2**-32, 1 - 1e-12)
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "row": lambda: torch.randn(1, 7),
    "one column": lambda: torch.randn(5, 1),
    "remainders": lambda: torch.randn(3, 5, 1030),
    "many rows": lambda: torch.randn(300, 9),
    "of one dimension": lambda: torch.randn(24),
    "in steps": lambda: torch.randn(4, 6, 20)[:, ::2, ::3],
    "transposed": lambda: torch.randn(4, 6, 10).transpose(1, 2),
    "heads": lambda: torch.randn(2, 3, 4, 5).transpose(1, 2),
    "expanded": lambda: torch.randn(4, 1, 5).expand(4, 3, 5),
    "a window": lambda: torch.randn(70)[3:63].view(4, 15),
    "permuted in five": lambda: torch.randn(2, 3, 2, 3, 5, 4).permute(4, 1, 2, 0, 3, 5),
    "flipped": lambda: torch.randn(3, 4, 5, 2).permute(3, 0, 2, 1),
}


@contextmanager
def by_torch() -> Iterator[None]:
    """Let no kernel run inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "IS_INTERPRETED", False)
        yield


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    whole = INTEGERS[found.element_size()]
    assert torch.equal(found.contiguous().view(whole), expected.contiguous().view(whole))


def mask_for(x: Tensor, p: float) -> HashedMask:
    columns = 8 if x.dim() == 1 else x.shape[-1]
    hashed_rows, hashed = hash_positions(torch.arange(x.numel() // columns) + 2**33, torch.arange(columns) * 7)
    return hashed_mask(row_halves(mix(torch.tensor([5])) ^ 77, hashed_rows), hashed, p)


def by_formula(x: Tensor, mask: HashedMask, scale: float, *, inplace: bool) -> Tensor:
    dropped = (hash_bits(mask.halves, mask.columns) < mask.threshold).view(x.shape)
    return (x.masked_fill_(dropped, 0.0) if inplace else x.masked_fill(dropped, 0.0)).mul_(scale)


@pytest.mark.parametrize(
    ("layout", "p"), [*zip(LAYOUTS, itertools.cycle((0.1, 0.5, 0.9))), *(("remainders", p) for p in PROBABILITIES)]
)
def test_a_result_has_the_bits_of_torch(layout: str, p: float) -> None:
    x = LAYOUTS[layout]()
    mask = mask_for(x, p)
    found = drop_elements(x, mask, 1 / (1 - p), inplace=False)
    assert_same_bits(found, by_formula(x, mask, 1 / (1 - p), inplace=False))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_rounds_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.cat(
        [torch.randn(997) * 10.0 ** torch.randint(-8, 8, (997,)), torch.tensor([0.0, -0.0, math.inf, -math.inf])]
    )
    x = x.to(torch.float64).mul(math.pi).to(dtype).view(7, 143).requires_grad_()
    mask, upstream = mask_for(x, 0.3), torch.randn(7, 143, dtype=torch.float64).mul(math.e).to(dtype)
    twin = x.detach().clone().requires_grad_()
    found = drop_elements(x, mask, 1 / 0.7, inplace=False)
    expected = by_formula(twin, mask, 1 / 0.7, inplace=False)
    assert_same_bits(found, expected)
    found.backward(upstream)
    expected.backward(upstream)
    assert x.grad is not None
    assert twin.grad is not None
    assert_same_bits(x.grad, twin.grad)


@pytest.mark.parametrize("layout", ["remainders", "of one dimension", "a window"])
def test_in_place_it_writes_the_tensor_itself(layout: str) -> None:
    start = LAYOUTS[layout]().requires_grad_()
    gradients = []
    for drop in (drop_elements, lambda x, mask, *rest, **how: by_formula(x, mask, *rest, **how)):
        x = start * 1.0
        place, version = x.data_ptr(), x._version
        y = drop(x, mask_for(x, 0.4), 1 / 0.6, inplace=True)
        assert y.data_ptr() == place
        assert y._version > version
        gradients.append((*torch.autograd.grad((y * y.detach().cos()).sum(), start), y.detach()))
    for found, expected in zip(*gradients, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_gradients_of_gradients_and_directions_are_those_of_torch() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    mask = mask_for(x, 0.4)
    assert torch.autograd.gradcheck(lambda x: drop_elements(x, mask, 2.0, inplace=False), x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: drop_elements(x.tanh(), mask, 2.0, inplace=False), x)


def test_no_mask_of_elements_is_kept() -> None:
    x = torch.randn(4, 512, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        drop_elements(x, mask_for(x, 0.4), 2.0, inplace=False)
    assert sum(one.numel() for one in kept) == 2 * 4 + 512


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("size", [(1, 1), (5, 33), (3, 1030), (70, 3)])
def test_a_mask_is_that_of_torch(size: tuple[int, int], p: float) -> None:
    x = torch.empty(size)
    mask = mask_for(x, p)
    assert torch.equal(mask_of(mask), drop_mask(hash_bits(mask.halves, mask.columns), p))
    assert torch.equal(dropped_at(mask.halves.view(1, -1, 2), mask.columns, p)[0], mask_of(mask))


class Drops(nn.Module):
    """One function that drops, called twice."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.drop(x) + 0.25)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "dropout_": lambda x: torch.dropout_(x * 2, 0.3, True),
    "of all": lambda x: F.dropout(x, 1.0),
    "of views": lambda x: F.dropout(x.transpose(1, 2), 0.3).transpose(1, 2),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha of all": lambda x: F.alpha_dropout(x, 1.0, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "complex": lambda x: F.dropout(torch.complex(x, x), 0.3).real,
}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *itertools.product(FUNCTIONS, [(0, 0)]),
        *itertools.product(["dropout"], [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]),
        ("of views", (1, 1)),
        ("dropout in place", (1, 0)),
        ("dropout1d", (0, 1)),
    ],
)
def test_a_function_that_drops_gives_the_bits_of_torch(name: str, rows: tuple[int, int], monkeypatch) -> None:
    """Samples lie along each dimension, in each order, in forwards of which later ones know the draws of earlier ones."""
    calls: list[Tensor] = []
    launch = dropped_elements._dropped
    monkeypatch.setattr(
        dropped_elements, "_dropped", lambda x, *rest, **how: calls.append(x) or launch(x, *rest, **how)
    )
    start = torch.randn(4, 4, 4, requires_grad=True)
    results: list[list[Tensor]] = []
    for by in (by_torch, torch.enable_grad):
        model, found = Drops(FUNCTIONS[name]), []
        place_samples(model, tuple(MaskSpec(owner="", entry=0, draw=draw, shape=(4,), rows=rows) for draw in range(2)))
        for step in (1, 1, 2):
            with by(), DropoutMode(model, Draw(7, step, torch.tensor([3, 8]))):
                y = model(start)
                (gradient,) = torch.autograd.grad(y.square().sum(), start)
            found += [y.detach(), gradient]
        results.append(found)
        assert not (by is by_torch and calls)
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)
    is_elements = name in ("dropout", "dropout in place", "dropout_", "of views")
    assert bool(calls) == (is_elements and rows[0] != 2), calls


def test_a_forward_with_kernels_hashes_no_masks_at_once(monkeypatch) -> None:
    model, drawn, x = Drops(FUNCTIONS["dropout"]), [], torch.randn(2, 4, 4)
    monkeypatch.setattr(
        row_hashes, "drop_elements", lambda *some, **how: drawn.append(some) or drop_elements(*some, **how)
    )
    for _ in range(3):
        with DropoutMode(model, Draw(7, 1, torch.tensor([3, 8]))) as mode:
            model(x)
        assert not mode._rows._dropped
    assert len(drawn) == 6
    assert triton.knobs.runtime.interpret
