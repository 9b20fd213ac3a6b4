"""Presets: their sizes are the published ones, and a traced module finds the same."""

from __future__ import annotations

import pytest
import torch

from samestep import catalog, presets
from samestep.decoder import Decoder, spec
from samestep.errors import ModelError
from samestep.job import Job
from samestep.model import ModelSpec
from samestep.presets import preset
from samestep.runtime import cuts
from samestep.runtime.trace import trace

transformers = pytest.importorskip("transformers")

SEQUENCE = 32
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
TINY = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "sequence": SEQUENCE}
GROUPED = {**SIZES, "intermediate_size": 160, "num_key_value_heads": 2}
PAIRS = {
    "llama": (
        lambda: transformers.LlamaConfig(**GROUPED),
        Decoder(**TINY, kv_heads=2, intermediate=160, gated=True),
    ),
    "gpt2": (
        lambda: transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=SEQUENCE, bos_token_id=0, eos_token_id=0
        ),
        Decoder(**TINY, positions=SEQUENCE, tied=True, bias=True, layer_norm=True, dropout=True),
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
        Decoder(**TINY, kv_heads=2, intermediate=160, gated=True, experts=4, top_k=2),
    ),
}


def traced(family: str) -> ModelSpec:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(PAIRS[family][0]())
    ids = torch.zeros(1, SEQUENCE, dtype=torch.long)
    return trace(model.train(), {"input_ids": ids}, family, styles=cuts.cuts_of(model).styles)


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


@pytest.mark.parametrize("rank", [0, 24])
def test_latent_attention_has_the_weights_of_its_module(rank: int) -> None:
    ranks = {
        "q_lora_rank": rank or None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 48}
    config = transformers.DeepseekV2Config(
        **{**GROUPED, "num_key_value_heads": 4}, **ranks, **experts, first_k_dense_replace=1
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    decoder = Decoder(
        **TINY, intermediate=160, gated=True, head_dim=16, query_rank=rank, latent_rank=16, rotary_dim=8, experts=4, top_k=2,
        expert_intermediate=48, shared_experts=2, dense_layers=1,
    )  # fmt: skip
    assert spec(decoder, "latent").num_params == sum(weight.numel() for weight in model.parameters())


def _shape(product: object) -> tuple[object, ...]:
    return tuple(getattr(product, name) for name in ("rows", "inner", "columns", "count", "factors", "groups"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tensor_cut_divides_the_same(family: str) -> None:
    found, counted = traced(family), spec(PAIRS[family][1], family)
    for mine, theirs in zip(counted.layers, found.layers, strict=True):
        assert [p.cut for p in mine.products] == [p.cut for p in theirs.products]
        assert mine.cut_by(2).forward_flops == theirs.cut_by(2).forward_flops


@pytest.mark.parametrize("family", PAIRS)
def test_eager_code_moves_and_keeps_at_least_what_fused_kernels_do(family: str) -> None:
    found, counted = traced(family).layers[1], spec(PAIRS[family][1], family).layers[1]
    assert counted.moved_elements <= found.moved_elements <= 8 * counted.moved_elements
    assert 0.5 * counted.saved_elements <= found.saved_elements <= 2.5 * counted.saved_elements
    assert counted.kernels <= found.kernels


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-175b", 174.6),
        ("gpt2-medium", 0.3548),
        ("gpt2-large", 0.774),
        ("gpt2-xl", 1.5576),
        ("gpt-neox-20b", 20.55),
        ("pythia-1.4b", 1.4146),
        ("pythia-6.9b", 6.857),
        ("pythia-12b", 11.846),
        ("mpt-7b", 6.649),
        ("mpt-30b", 29.957),
        ("llama-13b", 13.016),
        ("llama-33b", 32.529),
        ("llama3.2-1b", 1.2358),
        ("llama3.2-3b", 3.2127),
        ("mistral-7b", 7.2417),
        ("palm-540b", 540.35),
        ("qwen2.5-1.5b", 1.5437),
        ("qwen2.5-14b", 14.77),
        ("qwen2.5-72b", 72.7),
        ("qwen3-0.6b", 0.596),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.768),
        ("qwen3-32b", 32.762),
        ("qwen3-30b-a3b", 30.532),
        ("qwen3-235b-a22b", 235.09),
        ("gemma-2b", 2.506),
        ("gemma-7b", 8.538),
        ("gemma2-9b", 9.242),
        ("gemma2-27b", 27.227),
        ("phi3-mini", 3.821),
        ("phi4-14b", 14.66),
        ("yi-34b", 34.389),
        ("olmo2-7b", 7.299),
        ("olmoe-1b-7b", 6.919),
        ("dbrx-132b", 131.6),
        ("deepseek-v2-lite", 15.706),
        ("deepseek-v2", 235.74),
        ("kimi-k2", 1026.4),
        ("llama2-70b", 68.98),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.85),
        ("bloom-176b", 176.25),
        ("mt-nlg-530b", 529.6),
        ("mixtral-8x7b", 46.7),
        ("deepseek-v3", 671.0),
        ("gpt-oss-120b", 116.8),
        ("qwen2.5-0.5b", 0.494),
        ("bert-large", 0.334),
        ("resnet50", 0.02556),
    ],
)
def test_sizes_are_the_published_ones(name: str, billions: float) -> None:
    assert preset(name).num_params / 1e9 == pytest.approx(billions, rel=0.003)


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


def test_a_gpt_of_a_given_size_has_about_so_many_weights() -> None:
    for billions in (0.125, 1.3, 18, 52, 128, 530):
        model = spec(presets.sized(billions * 1e9, 2048), "sized")
        assert model.num_params == pytest.approx(billions * 1e9, rel=0.35 if billions < 1 else 0.12)


def test_a_spec_survives_its_json() -> None:
    model = preset("mixtral-8x7b", changes={"layers": 2})
    assert ModelSpec.from_json(model.to_json()) == model
