"""Laws of a fused attention's rate: what was published of each family of kernels on one H100, and how tiles and masks change it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import hardware
from samestep.models.layer_parts import Product
from samestep.wings.plan.simulation import cost, kernel_rates
from samestep.wings.plan.simulation.kernel_rates import Family
from tests.laws.models import LAW

GPU = hardware.load("h100x8")
PEAK = GPU.flops_per_s["bfloat16"]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Shah et al. 2024, arXiv:2407.08608, figures 5 and 6: TFLOP/s of 16,384 tokens with 2,048 elements each
FORWARD: dict[tuple[Family, int, bool], tuple[int, ...]] = {
    ("flash-2", 128, False): (309, 350, 362, 368, 370, 370),
    ("flash-3", 128, False): (467, 565, 625, 638, 646, 648),
    ("cudnn", 128, False): (497, 574, 617, 609, 600, 595),
    ("flash-2", 128, True): (191, 260, 298, 319, 333, 335),
    ("flash-3", 128, True): (292, 423, 521, 579, 602, 616),
    ("cudnn", 128, True): (315, 410, 484, 518, 529, 539),
    ("flash-2", 64, False): (282, 306, 318, 321, 322, 324),
    ("flash-3", 64, False): (333, 392, 460, 476, 496, 497),
    ("cudnn", 64, False): (335, 373, 395, 408, 412, 413),
    ("flash-2", 64, True): (180, 229, 262, 284, 295, 299),
    ("flash-3", 64, True): (197, 265, 371, 420, 460, 473),
    ("cudnn", 64, True): (225, 288, 334, 363, 379, 388),
}
BACKWARD: dict[tuple[Family, int, bool], tuple[int, ...]] = {
    ("flash-2", 128, False): (214, 260, 291, 310, 318, 322),
    ("flash-3", 128, False): (316, 424, 501, 542, 559, 561),
    ("cudnn", 128, False): (305, 408, 465, 499, 518, 516),
    ("flash-2", 64, False): (198, 238, 264, 279, 287, 291),
    ("flash-3", 64, False): (272, 363, 422, 453, 472, 474),
    ("cudnn", 64, False): (266, 348, 395, 417, 432, 433),
}


def flops_per_s(
    family: Family, head: int, length: int, backward: bool = False, attended: float = 1.0, heads: int = 0
) -> float:
    """FLOP/s of heads of one length, as many as hold 16,384 tokens with 2,048 elements each."""
    heads = heads or 16384 // length * 2048 // head
    reached = PEAK * GPU.efficiency["attention"]
    took_s = kernel_rates.scores_s(
        family, backward, head, length, length, heads, attended, reached, PEAK, GPU.num_units
    )
    flops = 4 * length * length * head * heads * attended * (kernel_rates.BACKWARD if backward else 1)
    return flops / took_s


@pytest.mark.parametrize(("backward", "published"), [(False, FORWARD), (True, BACKWARD)])
def test_each_family_reaches_what_was_published_of_it(backward: bool, published: dict) -> None:
    off = {}
    for (family, head, is_causal), rates in published.items():
        for length, rate in zip(LENGTHS, rates, strict=True):
            found = flops_per_s(family, head, length, backward, 0.5 if is_causal else 1.0)
            off[family, head, is_causal, length] = found / (rate * 1e12) - 1
    errors = sorted(map(abs, off.values()))
    assert errors[len(errors) // 2] < 0.03
    assert max(errors) < 0.25  # FlashAttention-3 with heads of 64 and 512 tokens under a mask
    assert max(error for key, error in off.items() if key[3] >= 2048) < 0.07


@LAW
@given(
    st.sampled_from(sorted(kernel_rates.KERNELS)), st.sampled_from((32, 64, 96, 128, 192)), st.integers(8, 16),
    st.booleans(), st.sampled_from((1.0, 0.5)),
)  # fmt: skip
def test_longer_sequences_and_larger_heads_reach_no_less_and_nothing_exceeds_the_peak(
    family: Family, head: int, power: int, backward: bool, attended: float
) -> None:
    short, long = (flops_per_s(family, head, 2**exponent, backward, attended, 4096) for exponent in (power, power + 1))
    wide = flops_per_s(family, 2 * head, 2**power, backward, attended, 4096)
    assert short <= long * (1 + 1e-9)
    assert short <= wide * (1 + 1e-9)
    assert max(long, wide) <= PEAK


@pytest.mark.parametrize("attended", [1.0, 0.5])
def test_few_tiles_leave_units_idle(attended: float) -> None:
    """One head of 8,192 tokens has 64 tiles for 132 units."""
    one, many = (flops_per_s("flash-2", 128, 8192, attended=attended, heads=heads) for heads in (1, 132))
    assert one < 0.6 * many


def test_the_family_is_a_word_of_the_profile_and_torch_chooses_by_default() -> None:
    product = Product(rows=8192, inner=256, columns=8192, count=32, factors="causal")
    dtypes = cost._Dtypes("bfloat16", "bfloat16", "float32")
    times = {
        word: cost._attention_s(product, 1, False, dtypes, replace(GPU, attention_kernel=word))
        for word in kernel_rates.KERNELS
    }
    assert GPU.attention_kernel == "sdpa"
    assert times["sdpa"] == times["flash-2"]
    assert times["flash-3"] < times["cudnn"] < times["flash-2"] < times["flash-1"]
