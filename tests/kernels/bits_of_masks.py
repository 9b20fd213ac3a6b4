"""The bits of masks that kernels draw are those of `randomness/masks.py`. Run by `tests/unit/test_kernels.py` in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samestep.kernels import kernel_choice
from samestep.kernels.hashed_dropout import element_bits, hashed_columns, mix64, row_halves
from samestep.randomness.masks import drop_mask, drop_threshold, hash_bits, hash_positions, mix
from samestep.randomness.masks import row_halves as halves_of

INT64 = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**40)), min_size=1, max_size=17)
BLOCK = 32


@triton.jit
def _draw(keys, rows, columns, halves, bits, dropped, num_rows, num_columns, threshold, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    is_row, is_column = row < num_rows, column < num_columns
    a, b = row_halves(tl.load(keys + row, mask=is_row, other=0), tl.load(rows + row, mask=is_row, other=0))
    tl.store(halves + 2 * row, a, mask=is_row)
    tl.store(halves + 2 * row + 1, b, mask=is_row)
    hashed = hashed_columns(tl.load(columns + column, mask=is_column, other=0))
    found = element_bits(a[:, None], b[:, None], hashed[None, :])
    at = row[:, None] * num_columns + column[None, :]
    tl.store(bits + at, found, mask=is_row[:, None] & is_column[None, :])
    tl.store(dropped + at, found < threshold, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _mix(numbers, mixed, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(mixed + at, mix64(tl.load(numbers + at)).to(tl.int64, bitcast=True))


def test_this_is_the_interpreter() -> None:
    assert kernel_choice.IS_INTERPRETED
    assert triton.knobs.runtime.interpret


def test_the_first_mask_of_a_device_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    halves, columns = (
        torch.tensor(numbers, dtype=torch.int32)
        for numbers in (kernel_choice.TRIED_HALVES, kernel_choice.TRIED_COLUMNS)
    )
    dropped = hash_bits(halves, columns) < kernel_choice.TRIED_THRESHOLD
    known = tuple(sum(bit << place for place, bit in enumerate(row)) for row in dropped.tolist())
    assert known == kernel_choice.KNOWN_MASK
    assert len({*known}) == len(known)
    assert kernel_choice.draws_known_mask(torch.device("cpu"))
    monkeypatch.setattr(kernel_choice, "TRIED_THRESHOLD", 2**29)
    assert not kernel_choice.draws_known_mask(torch.device("cpu"))


def test_a_device_whose_compiler_fails_goes_by_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "kernels_of", lambda file: (_ for _ in ()).throw(RuntimeError("no C compiler")))
    assert not kernel_choice.draws_known_mask(torch.device("cpu"))


@settings(deadline=None, max_examples=25)
@given(numbers=st.lists(INT64, min_size=8, max_size=8))
def test_mixed_numbers_are_those_of_torch(numbers: list[int]) -> None:
    given = torch.tensor(numbers)
    mixed = torch.empty_like(given)
    _mix[(1,)](given, mixed, BLOCK=8)
    assert torch.equal(mixed, mix(given))


@settings(deadline=None, max_examples=60)
@given(key=INT64, sample=st.integers(0, 2**50), rows=POSITIONS, columns=POSITIONS, p=st.floats(0.0, 0.9999999999))
def test_bits_are_those_of_torch(key: int, sample: int, rows: list[int], columns: list[int], p: float) -> None:
    of_sample = mix(torch.tensor([sample])) ^ key
    hashed_rows, hashed = hash_positions(torch.tensor(rows), torch.tensor(columns))
    expected_halves = halves_of(of_sample, hashed_rows)
    expected = hash_bits(expected_halves, hashed)[0]
    halves = torch.empty(len(rows), 2, dtype=torch.int32)
    bits = torch.empty(len(rows), len(columns), dtype=torch.int32)
    dropped = torch.empty_like(bits, dtype=torch.bool)
    given = of_sample.expand(len(rows)).contiguous(), torch.tensor(rows), torch.tensor(columns)
    _draw[(1,)](*given, halves, bits, dropped, len(rows), len(columns), drop_threshold(p), BLOCK=BLOCK)
    assert torch.equal(halves, expected_halves[0])
    assert torch.equal(bits, expected)
    assert torch.equal(dropped, drop_mask(expected, p))


@pytest.mark.parametrize("p", [0.0, 2**-32, 2**-33, 0.5, 1 - 2**-32, 1 - 2**-53])
def test_thresholds_at_the_ends_drop_the_same(p: float) -> None:
    bits = torch.tensor([-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    expected: Tensor = bits.long() + 2**31 < min(round(p * 2**32), 2**32 - 1)
    assert torch.equal(drop_mask(bits, p), expected)
