"""Each class of `torch.nn.modules.loss` and its function as sums with counts: parts of any sizes give the number that torch gives for all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn.modules import loss as torch_classes

import samestep
from samestep.building.loss import check_results_of, loss_from
from samestep.building.loss_result import Loss, is_plain_sum, loss_result
from samestep.errors import JobError

CLASSES, TOKENS, NOT_LOSSES = 4, 3, {"LinearCrossEntropyLoss"}
"""A class with weights of its own is a model, not a loss."""
Tensors = tuple[Tensor, ...]


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def labels(*sizes: int, ignored: int | None = None) -> Tensor:
    found = torch.randint(CLASSES, sizes)
    return found if ignored is None else found.masked_fill(torch.rand(sizes) < 0.4, ignored)


def signs(*sizes: int) -> Tensor:
    return torch.randint(2, sizes).double() * 2 - 1


@dataclass(frozen=True)
class Case:
    """A loss of torch with tensors that it takes: those of the outputs, and those of the batch."""

    loss: Callable[[], nn.Module]
    outputs: Callable[[int], Tensors]
    targets: Callable[[int], Tensors] = lambda n: (normal(n, CLASSES),)
    order: tuple[int, ...] | None = None
    """Where each tensor stands among the arguments of torch's function; by default as they are."""
    function: Callable[..., Any] | None = None


def rows(n: int) -> Tensors:
    return (normal(n, CLASSES),)


def tokens(n: int) -> Tensors:
    return (normal(n, CLASSES, TOKENS),)


def several(number: int) -> Callable[[int], Tensors]:
    return lambda n: tuple(normal(n, CLASSES) for _ in range(number))


def weight() -> Tensor:
    return torch.rand(CLASSES, dtype=torch.float64) + 0.1


def city_distance(first: Tensor, second: Tensor) -> Tensor:
    return (first - second).abs().sum(-1)


def sequences(n: int) -> Tensors:
    return labels(n, 5).clamp(min=1), torch.full((n,), 12), torch.randint(1, 6, (n,))


CASES: dict[str, Case] = {
    "L1Loss": Case(nn.L1Loss, rows, function=F.l1_loss),
    "MSELoss": Case(nn.MSELoss, rows, function=F.mse_loss),
    "MSELoss of one target": Case(nn.MSELoss, rows, lambda n: (normal(n, 1),)),
    "SmoothL1Loss": Case(lambda: nn.SmoothL1Loss(beta=0.3), rows, function=functools.partial(F.smooth_l1_loss, beta=0.3)),
    "HuberLoss": Case(lambda: nn.HuberLoss(delta=0.3), rows, function=functools.partial(F.huber_loss, delta=0.3)),
    "PoissonNLLLoss": Case(
        lambda: nn.PoissonNLLLoss(full=True), rows, lambda n: (labels(n, 4).double(),), function=functools.partial(F.poisson_nll_loss, full=True)
    ),
    "GaussianNLLLoss": Case(
        nn.GaussianNLLLoss, lambda n: (normal(n, 4), torch.rand(n, 4, dtype=torch.float64) + 0.1), order=(0, 2, 1),
        function=F.gaussian_nll_loss,
    ),
    "KLDivLoss": Case(nn.KLDivLoss, lambda n: (normal(n, 4).log_softmax(-1),), lambda n: (normal(n, 4).softmax(-1),)),
    "KLDivLoss by samples": Case(
        lambda: nn.KLDivLoss(reduction="batchmean", log_target=True),
        lambda n: (normal(n, 3, 4).log_softmax(-1),),
        lambda n: (normal(n, 3, 4).log_softmax(-1),),
        function=functools.partial(F.kl_div, reduction="batchmean", log_target=True),
    ),
    "BCELoss": Case(lambda: nn.BCELoss(weight()), lambda n: (normal(n, 4).sigmoid(),), lambda n: (torch.rand(n, 4).double(),)),
    "BCEWithLogitsLoss": Case(nn.BCEWithLogitsLoss, rows, lambda n: (torch.rand(n, 4),), function=F.binary_cross_entropy_with_logits),
    "BCEWithLogitsLoss by weights": Case(
        lambda: nn.BCEWithLogitsLoss(weight=weight(), pos_weight=weight() * 9), rows, lambda n: (torch.rand(n, 4).double(),)
    ),
    "BCELoss without weights": Case(nn.BCELoss, lambda n: (normal(n, 4).sigmoid(),), lambda n: (torch.rand(n, 4).double(),), function=F.binary_cross_entropy),
    "HingeEmbeddingLoss": Case(nn.HingeEmbeddingLoss, rows, lambda n: (signs(n, CLASSES),), function=F.hinge_embedding_loss),
    "SoftMarginLoss": Case(nn.SoftMarginLoss, rows, lambda n: (signs(n, CLASSES),), function=F.soft_margin_loss),
    "CrossEntropyLoss": Case(nn.CrossEntropyLoss, rows, lambda n: (labels(n, ignored=-100),), function=F.cross_entropy),
    "CrossEntropyLoss of tokens": Case(
        lambda: nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.2), tokens, lambda n: (labels(n, TOKENS),)
    ),
    "CrossEntropyLoss by weights": Case(
        lambda: nn.CrossEntropyLoss(weight(), ignore_index=7, label_smoothing=0.2), tokens, lambda n: (labels(n, TOKENS, ignored=7),)
    ),
    "CrossEntropyLoss of probabilities": Case(
        lambda: nn.CrossEntropyLoss(weight(), label_smoothing=0.1), tokens, lambda n: (normal(n, CLASSES, TOKENS).softmax(1),)
    ),
    "NLLLoss": Case(lambda: nn.NLLLoss(weight()), tokens, lambda n: (labels(n, TOKENS, ignored=-100),)),
    "NLLLoss of labels": Case(
        lambda: nn.NLLLoss(ignore_index=0), tokens, lambda n: (labels(n, TOKENS),), function=functools.partial(F.nll_loss, ignore_index=0)
    ),
    "NLLLoss2d": Case(lambda: torch_classes.NLLLoss2d(ignore_index=0), tokens, lambda n: (labels(n, TOKENS),)),
    "MultiMarginLoss without weights": Case(nn.MultiMarginLoss, rows, lambda n: (labels(n),), function=F.multi_margin_loss),
    "MultiMarginLoss": Case(lambda: nn.MultiMarginLoss(p=2, weight=weight()), rows, lambda n: (labels(n),)),
    "MultiLabelMarginLoss": Case(nn.MultiLabelMarginLoss, rows, lambda n: (labels(n, CLASSES) - (torch.rand(n, 4) < 0.4).long(),), function=F.multilabel_margin_loss),
    "MultiLabelSoftMarginLoss": Case(lambda: nn.MultiLabelSoftMarginLoss(weight()), rows, lambda n: (torch.rand(n, 4).round().double(),)),
    "MultiLabelSoftMarginLoss without weights": Case(
        nn.MultiLabelSoftMarginLoss, rows, lambda n: (torch.rand(n, 4).round().double(),), function=F.multilabel_soft_margin_loss
    ),
    "CosineEmbeddingLoss": Case(
        lambda: nn.CosineEmbeddingLoss(margin=0.2), several(2), lambda n: (signs(n),), function=functools.partial(F.cosine_embedding_loss, margin=0.2)
    ),
    "MarginRankingLoss": Case(
        lambda: nn.MarginRankingLoss(margin=0.2), several(2), lambda n: (signs(n, CLASSES),), function=functools.partial(F.margin_ranking_loss, margin=0.2)
    ),
    "TripletMarginLoss": Case(
        lambda: nn.TripletMarginLoss(swap=True), several(3), lambda n: (), function=functools.partial(F.triplet_margin_loss, swap=True)
    ),
    "TripletMarginWithDistanceLoss": Case(
        lambda: nn.TripletMarginWithDistanceLoss(distance_function=city_distance),
        several(3),
        lambda n: (),
        function=functools.partial(F.triplet_margin_with_distance_loss, distance_function=city_distance),
    ),
    "CTCLoss": Case(
        lambda: nn.CTCLoss(zero_infinity=True),
        lambda n: (normal(12, n, CLASSES).log_softmax(-1),),
        sequences,
        function=functools.partial(F.ctc_loss, zero_infinity=True),
    ),
}  # fmt: skip


def test_each_class_of_torch_has_a_case() -> None:
    assert {*torch_classes.__all__} - NOT_LOSSES <= {name.partition(" ")[0] for name in CASES}


def test_each_function_of_torch_has_a_case() -> None:
    others = {"cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}
    names = {name for name in dir(F) if name.endswith("_loss")} | others
    assert names == {getattr(case.function, "func", case.function).__name__ for case in CASES.values() if case.function}  # type: ignore[union-attr]


def cut(tensors: Tensors, start: int, end: int, dim: int = 0) -> Tensors:
    return tuple(one.narrow(dim, start, end - start) for one in tensors)


def of_torch(case: Case, loss: Callable[..., Tensor], outputs: Tensors, targets: Tensors) -> Tensor:
    tensors = (*outputs, *(one.to(outputs[0].dtype) if one.is_floating_point() else one for one in targets))
    return loss(*(tensors[place] for place in case.order or range(len(tensors))))


@pytest.mark.filterwarnings(
    "ignore"
)  # of torch's about old classes, means of divergences and targets that are broadcast
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**20), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), is_sum=st.booleans())
@pytest.mark.parametrize("name", CASES)
def test_parts_of_any_sizes_give_the_number_of_torch(name: str, seed: int, sizes: list[int], is_sum: bool) -> None:
    torch.manual_seed(seed)
    case = CASES[name]
    module = case.loss()
    if is_sum:
        module.reduction = "sum"
    outputs = tuple(one.detach().requires_grad_() for one in case.outputs(sum(sizes)))
    targets = case.targets(sum(sizes))
    expected = of_torch(case, module, outputs, targets)
    loss, start, sums, counts = loss_from(module), 0, [], []
    dim = 1 if "CTC" in name else 0
    for size in sizes:
        of_part, to_part = cut(outputs, start, start + size, dim), cut(targets, start, start + size)
        found = loss_result(loss(of_part[0] if len(of_part) == 1 else of_part, (torch.zeros(size), *to_part)))
        sums.append(found.only[0])
        counts.append(found.only[1].double())
        start += size
    assert is_plain_sum(loss) is is_sum
    total = torch.stack(sums).sum() / (1 if is_sum else torch.stack(counts).sum())
    if not torch.isfinite(expected):  # torch's mean over nothing
        assert not torch.isfinite(total)
        return
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-12)
    expected, total = (torch.cat([g.flatten() for g in torch.autograd.grad(one, outputs)]) for one in (expected, total))
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.function])
def test_a_function_is_as_its_class(name: str) -> None:
    case = CASES[name]
    outputs, targets = case.outputs(5), case.targets(5)
    given_outputs, batch = outputs[0] if len(outputs) == 1 else outputs, (torch.zeros(5), *targets)
    for one, other in zip(
        loss_from(case.loss())(given_outputs, batch), loss_from(case.function)(given_outputs, batch), strict=True
    ):
        assert torch.equal(one, other)


def test_inputs_have_names_in_dicts() -> None:
    case = CASES["CTCLoss"]
    (outputs,), (targets, lengths, of_targets) = case.outputs(3), case.targets(3)
    batch = {"x": torch.zeros(3), "labels": targets, "input_lengths": lengths, "target_lengths": of_targets}
    loss = loss_from(case.loss())
    assert torch.equal(loss({"logits": outputs}, batch)[0], loss(outputs, (None, targets, lengths, of_targets))[0])
    first, second, target = normal(3, 4), normal(3, 4), signs(3)
    loss = loss_from(nn.CosineEmbeddingLoss())
    assert torch.equal(
        loss({"input1": first, "input2": second}, {"labels": target})[0], loss((first, second), (None, target))[0]
    )


def test_a_class_of_torch_may_be_named_without_options() -> None:
    outputs, batch = normal(3, 4), (None, normal(3, 4))
    for named in (nn.MSELoss, "torch.nn:MSELoss", "torch.nn.functional:mse_loss", "mse"):
        total, count = loss_result(loss_from(named)(outputs, batch))
        assert total / count == F.mse_loss(outputs, batch[1])


def test_an_option_that_changes_later_counts() -> None:
    criterion = nn.CrossEntropyLoss()
    loss, outputs, batch = loss_from(criterion), normal(6, CLASSES), (None, labels(6))
    criterion.label_smoothing, criterion.weight = 0.3, weight()
    total, count = loss(outputs, batch)
    torch.testing.assert_close(total / count, criterion(outputs, batch[1]))


class Shifted(nn.CrossEntropyLoss):
    """A class of the user's with a forward of its own."""

    def forward(self, outputs: Any, batch: Any) -> Any:
        return super().forward(outputs, batch[1]) * len(batch[1]), len(batch[1])


class Renamed(nn.CrossEntropyLoss):
    """A class of the user's with torch's forward."""


def test_a_class_of_the_users_own_is_torchs_unless_it_has_a_forward() -> None:
    outputs, batch = normal(6, CLASSES), (None, labels(6))
    assert isinstance(loss_from(Shifted()), Shifted)
    for loss in (Shifted(), Renamed()):
        total, count = loss_result(loss_from(loss)(outputs, batch))
        torch.testing.assert_close(total / count, F.cross_entropy(outputs, batch[1]))


UNKNOWN: dict[str, tuple[Any, str]] = {
    "losses of elements": (nn.MSELoss(reduction="none"), "loss=MSELoss is reduction='none'"),
    "losses of elements by a function": (functools.partial(F.mse_loss, reduction="none"), "reduction='none'"),
    "an old option": (functools.partial(F.mse_loss, size_average=False), "an option size_average"),
    "a layer": (nn.Linear(2, 2), "loss=Linear is a loss of torch with an unknown count"),
    "a function without a count": (F.linear, "loss=linear"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_loss_of_torch_without_a_known_count_is_rejected_by_name(name: str) -> None:
    loss, words = UNKNOWN[name]
    with pytest.raises(JobError, match=words):
        loss_from(loss)


def test_shapes_that_pair_samples_with_all_others_are_rejected() -> None:
    for loss in (nn.MSELoss(), nn.L1Loss(), F.smooth_l1_loss, nn.HuberLoss()):
        with pytest.raises(JobError, match=r"pair each sample with all others. Use equal shapes"):
            loss_from(loss)(normal(4, 1), (None, normal(4)))


# -- means of one's own ----------------------------------------------------------------------------


def own_mean(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"], ignore_index=-1)


@pytest.mark.parametrize("sizes", [(4,), (2, 1, 1)])
def test_a_mean_of_ones_own_is_weighted_by_its_count(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    outputs, targets = normal(4, CLASSES, 9), labels(4, 9, ignored=-1)
    targets[0] = -1  # a part in which nothing counts
    loss = samestep.mean_over("tokens", own_mean, ignore_index=-1)
    parts = zip(outputs.split(sizes), targets.split(sizes), strict=True)
    found = [loss_result(loss(one, {"labels": other})).only for one, other in parts]
    total = torch.stack([one for one, _ in found]).sum() / torch.stack([other for _, other in found]).sum()
    torch.testing.assert_close(total, own_mean(outputs, {"labels": targets}))


def scalar(outputs: Any, batch: Any) -> Tensor:
    return outputs.mean()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "another word": (lambda: samestep.mean_over("batches", scalar), '"samples" or "tokens"'),
    "no function": (lambda: samestep.mean_over("samples", 3), "a function of"),
    "a word that no forward has": (
        lambda: samestep.mean_over("tokens", "model", ignore_index=0),
        "without an ignore_index",
    ),
    "elements": (lambda: samestep.mean_over("samples", lambda o, b: o)(normal(3), (None,)), "a tensor of one number"),
    "no labels": (lambda: samestep.mean_over("tokens", scalar)(normal(3), {"x": normal(3)}), "it has none"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mean_over_something_else_is_rejected(name: str) -> None:
    made, words = WRONG[name]
    with pytest.raises(JobError, match=words):
        made()


@pytest.mark.parametrize("value", [scalar, lambda o, b: o.sum().item(), lambda o, b: o.mean()[None]])
def test_a_scalar_is_answered_by_mean_over_in_the_first_sentence(value: Loss) -> None:
    with pytest.raises(JobError) as error:
        check_results_of(value)(normal(3, 2), (None,))
    assert 'samestep.mean_over("samples", loss)' in str(error.value).partition(". ")[0]


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a pair": lambda total, count: (total, count),
    "with values": lambda total, count: (total, count, {"seen": (1.0, 1)}),
    "terms": lambda total, count: {"first": (total, 4), "second": (total, count)},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_count_with_a_gradient_is_rejected(form: str) -> None:
    total, weights = normal(4).requires_grad_().sum(), normal(4).requires_grad_().sigmoid()
    with pytest.raises(JobError, match=r"the count of the loss has a gradient.*Use count\.detach\(\)"):
        loss_result(FORMS[form](total, weights.sum()))
    assert not any(
        count.requires_grad for _, count in loss_result(FORMS[form](total, weights.sum().detach())).terms.values()
    )
