"""Models as data, from their published hyperparameters: what tracing a module would find, without the module.

`preset:NAME` as a job's model source plans and simulates such a model without torch. A `Decoder` is what its config
says; `spec` counts what one sample of it does. With s tokens, hidden size h, a heads of size d, k key-value heads,
intermediate size f, vocabulary V:

    q, k, v      [s, h] x [h, (a + 2k) d]       proj   [s, a d] x [a d, h]
    attention    a times [s, d] x [d, s] and [s, s] x [s, d], fused unless `attention` is plain
    up, down     [s, h] x [h, f (2f gated)] and [s, f] x [f, h]; with experts s top_k rows, dealt to them
    head         [s, h] x [h, V]

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4): a block keeps the inputs of its products and
norms, and plain attention its scores. A tensor cut divides what lies between a column-cut and a row-cut product.
Latent attention (DeepSeek-V2, arXiv:2405.04434) has low-rank queries, keys and values. Batches of images: `resnet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from samestep.errors import ModelError, did_you_mean
from samestep.model import Cut, Cutting, LayerSpec, ModelSpec, ParamSpec, PartialSum, Product


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A transformer, mostly of decoder blocks, by its hyperparameters; sequence is the length of a sample."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    keys: int = 0
    """Tokens that a token attends to, where a sample is a part of a sequence; 0: as sequence."""
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 0
    """0: hidden / heads."""
    intermediate: int = 0
    """0: four times hidden."""
    gated: bool = False
    positions: int = 0
    """Learned positional embeddings; 0: rotary or none."""
    tied: bool = False
    bias: bool = False
    layer_norm: bool = False
    """Norms have a bias as well."""
    dropout: bool = False
    attention: Literal["causal", "attention", "plain"] = "causal"
    """A fused kernel, causal or not; or plain products with scores in memory."""
    fused: bool = True
    """Norms, rotations and activations are one kernel each; written with PyTorch's own operations they are several."""
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    """0: as intermediate."""
    shared_experts: int = 0
    dense_layers: int = 0
    """First blocks that have no experts."""
    query_rank: int = 0
    """Latent attention: rank of the queries."""
    latent_rank: int = 0
    """Latent attention: rank of keys and values together; 0: plain heads."""
    rotary_dim: int = 0
    """Latent attention: size of a head's part with positions."""
    adapter_rank: int = 0
    """Low-rank adapters (LoRA) on q, k, v and proj; all else is frozen."""

    @property
    def kv(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads

    @property
    def dim(self) -> int:
        """Size of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def ffn(self) -> int:
        """Intermediate size of a dense block."""
        return self.intermediate or 4 * self.hidden

    @property
    def expert_ffn(self) -> int:
        """Intermediate size of an expert."""
        return self.expert_intermediate or self.ffn

    def is_sparse(self, block: int) -> bool:
        """Whether this block has experts."""
        return self.experts > 0 and block >= self.dense_layers


_GPT = {"bias": True, "layer_norm": True, "vocab": 50257, "sequence": 2048, "positions": 2048, "tied": True}
_LLAMA2 = {"vocab": 32000, "sequence": 4096, "gated": True}
_LLAMA3 = {"vocab": 128256, "sequence": 8192, "gated": True, "kv_heads": 8}
_QWEN3 = {"vocab": 151936, "sequence": 4096, "gated": True, "head_dim": 128, "kv_heads": 4, "experts": 128, "top_k": 8}


def _gpt(layers: int, hidden: int, heads: int, **more: object) -> Decoder:
    return Decoder(**{**_GPT, "layers": layers, "hidden": hidden, "heads": heads, **more})  # type: ignore[arg-type]


def _llama(base: dict[str, object], layers: int, hidden: int, heads: int, intermediate: int, **more: object) -> Decoder:
    given = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": intermediate, **more}
    return Decoder(**{**base, **given})  # type: ignore[arg-type]


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
    "gpt2-xl": _gpt(48, 1600, 25, sequence=1024, positions=1024),
    # Touvron et al. 2023, arXiv:2302.13971, table 2
    "llama-7b": _llama(_LLAMA2, 32, 4096, 32, 11008, sequence=2048),
    "llama-65b": _llama(_LLAMA2, 80, 8192, 64, 22016, sequence=2048),
    # Touvron et al. 2023, arXiv:2307.09288; config.json of meta-llama/Llama-2-*
    "llama2-7b": _llama(_LLAMA2, 32, 4096, 32, 11008),
    "llama2-13b": _llama(_LLAMA2, 40, 5120, 40, 13824),
    "llama2-70b": _llama(_LLAMA2, 80, 8192, 64, 28672, kv_heads=8),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3
    "llama3-8b": _llama(_LLAMA3, 32, 4096, 32, 14336),
    "llama3-70b": _llama(_LLAMA3, 80, 8192, 64, 28672),
    "llama3-405b": _llama(_LLAMA3, 126, 16384, 128, 53248),
    # BigScience 2022, arXiv:2211.05100, table 3: ALiBi, a norm behind the embedding
    "bloom-176b": _gpt(70, 14336, 112, vocab=250880, positions=0, attention="plain"),
    "bloom-7b1": _gpt(30, 4096, 32, vocab=250880, positions=0, attention="plain"),
    # Smith et al. 2022, arXiv:2201.11990, section 3
    "mt-nlg-530b": _gpt(105, 20480, 128, vocab=51200, dropout=True, attention="plain"),
    # Jiang et al. 2024, arXiv:2401.04088, table 1; Mixtral 8x22B: config.json of mistralai/Mixtral-8x22B-v0.1
    "mixtral-8x7b": _llama(_LLAMA2, 32, 4096, 32, 14336, kv_heads=8, experts=8, top_k=2),
    "mixtral-8x22b": _llama(_LLAMA2, 56, 6144, 48, 16384, vocab=32768, kv_heads=8, experts=8, top_k=2),
    # Qwen 2024, arXiv:2412.15115; 2025, arXiv:2505.09388; config.json of Qwen/*
    "qwen2.5-0.5b": _llama(_LLAMA3, 24, 896, 14, 4864, vocab=151936, kv_heads=2, sequence=4096, tied=True),
    "qwen2.5-1.5b": _llama(_LLAMA3, 28, 1536, 12, 8960, vocab=151936, kv_heads=2, sequence=4096, tied=True),
    "qwen2.5-3b": _llama(_LLAMA3, 36, 2048, 16, 11008, vocab=151936, kv_heads=2, sequence=4096, tied=True),
    "qwen2.5-7b": _llama(_LLAMA3, 28, 3584, 28, 18944, vocab=152064, kv_heads=4, sequence=4096),
    "qwen2.5-32b": _llama(_LLAMA3, 64, 5120, 40, 27648, vocab=152064, sequence=4096),
    "qwen3-30b-a3b": _llama(_QWEN3, 48, 2048, 32, 6144, expert_intermediate=768),
    "qwen3-235b-a22b": _llama(_QWEN3, 94, 4096, 64, 12288, expert_intermediate=1536),
    # OpenAI 2025, arXiv:2508.10925
    "gpt-oss-20b": _llama(
        _LLAMA3, 24, 2880, 64, 2880, vocab=201088, head_dim=64, sequence=4096, experts=32, top_k=4, bias=True
    ),
    "gpt-oss-120b": _llama(
        _LLAMA3, 36, 2880, 64, 2880, vocab=201088, head_dim=64, sequence=4096, experts=128, top_k=4, bias=True
    ),
    # DeepSeek-AI 2024, arXiv:2412.19437, section 4.2
    "deepseek-v3": _llama(
        _LLAMA3, 61, 7168, 128, 18432, vocab=129280, sequence=4096, kv_heads=0, head_dim=128, experts=256, top_k=8,
        expert_intermediate=2048, shared_experts=1, dense_layers=3, query_rank=1536, latent_rank=512, rotary_dim=64,
    ),
    # Parmar et al. 2024, arXiv:2402.16819; NVIDIA 2024, arXiv:2406.11704: squared ReLU, no gate
    "nemotron4-15b": _llama(_LLAMA3, 32, 6144, 48, 24576, vocab=256000, sequence=4096, gated=False),
    "nemotron4-340b": _llama(_LLAMA3, 96, 18432, 96, 73728, vocab=256000, sequence=4096, gated=False),
    # xAI 2024, github.com/xai-org/grok-1: run.py
    "grok1-314b": _llama(_LLAMA3, 64, 6144, 48, 32768, vocab=131072, head_dim=128, experts=8, top_k=2),
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


def preset(name: str, sequence: int | None = None, changes: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the spec of a preset, at another sequence length or with other fields if they are given.

    Raises:
        ModelError: there is no such preset, or no such field.
    """
    if name == "resnet50":
        return resnet(name)
    if name not in DECODERS:
        raise ModelError(f"no preset {name!r}{did_you_mean(name, PRESETS)}; there are {', '.join(PRESETS)}")
    known = {field.name for field in fields(Decoder)}
    for field in changes or {}:
        if field not in known:
            hint = did_you_mean(field, known)
            raise ModelError(f"preset {name} has no {field!r}{hint}; its fields are {', '.join(sorted(known))}")
    decoder = replace(DECODERS[name], **({"sequence": sequence} if sequence else {}), **(changes or {}))
    if decoder.hidden % decoder.heads and not decoder.head_dim:
        raise ModelError(f"preset {name}: {decoder.heads} heads do not divide hidden={decoder.hidden}")
    return spec(decoder, name)


def sized(num_params: float, sequence: int, vocab: int = 50257) -> Decoder:
    """Return a GPT of about so many weights, as wide for its depth as those of Brown et al. 2020 (table 2.1) are."""
    known = sorted((12 * d.layers * d.hidden**2, d) for n, d in DECODERS.items() if n.startswith("gpt3-"))
    _, near = min(known, key=lambda pair: abs(pair[0] - num_params))
    layers = max(1, round(near.layers * (num_params / (12 * near.layers * near.hidden**2)) ** (1 / 3)))
    width = (num_params / (12 * layers)) ** 0.5
    unit = 1024 if width > 4096 else 128  # heads of 128, a number of them that nodes of eight divide
    hidden = max(unit, round(width / unit) * unit)
    layers = max(1, round(num_params / (12 * hidden**2)))
    return replace(near, layers=layers, hidden=hidden, heads=hidden // 128, vocab=vocab, sequence=sequence)


# -- decoders ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    """A layer in the making: elements of one sample."""

    params: list[tuple[str, tuple[int, ...], Cut | None, bool]]
    products: list[Product]
    moved: float = 0.0
    moved_cut: float = 0.0
    saved: float = 0.0
    saved_cut: float = 0.0
    results: float = 0.0
    """Results of products, which recompute=selective keeps."""
    results_cut: float = 0.0
    kernels: int = 0

    def weight(self, name: str, shape: tuple[int, ...], cut: Cut | None = None, trainable: bool = True) -> None:
        """Add a weight."""
        self.params.append((name, shape, cut, trainable))

    def move(self, whole: float, cut: float, kernels: int) -> None:
        """Add work that is no product: elements that stay whole under a tensor cut, and that do not."""
        self.moved += whole + cut
        self.moved_cut += cut
        self.kernels += kernels

    def save(self, whole: float, cut: float) -> None:
        """Add what is kept for the backward."""
        self.saved += whole + cut
        self.saved_cut += cut

    def result(self, whole: float, cut: float) -> None:
        """Add results of products."""
        self.results += whole + cut
        self.results_cut += cut


def spec(decoder: Decoder, name: str) -> ModelSpec:
    """Count what one sample of a decoder does."""
    embedding, head = _embedding(decoder), _head(decoder)
    dense, sparse = _block(decoder, False), _block(decoder, True) if decoder.experts else None
    roots = ("model.embed_tokens", "model.embed_positions")[: 1 + bool(decoder.positions)]
    layers = [_layer(decoder, embedding, "embed_tokens", roots, False)]
    params = list(_params(embedding, 0, "model"))
    work = {False: _layer(decoder, dense, "", (), True)}
    if sparse:
        work[True] = _layer(decoder, sparse, "", (), True)
    for index in range(decoder.layers):
        is_sparse = decoder.is_sparse(index)
        path = f"model.layers.{index}"
        layers.append(_named(work[is_sparse], path))
        params += _params(sparse if is_sparse and sparse else dense, index + 1, path)
    layers.append(_layer(decoder, head, "norm+lm_head", ("model.norm", "lm_head"), False))
    params += _params(head, decoder.layers + 1, "")
    if decoder.tied:
        params = [replace(p, shared=True, aliases=("lm_head.weight",)) if p.name.endswith("tokens.weight") else p for p in params]
    if decoder.adapter_rank:
        params = [p if ".lora_" in p.name else replace(p, trainable=False) for p in params]
        layers = [replace(layer, products=tuple(map(_frozen, layer.products))) for layer in layers]
    return ModelSpec(
        name=name, layers=tuple(layers), params=tuple(params), cut_refusal="", logit_rows=decoder.sequence
    )


def _frozen(product: Product) -> Product:
    return replace(product, factors="frozen") if product.factors == "weight" and product.owner != "lora" else product


def _named(layer: LayerSpec, path: str) -> LayerSpec:
    """Give a block's layer its place; sums are owned by its modules."""

    def placed(parts: tuple[PartialSum, ...]) -> tuple[PartialSum, ...]:
        return tuple(replace(part, owner=f"{path}.{part.owner}") for part in parts)

    return replace(
        layer,
        name=path,
        modules=(path,),
        forward_sums=placed(layer.forward_sums),
        backward_sums=placed(layer.backward_sums),
    )


def _params(block: _Block, layer: int, path: str) -> Iterator[ParamSpec]:
    for name, shape, cut, trainable in block.params:
        full = f"{path}.{name}" if path else name
        yield ParamSpec(name=full, shape=shape, layer=layer, cut=cut, trainable=trainable)


def _layer(decoder: Decoder, made: _Block, name: str, modules: tuple[str, ...], is_block: bool) -> LayerSpec:
    stream = decoder.sequence * decoder.hidden
    is_head = name.startswith("norm")
    is_embedding = name.startswith("embed")
    forward: tuple[PartialSum, ...] = ()
    backward: tuple[PartialSum, ...] = ()
    if is_block:
        forward = (PartialSum(owner="self_attn.o_proj", elements=stream), PartialSum(owner="mlp.down_proj", elements=stream))
        backward = (PartialSum(owner="mlp.up_proj", elements=stream), PartialSum(owner="self_attn.q_proj", elements=stream))
    elif is_embedding:
        forward = (PartialSum(owner="model.embed_tokens", elements=stream),)
    elif is_head:
        backward = (PartialSum(owner="lm_head", elements=stream),)
    given = 0 if is_embedding else stream
    return LayerSpec(
        name=name,
        modules=modules,
        is_block=is_block,
        forward_flops=sum(product.flops for product in made.products),
        output_elements=decoder.sequence * decoder.vocab if is_head else stream,
        saved_elements=round(made.saved),
        saved_cut_elements=round(made.saved_cut),
        saved_selective_elements=round(min(given + made.results, made.saved)),
        saved_selective_cut_elements=round(min(made.results_cut, made.saved_cut)),
        input_elements=given,
        backward_reads_weights=not is_embedding,
        forward_sums=forward,
        backward_sums=backward,
        products=tuple(made.products),
        moved_elements=round(made.moved),
        moved_cut_elements=round(made.moved_cut),
        kernels=made.kernels + len(made.products),
    )


def _embedding(decoder: Decoder) -> _Block:
    s, h = decoder.sequence, decoder.hidden
    made = _Block([], [])
    made.weight("embed_tokens.weight", (decoder.vocab, h), Cut(style="vocab", dim=0, groups=decoder.vocab))
    if decoder.positions:
        made.weight("embed_positions.weight", (decoder.positions, h))
    made.move((2 + 3 * bool(decoder.positions) + 2.5 * decoder.dropout) * s * h, 0, 2 + 2 * bool(decoder.positions))
    made.save(0.5 * decoder.dropout * s * h, 0)
    return made


def _norm(decoder: Decoder, made: _Block, name: str) -> None:
    made.weight(f"{name}.weight", (decoder.hidden,))
    if decoder.layer_norm:
        made.weight(f"{name}.bias", (decoder.hidden,))
    elements = decoder.sequence * decoder.hidden
    # a cast, a square, a mean, a scaling, a cast back and the weight, where they are not one kernel
    made.move((2 if decoder.fused else 12) * elements, 0, 1 if decoder.fused else 6)
    made.save((2 if decoder.fused else 4) * elements, 0)  # what it is given, and what it gives to the products


def _linear(
    decoder: Decoder, made: _Block, name: str, rows: int, inner: int, columns: int, cut: Cutting, groups: int = 0,
    experts: int = 0,
) -> None:  # fmt: skip
    """A weight [columns, inner] and its product, cut between `groups` (heads, neurons) on one side."""
    style: Literal["column", "row"] = "row" if cut == "inner" else "column"
    shape = (experts, columns, inner) if experts else (columns, inner)
    dim = (1 if cut == "inner" else 0) + bool(experts)
    spec_cut = Cut(style=style, dim=dim, groups=groups or shape[dim]) if cut else None
    made.weight(f"{name}.weight", shape, spec_cut)
    if decoder.bias:
        made.weight(f"{name}.bias", shape[:-1], spec_cut if cut == "columns" else None)
    product = Product(rows=rows, inner=inner, columns=columns, groups=max(experts, 1), cut=cut, owner=name)
    made.products.append(product)
    made.result(0 if cut == "columns" else rows * columns, rows * columns if cut == "columns" else 0)


def _block(decoder: Decoder, is_sparse: bool) -> _Block:
    s, h = decoder.sequence, decoder.hidden
    made = _Block([], [])
    _norm(decoder, made, "input_layernorm")
    (_latent_attention if decoder.latent_rank else _attention)(decoder, made)
    made.move((3 + decoder.dropout) * s * h, 0, 1)
    _norm(decoder, made, "post_attention_layernorm")
    (_experts if is_sparse else _feed_forward)(decoder, made)
    made.move((3 + decoder.dropout) * s * h, 0, 1)
    made.save(2 * 0.5 * decoder.dropout * s * h, 0)  # masks of one byte
    return made


def _attention(decoder: Decoder, made: _Block) -> None:
    s, h, a, k, d = decoder.sequence, decoder.hidden, decoder.heads, decoder.kv, decoder.dim
    if decoder.bias:
        _linear(decoder, made, "self_attn.qkv", s, h, (a + 2 * k) * d, "columns", min(a, k))
    else:
        for name, heads in (("q_proj", a), ("k_proj", k), ("v_proj", k)):
            _linear(decoder, made, f"self_attn.{name}", s, h, heads * d, "columns", heads)
    if not decoder.positions:
        made.move(0, (2 if decoder.fused else 8) * (a + k) * d * s, 2 if decoder.fused else 10)
    _adapters(decoder, made, (a + 2 * k) * d)
    _scores(decoder, made, d, d)
    made.save(0, (a + 2 * k) * d * s)
    _linear(decoder, made, "self_attn.o_proj", s, a * d, h, "inner", a)


def _adapters(decoder: Decoder, made: _Block, columns: int) -> None:
    rank = decoder.adapter_rank
    if rank:
        s, h = decoder.sequence, decoder.hidden
        made.weight("self_attn.lora_a", (2 * rank, h))
        made.weight("self_attn.lora_b", (columns + h, rank))
        made.products.append(Product(rows=s, inner=h, columns=2 * rank, owner="lora"))
        made.products.append(Product(rows=s, inner=rank, columns=columns + h, owner="lora"))


def _scores(decoder: Decoder, made: _Block, key_dim: int, value_dim: int) -> None:
    """Attention itself, fused or with its scores in memory."""
    s, a, keys = decoder.sequence, decoder.heads, decoder.keys or decoder.sequence
    if decoder.attention != "plain":
        product = Product(
            rows=s, inner=key_dim + value_dim, columns=keys, count=a, factors=decoder.attention, cut="count",
            owner="self_attn",
        )  # fmt: skip
        made.products.append(product)
        made.save(0, a * value_dim * s)
        made.result(0, a * value_dim * s)
        return
    for inner, columns in ((key_dim, keys), (keys, value_dim)):
        made.products.append(
            Product(rows=s, inner=inner, columns=columns, count=a, factors="pair", cut="count", owner="self_attn")
        )
    # softmax reads and writes the scores, dropout reads them, writes them and a mask of bytes
    made.move(0, (2 + 2.5 * decoder.dropout) * a * s * keys, 1 + decoder.dropout)
    made.move(0, 2 * 4 * a * s * value_dim, 4)  # heads are laid side by side for the products, and back
    made.save(0, (1 + 1.5 * decoder.dropout) * a * s * keys + a * value_dim * s)
    made.result(0, a * s * keys + a * value_dim * s)


def _latent_attention(decoder: Decoder, made: _Block) -> None:
    s, h, a, d, r = decoder.sequence, decoder.hidden, decoder.heads, decoder.dim, decoder.rotary_dim
    _linear(decoder, made, "self_attn.q_a_proj", s, h, decoder.query_rank, "")
    made.weight("self_attn.q_a_layernorm.weight", (decoder.query_rank,))
    _linear(decoder, made, "self_attn.q_b_proj", s, decoder.query_rank, a * (d + r), "columns", a)
    _linear(decoder, made, "self_attn.kv_a_proj", s, h, decoder.latent_rank + r, "")
    made.weight("self_attn.kv_a_layernorm.weight", (decoder.latent_rank,))
    _linear(decoder, made, "self_attn.kv_b_proj", s, decoder.latent_rank, a * 2 * d, "columns", a)
    made.move(2 * (decoder.query_rank + decoder.latent_rank) * s, 6 * a * (d + r) * s, 8)
    made.save(2 * (decoder.query_rank + decoder.latent_rank) * s, a * (3 * d + 2 * r) * s)
    _scores(decoder, made, d + r, d)
    _linear(decoder, made, "self_attn.o_proj", s, a * d, h, "inner", a)


def _feed_forward(decoder: Decoder, made: _Block, name: str = "mlp", width: int = 0) -> None:
    s, h, f = decoder.sequence, decoder.hidden, width or decoder.ffn
    for part in ("gate_proj", "up_proj") if decoder.gated else ("up_proj",):
        _linear(decoder, made, f"{name}.{part}", s, h, f, "columns")
    separate = decoder.gated and not decoder.fused
    made.move(0, (5 if separate else 3 if decoder.gated else 2) * s * f, 1 + separate)
    made.save(0, (4 if separate else 3 if decoder.gated else 2) * s * f)
    _linear(decoder, made, f"{name}.down_proj", s, f, h, "inner")


def _experts(decoder: Decoder, made: _Block) -> None:
    """A router, and rows that are sorted by expert, multiplied, weighted and put back."""
    s, h, f, e = decoder.sequence, decoder.hidden, decoder.expert_ffn, decoder.experts
    rows = s * decoder.top_k
    made.weight("mlp.gate.weight", (e, h))
    made.products.append(Product(rows=s, inner=h, columns=e, owner="mlp.gate"))
    made.result(s * e, 0)
    plain = replace(decoder, bias=False)
    _linear(plain, made, "mlp.experts.gate_up_proj", rows, h, (1 + decoder.gated) * f, "columns", f, experts=e)
    _linear(plain, made, "mlp.experts.down_proj", rows, f, h, "inner", f, experts=e)
    if decoder.bias:
        made.weight("mlp.experts.gate_up_proj_bias", (e, (1 + decoder.gated) * f))
        made.weight("mlp.experts.down_proj_bias", (e, h))
    # rows are copied out and back, weighted and added up; the router's scores are sorted
    made.move(8 * rows * h + 8 * s * e, (3 if decoder.gated else 2) * rows * f, 20)
    made.save(2 * rows * h, (3 if decoder.gated else 2) * rows * f)
    if decoder.shared_experts:
        _feed_forward(plain, made, "mlp.shared_experts", f * decoder.shared_experts)


def _head(decoder: Decoder) -> _Block:
    s, h, v = decoder.sequence, decoder.hidden, decoder.vocab
    made = _Block([], [])
    made.weight("model.norm.weight", (h,))
    if decoder.layer_norm:
        made.weight("model.norm.bias", (h,))
    made.move(2 * s * h, 0, 1)
    made.save(2 * s * h, 0)
    made.products.append(Product(rows=s, inner=h, columns=v, cut="columns", owner="lm_head"))
    if not decoder.tied:
        made.weight("lm_head.weight", (v, h), Cut(style="vocab", dim=0, groups=v))
    # logits become float32: written in twice the bytes, then read for the largest, the sum and the gradient
    made.move(0, (1 + 2 + 2 + 2 + 2) * s * v, 8)
    made.save(0, (1 + 2 if decoder.fused else 1 + 2 + 2) * s * v)
    made.result(0, s * v)
    return made


# -- images ------------------------------------------------------------------------------------------------------------

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


def resnet(name: str = "resnet50", size: int = 224, classes: int = 1000) -> ModelSpec:
    """ResNet-50 (He et al. 2016, arXiv:1512.03385, table 1), stride in the middle product as torchvision has it."""
    layers: list[LayerSpec] = []
    params: list[ParamSpec] = []

    def add(layer: str, parts: list[tuple[str, int, int, int, int]], is_block: bool) -> None:
        """Convolutions (name, kernel, channels in, out, side of the result), each with a norm."""
        products, kept, moved = [], 0, 0
        for part, kernel, given, made, side in parts:
            products.append(Product(rows=side * side, inner=given * kernel**2, columns=made, taps=kernel**2, owner=f"{layer}.{part}"))
            index = len(layers)
            params.append(ParamSpec(name=f"{layer}.{part}.weight", shape=(made, given, kernel, kernel), layer=index))
            params.append(ParamSpec(name=f"{layer}.{part}_norm.weight", shape=(made,), layer=index))
            params.append(ParamSpec(name=f"{layer}.{part}_norm.bias", shape=(made,), layer=index))
            kept += 3 * side * side * made
            moved += 3 * side * side * made  # the norm reads twice, and writes what the activation gives
        out = parts[-1] if not is_block else parts[2]
        elements = out[4] ** 2 * out[3]
        layers.append(
            LayerSpec(
                name=layer,
                modules=(layer,),
                is_block=is_block,
                forward_flops=sum(product.flops for product in products),
                output_elements=elements,
                saved_elements=kept,
                saved_selective_elements=sum(p.rows * p.columns for p in products),
                input_elements=size * size * 3 if not layers else layers[-1].output_elements,
                products=tuple(products),
                moved_elements=moved + elements,
                kernels=3 * len(products) + 1,
            )
        )

    add("conv1", [("conv", 7, 3, 64, size // 2)], False)
    channels, side = 64, size // 4
    for stage, (width, count) in enumerate(_STAGES):
        for block in range(count):
            half = 2 if block == 0 and stage > 0 else 1
            parts = [
                ("conv1", 1, channels, width, side),
                ("conv2", 3, width, width, side // half),
                ("conv3", 1, width, 4 * width, side // half),
            ]
            if block == 0:
                parts.append(("downsample", 1, channels, 4 * width, side // half))
            add(f"layer{stage + 1}.{block}", parts, True)
            channels, side = 4 * width, side // half
    index = len(layers)
    params += [
        ParamSpec(name="fc.weight", shape=(classes, channels), layer=index),
        ParamSpec(name="fc.bias", shape=(classes,), layer=index),
    ]
    product = Product(rows=1, inner=channels, columns=classes, owner="fc")
    layers.append(
        LayerSpec(
            name="fc",
            modules=("fc",),
            forward_flops=product.flops,
            output_elements=classes,
            saved_elements=channels + 3 * classes,
            input_elements=layers[-1].output_elements,
            products=(product,),
            moved_elements=side * side * channels + 6 * classes,
            kernels=4,
        )
    )
    return ModelSpec(
        name=name,
        layers=tuple(layers),
        params=tuple(params),
        cut_refusal="convolutions have no plan",
    )
