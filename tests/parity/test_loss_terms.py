"""Losses of several terms, and values to report, are those of a plain loop with the whole batch in every layout."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.building.loss_result import loss_result
from samestep.errors import JobError, UnprovenError
from samestep.layout import Layout
from samestep.runtime.ledger import Ledger
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from samestep.training import metrics
from tests.laboratory import in_loop, job_of
from tests.models import Plain, Tokens
from tests.plain import assert_trained, train_plainly, whole_batches
from tests.pool import pool

STEPS = 3
JOB = job_of("float64", STEPS, optimizer={"clip_norm": 0.5})


def counted(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of tokens, whether each counts, and whether it is predicted."""
    labels = batch["labels"]
    each = F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none")
    return each, labels != -100, (outputs.argmax(-1) == labels)


def with_accuracy(outputs: Tensor, batch: Any) -> Any:
    each, counts, is_right = counted(outputs, batch)
    return each.sum(), counts.sum(), {"accuracy": (is_right.sum(), counts.sum())}


def like_detr(outputs: Tensor, batch: Any) -> Any:
    """Three terms with counts of their own: tokens, rare tokens of which many micro-batches have none, and samples."""
    each, counts, is_right = counted(outputs, batch)
    rare = batch["labels"] < 7
    terms = {
        "classes": (each.sum(), counts.sum()),
        "boxes": (0.5 * (outputs.square().mean(-1) * (rare & counts)).sum(), (rare & counts).sum()),
        "samples": (2.0 * outputs.mean((1, 2)).exp().sum(), len(outputs)),
    }
    return terms, {"accuracy": ((is_right & counts).sum(), counts.sum())}


def with_an_empty_term(outputs: Tensor, batch: Any) -> Any:
    """One term never counts anything, and one is left out where nothing counts."""
    each, counts, _ = counted(outputs, batch)
    terms = {"tokens": (each.sum(), counts.sum()), "none": (outputs.sum() * 0.0, 0)}
    rare = batch["labels"] == 3
    return terms | {"threes": (each[rare].sum(), rare.sum())}


def with_a_penalty(outputs: Tensor, batch: Any) -> Any:
    """One term, and one value, is the same for any samples."""
    each, counts, _ = counted(outputs, batch)
    penalty = outputs.new_tensor(0.25)
    return {"tokens": (each.sum(), counts.sum()), "penalty": (penalty, 1)}, {"scale": (2 * penalty, 1)}


def count_that_outputs_decide(outputs: Tensor, batch: Any) -> Any:
    """Only what is not predicted yet counts in the second term."""
    each, counts, _ = counted(outputs, batch)
    hard = counts & (outputs.argmax(-1) % 3 != 0)
    return {"tokens": (each.sum(), counts.sum()), "hard": ((each * hard).sum(), hard.sum())}


def weights_in_the_order_of_outputs(outputs: Tensor, batch: Any) -> Any:
    """The count is a sum of weights, as of DETR's classes: outputs decide on its order, and so on its last bits."""
    each, counts, _ = counted(outputs, batch)
    weights = (0.1 + 0.7 * (batch["labels"] % 3).double()) * counts
    order = outputs.amax(-1).flatten().argsort()
    return {
        "classes": ((each * weights).sum(), weights.flatten()[order].cumsum(0)[-1]),
        "tokens": (0.5 * each.sum(), counts.sum()),
    }


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "accuracy": with_accuracy,
    "like DETR": like_detr,
    "an empty term": with_an_empty_term,
    "a penalty": with_a_penalty,
    "order of weights": weights_in_the_order_of_outputs,
    "outputs decide": count_that_outputs_decide,
    "in two passes": samestep.whole_batch(count_that_outputs_decide),
}


def build() -> nn.Module:
    torch.manual_seed(4)
    return Plain()


adam = functools.partial(torch.optim.Adam, lr=0.01)


Followed = tuple[list[StepReport], dict[str, Tensor]]


def follow(run: Run) -> list[StepReport]:
    reports = []
    for batch in samestep.batches(Tokens(), JOB):
        with Ledger() as ledger:
            reports.append(run.step(batch))
        if batch.step == STEPS - 1:  # nothing is tried any more
            assert ledger.rows == run.program.ledger(group_of=run.assembly.parallel.mesh.group_of)
    return reports


def parallel(rank: int, world: int, layout: str, kind: str) -> Followed:
    """Train in a layout."""
    run = samestep.parallelize(build(), LOSSES[kind], adam, layout=layout, job=in_loop(JOB))
    return follow(run), run.state_dict(on_every_rank=True)


Means = dict[str, float]


@functools.cache
def plain(kind: str) -> tuple[list[float], dict[str, Tensor], list[tuple[Means, Means]]]:
    """One device with the whole batch: the losses, the weights, and the means of terms and values."""
    model, named = build().double(), []

    def loss(samples: Any) -> Any:
        found = loss_result(LOSSES[kind](model(samples["input_ids"]), samples))
        named.append((means_of(found.terms), means_of(found.values)))
        return found.terms

    return *train_plainly(model, whole_batches(Tokens(), JOB), loss, adam([*model.parameters()]), 0.5), named


def means_of(sums: dict[str, Any]) -> Means:
    each = {name: (float(total.detach()), float(count)) for name, (total, count) in sums.items() if name}
    return {name: total / count if count else math.nan for name, (total, count) in each.items()}


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("dp=2 microbatch=3", "accuracy"),
        ("pp=2 zero=1 microbatch=2", "like DETR"),
        ("dp=2 zero=3 microbatch=1", "an empty term"),
        ("tp=2", "a penalty"),
        ("dp=2 microbatch=1", "order of weights"),
        ("dp=2 zero=3", "outputs decide"),
        ("dp=2 microbatch=2", "in two passes"),
        pytest.param("pp=2 microbatch=2", "in two passes", marks=NIGHTLY),
        pytest.param("pp=2 microbatch=2", "order of weights", marks=NIGHTLY),
        ("tp=2", "outputs decide"),
    ],
)
def test_terms_and_values_are_those_of_a_plain_loop(layout: str, kind: str) -> None:
    losses, weights, named = plain(kind)
    ranks = pool(Layout(layout).world_size).run(parallel, layout, kind)
    assert_trained(
        (([report.loss for report in reports], state) for reports, state in ranks), (losses, weights), 1e-7, 1e-9
    )
    for reports, _ in ranks:
        for report, (terms, values) in zip(reports, named, strict=True):
            assert report.terms == pytest.approx(terms, rel=1e-9, nan_ok=True)
            assert report.values == pytest.approx(values, rel=1e-9)


def test_a_count_that_outputs_decide_is_refused_in_several_microbatches() -> None:
    with pytest.raises(UnprovenError, match=r"the count of hard depends on the outputs.*Use one micro-batch a rank"):
        pool(2).run(parallel, "dp=2 microbatch=2", "outputs decide")


def test_forms_of_a_result() -> None:
    total = torch.tensor(3.0, requires_grad=True)
    for returned in (
        (total, 2),
        [total, torch.tensor([2])],
        (total, 2, {}),
        {"a": (total, 2)},
        ({"a": (total, 2)}, {}),
    ):
        found = loss_result(returned)
        assert [(one.item(), count.item()) for one, count in found.terms.values()] == [(3.0, 2.0)]
        assert found.sums.requires_grad
        assert loss_result(found) is found
    found = loss_result((total, 2, {"right": (1, 2), "seen": (total, 4)}))
    assert not any(one.requires_grad for one, _ in found.values.values())
    like = torch.zeros((), dtype=torch.float64)
    names = loss_result(({"a": (total, 2), "b": (total, 4)}, {"v": (1, 2)})).names
    assert names.means([*map(float, loss_result({"b": (total, 4)}).numbers(names, like))]) == (
        pytest.approx({"a": math.nan, "b": 0.75}, nan_ok=True),
        pytest.approx({"v": math.nan}, nan_ok=True),
    )
    with pytest.raises(JobError, match="returned the term 'c'; when the model was traced, it returned 'a', 'b'"):
        loss_result({"c": (total, 2)}).numbers(names, like)


@pytest.mark.parametrize(
    ("returned", "form"),
    [
        ({}, r"\{\}"),
        ({"a": torch.zeros(())}, r"\{'a': a tensor \[\]\}"),
        ({"a": (torch.zeros(()), -1)}, r"\{'a': \(a tensor \[\], a int\)\}"),
        ({3: (torch.zeros(()), 1)}, r"\{3: "),
        ((torch.zeros(()), 1, 2), r"\(a tensor \[\], a int, a int\)"),
        ((torch.zeros(()), 1, {"a": 2}), r"\(a tensor \[\], a int, \{'a': a int\}\)"),
        (({"a": (torch.zeros(()), 1)}, {"b": (torch.zeros(2), 1)}), r"\{'b': \(a tensor \[2\], a int\)\}"),
    ],
)
def test_other_forms_are_refused_in_one_line(returned: Any, form: str) -> None:
    with pytest.raises(JobError, match=f"the loss returned .*{form}.*. Use \\(sum, count\\)"):
        loss_result(returned)


def test_one_number_is_refused_with_the_two_means_that_it_may_be() -> None:
    with pytest.raises(
        JobError, match=r"the loss returned one number.*mean_over\(\"samples\".*mean_over\(\"tokens\".*\(sum, count\)"
    ):
        loss_result(torch.zeros(()))


def test_metrics_have_terms_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = StepReport(
        step=1, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, step_s=0.1, tokens_per_s=80.0, memory_bytes=1,
        terms={"cls": 0.5, "box": math.nan}, values={"accuracy": 0.25},
    )  # fmt: skip
    written = metrics.Metrics(tmp_path, 0)
    written.write(report)
    written.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["terms"], row["values"]) == ({"cls": 0.5, "box": None}, {"accuracy": 0.25})
    scalars = metrics.scalars_of(report, None)
    assert (scalars["terms/cls"], scalars["values/accuracy"]) == (0.5, 0.25)
    metrics.Screen(0, 1).show(report)
    assert "cls 0.5000  box nan  accuracy 0.2500" in capsys.readouterr().out


class Weighing(nn.Module):
    """Two heads, and their weights as an output that has as many numbers as a trace may have samples."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 8), norm(8), nn.Linear(8, 5)
        self.spread = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.norm(self.embed(input_ids).mean(1))), self.spread


def _of_known_labels(outputs: tuple[Tensor, Tensor], batch: Any) -> Any:
    """Two terms of the samples whose labels are known, which a trace cannot pick, weighed by what the model learns."""
    logits, spread = outputs
    first = batch["labels"][:, 0]
    known = first % 2 == 0
    return {
        "class": ((-spread[0]).exp() * F.cross_entropy(logits[known], first[known] % 5, reduction="sum"), known.sum()),
        "size": ((-spread[1]).exp() * logits[~known].square().sum(), (~known).sum()),
        "spread": (spread.sum(), 1),
    }


def _of_real_outputs(outputs: tuple[Tensor, Tensor], batch: Any) -> Any:
    """Terms that a trace does not find, since the loss fails on what is no output of the model."""
    assert outputs[1].min() < 0, "weights as they begin"
    return _of_known_labels(outputs, batch)


def _weighed(norm: type[nn.Module], loss: Callable[..., Any], layout: str) -> list[float]:
    torch.manual_seed(1)
    job = job_of("float64", 2)
    run = samestep.parallelize(Weighing(norm), loss, adam, layout=layout, job=in_loop(job))
    return [run.step(batch).loss for batch in samestep.batches(Tokens(), job)]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_terms_of_a_loss_that_picks_samples_are_found(norm: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model, batches = Weighing(norm).double(), whole_batches(Tokens(), job_of("float64", 2))
    expected, _ = train_plainly(
        model, batches, lambda batch: _of_known_labels(model(batch["input_ids"]), batch), adam([*model.parameters()])
    )
    assert _weighed(norm, _of_known_labels, "dp=1") == pytest.approx(expected, rel=1e-9)


def test_terms_that_no_trace_has_found_are_refused_by_name() -> None:
    with pytest.raises(JobError, match="the loss returned the term 'class', which is not known from the trace"):
        _weighed(nn.LayerNorm, _of_real_outputs, "dp=1")
