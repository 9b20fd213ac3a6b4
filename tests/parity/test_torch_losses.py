"""Losses of torch and means of one's own in layouts: the numbers of a plain loop that calls them on the full batch, to 1e-9."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.building.loss_result import Loss
from samestep.errors import LayoutError, UnprovenError
from samestep.job import Job
from samestep.layout import Layout
from tests.plain import Trained, assert_as_on_one_device, assert_trained, train_plainly
from tests.pool import pool

B, TOKENS, CLASSES, STEPS = 8, 6, 5, 3
JOB = Job(train={"global_batch": B, "steps": STEPS}, run={"device": "cpu"}, numerics={"precision": "float64"})


class Net(nn.Module):
    """Outputs in the form that a loss of torch takes."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.form = form
        self.first, self.second = nn.Linear(CLASSES, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Any:
        found = self.second(self.first(x).tanh())  # [B, T, C]
        if self.form == "classes second":
            return found.transpose(1, 2)
        if self.form == "log probabilities":
            return found.log_softmax(-1).transpose(0, 1)
        return (found, found.cos().exp()) if self.form == "two" else found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Attentive(Net):
    """The same outputs behind blocks, which cp gives slices of the tokens."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self.blocks = nn.ModuleList(Block() for _ in range(2)).double()
        self.first, self.widen = nn.Linear(8, 8).double(), nn.Linear(CLASSES, 8).double()

    def forward(self, x: Tensor) -> Any:
        x = self.widen(x)
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


def labels_of(step: int) -> Tensor:
    """Return labels of which the parts of a batch count different numbers, and a last sample none."""
    drawn = torch.randint(CLASSES, (B, TOKENS), generator=torch.Generator().manual_seed(step + 50))
    counts = torch.arange(TOKENS)[None] < torch.tensor([6, 1, 3, 5, 2, 4, 1, 0])[:, None]
    return drawn.masked_fill(~counts, -100)


@dataclass(frozen=True)
class Case:
    """A loss, and what a plain loop computes of the outputs and the target."""

    loss: Callable[..., Any]
    form: str = ""
    target: Callable[[int], Any] = labels_of
    plain: Callable[[Any, Any], Tensor] | None = None
    words: dict[str, Any] = field(default_factory=dict)


def numbers(step: int) -> Tensor:
    return torch.rand(B, TOKENS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(step + 90))


WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
WEIGHTED = nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)
CTC = nn.CTCLoss(zero_infinity=True)


def of_sequences(step: int) -> tuple[Tensor, ...]:
    lengths = torch.tensor([1, 3, 2, 1, 2, 3, 1, 1])
    return labels_of(step).clamp(min=1)[:, :3], torch.full((B,), TOKENS), lengths


def own_mean(outputs: Any, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), batch["labels"])


def mean_of_samples(outputs: Any, batch: Any) -> Tensor:
    counts = batch["labels"].ne(-100)
    return (outputs.square().sum(-1) * counts).sum(1).mean()


CASES: dict[str, Case] = {
    "weights of classes": Case(WEIGHTED, "classes second"),
    "options": Case(functools.partial(F.cross_entropy, label_smoothing=0.2, ignore_index=2), "classes second", lambda step: labels_of(step).clamp(min=0)),
    "a sum": Case(nn.MSELoss(reduction="sum"), "", numbers),
    "batchmean": Case(
        functools.partial(F.kl_div, reduction="batchmean"), "", numbers
    ),
    "two outputs": Case(nn.GaussianNLLLoss(), "two", numbers, lambda outputs, target: nn.GaussianNLLLoss()(outputs[0], target, outputs[1])),
    "sequences": Case(CTC, "log probabilities", of_sequences, lambda outputs, target: CTC(outputs, *target)),
    "own mean over tokens": Case(samestep.mean_over("tokens", own_mean), "", labels_of, lambda o, t: own_mean(o, {"labels": t})),
    "own mean over samples": Case(
        samestep.mean_over("samples", mean_of_samples), "", labels_of, lambda o, t: mean_of_samples(o, {"labels": t})
    ),
}  # fmt: skip


def batch_of(case: Case, step: int) -> dict[str, Tensor]:
    x = torch.randn(B, TOKENS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    target = case.target(step)
    if isinstance(target, tuple):
        return {"x": x, **dict(zip(("labels", "input_lengths", "target_lengths"), target, strict=True))}
    return {"x": x, "labels": target}


optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(
    rank: int, world: int, layout: str, name: str, loss: Loss | None = None, kind: type[Net] = Net
) -> tuple[list[float], dict[str, Tensor], str]:
    case = CASES[name]
    build = functools.partial(kind, case.form)
    run = samestep.parallelize(build, loss or case.loss, optimizer, layout=layout, job=JOB)
    try:
        losses = [run.step(batch_of(case, step)).loss for step in range(STEPS)]
    except (LayoutError, UnprovenError) as error:
        return [], {}, str(error)
    return losses, run.state_dict(on_every_rank=True), ""


@functools.cache
def plain(name: str, kind: type[Net] = Net) -> Trained:
    case, model = CASES[name], kind(CASES[name].form)

    def loss(step: int) -> Any:
        return (case.plain or case.loss)(model(batch_of(case, step)["x"]), case.target(step))

    return train_plainly(model, range(STEPS), loss, optimizer(model.parameters()))


def assert_equal(layout: str, name: str, kind: type[Net] = Net) -> None:
    """A layout has the losses and weights of the plain loop."""
    ranks = pool(Layout(layout).world_size).run(trained, layout, name, None, kind)
    assert not any(error for *_, error in ranks)
    assert_trained(ranks, plain(name, kind), 1e-9, 1e-12)


LAYOUTS = ("dp=2 microbatch=1", "dp=2 zero=3", "pp=2 microbatch=2", "tp=2")
ROWS = [*zip(LAYOUTS[1:], ("weights of classes", "batchmean", "own mean over tokens"), strict=True)]
ROWS += [(LAYOUTS[0], name) for name in CASES if name not in ("batchmean", "own mean over tokens")]


@pytest.mark.parametrize(("layout", "name"), ROWS)
def test_a_loss_of_torch_is_that_of_the_full_batch(layout: str, name: str) -> None:
    assert_equal(layout, name)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("cp=2", "weights of classes"),
        ("cp=2 exchange=ring", "own mean over tokens"),
        pytest.param("cp=2 exchange=ring microbatch=2", "weights of classes", marks=pytest.mark.nightly),
    ],
)
def test_a_loss_over_tokens_is_that_of_whole_sequences_under_cp(layout: str, name: str) -> None:
    """Also of outputs [B, C, T], as torch's cross-entropy takes them."""
    assert_equal(layout, name, Attentive)


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (Attentive, "a sum", "the loss is not a sum over the tokens of a batch: its count is"),
        (Net, "weights of classes", "cp=2 slices sequences: it has no blocks. Use cp=1"),
    ],
)
def test_a_loss_that_is_not_a_sum_over_tokens_is_rejected_under_cp(kind: type[Net], name: str, says: str) -> None:
    for losses, _, error in pool(2).run(trained, "cp=2", name, None, kind):
        assert losses == []
        assert error.startswith(says)


@pytest.mark.parametrize(
    ("layout", "over"), [("dp=2", "samples"), ("dp=1 microbatch=4", "samples"), ("dp=2", "tokens")]
)
def test_a_mean_over_something_else_is_rejected_before_the_first_update(layout: str, over: Any) -> None:
    name = "own mean over tokens"
    loss = samestep.mean_over(over, own_mean if over == "samples" else mean_of_samples)
    for losses, _, error in pool(Layout(layout).world_size).run(trained, layout, name, loss):
        assert (losses, "the loss is not a sum over the samples" in error) == ([], True)


# -- losses that cannot be split along their tensors -----------------------------------------------

JOB_OF_BOXES = Job(
    train={"global_batch": 8, "steps": 2, "seed": 3}, numerics={"precision": "float64"}, run={"device": "cpu"}
)


class Boxes(torch.utils.data.Dataset[Any]):
    """Images with one to three boxes."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=drawn), torch.rand(1 + index % 3, 2, generator=drawn)


def together(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Boxes of all images in one tensor, behind the number of their image."""
    images, boxes = zip(*samples, strict=True)
    rows = [torch.cat([torch.full((len(one), 1), float(i)), one], 1) for i, one in enumerate(boxes)]
    return torch.stack(images), torch.cat(rows)


def errors(outputs: Tensor, batch: Any) -> Tensor:
    return outputs[batch[1][:, 0].long()] - batch[1][:, 1:]


def squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    found = errors(outputs, batch).square()
    return found.sum(), found.numel()


def spread(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    """No sum over samples: the errors are compared with the mean of the batch."""
    found = errors(outputs, batch)
    return (found - found.mean(0)).square().sum(), found.numel()


class Curve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        return self.net(x), x


def slopes(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return torch.autograd.grad(outputs[0].sum(), outputs[1], create_graph=True)[0] + outputs[0]


def residual(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    found = slopes(outputs, batch).square()
    return found.sum(), found.numel()


def coupled(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    found = slopes(outputs, batch)
    return (found - found.mean(0)).square().sum(), found.numel()


def points() -> list[dict[str, Tensor]]:
    return [{"x": one} for one in torch.randn(16, 2, generator=torch.Generator().manual_seed(1)).double()]


def boxes() -> Any:
    return torch.utils.data.DataLoader(Boxes(), 8, collate_fn=together)


TABLE = torch.linspace(0, 1, 8).view(4, 2)
"""Centres of four classes: as many as a rank of two has samples."""


def with_table(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    images, boxes = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor([len(one) for one in boxes]), TABLE


def to_centres(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (outputs - batch[2].double()[batch[1]]).square().sum(), len(outputs)


KINDS: dict[str, Any] = {
    "table": (
        lambda: nn.Linear(4, 2),
        lambda: torch.utils.data.DataLoader(Boxes(), 8, collate_fn=with_table),
        to_centres,
    ),
    "boxes": (lambda: nn.Linear(4, 2), boxes, squares),
    "slopes": (Curve, points, residual),
    "coupled boxes": (lambda: nn.Linear(4, 2), boxes, spread),
    "coupled slopes": (Curve, points, coupled),
}


def trained_on_boxes(rank: int, world: int, layout: str, kind: str) -> Any:
    build, data, loss = KINDS[kind]
    torch.manual_seed(0)
    run = samestep.parallelize(
        build(), loss, lambda params: torch.optim.SGD(params, lr=0.1), layout=layout, job=JOB_OF_BOXES
    )
    try:
        losses = [run.step(batch).loss for batch in samestep.batches(data(), JOB_OF_BOXES)]
    except UnprovenError as error:
        return str(error)
    return losses, run.state_dict(on_every_rank=True)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("dp=2", "table"),
        ("dp=2", "boxes"),
        ("dp=2 zero=3", "boxes"),
        ("dp=2 zero=1 microbatch=2", "slopes"),
        ("dp=2", "slopes"),
    ],
)
def test_what_adds_up_is_equal(layout: str, kind: str) -> None:
    assert_as_on_one_device(trained_on_boxes, layout, kind, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["coupled boxes", "coupled slopes"])
def test_what_does_not_is_refused(kind: str) -> None:
    for found in pool(2).run(trained_on_boxes, "dp=2", kind):
        assert "the loss" in found
        assert ". Use " in found


def test_gradients_through_the_model_need_whole_weights() -> None:
    for found in pool(2).run(trained_on_boxes, "dp=2 zero=3", "slopes"):
        assert "and zero=1" in found
