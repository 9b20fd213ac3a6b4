"""What loops do that tables leave out, by rules of all rows of a kind: cells that a row has stay; and to how many nodes a token's row goes."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import forecast
import foresight
import published
from published_cards import CARDS, Card
from published_experts import nodes_of_a_token
from published_loops import adapters_of, with_configuration
from published_vision import vision_model

from samestep.program.ops import OpKind

OF_AUTOMODEL = {
    "source": "NVIDIA NeMo AutoModel performance summary", "gpu": "H100", "gpus_per_node": "8", "seq_len": "4096", "precision": "BF16",
    "tp": "1", "pp": "1", "micro_batch": "1", "metric_step_time_s": "1", "notes": "kernels=TE + DeepEP",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("config_GB300_18x4x1xtp1pp1cp8.sh", {"tp": "1", "pp": "1", "cp": "8"}),
        ("config_GB300_128x4x120xtp1pp4ep32cp1_mxfp8_full_cg.sh", {"pp": "4", "ep": "32", "precision": "MXFP8"}),
        ("DGXB300_64x8x56xtp2pp8cp2_cg_fp4", {"tp": "2", "pp": "8", "cp": "2", "precision": "NVFP4"}),
        ("x3xtp1pp1cp1ep1 or ep2, mxfp8", {"ep": "1", "precision": "MXFP8"}),
        ("no name", {"tp": "", "precision": "NVFP4"}),
    ],
)
def test_a_name_of_a_configuration_fills_the_cells_that_a_row_leaves_empty(name: str, cells: dict[str, str]) -> None:
    row = {
        "source": "MLPerf Training v6.0 result logs",
        "gpu": "GB300",
        "notes": f"the submission's config name {name}",
    }
    found = with_configuration(row)
    assert {key: found.get(key, "") for key in cells} == cells
    said = dict.fromkeys(cells, "7")
    assert {key: with_configuration({**row, **said})[key] for key in cells} == said
    assert with_configuration({**row, "source": "own"}).get("precision", "") == ""


@pytest.mark.parametrize(
    ("model", "targets", "rank"),
    [
        ("Llama-2-7B QLoRA r64 (all linear)", ("all-linear",), 64),
        ("Mistral-7B LoRA r16 (q,k,v,o)", ("q_proj", "k_proj", "v_proj", "o_proj"), 16),
        ("Llama-2-7B LoRA r8 (q,v)", ("q_proj", "v_proj"), 8),
        ("Llama 2 70B LoRA r16", (), 16),
    ],
)
def test_adapters_are_those_that_a_name_says(model: str, targets: tuple[str, ...], rank: int) -> None:
    assert adapters_of({"model": model}) == (targets, rank)
    assert adapters_of({"model": "Llama 2 70B"}) is None


LOOP = {
    "source": "a loop around Hugging Face's Trainer", "model": "Mistral-7B full fine-tuning", "gpu": "A100-80GB", "n_gpus": "1",
    "precision": "BF16", "tp": "1", "pp": "1", "micro_batch": "1", "global_batch": "1", "seq_len": "512", "recompute": "full",
    "metric_step_time_s": "1", "metric_memory_gib": "50", "file": "own", "notes": "torch_dtype bfloat16",
}  # fmt: skip


def peak_of(**cells: str) -> float:
    return foresight.predict({**LOOP, **cells}).predicted_bytes / 2**30


def test_an_update_of_lists_holds_one_copy_of_all_weights_more() -> None:
    """In 16 bits weights, gradients, two states and the square roots of one: five times 13.5 GiB of Mistral's weights."""
    assert peak_of() == pytest.approx(5 * 13.49, rel=0.01)
    assert peak_of(n_gpus="2", dp_shard="2", zero_stage="3", global_batch="2") == pytest.approx(5 * 13.49 / 2, rel=0.01)
    mixed = {
        "precision": "BF16 mixed precision",
        "n_gpus": "2",
        "dp_shard": "2",
        "zero_stage": "3",
        "global_batch": "2",
    }
    assert peak_of(**mixed) == pytest.approx(5 * 13.49, rel=0.01)
    assert peak_of(notes="torch_dtype bfloat16; 8-bit AdamW") <= peak_of() - 13


@pytest.mark.parametrize("notes", ["unsloth", "Liger fused linear cross entropy", "fused kernels (foak)"])
def test_fused_kernels_are_faster_than_modules(notes: str) -> None:
    wide = LOOP["notes"]
    fused, plain = (foresight.predict({**LOOP, "notes": said}).predicted_s for said in (f"{wide}; {notes}", wide))
    assert fused < plain


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.pattern)
def test_a_card_is_met_by_its_own_names_alone(card: Card) -> None:
    name = card.pattern.partition("|")[0].replace(" ?", " ")
    if "(" not in name:
        machine = published.case_of(
            {**LOOP, "gpu": f"RTX {name}" if name[0].isdigit() else name, "model": "GPT 125M"}
        ).machine
        assert machine.num_units == card.units
        assert machine.flops_per_s["float16"] == card.sixteen * 1e12


@pytest.mark.parametrize("notes", ["rollouts and updates", "generation is included", "includes generation"])
def test_steps_that_generate_are_refused(notes: str) -> None:
    assert "generates" in foresight.predict({**LOOP, "notes": notes}).reason


@pytest.mark.parametrize(
    ("network", "times"), [("resnet50", 1.0), ("resnet101", 1.9), ("resnet152", 2.8), ("vgg16", 3.8)]
)
def test_networks_of_convolutions_have_the_flops_that_are_published(network: str, times: float) -> None:
    """ResNet-50 has 4.1 billion multiplications and sums, the others 7.8, 11.5 and 15.5 billion (torchvision)."""
    assert vision_model(network).forward_flops == pytest.approx(2 * 4.1e9 * times, rel=0.03)


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


@pytest.mark.parametrize(("said", "spared"), [("hybridep", 8), ("deepep", 4), ("alltoall", 0)])
def test_dispatchers_spare_copies_of_rows_and_send_a_token_to_a_rank_once(said: str, spared: int) -> None:
    row = {**EXPERTS, "source": "Megatron-LM", "n_gpus": "8", "ep": "8", "dp_shard": "8", "global_batch": "8"}
    cases = [published.case_of({**row, "notes": f"dispatcher {name}"}) for name in (said, "alltoall")]
    layers = [next(layer for layer in case.model.layers if layer.dispatches) for case in cases]
    rows = sum(dealing.rows * dealing.width for dealing in layers[1].dispatches)
    assert layers[1].moved.elements - layers[0].moved.elements == spared * rows
    assert cases[0].sent_rows == pytest.approx(nodes_of_a_token(8, 8, 8, 4) / 8 if spared else 1.0)


GRAPH, BESIDE = "cuda_graph_impl=full_iteration", "moe_a2a_overlap=True"


@pytest.mark.parametrize(
    ("source", "notes", "hides"),
    [
        ("Megatron-Bridge", f"{GRAPH}; {BESIDE}", True),
        ("Megatron-Bridge", f"cuda_graph_impl=transformer_engine; cuda_graph_scope=['attn']; {BESIDE}", True),
        ("Megatron-Bridge", BESIDE, False),  # the host starts all of it
        ("Megatron-Bridge", GRAPH, False),
        ("MLPerf Training v6.0", "full-iteration CUDA graph", True),
        ("MLPerf Training v5.0", "full-iteration CUDA graph", False),
    ],
)
def test_exchanges_hide_behind_another_microbatch_if_a_graph_starts_both(source: str, notes: str, hides: bool) -> None:
    row = {**EXPERTS, "source": source, "global_batch": "256", "notes": notes}
    case = published.case_of(row)
    assert case.hides_exchanges is hides
    assert not published.case_of({**row, "model": "Llama 3 8B", "ep": "", "notes": notes}).hides_exchanges
    if hides:
        seconds = [forecast.known(replace(case, hides_exchanges=one))[1].step_s(case.machine) for one in (True, False)]
        assert 0.5 * seconds[1] < seconds[0] < 0.99 * seconds[1]


def test_one_microbatch_has_no_other_one_to_hide_exchanges_behind() -> None:
    row = {**EXPERTS, "source": "Megatron-Bridge", "notes": f"{GRAPH}; {BESIDE}"}
    case = published.case_of(row)
    (program,) = forecast.programs_for(case, "none")
    exchanges = [op for ops in program.bodies.values() for op in ops if op.kind is OpKind.ALL_TO_ALL]
    assert case.hides_exchanges
    assert exchanges
    assert all(op.is_exposed for op in exchanges)


@pytest.mark.parametrize(
    ("tp", "notes", "waits"), [("2", "FULL_CUDA_GRAPH=1", True), ("1", "FULL_CUDA_GRAPH=1", False), ("2", "", False)]
)
def test_sums_of_gradients_hide_unless_one_graph_has_a_tensor_cut_too(tp: str, notes: str, waits: bool) -> None:
    row = {
        **OF_AUTOMODEL, "source": "Megatron-LM", "model": "GPT", "n_layers": "4", "hidden": "1024", "heads": "8", "n_gpus": "8",
        "tp": tp, "zero_stage": "1", "recompute": "none", "global_batch": "8", "notes": notes,
    }  # fmt: skip
    case = published.case_of(row)
    (program,) = forecast.programs_for(case, "none")
    sums = {OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE}
    ops = [op for body in program.bodies.values() for op in body if op.axis == "dp_shard"]
    assert {op.is_exposed for op in ops if op.kind in sums} == {waits}
    assert not any(op.is_exposed for op in ops if op.kind is OpKind.ALL_GATHER)
    seconds = [forecast.known(replace(case, waits_for_sums=one))[1].step_s(case.machine) for one in (True, False)]
    assert seconds[0] > seconds[1]


def test_what_has_no_optimizer_step_takes_no_time_for_an_update_or_a_loop() -> None:
    whole, part = (foresight.predict({**LOOP, "notes": said}).predicted_s for said in ("", "no optimizer step"))
    update_s = 7.24e9 * (7 * 4 + 2) / 1.9e12  # of Mistral's weights
    assert whole - part == pytest.approx(update_s, rel=0.2)


@pytest.mark.parametrize("microbatch", ["1", "4"])
def test_deepspeed_adds_gradients_in_sixteen_bits_apart_for_each_microbatch(microbatch: str) -> None:
    row = {
        **LOOP, "model": "GPT", "source": "own", "n_layers": "4", "hidden": "2048", "heads": "16", "seq_len": "2048", "micro_batch": microbatch,
        "global_batch": "8", "zero_stage": "1", "notes": "",
    }  # fmt: skip
    alike, apart = (foresight.predict({**row, "schedule": said}).predicted_s for said in ("", "DeepSpeed"))
    moved_s = 4 * 12 * 2048**2 * forecast.ADDED_APART_BYTES / 1.7e12
    assert apart - alike == pytest.approx(8 / int(microbatch) * moved_s, rel=0.5)


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


ENTRY = {
    "source": "MLPerf Training v6.0 result logs", "model": "Llama 3.1 405B", "gpu": "GB300", "n_gpus": "2048", "gpus_per_node": "4",
    "tp": "2", "pp": "8", "cp": "2", "global_batch": "1024", "seq_len": "8192", "metric_step_time_s": "3", "file": "own",
}  # fmt: skip


@pytest.mark.parametrize(("cells", "stages"), [({}, 8), ({"vp": "4"}, 4), ({"pp": "4"}, 16), ({"source": "own"}, None)])
def test_late_entries_interleave_two_blocks_each_if_they_do_not_say(cells: dict[str, str], stages: int | None) -> None:
    assert published.case_of({**ENTRY, **cells}).words.get("virtual_stages") == stages


@pytest.mark.parametrize(
    ("cells", "is_narrow"),
    [({}, True), ({"source": "own"}, False), ({"gpu": "A100-80GB", "gpus_per_node": "8"}, False)],
)
def test_recipes_reduce_gradients_in_the_dtype_of_weights(cells: dict[str, str], is_narrow: bool) -> None:
    assert published.case_of({**ENTRY, **cells}).reduces_narrow == is_narrow


@pytest.mark.parametrize("source", ["torchtune README", "torchao quantized training README", "own"])
def test_blocks_that_are_not_compiled_run_as_they_are_written(source: str) -> None:
    row = {**LOOP, "source": source, "model": "Llama-2-7B full fine-tuning", "notes": ""}
    eager, graph = (forecast.predict({**row, "compile": word}).predicted_s for word in ("False", "True"))
    assert eager > 1.02 * graph


@pytest.mark.parametrize(
    ("precision", "products"), [("INT8 weights", ""), ("INT8 products, BF16 else", "float8"), ("FP8", "float8")]
)
def test_weights_alone_in_eight_bits_leave_products_in_sixteen(precision: str, products: str) -> None:
    assert published.case_of({**LOOP, "gpu": "RTX 4090", "precision": precision}).products == products
