"""A run that starts from a folder of transformers has the losses of a plain loop over `from_pretrained`, and leaves what it has trained.

To the bit, in every layout, and again as a start.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import samestep
from samestep.building.families import quiet
from samestep.building.initial_values import blueprint
from samestep.building.loss import loss_of
from samestep.building.model import model_source
from samestep.building.optimizer import optimizer_of
from samestep.building.pretrained_form import PretrainedForm
from samestep.datasets import batches
from samestep.errors import JobError, ModelError, SaveError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.checkpoints import checkpoint, checkpoint_files
from samestep.training import trained
from tests import traced
from tests.folders import FAMILIES, saved
from tests.laboratory import follow, job_of, run_from
from tests.models import Plain, Tokens
from tests.parity.test_frozen import run_of
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
    ("family", "layout"), [("llama", "dp=2 zero=3"), ("llama", "pp=2 microbatch=4"), ("mixtral", "dp=2 ep=2")]
)
def test_losses_from_a_folder_are_those_of_a_plain_loop(family: str, layout: str, folders: dict[str, Path]) -> None:
    job = job_of("float32", model={"source": f"hf:{folders[family]}"})
    source_of(job, Layout(layout))  # the ranks inherit it
    expected = plain_losses(folders[family], job)
    for losses in pool(2).run(losses_of, layout, job):
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("family", "layout"), [("llama", "tp=2"), ("gpt2", "dp=2 zero=3")])
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


# -- what a run leaves --------------------------------------------------------------------------------


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def loaded(folder: Path) -> dict[str, Tensor]:
    with quiet():
        return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_is_read_and_written_is_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = saved(tmp_path / "first", family, torch.bfloat16), tmp_path / "second"
    job = job_of("float32", model={"source": f"hf:{folder}"})
    form = PretrainedForm.of(blueprint(model_source(job), 0), job)
    monkeypatch.setattr(checkpoint_files, "LARGEST_FILE_BYTES", 8_000)
    manifest = {"job": job.model_dump(mode="json"), "parts": [], "shapes": {}}  # every value is the first one
    out.mkdir()
    for writer in (1, 0):
        checkpoint_files.write(form, tmp_path, manifest, out, torch.bfloat16, (writer, 2))
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert_equal(stored(out), stored(folder))
    assert_equal(loaded(out), loaded(folder))
    first, second = (json.loads((path / "config.json").read_text()) for path in (folder, out))
    assert first == second
    assert (out / "generation_config.json").read_text() == (folder / "generation_config.json").read_text()


def steps(rank: int, world: int, layout: str, job: Job, out: Path) -> None:
    where = Layout(layout)
    run = run_from(source_of(job, where), where, job, rank, world)
    follow(run, Tokens(), job)
    checkpoint.save(run, out / "checkpoints", 1)
    run.save_pretrained(out / "own")
    with pytest.raises(SaveError, match=r"own cannot be written: rank 0: it exists. Use a new folder"):
        run.save_pretrained(out / "own")


@pytest.mark.parametrize(("family", "layout"), [("mixtral", "dp=2 ep=2 zero=1"), ("qwen3", "pp=2 microbatch=4")])
def test_a_checkpoint_has_a_folder_for_transformers(family: str, layout: str, tmp_path: Path) -> None:
    model = {"source": f"hf:{saved(tmp_path / 'first', family)}"}
    job = job_of("float32", 2, model=model, checkpoint={"save_pretrained": True})
    source_of(job, Layout(layout))
    pool(2).run(steps, layout, job, tmp_path / "run")
    steps(0, 1, "dp=1", job, tmp_path / "alone")
    written, alone = (
        loaded(tmp_path / name / "checkpoints" / "step-000002" / "pretrained") for name in ("run", "alone")
    )
    assert written.keys() == alone.keys()
    before = loaded(tmp_path / "first")
    for name, tensor in alone.items():
        assert torch.allclose(written[name], tensor, rtol=1e-5, atol=1e-6), name
        assert not torch.equal(tensor, before[name]), name
    assert_equal(loaded(tmp_path / "run" / "own"), written)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "own"]
    exported = samestep.export(tmp_path / "run", tmp_path / "out")
    assert exported.step == 2
    assert_equal(loaded(tmp_path / "out"), written)
    samestep.export(exported.checkpoint, tmp_path / "half", dtype="bf16")
    assert {tensor.dtype for tensor in stored(tmp_path / "half").values()} == {torch.bfloat16}
    with pytest.raises(JobError, match=r"exists. Use a new folder"):
        samestep.export(tmp_path / "run", tmp_path / "out")


class Own(Plain):
    """A module of one's own with a tied head, and buffers of several dtypes, one of which it does not store."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("table", torch.linspace(0, 1, 5, dtype=torch.float64))
        self.register_buffer("cached", torch.ones(2), persistent=False)


def own_steps(rank: int, world: int, layout: str, job: Job, out: Path) -> dict[str, Tensor]:
    run = run_of(rank, world, layout, job)
    follow(run, Tokens(), job)
    checkpoint.save(run, out / "checkpoints", 1)
    return dict(run.state_dict())


def test_a_module_of_ones_own_is_a_file_with_its_state_dict(tmp_path: Path) -> None:
    layout = "tp=2"
    job = job_of("float32", 2, model={"source": f"{__name__}:Own"})
    run_of(0, 1, layout, job)
    trained = pool(2).run(own_steps, layout, job, tmp_path / "run")[0]
    out = samestep.export(tmp_path / "run", tmp_path / "out", allow_code=True).folder
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    held, model = load_file(out / "model.safetensors"), Own()
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(held)
    assert_equal(dict(model.state_dict()), {name: trained[name] for name in first})
    assert not torch.equal(first["embed.weight"], held["embed.weight"])
    samestep.export(tmp_path / "run", tmp_path / "half", dtype="bf16", form="safetensors", allow_code=True)
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert {half[name].dtype for name in half} == {torch.bfloat16, torch.int64}
    assert torch.equal(half["embed.weight"], held["embed.weight"].bfloat16())
    with pytest.raises(
        ModelError, match=r"Own is a Own. Use samestep export RUN --out DIR with --format safetensors.*dcp"
    ):
        samestep.export(tmp_path / "run", tmp_path / "no", form="transformers", allow_code=True)


def test_the_state_dict_of_a_model_of_transformers_is_a_file_too(tmp_path: Path) -> None:
    job = job_of("float32", 1, model={"source": "hf:gpt2", "config": FAMILIES["gpt2"]})
    trained = own_steps(0, 1, "dp=1", job, tmp_path / "run")
    out = samestep.export(tmp_path / "run", tmp_path / "out", form="safetensors").folder
    held = load_file(out / "model.safetensors")
    assert_equal(held, {name: trained[name] for name in held})
    assert torch.equal(held["lm_head.weight"], held["transformer.wte.weight"])


class Noting(Plain):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


def test_a_state_dict_with_something_else_than_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"_extra_state in the state dict of Noting is not a tensor"):
        trained.write_state(Noting(), {}.__getitem__, tmp_path / "out", None)


def test_a_model_of_your_own_has_no_form_of_transformers() -> None:
    job = Job(model={"source": "tests.models:plain"})
    with pytest.raises(ModelError, match=r"tests.models:plain is a Plain. Use samestep export RUN"):
        PretrainedForm.of(blueprint(model_source(job), 0), job)


class HandingOn(torch.nn.Module):
    """A wrapper that hands the attributes of the model in it on, and has those by which a model of transformers might be known."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.config, self._tied_weights_keys = inner, inner.config, None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, input_ids: Tensor) -> Any:
        return self.inner(input_ids=input_ids)


def _adapted(inner: torch.nn.Module) -> torch.nn.Module:
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], use_rslora=True)
    return peft.get_peft_model(inner, lora)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [HandingOn, _adapted])
def test_a_wrapper_of_a_model_of_transformers_has_a_form_of_its_own(wrap: Any, tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return wrap(
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
                )
            )
        )

    run = samestep.parallelize(build(), "cross_entropy", torch.optim.SGD, layout="")
    ids = torch.arange(32).view(2, 16)
    run.step({"input_ids": ids, "labels": ids})
    with pytest.raises(
        ModelError, match=r"holds a model of transformers, and .* is a .*`with run.gathered\(\) as model`"
    ):
        run.save_pretrained(tmp_path / "out")
    if wrap is _adapted:
        with run.gathered() as model, torch.no_grad():
            model.save_pretrained(tmp_path / "own")
            logits = model(input_ids=ids).logits
        again = peft.PeftModel.from_pretrained(build().get_base_model(), tmp_path / "own")
        assert torch.equal(again(input_ids=ids).logits, logits)
