"""The loss that a forward returns is, in every layout, what one device gets from the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.building.model_loss import Rule, returned_loss
from samestep.errors import DataError, JobError, UnprovenError
from samestep.layout import Layout
from samestep.runtime.axes.precision import RaiseIslands
from samestep.runtime.run_batches import check_labels
from tests.laboratory import combinations, in_loop, job_of, losses_of_steps, without
from tests.models import LENGTH, VOCABULARY, Plain, Tokens
from tests.plain import Trained, assert_trained, train_in_layout, train_plainly, whole_batches
from tests.pool import pool

STEPS = 3
JOB = job_of("float64", STEPS, optimizer={"clip_norm": 0.5})


class Aligned(Tokens):
    """Labels that are the inputs, of which some do not count: the models of transformers shift them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.input_ids[index].clone()
        labels[: index % LENGTH] = -100
        return {"input_ids": self.input_ids[index], "labels": labels}


class Given(Tokens):
    """Samples as a tuple of inputs and targets."""

    def __getitem__(self, index: int) -> Any:
        return self.input_ids[index], self.labels[index]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def t5() -> nn.Module:
    """Return a model of which a rank of tp=2 has one head, so that a bias of all heads would be broadcast."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(6)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


class Targets(Tokens):
    """Labels of another name, of which -1 does not count, from the fourth sample on (nanochat)."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        targets = self.labels[index].clamp(min=0)
        targets[: max(0, index % LENGTH - 3)] = -1
        return {"idx": self.input_ids[index], "targets": targets}


class Padded(Tokens):
    """Tokens that are inputs and labels, with padding behind (x-transformers)."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.input_ids[index].clone()
        x[LENGTH - index % 3 :] = -100
        return {"x": x}


class Masked(Tokens):
    """Tokens with a mask of those that the loss counts, as many of each of the first samples."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.zeros(LENGTH, dtype=torch.float64)
        mask[: 2 if index < 8 else 1 + index % 3] = 1.0
        return {"input_ids": self.input_ids[index], "targets": self.labels[index].clamp(min=0), "mask": mask}


class Sparse(Masked):
    """A mask of which few samples have a token, so that a part of the first batch has none, and a sum fits as well."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.zeros(LENGTH, dtype=torch.bool)
        mask[: 1 if index < 8 else index % LENGTH] = index % 4 == 3 or index > 11
        return {**super().__getitem__(index), "mask": mask}


class Behind(Plain):
    """The loss behind the logits (nanoGPT)."""

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(idx)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Wrapped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        inputs, targets = x[:, :-1], x[:, 1:]
        return F.cross_entropy(super().forward(inputs.clamp(min=0)).transpose(1, 2), targets)


class Counting(Plain):
    def forward(self, input_ids: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        each = F.cross_entropy(super().forward(input_ids).transpose(1, 2), targets, reduction="none")
        return (each * mask).sum() / mask.sum().clamp(min=1)


def seeded(model: type[Plain]) -> nn.Module:
    torch.manual_seed(8)
    return model(blocks=2)


class OwnLoss(Plain):
    """A forward that returns its loss in one of several forms."""

    form = "mean"

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = super().forward(input_ids)
        if self.form == "mean":
            return logits.square().mean()
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        if self.form == "sum":
            return each.sum()
        if self.form == "count":
            return each.sum(), (labels != -100).sum()
        if self.form == "tuple":
            return each.sum() / (labels != -100).sum(), logits
        weights = 1.0 + (input_ids % 3)
        return {"logits": logits, "loss": (each * weights).sum() / weights.sum()}


def own(form: str) -> nn.Module:
    torch.manual_seed(8)
    model = OwnLoss(blocks=2)
    model.form = form
    return model


def weights_of(batch: Any) -> Tensor:
    return (1.0 + batch["input_ids"] % 3).sum()


Kind = tuple[Callable[[], nn.Module], type[Tokens], Any, Rule]
KINDS: dict[str, Kind] = {
    "causal": (llama, Aligned, "model", Rule.NEXT_LABELS),
    "mean": (functools.partial(own, "mean"), Tokens, "model", Rule.SAMPLES),
    "seq2seq": (t5, Aligned, "model", Rule.LABELS),
    "sum": (functools.partial(own, "sum"), Given, "model", Rule.SUM),
    "count": (functools.partial(own, "count"), Tokens, "model", Rule.RETURNED),
    "behind": (functools.partial(seeded, Behind), Targets, "model", Rule.LABELS),
    "own inputs": (functools.partial(seeded, Wrapped), Padded, "model", Rule.NEXT_LABELS),
    "mask": (functools.partial(seeded, Counting), Masked, "model", Rule.LABELS),
    "sparse mask": (functools.partial(seeded, Counting), Sparse, "model", Rule.LABELS),
    "stated tokens": (functools.partial(own, "tuple"), Tokens, samestep.mean_over("tokens", "model"), Rule.LABELS),
    "given": (functools.partial(own, "weighted"), Tokens, samestep.model_loss(weights_of), Rule.COUNT),
}


adam = functools.partial(torch.optim.Adam, lr=0.01)


Found = tuple[list[float], dict[str, Tensor], str, float]


def parallel(rank: int, world: int, layout: str, kind: str) -> Found:
    """Train in a layout."""
    build, dataset, loss, _ = KINDS[kind]
    run = samestep.parallelize(build(), loss, adam, layout=layout, job=in_loop(JOB))
    trained = train_in_layout(lambda: run, lambda first: samestep.batches(dataset(), JOB, first_step=first))
    return *trained, str(run._own.source.loss.rule), run.evaluate(dataset())["loss"]


def loss_of(model: nn.Module, samples: Any) -> Tensor:
    with RaiseIslands():
        loss, count = returned_loss(model(**samples) if isinstance(samples, dict) else model(*samples))
    return loss if count is None else loss / count


@functools.cache
def plain(kind: str) -> tuple[Trained, float]:
    """One device: what the forward returns for the whole batch."""
    build, dataset, _, rule = KINDS[kind]
    model = build().double()
    trained = train_plainly(
        model, whole_batches(dataset(), JOB), functools.partial(loss_of, model), adam([*model.parameters()]), 0.5
    )
    everything = next(iter(samestep.batches(dataset(), JOB))).samples(range(len(dataset())))
    with torch.no_grad():
        whole = loss_of(model, everything).item()
    return trained, whole / len(
        dataset()
    ) if rule is Rule.SUM else whole  # of an evaluation it is the mean over the samples


def assert_plain(kind: str, layout: str) -> None:
    trained, whole = plain(kind)
    ranks = pool(Layout(layout).world_size).run(parallel, layout, kind)
    assert_trained(ranks, trained, 1e-7, 1e-8)
    for *_, rule, mean in ranks:
        assert rule == str(KINDS[kind][3])
        assert mean == pytest.approx(whole, rel=1e-7)


LAYOUTS = ["dp=2 microbatch=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4", "dp=2 zero=1 microbatch=3"]


CASES = combinations(LAYOUTS, [*KINDS])


@pytest.mark.parametrize(
    ("layout", "kind"),
    [*CASES, *(("dp=1 microbatch=3", kind) for kind in without(KINDS, CASES)[1:] if isinstance(kind, str))],
)
def test_the_loss_of_a_forward_is_that_of_a_plain_loop(layout: str, kind: str) -> None:
    assert_plain(kind, layout)


def refused(rank: int, world: int, layout: str, form: str, loss: Any) -> None:
    run = samestep.parallelize(functools.partial(own, form), loss, adam, layout=layout, job=in_loop(JOB))
    losses_of_steps(run, Tokens(), 0, 1)


@pytest.mark.parametrize(("form", "mean_over"), [("weighted", None), ("mean", "tokens"), ("tuple", "samples")])
def test_what_fits_nothing_is_refused_with_the_ways_out(form: str, mean_over: Any) -> None:
    """A mean that is stated is tried as one that is found."""
    loss = samestep.mean_over(mean_over, "model") if mean_over else "model"
    with pytest.raises(
        UnprovenError, match=r"neither their sum nor their mean .*Set loss = samestep\.model_loss\(count="
    ):
        pool(2).run(refused, "dp=2", form, loss)


class NextTokens(Tokens):
    label_convention = "next"


def test_labels_are_not_shifted_twice_and_outputs_without_a_loss_are_refused() -> None:
    with pytest.raises(DataError, match=r'labels of this source are the next token.*"cross_entropy"'):
        check_labels(llama(), samestep.model_loss(), JOB, NextTokens())
    check_labels(llama(), samestep.model_loss(), JOB, Aligned())
    check_labels(own("mean"), samestep.model_loss(), JOB, NextTokens())
    with pytest.raises(JobError, match=r'loss = "model": the forward returned a tensor \[2, 3\], and no loss'):
        returned_loss(torch.zeros(2, 3))


class Heads(Plain):
    """A forward that adds up means over unlike counts: of tokens with -100, and of samples, of which some do not count."""

    def forward(self, input_ids: Tensor, **labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(input_ids)
        whole = torch.stack(
            [
                F.cross_entropy(*head(name, logits, one), ignore_index=IGNORED.get(name, -100))
                for name, one in labels.items()
            ]
        )
        return {"loss": whole.sum() / 2, "logits": logits}


IGNORED = {"start": LENGTH, "end": LENGTH}


def head(name: str, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is predicted of each label, and the labels."""
    if name in ("tags", "labels"):
        return logits.transpose(1, 2), labels
    if name in IGNORED:
        return logits[..., len(name)], labels
    return logits.mean(1), labels


class ManyLabels(Tokens):
    """Tokens with the labels of the heads that are asked for."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, tags = self.input_ids[index], self.labels[index].clone()
        tags[: index % LENGTH] = -100
        known = {
            "labels": tags,
            "tags": tags,
            "start": torch.tensor(LENGTH if index % 3 == 1 else index % LENGTH),
            "end": torch.tensor(LENGTH if index % 5 == 0 else 1),
            "next_sentence_label": ids[0] % 2,
            "kind": ids[1] % 3 if index % 4 else torch.tensor(-100),
        }
        return {"input_ids": ids, **{name: known[name] for name in self.names}}


def by_terms(outputs: dict[str, Tensor], batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """The way out: each head's sum with its count."""
    found = {}
    for name, labels in batch.items():
        if name != "input_ids":
            ignored = IGNORED.get(name, -100)
            each = F.cross_entropy(*head(name, outputs["logits"], labels), ignore_index=ignored, reduction="sum")
            found[name] = each / 2, labels.ne(ignored).sum()
    return found


def train_heads(rank: int, world: int, names: list[str], loss: Any, layout: str) -> list[float]:
    run = samestep.parallelize(functools.partial(seeded, Heads), loss, adam, layout=layout, job=in_loop(JOB))
    return losses_of_steps(run, ManyLabels(*names), 0, 3)


HEADS = [["start", "end"], ["labels", "next_sentence_label"], ["tags", "kind"]]


@pytest.mark.parametrize(
    "names", [HEADS[0], *(pytest.param(names, marks=pytest.mark.nightly) for names in HEADS[1:])], ids="+".join
)
def test_heads_of_unlike_counts_are_refused_with_their_terms_which_are_equal(names: list[str]) -> None:
    terms = ", ".join(rf'"{name}": \(sum, count\)' for name in names)
    with pytest.raises(UnprovenError, match=rf"{', '.join(names)}, with a count of its own, .*Use .*{{{terms}}}"):
        pool(1).run(train_heads, names, "model", "dp=1 microbatch=4")
    whole = pool(1).run(train_heads, names, "model", "dp=1")[0]
    assert pool(2).run(train_heads, names, by_terms, "dp=2 microbatch=2")[0] == pytest.approx(whole, rel=1e-9)
