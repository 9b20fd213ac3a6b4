"""The verb `plan` as somebody types it: its table, its JSON, its mistakes; and it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep import Job, Layout, hardware
from samestep.models import presets
from samestep.output.text import digits, duration
from samestep.wings.pages import prediction_page
from samestep.wings.plan import other_numerics, search
from samestep.wings.plan.simulation import accuracy, simulate
from samestep.wings.plan.simulation.accuracy import class_of, describe_accuracy, intervals
from samestep.wings.plan.simulation.simulate import predict
from tests import small

GPT2 = ("--set", "model.source=preset:gpt2", "--set", "train.global_batch=8")
A100 = ("--hardware", "a100-80x8", "--set", "numerics.precision=bf16")


def test_the_table_and_the_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert small.main("plan", *GPT2, *A100, "--devices", 2, "--top", 2, "--json", file, "--days-for-tokens", "1B") == 0
    said = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["devices"] == 2
    assert record["hardware"] == "a100-80x8"
    assert len(record["best"]) == 2
    assert record["best"][0]["step_s"] <= record["best"][1]["step_s"]
    first = record["best"][0]
    assert said.splitlines()[2].endswith(" " + first["layout"])
    assert f"{first['step_s']:.4g}" in said.splitlines()[2]
    counts, reasons = record["rejections"]["counts"], record["rejections"]["reasons"]
    assert record["considered"] == len(record["best"]) + sum(counts.values()) > len(reasons)
    assert all(one["layout"] and one["rule"] and one["reason"] for one in reasons)
    for rule, number in counts.items():
        assert sum(one["count"] for one in reasons if one["rule"] == rule) == number
    assert len(reasons) < 50
    assert first["step_s_interval"] == pytest.approx(intervals("few")["time"].of(first["step_s"]))
    assert f"times the predicted time, and 80% of {intervals('few')['memory'].rows:,} runs" in said
    hours = 1e9 / (first["tokens_per_s_per_device"] * 2) / 3600
    assert f"1 billion tokens in {digits(hours)} hours (" in said
    assert f"), {digits(2 * hours)} device hours" in said


@pytest.mark.parametrize(
    ("machine", "devices", "kind"),
    [
        ("rtx4090x8", 1, "cards"),
        ("rtx4090x8", 8, "cards"),
        ("l40sx8", 4, "cards"),
        ("h100x8", 1, "few"),
        ("a100-80x8", 7, "few"),
        ("a100-80x8", 8, "nodes"),
        ("gb200-nvl72", 512, "nodes"),
    ],
)
def test_an_interval_is_that_of_the_class_of_machine(machine: str, devices: int, kind: str) -> None:
    """Plan, simulate and their pages print it, with a line where the record is poor."""
    where = hardware.load(machine)
    assert class_of(where, devices) == kind
    said, time = describe_accuracy(where, devices), intervals(kind)["time"]
    assert f"{time.rows:,} published steps" in said[0]
    assert len(said) == 1 + (time.high / time.low >= accuracy.POOR)
    assert all("are inaccurate" in line for line in said[1:])
    job = Job(train={"global_batch": devices}, numerics={"precision": "bf16"})
    prediction = predict(presets.preset("gpt2"), job, Layout(dp_replicate=devices), where)
    assert " ".join(said) in " ".join(simulate.as_text(prediction).split())
    page = prediction_page.page_of(prediction, small=True)
    assert page.answers[1].interval == tuple(map(duration, time.of(prediction.step_s)))
    assert page.notes[-len(said) :] == said


def test_other_numerics_are_priced_and_never_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*words: str) -> dict[str, Any]:
        file = tmp_path / "plan.json"
        flags = ("--hardware", "a100-80x8", "--devices", 2, "--top", 1, "--json", file)
        assert small.main("plan", *GPT2, "--set", "numerics.precision=float32", *flags, *words) == 0
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    plain = planned()
    said = capsys.readouterr().out
    (half,) = [one for one in plain["other_numerics"] if one["change"] == "numerics.precision=bf16"]
    assert "other numerics, which may change results: numerics.precision=bf16: " in said
    file = tmp_path / "simulation.json"
    assert small.main("simulate", *GPT2, *A100, "--layout", plain["best"][0]["layout"], "--json", file) == 0
    asked = json.loads(file.read_text())
    assert half["step_s"] == pytest.approx(asked["step_s"])
    rounded = next(one for one in plain["other_numerics"] if one["change"] == "numerics.tf32=true")
    assert half["step_s"] < rounded["step_s"] < 0.97 * plain["best"][0]["step_s"]
    full = ("--set", "numerics.precision=float32", "--set", "numerics.tf32=true")
    words = (*GPT2, *A100, *full, "--layout", plain["best"][0]["layout"])
    assert small.main("simulate", *words, "--json", file) == 0
    assert rounded["step_s"] == pytest.approx(json.loads(file.read_text())["step_s"])
    assert half["step_s"] < 0.97 * plain["best"][0]["step_s"]
    assert half["peak_bytes"] == max(use["peak"] for use in asked["memory_bytes"])
    assert not [
        one for one in planned("--set", "numerics.precision=bf16")["other_numerics"] if "precision" in one["change"]
    ]


@pytest.mark.parametrize(
    ("words", "unit", "each"),
    [
        (["model.source=preset:gpt2"], "tokens", 1024),
        (["model.source=preset:gpt2", "data.sequence_length=256"], "tokens", 256),
        (["model.source=preset:resnet50"], "samples", 1),
        (["model.source=preset:resnet50", "data.sequence_length=256"], "samples", 1),
    ],
)
def test_a_preset_knows_how_long_its_samples_are(words, unit, each, tmp_path, capsys):
    file = tmp_path / "plan.json"
    settings = [part for word in words for part in ("--set", word)]
    assert small.main("plan", *settings, "--hardware", "a100-80x8", "--devices", 2, "--top", 1, "--json", file) == 0
    best = json.loads(file.read_text())["best"][0]
    assert best["unit"] == unit
    batch = best["tokens_per_s_per_device"] * best["step_s"] * 2
    assert batch == pytest.approx(
        256 if unit == "samples" else 512 * 1024
    )  # the published batch, however long samples are
    said = capsys.readouterr().out
    assert f"{round(batch / each)} samples" in said
    assert f"{unit}/s/device" in said


def test_gradients_of_a_byte_save_no_more_than_what_is_exposed(tmp_path: Path) -> None:
    job = Job(model={"source": "preset:gpt2"}, train={"global_batch": 64}, numerics={"precision": "bf16"})
    model, machine = presets.preset("gpt2", job.data.sequence_length), hardware.load("v100x8")
    slow = replace(machine.inter, bytes_per_s=6e8)
    machine = replace(machine, flops_per_s={**machine.flops_per_s, "bfloat16": 1e14}, inter=slow)
    for text in ("dp=16", "dp=16 zero=1", "dp=16 zero=2", "dp=1", "tp=4", "dp=1 pp=2 microbatch=8"):
        said = predict(model, job, Layout(text), machine)
        found = other_numerics.savings(said, model, job, machine)
        # A ring of all ranks passes from node to node once; what each rank sends to each other passes eight times.
        is_sent = text == "dp=16"
        changes = ["numerics.compression=int8 with numerics.replicas=16"] * is_sent
        assert [one.change for one in found] == changes, text
        for one in found:
            assert said.step_s - said.exposed_comm_s <= one.step_s < said.step_s, text


@pytest.mark.parametrize("words", ["zero=1", "zero=3 microbatch=2 accumulate=full"])
def test_gradients_of_a_byte_save_time_where_each_node_has_one_device(words: str) -> None:
    job = Job(model={"source": "preset:gpt2"}, train={"global_batch": 64}, numerics={"precision": "bf16"})
    machine = hardware.load("v100x8")
    machine = replace(
        machine,
        flops_per_s={**machine.flops_per_s, "bfloat16": 1e14},
        devices_per_node=1,
        inter=replace(machine.inter, bytes_per_s=6e8),
    )
    model = presets.preset("gpt2", job.data.sequence_length)
    said = predict(model, job, Layout(f"dp=16 {words}"), machine)
    (found,) = other_numerics.savings(said, model, job, machine)
    assert found.change == "numerics.compression=int8 with numerics.replicas=16"
    assert found.peak_bytes is not None
    assert found.peak_bytes > 4 * model.num_params  # what codes of whole gradients have lost is not divided


@pytest.mark.parametrize(("bytes_per_s", "costs"), [(6e8, False), (1e12, True)])
def test_a_codec_that_costs_more_than_it_saves_is_named(bytes_per_s: float, costs: bool) -> None:
    numerics = {"precision": "bf16", "compression": "int8", "replicas": 16}
    job = Job(model={"source": "preset:gpt2"}, train={"global_batch": 64}, numerics=numerics)
    machine = hardware.load("h100x8")
    machine = replace(machine, devices_per_node=1, inter=replace(machine.inter, bytes_per_s=bytes_per_s))
    model = presets.preset("gpt2", job.data.sequence_length)
    said = predict(model, job, Layout("dp=16"), machine)
    found = [one for one in other_numerics.savings(said, model, job, machine) if "compression=none" in one.change]
    plain = job.model_copy(update={"numerics": job.numerics.model_copy(update={"compression": "none", "replicas": 1})})
    assert (predict(model, plain, Layout("dp=16"), machine).step_s < 0.97 * said.step_s) == costs
    assert [one.change for one in found] == [
        "numerics.compression=none in place of int8, which costs more than it saves"
    ] * costs


def test_what_fits_nowhere_fails_and_names_what_comes_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main("plan", *GPT2, *A100, "--devices", "2", "--keep-free", "0.999") == 1
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith("job: built-in default, changed by --set: model.source=preset:gpt2, ")
    assert '\nnothing fits; "' in said
    assert "needs" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the following arguments are required: --devices; see"),
        (["--device", "2"], "required: --devices; unknown argument --device (did you mean '--devices'?)"),
        (["--devices", "0"], "argument --devices: must be a whole number from 1 to 1048576, got 0"),
        (["--devices", "2", "--hardware", "h100"], "no hardware 'h100' (did you mean 'h100x8'?)"),
        (["--devices", "2", "--hardware", "a100x8"], "no hardware 'a100x8' (did you mean 'a100-40x8' or 'a100-80x8'?)"),
        (["--devices", "2", "--hardware", "gb200"], "no hardware 'gb200' (did you mean 'gb200-nvl72' or 'gb200x4'?)"),
        (["--devices", "2", "--set", "model.source=hf:meta-llama/Meta-Llama-3-8B"], "To plan, use preset:llama3-8b."),
        (["--devices", "2", "--lr", "3"], "unknown argument --lr: use --set optimizer.lr=VALUE"),
        (["--devices", "2", "--hardware", "nope.toml"], "there is no file nope.toml: the profiles are a100-40x8, "),
        (["--devices", "2", "--hardware", "/proc"], "/proc is a folder; a hardware profile is a TOML file"),
        (["--devices", "2", "--why", "dp=two"], "dp must be a whole number, got dp=two"),
        (["--devices", "2", "--why", "dp=1,tp=two"], "tp must be a whole number, got tp=two"),
        (["--devices", "2", "--set", "model.source=GPT2-XL"], "(did you mean 'preset:gpt2-xl'?)"),
        (["--devices", "2", "--set", "model.config.hiden=8"], "has no 'hiden' (did you mean 'hidden'?)"),
        (["--devices", "2", "--json", "/nope/plan.json"], "/nope/plan.json cannot be written: there is no folder /nope"),
        (["--devices", "2", "--set", "optimizer.name=adamq"], "sgd (did you mean 'adam'?), or module:function"),
        (["--devices", "2", "--fastest", "--fewest-devices"], "not allowed with argument --fastest"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_searched(words, says, monkeypatch, capsys):
    monkeypatch.setattr(search, "plan", lambda *_, **__: pytest.fail("it was searched"))
    assert small.main("plan", *GPT2, *words) == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1


def test_a_dtype_the_hardware_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hardware", "V100x8", "--devices", 2, "--set", "numerics.precision=bf16")
    assert small.main("plan", *GPT2, *words) == 2
    assert small.without_code(capsys.readouterr().err) == (
        "samestep: hardware v100x8 has no flops_per_s for bfloat16; it has float64, float32, float16. Use "
        "numerics.precision=fp16 or float32 or float64\n"
    )


COMMANDS = [
    ["plan", "--help"],
    ["simulate", "--help"],
    ["plan", *GPT2, *A100, "--devices", "2", "--top", "1"],
    ["simulate", *GPT2, *A100, "--layout", "dp=2"],
]


def test_planning_a_preset_never_imports_torch() -> None:
    code = (
        "import sys; from samestep.cli import main\n"
        f"for words in {COMMANDS}:\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), words"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"]])
def test_frozen_weights_have_no_gradient_in_the_useful_flops(targets: list[str]) -> None:
    """Of a weight that is not trained a step computes two products for three: the MFU of LoRA counts no others."""

    def useful(**model: Any) -> float:
        job = Job(
            model={"source": "preset:llama3-8b", **model}, train={"global_batch": 64}, data={"sequence_length": 1024}
        )
        found = samestep.simulate(job, "dp=8 zero=3 microbatch=2", "a100-80x8")
        return found.mfu * found.step_s

    adapters = useful(lora={"targets": targets, "r": 4})
    assert adapters / useful() == pytest.approx(2 / 3, rel=0.04)
