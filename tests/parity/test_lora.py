"""LoRA: the losses of a plain torch and peft loop in every layout, 0 bytes for frozen weights, and files that peft loads."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import samestep
from samestep.building.families import quiet
from samestep.building.initial_values import blueprint
from samestep.building.model import model_source
from samestep.datasets import batches
from samestep.errors import JobError
from samestep.job import Job
from samestep.runtime.checkpoints import checkpoint
from samestep.wings.adapters import lora
from tests.folders import SIZES, saved
from tests.laboratory import TOLERANCE, assert_ledger, assert_same, job_of
from tests.models import Tokens
from tests.parity.test_frozen import bytes_of_gradients, observe, on_ranks, run_of
from tests.plain import train_plainly, whole_batches
from tests.pool import pool

LORA: dict[str, Any] = {
    "targets": ["q_proj", "k_proj", "o_proj", "down_proj"], "r": 4, "alpha": 8.0, "modules_to_save": ["lm_head"],
}  # fmt: skip
SETTINGS = {"r": 4, "lora_alpha": 8.0, "target_modules": LORA["targets"], "modules_to_save": ["lm_head"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "llama")


def job_with(folder: Path, precision: str = "float32", **tables: Any) -> Job:
    return job_of(precision, 3, model={"source": f"hf:{folder}", "lora": LORA}, **tables)


def plain_model(folder: Path, job: Job) -> nn.Module:
    """Peft's own model over transformers' own, with the first values that the job gives the adapters."""
    with quiet():
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        model = peft.get_peft_model(base, peft.LoraConfig(**SETTINGS))
    plan = blueprint(model_source(job), job.train.seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(plan.materialize(name.removeprefix("base_model.model."), torch.device("cpu")))
    return model


def trained_plainly(model: nn.Module, job: Job) -> list[float]:
    def loss(samples: Any) -> torch.Tensor:
        logits = model(input_ids=samples["input_ids"], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples["labels"].flatten())

    trained = [param for param in model.parameters() if param.requires_grad]
    return train_plainly(
        model, whole_batches(Tokens(), job), loss, torch.optim.SGD(trained, job.optimizer.lr, momentum=0.9)
    )[0]


@functools.cache
def plain_losses(folder: Path, job_json: str) -> list[float]:
    job = Job.model_validate_json(job_json)
    return trained_plainly(plain_model(folder, job), job)


LAYOUTS: list[Any] = ["dp=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4"]
NIGHTLY = ["dp=2 zero=1", "dp=2 zero=2", "cp=2", "dp=2 tp=2 zero=3", "dp=2 pp=2 microbatch=2 schedule=zero-bubble"]
NIGHTLY += ["tp=2 pp=2 microbatch=4 recompute=full", "dp_replicate=2 dp_shard=2", "tp=2 sequence_parallel"]
LAYOUTS += [pytest.param(layout, marks=pytest.mark.nightly) for layout in NIGHTLY]


def hold_losses(layout: str, job: Job, expected: list[float]) -> None:
    """The losses are the expected ones on all ranks, and what is sent is the gradients of adapters alone."""
    ranks = on_ranks(layout, job)
    for seen in ranks:
        assert seen.losses == pytest.approx(expected, rel=1e-6)
    assert_ledger(ranks, layout)
    if layout == "dp=2":
        sizes = [stop - start for _, start, stop, _ in ranks[0].weights]
        assert bytes_of_gradients(ranks[0]) == 4 * sum(sizes)
        assert all("lora_" in name or "modules_to_save" in name for name, *_ in ranks[0].weights)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_torch_and_peft(layout: str, folder: Path) -> None:
    job = job_with(folder)
    hold_losses(layout, job, plain_losses(folder, job.model_dump_json()))


def steps(rank: int, world: int, layout: str, job: Job, out: Path, until: int, start: Path | None = None) -> None:
    run = run_of(rank, world, layout, job)
    run.prepare(next(batches(Tokens(), job)).samples([0]))
    if start is not None:
        checkpoint.load(run, start)
    for batch in batches(Tokens(), job, first_step=run.steps_taken):
        if batch.step < until:
            run.step(batch)
    checkpoint.save(run, out / "checkpoints", 2)


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits


def loaded(folder: Path) -> nn.Module:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_saved_resumed_and_merged(folder: Path, tmp_path: Path) -> None:
    """Two steps with tp=2, resumed with zero=3; what is exported is loaded by peft and by transformers."""
    job = job_with(folder, checkpoint={"save_pretrained": True})
    for layout in ("tp=2", "dp=2 zero=3"):
        run_of(0, 1, layout, job)
    pool(2).run(steps, "tp=2", job, tmp_path / "run", 2)
    first = tmp_path / "run" / "checkpoints" / "step-000002"
    held = checkpoint.read_manifest(first)["shapes"]
    assert all("lora_" in name or "modules_to_save" in name for name in held)
    pool(2).run(steps, "dp=2 zero=3", job, tmp_path / "run", 3, first)
    plain = plain_model(folder, job)
    trained_plainly(plain, job)
    expected = logits_of(plain)

    samestep.export(tmp_path / "run", tmp_path / "adapters")
    files = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {lora.CONFIG, lora.FILE} <= files
    assert "model.safetensors" not in files
    beside = tmp_path / "run" / "checkpoints" / "step-000003" / "pretrained"
    assert (beside / lora.FILE).read_bytes() == (tmp_path / "adapters" / lora.FILE).read_bytes()
    ours = peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "adapters")
    torch.testing.assert_close(logits_of(ours), expected, rtol=1e-5, atol=1e-6)

    samestep.export(tmp_path / "run", tmp_path / "whole", merge=True)
    torch.testing.assert_close(logits_of(loaded(tmp_path / "whole")), logits_of(ours), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected, logits_of(loaded(folder)), atol=1e-3)


def test_merging_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    job = job_of("float32", 1, model={"source": f"hf:{folder}"})
    steps(0, 1, "dp=1", job, tmp_path, 1)
    with pytest.raises(JobError, match=r"--merge adds adapters into weights, and the run has none \(model.lora\)"):
        samestep.export(tmp_path, tmp_path / "out", merge=True)


@pytest.mark.parametrize(
    ("lora", "text"),
    [
        ({"targets": ["q_pro"]}, r"model.lora.targets: no module of LlamaForCausalLM is called 'q_pro' \(did you mean 'q_proj'"),
        ({"targets": ["input_layernorm"]}, r"input_layernorm is a LlamaRMSNorm, and only linear layers and embed"),
    ],
)  # fmt: skip
def test_targets_that_are_no_linear_layers_are_refused(lora: dict[str, Any], text: str, folder: Path) -> None:
    with pytest.raises(JobError, match=text):
        blueprint(model_source(Job(model={"source": f"hf:{folder}", "lora": lora})), 0)


@pytest.mark.parametrize(
    ("lora", "text"), [({"r": 4}, "targets: field required"), ({"targets": ["a"], "rank": 4}, "unknown key; the keys")]
)
def test_keys_of_adapters_are_checked(lora: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        Job(model={"lora": lora})


def own_model() -> nn.Module:
    """A model of peft that the user's own code makes, whose base it wraps."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
        return peft.get_peft_model(base, peft.LoraConfig(**SETTINGS))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("layout", ["tp=2", pytest.param("pp=2 microbatch=4", marks=pytest.mark.nightly)])
def test_a_model_of_peft_from_your_own_code(layout: str) -> None:
    job = job_of("float64", 2, model={"source": f"{__name__}:own_model"})
    alone = observe(0, 1, "dp=1", job)
    assert all("lora_" in name or "modules_to_save" in name for name, *_ in alone.weights)
    ranks = on_ranks(layout, job)
    assert_same(ranks, alone, TOLERANCE)
    assert_ledger(ranks, layout)
