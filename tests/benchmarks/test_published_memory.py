"""What a published row says of memory is compared with the figure that its source counted, and with the loss that it ran."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import forecast  # noqa: E402
import published  # noqa: E402
from cells import Row  # noqa: E402

from samestep.memory import memory_use  # noqa: E402
from samestep.wings.plan.simulation import clock  # noqa: E402

TITAN = {
    "id": "1", "file": "rows", "source": "torchtitan benchmarks 2025", "model": "Llama 3 8B", "gpu": "H100", "n_gpus": "8",
    "n_layers": "2", "hidden": "1024", "heads": "8", "seq_len": "4096", "dp_shard": "8", "zero_stage": "3", "micro_batch": "2",
    "global_batch": "16", "recompute": "full", "schedule": "FSDP2", "compile": "True", "metric_memory_gib": "10",
}  # fmt: skip
TUNE = {
    "id": "2", "file": "rows", "source": "torchtune README", "model": "Llama 3.1 8B LoRA", "gpu": "4090", "n_gpus": "1",
    "n_layers": "2", "hidden": "1024", "heads": "8", "metric_memory_gib": "10",
}  # fmt: skip


def _bytes(row: Row, **cells: str) -> int:
    return forecast.predict({**row, **cells}).predicted_bytes


@pytest.mark.parametrize(
    ("cells", "is_reserved"),
    [
        ({}, True),
        ({"source": "torchao training benchmarks (torchtitan)"}, True),
        ({"source": "x"}, False),
        ({"source": "x", "notes": "peak reserved memory"}, True),
        ({"source": "x", "notes": "mem-max-allocated-bytes 5"}, False),
    ],
)
def test_a_row_is_compared_with_what_its_source_counted(cells: dict[str, str], is_reserved: bool) -> None:
    case = published.case_of({**TITAN, **cells})
    programs = forecast.chosen_programs(case)
    tensors, counted = forecast._peak(case, programs), forecast._counted(case, programs)
    assert case.is_reserved is is_reserved
    assert counted > tensors if is_reserved else counted == tensors


def test_a_row_that_was_compiled_is_priced_as_fused_and_keeps_what_its_library_keeps() -> None:
    """Its programs are those of another row, and so is what is repeated."""
    compiled, plain = (published.case_of({**TITAN, "schedule": "", "compile": word}) for word in ("True", ""))
    took, counted = (
        [measure(one, forecast.chosen_programs(one)) for one in (compiled, plain)]
        for measure in (lambda case, programs: clock.play(programs, case.machine).step_s, forecast._counted)
    )
    assert took[0] < took[1]
    assert counted[0] == counted[1]


def test_an_allocator_takes_no_more_than_there_is_and_what_does_not_fit_is_told_by_tensors() -> None:
    case = published.case_of(TITAN)
    programs = forecast.chosen_programs(case)
    tensors, taken = forecast._peak(case, programs), forecast._counted(case, programs)
    room = (tensors + taken) // 2
    tight = replace(case, machine=replace(case.machine, memory_bytes=room + case.machine.reserved_bytes))
    assert forecast._counted(tight, programs) == room
    full = replace(case, machine=replace(case.machine, memory_bytes=tensors))
    assert forecast._counted(full, programs) == tensors


@pytest.mark.parametrize(("vocab", "tp", "more"), [("32768", 1, 1.5), ("131072", 2, 1.0)])
def test_a_loss_that_was_not_compiled_holds_whole_logits(vocab: str, tp: int, more: float) -> None:
    """Three copies in float32, of which a compiled loss has half of one and one; the loss of a tensor cut needs one less for its gradient."""
    cut = {"tp": str(tp), "dp_shard": str(8 // tp), "global_batch": str(16 // tp)}
    peaks = []
    for year in (2025, 2024):
        case = published.case_of({**TITAN, **cut, "vocab": vocab, "source": f"torchtitan benchmarks {year}"})
        peaks.append(forecast._peak(case, forecast.chosen_programs(case)))
    compiled, eager = peaks
    logits = 2 * 4096 * int(vocab) // tp * 4
    assert eager - compiled == pytest.approx(more * logits, rel=0.01)


@pytest.mark.parametrize("tokens", [2048, 4096])
def test_a_loss_in_chunks_gives_up_logits_for_their_gradients(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = published.recipe_of.__globals__["RECIPES"]
    logits = 2 * tokens * 128256 * 2
    sizes = {}
    for chunks in (1, 8):
        monkeypatch.setitem(recipes, "torchtune", recipes["torchtune"]._replace(loss_chunks=chunks, tokens=tokens))
        sizes[chunks] = _bytes(TUNE)
    assert sizes[1] - sizes[8] == pytest.approx(7 / 8 * logits, rel=0.01)


def test_what_a_tensor_cut_gathers_is_kept_by_dtensors_and_gathered_again_by_megatron() -> None:
    kept, again = (
        published.case_of({**TITAN, "tp": "2", "dp_shard": "4", "global_batch": "8", "source": source}).model.layers[1]
        for source in ("torchtitan benchmarks 2025", "Megatron-LM")
    )
    assert again.saved_cut_elements == again.saved_elements
    assert kept.saved_cut_elements < kept.saved_elements


@pytest.mark.parametrize("batch", [256, 264, 272])
@pytest.mark.parametrize(
    "cells",
    [
        {"pp": "4"},
        {"pp": "2", "n_gpus": "16"},
        {"pp": "4", "vp": "2", "n_layers": "16", "schedule": "interleaved"},
        {"dp_shard": "8", "zero_stage": "1"},
    ],
)
def test_a_step_whose_middle_is_left_out_holds_as_much(cells: dict[str, str], batch: int) -> None:
    plain = {
        **TITAN,
        "source": "x",
        "schedule": "",
        "dp_shard": "",
        "zero_stage": "",
        "n_layers": "8",
        "micro_batch": "1",
    }
    case = published.case_of({**plain, **cells, "global_batch": str(batch)})
    whole = forecast.chosen_programs(case)
    held = [memory_use.during_step(program).total for program in whole]
    assert [memory_use.during_step(forecast._shortened(program)).total for program in whole] == held
    assert all(len(forecast._shortened(program).tasks) < len(program.tasks) for program in whole)
    assert [memory_use.during_step(program).total for program in forecast.written(case)[0]] == held


def test_a_fused_loss_goes_over_its_logits_once_and_a_half() -> None:
    """MPT's loss is one kernel over logits in 16 bits; others make them float32, and read and write them nine times."""
    row = {
        "model": "MPT-7b", "gpu": "a100_80gb", "n_gpus": "8", "n_layers": "2", "hidden": "1024", "heads": "8", "seq_len": "512",
        "vocab": "51200", "precision": "bf16", "metric_step_time_s": "1",
    }  # fmt: skip
    fused, plain = (
        published.case_of({**row, "source": source}).model.layers[-1]
        for source in ("MosaicML llm-foundry benchmarking README", "other")
    )
    assert plain.moved.elements - fused.moved.elements == 7.5 * 512 * 51200


FULL = TUNE | {
    "source": "torchao optimizer README",
    "model": "Llama-2-7B full fine-tuning",
    "ffn": "4096",
    "vocab": "1024",
    "precision": "BF16",
}


def _full_bytes(**cells: str) -> int:
    return forecast.predict(FULL | {"micro_batch": "1", "global_batch": "1", "seq_len": "512", **cells}).predicted_bytes


def test_states_in_eight_and_four_bits_take_as_much_less() -> None:
    notes = ("PyTorch fused AdamW; 8- and 4-bit: as wide", "bitsandbytes 8-bit AdamW", "torchao 4-bit AdamW")
    wide, eight, four = (_full_bytes(notes=note) for note in notes)
    assert wide > eight > four
    assert (eight - four) == pytest.approx((wide - eight) / 2, rel=0.2)


def test_a_model_in_sixteen_bits_has_no_masters_and_one_under_amp_has() -> None:
    assert 1.5 * _full_bytes() < _full_bytes(precision="BF16 AMP")
