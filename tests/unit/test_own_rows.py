"""Rows of a rank's tokens: in memory of their own, cut once as long as they are in use and nobody writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from samestep.runtime.axes.context.whole_parts import SharedRows

RUNS = {"one run": (range(2, 6),), "head and tail": (range(2), range(6, 8))}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("samples", [1, 3])
def test_rows_hold_nothing_of_other_tokens(runs: tuple[range, ...], samples: int) -> None:
    whole = torch.randn(samples, 8, 5, dtype=torch.float64, requires_grad=True)
    places = [place for run in runs for place in run]
    rows = SharedRows().of(whole, runs, 1)
    assert torch.equal(rows, whole[:, places])
    assert rows.is_contiguous()
    assert rows.untyped_storage().nbytes() == samples * 4 * 5 * 8
    (gradient,) = torch.autograd.grad(rows.square().sum(), whole)
    expected = torch.zeros_like(whole).index_copy(1, torch.tensor(places), 2 * whole.detach()[:, places])
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_rows_are_cut_once_while_autograd_keeps_them(runs: tuple[range, ...]) -> None:
    shared, whole, weight = SharedRows(), torch.randn(1, 8, 5), torch.ones(5, requires_grad=True)
    kept = shared.of(whole, runs, 1) * weight
    rows = shared.of(whole, runs, 1)
    assert kept.grad_fn is not None
    assert rows.data_ptr() == kept.grad_fn._saved_self.data_ptr()  # type: ignore[attr-defined]
    assert shared.of(whole.clone(), runs, 1) is not rows


def _write_whole(whole: Tensor, rows: Tensor) -> None:
    whole.add_(1)


def _write_rows(whole: Tensor, rows: Tensor) -> None:
    rows.add_(1)


@pytest.mark.parametrize("write", [_write_whole, _write_rows])
def test_rows_are_cut_anew_after_a_write(write: object) -> None:
    shared, whole = SharedRows(), torch.randn(1, 8, 5)
    rows = shared.of(whole, (range(4),), 1)
    assert shared.of(whole, (range(4),), 1) is rows
    write(whole, rows)  # type: ignore[operator]
    assert torch.equal(shared.of(whole, (range(4),), 1), whole[:, :4])


def test_rows_cut_without_gradients_are_not_taken_where_they_are_wanted() -> None:
    shared, whole = SharedRows(), torch.randn(1, 8, 5, requires_grad=True)
    with torch.no_grad():
        rows = shared.of(whole, (range(4),), 1)
    assert not rows.requires_grad
    assert shared.of(whole, (range(4),), 1).requires_grad


def test_rows_of_a_weight_are_a_view() -> None:
    weight = nn.Parameter(torch.randn(1, 8, 5))
    assert SharedRows().of(weight, (range(4),), 1).data_ptr() == weight.data_ptr()
