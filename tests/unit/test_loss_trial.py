"""The trial of a loss: sums over samples pass in whatever form they come, and what couples samples does not."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.loss import cross_entropy, mse
from samestep.runtime.axes.precision import for_loss
from samestep.runtime.guards import loss_trial
from samestep.runtime.guards.loss_parts import join_samples, tensors_in, with_tensors
from samestep.runtime.guards.loss_trial import LossTrial, try_loss_on_halves

B, T, V = 6, 4, 5
_draw = torch.Generator().manual_seed(0)
LOGITS = torch.randn(B, T, V, generator=_draw)
IDS = torch.randint(0, V, (B, T), generator=_draw)
ROWS, CLASSES = LOGITS[:, 0], IDS[:, 0]
WEIGHTS = torch.rand(V, generator=_draw)  # float32, as a loss holds them
CRITERION = nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum")


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None
    temperature: float = 1.0


@dataclass(frozen=True)
class Batch:
    rows: Tensor
    names: list[str]
    parts: list[Tensor]


def of_names(outputs: Any, batch: Any) -> Any:
    return outputs.square().sum() + sum(len(name) for name in batch.names), len(batch.names)


def of_parts(outputs: Any, batch: Any) -> Any:
    return outputs.square().sum() + sum(one.square().sum() for one in batch[0].parts), len(outputs)


def times_names(outputs: Any, batch: Any) -> Any:
    return outputs.square().sum() * len(batch.names), len(outputs)


Pair = namedtuple("Pair", "logits hidden")


def flat(outputs: Any, batch: Any) -> Any:
    return F.cross_entropy(outputs, batch["labels"].view(-1), reduction="sum"), outputs.shape[0]


def masked(outputs: Any, batch: Any) -> Any:
    each = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    mask = (batch["labels"] != 0).float()
    return (each * mask).sum(), mask.sum()


def own_shift(outputs: Any, batch: Any) -> Any:
    logits, labels = outputs[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def picked(outputs: Any, batch: Any) -> Any:
    labels = batch["labels"][batch["labels"] != -100]
    return F.cross_entropy(outputs, labels, reduction="sum"), len(labels)


def mean_of_picked(outputs: Any, batch: Any) -> Any:
    labels = batch["labels"][batch["labels"] != -100]
    return F.cross_entropy(outputs, labels), 1


def mean_of_each(outputs: Any, batch: Any) -> Any:
    return F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none").mean(1).sum(), len(outputs)


def weighted(outputs: Any, batch: Any) -> Any:
    return CRITERION(outputs, batch[1]), torch.bincount(batch[1], minlength=V).sum()


def two_views(outputs: Any, batch: Any) -> Any:
    first, second = outputs.chunk(2)
    return (1 - F.cosine_similarity(first, second)).sum(), len(first)


def sequence_first(outputs: Any, batch: Any) -> Any:
    return F.cross_entropy(outputs.permute(1, 2, 0), batch["labels"], reduction="sum"), batch["labels"].numel()


def distilled(outputs: Any, batch: Any) -> Any:
    student, teacher = outputs["student"].log_softmax(-1), outputs["teacher"].softmax(-1)
    return F.kl_div(student, teacher, reduction="sum"), torch.tensor([len(student)])


def penalised(outputs: Any, batch: Any) -> Any:
    """A gradient of the outputs inside the loss, as a penalty on a score has it."""
    score = outputs.square().sum()
    (slope,) = torch.autograd.grad(score, outputs, create_graph=True)
    return slope.square().sum(), len(outputs)


def in_numpy(outputs: Any, batch: Any) -> Any:
    return torch.tensor(float((outputs.numpy() ** 2).sum())), len(outputs)


class Scaled(nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(V))

    def forward(self, outputs: Any, batch: Any) -> Any:
        buffer = torch.zeros(len(outputs))
        buffer.copy_((outputs * self.scale).square().sum(-1))
        return buffer.sum(), len(outputs)


def uncertain(outputs: Any, batch: Any) -> Any:
    """Learned weights of two tasks, which the model returns beside its outputs; there are as many as samples."""
    each = outputs["rows"].square().sum(-1) * (-outputs["weights"]).exp().sum() + outputs["weights"].sum()
    return (each * (batch[1] + 1)).sum(), len(each)


def with_norms(outputs: Any, batch: Any) -> Any:
    rows, held = outputs
    total, count = cross_entropy(rows, batch)
    return {"rows": (total, count), "penalty": (sum(one.square().sum() for one in held), 1)}


LEGAL = {
    "learned weights beside": (uncertain, {"rows": ROWS, "weights": ROWS[:, 0]}, (ROWS, CLASSES)),
    "names in a dataclass": (of_names, ROWS, Batch(ROWS, list("abcdef"), [])),
    "parts in a dataclass": (
        of_parts,
        ROWS,
        (Batch(ROWS, list("abcdef"), [ROWS[i, : i % 3 + 1] for i in range(B)]), 0),
    ),
    "as many weights as samples": (
        with_norms,
        (ROWS, [nn.Parameter(torch.ones(V)) for _ in range(B)]),
        (ROWS, CLASSES),
    ),
    "as many norms as samples": (with_norms, (ROWS, [torch.ones(()) for _ in range(B)]), (ROWS, CLASSES)),
    "cross entropy": (cross_entropy, LOGITS, {"labels": IDS}),
    "cross entropy, masked": (cross_entropy, LOGITS, {"labels": IDS.masked_fill(IDS == 1, -100)}),
    "classes": (cross_entropy, ROWS, (ROWS, CLASSES)),
    "mse": (mse, ROWS, (ROWS, ROWS.cos())),
    "dataclass": (cross_entropy, Output(LOGITS), {"labels": IDS}),
    "half precision": (cross_entropy, LOGITS.bfloat16(), {"labels": IDS}),
    "flattened tokens": (flat, LOGITS.flatten(0, 1), {"labels": IDS}),
    "rows that labels pick": (picked, LOGITS[IDS != 1], {"labels": IDS.masked_fill(IDS == 1, -100)}),
    "own mask": (masked, LOGITS, {"labels": IDS}),
    "own shift": (own_shift, LOGITS, {"labels": IDS}),
    "mean of each sample": (mean_of_each, LOGITS, {"labels": IDS}),
    "class weights": (weighted, ROWS, (ROWS, CLASSES)),
    "two views": (two_views, torch.cat([ROWS, ROWS.sin()]), {"x": ROWS}),
    "sequence first": (sequence_first, LOGITS.transpose(0, 1), {"labels": IDS}),
    "distillation": (distilled, {"student": ROWS, "teacher": ROWS.cos(), "scale": WEIGHTS}, {"x": ROWS}),
    "gradient in the loss": (penalised, ROWS, {"x": ROWS}),
    "numpy": (in_numpy, ROWS, {"x": ROWS}),
    "module": (Scaled(), ROWS, {"x": ROWS}),
    "named tuple": (
        lambda out, batch: (out.hidden.square().sum(), len(out.hidden)),
        Pair(ROWS, ROWS.sin()),
        {"x": ROWS},
    ),
    "namespace": (lambda out, batch: (out.z.square().sum(), len(out.z)), SimpleNamespace(z=ROWS), {"x": ROWS}),
    "constant head": (flat, torch.zeros(B * T, V), {"labels": IDS}),
}


def mean(outputs: Any, batch: Any) -> Any:
    return F.cross_entropy(outputs, batch["labels"]), 1


def mean_times_size(outputs: Any, batch: Any) -> Any:
    labels = batch["labels"]
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=1) * len(labels), len(labels)


def contrastive(outputs: Any, batch: Any) -> Any:
    z = F.normalize(outputs, dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="sum"), len(z)


def with_spread(outputs: Any, batch: Any) -> Any:
    """Of VICReg: a small penalty on the batch's standard deviation."""
    return outputs.square().sum() + 1e-5 * (1 - outputs.std(0)).relu().sum(), len(outputs)


def with_balance(outputs: Any, batch: Any) -> Any:
    use = outputs.softmax(-1).mean(0)
    return outputs.square().sum() + 0.01 * (use * use.log()).sum() * len(outputs), len(outputs)


def ranked(outputs: Any, batch: Any) -> Any:
    scores = outputs[:, 0]
    return (scores[:, None] - scores[None]).relu().sum(), len(scores)


def hardest(outputs: Any, batch: Any) -> Any:
    return outputs.square().sum(-1).topk(2).values.sum(), 2


def constant_count(outputs: Any, batch: Any) -> Any:
    return outputs.square().sum(), B


def normalised(outputs: Any, batch: Any) -> Any:
    """Advantages normalised over the batch: of a single sample they are not finite."""
    reward = batch["x"][:, 0]
    return ((reward - reward.mean()) / reward.std() * outputs[:, 0]).sum(), len(outputs)


COUPLED = {
    "advantages of two samples": (normalised, ROWS[:2], {"x": ROWS[:2]}),
    "mean": (mean, ROWS, {"labels": CLASSES}),
    "mean over unequal counts": (mean_times_size, LOGITS, {"labels": IDS}),
    "mean of rows that labels pick": (mean_of_picked, LOGITS[IDS != 1], {"labels": IDS.masked_fill(IDS == 1, -100)}),
    "contrastive": (contrastive, ROWS, {"x": ROWS}),
    "number of names in a dataclass": (times_names, ROWS, Batch(ROWS, list("abcdef"), [])),
    "contrastive, two views": (contrastive, torch.cat([ROWS, ROWS.sin()]), {"x": ROWS}),
    "penalty on the spread": (with_spread, 0.01 * ROWS, {"x": ROWS}),
    "balance": (with_balance, ROWS, {"x": ROWS}),
    "ranking": (ranked, ROWS, {"x": ROWS}),
    "hardest samples": (hardest, ROWS, {"x": ROWS}),
    "constant count": (constant_count, ROWS, {"x": ROWS}),
    "contrastive of equal outputs": (contrastive, torch.ones(B, V), {"x": ROWS}),
}


@pytest.mark.parametrize("case", LEGAL)
def test_a_sum_over_samples_passes(case: str) -> None:
    loss, outputs, batch = LEGAL[case]
    found = try_loss_on_halves(loss, outputs, batch, B)
    assert found == LossTrial()


@pytest.mark.parametrize("case", ["cross entropy", "classes", "dataclass", "own mask", "two views", "module", "mse"])
def test_a_sum_over_samples_passes_with_one_sample(case: str) -> None:
    loss, outputs, batch = LEGAL[case]
    if case == "two views":
        outputs = outputs[:: len(ROWS)]
        outputs, batch = outputs, {"x": ROWS[:1]}
    else:
        outputs, batch = with_tensors((outputs, batch), [leaf[:1] for leaf in tensors_in((outputs, batch))])
    found = try_loss_on_halves(loss, outputs, batch, 1)
    assert found == LossTrial()


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("case", COUPLED)
def test_what_couples_samples_does_not_pass(case: str) -> None:
    loss, outputs, batch = COUPLED[case]
    found = try_loss_on_halves(loss, outputs, batch, 2 if "two samples" in case else B)
    assert found.judged
    assert found.reason.startswith("its ")


@pytest.mark.parametrize("case", ["mean", "contrastive", "ranking", "constant count"])
def test_what_couples_samples_does_not_pass_with_one_sample(case: str) -> None:
    loss, outputs, batch = COUPLED[case]
    outputs, batch = with_tensors((outputs, batch), [leaf[:1] for leaf in tensors_in((outputs, batch))])
    assert try_loss_on_halves(loss, outputs, batch, 1).reason


def test_a_sum_over_samples_may_be_none_over_tokens() -> None:
    assert not try_loss_on_halves(masked, LOGITS, {"labels": IDS}, T, dim=1).reason
    assert try_loss_on_halves(own_shift, LOGITS, {"labels": IDS}, T, dim=1).reason.startswith("its ")
    assert try_loss_on_halves(mean_of_each, LOGITS, {"labels": IDS}, T, dim=1).reason.startswith("its ")


@pytest.mark.parametrize("largest", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(8))
def test_sums_whose_terms_cancel_pass_and_coupled_ones_do_not(seed: int, dtype: torch.dtype, largest: float) -> None:
    """As in the first step of GRPO, where each ratio is 1 and the advantages of a group add up to nothing."""
    drawn = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, V, generator=drawn).to(dtype)
    old = logits.log_softmax(-1).amax(-1)
    rewards = torch.rand(2, 4, generator=drawn, dtype=dtype)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).view(-1) * largest

    def clipped(outputs: Any, batch: Any) -> Any:
        ratio = (outputs.log_softmax(-1).amax(-1) - batch["old"]).exp()
        return -torch.min(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"]).sum(), len(outputs)

    def whitened(outputs: Any, batch: Any) -> Any:
        given = batch["advantage"]
        return clipped(outputs, batch | {"advantage": (given - given.mean()) / (given.std() + 1e-8)})

    batch = {"old": old, "advantage": advantage}
    assert try_loss_on_halves(clipped, logits, batch, 8) == LossTrial()
    assert try_loss_on_halves(whitened, logits, batch, 8).reason.startswith("its sum is")


class Centred(nn.Module):
    """A loss with a running mean of the outputs (DINO), which it reads before it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(V))
        self.history: list[float] = []

    def forward(self, outputs: Any, batch: Any) -> Any:
        total = (outputs - self.center).square().sum()
        self.center.lerp_(outputs.detach().mean(0).to(self.center.dtype), 0.1)
        self.history.append(float(total))
        return total, len(outputs)


def test_a_loss_that_keeps_something_does_not_pass_and_is_as_before() -> None:
    loss = Centred()
    found = try_loss_on_halves(loss, ROWS, {"x": ROWS}, B)
    assert "keeps something between calls" in found.reason
    assert not loss.center.any()
    assert loss.history == []


def test_a_loss_that_only_logs_passes_and_its_log_is_as_before() -> None:
    log: list[float] = []
    calls = {"number": 0}

    def logging(outputs: Any, batch: Any) -> Any:
        total = outputs.square().sum()
        log.append(float(total))
        calls["number"] += 1
        return total, len(outputs)

    assert try_loss_on_halves(logging, ROWS, {"x": ROWS}, B) == LossTrial()
    assert (log, calls) == ([], {"number": 0})


class Keeping:
    """A loss of rows that keeps a number of the losses that it has seen, as `keep` makes it of the last one, and reads it by `read`."""

    def __init__(
        self, keep: Callable[[Any, Tensor], Any], read: Callable[[Tensor, Any], Tensor], at_first: Any
    ) -> None:
        self.keep, self.read, self.kept = keep, read, at_first

    def __call__(self, outputs: Any, batch: Any) -> Any:
        each = outputs.square().sum(1)
        self.kept = self.keep(self.kept, each.detach())
        return self.read(each, self.kept).sum(), len(outputs)


def running_mean(kept: Any, each: Tensor) -> Tensor:
    return each.mean() if kept is None else 0.9 * kept + 0.1 * each.mean()


KEPT: dict[str, tuple[Callable[[Any, Tensor], Any], Any]] = {
    "a running mean": (running_mean, None),
    "a running mean from 1": (running_mean, torch.ones(())),
    "the largest": (lambda kept, each: torch.maximum(kept, each.max()), torch.zeros(())),
    "the last": (lambda kept, each: each.mean(), torch.ones(())),
    "a number": (lambda kept, each: 0.5 * kept + 0.5 * float(each.mean()), 1.0),
    "the last ten": (lambda kept, each: [*kept, float(each.mean())][-10:], [1.0]),
}
READ: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a threshold": lambda each, kept: each * (each.detach() >= kept),
    "a limit": lambda each, kept: each.clamp_max(0.9 * kept),
    "a factor": lambda each, kept: each * (1 + 0.1 * kept),
}


def mean_of(kept: Any) -> Any:
    return sum(kept) / len(kept) if isinstance(kept, list) else kept


@pytest.mark.parametrize("read", [*READ, None])
@pytest.mark.parametrize("kept", KEPT)
def test_a_loss_that_reads_what_it_keeps_of_other_batches_does_not_pass(kept: str, read: str | None) -> None:
    keep, at_first = KEPT[kept]

    def with_kept(each: Tensor, kept: Any) -> Tensor:
        return each if read is None else READ[read](each, mean_of(kept))

    loss = Keeping(keep, with_kept, at_first)
    found = try_loss_on_halves(loss, ROWS, {"x": ROWS}, B)
    assert bool(found.reason) == (read is not None), found
    assert loss.kept is at_first


def test_nothing_is_judged_where_nothing_counts() -> None:
    assert not try_loss_on_halves(cross_entropy, LOGITS, {"labels": torch.full_like(IDS, -100)}, B).judged
    assert not try_loss_on_halves(cross_entropy, LOGITS * float("nan"), {"labels": IDS}, B).judged


def triplet(outputs: Any, batch: Any) -> Any:
    """The hardest pairs of a batch: a sample alone, and its copy of the same class, have none."""
    distances, alike = torch.cdist(outputs, outputs), batch["labels"][:, None] == batch["labels"]
    near = (distances + 1e3 * alike).min(1).values
    return ((distances * alike).max(1).values - near + 100.0).relu().sum(), len(outputs)


def test_what_is_zero_everywhere_is_not_judged_and_two_samples_show_what_one_does_not():
    one, other = ((ROWS[i : i + 1], {"labels": torch.tensor([i])}) for i in range(2))
    assert not try_loss_on_halves(triplet, *one, 1).judged
    both = join_samples(one, other, (1, 1))
    assert both is not None
    assert try_loss_on_halves(triplet, *both, 2).reason
    assert join_samples(one, (ROWS[:1, :2], {"labels": torch.tensor([1])}), (1, 1)) is None


def test_samples_that_agree_by_chance_are_tried_with_others() -> None:
    """Weights by the classes of a batch: two samples of one class say nothing, nor do their halves."""

    def by_class(outputs: Any, batch: Any) -> Any:
        weights = len(outputs) / torch.bincount(batch[1], minlength=V).clamp(min=1)
        return F.cross_entropy(outputs, batch[1], weight=weights, reduction="sum"), len(outputs)

    few, more = (
        (ROWS[:2], (ROWS[:2], CLASSES.new_tensor([1, 1]))),
        (ROWS[2:5], (ROWS[2:5], CLASSES.new_tensor([1, 2, 3]))),
    )
    assert try_loss_on_halves(by_class, *few, 2) == LossTrial()
    assert loss_trial.samples_wanted(*few, 2) > 2
    both = join_samples(few, more, (2, 3))
    assert both is not None
    assert len(both[0]) == 5
    assert try_loss_on_halves(by_class, *both, 5).reason
    assert join_samples((ROWS.T[None], few[1]), (ROWS.T[None], few[1]), (2, B)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_that_is_rounded_says_so(dtype: torch.dtype) -> None:
    def rounded(outputs: Any, batch: Any) -> Any:
        return (outputs.square().sum() * 13.7).to(dtype), len(outputs)

    reason = try_loss_on_halves(rounded, ROWS, {"labels": CLASSES}, len(ROWS)).reason
    name = str(dtype).removeprefix("torch.")
    assert reason.endswith(f"for the halves, and it is rounded to {name}: a loss that computes it in float32 works")


@pytest.mark.parametrize("weight", [torch.zeros(2), torch.ones(2, 2), torch.ones(2, 3)])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_weight_with_as_many_rows_as_there_are_samples_belongs_to_all_of_two_micro_batches(
    weight: Tensor, precision: torch.dtype
) -> None:
    """Weights of two tasks, and two samples of which none has a label of the second one: they show nothing by themselves."""

    def tasks(outputs: Any, batch: Any) -> Any:
        first = F.cross_entropy(outputs["rows"], batch["labels"], reduction="sum")
        second = (outputs["rows"][:, 0] * batch["has"]).sum()
        return {
            "first": (first * outputs["weights"].sum().exp(), len(batch["labels"])),
            "second": (second, batch["has"].sum()),
            "penalty": (outputs["weights"].sum(), 1),
        }

    held = {"weights": nn.Parameter(weight.to(precision))}
    each = [
        (
            for_loss({"rows": ROWS[i : i + 2].to(precision), **held}),
            {"labels": CLASSES[i : i + 2], "has": torch.zeros(2)},
        )
        for i in (0, 2)
    ]
    both = join_samples(*each, (2, 2))
    assert both is not None
    assert both[0]["weights"].shape == weight.shape
    assert not try_loss_on_halves(tasks, *both, 4).reason


def test_picked_rows_of_single_samples_are_tried_together() -> None:
    labels = IDS.masked_fill(IDS == 1, -100)
    each = [(LOGITS[i : i + 1][labels[i : i + 1] != -100], {"labels": labels[i : i + 1]}) for i in range(2)]
    both = join_samples(*each, (1, 1))
    assert both is not None
    assert both[0].shape[0] == int((labels[:2] != -100).sum())
    assert [try_loss_on_halves(loss, *both, 2).reason == "" for loss in (picked, mean_of_picked)] == [True, False]


def test_a_loss_that_goes_backward_itself_is_no_sum() -> None:
    def eager(outputs: Any, batch: Any) -> Any:
        total = outputs.square().sum()
        total.backward(retain_graph=True)
        return total, len(outputs)

    assert "calls backward()" in try_loss_on_halves(eager, ROWS, {"x": ROWS}, B).reason


def test_a_loss_that_takes_one_size_only_cannot_be_tried() -> None:
    def rigid(outputs: Any, batch: Any) -> Any:
        assert len(outputs) == B, "a batch of another size"
        return outputs.sum(), B

    assert "AssertionError: a batch of another size" in try_loss_on_halves(rigid, ROWS, {"x": ROWS}, B).reason


def test_of_large_outputs_a_few_samples_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_trial, "_ELEMENTS", 2**12)

    def small(outputs: Any, batch: Any) -> Any:
        assert len(outputs) <= 3, "more than was to be tried"
        return outputs.sum() + len(outputs) * 1e6, len(outputs)

    assert try_loss_on_halves(small, torch.zeros(1, 1).expand(64, 2**10), {"x": torch.zeros(64, 1)}, 64) == LossTrial()


def test_trees_are_copied_with_other_tensors() -> None:
    tree = (Output(ROWS), OrderedDict(x=[ROWS, "name"]), Pair(ROWS, None), SimpleNamespace(z=ROWS, k=3))
    twins = with_tensors(tree, [torch.full((), float(i)) for i in range(4)])
    assert [float(leaf) for leaf in tensors_in(twins)] == [0.0, 1.0, 2.0, 3.0]
    assert all(leaf is ROWS for leaf in tensors_in(tree)), "the original is as it was"
    assert (twins[3].k, type(twins[0]), twins[1]["x"][1]) == (3, Output, "name")
