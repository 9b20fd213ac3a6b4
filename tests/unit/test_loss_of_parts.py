"""The loss of halves: sums over samples pass in whatever form they come, and what couples samples does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.loss import cross_entropy, mse
from samestep.building.torch_losses import mean_over
from samestep.runtime.axes.precision import for_loss
from samestep.runtime.guards.divided_samples import Samples, divisions, tensors_in
from samestep.runtime.guards.loss_of_parts import LossTrial, judge, judge_tokens
from samestep.trees import parts_of, with_parts

B, T, V = 6, 4, 5
NUM_OF_STEP = 40  # of which a rank or a micro-batch has B
_draw = torch.Generator().manual_seed(0)
LOGITS = torch.randn(B, T, V, generator=_draw)
IDS = torch.randint(0, V, (B, T), generator=_draw)
ROWS, CLASSES = LOGITS[:, 0], IDS[:, 0]
WEIGHTS = torch.rand(V, generator=_draw)  # float32, as a loss holds them
CRITERION = nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum")


@dataclass(frozen=True)
class Of:
    """Outputs or a batch as a function of the numbers of the samples, where these are not the rows of all tensors."""

    rows: Callable[[list[int]], Any]


def rows_of(value: Any, rows: list[int]) -> Any:
    """Return what a forward or a data set would give of some of the samples."""
    if isinstance(value, Of):
        return value.rows(rows)
    if isinstance(value, Tensor):
        return value[rows] if len(value) == B and not isinstance(value, nn.Parameter) else value
    if type(value) is list and len(value) == B:
        return [value[row] for row in rows]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: rows_of(one, rows) for name, one in vars(value).items()})
    fields = parts_of(value)
    return with_parts(value, {key: rows_of(one, rows) for key, one in fields.items()}) if fields else value


def run(outputs: Any, batch: Any, rows: list[int]) -> Samples:
    return Samples(rows_of(outputs, rows), rows_of(batch, rows), len(rows))


def judged(
    loss: Any, outputs: Any, batch: Any, rows: list[int] | None = None, graded: tuple[bool, ...] | None = None
) -> LossTrial:
    """Try a loss on samples and their halves."""
    rows = [*range(B)] if rows is None else rows
    half = len(rows) // 2
    whole, *halves = (run(outputs, batch, some) for some in (rows, rows[:half], rows[half:]))
    return judge(loss, whole, (halves[0], halves[1]), graded, num_samples=NUM_OF_STEP)


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


def mean_of_each(outputs: Any, batch: Any) -> Any:
    return F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none").mean(1).sum(), len(outputs)


def weighted(outputs: Any, batch: Any) -> Any:
    return CRITERION(outputs, batch[1]), torch.bincount(batch[1], minlength=V).sum()


def two_views(outputs: Any, batch: Any) -> Any:
    first, second = outputs.chunk(2)
    return (1 - F.cosine_similarity(first, second)).sum(), len(first)


def sequence_first(outputs: Any, batch: Any) -> Any:
    return F.cross_entropy(outputs.permute(1, 2, 0), batch["labels"], reduction="sum"), batch["labels"].numel()


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


def by_table(outputs: Any, batch: Any) -> Any:
    """Costs of confused classes, a table that comes with each batch."""
    return (outputs.softmax(-1) * batch[2][batch[1], : outputs.shape[1]]).sum(), len(outputs)


TABLE = torch.rand(B, V, generator=_draw)
FLAT = Of(lambda rows: LOGITS[rows].flatten(0, 1))
PICKED = Of(lambda rows: LOGITS[rows][IDS[rows] != 1])
VIEWS = Of(lambda rows: torch.cat([ROWS[rows], ROWS[rows].sin()]))


def with_norms(outputs: Any, batch: Any) -> Any:
    rows, held = outputs
    total, count = cross_entropy(rows, batch)
    return {"rows": (total, count), "penalty": (sum(one.square().sum() for one in held), 1)}


LEGAL = {
    "learned weights beside": (uncertain, {"rows": ROWS, "weights": Of(lambda rows: ROWS[:, 0])}, (ROWS, CLASSES)),
    "a table of as many classes as samples": (by_table, ROWS, (ROWS, CLASSES, Of(lambda rows: TABLE))),
    "names in a dataclass": (of_names, ROWS, Batch(ROWS, list("abcdef"), [])),
    "parts in a dataclass": (of_parts, ROWS, (Batch(ROWS, list("abcdef"), [ROWS[i, : i % 3 + 1] for i in range(B)]), 0)),
    "as many weights as samples": (with_norms, (ROWS, Of(lambda rows: [nn.Parameter(torch.ones(V)) for _ in range(B)])), (ROWS, CLASSES)),
    "cross entropy": (cross_entropy, LOGITS, {"labels": IDS}),
    "classes": (cross_entropy, ROWS, (ROWS, CLASSES)),
    "mse": (mse, ROWS, (ROWS, ROWS.cos())),
    "dataclass": (cross_entropy, Output(LOGITS), {"labels": IDS}),
    "flattened tokens": (flat, FLAT, {"labels": IDS}),
    "rows that labels pick": (picked, PICKED, {"labels": IDS.masked_fill(IDS == 1, -100)}),
    "own mask": (masked, LOGITS, {"labels": IDS}),
    "class weights": (weighted, ROWS, (ROWS, CLASSES)),
    "two views": (two_views, VIEWS, {"x": ROWS}),
    "sequence first": (sequence_first, Of(lambda rows: LOGITS[rows].transpose(0, 1)), {"labels": IDS}),
    "gradient in the loss": (penalised, ROWS, {"x": ROWS}),
    "numpy": (in_numpy, ROWS, {"x": ROWS}),
    "module": (Scaled(), ROWS, {"x": ROWS}),
}  # fmt: skip


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


def ranked(outputs: Any, batch: Any) -> Any:
    scores = outputs[:, 0]
    return (scores[:, None] - scores[None]).relu().sum(), len(scores)


def constant_count(outputs: Any, batch: Any) -> Any:
    return outputs.square().sum(), B


def normalised(outputs: Any, batch: Any) -> Any:
    """Advantages normalised over the batch: of a single sample they are not finite."""
    reward = batch["x"][:, 0]
    return ((reward - reward.mean()) / reward.std() * outputs[:, 0]).sum(), len(outputs)


COUPLED = {
    "advantages of two samples": (normalised, ROWS, {"x": ROWS}),
    "mean": (mean, ROWS, {"labels": CLASSES}),
    "mean over unequal counts": (mean_times_size, LOGITS, {"labels": IDS}),
    "contrastive": (contrastive, ROWS, {"x": ROWS}),
    "number of names in a dataclass": (times_names, ROWS, Batch(ROWS, list("abcdef"), [])),
    "contrastive, two views": (contrastive, VIEWS, {"x": ROWS}),
    "penalty on the spread": (with_spread, 0.01 * ROWS, {"x": ROWS}),
    "ranking": (ranked, ROWS, {"x": ROWS}),
    "constant count": (constant_count, ROWS, {"x": ROWS}),
}


@pytest.mark.parametrize("case", LEGAL)
def test_a_sum_over_samples_passes(case: str) -> None:
    graded = () if case == "numpy" else None  # of an evaluation, whose outputs need no gradient, as numpy asks for
    assert judged(*LEGAL[case], graded=graded) == LossTrial()


@pytest.mark.parametrize("case", ["cross entropy", "classes", "own mask", "two views"])
def test_a_sum_over_samples_passes_with_two_samples(case: str) -> None:
    assert judged(*LEGAL[case], [3, 5]) == LossTrial()


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("case", COUPLED)
def test_what_couples_samples_does_not_pass(case: str) -> None:
    found = judged(*COUPLED[case], [0, 1] if "two samples" in case else None)
    assert found.judged
    assert found.reason.startswith("its ")


@pytest.mark.parametrize("case", ["mean", "contrastive", "ranking", "constant count"])
def test_what_couples_samples_does_not_pass_with_two_samples(case: str) -> None:
    assert judged(*COUPLED[case], [3, 5]).reason


def of_counted(outputs: Any, batch: Any) -> Any:
    """Of groups: a sum over those that the batch has, which is another with other ids alone."""
    ids = batch["ids"]
    of_group = torch.zeros(int(ids.max()) + 1).index_add(0, ids, outputs.square().sum(1))
    sizes = torch.bincount(ids).clamp(min=1)
    return (of_group / sizes).sum(), len(ids.unique())


def test_groups_that_stay_together_pass_for_more_samples() -> None:
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    assert judged(of_counted, ROWS, {"ids": ids}, [0, 1, 2, 3]) == LossTrial()


MANY = {
    "samples": lambda out, batch: (2 if len(out) > 24 else 1, len(out)),
    "labels that count": lambda out, batch: (torch.where((batch["labels"] > 0).sum() > 20, 2.0, 1.0), len(out)),
    "ids": lambda out, batch: (0.5 if len(batch["ids"].unique()) > 15 else 1.0, len(out)),
    "the true": lambda out, batch: (1 if int(batch["mask"].sum()) < 30 else 3, len(out)),
    "a count that has a largest value": lambda out, batch: (1.0, batch["mask"].sum().clamp(max=9)),
    "a count that has a least value": lambda out, batch: (1.0, max(len(out), 32)),
}
"""Factors and counts that a number of samples selects, which no few samples reach."""


@pytest.mark.parametrize("case", MANY)
def test_what_more_samples_select_does_not_pass(case: str) -> None:
    ids = torch.arange(B)
    batch = {"labels": ids % 3, "ids": ids, "mask": ids > 1}

    def loss(outputs: Any, batch: Any) -> Any:
        factor, count = MANY[case](outputs, batch)
        return outputs.square().sum() * factor, count

    trial = judged(loss, ROWS, batch)
    assert trial.judged
    assert trial.reason.startswith("its ")


def test_a_sum_over_samples_may_be_none_over_tokens() -> None:
    whole = run(LOGITS, {"labels": IDS}, [*range(B)])
    assert not judge_tokens(masked, whole, T).reason
    assert judge_tokens(own_shift, whole, T).reason.startswith("its ")
    assert judge_tokens(mean_of_each, whole, T).reason.startswith("its ")


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-6), (torch.float32, 1e3), (torch.float64, 1.0)])
@pytest.mark.parametrize("seed", range(3))
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

    parts = [
        Samples(logits[some], {"old": old[some], "advantage": advantage[some]}, len(logits[some]))
        for some in (slice(8), slice(4), slice(4, 8))
    ]
    assert judge(clipped, parts[0], (parts[1], parts[2])) == LossTrial()
    assert judge(whitened, parts[0], (parts[1], parts[2])).reason.startswith("its ")


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
    found = judged(loss, ROWS, {"x": ROWS})
    assert "keeps something between calls" in found.reason
    assert not loss.center.any()
    assert loss.history == []


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (lambda kept, each: kept.log.append(float(each.sum())), "log"),
        (lambda kept, each: setattr(kept, "seen", kept.seen + len(each)), "seen"),
        (lambda kept, each: kept.total.add_(each.sum().to(kept.total)), "total"),
        (lambda kept, each: setattr(kept, "calls", kept.calls + 1), ""),
    ],
)
def test_a_loss_that_only_logs_passes_by_name_and_its_log_is_as_before(keep, name):
    kept = SimpleNamespace(log=[], seen=0, total=torch.zeros(()), calls=0)

    def logging(outputs: Any, batch: Any) -> Any:
        each = outputs.square().sum(1)
        keep(kept, each.detach())
        return each.sum(), len(outputs)

    found = judged(logging, ROWS, {"x": ROWS})
    assert found == LossTrial(keeps=found.keeps)
    assert bool(found.keeps) == bool(name)
    assert kept == SimpleNamespace(log=[], seen=0, total=torch.zeros(()), calls=0)


@pytest.mark.parametrize("begins", [lambda calls: calls % 50 == 49, lambda calls: calls == 3])
def test_a_loss_that_counts_its_calls_says_so(begins: Callable[[int], bool]) -> None:
    kept = SimpleNamespace(calls=0)

    def counting(outputs: Any, batch: Any) -> Any:
        kept.calls += 1
        return outputs.square().sum() * (2 if begins(kept.calls) else 1), len(outputs)

    found = judged(counting, ROWS, {"x": ROWS})
    assert found.acts_by_calls or found.reason
    assert kept.calls == 0


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


@pytest.mark.parametrize(
    ("kept", "read"),
    [*((kept, "a factor") for kept in KEPT), *(("a running mean", read) for read in ("a threshold", "a limit", None))],
)
def test_a_loss_that_reads_what_it_keeps_of_other_batches_does_not_pass(kept: str, read: str | None) -> None:
    keep, at_first = KEPT[kept]

    def with_kept(each: Tensor, kept: Any) -> Tensor:
        return each if read is None else READ[read](each, mean_of(kept))

    loss = Keeping(keep, with_kept, at_first)
    found = judged(loss, ROWS, {"x": ROWS})
    assert bool(found.reason) == (read is not None), found
    assert loss.kept is at_first


def test_nothing_is_judged_where_nothing_counts() -> None:
    assert not judged(cross_entropy, LOGITS, {"labels": torch.full_like(IDS, -100)}).judged
    assert not judged(cross_entropy, LOGITS * float("nan"), {"labels": IDS}).judged
    assert not judged(lambda out, batch: ((out - 1e9).relu().sum(), len(out)), ROWS, {"x": ROWS}).judged


def triplet(outputs: Any, batch: Any) -> Any:
    """The hardest pairs of a batch: a sample alone, and its copy of the same class, have none."""
    distances, alike = torch.cdist(outputs, outputs), batch["labels"][:, None] == batch["labels"]
    near = (distances + 1e3 * alike).min(1).values
    return ((distances * alike).max(1).values - near + 100.0).relu().sum(), len(outputs)


def test_two_samples_of_one_class_have_no_hardest_pair_alone() -> None:
    labels = {"labels": torch.tensor([0, 0, 0, 1, 0, 1])}
    assert judged(triplet, ROWS, labels, [0, 1]).reason
    assert judged(triplet, ROWS, labels).reason


def test_samples_that_agree_by_chance_are_found_by_other_labels() -> None:
    """Weights by the classes of a batch: two samples of one class say nothing by their halves."""

    def by_class(outputs: Any, batch: Any) -> Any:
        weights = len(outputs) / torch.bincount(batch[1], minlength=V).clamp(min=1)
        return F.cross_entropy(outputs, batch[1], weight=weights, reduction="sum"), len(outputs)

    of_one_class = (ROWS, CLASSES.new_ones(B))
    assert "one with other labels" in judged(by_class, ROWS, of_one_class, [0, 1]).reason
    assert judged(by_class, ROWS, (ROWS, CLASSES)).reason


@pytest.mark.parametrize(
    "other",
    [
        lambda out: out.logsumexp(-1).square().mean(),
        lambda out: F.kl_div(F.log_softmax(out / 2, -1), F.softmax(-out, -1), reduction="batchmean"),
        lambda out: -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean(),
    ],
    ids=["z-loss", "distillation", "entropy"],
)
@pytest.mark.parametrize("over", ["samples", "tokens"])
def test_a_mean_over_labels_beside_one_over_samples_is_told_to_be_two_terms(over: Any, other: Any) -> None:
    loss = mean_over(over, lambda outputs, batch: F.cross_entropy(outputs, batch[1]) + other(outputs))
    assert "a named term for each" in judged(loss, ROWS, (ROWS, CLASSES)).reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_that_is_rounded_says_so(dtype: torch.dtype) -> None:
    def rounded(outputs: Any, batch: Any) -> Any:
        return (outputs.square().sum() * 13.7).to(dtype), len(outputs)

    reason = judged(rounded, ROWS, {"labels": CLASSES}).reason
    name = str(dtype).removeprefix("torch.")
    assert reason.endswith(f"for the halves, and it is rounded to {name}. Use a loss that computes it in float32")


@pytest.mark.parametrize(
    ("weight", "precision"),
    [(torch.zeros(B), torch.bfloat16), (torch.ones(B, 2), torch.float32), (torch.ones(2, 3), torch.float32)],
)
def test_a_weight_with_as_many_rows_as_there_are_samples_belongs_to_all(weight: Tensor, precision: torch.dtype) -> None:
    """Weights of two tasks, where no sample has a label of the second one."""

    def tasks(outputs: Any, batch: Any) -> Any:
        first = F.cross_entropy(outputs["rows"], batch["labels"], reduction="sum")
        second = (outputs["rows"][:, 0] * batch["has"]).sum()
        return {
            "first": (first * outputs["weights"].sum().exp(), len(batch["labels"])),
            "second": (second, batch["has"].sum()),
            "penalty": (outputs["weights"].sum(), 1),
        }

    held = nn.Parameter(weight.to(precision))
    outputs = {"rows": ROWS.to(precision), "weights": Of(lambda rows: held)}
    whole, *halves = (
        part._replace(outputs=for_loss(part.outputs))
        for part in (
            run(outputs, {"labels": CLASSES, "has": torch.zeros(B)}, rows) for rows in ([0, 1, 2], [0], [1, 2])
        )
    )
    (some,) = divisions(whole, (halves[0], halves[1]))
    assert some.part(some.tensors[0], 1, raised=False)[0]["weights"].shape == weight.shape
    assert not judge(tasks, whole, (halves[0], halves[1])).reason


def test_a_statistic_of_the_batch_is_that_of_each_half() -> None:
    """One among the outputs, and weights that a `collate_fn` makes of a batch: they couple samples if the loss reads them."""
    outputs = {"rows": ROWS, "mean": Of(lambda rows: ROWS[rows].mean())}
    batch = {"labels": CLASSES, "weights": Of(lambda rows: torch.bincount(CLASSES[rows], minlength=V).float())}
    losses = (
        lambda out, batch: (out["rows"].square().sum(), len(batch["labels"])),
        lambda out, batch: (out["rows"].square().sum() * (1 + out["mean"]), len(batch["labels"])),
        lambda out, batch: (out["rows"].square().sum(1) @ batch["weights"][batch["labels"]], len(batch["labels"])),
    )
    assert [judged(loss, outputs, batch).reason == "" for loss in losses] == [True, False, False]


def test_numbers_of_images_that_begin_anew_are_those_of_each_half() -> None:
    """Boxes of all images in one tensor, behind the number of their image."""
    batch = Of(lambda rows: torch.tensor([[i, row] for i, row in enumerate(rows) for _ in range(1 + row % 3)]))

    def of_boxes(outputs: Any, batch: Any) -> Any:
        errors = outputs[batch[:, 0]] - batch[:, 1:]
        return errors.square().sum(), errors.numel()

    assert judged(of_boxes, ROWS, batch) == LossTrial()


def test_numbers_and_lists_of_a_batch_are_those_of_each_half() -> None:
    def by_number(outputs: Any, batch: Any) -> Any:
        return outputs.square().sum() / batch["number"], len(outputs)

    batch = {"number": Of(len), "parts": [ROWS[i, : i % 3 + 1] for i in range(B)]}
    assert judged(lambda out, batch: (out.square().sum(), batch["number"]), ROWS, batch) == LossTrial()
    assert judged(by_number, ROWS, batch).reason


def test_what_no_dimension_holds_is_left_to_forwards() -> None:
    for outputs in (Of(lambda rows: ROWS[rows].T @ ROWS[rows] @ torch.ones(V, 2 ** len(rows))), [*ROWS]):
        assert judged(lambda out, batch: (ROWS.sum(), 1), outputs, {"x": ROWS}).is_indivisible


def test_a_loss_that_goes_backward_itself_is_no_sum() -> None:
    def eager(outputs: Any, batch: Any) -> Any:
        total = outputs.square().sum()
        total.backward(retain_graph=True)
        return total, len(outputs)

    assert "calls backward()" in judged(eager, ROWS, {"x": ROWS}).reason


def test_a_loss_that_takes_one_size_only_cannot_be_tried() -> None:
    def rigid(outputs: Any, batch: Any) -> Any:
        assert len(outputs) == B, "a batch of another size"
        return outputs.sum(), B

    assert "AssertionError: a batch of another size" in judged(rigid, ROWS, {"x": ROWS}).reason


def writing(outputs: Any, batch: Any) -> Any:
    """A loss that changes a detached output and the labels in place, as one with a padding label of its own does."""
    batch["ids"][batch["ids"] == 0] = -100
    outputs["weights"].mul_(2.0)
    each = F.cross_entropy(outputs["logits"], batch["ids"], reduction="none")
    return (each * outputs["weights"]).sum(), (batch["ids"] != -100).sum()


@pytest.mark.parametrize(("dtype", "graded"), [(torch.float32, (True, False)), (torch.float64, (False, False))])
def test_what_a_loss_writes_in_place_ends_with_its_call(dtype: torch.dtype, graded: tuple[bool, bool]) -> None:
    """The canary compares the same outputs afterwards."""
    outputs = {"logits": ROWS.to(dtype), "weights": torch.rand(B, generator=_draw, dtype=dtype)}
    runs = [
        run(outputs, {"ids": CLASSES}, [*range(B)][rows]) for rows in (slice(None), slice(B // 2), slice(B // 2, B))
    ]
    before = [[tensor.clone() for tensor in tensors_in(samples[:2])] for samples in runs]
    assert not judge(writing, runs[0], (runs[1], runs[2]), graded).reason
    for samples, values in zip(runs, before, strict=True):
        assert all(torch.equal(now, value) for now, value in zip(tensors_in(samples[:2]), values, strict=True))
