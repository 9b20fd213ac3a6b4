"""The rows of the axes: each layout of an axis with a model that it cuts in a way of its own; `test_axes.py` runs them.

What a layout alone may hide is not here: every pair of features is a row of `test_products.py`. By default each model of an axis
and each setting that the products lack is in one row; the others are for `make parity`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from tests.covering import daily
from tests.laboratory import combinations
from tests.models import MODELS, Attentive, AttentiveBlock
from tests.parity.moved_models import (
    MIXERS,
    Bare,
    FusedRecurrence,
    Mixing,
    Recurrence,
    RecurrentLayers,
    Shift,
    behind_a_shifted_token,
)


def nightly(layouts: Iterable[str], models: Iterable[str]) -> list[Any]:
    """Return every layout with every model, for `make parity` alone."""
    models = list(models)
    return [pytest.param(layout, model, marks=pytest.mark.nightly) for layout in layouts for model in models]


# -- data ------------------------------------------------------------------------------------------

MODELS_HERE = ("llama", "gpt2", "plain")
DATA_OF_TWO = [
    "dp=2",
    "dp=2 microbatch=1",
    "dp=2 zero=1",
    "dp=2 zero=1 microbatch=2",
    "dp=2 zero=2",
    "dp=2 zero=2 microbatch=1",
    "dp=2 zero=2 microbatch=2 accumulate=full",
    "dp=2 zero=3",
    "dp=2 zero=3 microbatch=1",
    "dp=2 zero=3 microbatch=2 accumulate=full",
    "dp=2 reduce=root",
    "dp=2 reduce=hierarchical",
    "dp=2 recompute=full",
    "dp=2 zero=1 recompute=selective",
    "dp=2 zero=2 recompute=full",
    "dp=2 zero=3 recompute=selective microbatch=2",
    "dp=2 zero=3 recompute=alternate microbatch=2",
    "dp=2 offload",
    "dp=2 zero=1 offload",
    "dp=2 zero=3 offload",
]
DATA = [
    *DATA_OF_TWO,
    "dp=4",
    "dp=4 zero=1",
    "dp=4 zero=2 microbatch=1",
    "dp=4 zero=3",
    "dp_replicate=2 dp_shard=2",
    "dp_replicate=2 dp_shard=2 microbatch=1",
    "dp_replicate=2 dp_shard=2 microbatch=1 accumulate=full recompute=full",
    "dp_replicate=2 dp_shard=2 zero=2 microbatch=1",
    "dp_replicate=2 dp_shard=2 zero=1",
    "dp=4 reduce=root microbatch=1",
]
OF_PAIRS = {
    "dp=2 microbatch=1",
    "dp=2 zero=1 offload",
    "dp=2 zero=1 recompute=selective",
    "dp=2 zero=2 recompute=full",
    "dp=2 zero=3 microbatch=1",
    "dp=4 zero=1",
    "dp=4 zero=2 microbatch=1",
    "dp_replicate=2 dp_shard=2 microbatch=1",
    "dp_replicate=2 dp_shard=2 zero=1",
}
"""Pairs of words that a layout of `test_products.py` has too: in `make parity` alone."""
assert set(DATA) >= OF_PAIRS
ON_HOST = [
    ("dp=1 recompute=offload microbatch=3", "deep_gpt2"),
    ("dp=2 zero=1 recompute=offload", "deep_tied"),
    ("dp=2 zero=2 recompute=offload microbatch=2", "deep_gpt2"),
    ("dp=2 zero=2 accumulate=full recompute=offload microbatch=2", "deep_tied"),
    ("dp=2 zero=3 recompute=offload microbatch=2", "deep_llama"),
    ("tp=2 sequence_parallel recompute=offload", "deep_gemma"),
    ("cp=2 exchange=ring recompute=offload", "dropping_llama"),
    ("tp=2 pp=2 schedule=interleaved virtual_stages=2 recompute=offload microbatch=2", "deep_qwen3"),
    ("pp=2 schedule=zero-bubble recompute=offload microbatch=2", "deep_attentive"),
    ("dp=2 ep=2 recompute=offload", "deep_mixtral"),
]
"""Inputs of blocks in the host's memory."""
MLP_CHUNKS = [
    ("dp=1 mlp_chunk=12 microbatch=3", "deep_llama"),
    ("dp=2 zero=1 mlp_chunk=5 recompute=selective", "deep_gemma"),
    ("dp=2 zero=3 mlp_chunk=12 recompute=offload microbatch=2", "deep_qwen3"),
    ("cp=2 exchange=ring mlp_chunk=8 recompute=full", "deep_llama"),
    ("pp=2 schedule=zero-bubble mlp_chunk=12 microbatch=2", "deep_tied"),
    ("pp=2 schedule=interleaved virtual_stages=2 mlp_chunk=8 loss_chunk=5 microbatch=2", "deep_gpt2"),
]
"""MLPs in chunks of tokens, of which the last may be smaller."""
IN_PIECES = ["dp=1 microbatch=1", "dp=1 microbatch=3", "dp=1 recompute=full", "dp=1 offload"]
WITH_DROPOUT = ["dp=2", "dp=2 zero=1", "dp=2 zero=3", "dp=2 zero=3 recompute=full microbatch=1"]

# -- tensors ---------------------------------------------------------------------------------------

CUT_MODELS = ["llama_even", "llama_tied", "qwen3", "gpt2_even", "attentive", "llama"]
CUT = [
    "tp=2",
    "tp=2 microbatch=3",
    "tp=2 recompute=full",
    "tp=2 recompute=selective microbatch=4",
    "tp=2 recompute=alternate microbatch=4",
    "tp=2 offload",
    "dp=2 tp=2 zero=1 microbatch=2",
    "dp=2 tp=2 zero=3 microbatch=2 accumulate=full",
]
SEQUENCES = ["deep_llama", "deep_qwen3", "deep_gpt2", "deep_gemma", "deep_tied", "parted", "attentive"]
CUT_SEQUENCES = [
    "tp=2 sequence_parallel",
    "tp=2 sequence_parallel recompute=full microbatch=4",
    "tp=2 sequence_parallel recompute=selective",
    "dp=2 tp=2 sequence_parallel zero=3 recompute=full",
]
SHARED_HEADS = ["tp=4", "tp=4 sequence_parallel recompute=selective", "tp=4 recompute=full microbatch=4"]
"""Query heads on four ranks, two heads of keys and values: two ranks compute on each of these."""
SHARED_BY_EIGHT = ["dp=2 tp=4 zero=3 microbatch=2", "dp=2 tp=4 zero=1", "tp=4 pp=2 microbatch=2"]
LATER_GRADIENTS = [
    "tp=4 pp=2 schedule=zero-bubble microbatch=2",
    "dp=2 tp=2 pp=2 schedule=zero-bubble sequence_parallel microbatch=2",
]

# -- pipelines -------------------------------------------------------------------------------------

STAGED = ["deep_llama", "deep_tied", "deep_qwen3", "deep_gemma", "deep_granite", "deep_gpt2", "deep_attentive"]
STAGES = [
    "pp=2",
    "pp=2 microbatch=2",
    "pp=2 microbatch=2 schedule=gpipe",
    "pp=2 schedule=interleaved virtual_stages=2 microbatch=2",
    "pp=2 schedule=interleaved virtual_stages=2",
    "pp=4 microbatch=1",
    "pp=4 microbatch=2 recompute=full",
    "pp=2 microbatch=3",
    "pp=4 schedule=zero-bubble microbatch=1",
    "pp=2 schedule=zero-bubble microbatch=2 recompute=full",
    "dp=2 pp=2 schedule=zero-bubble microbatch=2 zero=1 recompute=selective",
    "dp=1 pp=2 schedule=zero-bubble microbatch=2 recompute=alternate",
    "dp=2 pp=2 zero=2 microbatch=1 accumulate=full schedule=interleaved virtual_stages=2",
    "tp=2 pp=2 schedule=interleaved virtual_stages=2 microbatch=4 recompute=full",
]
OF_EIGHT = [
    "dp=2 tp=2 pp=2 microbatch=1 zero=3 schedule=interleaved virtual_stages=2",
    "dp_replicate=2 dp_shard=2 pp=2 zero=3 microbatch=1 recompute=selective",
]
CUT_STAGES = ["dp=2 tp=2 pp=2 sequence_parallel microbatch=1 schedule=zero-bubble offload"]
"""Of eight ranks: one such layout is proven on every run of the suite."""

# -- slices of sequences ---------------------------------------------------------------------------


class Causal(nn.Module):
    """A convolution of each token with those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv1d(16, 16, 3, groups=16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (2, 0))).mT * self.gate(x).sigmoid()


class Hybrid(nn.Module):
    """Blocks of a convolution, an attention and a recurrence, all of which mix tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.causal, self.attentive = nn.LayerNorm(16), Causal(), AttentiveBlock(16, 4)
        self.recurrent = nn.GRU(16, 8, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.causal(self.norm(x))
        return self.attentive(x) + self.recurrent(x)[0]


class Hybrids(Attentive):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hybrid() for _ in range(2))


class Squared(nn.Module):
    """An attention whose weights are squared, which is no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.query, self.key, self.value))
        weights = (q @ k.mT).softmax(-1).square()
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class SquaredBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), Squared()
        self.ff = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.ff(x)


class SquaredModel(Attentive):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SquaredBlock() for _ in range(2))


class Neighbours(Mixing):
    """Calls that need tokens of neighbours on both sides, one by one and side by side."""

    def __init__(self) -> None:
        super().__init__(lambda width: nn.Sequential(*(make(width) for make, _, _ in MIXERS.values())), blocks=1)


MODELS |= {
    "neighbours": Neighbours,
    "bare": Bare,
    "neighbours: token 1 of a shift": functools.partial(Mixing, functools.partial(Shift, shift=behind_a_shifted_token)),
    **{f"neighbours: {name}": functools.partial(Mixing, make) for name, (make, _, _) in MIXERS.items()},
    "recurrent layers": lambda: Mixing(RecurrentLayers),
    "recurrence": lambda: Mixing(Recurrence),
    "fused recurrence": lambda: Mixing(FusedRecurrence),
    "squared": SquaredModel,
    "hybrid": Hybrids,
    "attentive_of_eight": lambda: Attentive(heads=8),
}
SLICED = ["llama", "qwen3", "gpt2", "attentive"]
SLICES = [
    "cp=2",
    "cp=2 zero=1 microbatch=2",
    "cp=2 zero=2 microbatch=2",
    "cp=2 zero=3 recompute=full",
    "cp=2 recompute=selective microbatch=4",
    "cp=2 offload microbatch=4",
    "dp=2 cp=2 reduce=hierarchical",
    "dp_replicate=2 dp_shard=1 cp=2 zero=2 microbatch=1",
    "tp=2 cp=2 zero=3 recompute=full",
]
DEEP_SLICED = ["deep_llama", "deep_gpt2", "deep_tied", "deep_attentive"]
SLICED_STAGES = ["pp=2 cp=2 schedule=interleaved virtual_stages=2 microbatch=2 recompute=full"]
DROPPING_SLICED = ["dropping_gpt2", "dropping_attentive", "dropping_llama"]
MASKED = ["cp=2", "cp=2 recompute=full microbatch=4", "tp=2 cp=2", "pp=2 cp=2 microbatch=2 recompute=selective"]
RING = [
    "cp=3",
    "cp=2 exchange=ring zero=3 recompute=full",
    "dp=2 cp=2 exchange=ring zero=1 microbatch=2",
    "tp=2 cp=2 exchange=ring recompute=selective",
    "cp=2 exchange=ring recompute=alternate",
    "cp=4 exchange=ring microbatch=2",
    "pp=2 cp=2 exchange=ring microbatch=2",
]
RING_MASKED = ["cp=2 exchange=ring", "cp=2 exchange=ring recompute=selective microbatch=4"]
SLICES_OF_SLICES = [
    ("tp=2 cp=2 sequence_parallel zero=3", "llama_even"),
    ("tp=2 cp=2 sequence_parallel exchange=ring recompute=full", "qwen3"),
    ("tp=2 cp=2 sequence_parallel recompute=selective", "dropping_attentive"),
]
GATHERED = [
    ("cp=2", "hybrid"),
    ("cp=2 exchange=ring zero=3 recompute=full", "hybrid"),
    ("pp=2 cp=2 exchange=ring microbatch=2 schedule=zero-bubble", "hybrid"),
    ("tp=2 cp=2 zero=2", "squared"),
    ("cp=2 zero=3 recompute=selective", "deep_gpt_oss"),
]
"""Parts that mix tokens compute all of them."""
MOVED = [
    ("cp=2 zero=3 recompute=full microbatch=4", "neighbours"),
    ("cp=2 exchange=ring recompute=selective", "hybrid"),
    ("cp=3 zero=1 recompute=full microbatch=4", "recurrence"),
    ("cp=2 recompute=full microbatch=4", "bare"),
    ("cp=2 recompute=selective microbatch=2", "recurrent layers"),
    ("tp=2 cp=2 zero=3 recompute=full", "recurrent layers"),
    ("pp=2 cp=2 microbatch=2 schedule=zero-bubble", "recurrent layers"),
]
"""Ranks send each other the tokens at the ends of their slices, and the states of recurrences."""
WRITTEN_OUT = ["cp=2 zero=1 recompute=selective microbatch=4", "tp=2 cp=2 zero=2"]
"""Attentions that code writes out compute all tokens on every rank, where they stand in a module of their own."""
AROUND_GROUPS = [
    ("cp=4 exchange=hybrid", "deep_qwen3"),
    ("cp=4 exchange=hybrid recompute=full microbatch=4", "dropping_llama"),
    ("cp=4 exchange=hybrid zero=3 recompute=selective", "hybrid"),
    ("tp=2 cp=4 exchange=hybrid zero=1", "attentive_of_eight"),
]
"""Groups that exchange heads, around a ring."""

# -- experts ---------------------------------------------------------------------------------------

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "own_experts"]
WITH_PLANS, WITH_BALANCE = FAMILIES[:3], ["mixtral_balanced", "qwen3_moe_balanced"]
DEALT = [
    "dp=2 zero=3 microbatch=2",
    "dp=2 ep=2",
    "dp=2 ep=2 zero=1 microbatch=2",
    "dp=2 ep=2 zero=1 recompute=selective",
    "dp=2 ep=2 zero=1 recompute=alternate",
    "dp=4 ep=4 zero=1",
    "dp=4 ep=2 reduce=root microbatch=1",
    "dp=4 ep=2 zero=3 microbatch=1 recompute=full",
    "dp=4 ep=2 zero=2 microbatch=1 accumulate=full",
    "dp_replicate=2 dp_shard=2 ep=2 zero=3 microbatch=2",
    "dp=2 cp=2 ep=4 zero=1 microbatch=2",
]
DEALT_AND_CUT = ["tp=2 recompute=full microbatch=4", "dp=2 tp=2 ep=2 zero=1 recompute=full"]
MORE_DEALT = [
    "dp=2 zero=2 recompute=full",
    "dp=2 ep=2 microbatch=1 recompute=full",
    "dp=4 ep=4 microbatch=1",
    "dp_replicate=2 dp_shard=2 zero=1 ep=2 microbatch=2",
]
ROWS_OF_OWN_TOKENS = [
    "tp=2 sequence_parallel",
    "tp=2 sequence_parallel recompute=full microbatch=3",
    "dp=2 tp=2 sequence_parallel ep=2 zero=3 recompute=selective",
]
MORE_ROWS_OF_OWN_TOKENS = [
    "dp=2 tp=2 sequence_parallel ep=2 zero=1 microbatch=2",
    "dp=2 tp=2 sequence_parallel zero=2 microbatch=2",
]
FROZEN = [
    "mixtral_behind_a_frozen_front",
    "mixtral_with_its_last_queries",
    "qwen3_moe_with_its_first_router",
    "own_experts_behind_a_frozen_front",
]
"""No backward runs in the experts of a frozen front."""
BEHIND_FROZEN = [
    "dp=2 ep=2 zero=3",
    "dp=2 ep=2 zero=3 microbatch=2 recompute=full",
    "dp=2 ep=2 zero=2",
    "dp=2 ep=2 zero=1 recompute=selective",
]
MORE_BEHIND_FROZEN = ["dp=4 ep=2 zero=3", "dp=2 cp=2 ep=2 zero=3"]

# -- masks, and logits in chunks -------------------------------------------------------------------

DROPPING = ["dropping_gpt2", "dropping_gpt2_eager", "dropping_llama", "dropping_attentive"]
MASKS = [
    "tp=2",
    "pp=2 microbatch=2",
    "tp=2 recompute=full microbatch=4",
    "pp=2 schedule=interleaved virtual_stages=2 microbatch=2 recompute=full",
    "tp=2 recompute=selective",
    "dp=2 tp=2 zero=3 microbatch=2",
    "tp=2 pp=2 microbatch=2 recompute=selective",
    "dp=2 pp=2 zero=1 microbatch=1",
    "dp=2 tp=2 zero=1 recompute=full",
]
CHUNKED = ["llama_even", "llama_tied", "gpt2_even", "attentive", "plain"]
CHUNKS = [
    "dp=1 loss_chunk=5",
    "dp=2 loss_chunk=7 microbatch=2",
    "dp=2 zero=1 loss_chunk=5 recompute=full",
    "dp=2 zero=2 loss_chunk=5 microbatch=3",
    "dp=2 zero=3 loss_chunk=100",
]
CUT_CHUNKS = [
    "tp=2 loss_chunk=5",
    "tp=2 loss_chunk=5 microbatch=3 recompute=selective",
    "dp=2 tp=2 zero=3 loss_chunk=9 microbatch=2",
]
CHUNKS_ON_AXES = [
    ("tp=2 sequence_parallel loss_chunk=5", "deep_llama"),
    ("tp=2 loss_chunk=5", "llama"),  # a vocabulary that stays whole
    ("pp=2 loss_chunk=5 microbatch=2", "deep_llama"),
    ("pp=2 loss_chunk=5 microbatch=2 schedule=zero-bubble", "deep_tied"),
    ("pp=2 loss_chunk=5 microbatch=2 schedule=interleaved virtual_stages=2", "deep_gpt2"),
    ("dp=2 pp=2 zero=3 loss_chunk=5 microbatch=2", "deep_llama"),
    ("cp=2 loss_chunk=5", "deep_llama"),
    ("tp=2 pp=2 loss_chunk=3 microbatch=2", "deep_gemma"),
]


def _by_default(*cases: list[Any]) -> list[Any]:
    """Return the rows of `combinations` of which `make test` runs those that hold what the products lack."""
    return daily([case for some in cases for case in some], beside_products=True)


ROWS: dict[str, list[Any]] = {
    "data": [
        *daily(combinations([layout for layout in DATA if layout not in OF_PAIRS], MODELS_HERE)),
        *nightly(sorted(OF_PAIRS), MODELS_HERE),
        *_by_default(combinations(IN_PIECES, MODELS_HERE)),
        *daily(ON_HOST),
        *daily(MLP_CHUNKS),
        *_by_default(combinations(WITH_DROPOUT, ["plain_with_dropout", "gpt2_with_dropout"])),
    ],
    "tensors": [
        *_by_default(combinations(CUT, CUT_MODELS), combinations(CUT_SEQUENCES, SEQUENCES)),
        *_by_default(combinations(SHARED_HEADS, ["qwen3"])),
        *nightly(SHARED_HEADS, ["qwen2", "llama_tied"]),
        *nightly(["tp=4"], ["llama_even"]),
        ("tp=4", "attentive"),
        *nightly(SHARED_BY_EIGHT, ["deep_qwen3"]),
        *nightly(["tp=4 cp=2"], ["many_heads"]),
        *nightly(LATER_GRADIENTS, ["deep_qwen3", "deep_llama"]),
        ("tp=2 sequence_parallel", "dropping_gpt2"),
    ],
    "pipelines": [
        *_by_default(combinations(STAGES, STAGED)),
        *combinations(CUT_STAGES, [*STAGED[:-1], "parted"]),
        *nightly(OF_EIGHT, STAGED),
    ],
    "slices": [
        *_by_default(combinations(SLICES, SLICED), combinations(MASKED, DROPPING_SLICED)),
        *nightly(SLICED_STAGES, DEEP_SLICED),  # by default the products hold slices with each schedule
        *_by_default(combinations(RING, ["deep_llama", "deep_qwen3", "deep_attentive"])),
        *_by_default(combinations(RING_MASKED, DROPPING_SLICED)),
        *_by_default(SLICES_OF_SLICES),
        *nightly([SLICES_OF_SLICES[0][0]], ["gpt2", "deep_mixtral", "deep_granite"]),
        ("cp=4", "llama"),
        *nightly(["cp=4"], ["attentive", "deep_gemma", "deep_granite"]),
        *_by_default(GATHERED, MOVED),
        ("tp=2 cp=2 zero=3 recompute=full microbatch=4", "neighbours"),
        ("cp=2", "neighbours: token 1 of a shift"),
        *nightly(["tp=2 cp=2"], ["neighbours", *(f"neighbours: {name}" for name in MIXERS)]),
        *_by_default(combinations(WRITTEN_OUT, ["dropping_gpt2_eager"])),
        *daily(AROUND_GROUPS),
    ],
    "experts": [
        *_by_default(combinations(DEALT, FAMILIES), combinations(DEALT_AND_CUT, WITH_PLANS)),
        *nightly(MORE_DEALT, FAMILIES),
        *daily(combinations(ROWS_OF_OWN_TOKENS, WITH_PLANS)),
        *nightly(MORE_ROWS_OF_OWN_TOKENS, WITH_PLANS),
        ("dp=4 ep=4 microbatch=1", "crowded_experts"),  # all tokens choose two of eight: three ranks compute nothing
        *_by_default(combinations(["dp=2 ep=2 zero=1", "dp=2 zero=3 recompute=full", "tp=2"], WITH_BALANCE)),
        *nightly(["dp=2", "dp=2 tp=2 ep=2 recompute=selective"], WITH_BALANCE),
        *daily(combinations(BEHIND_FROZEN, FROZEN)),
        *nightly(MORE_BEHIND_FROZEN, FROZEN),
        *nightly(["dp=2 tp=2 ep=2 zero=3"], FROZEN[:3]),
    ],
    "masks": [*_by_default(combinations(MASKS, DROPPING)), *nightly(["dp=2 tp=2 pp=2 microbatch=2"], DROPPING[::3])],
    "chunks": [
        *daily([*combinations(CHUNKS, CHUNKED), *combinations(CUT_CHUNKS, CHUNKED[:4])]),
        *daily(CHUNKS_ON_AXES),
    ],
}

LEDGERS = [
    *nightly(["tp=2 recompute=full", "dp=2 tp=2 zero=3 microbatch=2", "tp=2 microbatch=4"], CUT_MODELS),
    *nightly(["tp=2 sequence_parallel"], ["deep_gpt2", "parted"]),
    *nightly(["tp=4"], ["qwen3"]),
    *nightly(
        [
            "pp=2 microbatch=2",
            "tp=2 pp=2 microbatch=2",
            "dp=2 pp=2 zero=1 microbatch=2",
            "dp=2 pp=2 zero=3 microbatch=2",
            "dp=2 pp=2 schedule=zero-bubble microbatch=2",
        ],
        ["deep_tied", "deep_gpt2"],
    ),
    *nightly(["cp=2 recompute=full", "dp=2 cp=2 zero=3 microbatch=2"], SLICED),
    *daily(combinations(["cp=2 recompute=full", "cp=2 exchange=ring zero=3 microbatch=2"], ["hybrid"])),
    *daily([("dp=2 zero=2 recompute=offload microbatch=2", "deep_llama")]),
    *nightly(
        ["dp=2 zero=3 recompute=offload", "tp=2 pp=2 recompute=offload microbatch=2"], ["deep_gpt2", "deep_qwen3"]
    ),
    *nightly(["cp=2 recompute=offload"], ["deep_llama", "recurrent layers"]),
]
"""In mixed precision; by default the rows of `test_products.py` in bf16 hold it."""

UNEVEN = [
    *daily(
        [
            ("dp=4", "plain", 7),
            ("dp=4", "plain", 3),
            ("dp=4 zero=1", "plain", 5),
            ("dp=4 zero=3 microbatch=1", "plain", 7),
            ("dp_replicate=2 dp_shard=2", "plain", 3),
            ("dp=4 ep=2 zero=1 microbatch=1", "mixtral", 7),
            ("dp=4 ep=2", "mixtral_balanced", 3),
        ],
        beside_products=True,
    ),
    pytest.param("dp=4 ep=4 microbatch=1", "mixtral", 5, marks=pytest.mark.nightly),
]
"""Batches that ranks do not divide evenly."""
