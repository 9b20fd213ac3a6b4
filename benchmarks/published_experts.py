"""Experts of a published row: which of them a rank holds, whether whole, and what it sends to those of others.

Megatron-LM cuts each expert by its expert tensor parallelism, as far as everything else by default; NVIDIA's recipes say
one, so that the ranks of a tensor cut have experts of their own and ep counts them too. Either way a rank sends its own
tokens, and nobody sums gradients of experts over the tensor cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from cells import Row, joined
from published_loops import is_entry
from published_machines import graph_part, is_by_engine, is_late

from samestep.hardware import Hardware
from samestep.models.decoder import Decoder
from samestep.models.layer_parts import Boundary, Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import Cut, ParamSpec
from samestep.models.spec import ModelSpec

ROUTING = 12
"""Operations that Megatron-LM starts less to route rows than a decoder counts: it fuses the sorting, and most of it has no backward."""
SENT_AS_THEY_ARE, SORTED_ON_ARRIVAL = 4, 8
"""Passes over routed rows that are spared of the eight that a decoder counts. DeepEP sends tokens as they are, so rows are not copied for
their ranks before and after an exchange; HybridEP, on racks, writes what arrives in the order of experts (`dispatch_with_permute` of
Megatron-Core's fused_a2a.py), so nothing else is copied. Racks are taken to have it where a row does not say."""


_GROUPS = ((r"deepseek.?v?3(?!\d)", 8, 4),)
"""Models whose tokens choose among the experts of so many groups only: how many there are, and of how many a token chooses. DeepSeek-AI
2024, arXiv:2412.19437, section 2.1.2: a token goes to at most four nodes; `n_group` and `topk_group` of its configuration."""
_IN_TURN = re.compile("automodel", re.IGNORECASE)
"""Sources whose tokens go to experts that follow each other: token t to those from t k on (FakeBalancedGate of NeMo AutoModel, which all
of its benchmarks have). Megatron-LM's balanced routing draws experts at random."""


def sent_rows(row: Row, machine: Hardware, decoder: Decoder | None, ep: int) -> float:
    """Expected nodes among those of the experts chosen for a token, over the choices: DeepEP and HybridEP send to a node once; within one
    node, to a rank once."""
    nodes = -(-ep // machine.devices_per_node)
    nodes = ep if nodes < 2 else nodes
    if decoder is None or decoder.top_k < 2 or nodes < 2 or not _sends_once(row, machine):
        return 1.0
    if _IN_TURN.search(joined(row, "source")):
        return -(-decoder.top_k * nodes // decoder.experts) / decoder.top_k
    name = row.get("model") or ""
    groups, chosen = next((few for pattern, *few in _GROUPS if re.search(pattern, name, re.IGNORECASE)), (1, 1))
    return nodes_of_a_token(decoder.top_k, nodes, groups, chosen) / decoder.top_k


def nodes_of_a_token(choices: int, nodes: int, groups: int = 1, chosen: int = 1) -> float:
    """Return the expected nodes of so many choices, drawn from the experts of `chosen` of all groups; nodes hold equal numbers of experts,
    in order, so that one has several groups, or several have parts of one."""
    if nodes >= groups:  # a node has one part in nodes / groups of a group
        return nodes * chosen / groups * (1 - (1 - groups / nodes / chosen) ** choices)
    here, ways = groups // nodes, math.comb(groups, chosen)
    met = sum(
        math.comb(here, mine) * math.comb(groups - here, chosen - mine) * (1 - (1 - mine / chosen) ** choices)
        for mine in range(1, min(here, chosen) + 1)
    )
    return nodes * met / ways


def hides_exchanges(row: Row, decoder: Decoder | None) -> bool:
    """Whether rows are exchanged beside the compute of another micro-batch (Megatron-Core's `overlap_moe_expert_parallel_comm`), and a CUDA graph
    starts at least a part of both. Where the host starts all of it, there is little to hide: of Qwen3 235B on 256 H100 NVIDIA published 233
    TFLOP/s without, and 238 to 253 in the releases with it. Of experts in one graph for the whole step all recipes have it, so entries do."""
    if decoder is None or not decoder.experts or not graph_part(row):
        return False
    return "moe_a2a_overlap=True" in joined(row, "notes") or (is_entry(row) and graph_part(row) == 1.0)


def _sends_once(row: Row, machine: Hardware) -> bool:
    """Whether rows go to their experts by DeepEP or HybridEP: where the row says so, and in NVIDIA's recipes from Hopper on."""
    said = joined(row, "notes")
    return re.search(r"deepep|hybridep|type=flex", said, re.I) is not None or (is_late(machine) and _is_recipe(row))


def _spared(row: Row, machine: Hardware) -> int:
    """Return the passes over routed rows that DeepEP, or on racks HybridEP, spares."""
    if not _sends_once(row, machine):
        return 0
    said = re.search("hybridep|deepep", joined(row, "notes"), re.IGNORECASE)
    is_hybrid = said[0].lower() == "hybridep" if said else machine.devices_per_node > MOST_OF_A_NODE
    return SORTED_ON_ARRIVAL if is_hybrid else SENT_AS_THEY_ARE


MOST_OF_A_NODE = 16
"""Devices of the largest node; more are a rack."""


def _is_recipe(row: Row) -> bool:
    return re.search(r"nemo|bridge|dgxc", joined(row, "source", "url_or_repo_path"), re.IGNORECASE) is not None


def with_experts(
    row: Row, machine: Hardware, model: ModelSpec, words: Mapping[str, int | str], tp: int, ep: int
) -> tuple[ModelSpec, int]:
    """Leave ranks their experts, or parts of them; and say to how many data ranks layout words deal them.

    Other ranks that experts are dealt to are those that cut the sequence, or within FSDP.
    """
    ranks = int(words.get("dp_shard") or words.get("dp_replicate") or 1)
    dealt = 1 if int(words.get("zero", 0)) > 1 else math.gcd(ranks, ep, *(param.experts for param in model.params))
    parts = _parts_of_expert(row, tp, ranks, ep)
    own = tp // parts  # sets of experts that the ranks of one tensor cut have between them

    def held(param: ParamSpec) -> ParamSpec:
        if not param.experts:
            return param
        shape = (-(-param.shape[0] * dealt // ep), param.shape[1] * own, *param.shape[2:])
        cut = Cut(style="column", dim=1, groups=shape[1]) if tp > 1 else None
        return replace(param, shape=shape, cut=cut, partial="")

    layers = tuple(_with_own_experts(layer, tp, own, ep) if layer.dispatches else layer for layer in model.layers)
    if is_by_engine(row):
        passes = _spared(row, machine) if ep > 1 else 0
        layers = tuple(_routed(layer, passes) if layer.dispatches else layer for layer in layers)
    return replace(model, params=tuple(map(held, model.params)), layers=layers), dealt


def _routed(layer: LayerSpec, passes: int) -> LayerSpec:
    """Leave out the operations, and so many passes over routed rows, that Megatron-LM spares."""
    spared = passes * sum(dealing.rows * dealing.width for dealing in layer.dispatches)
    return replace(layer, moved=layer.moved.plus(-spared, kernels=-ROUTING))


def _parts_of_expert(row: Row, tp: int, data_ranks: int, ep: int) -> int:
    """Parts of an expert: those of the tensor cut, but in NVIDIA's recipes, which leave experts whole."""
    said = re.search(r"expert-tensor-parallel-size=(\d+)|\bETP=(\d+)", joined(row, "notes"))
    parts = int(said[1] or said[2]) if said else 1 if _is_recipe(row) else tp
    return math.gcd(parts, tp) if tp * data_ranks % (ep * parts) == 0 else 1


def _with_own_experts(layer: LayerSpec, tp: int, own: int, ep: int) -> LayerSpec:
    """Cut experts into parts; ranks of `tp` that share one put their rows together first."""

    def worked(product: Product) -> Product:
        if not product.owner.startswith("mlp.experts"):
            return product
        groups = -(-product.groups // ep)
        product = replace(product, rows=-(-product.rows // own), groups=groups, is_between=False)
        if product.owner.endswith("down_proj"):
            return replace(product, inner=product.inner * own, cut="inner" if tp > 1 else "")
        return replace(product, columns=product.columns * own, cut="columns" if tp > 1 else "")

    (dealing,) = layer.dispatches
    rows = Boundary(owner=dealing.owner, elements=dealing.rows // own * dealing.width, kind="gather")
    return replace(
        layer,
        products=tuple(map(worked, layer.products)),
        sequence_boundaries=layer.sequence_boundaries + ((rows, replace(rows, kind="scatter")) if own < tp else ()),
    )
