"""Labels of torch's CTC loss: its kernels for CPUs check none, and one outside the classes would end Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import DataError
from samestep.runtime.loss_watch import LossWatch

N, T, S, C = 3, 6, 4, 5
LOG_PROBS = torch.randn(T, N, C, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
LABELS = torch.tensor([[1, 2, 3, 4], [2, 1, -100, -100], [3, -100, -100, -100]])
LENGTHS = torch.tensor([4, 2, 1])
STEPS = torch.full((N,), T)


WAYS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "function": lambda labels, lengths: F.ctc_loss(LOG_PROBS, labels, STEPS, lengths, reduction="sum"),
    "module": lambda labels, lengths: nn.CTCLoss(reduction="sum")(LOG_PROBS, labels, STEPS, lengths),
    "names": lambda labels, lengths: torch.ctc_loss(
        LOG_PROBS, targets=labels, input_lengths=STEPS, target_lengths=lengths, reduction=2
    ),
}


def watched(way: str, labels: Tensor, lengths: Any) -> Tensor:
    return LossWatch().result(WAYS[way], lambda: (WAYS[way](labels, lengths), N)).only[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["padded", "joined"])
def test_labels_that_are_read_are_those_of_torch(way: str, form: str) -> None:
    labels = LABELS if form == "padded" else LABELS[LABELS >= 0]
    assert torch.isfinite(watched(way, labels, LENGTHS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("label", [-100, -1, C, 10_000])
def test_a_label_outside_the_classes_is_an_error(way: str, label: int) -> None:
    padded = LABELS.clone()
    padded[1, 1] = label
    for labels in (padded, torch.tensor([1, 2, 3, 4, 2, label, 3])):
        with pytest.raises(DataError, match=f"a label is {label}, and the classes are 0 to 4"):
            watched(way, labels, LENGTHS)
