"""Families that are proven by a task other than the causal one: their sizes, and samples with the names that their forwards take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.job_tables import Task

Sample = Callable[[torch.Generator], dict[str, Tensor]]
_WORDS, _LENGTH = 64, 16
_VISION = {
    "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8,
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "vocab_size": _WORDS, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


_QWEN = {
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TaskFamily:
    """A family, what its model is for, and one sample of its data."""

    family: str
    task: Task
    sample: Sample
    fields: Mapping[str, Any]
    """Fields of its configuration beside the small sizes."""


def _words(generator: torch.Generator, first: int = 3) -> Tensor:
    return torch.randint(first, _WORDS, (_LENGTH,), generator=generator)


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    ids = _words(generator)
    return {"input_ids": ids, "labels": ids.roll(-1).index_fill(0, torch.tensor([_LENGTH - 1]), -100)}


def _masked(generator: torch.Generator) -> dict[str, Tensor]:
    ids = _words(generator)
    chosen = torch.rand(_LENGTH, generator=generator) < 0.4
    chosen[0] = True
    return {"input_ids": ids.masked_fill(chosen, 2), "labels": ids.masked_fill(~chosen, -100)}


def _pairs(generator: torch.Generator) -> dict[str, Tensor]:
    target = _words(generator)
    return {"input_ids": _words(generator), "decoder_input_ids": target.roll(1), "labels": target}


def _image(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(3, 16, 16, generator=generator),
        "labels": torch.randint(0, 4, (), generator=generator),
    }


def _wide_image(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_image(generator), "pixel_values": torch.randn(3, 8, 24, generator=generator)}


def _speech(generator: torch.Generator) -> dict[str, Tensor]:
    target = _words(generator)
    features = torch.randn(16, 32, generator=generator)
    return {"input_features": features, "decoder_input_ids": target.roll(1), "labels": target}


def _seen(generator: torch.Generator) -> dict[str, Tensor]:
    ids = _words(generator)
    ids[1:5] = 1  # the image's four patches stand where these words do
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(3, 16, 16, generator=generator),
        "labels": ids.roll(-1).index_fill(0, torch.arange(5), -100),
    }


FAMILIES: Mapping[str, TaskFamily] = {
    f"{one.family}:{one.task}": one
    for one in (
        TaskFamily("bert", "masked", _masked, {}),
        TaskFamily("roberta", "masked", _masked, {}),
        TaskFamily("t5", "seq2seq", _pairs, {"num_decoder_layers": 2, "d_kv": 4, "d_ff": 40}),
        TaskFamily("bart", "seq2seq", _pairs, {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}),
        TaskFamily("vit", "image", _wide_image, {**_VISION, "image_size": [8, 24], "num_labels": 4}),
        TaskFamily("resnet", "image", _image, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 4}),
        TaskFamily(
            "whisper", "speech", _speech,
            {
                "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32, "encoder_layers": 2,
                "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
            },
        ),
        TaskFamily(
            "llava", "vision-language", _seen,
            {
                "text_config": _LLAMA, "image_token_index": 1, "image_seq_length": 4, "vision_feature_select_strategy": "default",
                "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **_VISION},
            },
        ),
        TaskFamily(
            "qwen2_vl", "vision-language", _text,
            {
                "text_config": {**_LLAMA, "model_type": "qwen2_vl_text", **_QWEN},
                "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
            },
        ),  # its images are patches without a dimension of samples
    )
}  # fmt: skip
"""By the name in the table."""


class Samples:
    """Sixteen random samples of one family."""

    def __init__(self, sample: Sample) -> None:
        generator = torch.Generator().manual_seed(5)
        self._samples = [sample(generator) for _ in range(16)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index]
