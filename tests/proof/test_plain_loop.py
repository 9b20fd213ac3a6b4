"""Both sides wrong alike: `verify` finds it by a plain torch loop, and raises no alarm where one device is right."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.building import drawn_rows, packed_positions
from samestep.building.initial_values import Blueprint
from samestep.building.loss import cross_entropy
from samestep.building.optimizer import optimizer_of
from samestep.datasets import Batch
from samestep.examination.examine import Source, examine
from samestep.job import Job
from samestep.layout import Layout
from samestep.proof import sides, verify
from samestep.proof.verdict import Cause
from samestep.runtime import stepper
from samestep.runtime.axes import applied_axes
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.stepper import Stepper
from tests.laboratory import job_of, perturbed
from tests.models import MODELS, VOCABULARY, Tokens
from tests.parity.test_loaded_weights import fine_tuned, saved
from tests.parity.test_packed_documents import Packed
from tests.proof.planting import around, changed
from tests.traced import copied

Patch = pytest.MonkeyPatch
ONE = RankInfo(0, 0, 1, 1, torch.device("cpu"))


class Masked(nn.Module):
    """Its forward takes any key of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.head(self.embed(batch["input_ids"]) * batch["weights"][..., None])


class MaskedTokens(Tokens):
    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return {**sample, "weights": 1.0 + (torch.as_tensor(sample["input_ids"]) % 3)}


class Triples(MaskedTokens):
    """Samples as tuples, whose third part is an input too."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample["input_ids"], sample["labels"], sample["weights"]


class Weighted(Masked):
    def forward(self, input_ids: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.embed(input_ids) * weights[..., None])


class Normed(nn.Module):
    """Batch statistics over the whole batch, with running ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, 8), nn.BatchNorm1d(8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(input_ids).flatten(0, 1)).view(*input_ids.shape, 8))


def resized() -> nn.Module:
    """A loaded model with a head of its own, which is drawn."""
    model = fine_tuned("llama")
    model.lm_head = nn.Linear(16, 64, bias=False)
    return model


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.DataParallel(nn.Linear(8, VOCABULARY))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


class Spare(nn.Module):
    """A layer that takes no part, which weight decay leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.spare, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


JOB = job_of(optimizer={"name": "adamw", "lr": 1e-2, "options": {}, "weight_decay": 0.1, "clip_norm": 0.5})


@dataclass(frozen=True)
class Case:
    build: Any
    dataset: type[Tokens] = Tokens
    job: Job = JOB
    layout: str = "dp=1 microbatch=4"


CLEAN: dict[str, Case] = {
    "plain": Case(perturbed(MODELS["plain"])),
    "dropout": Case(perturbed(MODELS["plain_with_dropout"])),
    "gpt2, tied": Case(perturbed(MODELS["gpt2"])),
    "loaded": Case(functools.partial(fine_tuned, "llama"), layout="dp=1 recompute=full"),
    "loaded, in part": Case(resized),
    "an instance": Case(MODELS["llama"]()),
    "experts, balanced": Case(MODELS["mixtral_balanced"], layout="dp=1"),
    "own experts": Case(MODELS["own_experts"]),
    "any key": Case(Masked, MaskedTokens),
    "third parts": Case(Weighted, Triples),
    "batch norm": Case(Normed, layout="dp=1"),
    "wrapped": Case(Compiled),
    "a spare layer": Case(Spare),
    "documents": Case(perturbed(MODELS["llama"]), Packed),
}


@pytest.fixture(scope="module", autouse=True)
def _a_folder_to_load() -> None:
    """Save what the loaded models load, which a build on the meta device cannot."""
    saved("llama")


def verdict_of(case: Case, folder: Path, install: Callable[[Patch], None] | None = None) -> sides.Judgement:
    """Hold a layout of one rank against one device, with a fault in both."""
    job, where, dataset = verify._proving(case.job, 3), Layout(case.layout), case.dataset()
    example = Batch(0, [0], dataset).samples([0])  # type: ignore[arg-type]

    source = Source(case.build, cross_entropy, optimizer_of(job), "model")

    def subject(layout: Layout) -> sides.Subject:
        return sides.Subject(replace(source, prepared=copied(traced)), dataset, example, job, layout, folder)

    with pytest.MonkeyPatch.context() as patch:
        if install:
            install(patch)
        traced = examine(source, job, example)
        sides.one_device(ONE, subject(Layout()))
        sides.in_layout(ONE, subject(where))
        return sides.judge(ONE, subject(where))


DAILY = (
    "dropout",
    "loaded",
    "loaded, in part",
    "experts, balanced",
    "third parts",
    "wrapped",
    "a spare layer",
    "documents",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in CLEAN]
)
def test_a_model_of_any_kind_raises_no_alarm(name, tmp_path):
    case = CLEAN[name]
    checks, cause, explanation = verdict_of(case, tmp_path)
    assert cause is None, explanation
    (found,) = (check for check in checks if check.what == "plain torch")
    assert found.compared > 10


# -- faults of both sides --------------------------------------------------------------------------


def zeros_in_a_buffer(patch: Patch) -> None:
    def made(original: Any, self: Blueprint, name: str, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = original(self, name, *args, **kwargs)
        return torch.zeros_like(value) if "inv_freq" in name else value

    around(patch, Blueprint, "materialize", made)


def a_loaded_weight_is_another(patch: Patch) -> None:
    def made(original: Any, self: Blueprint, name: str, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = original(self, name, *args, **kwargs)
        return value * 1.01 if name.endswith("q_proj.weight") else value

    around(patch, Blueprint, "materialize", made)


def a_key_of_the_batch_is_dropped(patch: Patch) -> None:
    def called(original: Any, model: nn.Module, batch: Any) -> Any:
        return original(model, {**batch, "weights": torch.ones_like(batch["weights"])})

    around(patch, applied_axes, "call_model", called)


def nothing_is_clipped(patch: Patch) -> None:
    patch.setattr(stepper, "clip_factor", lambda norm, limit: 1.0)


def the_mean_is_over_another_count(patch: Patch) -> None:
    def agree(original: Any, self: Stepper, totals: Tensor, *rest: bool) -> Tensor:
        found = original(self, totals, *rest)
        return changed(found, count=float(found[1]) + 1)

    around(patch, Stepper, "_agree", agree)


def weights_are_updated_twice(patch: Patch) -> None:
    def step(original: Any, self: Updater, factor: float, **more: Any) -> None:
        original(self, factor, **more)
        self.optimizer.step()  # type: ignore[union-attr]

    around(patch, Updater, "step", step)


def a_document_begins_a_token_late(patch: Patch) -> None:
    def lengths(original: Any, documents: Tensor) -> list[list[int]]:
        return [[first + 1, second - 1, *rest] for first, second, *rest in original(documents)]

    around(patch, packed_positions, "lengths_of", lengths)


FAULTS: dict[str, tuple[Callable[[Patch], None], str, str]] = {
    "buffer": (zeros_in_a_buffer, "loaded", r"rotary_emb.*inv_freq.* has not the value that the build function gives"),
    "weight": (a_loaded_weight_is_another, "loaded", "q_proj.weight and 1 more has not the value"),
    "key": (a_key_of_the_batch_is_dropped, "any key", "loss in step 1 of one device"),
    "clip": (nothing_is_clipped, "plain", "gradient of .* in step 1 of one device"),
    "count": (the_mean_is_over_another_count, "plain", "loss in step 1"),
    "boundary": (a_document_begins_a_token_late, "documents", "loss in step 1 of one device"),
    "update": (weights_are_updated_twice, "dropout", "weight of .* in step 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_both_sides_is_found(name, tmp_path):
    install, model, said = FAULTS[name]
    checks, cause, explanation = verdict_of(CLEAN[model], tmp_path, install)
    assert cause is Cause.PLAIN, explanation
    assert re.search(said, explanation), explanation
    assert [check.what for check in checks if not check.passed] == ["plain torch"]


def test_code_that_cannot_be_called_plainly_is_said(tmp_path, monkeypatch):
    def call(source: Any, seed: int) -> nn.Module:
        raise RuntimeError("no files\nhere")

    monkeypatch.setattr(drawn_rows, "call", call)
    _, cause, _ = verdict_of(CLEAN["plain"], tmp_path)
    assert cause is None
    job = verify._proving(CLEAN["plain"].job, 3)
    subject = sides.Subject(None, None, None, job, Layout(), tmp_path)  # type: ignore[arg-type]
    assert sides.hindrance(subject) == "RuntimeError: no files here"
