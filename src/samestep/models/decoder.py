"""A transformer counted from its hyperparameters: the work and the activations that tracing would find, without a module.

A `Decoder` holds the hyperparameters of a model's configuration; its parts are counted for one sample (`decoder_spec.py` makes
a `ModelSpec` of them). With s tokens,
hidden size h, a heads of size d, k key-value heads, intermediate size f and vocabulary V:

    q, k, v      [s, h] x [h, (a + 2k) d]       proj   [s, a d] x [a d, h]
    attention    a times [s, d] x [d, s] and [s, s] x [s, d], fused unless `attention` is plain
    up, down     [s, h] x [h, f (2f gated)] and [s, f] x [f, h]; with experts s top_k rows, divided among them
    head         [s, h] x [h, V]

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4): a block keeps the inputs of its products and
norms, and unfused attention its scores. A tensor cut divides the activations between a column-cut and a row-cut
product. Latent attention (DeepSeek-V2, arXiv:2405.04434) has low-rank queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from samestep.models.layer_parts import Cutting, ExpertDispatch, Product, TokenPart
from samestep.models.param_spec import Cut, Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The hyperparameters of a transformer; `sequence` is the number of tokens of a sample."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    keys: int = 0
    """Number of tokens that a token attends to, if a sample is a part of a sequence; 0: as `sequence`."""
    kv_heads: int = 0
    """Number of key-value heads; 0: as `heads`."""
    head_dim: int = 0
    """Size of a head; 0: hidden / heads."""
    intermediate: int = 0
    """Intermediate size of a dense block; 0: four times `hidden`."""
    gated: bool = False
    positions: int = 0
    """Number of learned positional embeddings; 0: rotary positions or none."""
    tied: bool = False
    bias: bool = False
    qkv_bias: bool = False
    """Whether, of the products of a block, those of queries, keys and values have a bias."""
    layer_norm: bool = False
    """Whether norms have a bias as well as a weight."""
    embedding_norm: bool = False
    """Whether a norm follows the embedding."""
    post_norm: bool = False
    """Whether norms also follow attention and feed-forward, before the residual sum."""
    query_norm: Literal["", "head", "all"] = ""
    """Norms of queries and keys: of each head, of all heads together, or none."""
    sinks: bool = False
    """Whether each head has a learned score that belongs to no token (attention sink)."""
    dropout: bool = False
    attention: Literal["causal", "attention", "plain"] = "causal"
    """Fused attention, causal or not; or plain matrix products with the scores in memory."""
    fused: bool = True
    """Whether norms, rotations and activations are one kernel each; as plain PyTorch operations they are several."""
    experts: int = 0
    """Number of experts of a block; 0: none."""
    top_k: int = 0
    """Number of experts chosen for each token."""
    expert_intermediate: int = 0
    """Intermediate size of an expert; 0: as `intermediate`."""
    shared_experts: int = 0
    """Number of experts that every token uses."""
    dense_layers: int = 0
    """Number of first blocks without experts."""
    query_rank: int = 0
    """Latent attention: rank of the queries; 0: one product computes them."""
    latent_rank: int = 0
    """Latent attention: rank of keys and values together; 0: no latent attention."""
    rotary_dim: int = 0
    """Latent attention: size of the part of a head with rotary positions."""
    adapter_rank: int = 0
    """Rank of low-rank adapters (LoRA) on q, k, v and proj, with all other weights frozen; 0: none."""

    @property
    def kv(self) -> int:
        """Number of key-value heads."""
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
        """Return whether a block, by its index, has experts."""
        return self.experts > 0 and block >= self.dense_layers


@dataclass(slots=True)
class Counts:
    """The counts of a layer while it is put together, in elements of one sample."""

    params: list[tuple[str, tuple[int, ...], Cut | None, Partial, int]]
    products: list[Product]
    dispatches: tuple[ExpertDispatch, ...] = ()
    moved: float = 0.0
    """Elements read and written by operations that are no matrix products."""
    moved_cut: float = 0.0
    fusible: float = 0.0
    """The part of `moved` that a compiler spares, which joins what stands between two products."""
    fusible_cut: float = 0.0
    fusible_kernels: int = 0
    saved: float = 0.0
    """Elements kept for the backward."""
    saved_cut: float = 0.0
    results: float = 0.0
    """Elements of the results of products, which recompute=selective keeps."""
    results_cut: float = 0.0
    working: float = 0.0
    """Largest number of elements alive in its backward besides those saved."""
    working_cut: float = 0.0
    kernels: int = 0
    token_parts: tuple[TokenPart, ...] = ()

    def weight(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None, partial: Partial = "", experts: int = 0
    ) -> None:
        """Add a weight of the given shape."""
        self.params.append((name, shape, cut, partial, experts))

    def move(self, whole: float, cut: float, kernels: int) -> None:
        """Add elements read and written by other operations: whole under a tensor cut, and divided by it."""
        self.moved += whole + cut
        self.moved_cut += cut
        self.kernels += kernels

    def spare(self, whole: float, cut: float, kernels: int) -> None:
        """Add elements and operations of what was moved that a compiler spares: whole under a tensor cut, and divided by it."""
        self.fusible += whole + cut
        self.fusible_cut += cut
        self.fusible_kernels += kernels

    def save(self, whole: float, cut: float) -> None:
        """Add elements kept for the backward: whole under a tensor cut, and divided by it."""
        self.saved += whole + cut
        self.saved_cut += cut

    def work(self, whole: float, cut: float) -> None:
        """Raise the peak of elements alive in the backward to this many, if it is lower."""
        if whole + cut > self.working:
            self.working, self.working_cut = whole + cut, cut

    def result(self, whole: float, cut: float) -> None:
        """Add elements of the results of products: whole under a tensor cut, and divided by it."""
        self.results += whole + cut
        self.results_cut += cut


def embedding_counts(decoder: Decoder) -> Counts:
    """Return the counts of what comes before the blocks."""
    s, h = decoder.sequence, decoder.hidden
    counts = Counts([], [])
    counts.weight("embed_tokens.weight", (decoder.vocab, h), Cut(style="vocab", dim=0, groups=decoder.vocab))
    if decoder.positions:
        counts.weight("embed_positions.weight", (decoder.positions, h))
    counts.move((2 + 3 * bool(decoder.positions) + 2.5 * decoder.dropout) * s * h, 0, 2 + 2 * bool(decoder.positions))
    counts.save(0.5 * decoder.dropout * s * h, 0)
    counts.work(s * h, 0)
    if decoder.embedding_norm:
        _norm(decoder, counts, "embed_layernorm", is_added=True)
    return counts


def _norm(decoder: Decoder, counts: Counts, name: str, *, is_added: bool = False) -> None:
    counts.weight(f"{name}.weight", (decoder.hidden,))
    if decoder.layer_norm:
        counts.weight(f"{name}.bias", (decoder.hidden,))
    elements = decoder.sequence * decoder.hidden
    fused = decoder.fused or decoder.layer_norm  # torch has a kernel of norms with a bias
    # A norm that is not one kernel casts, squares, takes the mean, scales, casts back and multiplies by the weight.
    counts.move((2 if fused else 12) * elements, 0, 1 if fused else 6)
    if not fused:
        counts.spare(10 * elements, 0, 5)
    # Its input is kept, and so is an output that products read; one that is only added to the residual stream, or that frozen weights
    # alone multiply, is not.
    counts.save(((2 if fused else 4) - is_added) * elements, 0)


def _linear(
    decoder: Decoder, counts: Counts, name: str, rows: int, inner: int, columns: int, cut: Cutting, groups: int = 0,
    experts: int = 0, is_shareable: bool = False,
) -> None:  # fmt: skip
    """Add a weight [columns, inner] and its product, cut between `groups` (heads, neurons) on one side."""
    style: Literal["column", "row"] = "row" if cut == "inner" else "column"
    shape = (experts, columns, inner) if experts else (columns, inner)
    dim = (1 if cut == "inner" else 0) + bool(experts)
    spec_cut = Cut(style=style, dim=dim, groups=groups or shape[dim], is_shareable=is_shareable) if cut else None
    counts.weight(f"{name}.weight", shape, spec_cut, experts=experts)
    if decoder.bias:
        counts.weight(f"{name}.bias", shape[:-1], spec_cut if cut == "columns" else None)
    product = Product(
        rows=rows, inner=inner, columns=columns, groups=max(experts, 1), cut=cut, owner=name,
        most_parts=groups if is_shareable else 0, is_between=experts > 0,
    )  # fmt: skip
    counts.products.append(product)
    counts.result(0 if cut == "columns" else rows * columns, rows * columns if cut == "columns" else 0)


def block_counts(decoder: Decoder, is_sparse: bool) -> Counts:
    """Return the counts of a block, dense or with experts."""
    s, h = decoder.sequence, decoder.hidden
    counts = Counts([], [])
    _norm(decoder, counts, "input_layernorm")
    (_latent_attention if decoder.latent_rank else _attention)(decoder, counts)
    if decoder.post_norm:
        _norm(decoder, counts, "post_self_attn_layernorm", is_added=True)
        counts.spare(2 * s * h, 0, 1)  # the sum takes its result from registers
    counts.move((3 + decoder.dropout) * s * h, 0, 1)
    counts.spare(s * h, 0, 1)  # and so does the next norm
    _norm(decoder, counts, "post_attention_layernorm", is_added=decoder.adapter_rank > 0)
    saved = counts.saved
    (_experts if is_sparse else _feed_forward)(decoder, counts)
    if decoder.attention == "plain":
        # The gradients of scores before and after the softmax are alive; other activations are already freed.
        keys = decoder.keys or s
        counts.work(2 * s * h + saved - counts.saved, 2 * decoder.heads * s * keys)
    if decoder.post_norm:
        _norm(decoder, counts, "post_mlp_layernorm", is_added=True)
        counts.spare(2 * s * h, 0, 1)
    counts.move((3 + decoder.dropout) * s * h, 0, 1)
    counts.save(2 * 0.5 * decoder.dropout * s * h, 0)  # two masks of one byte an element
    if not (decoder.post_norm or decoder.dropout or (is_sparse and not decoder.shared_experts)):
        counts.products[-1] = replace(counts.products[-1], is_repeated=False)  # its result is only added to the stream
    return counts


def _attention(decoder: Decoder, counts: Counts) -> None:
    s, h, a, k, d = decoder.sequence, decoder.hidden, decoder.heads, decoder.kv, decoder.dim
    if decoder.bias:
        _linear(decoder, counts, "self_attn.qkv", s, h, (a + 2 * k) * d, "columns", min(a, k))
    else:
        biased = replace(decoder, bias=decoder.qkv_bias)
        for name, heads in (("q_proj", a), ("k_proj", k), ("v_proj", k)):
            _linear(biased, counts, f"self_attn.{name}", s, h, heads * d, "columns", heads, is_shareable=heads < a)
    if decoder.query_norm:
        _query_norms(decoder, counts)
    if not decoder.positions:
        counts.move(0, (2 if decoder.fused else 8) * (a + k) * d * s, 2 if decoder.fused else 10)
        if not decoder.fused:
            counts.spare(0, 6 * (a + k) * d * s, 8)
    if decoder.sinks:
        counts.weight("self_attn.sinks", (a,), Cut(style="column", dim=0, groups=a))
    _adapters(decoder, counts, (a + 2 * k) * d)
    _scores(decoder, counts, d, d)
    counts.save(0, (a + 2 * k) * d * s)
    _linear(decoder, counts, "self_attn.o_proj", s, a * d, h, "inner", a)


def _query_norms(decoder: Decoder, counts: Counts) -> None:
    """Add the norms of queries and keys: one weight for every head, or one for all heads, cut like its product."""
    a, k, d = decoder.heads, decoder.kv, decoder.dim
    for name, heads in (("q_norm", a), ("k_norm", k)):
        if decoder.query_norm == "head":
            counts.weight(f"self_attn.{name}.weight", (d,), partial="cut")
        else:
            cut = Cut(style="column", dim=0, groups=heads, is_shareable=heads < a)
            counts.weight(f"self_attn.{name}.weight", (heads * d,), cut)
    elements = (a + k) * d * decoder.sequence
    counts.move(0, (2 if decoder.fused else 12) * elements, 2 if decoder.fused else 12)
    if not decoder.fused:
        counts.spare(0, 10 * elements, 10)
    if not decoder.positions:
        counts.spare(0, 2 * elements, 2)  # the rotation takes their results from registers
    counts.save(0, (1 if decoder.fused else 3) * elements)  # their inputs; attention keeps their outputs


def _adapters(decoder: Decoder, counts: Counts, columns: int) -> None:
    """Add one adapter of q, k and v together, and one of the output, as in Megatron-LM: two products each, a factor and a sum."""
    rank = decoder.adapter_rank
    if rank:
        s, h = decoder.sequence, decoder.hidden
        counts.weight("self_attn.lora_a", (2 * rank, h))
        counts.weight("self_attn.lora_b", (columns + h, rank))
        counts.products.append(Product(rows=s, inner=h, columns=2 * rank, owner="lora"))
        counts.products.append(Product(rows=s, inner=rank, columns=columns + h, owner="lora"))
        counts.save(2 * rank * s, 0)
        counts.move(5 * s * h, 5 * s * columns, 2 + 4)  # both pairs of products are one above, so two more are started


def _scores(decoder: Decoder, counts: Counts, key_dim: int, value_dim: int) -> None:
    """Add the attention itself, fused or with its scores in memory."""
    s, a, keys = decoder.sequence, decoder.heads, decoder.keys or decoder.sequence
    if decoder.attention != "plain":
        product = Product(
            rows=s, inner=key_dim + value_dim, columns=keys, count=a, factors=decoder.attention, cut="count",
            owner="self_attn",
        )  # fmt: skip
        counts.products.append(product)
        counts.save(0, a * value_dim * s)
        counts.result(0, a * value_dim * s)
        return
    for inner, columns in ((key_dim, keys), (keys, value_dim)):
        counts.products.append(
            Product(
                rows=s,
                inner=inner,
                columns=columns,
                count=a,
                factors="pair",
                cut="count",
                owner="self_attn",
                is_batched=True,
            )
        )
    # The softmax reads and writes the scores; dropout reads and writes them, and writes a mask of bytes.
    counts.move(0, (2 + 2.5 * decoder.dropout) * a * s * keys, 1 + decoder.dropout)
    counts.move(0, 2 * 4 * a * s * value_dim, 4)  # heads are transposed for the products, and back
    if not decoder.fused:  # scores are scaled, and a mask is added, by operations of their own
        counts.move(0, 4 * a * s * keys, 2)
    counts.save(0, (1 + 1.5 * decoder.dropout) * a * s * keys + a * value_dim * s)
    counts.result(0, a * s * keys + a * value_dim * s)


def _latent_attention(decoder: Decoder, counts: Counts) -> None:
    s, h, a, d, r = decoder.sequence, decoder.hidden, decoder.heads, decoder.dim, decoder.rotary_dim
    if decoder.query_rank:
        _linear(decoder, counts, "self_attn.q_a_proj", s, h, decoder.query_rank, "")
        counts.weight("self_attn.q_a_layernorm.weight", (decoder.query_rank,))
        _linear(decoder, counts, "self_attn.q_b_proj", s, decoder.query_rank, a * (d + r), "columns", a)
    else:
        _linear(decoder, counts, "self_attn.q_proj", s, h, a * (d + r), "columns", a)
    _linear(decoder, counts, "self_attn.kv_a_proj", s, h, decoder.latent_rank + r, "")
    counts.weight("self_attn.kv_a_layernorm.weight", (decoder.latent_rank,))
    _linear(decoder, counts, "self_attn.kv_b_proj", s, decoder.latent_rank, a * 2 * d, "columns", a)
    counts.move(2 * (decoder.query_rank + decoder.latent_rank) * s, 6 * a * (d + r) * s, 8)
    counts.save(2 * (decoder.query_rank + decoder.latent_rank) * s, a * (3 * d + 2 * r) * s)
    _scores(decoder, counts, d + r, d)
    _linear(decoder, counts, "self_attn.o_proj", s, a * d, h, "inner", a)


def _feed_forward(decoder: Decoder, counts: Counts, name: str = "mlp", width: int = 0) -> None:
    s, h, f = decoder.sequence, decoder.hidden, width or decoder.ffn
    for part in ("gate_proj", "up_proj") if decoder.gated else ("up_proj",):
        _linear(decoder, counts, f"{name}.{part}", s, h, f, "columns")
    separate = decoder.gated and not decoder.fused
    counts.move(0, (5 if separate else 3 if decoder.gated else 2) * s * f, 1 + separate)
    if separate:
        counts.spare(0, 2 * s * f, 1)
    num_saved = 4 if separate else 3 if decoder.gated else 2
    num_saved -= decoder.adapter_rank > 0  # frozen weights alone read the last of them
    counts.save(0, num_saved * s * f)
    # Alive are the gradients of the input and of the activation's inputs and output, one of them in freed memory.
    counts.work(s * h, (1 + decoder.gated) * s * f)
    _linear(decoder, counts, f"{name}.down_proj", s, f, h, "inner")
    if not counts.dispatches:
        queries, keys = decoder.heads * decoder.dim, decoder.kv * decoder.dim
        token_part = TokenPart(
            owner=name,
            tokens=s,
            boundary_elements=2 * s * h,
            saved_elements=num_saved * s * f,
            results=(1 + decoder.gated) * s * f + s * h,
            working_elements=2 * s * h + (1 + decoder.gated) * s * f,
            other_working_elements=s
            * (h + 2 * queries + 2 * keys),  # the gradients of an attention's inputs and output
            weights=(2 + decoder.gated) * h * f * (not decoder.adapter_rank),
        )
        counts.token_parts = (token_part,)


def _experts(decoder: Decoder, counts: Counts) -> None:
    """Add a router, and rows that are sorted by expert, multiplied, weighted and put back."""
    s, h, f, e = decoder.sequence, decoder.hidden, decoder.expert_ffn, decoder.experts
    rows = s * decoder.top_k
    counts.weight("mlp.gate.weight", (e, h))
    if decoder.bias:
        counts.weight("mlp.gate.bias", (e,))
    counts.products.append(Product(rows=s, inner=h, columns=e, owner="mlp.gate", is_between=True))
    counts.result(s * e, 0)
    plain = replace(decoder, bias=False)
    # A tensor cut leaves experts whole; `ep` shards them.
    _linear(plain, counts, "mlp.experts.gate_up_proj", rows, h, (1 + decoder.gated) * f, "", experts=e)
    _linear(plain, counts, "mlp.experts.down_proj", rows, f, h, "", experts=e)
    if decoder.bias:
        counts.weight("mlp.experts.gate_up_proj_bias", (e, (1 + decoder.gated) * f), experts=e)
        counts.weight("mlp.experts.down_proj_bias", (e, h), experts=e)
    counts.dispatches = (ExpertDispatch(owner="mlp.experts", rows=rows, width=h, experts=e),)
    # Rows are copied out and back, weighted and summed; the router's scores are sorted.
    inside = (3 if decoder.gated else 2) * rows * f
    counts.move(8 * rows * h + 8 * s * e + inside, 0, 24)
    counts.save(2 * rows * h + inside, 0)
    counts.work(s * h + rows * h + (1 + decoder.gated) * rows * f, 0)
    if decoder.shared_experts:
        _feed_forward(plain, counts, "mlp.shared_experts", f * decoder.shared_experts)


def head_counts(decoder: Decoder) -> Counts:
    """Return the counts of the last norm and the product that makes the logits."""
    s, h, v = decoder.sequence, decoder.hidden, decoder.vocab
    counts = Counts([], [])
    counts.weight("model.norm.weight", (h,))
    if decoder.layer_norm:
        counts.weight("model.norm.bias", (h,))
    counts.move(2 * s * h, 0, 1)
    counts.save((2 - (decoder.adapter_rank > 0)) * s * h, 0)
    counts.products.append(Product(rows=s, inner=h, columns=v, cut="columns", owner="lm_head"))
    if not decoder.tied:
        counts.weight("lm_head.weight", (v, h), Cut(style="vocab", dim=0, groups=v))
    # Logits become float32: they are written in twice the bytes, then read for the maximum, the sum and the gradient.
    counts.move(0, (1 + 2 + 2 + 2 + 2) * s * v, 8)
    counts.work(s * h, s * v)  # the gradients of the logits and of the product's input
    return counts
