"""`samestep export --merge`: whatever the adapters train, the merged model has the logits of peft's own model with them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import samestep
from samestep.building.initial_values import blueprint
from samestep.building.model import model_source
from samestep.errors import JobError
from samestep.job import Job
from samestep.wings.adapters import lora
from tests.folders import saved
from tests.laboratory import job_of
from tests.parity.test_lora import hold_losses, loaded, logits_of, plain_losses, steps

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma3_text", {}),
    "mixture": ("mixtral", {"tie_word_embeddings": True}),
}
FORMS: dict[str, tuple[list[str], list[str]]] = {
    "block": (["ATTENTION"], []),
    "head": (["lm_head"], []),
    "embedding": (["EMBEDDING", "ATTENTION"], []),
    "both": (["EMBEDDING", "lm_head"], []),
    "all-linear": (["all-linear"], []),
    "whole head": (["ATTENTION"], ["lm_head"]),
    "whole embedding": (["ATTENTION"], ["EMBEDDING"]),
    "both whole": (["ATTENTION"], ["lm_head", "EMBEDDING"]),
    "whole norm": (["ATTENTION"], ["NORM"]),
    "head, whole embedding": (["lm_head"], ["EMBEDDING"]),
    "embedding, whole head": (["EMBEDDING"], ["lm_head"]),
}
"""Targets, and modules that are trained whole."""
UNTIED = {
    "head",
    "embedding",
    "both",
    "whole head",
    "whole embedding",
    "both whole",
    "head, whole embedding",
    "embedding, whole head",
}
"""The forms after which head and embedding are two weights."""
DAILY = {
    ("llama tied", "whole head"), ("llama tied", "head"), ("llama", "both whole"), ("gpt2", "all-linear"), ("qwen3", "both"),
    ("gemma", "embedding"), ("mixture", "embedding, whole head"), ("qwen2", "whole norm"),
}  # fmt: skip
CASES = [
    pytest.param(family, form, id=f"{family}: {form}", marks=() if (family, form) in DAILY else pytest.mark.nightly)
    for family in FAMILIES
    for form in FORMS
]


def lora_of(family: str, form: str) -> dict[str, Any]:
    is_gpt2 = FAMILIES[family][0] == "gpt2"
    words = {"ATTENTION": "c_attn", "EMBEDDING": "wte", "NORM": "ln_f"}
    words = words if is_gpt2 else {"ATTENTION": "q_proj", "EMBEDDING": "embed_tokens", "NORM": "model.norm"}
    targets, whole = ([words.get(name, name) for name in names] for names in FORMS[form])
    return {"targets": targets, "modules_to_save": whole, "r": 4, "alpha": 8.0}


@pytest.mark.parametrize(("family", "form"), CASES)
def test_what_is_merged_has_the_logits_of_peft(family: str, form: str, tmp_path: Path) -> None:
    kind, fields = FAMILIES[family]
    folder = saved(tmp_path / "base", kind, **fields)
    job = job_of("float32", 2, model={"source": f"hf:{folder}", "lora": lora_of(family, form)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about tied weights
        steps(0, 1, "dp=1", job, tmp_path / "run", 2)
        samestep.export(tmp_path / "run", tmp_path / "adapters")
        theirs = logits_of(peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "adapters"))
        samestep.export(tmp_path / "run", tmp_path / "merged", merge=True)
    ours = logits_of(loaded(tmp_path / "merged"))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6)
    assert (theirs - logits_of(loaded(folder))).abs().max() > 1e-4
    before, after = (
        json.loads((path / "config.json").read_text()).get("tie_word_embeddings")
        for path in (folder, tmp_path / "merged")
    )
    assert after == (before and form not in UNTIED)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore::FutureWarning")
def test_an_adapter_of_a_tied_embedding_has_the_losses_of_peft(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path_factory.mktemp("tied"), "llama", tie_word_embeddings=True)
    settings = {"r": 4, "lora_alpha": 8.0, "target_modules": ["embed_tokens", "q_proj"]}
    monkeypatch.setattr("tests.parity.test_lora.SETTINGS", settings)
    lora = {"targets": settings["target_modules"], "r": 4, "alpha": 8.0}
    job = job_of("float32", 3, model={"source": f"hf:{folder}", "lora": lora})
    hold_losses("tp=2", job, plain_losses(folder, job.model_dump_json()))


@pytest.mark.parametrize(
    "lora", [{"targets": ["q_proj"]}, {"targets": ["lm_head"], "modules_to_save": ["embed_tokens"]}]
)
def test_adapters_of_a_resized_model_hold_its_new_tokens(lora: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "base", "llama", vocab_size=50, tie_word_embeddings=True)
    model = {"source": f"hf:{folder}", "resize_embeddings": 61, "lora": lora}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about tied weights
        steps(0, 1, "dp=1", job_of("float32", 2, model=model), tmp_path / "run", 2)
        samestep.export(tmp_path / "run", tmp_path / "adapters")
        samestep.export(tmp_path / "run", tmp_path / "merged", merge=True)
        base: Any = loaded(folder)
        base.resize_token_embeddings(61, mean_resizing=False)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    tokens = torch.arange(37, 61).view(2, 12)
    with torch.no_grad():
        logits = [one.eval()(input_ids=tokens).logits for one in (theirs, loaded(tmp_path / "merged"))]
    torch.testing.assert_close(logits[0], logits[1], rtol=0.0, atol=1e-6)


class Tied(nn.Module):
    """A module of one's own whose head is always the embedding's weight, and a frozen table that is stored too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 61, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(input_ids)) * self.scale)


def test_adapters_of_a_module_of_ones_own_are_merged_into_a_state_dict(tmp_path: Path) -> None:
    model = {"source": f"{__name__}:Tied", "lora": {"targets": ["mix"], "r": 4, "alpha": 8.0}}
    job = job_of("float32", 2, model=model)
    steps(0, 1, "dp=1", job, tmp_path / "run", 2)
    out = samestep.export(tmp_path / "run", tmp_path / "merged", merge=True, allow_code=True).folder
    held = load_file(out / "model.safetensors")
    Tied().load_state_dict(held)
    adapters = load_file(
        samestep.export(tmp_path / "run", tmp_path / "adapters", allow_code=True).folder / "adapter_model.safetensors"
    )
    down, up = (adapters[f"base_model.model.mix.lora_{part}.weight"] for part in "AB")
    base = blueprint(model_source(job), job.train.seed).materialize("mix.base_layer.weight", torch.device("cpu"))
    torch.testing.assert_close(held["mix.weight"], base + 2.0 * up @ down, rtol=0.0, atol=1e-6)
    assert torch.equal(held["embed.weight"], held["head.weight"])


def test_what_no_configuration_unties_is_refused_by_name() -> None:
    model = {"source": f"{__name__}:Tied", "lora": {"targets": ["mix"], "modules_to_save": ["head"]}}
    job = Job(model=model)
    with pytest.raises(
        JobError, match=r"trains embed.weight and head.weight apart, and Tied has one weight for them in any"
    ):
        lora.merged(blueprint(model_source(job), 0), job)
    t5 = {
        "source": "hf:t5",
        "task": "seq2seq",
        "config": {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 61},
    }
    job = Job(model={**t5, "lora": {"targets": ["q"], "modules_to_save": ["lm_head"]}})
    with pytest.raises(
        JobError, match=r"T5ForConditionalGeneration has one weight for them .*: without --merge the adapters"
    ):
        lora.merged(blueprint(model_source(job), 0), job)
