"""Models by name, from their published hyperparameters, to plan and simulate without a module.

`preset:NAME` as a job's model source needs no torch. `decoder_spec.spec` counts transformers, and `resnet` counts ResNet-50.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from itertools import chain
from typing import Any, NamedTuple, get_args, get_type_hints

from samestep.errors import ModelError, did_you_mean, short_repr
from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.models.layer_parts import BatchNormCall, OtherWork, Product, WorkingSet
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec

_GPT: Mapping[str, Any] = {
    "bias": True,
    "layer_norm": True,
    "vocab": 50257,
    "sequence": 2048,
    "positions": 2048,
    "tied": True,
}
_OPT: Mapping[str, Any] = {"vocab": 50272, "positions": 2050}
_BLOOM: Mapping[str, Any] = {"vocab": 250880, "positions": 0, "embedding_norm": True, "attention": "plain"}
_LLAMA2: Mapping[str, Any] = {"vocab": 32000, "sequence": 4096, "gated": True}
_LLAMA3: Mapping[str, Any] = {"vocab": 128256, "sequence": 8192, "gated": True, "kv_heads": 8}
_QWEN: Mapping[str, Any] = {"sequence": 4096, "gated": True, "kv_heads": 8}
_QWEN2: Mapping[str, Any] = {**_QWEN, "vocab": 152064, "qkv_bias": True}
_QWEN2_SMALL: Mapping[str, Any] = {**_QWEN2, "vocab": 151936, "kv_heads": 2, "tied": True}
_QWEN3: Mapping[str, Any] = {**_QWEN, "vocab": 151936, "head_dim": 128, "query_norm": "head"}
_QWEN3_EXPERTS: Mapping[str, Any] = {**_QWEN3, "kv_heads": 4, "experts": 128, "top_k": 8}
_GEMMA: Mapping[str, Any] = {"vocab": 256000, "sequence": 4096, "gated": True, "tied": True, "head_dim": 256}
_GEMMA2: Mapping[str, Any] = {**_GEMMA, "post_norm": True}
_OLMO: Mapping[str, Any] = {**_LLAMA2, "query_norm": "all"}
_GPT_OSS: Mapping[str, Any] = {
    "vocab": 201088,
    "sequence": 4096,
    "gated": True,
    "kv_heads": 8,
    "head_dim": 64,
    "bias": True,
    "sinks": True,
}
_NEMOTRON: Mapping[str, Any] = {"vocab": 256000, "sequence": 4096, "kv_heads": 8, "layer_norm": True}
_DEEPSEEK: Mapping[str, Any] = {"sequence": 4096, "gated": True, "head_dim": 128, "latent_rank": 512, "rotary_dim": 64}


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> Decoder:
    return Decoder(**{**_GPT, "layers": layers, "hidden": hidden, "heads": heads, **more})


def _llama(base: Mapping[str, Any], layers: int, hidden: int, heads: int, intermediate: int, **more: Any) -> Decoder:
    fields = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": intermediate}
    return Decoder(**{**base, **fields, **more})


DECODERS: dict[str, Decoder] = {
    # Brown et al. 2020, arXiv:2005.14165, table 2.1
    "gpt3-125m": _gpt(12, 768, 12),
    "gpt3-350m": _gpt(24, 1024, 16),
    "gpt3-760m": _gpt(24, 1536, 16),
    "gpt3-1.3b": _gpt(24, 2048, 16),
    "gpt3-2.7b": _gpt(32, 2560, 32),
    "gpt3-6.7b": _gpt(32, 4096, 32),
    "gpt3-13b": _gpt(40, 5120, 40),
    "gpt3-175b": _gpt(96, 12288, 96),
    # Radford et al. 2019; transformers: GPT2Config of gpt2 to gpt2-xl
    "gpt2": _gpt(12, 768, 12, sequence=1024, positions=1024),
    "gpt2-medium": _gpt(24, 1024, 16, sequence=1024, positions=1024),
    "gpt2-large": _gpt(36, 1280, 20, sequence=1024, positions=1024),
    "gpt2-xl": _gpt(48, 1600, 25, sequence=1024, positions=1024),
    # Zhang et al. 2022, arXiv:2205.01068, table 1
    "opt-1.3b": _gpt(24, 2048, 32, **_OPT),
    "opt-6.7b": _gpt(32, 4096, 32, **_OPT),
    "opt-13b": _gpt(40, 5120, 40, **_OPT),
    "opt-30b": _gpt(48, 7168, 56, **_OPT),
    "opt-66b": _gpt(64, 9216, 72, **_OPT),
    "opt-175b": _gpt(96, 12288, 96, **_OPT),
    # Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373, table 1; config.json of EleutherAI/*
    "gpt-neox-20b": _gpt(44, 6144, 64, vocab=50432, positions=0, tied=False),
    "pythia-1.4b": _gpt(24, 2048, 16, vocab=50304, positions=0, tied=False),
    "pythia-6.9b": _gpt(32, 4096, 32, vocab=50432, positions=0, tied=False),
    "pythia-12b": _gpt(36, 5120, 40, vocab=50688, positions=0, tied=False),
    # config.json of mosaicml/mpt-*: ALiBi
    "mpt-7b": _gpt(32, 4096, 32, vocab=50432, positions=0, bias=False, layer_norm=False),
    "mpt-30b": _gpt(48, 7168, 64, vocab=50432, positions=0, bias=False, layer_norm=False, sequence=8192),
    # Touvron et al. 2023, arXiv:2302.13971, table 2
    "llama-7b": _llama(_LLAMA2, 32, 4096, 32, 11008, sequence=2048),
    "llama-13b": _llama(_LLAMA2, 40, 5120, 40, 13824, sequence=2048),
    "llama-33b": _llama(_LLAMA2, 60, 6656, 52, 17920, sequence=2048),
    "llama-65b": _llama(_LLAMA2, 80, 8192, 64, 22016, sequence=2048),
    # Touvron et al. 2023, arXiv:2307.09288; config.json of meta-llama/Llama-2-*
    "llama2-7b": _llama(_LLAMA2, 32, 4096, 32, 11008),
    "llama2-13b": _llama(_LLAMA2, 40, 5120, 40, 13824),
    "llama2-70b": _llama(_LLAMA2, 80, 8192, 64, 28672, kv_heads=8),
    "codellama-34b": _llama(_LLAMA2, 48, 8192, 64, 22016, kv_heads=8),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3; config.json of meta-llama/Llama-3.2-*
    "llama3.2-1b": _llama(_LLAMA3, 16, 2048, 32, 8192, tied=True),
    "llama3.2-3b": _llama(_LLAMA3, 28, 3072, 24, 8192, tied=True),
    "llama3-8b": _llama(_LLAMA3, 32, 4096, 32, 14336),
    "llama3-70b": _llama(_LLAMA3, 80, 8192, 64, 28672),
    "llama3-405b": _llama(_LLAMA3, 126, 16384, 128, 53248),
    # BigScience 2022, arXiv:2211.05100, table 3: ALiBi, a norm behind the embedding
    "bloom-176b": _gpt(70, 14336, 112, **_BLOOM),
    "bloom-7b1": _gpt(30, 4096, 32, **_BLOOM),
    # Smith et al. 2022, arXiv:2201.11990, section 3
    "mt-nlg-530b": _gpt(105, 20480, 128, vocab=51200, dropout=True, attention="plain"),
    # Chowdhery et al. 2022, arXiv:2204.02311, table 1: one head of keys and values
    "palm-540b": _llama(
        _LLAMA2, 118, 18432, 48, 73728, vocab=256000, sequence=2048, head_dim=256, kv_heads=1, tied=True
    ),
    # Jiang et al. 2023, arXiv:2310.06825, table 1; a sample fits in its window
    "mistral-7b": _llama(_LLAMA2, 32, 4096, 32, 14336, kv_heads=8),
    # Jiang et al. 2024, arXiv:2401.04088, table 1; Mixtral 8x22B: config.json of mistralai/Mixtral-8x22B-v0.1
    "mixtral-8x7b": _llama(_LLAMA2, 32, 4096, 32, 14336, kv_heads=8, experts=8, top_k=2),
    "mixtral-8x22b": _llama(_LLAMA2, 56, 6144, 48, 16384, vocab=32768, kv_heads=8, experts=8, top_k=2),
    # Qwen 2024, arXiv:2412.15115; 2025, arXiv:2505.09388; config.json of Qwen/*
    "qwen2.5-0.5b": _llama(_QWEN2_SMALL, 24, 896, 14, 4864),
    "qwen2.5-1.5b": _llama(_QWEN2_SMALL, 28, 1536, 12, 8960),
    "qwen2.5-3b": _llama(_QWEN2_SMALL, 36, 2048, 16, 11008),
    "qwen2.5-7b": _llama(_QWEN2, 28, 3584, 28, 18944, kv_heads=4),
    "qwen2.5-14b": _llama(_QWEN2, 48, 5120, 40, 13824),
    "qwen2.5-32b": _llama(_QWEN2, 64, 5120, 40, 27648),
    "qwen2.5-72b": _llama(_QWEN2, 80, 8192, 64, 29568),
    "qwen3-0.6b": _llama(_QWEN3, 28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _llama(_QWEN3, 28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _llama(_QWEN3, 36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _llama(_QWEN3, 36, 4096, 32, 12288),
    "qwen3-14b": _llama(_QWEN3, 40, 5120, 40, 17408),
    "qwen3-32b": _llama(_QWEN3, 64, 5120, 64, 25600),
    "qwen3-30b-a3b": _llama(_QWEN3_EXPERTS, 48, 2048, 32, 6144, expert_intermediate=768),
    "qwen3-235b-a22b": _llama(_QWEN3_EXPERTS, 94, 4096, 64, 12288, expert_intermediate=1536),
    # Gemma Team 2024, arXiv:2403.08295, table 1; arXiv:2408.00118, table 1: a sample fits in its local windows
    "gemma-2b": _llama(_GEMMA, 18, 2048, 8, 16384, kv_heads=1),
    "gemma-7b": _llama(_GEMMA, 28, 3072, 16, 24576),
    "gemma2-2b": _llama(_GEMMA2, 26, 2304, 8, 9216, kv_heads=4),
    "gemma2-9b": _llama(_GEMMA2, 42, 3584, 16, 14336, kv_heads=8),
    "gemma2-27b": _llama(_GEMMA2, 46, 4608, 32, 36864, kv_heads=16, head_dim=128),
    # config.json of microsoft/Phi-3-mini-4k-instruct, microsoft/phi-4, 01-ai/Yi-34B
    "phi3-mini": _llama(_LLAMA2, 32, 3072, 32, 8192, vocab=32064),
    "phi4-14b": _llama(_LLAMA2, 40, 5120, 40, 17920, vocab=100352, kv_heads=10),
    "yi-34b": _llama(_LLAMA2, 60, 7168, 56, 20480, vocab=64000, kv_heads=8),
    # OLMo Team 2025, arXiv:2501.00656, table 3; Muennighoff et al. 2024, arXiv:2409.02060, table 1
    "olmo2-7b": _llama(_OLMO, 32, 4096, 32, 11008, vocab=100352),
    "olmo2-13b": _llama(_OLMO, 40, 5120, 40, 13824, vocab=100352),
    "olmo2-32b": _llama(_OLMO, 64, 5120, 40, 27648, vocab=100352, kv_heads=8),
    "olmoe-1b-7b": _llama(_OLMO, 16, 2048, 16, 1024, vocab=50304, experts=64, top_k=8),
    # Databricks 2024: config.json of databricks/dbrx-base
    "dbrx-132b": _llama(_LLAMA2, 40, 6144, 48, 10752, vocab=100352, kv_heads=8, experts=16, top_k=4),
    # OpenAI 2025, arXiv:2508.10925
    "gpt-oss-20b": _llama(_GPT_OSS, 24, 2880, 64, 2880, experts=32, top_k=4),
    "gpt-oss-120b": _llama(_GPT_OSS, 36, 2880, 64, 2880, experts=128, top_k=4),
    # DeepSeek-AI 2024, arXiv:2405.04434, section 3.1 and appendix B; arXiv:2412.19437, section 4.2
    "deepseek-v2-lite": _llama(
        _DEEPSEEK, 27, 2048, 16, 10944, vocab=102400, experts=64, top_k=6, expert_intermediate=1408, shared_experts=2,
        dense_layers=1,
    ),
    "deepseek-v2": _llama(
        _DEEPSEEK, 60, 5120, 128, 12288, vocab=102400, experts=160, top_k=6, expert_intermediate=1536, shared_experts=2,
        dense_layers=1, query_rank=1536,
    ),
    "deepseek-v3": _llama(
        _DEEPSEEK, 61, 7168, 128, 18432, vocab=129280, experts=256, top_k=8, expert_intermediate=2048, shared_experts=1,
        dense_layers=3, query_rank=1536,
    ),
    # Kimi Team 2025, arXiv:2507.20534, table 2
    "kimi-k2": _llama(
        _DEEPSEEK, 61, 7168, 64, 18432, vocab=163840, experts=384, top_k=8, expert_intermediate=2048, shared_experts=1,
        dense_layers=1, query_rank=1536,
    ),
    # Parmar et al. 2024, arXiv:2402.16819; NVIDIA 2024, arXiv:2406.11704: squared ReLU, no gate
    "nemotron4-15b": _llama(_NEMOTRON, 32, 6144, 48, 24576),
    "nemotron4-340b": _llama(_NEMOTRON, 96, 18432, 96, 73728),
    # xAI 2024, github.com/xai-org/grok-1: run.py and model.py
    "grok1-314b": _llama(
        _LLAMA3, 64, 6144, 48, 32768, vocab=131072, head_dim=128, experts=8, top_k=2, tied=True, post_norm=True
    ),
    # Meta 2025: config.json of meta-llama/Llama-4-*; every second block of Maverick has experts, and one of each is shared
    "llama4-scout": _llama(
        _LLAMA3, 48, 5120, 40, 16384, vocab=202048, head_dim=128, experts=16, top_k=1, expert_intermediate=8192,
        shared_experts=1,
    ),
    # Devlin et al. 2019, arXiv:1810.04805
    "bert-large": _gpt(
        24, 1024, 16, vocab=30522, sequence=512, positions=512, attention="attention", dropout=True
    ),
}  # fmt: skip

PRESETS = (*DECODERS, "resnet50")
MOST_LAYERS = 2000
"""The largest depth of a preset: a program lists the operations of every layer."""
MOST_ELEMENTS = 2**31 - 1
"""The largest size of a preset along one dimension, such as its vocabulary."""


def preset(name: str, sequence: int | None = None, changes: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the spec of a preset, at another sequence length or with other fields if they are given.

    Raises:
        ModelError: there is no such preset or field, a field has a value of a wrong kind, or two fields disagree.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f"; there are {', '.join(PRESETS)}"
        raise ModelError("preset-unknown", f"no preset {name!r}{hint}")
    known = {field.name for field in fields(Decoder)} if name in DECODERS else set()
    if unknown := [field for field in changes or {} if field not in known]:
        has_no, hint = ", ".join(map(repr, unknown)), did_you_mean(unknown[0], known)
        its = f"its fields are {', '.join(sorted(known))}" if known else "it has no fields to change"
        raise ModelError(
            "preset-field", f"preset {name} has no {has_no}{hint}; {its}. Use --set model.config={{}} to drop all keys"
        )
    if name == "resnet50":
        return resnet(name, normed=True)
    values: dict[str, Any] = {**({"sequence": sequence} if sequence else {}), **(changes or {})}
    decoder = replace(DECODERS[name], **values)
    for mistake in chain(_wrong_kinds(decoder), _misfits(decoder)):
        raise ModelError("preset-field", f"preset {name}: {mistake}")
    return spec(decoder, name)


def _wrong_kinds(decoder: Decoder) -> Iterator[str]:
    """Yield a message for each field whose value is of a wrong kind."""
    kinds = get_type_hints(Decoder)
    for field in fields(Decoder):
        value, kind = getattr(decoder, field.name), kinds[field.name]
        text = f"{field.name}={short_repr(value)}"
        least, most = 1 if field.default is MISSING else 0, MOST_LAYERS if field.name == "layers" else MOST_ELEMENTS
        if kind is int and (type(value) is not int or value < least):
            yield f"{text} is not a whole number of at least {least}"
        elif kind is int and value > most:
            yield f"{text} is more than {most}, the largest number that is supported"
        elif kind is bool and type(value) is not bool:
            yield f"{text} is neither true nor false"
        elif kind not in (int, bool) and value not in get_args(kind):
            yield f"{text} must be one of {', '.join(map(repr, get_args(kind)))}"


_WHOLES = {
    "top_k": "experts",
    "expert_intermediate": "experts",
    "shared_experts": "experts",
    "dense_layers": "experts",
    "query_rank": "latent_rank",
    "rotary_dim": "latent_rank",
}
"""Fields that have an effect only together with another field."""

_NOT_LATENT = ("kv_heads", "qkv_bias", "query_norm", "sinks", "adapter_rank")
"""Fields that have no effect on latent attention."""


def _misfits(decoder: Decoder) -> Iterator[str]:
    """Yield a message for each pair of fields that contradict each other."""
    for part, whole in (("kv_heads", "heads"), *(() if decoder.head_dim else (("heads", "hidden"),))):
        size, total = getattr(decoder, part), getattr(decoder, whole)
        if size and total % size:
            divisors = (number for number in range(1, min(total, 8 * size) + 1) if total % number == 0)
            near = sorted(sorted(divisors, key=lambda number: abs(number - size))[:6])
            yield f"{part}={size} does not divide {whole}={total}. Use {', '.join(map(str, near))}"
    without = [(part, whole) for part, whole in _WHOLES.items() if not getattr(decoder, whole)]
    for part, other in (*without, *((part, "latent_rank") for part in _NOT_LATENT if decoder.latent_rank)):
        if size := getattr(decoder, part):
            yield f"{part}={size!r} has no effect with {other}={getattr(decoder, other)}. Use {part}={type(size)()!r}"
    if decoder.experts and not 1 <= decoder.top_k <= decoder.experts:
        yield f"top_k={decoder.top_k} of experts={decoder.experts}. Use 1 to {decoder.experts}"
    if decoder.dense_layers > decoder.layers:
        yield f"dense_layers={decoder.dense_layers} of layers={decoder.layers}. Use 0 to {decoder.layers}"


def gpt_of_size(num_params: float, sequence: int, vocab: int = 50257) -> Decoder:
    """Return a GPT of about `num_params` weights, with the ratio of width to depth of Brown et al. 2020 (table 2.1)."""
    known = [decoder for name, decoder in DECODERS.items() if name.startswith("gpt3-")]
    near = min(known, key=lambda d: abs(math.log((12 * d.layers * d.hidden + vocab) * d.hidden / num_params)))
    in_blocks = max(num_params - vocab * near.hidden, num_params / 4)
    layers = near.layers * (in_blocks / (12 * near.layers * near.hidden**2)) ** (1 / 3)
    width = (in_blocks / (12 * layers)) ** 0.5
    unit = 1024 if width > 4096 else 128  # heads of size 128, a multiple of 8 of them in large models
    hidden = max(unit, round(width / unit) * unit)
    layers = max(1, round(in_blocks / (12 * hidden**2)))
    return replace(near, layers=layers, hidden=hidden, heads=hidden // 128, vocab=vocab, sequence=sequence)


# -- images ------------------------------------------------------------------------------------------------------------

_IMAGE, _CLASSES = 224, 1000
_WIDTHS = (64, 128, 256, 512)
"""Channels inside the blocks of each stage."""


class _Convolution(NamedTuple):
    """A convolution with a norm after it."""

    name: str
    kernel: int
    given: int
    """Channels of its input."""
    made: int
    """Channels of its result."""
    side: int
    """Width and height of its result, in pixels."""

    @property
    def elements(self) -> int:
        """Number of elements of its result."""
        return self.side**2 * self.made

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its weight."""
        return (self.made, self.given, self.kernel, self.kernel)


def resnet(name: str = "resnet50", *, normed: bool = False, stages: Sequence[int] = (3, 4, 6, 3)) -> ModelSpec:
    """Return ResNet-50 (He et al. 2016, arXiv:1512.03385, table 1), or one of other numbers of blocks in its `stages`, with torchvision's
    strides in 3x3 convolutions.

    With `normed` its batch norms take the statistics of groups of samples, as a job's do; without, those of each rank alone, as
    in most published runs.
    """
    stem = [_Convolution("conv", 7, 3, 64, _IMAGE // 2)]
    layers = [_convolution_layer("conv1", stem, 3 * _IMAGE**2, is_block=False)]
    shapes = [(f"conv1.{part}", shape, 0) for part, shape in _shapes(stem)]
    channels, side = 64, _IMAGE // 4
    for stage, (width, count) in enumerate(zip(_WIDTHS, stages, strict=True)):
        for block in range(count):
            path, half = f"layer{stage + 1}.{block}", 2 if block == 0 and stage > 0 else 1
            parts = [
                _Convolution("conv1", 1, channels, width, side),
                _Convolution("conv2", 3, width, width, side // half),
                _Convolution("conv3", 1, width, 4 * width, side // half),
            ]
            if block == 0:
                parts.append(_Convolution("downsample", 1, channels, 4 * width, side // half))
            shapes += [(f"{path}.{part}", shape, len(layers)) for part, shape in _shapes(parts)]
            layers.append(_convolution_layer(path, parts, layers[-1].output_elements, is_block=True))
            channels, side = 4 * width, side // half
    shapes += [("fc.weight", (_CLASSES, channels), len(layers)), ("fc.bias", (_CLASSES,), len(layers))]
    layers.append(_classifier_layer(channels, side, _CLASSES))
    channels_of = [
        (path.removesuffix(".weight"), shape[0]) for path, shape, _ in shapes if path.endswith("_norm.weight")
    ]
    if normed:
        layers = [replace(layer, batch_norms=_norms_below(layer, channels_of)) for layer in layers]
    return ModelSpec(
        name=name,
        layers=tuple(layers),
        params=tuple(ParamSpec(name=path, shape=shape, layer=index) for path, shape, index in shapes),
        buffer_bytes=sum(2 * 4 * channels + 8 for _, channels in channels_of) if normed else 0,
        cut_refusal="convolutions have no plan",
    )


def _norms_below(layer: LayerSpec, channels_of: Sequence[tuple[str, int]]) -> tuple[BatchNormCall, ...]:
    """Return the batch norms of a layer, in the order of its forward."""
    norms = ((path, channels) for path, channels in channels_of if path.startswith(f"{layer.name}."))
    return tuple(BatchNormCall(owner=path, channels=channels) for path, channels in norms)


def _shapes(parts: Sequence[_Convolution]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the weights of convolutions and their norms."""
    for part in parts:
        yield f"{part.name}.weight", part.shape
        yield from ((f"{part.name}_norm.{leaf}", (part.made,)) for leaf in ("weight", "bias"))


def _convolution_layer(path: str, parts: Sequence[_Convolution], given_elements: int, *, is_block: bool) -> LayerSpec:
    """Return a layer of convolutions; a block adds its input to the third one's result."""
    products = tuple(
        Product(
            rows=part.side**2,
            inner=part.given * part.kernel**2,
            columns=part.made,
            taps=part.kernel**2,
            channels_first=True,
            owner=f"{path}.{part.name}",
        )
        for part in parts
    )
    results = sum(part.elements for part in parts)
    elements = parts[2].elements if is_block else parts[-1].elements
    # A norm keeps what it is given and a ReLU its result. The sum of a block keeps nothing.
    bent = sum(part.elements for part in parts[:2]) + elements * is_block
    # A norm reads its input twice, a ReLU reads and writes, the sum of a block reads two and writes one, a pooling reads once more.
    moved = 3 * results + 2 * bent + (3 if is_block else 1) * elements
    return LayerSpec(
        name=path,
        modules=(path,),
        is_block=is_block,
        forward_flops=sum(product.flops for product in products),
        output_elements=elements,
        saved_elements=results
        + bent
        + (0 if is_block else given_elements + elements // 2),  # images, and where maxima are
        working=WorkingSet(2 * max(given_elements, elements)),
        saved_selective_elements=results + given_elements * is_block,
        input_elements=given_elements,
        products=products,
        moved=OtherWork(moved, 0, 3 * len(products) + 1, sum(3 * part.side**2 for part in parts)),
    )


def _classifier_layer(channels: int, side: int, classes: int) -> LayerSpec:
    """Return the last layer: the mean over an image, and the product with the weight of the classes."""
    product = Product(rows=1, inner=channels, columns=classes, owner="fc")
    return LayerSpec(
        name="fc",
        modules=("fc",),
        forward_flops=product.flops,
        output_elements=classes,
        saved_elements=channels,
        working=WorkingSet(side * side * channels),
        loss_elements=classes,
        loss_working_elements=2 * classes,
        input_elements=side * side * channels,
        products=(product,),
        moved=OtherWork(side * side * channels + 6 * classes, kernels=4),
    )
