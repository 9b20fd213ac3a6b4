"""Models without a plan of tensor parallelism, which is read from their data flow, and families that `make families` found."""

from __future__ import annotations

import functools

import pytest

from samestep.layout import Layout
from tests.code.own_models import OWN
from tests.laboratory import clipped, program_in, prove, source_of
from tests.models import MODELS, hf

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN = {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 32, "pad_token_id": 1}
MODELS |= {
    "opt": functools.partial(hf, "opt", ffn_dim=40, word_embed_proj_dim=16, **SMALL, **PLAIN),
    "olmo2": functools.partial(hf, "olmo2", intermediate_size=40, **SMALL, pad_token_id=1),
    "camembert": functools.partial(
        hf, "camembert", intermediate_size=40, is_decoder=True, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=32, **SMALL,
    ),
    "ctrl": functools.partial(
        hf, "ctrl", vocab_size=64, n_embd=16, dff=40, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
    ),
} | OWN  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("tp=2", "opt"),
        pytest.param("tp=2 pp=2 microbatch=4", "opt", marks=pytest.mark.nightly),
        pytest.param("tp=2", "olmo2", marks=pytest.mark.nightly),
        pytest.param("tp=2", "camembert", marks=pytest.mark.nightly),
        pytest.param("tp=2", "ctrl", marks=pytest.mark.nightly),
    ],
)
def test_a_family_without_a_plan_is_cut(layout: str, model: str) -> None:
    prove(layout, model)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("tp=2 pp=2 microbatch=4", "own shared"),
        ("tp=2 sequence_parallel", "own tied"),
        *(pytest.param("tp=2", model, marks=pytest.mark.nightly) for model in OWN),
    ],
)
def test_a_users_own_decoder_is_cut(layout: str, model: str) -> None:
    prove(layout, model)


def _styles(model: str) -> dict[str, str]:
    """Return the cut styles of the modules outside the blocks, and of those of the first block."""
    source = source_of(model, Layout("tp=2"), clipped())
    assert source.prepared is not None
    styles = source.prepared.analysis.cut_styles
    return {path.removeprefix("trunk.0."): style for path, style in styles.items() if not path.startswith("trunk.1.")}


ATTENTION = {"m.a": "column", "m.b": "column", "m.c": "column", "m.z": "row"}
MLP = {"n.r": "column", "n.s": "column", "n.t": "row"}
ENDS = {"tokens": "vocab", "out": "vocab"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("own shared", ATTENTION | MLP | ENDS),
        ("own written", ATTENTION | MLP | ENDS),
        ("own after", ATTENTION | MLP | ENDS),
        ("own scaling", ATTENTION | ENDS),
        ("own torch", MLP | ENDS),  # its weights are no linear layer's
        # They count features by the width of their input, of which a rank has more than of queries.
        ("own split", {"m.a": "gather", "m.z": "gather", "n.r": "column", "n.t": "row"} | ENDS),
        ("own interleaved", {"m.a": "gather", "m.z": "gather", "n.s": "column", "n.t": "row"} | ENDS),
        ("own tied", {"m.a": "gather", "m.z": "gather", "n.r": "column", "n.t": "row"} | ENDS),
    ],
)
def test_what_the_data_flow_cuts(model: str, expected: dict[str, str]) -> None:
    assert _styles(model) == expected


def test_a_part_that_the_proof_refuses_leaves_the_rest_cut() -> None:
    """The attention of OLMo 2 has norms over the features of all heads."""
    cut = {param.name for param in program_in("tp=2", "olmo2").step.model.params if param.cut is not None}
    assert "mlp" in {name.split(".")[3] for name in cut if ".layers." in name}


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("pp=2 microbatch=4", "camembert"),  # its head is registered before its embedding, whose weight it shares
        # The model's code writes into the output of its embedding.
        pytest.param("pp=2 microbatch=4", "ctrl", marks=pytest.mark.nightly),
    ],
)
def test_pipelines_of_found_families(layout: str, model: str) -> None:
    prove(layout, model)


def test_a_trace_leaves_no_hooks_that_the_model_installs_again() -> None:
    """Models that record the outputs of their modules install hooks in their first forward, and note that they have."""
    source = source_of("mixtral", Layout(), clipped())
    assert source.prepared is not None
    assert not any(part._forward_hooks for part in source.prepared.module.modules())
