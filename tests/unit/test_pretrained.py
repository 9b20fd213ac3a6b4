"""A model from a folder has the values that transformers itself loads; what does not fit is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from samestep.building.families import quiet
from samestep.building.initial_values import Blueprint, blueprint
from samestep.building.model import model_source
from samestep.building.pretrained_form import _beside, unread_tokenizer
from samestep.building.stored_weights import StoredWeights
from samestep.errors import JobError, ModelError
from samestep.job import Job
from samestep.job_files import model_folder
from samestep.models.weight_files import configuration, digest_of
from samestep.training.trained import export
from tests import small
from tests.folders import FAMILIES, saved

CPU = torch.device("cpu")


def made(folder: Path, **config: Any) -> Blueprint:
    return blueprint(model_source(Job(model={"source": f"hf:{folder}", "config": config})), 3)


def tensors(folder: Path) -> dict[str, Tensor]:
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_and_every_part_of_it_is_what_transformers_loads(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family, torch.bfloat16)
    ours = made(folder)
    assert ours.stored is not None
    assert not ours.drawn
    assert not ours.stored.remarks()
    for name, expected in tensors(folder).items():
        assert torch.equal(ours.materialize(name, CPU), expected), name
        for dim, size in enumerate(expected.shape[:2]):
            halves = [(size // 2, size), (0, 1)]
            parts = torch.cat([expected.narrow(dim, start, stop - start) for start, stop in halves], dim).double()
            assert torch.equal(ours.materialize(name, CPU, torch.float64, halves, dim), parts), (name, dim)


def test_only_the_experts_that_are_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = made(saved(tmp_path, "mixtral"))
    read: list[str] = []
    values = StoredWeights._values

    def noting(self: StoredWeights, name: str, *args: Any) -> Tensor:
        read.append(name)
        return values(self, name, *args)

    monkeypatch.setattr(StoredWeights, "_values", noting)
    ours.materialize("model.layers.1.mlp.experts.gate_up_proj", CPU, None, [(2, 3)])
    assert [name.rpartition("layers.1.")[2] for name in read] == [
        "block_sparse_moe.experts.2.w1.weight",
        "block_sparse_moe.experts.2.w3.weight",
    ]


def test_what_the_folder_lacks_is_drawn_and_named_and_so_is_what_it_has_besides(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", shard="1GB")
    held = load_file(folder / "model.safetensors")
    del held["lm_head.weight"]
    without_prefix = {
        name.removeprefix("model."): tensor for name, tensor in held.items()
    }  # as the base model is saved
    save_file({**without_prefix, "value_head.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    ours = made(folder)
    assert ours.drawn == {"lm_head.weight"}
    assert ours.stored is not None
    assert ours.stored.remarks() == (
        "the folder lacks lm_head.weight, made as in a new model",
        "the model has no value_head.weight, which the folder holds",
    )
    new = blueprint(model_source(Job(model={"source": "hf:llama", "config": FAMILIES["llama"]})), 3)
    assert torch.equal(ours.materialize("lm_head.weight", CPU), new.materialize("lm_head.weight", CPU))
    assert torch.equal(ours.materialize("model.norm.weight", CPU), held["model.norm.weight"])


def resized(folder: Path, tokens: int | str, **tables: Any) -> Blueprint:
    return blueprint(model_source(Job(model={"source": f"hf:{folder}", "resize_embeddings": tokens}, **tables)), 3)


@pytest.mark.parametrize(
    ("family", "tokens"), [("llama", 70), ("gpt2", 50), ("mixtral", 70), ("qwen3", 70), ("gemma3_text", 50)]
)
def test_an_embedding_is_resized_as_transformers_resizes_it(family: str, tokens: int, tmp_path: Path) -> None:
    """All values are those of resize_token_embeddings but the new entries, which are those of a new model."""
    folder = saved(tmp_path, family)
    ours = resized(folder, tokens)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.resize_token_embeddings(tokens, mean_resizing=False)
    new = blueprint(
        model_source(Job(model={"source": f"hf:{family}", "config": {**FAMILIES[family], "vocab_size": tokens}})), 3
    )
    grown = set()
    for name, expected in {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }.items():
        made = ours.materialize(name, CPU)
        assert made.shape == expected.shape, name
        if expected.shape and expected.shape[0] == tokens:
            grown.add(name)
            assert torch.equal(made[:61], expected[:61]), name
            assert torch.equal(made[61:], new.materialize(name, CPU)[61:]), name
            halves = [(60, tokens), (0, 1)] if tokens > 61 else [(3, 7)]
            parts = torch.cat([made[start:stop] for start, stop in halves])
            assert torch.equal(ours.materialize(name, CPU, None, halves), parts)
            assert torch.equal(ours.materialize(name, CPU, torch.float64, [(3, 5)], 1), made[:, 3:5].double())
        else:
            assert torch.equal(made, expected), name
    assert grown == {
        one
        for one in ("model.embed_tokens.weight", "transformer.wte.weight", "lm_head.weight")
        if one in ours.canonical
    }
    assert ours.module.config.vocab_size == tokens  # type: ignore[union-attr]
    assert ours.stored is not None
    assert any(f"61 tokens in the folder, {tokens} in the model" in line for line in ours.stored.remarks())


@pytest.mark.parametrize(("asked", "size"), [("tokenizer", 256), ("tokenizer:100", 300), (61, 61)])
def test_the_tokenizer_says_how_many_entries_there_are(asked: int | str, size: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    assert resized(folder, asked).module.get_parameter("lm_head.weight").shape[0] == size
    large = saved(tmp_path / "large", "llama", vocab_size=400)
    assert resized(large, "tokenizer").module.get_parameter("lm_head.weight").shape[0] == 400


def test_what_cannot_be_resized_is_refused_with_what_works(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match=r"model.resize_embeddings = 64 adds entries for new tokens"):
        made(folder, vocab_size=64)
    with pytest.raises(ModelError, match=r"model.config sets it too. Use model.resize_embeddings alone"):
        blueprint(
            model_source(Job(model={"source": f"hf:{folder}", "resize_embeddings": 64, "config": {"vocab_size": 64}})),
            3,
        )
    with pytest.raises(ModelError, match=r"hf:llama has no folder. Use a size in model.config"):
        model_source(Job(model={"source": "hf:llama", "resize_embeddings": 64}))
    with pytest.raises(ModelError, match=r"is read without a tokenizer. Use a number"):
        resized(folder, "tokenizer", data={"source": "tokens:a.bin"})
    with pytest.raises(JobError, match="resize_embeddings"):
        Job(model={"resize_embeddings": "all"})


def test_a_refusal_of_added_tokens_names_what_works_and_a_resume_notices_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "model", "llama", tie_word_embeddings=True)
    words = [f"--set={key}={value}" for key, value in small.SMALL.items() if not key.startswith("model.config")]
    words += [
        f"--set=model.source=hf:{folder}",
        "--set=data.sequence_length=12",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    assert small.main("train", *words) == 2
    works = small.without_code(capsys.readouterr().err).rpartition(". Use ")[2].replace(" ", "").rstrip()
    assert works == "model.resize_embeddings=256"
    assert small.main("train", *words, f"--set={works}") == 0
    assert "256" in (export(tmp_path / "run", tmp_path / "out").folder / "config.json").read_text()
    with quiet():
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.shape[0] == 256
    before = digest_of(folder)
    _config(folder, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert digest_of(folder) != before
    assert small.main("train", "--resume", "--out", tmp_path / "run") == 2
    assert "have changed since" in capsys.readouterr().err


def test_fewer_layers_than_the_folder_has(tmp_path: Path) -> None:
    folder = saved(tmp_path, "gemma3_text")
    ours = made(folder, num_hidden_layers=1)
    assert ours.module.config.layer_types == json.loads((folder / "config.json").read_text())["layer_types"][:1]  # type: ignore[union-attr]
    assert not ours.drawn


def test_two_values_of_tied_tensors_are_refused_unless_they_are_equal(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3", shard="1GB")
    held = load_file(folder / "model.safetensors")
    head = held["model.embed_tokens.weight"].clone()
    save_file({**held, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(made(folder).materialize("lm_head.weight", CPU), head)
    save_file({**held, "lm_head.weight": head + 1}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight and lm_head.weight are tied"):
        made(folder)
    assert torch.equal(made(folder, tie_word_embeddings=False).materialize("lm_head.weight", CPU), head + 1)


def _config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _renamed(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    save_file({f"other{index}": tensor for index, tensor in enumerate(held.values())}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "config", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), {}, r"has no config.json. Use a folder that"),
        (_pickled, {}, r"pytorch_model.bin is a pickle, which can run any code.*model.safetensors, which"),
        (lambda folder: (folder / "model.safetensors").unlink(), {}, r"has no weights. Use model.safetensors"),
        (_short, {}, r"model.safetensors has \d+ bytes and should have \d+"),
        (lambda folder: _config(folder, model_type="lama"), {}, r"has no family 'lama' \(did you mean 'llama'\?\)"),
        (
            lambda folder: _config(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
            {},
            r"has no family 'mine'.*code of its own, which samestep does not run",
        ),
        (lambda folder: _config(folder, quantization_config={"bits": 4}), {}, r"are quantized, which samestep does not"),
        (lambda _: None, {"trust_remote_code": True}, r"samestep runs no code of a folder"),
        (lambda _: None, {"hiden_size": 8}, r"no such field \(did you mean 'hidden_size'\?\)"),
        (lambda _: None, {"intermediate_size": 41}, r"makes model.layers.0.mlp.\w+.weight \[.*\], and model.config makes"),
        (_renamed, {}, r"none of the 21 tensors of the folder, such as other0, belongs to LlamaForCausalLM"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_loaded_is_refused(
    damage: Callable[[Path], object], config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, "llama", shard="1GB")
    damage(folder)
    with pytest.raises(ModelError, match=reason):
        made(folder, **config)


def test_a_missing_file_of_an_index_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "mixtral")
    last = max(folder.glob("model-*.safetensors"))
    last.unlink()
    with pytest.raises(ModelError, match=rf"{last.name} is missing"):
        made(folder)


def test_the_task_chooses_the_class_of_a_folder(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    first = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **sizes))
    with quiet():
        first.save_pretrained(tmp_path)
    ours = blueprint(model_source(Job(model={"source": f"hf:{tmp_path}", "task": "masked"})), 0)
    assert type(ours.module) is type(first)
    assert not ours.drawn
    for name, expected in first.state_dict().items():
        assert torch.equal(ours.materialize(name, CPU), expected), name


def test_a_folder_is_told_from_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"there is no folder nowhere/llama"):
        made(Path("nowhere/llama"))
    (tmp_path / "gpt2").mkdir()  # without a config.json, such as a Python package
    assert model_folder(Job(model={"source": "hf:gpt2"})) is None
    saved(tmp_path / "llama", "llama")
    with pytest.raises(ModelError, match=r"Use hf:\./llama for the folder"):
        made(Path("llama"))
    assert not blueprint(model_source(Job(model={"source": "hf:./llama"})), 3).drawn


def test_numbers_without_a_word_in_json_are_read_from_a_configuration(tmp_path: Path) -> None:
    """Bamba limits its time steps by infinity, which transformers writes as a table."""
    (tmp_path / "config.json").write_text('{"limits": [0.0, {"__float__": "Infinity"}], "other": {"__float__": "1"}}')
    assert configuration(tmp_path) == {"limits": [0.0, math.inf], "other": {"__float__": "1"}}


def test_a_tokenizer_that_the_run_does_not_use_is_named_and_not_given_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    text = Job(model={"source": f"hf:{tmp_path}"}, data={"source": "jsonl:chats.jsonl"})
    assert unread_tokenizer(text) == tmp_path
    assert not list(_beside(text))
    own = text.model_copy(update={"data": text.data.model_copy(update={"tokenizer": str(tmp_path)})})
    images = text.model_copy(update={"data": text.data.model_copy(update={"source": "images:flowers"})})
    for job in own, images:
        assert unread_tokenizer(job) is None
        assert {path.name for path in _beside(job)} == {"tokenizer.json", "preprocessor_config.json"}
