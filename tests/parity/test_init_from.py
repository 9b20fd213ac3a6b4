"""`--init-from`: a new job, in any layout, starts from what another run has trained, and saves all that it started from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import samestep
from samestep.building.families import quiet
from samestep.datasets import batches
from samestep.errors import CheckpointError, JobError
from samestep.job import Job
from samestep.runtime.checkpoints import checkpoint
from samestep.training.check import check
from samestep.training.first_weights import FirstWeights
from tests.folders import SIZES
from tests.laboratory import job_of
from tests.models import Tokens
from tests.parity.test_frozen import run_of
from tests.pool import pool

MODEL: dict[str, Any] = {"source": "hf:llama", "config": SIZES}
OLD = job_of("float32", 2, model=MODEL)


@pytest.fixture(scope="module")
def exported(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samestep.export(old, tmp_path_factory.mktemp("exported") / "out").folder


def losses_from(rank: int, world: int, layout: str, job: Job, first: FirstWeights, out: Path) -> list[float]:
    """The loss of the first step, of the second, and of the second after a resume."""
    run = run_of(rank, world, layout, job)
    sample, both = next(batches(Tokens(), job)).samples([0]), list(batches(Tokens(), job))[:2]
    run.prepare(sample)
    first.load(run)
    losses = [run.step(both[0]).loss]
    checkpoint.save(run, out / "checkpoints", 1)
    losses.append(run.step(both[1]).loss)
    again = run_of(rank, world, layout, job)
    again.prepare(sample)
    checkpoint.load(again, out / "checkpoints" / "step-000001")
    return [*losses, again.step(both[1]).loss]


def new_job(**model: Any) -> Job:
    return job_of("float32", 3, model={**MODEL, **model}, optimizer={"lr": 0.03}, train={"seed": 9})


@pytest.mark.parametrize(
    ("layout", "model", "from_folder"),
    [
        ("tp=2", {"lora": {"targets": ["q_proj", "down_proj"]}}, False),
        ("pp=2 microbatch=4", {"freeze": ["*layers.0.*"]}, True),
        ("dp=2 zero=3", {}, False),
    ],
)
def test_a_new_job_starts_from_other_weights(
    layout: str, model: dict[str, Any], from_folder: bool, old: Path, exported: Path, tmp_path: Path
) -> None:
    job = new_job(**model)
    run_of(0, 1, layout, job)
    first = FirstWeights.of(exported if from_folder else old, job)
    found = pool(2).run(losses_from, layout, job, first, tmp_path)
    batch = next(batches(Tokens(), job))
    samples = batch.samples(batch.indices)
    with quiet(), torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        logits = plain(samples["input_ids"], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples["labels"].flatten()).item()
    for started, second, resumed in found:
        assert started == pytest.approx(expected, rel=1e-6)
        assert resumed == second


def test_weights_of_another_model_are_refused_by_name(old: Path, exported: Path) -> None:
    deeper = new_job(config={**SIZES, "num_hidden_layers": 3})
    text = r"holds another model's weights: model.layers.2.self_attn.q_proj.weight missing, here \[16, 16\], and 8 more"
    with pytest.raises(CheckpointError, match=text):
        FirstWeights.of(old, deeper)
    with pytest.raises(CheckpointError, match=r"another model's weights: it lacks model.layers.2"):
        FirstWeights.of(exported, deeper)
    shallower = new_job(config={**SIZES, "num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match=r"model.layers.1.self_attn.q_proj.weight \[16, 16\], here missing"):
        FirstWeights.of(old, shallower)
    with pytest.raises(CheckpointError, match=r"does not fit hf:llama: .* makes .* \[16, 40\], and model.config makes"):
        FirstWeights.of(exported, new_job(config={**SIZES, "intermediate_size": 44}))


def test_starting_and_resuming_at_once_is_refused(old: Path) -> None:
    with pytest.raises(JobError, match="--init-from starts a new run, and --resume continues a run"):
        check(OLD, layout="dp=1", out=old, resume=True, init_from=old)
