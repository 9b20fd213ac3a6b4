"""Attention by the kernel that a job chooses (`run.attention`): torch's math keeps every score, and predictions say so."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import samestep
from samestep import job_files as jobs
from samestep.cli import main
from samestep.models import catalog
from samestep.models.catalog import kept_elements
from samestep.models.layer_parts import Product
from samestep.wings.plan.simulation.simulate import Prediction


@pytest.mark.parametrize(
    ("dtype", "is_causal", "heads", "key_heads", "length", "head"),
    [(torch.float32, True, 4, 4, 32, 8), (torch.bfloat16, False, 4, 2, 48, 16), (torch.bfloat16, True, 6, 1, 16, 4)],
)
def test_as_much_is_kept_as_torchs_math_keeps(
    dtype: torch.dtype, is_causal: bool, heads: int, key_heads: int, length: int, head: int
) -> None:
    """The forward of torch's math keeps weights and factors in float32, with as many heads of keys as of queries."""
    query, key, value = (
        torch.randn(1, count, length, head, dtype=dtype, requires_grad=True) for count in (heads, key_heads, key_heads)
    )
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with sdpa_kernel(SDPBackend.MATH), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=heads != key_heads
        )
    attention = Product(rows=length, inner=2 * head, columns=length, count=heads, factors="causal", cut="count")
    assert found.requires_grad
    assert sum(kept.values()) == 4 * kept_elements(attention)


def _predicted(word: str, layout: str, *settings: str, hardware: str = "h100x8") -> Prediction:
    given = [
        "model.source=preset:llama2-7b",
        "train.global_batch=8",
        "numerics.precision=bf16",
        f"run.attention={word}",
    ]
    return samestep.simulate(jobs.default([*given, *settings]), layout, hardware)


@pytest.mark.parametrize("layout", ["dp=1 tp=8", "dp=8 zero=3 microbatch=1 recompute=full"])
def test_scores_are_in_memory_and_take_their_time(layout: str) -> None:
    """Every score of a block that is not repeated takes four bytes, divided by tp, and no kernel is slower."""
    length = 4096
    fused, plain = (_predicted(word, layout, f"data.sequence_length={length}") for word in ("auto", "math"))
    scores = 4 * 32 * length**2 // plain.layout.tp * (8 // plain.layout.dp)
    blocks = 1 if "full" in layout else 32
    assert plain.allocated_bytes is not None
    assert fused.allocated_bytes is not None
    # where blocks are repeated, the peak may be at the logits without them
    assert plain.allocated_bytes - fused.allocated_bytes > 0.5 * blocks * scores
    assert plain.step_s > 1.1 * fused.step_s


@pytest.mark.parametrize("hardware", ["h100x8", "mi300x8"])
def test_a_kernel_of_the_job_takes_the_place_of_the_profiles(hardware: str) -> None:
    """The families are as fast as they were measured, one after the other, and need the same memory."""
    found = {
        word: _predicted(word, "dp=8 zero=3", "data.sequence_length=8192", hardware=hardware)
        for word in ("cudnn", "flash", "efficient", "math")
    }
    times = [one.step_s for one in found.values()]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    assert found["cudnn"].allocated_bytes == found["efficient"].allocated_bytes


def test_a_plan_knows_the_kernel() -> None:
    """The best layout is predicted as `simulate` does, and one that keeps all scores is not said to fit."""
    settings = [
        "model.source=preset:llama2-7b",
        "train.global_batch=16",
        "numerics.precision=bf16",
        "run.attention=math",
    ]
    job = jobs.default([*settings, "data.sequence_length=4096"])
    best = samestep.plan(job, devices=8, hardware="a100-40x8").best
    assert best
    assert all(one.step_s == samestep.simulate(job, one.layout, "a100-40x8").step_s for one in best[:2])
    kept = sum(kept_elements(one) for one in catalog.model_spec(job).layers[1].products if one.keeps_scores)
    assert all(one.layout.tp > 1 or one.layout.recompute != "none" for one in best if 32 * 4 * kept > 40e9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.compile=blocks"], "bytes are for code that is not compiled"),
        (
            ["run.compile=blocks", "run.compile_backend=aot_eager"],
            "seconds and bytes are for code that is not compiled",
        ),
    ],
)
def test_what_no_price_knows_of_a_word_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan and simulate say which of their figures are those of a run without it, and say nothing without it."""
    about = ["--set", "model.source=preset:gpt2", "--set", "train.global_batch=8", "--hardware", "h100x8"]
    for verb in (["simulate", "--layout", "dp=1"], ["plan", "--devices", "1"]):
        for given in ([], words):
            assert main([*verb, *about, *(part for word in given for part in ("--set", word))]) == 0
            lines = [line for line in capsys.readouterr().out.splitlines() if "not modelled" in line]
            assert bool(lines) == bool(given)
            assert all("run.compile" in line and said in line for line in lines)


@pytest.mark.parametrize(
    ("model", "samples", "layout", "machine", "binds"),
    [
        ("gpt2", 1, "dp=1", "h100x8", "launches of small kernels"),
        ("gpt2", 64, "dp=1", "h100x8", "compute"),
        ("resnet50", 256, "dp=1", "h100x8", "memory traffic"),
        ("gpt2-xl", 8, "dp=8", "rtx4090x8", "exposed communication"),
    ],
)
def test_a_simulation_says_what_binds_it(
    model: str, samples: int, layout: str, machine: str, binds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of small kernels waits for the host, one of large ones for the device, its memory or a link."""
    keys = {"model.source": f"preset:{model}", "train.global_batch": samples, "numerics.precision": "bf16"}
    about = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    assert main(["simulate", *about, "--layout", layout, "--hardware", machine]) == 0
    assert f"\nbottleneck: {binds} (" in capsys.readouterr().out
