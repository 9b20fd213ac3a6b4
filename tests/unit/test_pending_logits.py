"""Logits that are not made: what a model and a loss may do with them gives what whole logits give, and the rest is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.chunked_cross_entropy import Chunking
from samestep.errors import ModelError
from samestep.tracing.pending_logits import PendingHead, PendingLogits

SAMPLES, TOKENS, WIDTH, CLASSES = 3, 5, 7, 11
Use = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A head, and a number that the logits are multiplied by."""

    def __init__(self, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(0.8, dtype=dtype))


def outcome(use: Use, dtype: torch.dtype, chunk: int | None, bias: bool = True, frozen: bool = False) -> list[Tensor]:
    """Return the value of a function of logits and labels, and all gradients; in chunks, or of whole logits."""
    torch.manual_seed(1)
    model = Model(dtype, bias)
    model.head.requires_grad_(not frozen)
    hidden = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, CLASSES, (SAMPLES, TOKENS))
    labels[0, 2:] = -100
    if chunk is None:
        loss = use(model.head(hidden), labels, model.scale)
    else:
        head = PendingHead(model.head, Chunking(chunk))
        with head.pending():
            loss = use(model.head(hidden), labels, model.scale)
    loss.backward()
    found = [loss.detach(), *(one.grad for one in (hidden, *model.parameters()) if one.grad is not None)]
    return [one.double() for one in found]


def plainly(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def capped(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    logits = torch.tanh(logits / 3.0) * 3.0
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def weighted_and_smoothed(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    logits = logits * scale
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1)
    return (each * torch.arange(each.numel()).view_as(each)).sum() + 1e-2 * (logits.logsumexp(-1) ** 2).sum()


def shifted(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    rows = logits[:, :-1].reshape(-1, CLASSES)
    return F.cross_entropy(rows, labels[:, 1:].reshape(-1), reduction="sum", label_smoothing=0.2)


def in_place(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    logits /= 2.0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("use", [plainly, capped, weighted_and_smoothed, shifted, in_place])
def test_chunks_give_what_whole_logits_give(use: Use, chunk: int) -> None:
    for one, other in zip(outcome(use, torch.float64, chunk), outcome(use, torch.float64, None), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("options", [{"bias": False}, {"frozen": True}])
def test_a_head_without_a_bias_or_with_a_frozen_weight(options: dict[str, bool]) -> None:
    ours, theirs = outcome(capped, torch.float64, 4, **options), outcome(capped, torch.float64, None, **options)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_half_precision_deviates_by_its_own_rounding_alone() -> None:
    def in_float32(logits: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        return capped(logits.float(), labels, scale)

    exact = outcome(in_float32, torch.float64, None)
    ours, theirs = outcome(in_float32, torch.bfloat16, 4), outcome(in_float32, torch.bfloat16, None)
    for one, other, right in zip(ours, theirs, exact, strict=True):
        size = float(right.abs().max())
        assert float((one - other).abs().max()) <= 2**-7 * size


def test_a_label_that_is_no_class_makes_the_loss_no_number() -> None:
    head = nn.Linear(WIDTH, CLASSES)
    with PendingHead(head, Chunking(2)).pending():
        logits = head(torch.randn(3, WIDTH))
    assert F.cross_entropy(logits, torch.tensor([1, CLASSES, 2]), reduction="none").isnan().tolist() == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda logits, labels, scale: logits.softmax(-1).sum(), "_softmax"),
        (lambda logits, labels, scale: logits[..., :5].logsumexp(-1).sum(), "takes some classes"),
        (lambda logits, labels, scale: logits.logsumexp(0).sum(), "logsumexp over dimension 0"),
        (lambda logits, labels, scale: (logits + torch.randn(CLASSES)).logsumexp(-1).sum(), "add"),
        (lambda logits, labels, scale: F.dropout(logits).logsumexp(-1).sum(), "loss_chunk"),
        (lambda logits, labels, scale: F.cross_entropy(logits[0], labels[0], torch.ones(CLASSES)), "each class"),
    ],
)
def test_what_needs_whole_logits_is_refused_by_its_name(use: Use, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        outcome(use, torch.float64, 4)


def test_outside_of_the_context_logits_exist() -> None:
    head = nn.Linear(WIDTH, CLASSES)
    pending = PendingHead(head, Chunking(2))
    given = torch.randn(2, WIDTH)
    with pending.pending():
        assert isinstance(head(given), PendingLogits)
    assert torch.equal(head(given), F.linear(given, head.weight, head.bias))
