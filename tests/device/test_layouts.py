"""Every strategy on the simulated device, or on a real one, gives what one CPU gives, and sends what its program lists."""

from __future__ import annotations

import pytest

from tests import rounding
from tests.covering import daily
from tests.device.real_gpu import refusal
from tests.laboratory import TOLERANCE, assert_ledger, assert_same, job_of, observe, on_ranks, prove, reference

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

CASES = [
    ("dp=1", "llama"),
    ("dp=2 zero=1 microbatch=2", "gpt2"),
    ("dp=2 zero=2 recompute=full", "gpt2"),
    ("dp=2 zero=3 microbatch=2", "llama"),
    ("dp=2 zero=3 offload", "plain"),
    ("dp=2 zero=3 microbatch=2 recompute=offload", "deep_llama"),
    ("tp=2 sequence_parallel recompute=full", "llama"),
    ("cp=2", "llama"),
    ("cp=2 exchange=ring", "llama"),
    ("pp=2 microbatch=2 schedule=zero-bubble", "llama"),
    ("dp=2 ep=2", "mixtral"),
]
NIGHTLY = [
    ("dp=2", "llama"),
    ("dp=2 offload", "llama"),
    ("dp=2 reduce=root", "plain"),
    ("dp=2 zero=3 microbatch=2 recompute=selective", "gpt2_with_dropout"),
    ("tp=2", "llama"),
    ("cp=2 recompute=full", "llama"),
    ("pp=2 microbatch=2", "llama_tied"),
    ("pp=2 microbatch=2 schedule=interleaved virtual_stages=2", "deep_gpt2"),
    ("pp=4 microbatch=1", "deep_llama"),
    ("dp=2 ep=2 zero=3", "mixtral"),
]
ALONE = [
    ("dp=1 microbatch=2 recompute=full", "gpt2"),
    ("dp=1 microbatch=2 recompute=selective", "gpt2_with_dropout"),
    ("dp=1 offload", "plain"),
    ("dp=1 microbatch=2 recompute=offload", "deep_gpt2"),
    ("dp=1", "mixtral"),
]
"""What one real GPU can run; on the simulated one the layouts above run the same code."""
ROUNDED_ALONE = [("dp=1 microbatch=2", "plain", "bf16"), ("dp=1 offload", "llama", "bf16"), ("dp=1", "plain", "fp16")]
ROUNDED = [("dp=2 zero=3 microbatch=2", "plain", "bf16"), ("dp=2 zero=1", "plain", "fp16")]
ROUNDED_NIGHTLY = [
    ("dp=2 zero=3 microbatch=2", "llama", "bf16"),
    ("dp=2 offload", "llama", "bf16"),
    ("tp=2", "llama", "bf16"),
    ("dp=2 zero=2", "gpt2", "fp16"),
]


def nightly(cases: list[tuple[str, ...]]) -> list[object]:
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in cases]


def on_a_gpu(cases: list[tuple[str, ...]]) -> list[object]:
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


@pytest.mark.parametrize(("layout", "model"), [*daily(CASES), *nightly(NIGHTLY), *on_a_gpu(ALONE)])
def test_a_layout_gives_what_one_cpu_gives(layout: str, model: str) -> None:
    prove(layout, model, device="cuda")


@pytest.mark.parametrize(
    ("layout", "model", "precision"), [*ROUNDED, *nightly(ROUNDED_NIGHTLY), *on_a_gpu(ROUNDED_ALONE)]
)
def test_a_layout_deviates_by_roundings_alone(layout: str, model: str, precision: str) -> None:
    rounding.prove(layout, model, precision, device="cuda")


@pytest.mark.parametrize("layout", ["dp=2 zero=3", pytest.param("dp=2 zero=1", marks=pytest.mark.nightly)])
def test_codes_are_those_of_one_cpu(layout: str) -> None:
    job = job_of("float64", 2, numerics={"compression": "int8", "replicas": 2}, train={"watch_every": 0})
    ranks = on_ranks(layout, observe, "llama", job, True, device="cuda")
    assert_ledger(ranks, layout)
    assert_same(ranks, reference("llama", job), TOLERANCE)
