"""A sample and a weight's update are done once more in steps under watch: what differs is named, what is clean stays as it is."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.building.loss import cross_entropy
from samestep.datasets import batches
from samestep.errors import RepeatError, UnprovenError
from samestep.independence.roundings import nudge_outputs
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.ledger import Ledger
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from tests import models
from tests.covering import daily
from tests.laboratory import job_of, make_run, on_ranks, source_of
from tests.models import MODELS, VOCABULARY, Tokens
from tests.pool import telling

# -- models that become wrong while they train, which no trace can see -----------------------------------------------------


class Late(nn.Module):
    """A plain model whose `odd` code acts once `is_late` is set."""

    is_late = False

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embed(input_ids)))
        return self.head(self.odd(x) if self.is_late else x)

    def odd(self, x: Tensor) -> Tensor:
        return x


class OwnGenerator(Late):
    def odd(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(NOISE.normal(size=x.shape), dtype=x.dtype)


class Centred(Late):
    def odd(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Crowded(Late):
    """At most half of the batch's tokens are taken, those with the largest scores."""

    def odd(self, x: Tensor) -> Tensor:
        scores = x.sum(-1)
        return x * (scores >= scores.flatten().median())[..., None]


class Branching(Late):
    def odd(self, x: Tensor) -> Tensor:
        return x * 2 if len(x) > 1 else x


class Counting(Late):
    def odd(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Remembering(Late):
    def odd(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return x / self.seen


class Harmless(Late):
    """Keeps things that no other forward's outputs depend on, or that one forward a step may keep."""

    def odd(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.table = torch.arange(x.shape[1], dtype=x.dtype)
        self.history = [*getattr(self, "history", []), float(x.detach().sum())][-2:]
        return x + self.table[:, None]


class TokensFirst(Late):
    """Outputs and hidden states [tokens, samples, features], in another dimension than the labels."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids.T).transpose(0, 1)


class SeveralOutputs(Late):
    def forward(self, input_ids: Tensor) -> Any:
        logits = super().forward(input_ids)
        return {"logits": logits, "rows": logits.flatten(0, 1), "first": logits.transpose(0, 1), "size": logits.mean()}


class TakesNoSampleAlone(Late):
    def odd(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("a batch has at least two samples")
        return x


class BatchNormed(Late):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.mix(self.embed(input_ids)).transpose(1, 2)).transpose(1, 2))


NOISE = np.random.default_rng(7)
NOISE_OF = {"loss": 0.0, "data": 0.0, "update": 0.0}
"""What draws from it, once it is not 0."""
OURS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        OwnGenerator, Centred, Crowded, Branching, Counting, Remembering, Harmless, TokensFirst, SeveralOutputs,
        TakesNoSampleAlone, BatchNormed,
    )
}  # fmt: skip
MODELS |= OURS


class Drawing(Tokens):
    """Samples that come to have noise of their own: other tokens each time one is read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        added = int(NOISE.integers(1, 30)) if NOISE_OF["data"] else 0
        return {**sample, "input_ids": (sample["input_ids"] + added) % VOCABULARY}


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if NOISE_OF["update"]:
                    param.add_(torch.as_tensor(NOISE.normal(size=param.shape), dtype=param.dtype), alpha=1e-3)


class Normed(torch.optim.SGD):
    """Treats every element by itself, until another hand says otherwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and NOISE_OF["update"]:
                    param.grad /= param.grad.norm() + 1e-3
        super().step()


@pytest.fixture(scope="module", autouse=True)
def _everything_is_traced_first(request: pytest.FixtureRequest) -> None:
    """Trace the models of the tests that were chosen before ranks are forked, once, to inherit them."""
    for item in request.session.items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path == request.path and {"model", "layout"} <= params.keys():
            source_of(params["model"], Layout(params["layout"]), watched(1))


def watched(every: int, precision: str = "float32", steps: int = 3, **tables: Any) -> Job:
    return job_of(precision, steps, train={"watch_every": every}, **tables)


def told(
    rank: int,
    world: int,
    model: str,
    layout: str,
    job: Job,
    dataset: Any = Tokens,
    optimizer: Any = None,
    later: str = "",
) -> str:
    """Take steps, from the second one on late; return what was said."""
    run = make_run(rank, world, model, layout, job, Tokens)
    if optimizer is not None:
        run._own.source = replace(run._own.source, optimizer=optimizer_source(optimizer))
    notes = []
    try:
        for batch in batches(dataset(), job):
            report = run.step(batch)
            notes += [report.note, *(line for line in report.remarks if "allowed" in line)]
            run.model.is_late = True
            NOISE_OF[later] = 1.0
    except (RepeatError, UnprovenError) as error:
        return str(error)
    finally:
        NOISE_OF[later] = 0.0
    return "; ".join(filter(None, notes))


WRONG = [
    ("OwnGenerator", "dp=2 zero=3", "random numbers from the generator NOISE"),
    ("Centred", "dp=2", "samples influence each other"),
    ("Crowded", "dp=2 zero=1", "samples influence each other"),
    ("Branching", "dp=2", "samples influence each other"),
    ("Counting", "dp=1 microbatch=4", "a value that an earlier forward of this step has written"),
    ("Remembering", "dp=1 microbatch=4", "a value that an earlier forward of this step has written"),
]


@pytest.mark.parametrize(("model", "layout", "why"), WRONG, ids=lambda value: str(value)[:30])
def test_what_a_model_does_later_is_named(model, layout, why):
    said = on_ranks(layout, told, model, watched(1))
    assert len({*said}) == 1
    assert "step 2" in said[0] or "step 3" in said[0]
    assert "sample " in said[0] or " draws " in said[0]
    assert why in said[0]


@telling
def told_of_coupling(rank: int, world: int, model: str, layout: str, job: Job, path: str) -> None:
    """Take steps of any model, in which a module subtracts the mean of all samples from the second step on."""
    run = make_run(rank, world, model, layout, job)
    for batch in batches(Tokens(), job):
        run.step(batch)
        if batch.step == 0:
            run.model.get_submodule(path).register_forward_hook(lambda module, args, output: output - output.mean(0))


@pytest.mark.parametrize(
    ("model", "layout", "path"),
    [
        ("deep_llama", "dp=1 pp=2 microbatch=4", "model.layers.3.mlp"),
        ("deep_llama", "dp=1 tp=2 microbatch=4", "model.layers.0.mlp"),
        ("llama", "dp=1 cp=2 microbatch=4", "model.layers.1.mlp"),
        ("mixtral", "dp=2 ep=2 zero=3", "model.layers.0.mlp"),
    ],
)
def test_samples_that_meet_later_are_named_in_every_layout(model, layout, path):
    said = on_ranks(layout, told_of_coupling, model, watched(1), path)
    assert len({*said}) == 1
    assert "step 2" in said[0]
    assert "samples influence each other" in said[0]


def test_a_sample_that_is_read_anew_is_named():
    said = told(0, 1, "Harmless", "dp=1", watched(1), Drawing, later="data")
    assert "it reads other values the second time" in said


def noisy_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    total, count = cross_entropy(outputs, batch)
    return total * (1 + 0.01 * NOISE.random() * NOISE_OF["loss"]), count


def test_a_loss_that_draws_later_is_named():
    run = make_run(0, 1, "Harmless", "dp=1", watched(1))
    run._own.source = replace(run._own.source, loss=noisy_loss)
    first, *_ = batches(Tokens(), watched(1))
    NOISE_OF["loss"] = 1.0
    with pytest.raises(
        UnprovenError, match=r"step 1: .*a loss or a backward draws random numbers from the generator NOISE"
    ):
        run.step(first)
    NOISE_OF["loss"] = 0.0


def test_an_update_that_draws_is_named():
    said = told(
        0,
        1,
        "Harmless",
        "dp=1 microbatch=4",
        watched(2),
        optimizer=lambda params: Noisy(params, lr=0.1),
        later="update",
    )
    assert "step 2, rank 0: the update of " in said
    assert "Noisy draws random numbers" in said


def test_an_update_that_comes_to_look_at_whole_weights_is_named():
    said = on_ranks("dp=2 zero=3", told, "Harmless", watched(1), Tokens, functools.partial(Normed, lr=0.1), "update")
    assert all("Normed draws random numbers or looks at more than one element" in one for one in said)


def test_what_is_allowed_is_noted_once():
    job = watched(1, run={"allow": ["samples"]}, steps=4)
    said = told(0, 1, "Centred", "dp=1 microbatch=4", job)
    assert said.count("samples influence each other") == 1
    assert said.endswith('(allowed by run.allow = ["samples"])')


# -- what is clean ---------------------------------------------------------------------------------------------------------


def kept(rank: int, world: int, model: str, layout: str, job: Job) -> list[Any]:
    """Take the job's steps, late from the second on; return everything that a watch might change."""
    torch.manual_seed(rank)
    run = make_run(rank, world, model, layout, job)
    found: list[Any] = []
    for batch in batches(Tokens(), job):
        report = run.step(batch)
        found.append((report.loss, report.grad_norm, report.lr, report.tokens, report.note, report.skipped))
        run.model.is_late = True
    tensors = [piece.master().clone() for piece in run.updater.pieces]
    tensors += [buffer.clone() for buffer in run.model.buffers()]
    if run.updater.optimizer is not None:
        for state in run.updater.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    numbers = [getattr(run.model, name, None) for name in ("calls", "history")]
    return [found, [tensor.numpy().tobytes() for tensor in tensors], numbers, torch.get_rng_state().numpy().tobytes()]


CLEAN = [
    ("plain", "dp=1", "float32"),
    ("plain", "dp=2", "bf16"),
    ("gpt2_with_dropout", "dp=2 zero=3 recompute=full", "bf16"),
    ("llama", "dp=2 zero=2 microbatch=2", "fp16"),
    ("llama", "dp=1 cp=2", "float32"),
    ("dropping_attentive", "dp=1 tp=2", "float32"),
    ("dropping_llama", "dp=1 pp=2 microbatch=2", "float32"),
    ("mixtral", "dp=2 ep=2 zero=1", "bf16"),
    ("Harmless", "dp=1", "float32"),
    ("Harmless", "dp=2", "float32"),
    ("TokensFirst", "dp=2 microbatch=2", "float32"),
    ("SeveralOutputs", "dp=2", "float32"),
    ("TakesNoSampleAlone", "dp=1", "float32"),
    ("TakesNoSampleAlone", "dp=2", "float32"),
    ("BatchNormed", "dp=1", "float32"),
    ("Centred", "dp=1", "float32"),
    ("Counting", "dp=1", "float32"),
]
MORE = [
    ("plain_with_dropout", "dp=2 microbatch=2", "float32"),
    ("llama", "dp=2 zero=1 offload", "float32"),
    ("llama_even", "dp=1 tp=2 sequence_parallel", "float32"),
    ("qwen3", "dp=1 tp=2", "bf16"),
    ("deep_tied", "dp=1 pp=2 schedule=zero-bubble microbatch=2", "float32"),
    ("deep_llama", "dp=1 pp=2 virtual_stages=2 schedule=interleaved microbatch=2", "float32"),
    ("mixtral_balanced", "dp=2", "bf16"),
    ("own_experts", "dp=1 microbatch=4", "float32"),
]
EVERY = [*daily(CLEAN, beside_products=True), *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE)]


@pytest.mark.parametrize(("model", "layout", "precision"), EVERY)
def test_a_run_under_watch_is_the_same_run(model, layout, precision):
    """The law: with `watch_every = 1` every loss, weight, buffer, state and generator is what it is without, to the bit."""
    adamw = {"name": "adamw", "lr": 0.01, "options": {}}
    with_watch = on_ranks(layout, kept, model, watched(1, precision, optimizer=adamw))
    assert with_watch == on_ranks(layout, kept, model, watched(0, precision, optimizer=adamw))


def sent(rank: int, world: int, model: str, layout: str, job: Job) -> bool:
    run = make_run(rank, world, model, layout, job)
    for batch in batches(Tokens(), job):
        with Ledger() as ledger:
            run.step(batch)
    return ledger.rows == run.program.ledger(group_of=run.assembly.parallel.mesh.group_of)


def test_what_a_watch_sends_is_outside_the_step():
    assert on_ranks("dp=2 zero=3", sent, "deep_llama", watched(1, steps=2)) == [True, True]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_clean_seeds_are_silent(precision):
    for seed in range(4):
        job = job_of(precision, 2, train={"watch_every": 1, "seed": seed, "global_batch": 8})
        assert told(0, 1, "plain_with_dropout", "dp=1", job) == ""


class Coupled(torch.optim.SGD):
    """Steps by a length that all weights together decide, as D-Adaptation and Prodigy do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / (1 + norm), alpha=0.1)


class Hooked(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.register_step_post_hook(lambda optimizer, args, named: self.clamp())

    @torch.no_grad()
    def clamp(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.clamp_(-0.5, 0.5)


@pytest.mark.parametrize("kind", [Coupled, Hooked])
def test_rules_of_all_weights_at_once_are_left_alone(kind):
    assert told(0, 1, "Harmless", "dp=1", watched(1), optimizer=lambda params: kind(params, lr=0.1)) == ""


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_updates_of_torch_are_repeated_to_the_bit(name):
    job = watched(1, steps=4, optimizer={"name": name, "lr": 0.01, "options": {}, "clip_norm": 0.1})
    assert told(0, 1, "Harmless", "dp=1", job) == ""
    assert models.MODELS["Harmless"] is Harmless


def test_roundings_of_two_equal_models_do_not_cancel() -> None:
    """A loss such as DPO's subtracts what a frozen copy gives: its rounding is that of both, though they are equal at first."""
    policy = nn.Linear(8, 8)
    twins = nn.ModuleList([policy, copy.deepcopy(policy)])
    inputs = torch.linspace(-1, 1, 32).view(4, 8)
    with nudge_outputs(twins, 1e-3, 0):
        difference = twins[0](inputs) - twins[1](inputs)
    assert float(difference.detach().abs().max()) > 1e-4
