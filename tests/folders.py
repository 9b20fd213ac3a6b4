"""Folders of tiny models, as transformers' own save_pretrained writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from samestep.building.families import quiet

SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": _GPT2,
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3": {**SIZES, "head_dim": 4, "tie_word_embeddings": True},
    "gemma3_text": {**SIZES, "head_dim": 4, "sliding_window": 8},
}
"""Of each family what is special: tied embeddings, transposed linear layers, fused experts, norms of heads."""


def saved(folder: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "20kB", **fields: Any) -> Path:
    """Save a model of a family, whose biases and norms are not all 0 and 1, in several files; return the folder."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**FAMILIES.get(family, SIZES), **fields}))
    with torch.no_grad(), quiet():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder
