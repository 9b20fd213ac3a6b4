"""Masters in two halves, split by a kernel, are held to the bit. Run by `tests/unit/test_kernels.py` in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samestep.kernels import master_remainders
from samestep.runtime.weights import pieces
from samestep.runtime.weights.pieces import SplitMasters

UPPER = torch.tensor([0, 1, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, -0x8000, -0x4080, -1], dtype=torch.int32)
"""The upper halves of numbers, infinities and what is no number among them."""
LOWER = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)


def masters(more: int) -> Tensor:
    """Each pair of halves, and as many numbers of any bits."""
    drawn = torch.randint(-(2**31), 2**31, (more,), generator=torch.Generator().manual_seed(more)).to(torch.int32)
    return torch.cat([((UPPER[:, None] << 16) | LOWER).flatten(), drawn]).view(torch.float32)


def updated(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weight, the remainders and the master after an update to these values."""
    weight = torch.zeros(values.numel(), dtype=torch.bfloat16)
    split = SplitMasters([weight], [torch.zeros(values.numel())])
    with split.joined() as (window,):
        window.copy_(values)
    return weight.view(torch.int16), split.tensors[0][: values.numel()], split.of(0).view(torch.int32)


@pytest.mark.parametrize("more", [0, 3, 1200])
def test_a_kernel_splits_masters_as_torch_does(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Tensor]()
    split = master_remainders.split_remainders
    monkeypatch.setattr(pieces, "split_remainders", lambda *given: (calls.append(given[0]), split(*given))[1])
    values = masters(more)
    found = updated(values)
    assert len(calls) == 1
    monkeypatch.setattr(pieces, "runs_kernels", lambda bits: False)
    expected = updated(values)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    is_number = ~values.isnan()
    assert torch.equal(found[2][is_number], values.view(torch.int32)[is_number])
