"""The record of predictions: it reads any folder of measured rows, and says why it leaves one out."""

from __future__ import annotations

import csv
import json
import math
import random
import statistics
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.layout import Layout
from samestep.wings.plan.simulation import clock
from samestep.wings.plan.simulation.accuracy import intervals

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import composed  # noqa: E402
import forecast  # noqa: E402
import foresight  # noqa: E402
import foresight_fits  # noqa: E402
import foresight_parts  # noqa: E402
import foresight_tables  # noqa: E402
import published  # noqa: E402
import published_machines  # noqa: E402
import published_models  # noqa: E402
from foresight_workers import Workers  # noqa: E402

SAMPLE = BENCHMARKS / "rows"
TITLES = {"rows", "skipped", "mape", "median_ape", "bias", "p90", "tau", "regret"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of the sample, as record.json, and its intervals, as record.toml."""
    folder = tmp_path_factory.mktemp("record")
    files = ["--json", str(folder / "record.json"), "--record", str(folder / "record.toml")]
    assert foresight.main(["--rows", str(SAMPLE), "--quick", "--jobs", "1", *files]) == 0
    return folder


@pytest.fixture(scope="module")
def record(written: Path) -> dict:
    return json.loads((written / "record.json").read_text())


def test_the_sample_is_predicted(record: dict) -> None:
    total = record["total"]
    assert set(total) >= TITLES
    assert set(record["sources"]["sample"]) >= TITLES
    assert total["skipped"] == 0
    assert total["rows"] >= 28
    assert total["mape"] < 40
    assert record["memory"]["rows"] >= 5  # of one the micro-batch is not printed


def row(**cells: object) -> dict[str, str]:
    plain = {
        "model": "GPT", "n_layers": 4, "hidden": 256, "heads": 4, "seq_len": 128, "gpu": "A100", "n_gpus": 8,
        "precision": "BF16", "tp": 1, "pp": 1, "micro_batch": 1, "global_batch": 8, "recompute": "none",
        "metric_step_time_s": 0.1, "file": "own", "source": "own",
    }  # fmt: skip
    return {key: str(value) for key, value in {**plain, **cells}.items() if value is not None}


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "Abacus 9000"}, "no profile of Abacus 9000"),
        ({"model": "Stable Diffusion v2"}, "not a transformer"),
        ({"n_layers": None, "hidden": None}, "no sizes of the model"),
        ({"metric_step_time_s": ""}, "nothing was measured"),
        (
            {"metric_step_time_s": "", "metric_memory_gib": 20, "micro_batch": None, "global_batch": None},
            "its micro-batch is not printed",
        ),
        ({"notes": "model states; ANALYTIC, no activations"}, "it was calculated"),
        ({"source": "a paper (simulated)"}, "it was calculated"),
        ({"n_layers": None, "hidden": 3, "n_params": 7e9}, "no sizes of a model"),
        ({"model": "gpt_grpo_tp1_pp1"}, "a loop of reinforcement learning"),
        ({"global_batch": 3}, "3 samples for 8 data ranks"),
        ({"n_gpus": 0}, "n_gpus=0"),
        ({"n_gpus": -8}, "n_gpus=-8"),
        ({"gpu": ""}, "the device is not named"),
        ({"gpu": "n/a", "source": "NeMo"}, "the device is not named"),
        ({"precision": "int3"}, "precision=int3 is none of"),
        ({"precision": "banana"}, "precision=banana is none of"),
        ({"recompute": "banana"}, "recompute=banana is neither"),
        ({"n_layers": "eighty", "n_params": 7e9}, "n_layers=eighty is no number"),
        ({"micro_batch": "two"}, "micro_batch=two is no number"),
        ({"tp": 3}, "tp=3 pp=1 cp=1 does not divide 8 devices"),
        ({"cp": 1000}, "cp=1000 does not divide 8 devices"),
        ({"pp": 3}, "pp=3 cp=1 does not divide 8 devices"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide 4 heads"),
        ({"moe_experts": 4, "moe_topk": 5}, "moe_topk=5 is more than the 4 experts"),
    ],
)
def test_what_cannot_be_predicted_is_skipped_with_its_reason(cells: dict, reason: str) -> None:
    assert reason in foresight.predict(row(**cells)).reason


@pytest.mark.parametrize(("cells", "words"), [({"pp": 8}, "dp=2 pp=4"), ({"tp": 2, "pp": 8, "n_gpus": 4}, "tp=2 pp=2")])
def test_what_is_cut_too_often_has_fewer_stages(cells: dict, words: str) -> None:
    assert words in foresight.predict(row(**cells)).layout


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("heads", "n/a"), ("tp", "-"), ("micro_batch", "unknown"), ("n_gpus", "auto"), ("precision", "not stated"), ("recompute", "nan"),
        ("vocab", "n/a"),
    ],
)  # fmt: skip
def test_a_cell_that_says_nothing_is_as_good_as_empty(column: str, said: str) -> None:
    outcome = foresight.predict(row(**{column: said}))
    assert outcome.reason == ""
    assert outcome.predicted_s == foresight.predict(row(**{column: ""})).predicted_s


@pytest.mark.parametrize(
    ("source", "machine"),
    [("OneFlow LiBai benchmark", "v100x8"), ("Megatron-LM functional-test golden values", "a100-80x8")],
)
def test_sources_that_leave_out_their_device_are_known(source: str, machine: str) -> None:
    assert published.case_of(row(gpu="", source=source)).machine.name == machine


@pytest.mark.parametrize(
    "said",
    [
        "amp_bf16", "FP16 mixed + FP32 Adam (K=12)", "NVFP4 (bf16 tail)", "float8 tensorwise", "FP8-CS", "BF16/FP16",
        "bf16-mixed", "torch.bfloat16", "16", "MXFP8", "TF32", "int8", "half", "16-bit", "fp8_e4m3",
    ],
)  # fmt: skip
def test_a_precision_is_known_however_it_is_spelled(said: str) -> None:
    assert foresight.predict(row(precision=said, gpu="H100")).reason == ""


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("full uniform 1", "full"), ("True", "full"), ("activation checkpointing", "full"), ("no checkpointing", "none"),
        ("False", "none"),
        ("none (-r 0)", "none"), ("0", "none"), ("selective", "selective"), ("selective:mla_up_proj", "none"),
        ("selective [moe_act]", "none"), ("save_qkv_proj", "none"), ("unknown", ""), ("not set (recipe default)", ""),
    ],
)  # fmt: skip
def test_recompute_is_read_as_people_write_it(said: str, read: str) -> None:
    assert published.case_of(row(recompute=said)).recompute == read


def test_a_mixture_that_does_not_say_how_many_experts_a_token_has_is_like_others() -> None:
    silent, one, two = (foresight.predict(row(moe_experts=8, moe_topk=k)).predicted_s for k in (None, 1, 2))
    assert silent == two > one
    sizes = {"n_layers": 4, "hidden": 256, "moe_experts": 64, "gpu": "H100"}
    named, eight = (foresight.predict(row(model="Qwen3 30B A3B", **sizes, moe_topk=k)) for k in (None, 8))
    assert named.predicted_s == eight.predicted_s


def test_ranks_of_a_tensor_cut_share_out_experts_on_older_devices_too() -> None:
    cells = {"n_layers": 8, "hidden": 4096, "heads": 32, "seq_len": 2048, "tp": 8, "moe_topk": 1}
    dense, mixture = (foresight.predict(row(**cells, moe_experts=experts)) for experts in (None, 8))
    assert "sequence_parallel" in mixture.layout
    assert mixture.predicted_s < 3 * dense.predicted_s


MIXTURE = {
    "moe_experts": 4, "moe_topk": 2, "tp": 2, "ep": 2, "sequence_parallel": "true", "n_gpus": 4, "gpu": "H100"
}  # fmt: skip


@pytest.mark.parametrize(("parts", "held"), [(1, 4), (2, 2)])
def test_ranks_of_a_tensor_cut_have_experts_of_their_own_or_parts_of_them(parts: int, held: int) -> None:
    case = published.case_of(row(**MIXTURE, notes=f"--expert-tensor-parallel-size={parts}"))
    experts = next(param for param in case.model.params if param.experts)
    assert experts.cut is not None
    assert case.words["ep"] == 2
    assert experts.shape[1] == held * 4 * 256 // 2  # rows of a weight of two ranks: as many sets as it is in no parts
    block = next(layer for layer in case.model.layers if layer.dispatches)
    assert not experts.partial  # no expert's gradient is summed over the ranks of the cut
    layout = Layout(**case.words)
    (program,) = forecast.programs_for(case, "none")
    held_rows = {layer.dispatches[0].rows for layer in program.step.model.layers if layer.dispatches}
    assert block.dispatches[0].rows == 128 * 2
    assert held_rows == {128 * 2 // layout.tp}


def test_a_finetuning_recipe_keeps_what_fits() -> None:
    plain = {"source": "torchtune README", "gpu": "4090", "n_gpus": 1, "micro_batch": None, "global_batch": None}
    sizes = {"n_layers": 32, "hidden": 4096, "heads": 32, "metric_memory_gib": 16, "recompute": None, "seq_len": None}
    full, lora, qlora = (
        foresight.predict(row(**plain, **sizes, model=f"Llama 3.1 8B {kind}"))
        for kind in ("Full finetune", "LoRA", "QLoRA")
    )
    assert full.fits
    assert "recompute=full" in lora.layout
    assert qlora.predicted_bytes < lora.predicted_bytes - 8e9  # a quarter of the weights of the blocks


def test_memory_is_that_of_the_fullest_stage_though_it_is_an_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = published.case_of(row(pp=4, n_gpus=4, metric_memory_gib=10))
    programs = forecast.chosen_programs(case)
    monkeypatch.setattr(forecast, "_held", lambda _, program: (5, 7, 9, 6)[program.step.stage])
    assert forecast._peak(case, programs) == 9 + forecast.WORKSPACE_BYTES


@pytest.mark.parametrize(
    ("name", "model"), [("MaxText config README", "Llama2-70B"), ("Google tpu-recipes (MaxText)", "Llama3.1-8B")]
)
def test_a_printed_microbatch_that_fits_in_no_other_way_is_recomputed_on_tpus(name: str, model: str) -> None:
    """XLA's libraries are no Megatron-LM, which recomputes nothing from Hopper on: what a chip cannot hold was not held."""
    cells = {
        "model": model, "source": name, "url_or_repo_path": "training/README-MaxText.md", "gpu": "TPU v6e (Trillium)",
        "n_gpus": 256, "n_layers": None, "hidden": None, "heads": None, "seq_len": 8192, "global_batch": 768,
        "recompute": None,
    }  # fmt: skip
    assert "recompute=full" in forecast.predict(row(**cells, micro_batch=3)).layout
    assert "recompute" not in forecast.predict(row(**cells, micro_batch=None)).layout
    small = {"model": "GPT", "n_layers": 4, "hidden": 256, "heads": 4, "seq_len": 128}
    assert "recompute" not in forecast.predict(row(**{**cells, **small}, micro_batch=3)).layout


@pytest.mark.parametrize(
    "column", ["heads", "tp", "pp", "micro_batch", "global_batch", "recompute", "seq_len", "n_gpus"]
)
def test_a_missing_cell_has_a_default(column: str) -> None:
    outcome = foresight.predict(row(**{column: None}))
    assert outcome.reason == ""
    assert outcome.predicted_s > 0


def test_a_name_stands_for_sizes_and_numbers_are_read_as_people_write_them() -> None:
    case = published.case_of(row(model="LLAMA3_70B", n_layers=None, hidden=None, heads=None, gpu="H100"))
    assert sum(layer.is_block for layer in case.model.layers) == 80
    assert published.number({"x": "~250k"}, "x") == 250_000
    assert published.number({"x": "1.5e9"}, "x") == 1.5e9
    assert published.number({"x": "n/a"}, "x") is None
    assert published.number({"x": "1,024"}, "x") == 1024
    assert published.number({"x": "1,234,567.5"}, "x") == 1_234_567.5
    assert published.number({"x": "16,27"}, "x") == 16.27
    assert published.number({"x": "0,125"}, "x") == 0.125


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Meta-Llama-3.2-1B", "llama3.2-1b"),
        ("Llama 3.1 70B", "llama3-70b"),
        ("QWEN3_14B", "qwen3-14b"),
        ("Qwen3 30B a3B", "qwen3-30b-a3b"),
        ("Mistral 7B v0.1", "mistral-7b"),
        ("DeepSeek-V2-Lite", "deepseek-v2-lite"),
        ("Gemma 2 9B", "gemma2-9b"),
        ("GPT2-1B", None),
        ("CodeLlama 7B", None),
    ],
)
def test_a_preset_is_known_however_its_name_is_spelled(name: str, preset: str | None) -> None:
    assert published_models.preset_of(name) == preset


def test_more_ranks_than_samples_have_parts_of_sequences() -> None:
    case = published.case_of(row(global_batch=4, gpu="H100"))
    assert case.words["dp_replicate"] == 8
    assert case.model.sequence == 64


def test_what_the_notes_say_of_a_step_is_read() -> None:
    said = row(global_batch=None, micro_batch=None, notes="tokens per step 4096; something else")
    assert published.case_of(said).global_batch == 32
    assert published.case_of(row(global_batch=64, micro_batch=None, notes="GA=2; x")).words["microbatch"] == 4
    left = published.case_of(row(tp=None, pp=None, n_gpus=32, dp_replicate=2, global_batch=64)).words
    assert (left["tp"], left["pp"]) == (8, 2)


def test_software_makes_of_a_machine_what_it_could_do_at_the_time() -> None:
    megatron = {"source": "Megatron-LM", "recompute": None, "n_layers": 24, "hidden": 2048, "heads": 16}
    old, new = (published.case_of(row(gpu=gpu, **megatron)) for gpu in ("A100", "H100"))
    assert (old.machine.overlap, new.machine.overlap) == (False, True)
    assert (old.recompute, new.recompute) == ("full", "none")
    plain = published.case_of(row(gpu="H100")).machine
    assert (new.machine.attention_kernel, plain.attention_kernel) == ("cudnn", "sdpa")
    early = published.case_of(row(gpu="A100", source="MosaicML llm-foundry benchmarking README")).machine
    assert early.attention_kernel == "flash-1"
    graph = published.case_of(row(gpu="H100", notes="cuda_graph_impl=full_iteration")).machine
    assert graph.kernel_launch_s == pytest.approx(published_machines.GRAPH_LAUNCH_S)


def test_the_network_is_what_the_row_prints() -> None:
    text = "NVLink4 (8 GPU/node) + 4x Omni-Path 100Gb/s per node"
    machine = published.case_of(row(interconnect=text, gpus_per_node=8)).machine
    assert machine.inter.bytes_per_s == pytest.approx(0.95 * 50e9 / 8)


def test_a_folder_of_other_things_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit) as stopped:
        foresight.main(["--rows", str(tmp_path)])
    assert stopped.value.code == 2
    assert "has measured rows" in capsys.readouterr().err


def test_columns_may_be_missing_and_others_may_be_there(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "gpu", "n_gpus", "metric_tokens_per_s_per_gpu", "weather"])
        writer.writerow(["Llama 3 8B", "H100", "8", "9000", "fine"])
    assert foresight.main(["--rows", str(tmp_path), "--quick", "--json", str(tmp_path / "f.json")]) == 0
    assert json.loads((tmp_path / "f.json").read_text())["total"]["rows"] == 1


@pytest.mark.parametrize(("name", "delimiter"), [("few.csv", ";"), ("FEW.CSV", ","), ("few.tsv", "\t")])
def test_a_table_is_read_however_it_is_spelled(tmp_path: Path, name: str, delimiter: str) -> None:
    lines = [["\ufeffModel ", " GPU", "N_GPUs", "Metric_Step_Time_S"], ["Llama 3 8B", "H100", "8", '"9,5"']]
    (tmp_path / name).write_text("".join(delimiter.join(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "folder.csv").mkdir()
    rows, others = foresight.read_rows(tmp_path)
    assert others == []
    assert {key: rows[0][key] for key in ("model", "gpu", "n_gpus")} == {
        "model": "Llama 3 8B", "gpu": "H100", "n_gpus": "8"
    }  # fmt: skip
    assert foresight.predict(rows[0]).measured_s == 9.5


@pytest.mark.parametrize(
    ("option", "target"),
    [("--json", "nosuch/x"), ("--markdown", "folder"), ("--record", "file/x"), ("--outcomes", "nosuch/x")],
)
def test_what_cannot_be_written_is_said_before_the_work(
    option: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(foresight, "predict_all", lambda *_: pytest.fail("predicted before it was said"))
    with pytest.raises(SystemExit) as stopped:
        foresight.main(["--rows", str(SAMPLE), "--quick", option, str(tmp_path / target)])
    assert stopped.value.code == 2
    assert f"cannot write {tmp_path / target}" in capsys.readouterr().err


def test_predictions_carry_the_interval_of_the_record(written: Path) -> None:
    made, shipped = tomllib.loads((written / "record.toml").read_text())["all"], intervals("all")
    assert made.keys() == shipped.keys() == {"time", "memory"}
    assert all(0 < one["low"] < one["high"] and one["rows"] for one in made.values())
    assert shipped["time"].low < 1 < shipped["time"].high
    assert shipped["time"].of(2.0) == (2 * shipped["time"].low, 2 * shipped["time"].high)


def test_order_is_measured_by_pairs() -> None:
    assert foresight.kendall([(1, 1), (2, 2), (3, 3)]) == 1
    assert foresight.kendall([(1, 3), (2, 2), (3, 1)]) == -1
    assert foresight.kendall([(1, 1), (3, 2), (2, 3)]) == pytest.approx(1 / 3)
    assert foresight.kendall([(1, 1), (3, 2), (2, 2.05)], apart=0.03) == 1, "two that are alike tell nothing"


def test_pairs_in_the_wrong_order_are_listed() -> None:
    def outcome(layout: str, predicted_s: float, measured_s: float) -> forecast.Outcome:
        return forecast.Outcome(id="", source="", layout=layout, predicted_s=predicted_s, measured_s=measured_s)

    outcomes = [
        outcome("dp=4", 2.0, 1.0),
        outcome("tp=4", 1.0, 2.0),
        outcome("pp=4", 3.0, 4.0),
        outcome("dp=4", 2.0, 1.0),
    ]
    assert foresight.inverted(outcomes) == [{"faster": "dp=4", "slower": "tp=4", "measured": 2.0, "predicted": 0.5}]
    assert foresight.inverted(outcomes[:2]) == [], "a group has three layouts"


@pytest.mark.parametrize(("spread", "repeated", "groups"), [(0.0, 1.0, 1), (0.4, 1.0, 1), (5.0, 1.0, 0), (0.0, 5.0, 0)])
def test_pairs_within_the_spread_of_a_source_tell_nothing_of_the_order(
    spread: float, repeated: float, groups: int
) -> None:
    """Two layouts are in the wrong order, a third of a step apart; the third layout takes twice as long, and is met."""
    seconds = {"dp=4": (1.1, 1.0), "tp=4": (1.0, 1.33), "pp=4": (2.0, 2.0)}
    outcomes = [
        forecast.Outcome(id="", source="", layout=layout, predicted_s=first, measured_s=second, spread=spread)
        for layout, (first, second) in seconds.items()
    ]
    outcomes.append(replace(outcomes[0], measured_s=repeated))
    found = foresight.figures(outcomes)
    assert found["groups"] == 1
    assert found["groups_apart"] == groups
    assert found["tau_bound"] == (0 if not groups else 1 if spread == 0 else pytest.approx(2 / 3, abs=1e-3))
    assert found["tau_apart"] == (None if not groups else pytest.approx(1 / 3, abs=1e-3) if spread == 0 else 1.0)


@pytest.mark.parametrize(
    ("cells", "work"),
    [
        ({"model": "ResNet-50"}, "vision"),
        ({"model": "Llama 2 70B LoRA r16"}, "LoRA"),
        ({"model": "Llama 2 70B QLoRA r16"}, "QLoRA"),
        ({"model": "Llama 2 70B"}, ""),
    ],
)
def test_rows_are_told_apart_by_what_they_train(cells: dict[str, str], work: str) -> None:
    assert foresight_parts.work_of(row(**cells)) == work
    fitted = {"own": {"each": [("few", 4, work, 12.0), ("few", 4, "", 30.0)]}}
    assert foresight_parts.left_out_groups(fitted).get(work or "vision", []) == [("own", 12.0)] * bool(work)


def test_models_of_other_heads_and_layouts_that_are_not_known_are_in_no_group() -> None:
    plain, wide = (published.case_of(row(heads=heads)).group for heads in (16, 32))
    unknown = published.case_of(row(heads=16, id="x-1", notes="PRINTED LAYOUT INCONSISTENT (tp*pp*dp != GPUs)")).group
    assert len({plain, wide, unknown}) == 3


def rows_on_lines(off: float) -> list[dict[str, str]]:
    """Rows of several depths and batches, every second batch this part off what one batch and a rest add up to."""
    return [
        row(
            n_layers=layers,
            global_batch=8 * 2**power,
            metric_step_time_s=(0.1 * 2**power + 0.02) * (1 + power % 2 * off),
        )
        for layers in range(4, 16)
        for power in range(4)
    ]


@pytest.mark.parametrize(("off", "names"), [(1e-6, {"own"}), (3e-3, set())])
def test_times_that_a_simulator_summed_up_are_told_from_measured_ones(off: float, names: set[str]) -> None:
    assert composed.composed(rows_on_lines(off)) == names
    assert composed.composed(rows_on_lines(off)[:8]) == set(), "too few to say anything"


def test_rows_of_a_simulator_take_no_part_in_figures_of_measured_rows() -> None:
    rows = [*rows_on_lines(0), row(n_layers=6, file="real")]
    outcomes = foresight.predict_all(rows, Workers(rows))
    record = foresight.summary(rows, outcomes)
    assert record["composed"] == ["own"]
    assert record["total"] == record["sources"]["real"] == foresight.figures(outcomes[-1:])
    assert record["with_composed"]["total"] == foresight.figures(outcomes)
    assert record["agreement"] == {"own": foresight.figures(outcomes[:-1])}
    for counted in (record["sources"], record["own_factors"], record["coverage"]["time"]["sources"]):
        assert "own" not in counted
    assert sum(part["rows"] for name, part in record["parts"].items() if "devices" in name) == 1
    assert "rows = 1\n" in foresight.as_intervals(rows, outcomes)
    assert ".memory]" not in foresight.as_intervals(rows, outcomes).replace("[all.memory]", "")
    tables = foresight.tables_of(record)
    assert [line[0] for line in tables[0][1]] == ["real", "all"]
    assert [line[0] for line in tables[1][1]] == ["own"]
    assert tables[2][1][0] == ["rows", 1, len(rows)]
    few = foresight.summary(rows[:4], outcomes[:4])
    assert (few["composed"], len(foresight.tables_of(few))) == ([], 4)


def test_constants_are_fitted_to_other_sources(tmp_path: Path) -> None:
    rows, _ = foresight.read_rows(SAMPLE)
    few = ("MPT-760m", "MPT-13b", "LLAMA3_8B")  # of two sources, on eight devices, whose programs are short
    rows = [{**one, "file": one["source"]} for one in rows if one["model"] in few]
    found = foresight.cross_validate(rows, Workers(rows))[0]
    assert len(found) >= 2
    for figure in found.values():
        assert figure["rows"] > 0
        assert set(figure) >= set(foresight_fits.CONSTANTS)


def test_an_aim_is_reached_or_not(record: dict) -> None:
    """Each aim has its figure, of any source; a class of machines with too few rows has none."""
    each = [("few", 4, "", 10.0), ("nodes", 8, "LoRA", 30.0), ("nodes", 600, "", 13.0)]
    fitted = {
        "mlperf_6": {"each": each, "rows": 3, "mape": 15.5, "all_rows": 27, "all_mape": 14.5},
        "other": {"each": [("nodes", 64, "", 14.0)], "rows": 1, "mape": 14.0, "all_rows": 0, "all_mape": None},
    }
    kinds = {
        "all": {"time": {"rows": 500, "covered": 60.0, "covered_rows": 60.0}},
        "few": {"time": {"rows": 30, "covered": 80.0, "covered_rows": 90.6}},
        "nodes": {"time": {"rows": 29, "covered": 60.0, "covered_rows": 60.0}},
    }
    head, lines = foresight_tables.aims_table({**record, "cross_validated": fitted, "kinds": kinds, "seconds": 121})
    found = {line[0]: (line[2], line[3]) for line in lines}
    assert len(head) == len(lines[0])
    assert found["1 to 8 devices, mean error, %"] == (20.0, "no")
    assert found["LoRA, mean error, %"] == (30.0, "no")
    assert "vision, mean error, %" not in found
    assert found["MLPerf 6.0, 3 rows that take part, mean error, %"] == (15.5, "no")
    assert found["MLPerf 6.0, all 27 rows, mean error, %"] == (14.5, "yes")
    assert found["64 to 511 devices, mean error, %"] == (14.0, "no")
    assert found["512 devices and more, mean error, %"] == (13.0, "yes")
    assert found["parts of a node, time, covered by sources, %"] == (80.0, "yes")
    assert found["parts of a node, time, covered by rows, %"] == (90.6, "no")
    assert not any(name.startswith(("nodes", "all")) for name in found)
    assert found["this record, CPU seconds"] == (121, "yes")


def test_intervals_are_monitor_sources_that_had_no_part_in_them() -> None:
    alike = [(source, math.exp(step / 100)) for source in "abc" for step in range(-20, 21)]
    judged = foresight_parts.coverage(alike)
    assert judged["sources"].keys() == {"a", "b", "c"}
    assert 75 <= judged["mean"] <= 85
    odd = foresight_parts.coverage([*alike, *(("d", 2.0) for _ in range(10))])
    assert odd["sources"]["d"] == 0, "its own rows do not widen the interval that judges it"
    assert foresight_parts.coverage([("a", 1.0)])["sources"] == {}
    few = [("a", 1.0), ("d", 2.0)]
    assert foresight_parts.coverage(few, [*alike, *few])["sources"] == {"a": 100.0, "d": 0.0}


@pytest.mark.parametrize(
    ("sources", "draws", "between", "within", "far_out"),
    [(4, 400, 0.2, 0.05, 0.0), (4, 400, 0.1, 0.15, 0.1), (17, 30, 0.1, 0.15, 0.0), (17, 30, 0.2, 0.05, 0.1)],
)
def test_an_interval_covers_rows_of_a_new_source_however_few_there_are(
    sources: int, draws: int, between: float, within: float, far_out: float
) -> None:
    draw = random.Random(f"{sources} {between} {far_out}")
    covered = []
    for _ in range(draws):
        found = []
        for source in range(sources):
            middle = draw.gauss(0, between)
            offs = [
                draw.gauss(0, within) * (5 if draw.random() < far_out else 1) for _ in range(draw.choice((1, 5, 30)))
            ]
            found += [(str(source), math.exp(middle + off)) for off in offs]
        for left_out in map(str, range(sources)):
            low, high = foresight_parts.interval([ratio for ratio in found if ratio[0] != left_out])
            covered.append(
                100 * statistics.fmean(low <= value <= high for source, value in found if source == left_out)
            )
    assert 75 <= statistics.fmean(covered) <= 85


@pytest.mark.parametrize(("apart", "rows"), [(0.1, (5, 5, 5, 5)), (0.1, (2, 9, 30, 5)), (0.02, (9, 9, 9, 9, 9))])
def test_an_interval_has_the_part_that_covers_nearest_to_what_it_claims(apart: float, rows: tuple[int, ...]) -> None:
    found = [
        (str(source), math.exp(apart * (-1) ** source + 0.05 * math.sin(row)))
        for source, count in enumerate(rows)
        for row in range(count)
    ]

    def off(part: float) -> float:
        shares = []
        for source in range(len(rows)):
            low, high = foresight_parts.interval([ratio for ratio in found if ratio[0] != str(source)], part)
            shares.append(statistics.fmean(low <= value <= high for name, value in found if name == str(source)))
        by_rows = sum(share * count for share, count in zip(shares, rows, strict=True)) / sum(rows)
        return 100 * max(abs(share - 0.8) for share in (statistics.fmean(shares), by_rows))

    judged = foresight_parts.coverage(found)
    assert max(abs(judged[name] - 80) for name in ("mean", "rows")) == pytest.approx(off(judged["part"]), abs=0.01)
    assert off(judged["part"]) == pytest.approx(min(map(off, foresight_parts.PARTS)))
    assert len({off(part) for part in foresight_parts.PARTS}) > 1


def test_an_interval_counts_once_how_rows_of_a_source_differ() -> None:
    """Of many sources of two rows each that differ by chance alone, the interval is that of all rows."""
    draw = random.Random(1)
    found = [(str(source), math.exp(draw.gauss(0, 0.2))) for source in range(2000) for _ in range(2)]
    assert [math.log(end) / 0.2 for end in foresight_parts.interval(found)] == pytest.approx(
        [-1.2816, 1.2816], abs=0.06
    )


def test_an_interval_is_wider_where_sources_differ_or_are_few() -> None:
    def width(names: str, apart: float) -> float:
        rows = [
            (name, math.exp(apart * (-1) ** at + step / 10)) for at, name in enumerate(names) for step in (-1, 0, 1)
        ]
        low, high = foresight_parts.interval(rows)
        return math.log(high / low)

    assert width("abcd", 0) < width("abcd", 0.2) < width("abcd", 0.4)
    assert width("abcdefgh", 0.2) < width("abcd", 0.2) < width("ab", 0.2)
    assert foresight_parts.interval([("a", 0.5), ("a", 2.0)]) == pytest.approx((0.5, 2.0))
    assert foresight_parts.interval([("a", 2.0), ("b", 2.0)]) == pytest.approx((2.0, 2.0))


def test_points_of_students_distribution_are_those_of_tables() -> None:
    for freedom, value in ((1, 3.0777), (2, 1.8856), (3, 1.6377), (10, 1.3722), (1e4, 1.2816)):
        points = foresight_parts.student_points(freedom)
        assert sum(points < value) / len(points) == pytest.approx(0.9, abs=1 / len(points))


@pytest.mark.parametrize(
    "cells",
    [
        {"global_batch": 256},
        {"global_batch": 256, "pp": 4, "n_layers": 8, "zero_stage": 1},
        {"global_batch": 512, "pp": 2, "vp": 2, "n_layers": 8, "schedule": "interleaved"},
        {"global_batch": 512, "zero_stage": 3, "gpu": "H100"},
        {"global_batch": 640, "pp": 4, "n_layers": 8, "tp": 2, "gpu": "H100"},
    ],
)
def test_a_long_step_follows_from_two_short_ones(cells: dict) -> None:
    case = published.case_of(row(**cells))
    programs = forecast.chosen_programs(case)
    short = forecast.timed(case, programs)
    assert len(short.longer) == len(programs), "it is not played whole"
    whole_s = clock.play(programs, case.machine).step_s
    assert short.step_s(case.machine) == pytest.approx(whole_s, rel=1e-3)


def test_states_that_do_not_fit_are_updated_by_the_host() -> None:
    """Seventy billion weights with their states do not fit on a node: torchtune keeps them on the host, which updates them."""
    cells = {"model": "Llama 3.1 70B Full finetune", "source": "torchtune README", "global_batch": 16, "recompute": ""}
    case = published.case_of(row(**cells, n_layers=None, hidden=None, heads=None, seq_len=None, micro_batch=2))
    programs = forecast.chosen_programs(case)
    on_host = forecast.timed(case, programs)
    assert on_host.programs[0].step.layout.offload
    link_s = programs[0].step.model.num_params / 8 * 2 * 2 / case.machine.host_bytes_per_s
    assert on_host.step_s(case.machine) > clock.play(programs, case.machine).step_s + link_s


@pytest.mark.parametrize(("gpu", "bits"), [("H100-80GB (A3)", 100), ("H100 A3 Mega", 200), ("H100", None)])
def test_a_rented_machine_has_the_ports_that_its_cloud_documents(gpu: str, bits: int | None) -> None:
    shipped, mine = published_machines.SHIPPED, published.case_of(row(gpu=gpu, n_gpus=16, global_batch=16)).machine
    expected = shipped["h100x8"].inter.bytes_per_s if bits is None else 0.95 * bits * 1e9 / 8
    assert mine.inter.bytes_per_s == pytest.approx(expected)


def test_rows_are_counted_by_size_and_by_word_of_the_layout(record: dict) -> None:
    parts = record["parts"]
    sizes = [found["rows"] for name, found in parts.items() if "device" in name]
    assert sum(sizes) == record["total"]["rows"]
    assert any(name in parts for name in ("tp", "pp", "zero=1"))
