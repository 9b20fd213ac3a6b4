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
    ],
)
def test_a_layout_gives_what_one_cpu_gives(layout: str, model: str) -> None:
    prove(layout, model, device="cuda")
