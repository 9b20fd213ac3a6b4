"""The model of a published row: a preset that its name is close to, with the sizes that it prints."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from cells import Row, SkippedError, joined, number, whole
from published_loops import by_modules, is_of_transformers
from published_machines import is_tested

from samestep.hardware import Hardware
from samestep.models.decoder import Decoder
from samestep.models.presets import DECODERS, gpt_of_size

_ALIASES = (
    (r"llama.?3(\.\d)?.?405b", "llama3-405b"),
    (r"llama.?3(\.\d)?.?70b", "llama3-70b"),
    (r"llama.?3(\.\d)?.?8b", "llama3-8b"),
    (r"llama.like.70b", "llama2-70b"),
    (r"llama.like.7b", "llama2-7b"),
    (r"deepseek.?v?3(?!\d)", "deepseek-v3"),
    (r"mixtral", "mixtral-8x7b"),
    (r"qwen.?3.*235b", "qwen3-235b-a22b"),
    (r"qwen.?3.*30b", "qwen3-30b-a3b"),
    (r"nemotron.?4.?340b", "nemotron4-340b"),
    (r"nemotron.?4.?15b", "nemotron4-15b"),
    (r"grok.?1", "grok1-314b"),
    (r"bloom", "bloom-176b"),
    (r"mt.nlg", "mt-nlg-530b"),
    (r"gpt.?3.*175b", "gpt3-175b"),
    (r"llama.?4.?maverick", "llama4-maverick"),
    (r"nemotron.?h.?56b", "nemotron-h-56b"),
    (r"deepspeed megatron-lm", "gpt2"),  # DLPerf's script: gpt2-small unless told otherwise
)


def _spelled(preset: str) -> str:
    """Return a pattern of a preset's name, whatever stands between its words and numbers."""
    return rf"(?<![a-z0-9]){'[^a-z0-9]?'.join(re.findall('[a-z]+|[0-9]+', preset))}(?![a-z0-9])"


_NAMES = (
    *((_spelled(name), name) for name in sorted(DECODERS, key=len, reverse=True) if name != "gpt2"),  # many sizes
    *_ALIASES,
)
_NEAR = {
    # Meta 2025: every second block has experts, one of 128 and one shared; another does the work of both without
    "llama4-maverick": replace(DECODERS["llama4-scout"], experts=128, dense_layers=24),
    # NVIDIA 2025, arXiv:2504.03624, table 1: blocks of a Mamba-2 mixer and a plain layer, whose 256 heads of 64, with what
    # their groups share, are as large as these projections; `published_mixers.py` makes them scan.
    "nemotron-h-56b": replace(
        DECODERS["nemotron4-340b"], layers=54, hidden=8192, heads=256, head_dim=64, kv_heads=160, intermediate=32768,
        vocab=131072, sequence=8192,
    ),
}  # fmt: skip
"""Models of several kinds of blocks, by one kind that does as much work; of a row's sizes they take the sequence."""


class Recipe(NamedTuple):
    """What all runs of a library have alike that keeps no float32 masters, and logits in chunks."""

    samples: int
    """Of a micro-batch."""
    tokens: int
    microbatches: int
    recompute: str
    loss_chunks: int
    """Parts in which the loss makes gradients of logits, of which it keeps no others (CEWithChunkedOutputLoss; the recipes drop their
    own reference to the logits before the backward)."""


MOST_LAYERS = 2000
"""More are a misprint."""
TOP_K = 2
"""Experts of a token where nothing says so: Megatron-LM's default, and Mixtral's."""
RECIPES = {
    # recipes/configs and the README of pytorch/torchtune: batch size 2, packed to 2048 tokens, activation checkpointing
    "torchtune": Recipe(2, 2048, 1, "full", 8),
    # the README of IST-DASLab/llmq: defaults of --batch-size, --seq-len, --grad-accumulation
    "llmq": Recipe(4, 1024, 4, "", 1),
}
_NO_DECODER = r"stable diffusion|retinanet|mask r-cnn|grouped gemm|hybrid|nemotron.?(v?3|h(?!.?56b))|multimodal|mimo|single moe|ultra.proxy|dlrm|unet|flux"
_LOOPS = r"(?<![a-z])(grpo|rlhf|ppo|rloo|dapo|gspo|reinforce|online.dpo)(?![a-z])"
_GENERATES = (
    r"\bgenerat(es|ion) (is |are )?(included|in the step)|includ\w+ (the )?(generation|rollouts?)|\brollouts?\b"
)


def decoder_of(row: Row, machine: Hardware) -> tuple[Decoder, str]:
    """Return the row's model and its name."""
    name = row.get("model") or ""
    if re.search(_NO_DECODER, name, re.IGNORECASE):
        raise SkippedError("the model is not a transformer of one kind of block, or is a part of one")
    if re.search(_LOOPS, name, re.IGNORECASE) or re.search(_GENERATES, joined(row, "notes"), re.IGNORECASE):
        raise SkippedError("a loop of reinforcement learning generates too: it is not a training step")
    known = preset_of(name)
    base, length = _base(row, known), whole(row, "seq_len")
    sizes = {"sequence": length} if known in _NEAR and length else _sizes(row, known, base)
    decoder = replace(base, **sizes)
    if decoder.layers > MOST_LAYERS:
        raise SkippedError(f"{decoder.layers} layers of {decoder.hidden} are no sizes of a model")
    decoder = _of_its_kind(decoder if known else _of_its_weights(_with_options(decoder, row), row), row, machine)
    return decoder, known or name


def _of_its_weights(decoder: Decoder, row: Row) -> Decoder:
    """Let a model have the feed-forward with which its sizes make the number of weights that is printed: with a gate, and the norms and
    positions that come with it, or without."""
    weights = number(row, "n_params")
    if not weights or not whole(row, "ffn") or not whole(row, "n_layers") or decoder.experts or decoder.gated:
        return decoder
    gated = replace(decoder, gated=True, bias=False, layer_norm=False, positions=0)
    tried = [replace(one, tied=tied) for one in (decoder, gated) for tied in (True, False)]
    return min(tried, key=lambda one: abs(_weights_of(one) / weights - 1))


def _weights_of(decoder: Decoder) -> float:
    attention = decoder.hidden * decoder.dim * 2 * (decoder.heads + decoder.kv)
    block = attention + (2 + decoder.gated) * decoder.hidden * decoder.ffn
    return decoder.layers * block + (2 - decoder.tied) * decoder.vocab * decoder.hidden


def preset_of(name: str) -> str | None:
    """Return the preset that a model's printed name is close to."""
    return next((preset for pattern, preset in _NAMES if re.search(pattern, name, re.IGNORECASE)), None)


def recipe_of(row: Row) -> Recipe | None:
    """Return what the library's runs have alike, if the row is of one of them."""
    source = joined(row, "source").lower()
    return next((recipe for name, recipe in RECIPES.items() if name in source), None)


def _base(row: Row, known: str | None) -> Decoder:
    """Return the preset of a row; else a GPT with its layers, or of its number of weights."""
    layers, hidden = _depth(row), whole(row, "hidden")
    weights = number(row, "n_params") or _weights_in(row.get("model") or "")
    if known:
        return DECODERS.get(known) or _NEAR[known]
    if layers and hidden:
        return replace(DECODERS["gpt3-175b"], layers=layers, hidden=hidden, heads=max(1, hidden // 128))
    if weights:
        found = gpt_of_size(weights, whole(row, "seq_len", 2048))
        stages = whole(row, "pp", 1) * whole(row, "vp", 1)
        return found if found.layers >= stages else _of_depth(found, stages)
    raise SkippedError("no sizes of the model, and its name is not a preset")


def _of_depth(decoder: Decoder, layers: int) -> Decoder:
    """Make a model as deep as its stages are many, and so much narrower that it has as many weights."""
    hidden = 128 * round(decoder.hidden * (decoder.layers / layers) ** 0.5 / 128)
    return replace(decoder, layers=layers, hidden=hidden, heads=hidden // 128)


def _depth(row: Row) -> int:
    hidden = whole(row, "hidden")
    weights = number(row, "n_params") or _weights_in(row.get("model") or "")
    layers = whole(row, "n_layers")
    return layers or (max(1, round(weights / (12 * hidden**2))) if hidden and weights else 0)


def _sizes(row: Row, known: str | None, base: Decoder) -> dict[str, Any]:
    """Return the sizes that a row prints, over those of its preset."""
    columns = {"vocab": "vocab", "sequence": "seq_len"}
    recipe = recipe_of(row)
    given: dict[str, Any] = {"sequence": recipe.tokens} if recipe else {}
    given |= {field: whole(row, column) for field, column in columns.items() if whole(row, column)}
    if not (_depth(row) and whole(row, "hidden")):
        return given
    given |= {"layers": _depth(row), "hidden": whole(row, "hidden")}
    if whole(row, "heads"):
        if whole(row, "heads") % whole(row, "kv_heads", 1):
            raise SkippedError(f"kv_heads={whole(row, 'kv_heads')} does not divide {whole(row, 'heads')} heads")
        given |= {"heads": whole(row, "heads")}
        given |= {"kv_heads": whole(row, "kv_heads")} if whole(row, "kv_heads") or not known else {}
    if whole(row, "ffn"):
        given["intermediate"] = whole(row, "ffn")
    if experts := whole(row, "moe_experts"):
        chosen = whole(row, "moe_topk") or min(base.top_k or TOP_K, experts)
        if chosen > experts:
            raise SkippedError(f"moe_topk={chosen} is more than the {experts} experts")
        given |= {"experts": experts, "top_k": chosen}
    return given


def _with_options(decoder: Decoder, row: Row) -> Decoder:
    """Add what Megatron-LM's options in the notes say, with its own defaults for sizes (arguments.py, MLATransformerConfig)."""
    said = joined(row, "notes")
    if "--swiglu=true" in said:
        width = whole(row, "ffn") or 8 * decoder.hidden // 3 // 64 * 64
        decoder = replace(decoder, gated=True, intermediate=width)
    if "--untie-embeddings-and-output-weights=true" in said:
        decoder = replace(decoder, tied=False)
    if "--multi-latent-attention=true" in said:
        decoder = replace(decoder, query_rank=512, latent_rank=512, rotary_dim=64, head_dim=128, kv_heads=0)
    return decoder


def _of_its_kind(decoder: Decoder, row: Row, machine: Hardware) -> Decoder:
    """Add what kind of model and of code it is."""
    name = row.get("model") or ""
    if re.search(r"\bt5", name, re.IGNORECASE):  # an encoder, and a decoder that attends to it as well as to itself
        # Raffel et al. 2020, section 3.1.2: 512 tokens go in, about a quarter as many come out of blocks 4/3 as large.
        sequence = 4 * whole(row, "seq_len", 512) // 7 // 4 * 4
        decoder = replace(decoder, layers=5 * decoder.layers // 2, sequence=sequence, vocab=30592)
    if re.search(r"\bvit\b", name, re.IGNORECASE):
        decoder = replace(decoder, attention="attention", positions=decoder.sequence)
    if re.search(r"rotary[^;]*no biases", joined(row, "notes")):
        decoder = replace(decoder, positions=0, bias=False, layer_norm=False)
    if re.search("bert", name, re.IGNORECASE):
        decoder = replace(decoder, attention="attention", dropout=True, vocab=whole(row, "vocab", 30592))
        decoder = replace(decoder, vocab=2) if re.search("squad", name, re.IGNORECASE) else decoder
    if "unpadded" in name:  # half of MLPerf's 512 tokens are padding, and are left out
        decoder = replace(decoder, sequence=decoder.sequence // 2)
    if decoder.positions:
        decoder = replace(decoder, positions=decoder.sequence)
    if is_eager(row):
        decoder = replace(decoder, fused=False)
    if by_modules(row):  # norms, rotations, gates and scores of Transformers are several operations each
        decoder = replace(decoder, fused=False)
    if _is_plain(row, machine):
        decoder = replace(decoder, attention="plain", dropout=not decoder.gated)
    # Arguments of functional tests leave Megatron-LM's default, 0.1, as it is, but for DeepSeek's models.
    if is_tested(row) and "_release" not in name and not decoder.latent_rank:
        decoder = replace(decoder, dropout=True)
    return decoder


def is_eager(row: Row) -> bool:
    """Whether blocks of torch's own loops run as they are written: in FSDP2's, torchtune's and torchao's, and where nothing is compiled."""
    own = "FSDP2" in (row.get("schedule") or "") or re.search("torchtune|torchao", joined(row, "source"))
    return (row.get("compile") or "").lower() == "false" or bool(own and not is_compiled(row))


def is_compiled(row: Row) -> bool:
    """Whether the blocks of a row run as graphs of torch.compile."""
    return (row.get("compile") or "").lower() == "true"


def _is_llama(row: Row) -> bool:
    """Whether the model is of 2023 or later, when Transformers had fused attention."""
    return (
        re.search(r"llama|mistral|mixtral|qwen|gemma|phi|yi-|falcon", row.get("model") or "", re.IGNORECASE) is not None
    )


def _weights_in(name: str) -> float | None:
    found = re.search(r"(\d+(?:\.\d+)?)\s*([MBT])\b", name)
    return float(found[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[found[2]] if found else None


def _is_plain(row: Row, machine: Hardware) -> bool:
    """Whether attention keeps its scores: FlashAttention is of 2022 and for Ampere and later."""
    said = joined(row, "notes", "model", "source").lower()
    if re.search("unfused|transformer-impl=local|no flash attention", said) or machine.name.startswith("v100"):
        return True
    if not re.search(r"flash|sdpa|liger|unsloth", said) and (
        re.search("deeplearningexamples", said) or (is_of_transformers(row) and not _is_llama(row))
    ):
        return True
    if not machine.name.startswith("a100") or "flash" in joined(row, "notes", "model", "source").lower():
        return False
    cut = whole(row, "tp", 1) > 1 or whole(row, "pp", 1) > 1
    old = re.fullmatch(r"(?i)\s*fp16.*", row.get("precision") or "") is not None
    return old or (cut and "full" in (row.get("recompute") or ""))
