"""Every strategy on the simulated device gives what one CPU gives, and sends what its program lists."""

from __future__ import annotations

import pytest

from tests.device.simulated_cuda import refusal
from tests.laboratory import prove

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=1", "llama"),
        ("dp=2", "llama"),
        ("dp=2 zero=1 microbatch=2", "gpt2"),
        ("dp=2 zero=2 recompute=full", "gpt2"),
        ("dp=2 zero=3 microbatch=2", "llama"),
        ("dp=2 offload", "llama"),
        ("dp=2 zero=3 offload", "plain"),
        ("tp=2", "llama"),
        ("tp=2 sequence_parallel recompute=full", "llama"),
        ("cp=2", "llama"),
        ("pp=2 microbatch=2", "llama"),
        ("pp=2 microbatch=2 schedule=zero-bubble", "llama"),
        ("pp=2 microbatch=2 schedule=interleaved virtual_stages=2", "deep_gpt2"),
        ("dp=2 ep=2", "mixtral"),
    ],
)
def test_a_layout_gives_what_one_cpu_gives(layout: str, model: str) -> None:
    prove(layout, model, device="cuda")
