"""Presets: their sizes are the published ones, and a traced module finds the same."""

from __future__ import annotations

import functools
import operator
import shutil
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from samestep import cli
from samestep import job_files as jobs
from samestep.errors import InputError, ModelError
from samestep.examination.plan_search import structural_plan
from samestep.independence.cut_proof import run_forward
from samestep.job import Job
from samestep.job_tables import LoraTable
from samestep.models import catalog, presets
from samestep.models.catalog import add_adapters
from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.models.layer_spec import LayerSpec
from samestep.models.presets import preset
from samestep.models.spec import ModelSpec, from_json, to_json
from samestep.output import text
from samestep.tracing.experts import experts_of
from samestep.tracing.operations import Recorder
from samestep.tracing.trace import trace

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SEQUENCE = 32
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
TINY = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "sequence": SEQUENCE}
GROUPED = {**SIZES, "intermediate_size": 160, "num_key_value_heads": 2}
PAIRS = {
    "llama": (lambda: transformers.LlamaConfig(**GROUPED), Decoder(**TINY, kv_heads=2, intermediate=160, gated=True)),
    "gpt2": (
        lambda: transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=SEQUENCE, bos_token_id=0, eos_token_id=0
        ),
        Decoder(**TINY, positions=SEQUENCE, tied=True, bias=True, layer_norm=True, dropout=True),
    ),
    "qwen3": (
        lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
        Decoder(**TINY, kv_heads=2, intermediate=160, gated=True, head_dim=16, query_norm="head"),
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
        Decoder(**TINY, kv_heads=2, intermediate=160, gated=True, experts=4, top_k=2),
    ),
}  # fmt: skip


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@functools.cache
def traced(family: str, targets: str | tuple[str, ...] = ()) -> ModelSpec:
    """The trace of a module, with adapters of peft at some of its layers."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(PAIRS[family][0]())
        if targets:
            named = targets if isinstance(targets, str) else [*targets]
            lora = peft.LoraConfig(target_modules=named, r=4, lora_alpha=12.0, fan_in_fan_out=family == "gpt2")
            peft.inject_adapter_in_model(lora, model)
    ids = torch.zeros(1, SEQUENCE, dtype=torch.long)
    recorder, sample = Recorder(), {"input_ids": ids}
    run_forward(model.train(), sample, {}, lambda name: torch.zeros(()), recorder)
    return trace(model, sample, family, styles=structural_plan(model, recorder.operations, experts_of(model).counts))


@pytest.mark.parametrize("family", PAIRS)
def test_hyperparameters_and_a_traced_module_give_the_same_model(family: str) -> None:
    found, counted = traced(family), spec(PAIRS[family][1], family)
    assert counted.num_params == found.num_params
    assert counted.forward_flops == pytest.approx(found.forward_flops, rel=0.01)
    assert len(counted.layers) == len(found.layers)
    for index, (mine, theirs) in enumerate(zip(counted.layers, found.layers, strict=True)):
        numel = [sum(param.numel for param in model.params_of(index)) for model in (counted, found)]
        assert numel[0] == numel[1]
        assert mine.is_block == theirs.is_block
        assert [_shape(p) for p in mine.products] == [_shape(p) for p in theirs.products]
        assert mine.forward_flops == sum(p.flops for p in mine.products)
        if mine.is_block:
            assert mine.output_elements == theirs.output_elements


LLAMA = {**TINY, "kv_heads": 2, "intermediate": 160, "gated": True}


def _shape(product: object) -> tuple[object, ...]:
    return tuple(getattr(product, name) for name in ("rows", "inner", "columns", "count", "factors", "groups"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_tensor_cut_divides_the_same(family: str) -> None:
    found, counted = traced(family), spec(PAIRS[family][1], family)
    for mine, theirs in zip(counted.layers, found.layers, strict=True):
        assert [p.cut for p in mine.products] == [p.cut for p in theirs.products]
        assert mine.cut_by(2).forward_flops == theirs.cut_by(2).forward_flops


def test_norms_of_heads_are_whole_and_a_norm_of_all_heads_is_cut() -> None:
    each, every = (spec(Decoder(**LLAMA, query_norm=kind), kind).params_of(1) for kind in ("head", "all"))
    assert [(p.shape, p.partial, p.cut) for p in each if "_norm." in p.name] == [((16,), "cut", None)] * 2
    assert [(p.shape, p.cut.groups) for p in every if "_norm." in p.name and p.cut] == [((64,), 4), ((32,), 2)]


@pytest.mark.parametrize("family", PAIRS)
def test_eager_code_moves_and_keeps_at_least_what_fused_kernels_do(family: str) -> None:
    found, counted = traced(family).layers[1], spec(PAIRS[family][1], family).layers[1]
    assert counted.moved.elements <= found.moved.elements <= 8 * counted.moved.elements
    assert 0.5 * counted.saved_elements <= found.saved_elements <= 2.5 * counted.saved_elements
    assert counted.moved.kernels <= found.moved.kernels


SIZES_OF = {
    "gpt3-175b": 174_604_259_328, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680, "pythia-1.4b": 1_414_647_808, "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320, "mpt-7b": 6_649_286_656, "mpt-30b": 29_957_200_896, "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616, "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560, "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896,
    "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320, "gemma2-2b": 2_614_341_888, "phi3-mini": 3_821_079_552,
    "phi4-14b": 14_659_507_200, "yi-34b": 34_388_917_248, "olmo2-7b": 7_298_617_344, "olmo2-32b": 32_234_279_936,
    "olmoe-1b-7b": 6_919_161_856, "dbrx-132b": 131_596_523_520, "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880, "kimi-k2": 1_026_408_209_408, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "bloom-176b": 176_247_271_424, "bloom-7b1": 7_069_016_064, "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352, "gpt-oss-120b": 116_829_156_672, "gpt-oss-20b": 20_914_757_184,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "qwen2.5-32b": 32_763_876_352,
    "opt-1.3b": 1_315_758_080, "opt-175b": 174_604_468_224, "nemotron4-15b": 15_628_775_424,
    "llama4-scout": 107_769_861_120, "resnet50": 25_557_032,
}  # fmt: skip
"""Of the modules that transformers and torchvision build."""


@pytest.mark.parametrize("name", SIZES_OF)
def test_sizes_are_those_of_the_modules(name: str) -> None:
    assert preset(name).num_params == SIZES_OF[name]


@pytest.mark.parametrize(
    ("name", "billions"), [("palm-540b", 540.35), ("mt-nlg-530b", 529.6), ("bert-large", 0.334), ("grok1-314b", 314)]
)
def test_sizes_are_the_published_ones(name: str, billions: float) -> None:
    assert preset(name).num_params / 1e9 == pytest.approx(billions, rel=0.006)


def test_resnet_50_does_what_its_paper_says() -> None:
    assert preset("resnet50").forward_flops / 2 == pytest.approx(4.09e9, rel=0.01)  # multiply-adds, 224 x 224


def test_adapters_leave_the_base_frozen() -> None:
    model = preset("llama3-8b", changes={"adapter_rank": 16, "layers": 2})
    trained = sum(param.numel for param in model.params if param.trainable)
    assert 0 < trained < model.num_params / 1000
    block = model.layers[1]
    assert block.backward_flops < 1.2 * block.forward_flops + sum(
        p.flops for p in block.products if p.factors == "causal"
    )


def test_a_job_may_name_a_preset_and_change_its_fields() -> None:
    model = {"source": "preset:llama3-8b", "config": {"layers": 3}}
    whole = catalog.model_spec(Job(model=model))
    assert sum(layer.is_block for layer in whole.layers) == 3
    assert whole.logit_rows == 8192
    assert catalog.model_spec(Job(model=model, data={"sequence_length": 128})).logit_rows == 128


def test_what_is_no_preset_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"no preset 'llama3-8c' \(did you mean 'llama3-8b'\?\)"):
        preset("llama3-8c")
    with pytest.raises(ModelError, match="preset llama3-8b has no 'layer'"):
        preset("llama3-8b", changes={"layer": 3})


def test_every_preset_may_be_named() -> None:
    others = {*presets.PRESETS} - {*SIZES_OF}
    assert all(preset(name).num_params > 0 for name in others)


@pytest.mark.parametrize(
    ("name", "changes", "mistake"),
    [
        ("llama2-7b", {"heads": 0}, "heads=0 is not a whole number of at least 1"),
        ("llama2-7b", {"hidden": 0}, "hidden=0 is not a whole number of at least 1"),
        ("llama2-7b", {"vocab": -5}, "vocab=-5 is not a whole number of at least 1"),
        ("llama2-7b", {"sequence": 0}, "sequence=0 is not a whole number of at least 1"),
        ("llama2-7b", {"layers": "many"}, "layers='many' is not a whole number of at least 1"),
        ("llama2-7b", {"layers": True}, "layers=True is not a whole number of at least 1"),
        ("llama2-7b", {"intermediate": -1}, "intermediate=-1 is not a whole number of at least 0"),
        ("llama2-7b", {"experts": -1}, "experts=-1 is not a whole number of at least 0"),
        ("llama2-7b", {"tied": "maybe"}, "tied='maybe' is neither true nor false"),
        ("llama2-7b", {"attention": "foo"}, "attention='foo' must be one of 'causal', 'attention', 'plain'"),
        ("llama2-7b", {"kv_heads": 7}, "kv_heads=7 does not divide heads=32. Use 1, 2, 4, 8, 16, 32"),
        ("llama2-7b", {"heads": 31}, "heads=31 does not divide hidden=4096. Use 1, 2, 4, 8, 16, 32"),
        ("llama2-7b", {"experts": 8}, "top_k=0 of experts=8. Use 1 to 8"),
        ("llama2-7b", {"experts": 8, "top_k": 9}, "top_k=9 of experts=8. Use 1 to 8"),
        ("llama2-7b", {"rotary_dim": 64}, "rotary_dim=64 has no effect with latent_rank=0. Use rotary_dim=0"),
        ("deepseek-v3", {"layers": 2}, "dense_layers=3 of layers=2. Use 0 to 2"),
        ("deepseek-v3", {"shared_experts": -1}, "shared_experts=-1 is not a whole number of at least 0"),
        ("deepseek-v3", {"adapter_rank": 8}, "adapter_rank=8 has no effect with latent_rank=512. Use adapter_rank=0"),
    ],
)
def test_fields_that_make_no_model_are_refused(name: str, changes: dict[str, object], mistake: str) -> None:
    with pytest.raises(ModelError) as caught:
        preset(name, changes=changes)
    assert str(caught.value) == f"preset {name}: {mistake}"


@pytest.mark.parametrize(
    ("name", "its"), [("llama3-8b", "its fields are adapter_rank, "), ("resnet50", "it has no fields to change")]
)
def test_keys_of_another_models_configuration_are_named_with_how_to_drop_them(name, its, tmp_path):
    file, setting = tmp_path / "job.toml", f"model.source=preset:{name}"
    file.write_text('[model]\nsource = "hf:llama"\nconfig = { vocab_size = 256, hidden_size = 32 }\n')
    says = rf"preset {name} has no 'vocab_size', 'hidden_size'.*; {its}.*\. Use --set model\.config=\{{\}} to drop all keys"
    with pytest.raises(ModelError, match=says):
        catalog.model_spec(jobs.load(file, [setting]))
    assert catalog.model_spec(jobs.load(file, [setting, "model.config={}"])).layers


def test_a_gpt_of_a_given_size_has_about_so_many_weights() -> None:
    for billions in (0.125, 1.3, 18, 52, 128, 530):
        model = spec(presets.gpt_of_size(billions * 1e9, 2048), "sized")
        assert model.num_params == pytest.approx(billions * 1e9, rel=0.35 if billions < 1 else 0.12)


def test_a_spec_survives_its_json() -> None:
    model = preset("mixtral-8x7b", changes={"layers": 2})
    assert from_json(to_json(model)) == model


def lora_on(source: str, **lora: Any) -> ModelSpec:
    return catalog.model_spec(Job(model={"source": source, "lora": {"r": 4, **lora}}))


@pytest.mark.parametrize(
    ("source", "targets", "linear"),
    [
        ("preset:llama3-8b", ["q_proj", "v_proj"], [(4096, 4096), (1024, 4096)]),
        ("preset:llama3-8b", ["all-linear"], [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]),
        ("preset:gpt2", ["c_attn"], [(2304, 768)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("base", ["full", "nf4"])
def test_a_preset_with_adapters_trains_them_alone(source, targets, linear, base):
    found, plain = lora_on(source, targets=targets, base=base), catalog.model_spec(Job(model={"source": source}))
    blocks = sum(layer.is_block for layer in plain.layers)
    assert sum(p.numel for p in found.params if p.trainable) == blocks * sum(4 * (a + b) for a, b in linear)
    assert {p.name for p in found.params if not p.trainable} == {p.name for p in plain.params}
    packed = {p.name.rpartition(".")[0].rpartition(".")[2] for p in found.params if p.held_as}
    assert ("up_proj" in packed) is (base == "nf4")
    assert not packed & {"lm_head", "embed_tokens", "input_layernorm"}
    more = sum(layer.forward_flops for layer in found.layers) - sum(layer.forward_flops for layer in plain.layers)
    assert more == blocks * 2 * plain.sequence * sum(4 * (a + b) for a, b in linear)


def work_added(found: ModelSpec, before: ModelSpec) -> list[tuple[int, ...]]:
    """What one spec has more of than another, of operations, moved elements and FLOPs of each layer, whole and under tp=2."""

    def counts(layer: LayerSpec) -> tuple[int, ...]:
        return layer.moved.kernels, layer.moved.elements, layer.moved.cut_elements, layer.forward_flops

    pairs = [(f.cut_by(d), b.cut_by(d)) for d in (1, 2) for f, b in zip(found.layers, before.layers, strict=True)]
    return [tuple(map(operator.sub, counts(f), counts(b))) for f, b in pairs]


def kept_more(found: ModelSpec, before: ModelSpec) -> list[tuple[int, ...]]:
    """What one spec keeps more than another from the forward of each layer, and the part that a tensor cut divides; under selective
    recompute too."""

    def counts(layer: LayerSpec) -> tuple[int, ...]:
        selective = layer.saved_selective_elements, layer.saved_selective_cut_elements
        return layer.saved_elements, layer.saved_cut_elements, *selective

    return [tuple(map(operator.sub, counts(f), counts(b))) for f, b in zip(found.layers, before.layers, strict=True)]


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), LINEAR], ids=",".join)
def test_adapters_of_a_preset_start_move_and_keep_what_those_of_peft_do(targets: tuple[str, ...]) -> None:
    table = LoraTable(targets=targets, r=4, alpha=12.0)
    model = add_adapters(plain := spec(PAIRS["llama"][1], "llama"), table)
    adapted, bare = traced("llama", targets), traced("llama")
    assert work_added(model, plain) == work_added(adapted, bare)
    assert [p.cut for p in model.layers[1].products] == [p.cut for p in adapted.layers[1].products]
    dropping = add_adapters(plain, table.model_copy(update={"dropout": 0.1})).layers[1]
    assert dropping.moved.kernels == model.layers[1].moved.kernels + len(targets)
    assert dropping.moved.elements > model.layers[1].moved.elements
    ours, theirs = kept_more(model, plain), kept_more(adapted, bare)
    numel, rows = SEQUENCE * SIZES["hidden_size"], SEQUENCE
    # A norm of one kernel keeps its input alone, one of several its normalized input too, until its weight is frozen.
    assert ours[2] == (theirs[2][0] + 2 * numel, *theirs[2][1:])
    assert ours[-1][0] == theirs[-1][0] + numel
    # The gradients of the first block's input are not asked for, so its first norm also keeps no roots; but angles, for all blocks.
    assert ours[1] == (theirs[1][0] + 2 * numel + rows, *theirs[1][1:])


def test_adapters_of_a_decoder_start_move_and_keep_what_those_of_peft_do() -> None:
    model, plain = (spec(replace(PAIRS["gpt2"][1], adapter_rank=rank), "gpt2") for rank in (4, 0))
    adapted, bare = traced("gpt2", r".*attn\.(c_attn|c_proj)"), traced("gpt2")
    assert work_added(model, plain)[1] == work_added(adapted, bare)[1]
    pairs = list(zip(kept_more(model, plain), kept_more(adapted, bare), strict=True))
    assert [mine[:2] for mine, _ in pairs[2:]] == [theirs[:2] for _, theirs in pairs[2:]]


def test_names_that_a_preset_lacks_are_named_with_those_it_has() -> None:
    with pytest.raises(
        ModelError, match=r"preset llama3-8b is called 'q_porj' \(did you mean 'q_proj'\?\). Use .* all-linear"
    ):
        lora_on("preset:llama3-8b", targets=["q_porj"])
    whole = lora_on("preset:llama3-8b", targets=["q_proj"], modules_to_save=["lm_head"])
    assert any(p.trainable and p.name == "lm_head.weight" for p in whole.params)


def test_a_long_trace_says_what_it_is_doing(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(text, "PATIENCE_S", (0.0, 0.0))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))  # another Python would import torch for 3 s
    with pytest.raises(InputError):
        catalog.model_spec(Job(model={"source": "no_such:build"}))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("samestep: tracing no_such:build: ")
    assert cli.main(["plan", "--set", "model.source=preset:gpt2", "--devices", "2", "--hardware", "h100x8"]) == 0
    assert capsys.readouterr().err == "samestep: comparing the layouts of 2 devices\n"
