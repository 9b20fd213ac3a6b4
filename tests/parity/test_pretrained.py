"""A run that starts from a folder has, in every layout, the losses of a plain torch loop over `from_pretrained`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from samestep.building.families import quiet
from samestep.building.loss import loss_of
from samestep.building.model import model_source
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from tests import traced
from tests.folders import saved
from tests.laboratory import follow, job_of, run_from
from tests.models import Tokens
from tests.parity.test_lora import trained_plainly
from tests.pool import pool


def source_of(job: Job, layout: Layout) -> Source:
    source = Source(model_source(job), loss_of(job), optimizer_of(job), job.model.source)
    example = next(batches(Tokens(), job)).samples([0])
    return replace(source, prepared=traced.prepared(job.model.source, source, job, example, layout))


def losses_of(rank: int, world: int, layout: str, job: Job) -> list[float]:
    where = Layout(layout)
    run = run_from(source_of(job, where), where, job, rank, world)
    return follow(run, Tokens(), job).losses


def plain_losses(folder: Path, job: Job) -> list[float]:
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    return trained_plainly(model, job)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: saved(tmp_path_factory.mktemp(family), family, torch.bfloat16) for family in ("llama", "mixtral")}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "dp=2"),
        ("llama", "dp=2 zero=3"),
        ("llama", "tp=2"),
        ("llama", "pp=2 microbatch=4"),
        ("mixtral", "dp=2 ep=2"),
    ],
)
def test_losses_from_a_folder_are_those_of_a_plain_loop(family: str, layout: str, folders: dict[str, Path]) -> None:
    job = job_of("float32", model={"source": f"hf:{folders[family]}"})
    source_of(job, Layout(layout))  # the ranks inherit it
    expected = plain_losses(folders[family], job)
    for losses in pool(2).run(losses_of, layout, job):
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", "tp=2"), ("gpt2", "dp=2 zero=3"), pytest.param("qwen3", "pp=2 microbatch=4", marks=pytest.mark.nightly)],
)
def test_tokens_that_are_added_are_trained_as_in_a_plain_loop(family: str, layout: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family, vocab_size=50, tie_word_embeddings=True)
    job = job_of("float32", model={"source": f"hf:{folder}", "resize_embeddings": 61})
    source = source_of(job, Layout(layout))
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        model.resize_token_embeddings(61, mean_resizing=False)
    assert source.prepared is not None
    plan = source.prepared.blueprint
    with torch.no_grad():
        for name, param in model.named_parameters():
            if plan.canonical[name] in plan.drawn:
                assert torch.equal(param[:50], plan.materialize(name, torch.device("cpu"))[:50])
                param.copy_(plan.materialize(name, torch.device("cpu")))
    expected = trained_plainly(model, job)
    for losses in pool(2).run(losses_of, layout, job):
        assert losses == pytest.approx(expected, rel=1e-6)
