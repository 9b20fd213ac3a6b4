"""Blocks of Mamba-2 in models whose other layers are attentions and plain layers, counted as Megatron-LM's mixer runs them.

A mixer scans the sequence in chunks (Dao and Gu 2024, arXiv:2405.21060, section 6; `mamba_chunk_scan_combined` of mamba_ssm):

    within a chunk     products C B' of a group, and of its scores and the values of a head
    states             one matrix [head_dim, state] of each head and chunk is written in float32, read to be passed on from
                       chunk to chunk, written in the compute dtype, and read with C for the output
    beside it          a convolution over what is scanned, and a norm of the output that a gate multiplies
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec


class Mixers(NamedTuple):
    """What a hybrid model has instead of some of its attentions, and the attentions that it has."""

    heads: int
    head_dim: int
    state: int
    """Elements of the state of one channel."""
    groups: int
    """Groups of heads, each with its own B and C."""
    chunk: int
    """Tokens of a chunk."""
    attentions: int
    """Number of layers of attention, between blocks of a mixer and a plain layer."""
    queries: int
    """Heads of an attention."""
    keys: int

    @property
    def width(self) -> int:
        """Channels that are scanned."""
        return self.heads * self.head_dim


MIXERS = {
    # NVIDIA 2025, arXiv:2504.03624, table 1; MambaMixer of Megatron-LM works in chunks of 128 tokens
    "nemotron-h-56b": Mixers(heads=256, head_dim=64, state=256, groups=8, chunk=128, attentions=10, queries=64, keys=8)
}
STATE_ELEMENTS = 4
"""Times that the compute dtype's bytes of all states are moved besides by the products that make and read them, in a forward: float32
is written, read, and written in the compute dtype, and the products count one writing and one reading in that."""


def with_mixers(model: ModelSpec, decoder: Decoder, mixers: Mixers) -> ModelSpec:
    """Let the attentions of a decoder, whose projections are as large, scan; and add the attentions that the model has besides."""
    blocks = [index for index, layer in enumerate(model.layers) if layer.is_block]
    attend = spec(
        replace(decoder, heads=mixers.queries, kv_heads=mixers.keys, head_dim=decoder.hidden // mixers.queries, keys=0),
        model.name,
    )
    chosen = {blocks[(2 * place + 1) * len(blocks) // (2 * mixers.attentions)] for place in range(mixers.attentions)}
    layers = [_scanning(layer, decoder, mixers) if layer.is_block else layer for layer in model.layers]
    for index in chosen:
        layers[index] = _attending(layers[index], attend.layers[index], decoder)
    added = tuple(
        replace(param, name=_renamed(param.name))
        for param in attend.params
        if param.layer in chosen and _PART in param.name
    )
    return replace(model, layers=tuple(layers), params=_in_order(model.params + added))


def _in_order(params: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    return tuple(sorted(params, key=lambda param: param.layer))


def _scanning(layer: LayerSpec, decoder: Decoder, mixers: Mixers) -> LayerSpec:
    """Let a block scan instead of attending."""
    s, shared = decoder.sequence, 2 * mixers.groups * mixers.state
    chunks = -(-s // mixers.chunk)
    products = tuple(one for old in layer.products for one in (_scan(mixers, chunks) if old.is_attention else (old,)))
    rotated = 2 * (decoder.heads + decoder.kv) * decoder.dim * s  # which a mixer does not
    states = chunks * mixers.width * mixers.state
    moved = 2 * (mixers.width + shared) * s + 3 * mixers.width * s + STATE_ELEMENTS * states - rotated
    return replace(
        layer,
        products=products,
        forward_flops=sum(product.flops for product in products),
        moved=layer.moved.plus(moved, moved, len(products) - len(layer.products) + 2),
        # sums of the steps, the convolution, the states passed on, and the norm, instead of two rotations
    )


def _scan(mixers: Mixers, chunks: int) -> tuple[Product, ...]:
    """Return the products of a scan; heads of a group are columns or rows of one product where they share a factor."""
    chunk, state, of_group = mixers.chunk, mixers.state, mixers.width // mixers.groups

    def product(rows: int, inner: int, columns: int, count: int) -> Product:
        return Product(
            rows=rows, inner=inner, columns=columns, count=count * chunks, factors="pair", cut="count", owner=_OWNER,
            is_batched=True,
        )  # fmt: skip

    return (
        product(chunk, state, chunk, mixers.groups),
        product(chunk, chunk, mixers.head_dim, mixers.heads),
        product(of_group, chunk, state, mixers.groups),
        product(chunk, state, of_group, mixers.groups),
    )


_OWNER = "self_attn"
_PART = f".{_OWNER}."


def _renamed(name: str) -> str:
    return name.replace(_OWNER, "attention")


def _attending(layer: LayerSpec, attend: LayerSpec, decoder: Decoder) -> LayerSpec:
    """Put an attention of its own, with its norm, before a block."""
    added = tuple(replace(one, owner=_renamed(one.owner)) for one in attend.products if one.owner.startswith(_OWNER))
    sums = tuple(replace(one, owner=_renamed(one.owner)) for one in attend.forward_sums if _PART in one.owner)
    back = tuple(
        replace(one, owner=_renamed(one.owner), beside=tuple(map(_renamed, one.beside)))
        for one in attend.backward_sums
        if f"{_PART}q_proj" in one.owner
    )
    boundaries = tuple(
        replace(one, owner=_renamed(one.owner)) for one in attend.sequence_boundaries if _OWNER in one.owner
    )
    moved = 5 * decoder.sequence * decoder.hidden  # the norm and the residual stream
    return replace(
        layer,
        products=added + layer.products,
        forward_flops=layer.forward_flops + sum(product.flops for product in added),
        moved=layer.moved.plus(moved, kernels=len(added) + 2),
        forward_sums=sums + layer.forward_sums,
        backward_sums=layer.backward_sums + back,
        sequence_boundaries=boundaries + layer.sequence_boundaries,
    )
