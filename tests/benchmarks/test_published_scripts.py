"""What scripts say that tables leave out: cells that a row has stay; and to how many nodes a token's row goes."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import forecast
import published
from published_experts import nodes_of_a_token
from published_scripts import with_script

from samestep.program.ops import OpKind

OF_AUTOMODEL = {
    "source": "NVIDIA NeMo AutoModel performance summary", "gpu": "H100", "gpus_per_node": "8", "seq_len": "4096", "precision": "BF16",
    "tp": "1", "pp": "1", "micro_batch": "1", "metric_step_time_s": "1", "notes": "kernels=TE + DeepEP",
}  # fmt: skip
ROWS = {
    "llmq": {"source": "LLMQ (RTX 5060 Ti)", "gpu": "RTX 5060 Ti 16GB"},
    "automodel": OF_AUTOMODEL,
    "modelzoo": {
        "source": "Megatron-MoE-ModelZoo Qwen3", "gpu": "GB300", "precision": "MXFP8", "model": "Qwen3-235B-A22B",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("of", "cells", "said"),
    [
        ("llmq", {"model": "Qwen2.5 0.5B", "precision": "BF16"}, {"micro_batch": "10", "global_batch": "510"}),
        ("llmq", {"model": "Qwen2.5 0.5B", "precision": "FP8"}, {"micro_batch": "12", "recompute": "none"}),
        ("llmq", {"model": "Qwen2.5 1.5B", "precision": "FP8"}, {"global_batch": "512", "recompute": "full"}),
        ("llmq", {"model": "Qwen2.5 3B", "precision": "BF16"}, {"micro_batch": "16"}),
        ("llmq", {"model": "Qwen2.5 7B", "precision": "BF16"}, {"micro_batch": "32"}),
        ("automodel", {"model": "DeepSeek V3 671B"}, {"recompute": "full"}),
        ("automodel", {"model": "GPT-OSS 20B"}, {"recompute": "none"}),
        ("automodel", {"model": "Qwen2.5 32B"}, {"recompute": "full", "sequence_parallel": "False"}),
        ("automodel", {"model": "Llama3 70B 2-node"}, {"sequence_parallel": "True", "compile": "True"}),
    ],
)
def test_a_script_fills_the_cells_that_a_row_leaves_empty(of: str, cells: dict[str, str], said: dict[str, str]) -> None:
    row = {**ROWS[of], **cells}
    found = with_script(row)
    assert {name: found[name] for name in said} == said
    for name, value in said.items():
        assert with_script({**row, name: f"{value} x"})[name] == f"{value} x"
    assert all(found[name] == value for name, value in row.items() if name != "notes")


@pytest.mark.parametrize(
    "change", [{"gpu": "GB200"}, {"precision": "BF16"}, {"model": "Qwen3-30B-A3B"}, {"source": ""}]
)
def test_a_script_is_of_its_own_rows_alone(change: dict[str, str]) -> None:
    assert "cuda_graph" in with_script(ROWS["modelzoo"])["notes"]
    assert with_script({**ROWS["modelzoo"], **change}) == {**ROWS["modelzoo"], **change}


@given(st.integers(1, 8), st.integers(1, 16))
def test_choices_among_all_experts_meet_nodes_as_drawn_balls_do(choices: int, nodes: int) -> None:
    assert nodes_of_a_token(choices, nodes) == pytest.approx(nodes * (1 - (1 - 1 / nodes) ** choices))
    assert nodes_of_a_token(choices, nodes, nodes, nodes) == pytest.approx(nodes_of_a_token(choices, nodes))


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("groups", "chosen"), [(4, 2), (8, 4), (8, 1)])
@pytest.mark.parametrize("choices", [1, 2, 3])
def test_choices_among_few_groups_meet_the_nodes_that_all_cases_count(
    choices: int, nodes: int, groups: int, chosen: int
) -> None:
    """Every choice of groups, and of parts of them, counted one by one."""
    parts = max(nodes, groups)
    each = parts // groups
    counts = []
    for few in itertools.combinations(range(groups), chosen):
        places = [group * each + part for group in few for part in range(each)]
        counts += [
            len({place * nodes // parts for place in drawn}) for drawn in itertools.product(places, repeat=choices)
        ]
    expected = math.fsum(counts) / len(counts)
    found = nodes_of_a_token(choices, nodes, groups, chosen)
    assert found == pytest.approx(expected)
    assert found <= min(nodes, choices) + 1e-9
    assert found <= nodes_of_a_token(choices, nodes) + 1e-9


EXPERTS = {
    **OF_AUTOMODEL,
    "model": "DeepSeek V3 671B",
    "n_gpus": "64",
    "ep": "64",
    "dp_shard": "64",
    "global_batch": "64",
}


def test_a_token_of_a_benchmark_in_turn_goes_to_one_node() -> None:
    """Eight experts that follow each other are on one of eight nodes, which have 32 each; drawn ones are on more, and of four groups on fewer."""
    turned = published.case_of(EXPERTS).sent_rows
    grouped = published.case_of({**EXPERTS, "source": "own, type=flex"}).sent_rows
    drawn = published.case_of({**EXPERTS, "source": "own, type=flex", "model": "Kimi-K2"}).sent_rows
    assert turned == 1 / 8 < grouped < drawn < 1
    assert grouped == pytest.approx(nodes_of_a_token(8, 8, 8, 4) / 8)


@pytest.mark.parametrize("sequence", ["True", "False"])
@pytest.mark.parametrize(
    ("source", "sums"), [("Megatron-LM", 2), ("MosaicML llm-foundry", 1), ("NVIDIA NeMo AutoModel", 1)]
)
def test_checkpoints_that_run_a_forward_to_its_end_sum_as_often_again(source: str, sums: int, sequence: str) -> None:
    """Of the two sums over tp of each block's forward, the repeated one has both, or ends before the last."""
    row = {
        **OF_AUTOMODEL, "source": source, "model": "GPT", "n_layers": "4", "hidden": "1024", "heads": "8", "tp": "4", "n_gpus": "4",
        "recompute": "full", "global_batch": "1", "sequence_parallel": sequence,
    }  # fmt: skip
    (program,) = forecast.programs_for(published.case_of(row), "full")
    kinds = (OpKind.REDUCE_SCATTER,) if sequence == "True" else (OpKind.ALL_REDUCE,)
    repeated = [
        op
        for body in program.bodies.values()
        for op in body
        if op.axis == "tp" and op.kind in kinds and any("recompute" in name for name in op.after)
    ]
    backwards = sum(op.kind is OpKind.RECOMPUTE for body in program.bodies.values() for op in body)
    assert len(repeated) == sums * backwards > 0


def test_adapters_are_on_the_layers_that_a_source_names() -> None:
    """AutoModel's recipes adapt all linear layers of a block, Megatron-LM's those of attention; all other weights are frozen."""
    row = {
        **OF_AUTOMODEL,
        "model": "Llama3 8B",
        "n_gpus": "8",
        "dp_shard": "8",
        "global_batch": "8",
        "notes": "task=lora",
    }
    every, few = (published.case_of({**row, "source": source}).model for source in (row["source"], "Megatron-LM"))
    trained, fewer = ([one.name for one in model.params if one.trainable] for model in (every, few))
    assert len(trained) == 2 * 7 * 32 > len(fewer) > 0
    assert any("mlp.down_proj" in name for name in trained)
    assert not any("mlp" in name for name in fewer)
