"""What published rows leave to a library's defaults: layers in 16 bits, micro-batches, batches in notes, recompute; and what steps share."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import forecast
import published
import published_machines
from foresight_workers import Workers

from samestep.program.ops import OpKind

PLAIN = {
    "model": "GPT", "n_layers": "8", "hidden": "1024", "heads": "8", "seq_len": "512", "vocab": "32768", "gpu": "B200", "n_gpus": "8",
    "precision": "BF16", "tp": "1", "pp": "1", "micro_batch": "1", "global_batch": "8", "recompute": "none",
    "metric_step_time_s": "0.1", "file": "own", "source": "own",
}  # fmt: skip


def dtypes(**cells: str) -> dict[int, str]:
    """The dtype of the forward of each layer that multiplies."""
    case = published.case_of({**PLAIN, **cells})
    (program,) = forecast.programs_for(case, "none")
    ops = [op for body in program.bodies.values() for op in body if op.kind is OpKind.FORWARD and op.flops]
    return {op.layer: op.dtype for op in ops if op.layer is not None}


@pytest.mark.parametrize("precision", ["FP8", "MXFP8", "NVFP4", "BF16+Float8 linears"])
def test_logits_are_made_in_16_bits_where_blocks_multiply_in_fewer(precision: str) -> None:
    found = dtypes(precision=precision)
    *blocks, head = (found[layer] for layer in sorted(found))
    assert set(blocks) == {"float4" if "4" in precision else "float8"}
    assert head == "bfloat16"


@pytest.mark.parametrize(("layers", "tail"), [(8, 2), (32, 5), (36, 6)])
def test_the_last_blocks_of_a_recipe_in_four_bits_may_stay_in_16(layers: int, tail: int) -> None:
    found = dtypes(precision="NVFP4 (bf16 tail)", n_layers=str(layers))
    assert [found[layer] for layer in sorted(found)] == ["float4"] * (layers - tail) + ["bfloat16"] * (tail + 1)


@pytest.mark.parametrize(("batch", "pp", "samples"), [(64, 4, 16), (64, 8, 8), (4, 8, 1)])
def test_torchtitan_makes_as_many_micro_batches_as_stages(batch: int, pp: int, samples: int) -> None:
    cells = {**PLAIN, "pp": str(pp), "n_gpus": str(pp), "global_batch": str(batch), "micro_batch": ""}
    case = published.case_of({**cells, "source": "torchtitan benchmarks 2024-12", "schedule": "1F1B"})
    assert case.words["microbatch"] == samples
    assert published.case_of(cells).words["microbatch"] == 1


def test_the_batch_of_a_data_rank_is_read_from_the_notes() -> None:
    cells = {**PLAIN, "global_batch": "", "tp": "2", "notes": "3.2 samples/s; batch per DP=48; parallelism printed"}
    assert published.case_of(cells).global_batch == 4 * 48


@pytest.mark.parametrize(("forwards", "recompute"), [(3, ""), (4, "full")])
def test_flops_of_four_forwards_say_that_the_backward_repeats_one(forwards: int, recompute: str) -> None:
    cells = {**PLAIN, "recompute": "", "metric_step_time_s": "", "metric_tokens_per_s_per_gpu": "1000"}
    model = published.case_of(cells).model
    a_token = sum(product.flops for layer in model.layers for product in layer.products) / 512
    said = {"metric_tflops_per_gpu": str(forwards * a_token * 1000 / 1e12)}
    assert published.case_of({**cells, **said}).recompute == recompute
    assert published.case_of({**cells, **said, "recompute": "selective"}).recompute == "selective"


@pytest.mark.parametrize(
    "change",
    [
        {"global_batch": "1024"},
        {"gpu": "H100", "precision": "FP8"},
        {"precision": "FP8"},
        {"n_gpus": "4"},
        {"recompute": "full"},
    ],
)
@pytest.mark.parametrize("cells", [{"global_batch": "512"}, {"global_batch": "512", "pp": "2", "n_gpus": "16"}, {}])
def test_steps_that_share_what_is_written_take_as_long_as_alone(
    cells: dict, change: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**PLAIN, **cells}, {**PLAIN, **cells, **change}]
    shared = [forecast.predict(row).predicted_s for row in rows]
    alone = []
    for row in rows:
        for kept in ("_KNOWN", "_WHOLE", "_SHORTER", "_BUILDERS"):
            monkeypatch.setattr(forecast, kept, {})
        alone.append(forecast.predict(row).predicted_s)
    assert shared == alone
    assert shared[0] != shared[1]


def test_several_processes_find_what_one_finds() -> None:
    rows = [
        {**PLAIN, "file": name, "hidden": str(128 * (1 + at % 3)), "heads": "1"} for at in range(40) for name in "abc"
    ]
    asked = [(name, ([row for row in rows if row["file"] == name][:3],)) for name in "cab"]
    with Workers(rows, 2) as several:
        assert several.each(_seconds, asked) == Workers(rows).each(_seconds, asked)


def _seconds(rows: list[dict[str, str]]) -> list[float]:
    return [forecast.predict(row).predicted_s for row in rows]


TESTED = {**PLAIN, "gpu": "A100", "notes": "correctness test, deterministic kernels"}
MEASURED = {"metric_memory_gib": "10"}
EXPERTS = {"moe_experts": "8", "moe_topk": "2", "ep": "2"}


def block_kernels(notes: str = "", **cells: str) -> int:
    """Operations of the forward of a block of a functional test."""
    case = published.case_of({**TESTED, **cells, "notes": f"{TESTED['notes']}; {notes}"})
    return case.model.layers[1].moved.kernels


def test_a_functional_test_starts_what_it_logs_and_adds_up() -> None:
    row = {**TESTED, "model": "GPT_release"}
    plain, tested = published.case_of({**row, "notes": ""}), published.case_of(row)
    logged_s = published.LOGGED * len(plain.model.params) * plain.machine.kernel_launch_s
    assert tested.machine.host_step_s == pytest.approx(plain.machine.host_step_s + logged_s)
    assert tested.model.layers[1].moved.kernels > plain.model.layers[1].moved.kernels
    assert tested.model.layers[0] == plain.model.layers[0]
    assert not tested.deterministic
    assert published.case_of({**TESTED, "notes": "--deterministic-mode=true"}).deterministic


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"notes": "--moe-grouped-gemm=true", **EXPERTS}, EXPERTS),
        (EXPERTS, {**EXPERTS, "moe_experts": "16"}),
        ({}, {"cp": "2"}),
        ({"cp": "2"}, {"cp": "4"}),
    ],
    ids=["experts one by one", "more of them", "a ring", "a longer one"],
)
def test_what_a_functional_test_says_of_its_modules_is_started(less: dict[str, str], more: dict[str, str]) -> None:
    assert block_kernels(**less) < block_kernels(**more)


def test_modules_of_an_engine_start_more_and_an_attention_that_is_written_starts_what_it_is() -> None:
    engine, local, written = (
        block_kernels(f"--attention-backend={backend} --transformer-impl={code}")
        for backend, code in (("flash", "transformer_engine"), ("auto", "local"), ("unfused", "transformer_engine"))
    )
    assert local < written
    assert written - engine == round(published_machines.WRITTEN_STARTS - published_machines.ENGINE_STARTS)


@pytest.mark.parametrize("code", ["flash", "unfused"])
def test_a_functional_test_has_dropout_unless_it_is_a_release(code: str) -> None:
    peaks = []
    for name in ("gpt/small", "gpt/small_release"):
        notes = f"correctness test; --attention-backend={code}; --swiglu=true"
        peaks.append(forecast.predict({**TESTED, "model": name, "notes": notes, **MEASURED}).predicted_bytes)
    assert peaks[0] > peaks[1] > 0


@pytest.mark.parametrize(("cells", "splits"), [({}, False), ({"sequence_parallel": "true"}, True), (EXPERTS, True)])
def test_a_functional_test_splits_no_sequences_unless_its_arguments_do(cells: dict[str, str], splits: bool) -> None:
    row = {**TESTED, "gpu": "H100", "tp": "2", **cells}
    assert bool(published.case_of(row).words.get("sequence_parallel")) == splits
    assert published.case_of({**row, "notes": ""}).words["sequence_parallel"]


def test_names_of_functional_tests_are_of_one_model_whatever_their_degrees_are() -> None:
    names = ("gpt3_mcore_te_tp1_pp4_vp1_swiglu", "gpt3_mcore_te_tp2_pp2_cp2_swiglu", "gpt3_mcore_te_tp2_pp2")
    first, second, other = (published.case_of({**TESTED, "model": name}).group for name in names)
    assert first == second != other
    assert len({published.case_of({**TESTED, "model": name, "notes": ""}).group for name in names}) == 3


@pytest.mark.parametrize("vocab", ["32768", "65536"])
def test_a_loss_of_compiled_parts_holds_one_copy_of_the_logits_more(vocab: str) -> None:
    apart, fused = (
        forecast.predict({**TESTED, **MEASURED, "vocab": vocab, "notes": f"correctness test; {flag}"}).predicted_bytes
        for flag in ("", "--cross-entropy-loss-fusion=true")
    )
    assert fused - apart == pytest.approx(4 * int(vocab) * int(PLAIN["seq_len"]), rel=0.01)


IMAGES = {
    "model": "ResNet-50", "gpu": "A100", "n_gpus": "1", "precision": "FP16 AMP", "micro_batch": "64", "global_batch": "64",
    "metric_step_time_s": "0.1", "file": "own", "source": "own",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "is_first"),
    [({}, True), ({"notes": "channels_last"}, False), ({"notes": "NHWC"}, False), ({"source": "MLPerf Training v3.1"}, False)],
)  # fmt: skip
def test_images_have_their_channels_first_unless_a_row_says_otherwise(cells: dict[str, str], is_first: bool) -> None:
    case = published.case_of({**IMAGES, **cells})
    kinds = {p.channels_first for layer in case.model.layers if layer.is_block for p in layer.products}
    assert kinds == {is_first}
    assert case.recompute == "none"


@pytest.mark.parametrize(("gpu", "products"), [("A100", "tfloat32"), ("H100", "tfloat32"), ("V100", "")])
def test_convolutions_in_float32_run_in_tf32_where_a_device_has_it(gpu: str, products: str) -> None:
    assert published.case_of({**IMAGES, "gpu": gpu, "precision": "FP32"}).products == products


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("PCIe 4 x16 each", 1),
        ("PCIe 4.0 x8, P2P disabled", 2),
        ("PCIe 3.0", 2),
        ("PCIe 3.0 x8", 4),
        ("PCIe x4", 4),
        ("older motherboard with slow lanes", 4),
        ("", 1),
    ],
)
def test_a_slot_of_fewer_lanes_or_an_older_one_is_as_much_slower(text: str, part: int) -> None:
    link = published.case_of({**PLAIN, "gpu": "RTX 3090", "interconnect": text}).machine.intra
    assert link.bytes_per_s == published.case_of({**PLAIN, "gpu": "RTX 3090"}).machine.intra.bytes_per_s / part


@pytest.mark.parametrize("samples", [8, 16, 32])
def test_a_run_that_took_place_is_taken_to_need_no_recompute_up_to_the_error_of_memory(samples: int) -> None:
    """What is predicted to need a little more than the device has is not said to have repeated its forwards."""
    cells = {**PLAIN, "n_gpus": "1", "recompute": "", "micro_batch": str(samples), "global_batch": str(samples)}
    case = published.case_of(cells)
    needed = forecast._peak(case, forecast.programs_for(case, "none"))
    for room, recompute in ((needed, "none"), (round(0.96 * needed), "none"), (round(0.9 * needed), "selective")):
        machine = replace(case.machine, memory_bytes=room + case.machine.reserved_bytes)
        (program,) = forecast.chosen_programs(replace(case, machine=machine))
        assert program.step.layout.recompute == recompute
