"""Models and data of the parity and ledger tests: a Llama, a GPT-2 with tied embeddings, and a plain module."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import samestep
from samestep.job_tables import LoraTable
from samestep.wings.adapters.lora import insert
from tests.parts import Words

VOCABULARY, LENGTH = 61, 12


class Plain(nn.Module):
    """A user's own module: no transformers, odd sizes, a scale of its own, a weight that is used twice."""

    def __init__(self, width: int = 10, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1) * 0.7)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Capped(Plain):
    """A frozen head, as with adapters, whose logits are multiplied by a weight and capped."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.ones(1) * 1.3)
        self.head.requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return 3.0 * torch.tanh(super().forward(input_ids) * self.heat / 3.0)


class Centred(Plain):
    """Activations less their mean over all samples, and what all samples have in common."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scale
        for block in self.blocks:
            x = block(x)
            x = x - samestep.batch_mean(x.mean(1)) + 0.1 * samestep.batch_cat(x[:, 0]).square().mean(0)
        return self.head(self.norm(x))


class WithStatistics(Plain):
    """A buffer that the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mix(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x + mean)))))


class Noisy(Plain):
    """Noise on the embeddings, of each sample and step its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Call(lambda x: x + 0.3 * torch.randn_like(x))
        self.embed = nn.Sequential(self.embed, self.noise)


class IdleHead(Plain):
    """A second head that is trained in no step."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(10, 3)


class Sometimes(Plain):
    """A shift of samples that begin with one token, which the first step of a small job has, and the next two have not."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(10, 10)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scale
        begins = input_ids[:, 0] == 41
        if bool(begins.any()):
            x = x + self.shift(x) * begins[:, None, None].to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Adapted(Plain):
    """A policy against itself without its adapters, as in preference training."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.layer = AdaptedLayer(10)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(input_ids) * self.scale)
        policy = self.layer(x, is_on=True)
        with torch.no_grad():
            reference = self.layer(x, is_on=False)
        return self.head(self.norm(policy - 0.5 * reference))


class AdaptedLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False))

    def turned(self, is_on: bool) -> bool:
        return is_on

    def forward(self, x: Tensor, is_on: bool) -> Tensor:
        return self.base(x) + (self.adapter(x) if self.turned(is_on) else 0.0)


def plain() -> nn.Module:
    return Plain()


def plain_with_dropout() -> nn.Module:
    return Plain(dropout=0.3)


def hf(family: str, **fields: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **fields)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config)


LLAMA: Callable[[], nn.Module] = functools.partial(
    hf, "llama", vocab_size=VOCABULARY, hidden_size=16, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
GPT2: Callable[[], nn.Module] = functools.partial(
    hf, "gpt2", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
GPT2_WITH_DROPOUT: Callable[[], nn.Module] = functools.partial(
    hf, "gpt2", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
)  # fmt: skip

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "plain": plain,
    "plain_with_dropout": plain_with_dropout,
    "plain_with_statistics": WithStatistics,
    "centred": Centred,
    "capped": Capped,
    "gpt2_with_dropout": GPT2_WITH_DROPOUT,
    "noisy": Noisy,
    "idle_head": IdleHead,
    "adapted": Adapted,
    "sometimes": Sometimes,
}


class Call(nn.Module):
    """A module whose forward is a given function."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = forward

    def forward(self, *args: Tensor) -> Tensor:
        return self._function(*args)


class Tokens:
    """Random tokens and the next ones, of which samples count very different numbers: a mean of means would be far off."""

    def __init__(self, length: int = 40) -> None:
        rng = np.random.default_rng(5)
        self.input_ids = torch.from_numpy(rng.integers(0, VOCABULARY, (length, LENGTH)))
        self.labels = torch.from_numpy(rng.integers(0, VOCABULARY, (length, LENGTH)))
        self.labels[:, :-1] = self.input_ids[:, 1:]
        for index in range(length):
            self.labels[index, rng.integers(1, LENGTH + 1) :] = -100

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class PackedTokens(Tokens):
    """Documents that begin and end within samples, and across slices; one of one token."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, second = 1 + index % 4, 8
        runs = (first, second - first, LENGTH - second)
        return {**super().__getitem__(index), "position_ids": torch.cat([torch.arange(run) for run in runs])}


class Attentive(nn.Module):
    """A user's own decoder with a plan of how to cut it: attention written by hand, biases, a norm of each head."""

    tensor_plan: ClassVar[dict[str, str]] = {
        "embed": "vocab",
        "blocks.*.q": "column",
        "blocks.*.k": "column",
        "blocks.*.v": "column",
        "blocks.*.head_norm": "sum",
        "blocks.*.out": "row",
        "blocks.*.up": "column",
        "blocks.*.down": "row",
        "head": "vocab",
    }

    def __init__(
        self, width: int = 16, heads: int = 4, blocks: int = 2, vocabulary: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.rate = dropout
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(AttentiveBlock(width, heads, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(self.embed(input_ids), self.rate, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AttentiveBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = heads
        self.rate, self.inner, self.outer = dropout, nn.Dropout(dropout), nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.head_norm = nn.LayerNorm(width // heads)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q(normed), self.k(normed), self.v(normed))
        )
        rate = self.rate if self.training else 0.0
        mixed = torch.nn.functional.scaled_dot_product_attention(self.head_norm(q), k, v, None, rate, is_causal=True)
        x = x + self.outer(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.outer(self.down(self.inner(torch.nn.functional.gelu(self.up(x)))))


class Parted(nn.Module):
    """A user's own decoder whose blocks hold attention and MLP as modules of their own."""

    tensor_plan: ClassVar[dict[str, str]] = {
        "embed": "vocab",
        **{f"blocks.*.attention.{name}": "column" for name in "qkv"},
        "blocks.*.attention.head_norm": "sum",
        "blocks.*.attention.out": "row",
        "blocks.*.mlp.0": "column",
        "blocks.*.mlp.2": "row",
        "head": "vocab",
    }

    def __init__(self, width: int = 16, heads: int = 4, blocks: int = 4, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(PartedBlock(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PartedBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x)) * self.gain
        return x + self.mlp(self.second(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.head_norm, self.out = nn.LayerNorm(width // heads), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x))
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(self.head_norm(q), k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Unsaid(Parted):
    """A plan that says nothing of whole weights which the attentions use on what it cuts."""

    tensor_plan: ClassVar[dict[str, str]] = {name: cut for name, cut in Parted.tensor_plan.items() if cut != "sum"}

    def __init__(self) -> None:
        super().__init__(blocks=2)
        for block in self.blocks:
            block.attention = Tempered(16, 4)


class Tempered(Attention):
    """The temperature is made something of before it meets what is cut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.temperature = nn.Parameter(torch.zeros(width // heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x))
        )
        q = self.head_norm(q) * self.temperature.exp()
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class UsedBothWays(Unsaid):
    """A norm of each head that norms the heads of the input too, which are whole."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x + block.attention.head_norm(x.unflatten(-1, (4, -1))).flatten(2))
        return self.head(self.norm(x))


class UsedByAnother(Unsaid):
    """Attentions that use the weight of their norm without calling it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = Borrowing(16, 4)


class Borrowing(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x) * self.head_norm.weight.repeat(self.q.out_features // self.head_norm.weight.numel())
        return self.out(q + self.k(x) + self.v(x))


class UsedBehindTheHead(Unsaid):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.PReLU()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.last(super().forward(input_ids))


class BatchNormed(Plain):
    """Batch norm in a user's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnBatchNorm(10)


class OwnBatchNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=(0, 1), correction=0)
        return (x - mean) * (variance + 1e-5).rsqrt() * self.weight + self.bias


EVEN = {"vocab_size": 64, "max_position_embeddings": 32}
MODELS |= {
    "attentive": Attentive,
    "unsaid": Unsaid,
    "used_both_ways": UsedBothWays,
    "used_by_another": UsedByAnother,
    "used_behind_the_head": UsedBehindTheHead,
    "own_batch_norm": BatchNormed,
    "llama_even": functools.partial(
        hf, "llama", hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, **EVEN,
    ),
    "llama_tied": functools.partial(
        hf, "llama", hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, **EVEN,
    ),
    "qwen3": functools.partial(
        hf, "qwen3", hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, **EVEN,
    ),
    "qwen2": functools.partial(
        hf, "qwen2", hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **EVEN,
    ),
    "apertus": functools.partial(
        hf, "apertus", hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, hidden_act="xielu", rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **EVEN,
    ),
    "gpt2_even": functools.partial(
        hf, "gpt2", vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip

DEEP = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4, **EVEN}
MODELS |= {
    "deep_llama": functools.partial(hf, "llama", num_key_value_heads=2, **DEEP),
    # Its rows are four blocks of 16 elements, so that tp cuts none.
    "wide_llama": functools.partial(
        hf, "llama", num_key_value_heads=2, **{**DEEP, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    ),
    "deep_tied": functools.partial(hf, "llama", num_key_value_heads=2, tie_word_embeddings=True, **DEEP),
    "deep_qwen3": functools.partial(hf, "qwen3", num_key_value_heads=2, head_dim=8, **DEEP),
    "deep_gemma3": functools.partial(
        hf, "gemma3_text", num_key_value_heads=2, head_dim=4, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2, **DEEP,
    ),
    "deep_gpt_oss": functools.partial(
        hf, "gpt_oss", num_key_value_heads=2, head_dim=4, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2, **{**DEEP, "intermediate_size": 16},
    ),
    "many_heads": functools.partial(
        hf, "qwen3", num_key_value_heads=2, head_dim=4, **{**DEEP, "num_attention_heads": 8}
    ),
    "deep_gemma": functools.partial(
        hf, "gemma", num_key_value_heads=2, head_dim=4, tie_word_embeddings=True, pad_token_id=0, **DEEP
    ),
    "deep_granite": functools.partial(
        hf, "granite", num_key_value_heads=2, embedding_multiplier=12.0, tie_word_embeddings=False, **DEEP
    ),
    "deep_gpt2": functools.partial(
        hf, "gpt2", vocab_size=64, n_embd=16, n_layer=4, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "deep_attentive": functools.partial(Attentive, blocks=4),
    "parted": Parted,
    "deep_plain": functools.partial(Plain, blocks=4),
    "dropping_attentive": functools.partial(Attentive, blocks=4, dropout=0.3),
    "dropping_llama": functools.partial(hf, "llama", num_key_value_heads=2, attention_dropout=0.2, **DEEP),
    "dropping_gpt2": functools.partial(
        hf, "gpt2", vocab_size=64, n_embd=16, n_layer=4, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
    ),
    "dropping_gpt2_eager": functools.partial(
        hf, "gpt2", vocab_size=64, n_embd=16, n_layer=4, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    ),
}  # fmt: skip

EXPERTS = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, **EVEN}
MODELS |= {
    "mixtral": functools.partial(
        hf, "mixtral", intermediate_size=24, num_hidden_layers=2, num_local_experts=4, **EXPERTS
    ),
    "deep_mixtral": functools.partial(
        hf, "mixtral", intermediate_size=24, num_hidden_layers=4, num_local_experts=4, **EXPERTS
    ),
    "qwen2_moe": functools.partial(
        hf, "qwen2_moe", intermediate_size=40, moe_intermediate_size=8, shared_expert_intermediate_size=24,
        num_hidden_layers=2, num_experts=4, **EXPERTS,
    ),
    "qwen3_moe": functools.partial(
        hf, "qwen3_moe", intermediate_size=40, moe_intermediate_size=8, head_dim=8, num_hidden_layers=3,
        num_experts=8, mlp_only_layers=[1], **EXPERTS,
    ),
}  # fmt: skip


class ExpertDispatch(Words):
    """A user's own decoder with experts in a loop, a bias of each, and a plan that names them."""

    expert_plan: ClassVar[list[str]] = ["blocks.*.experts"]

    def __init__(self, experts: int = 4, crowded: bool = False, width: int = 12, blocks: int = 2) -> None:
        kind = functools.partial(DealingBlock, width, experts, crowded)
        super().__init__(*[kind] * blocks, width=width, entries=VOCABULARY)


class DealingBlock(nn.Module):
    def __init__(self, width: int, experts: int, crowded: bool) -> None:
        super().__init__()
        self.crowded = crowded
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = OwnExperts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        if self.crowded:
            scores = scores * (torch.arange(scores.shape[-1], device=x.device) < 2)
        weights, chosen = scores.topk(2)
        return x + self.experts(rows, chosen, weights).view_as(x)


class OwnExperts(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width)
        self.bias = nn.Parameter(torch.randn(experts, 2 * width) / width)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.num_experts):  # all rows through all experts: no shape depends on what is chosen
            weight = (weights * (chosen == expert)).sum(1, keepdim=True)
            hidden = torch.nn.functional.gelu(x @ self.up[expert] + self.bias[expert])
            result = result + weight * (hidden @ self.down[expert])
        return result


MODELS |= {
    "own_experts": ExpertDispatch,
    "three_experts": functools.partial(ExpertDispatch, experts=3),
    "crowded_experts": functools.partial(ExpertDispatch, experts=8, crowded=True),
}
MODELS |= {
    "mixtral_balanced": functools.partial(MODELS["mixtral"], output_router_logits=True, router_aux_loss_coef=0.1),
    "qwen3_moe_balanced": functools.partial(MODELS["qwen3_moe"], output_router_logits=True, router_aux_loss_coef=0.1),
}


def trained_in(model: str, *patterns: str) -> nn.Module:
    """A model of which only the weights whose names match a pattern are trained."""
    module = MODELS[model]()
    for name, param in module.named_parameters():
        param.requires_grad_(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    return module


def with_adapters(model: str, *targets: str) -> nn.Module:
    """A model of which only adapters of low rank are trained."""
    return insert(MODELS[model](), LoraTable(targets=targets, r=3, alpha=6.0))


MODELS |= {
    "deep_llama_with_adapters": functools.partial(
        with_adapters, "deep_llama", "q_proj", "v_proj", "o_proj", "down_proj"
    ),
    "deep_llama_behind_a_frozen_front": functools.partial(
        trained_in, "deep_llama", "*layers.2.*", "*layers.3.*", "model.norm.weight", "lm_head.*"
    ),
    "deep_gpt2_behind_a_frozen_front": functools.partial(trained_in, "deep_gpt2", "*h.1.*", "*h.3.*", "*ln_f.*"),
    "mixtral_behind_a_frozen_front": functools.partial(
        trained_in, "mixtral", "*layers.1.*", "*norm.weight", "lm_head.*"
    ),
    "mixtral_with_its_last_queries": functools.partial(trained_in, "mixtral", "*layers.1.self_attn.q_proj.*"),
    "qwen3_moe_with_its_first_router": functools.partial(trained_in, "qwen3_moe", "*mlp.gate.*"),
    "own_experts_behind_a_frozen_front": functools.partial(trained_in, "own_experts", "blocks.1.*", "head.*"),
}
