"""Laws of prices: never better than the roofline, more of anything never takes less, groups at their limits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samestep import hardware
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import presets
from samestep.models.layer_parts import OtherWork, PartialSum, Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec
from samestep.program.ops import OpKind
from samestep.program.program import Program
from samestep.strategies import program_of
from samestep.wings.plan.simulation import clock, cost, kernel_rates
from tests.laws.models import LAW

GPU = hardware.load("a100-80x8")
SIZES = st.integers(1, 8192)


def price(
    layer: LayerSpec,
    kind: OpKind,
    machine: Hardware = GPU,
    samples: int = 1,
    recompute: str = "none",
    precision: str = "bf16",
    tf32: bool = False,
    deterministic: bool = False,
    layout: str = "dp=1",
) -> float:
    """Seconds of a layer of one sample each."""
    block = replace(layer, name="block", modules=("block",), is_block=True)
    model = ModelSpec(name="one", layers=(block,), params=(), cut_refusal="")
    job = Job(
        train={"global_batch": samples}, numerics={"precision": precision, "tf32": tf32, "deterministic": deterministic}
    )
    program = program_of(model, job, Layout(f"{layout} recompute={recompute}"))
    return next(cost.seconds(op, program, machine) for _, op in program.ops() if op.kind is kind)


def layer_of(*products: Product, moved: int = 0, kernels: int = 0) -> LayerSpec:
    flops = sum(product.flops for product in products)
    return LayerSpec(
        name="", modules=(), forward_flops=flops, products=products, moved=OtherWork(moved, kernels=kernels)
    )


# -- compute -----------------------------------------------------------------------------------------------------------


@LAW
@given(SIZES, SIZES, SIZES, st.integers(1, 8))
def test_no_product_is_faster_than_the_roofline(m: int, k: int, n: int, count: int) -> None:
    product = Product(rows=m, inner=k, columns=n, count=count)
    moved = 2 * count * (m * k + k * n + m * n)
    floor = max(product.flops / GPU.flops_per_s["bfloat16"], moved / GPU.memory_bytes_per_s)
    assert price(layer_of(product), OpKind.FORWARD) >= floor
    assert price(layer_of(product), OpKind.BACKWARD) >= 2 * product.flops / GPU.flops_per_s["bfloat16"]


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.BACKWARD])
@pytest.mark.parametrize("factors", ["weight", "pair", "causal"])
def test_tf32_is_faster_where_the_device_has_it_and_half_precision_faster_still(kind: OpKind, factors: str) -> None:
    layer = layer_of(Product(rows=4096, inner=4096, columns=4096, count=8, factors=factors))
    full, rounded = (price(layer, kind, precision="float32", tf32=tf32) for tf32 in (False, True))
    assert price(layer, kind) < rounded < full / 4
    assert price(layer, kind, tf32=True) == price(layer, kind)
    old = replace(hardware.load("v100x8"), efficiency={})
    assert price(layer, kind, old, precision="float32", tf32=True) == price(layer, kind, old, precision="float32")


@LAW
@given(SIZES, SIZES, SIZES, st.sampled_from(["rows", "inner", "columns", "count"]))
def test_twice_a_product_never_takes_less(m: int, k: int, n: int, what: str) -> None:
    small = Product(rows=m, inner=k, columns=n, count=2)
    large = replace(small, **{what: 2 * getattr(small, what)})
    aligned = replace(GPU, efficiency={})  # doubling may align what was not
    assert price(layer_of(large), OpKind.FORWARD, aligned) >= price(layer_of(small), OpKind.FORWARD, aligned) * (
        1 - 1e-9
    )


def test_a_large_product_reaches_what_large_products_reach() -> None:
    product = Product(rows=16384, inner=16384, columns=16384)
    reached = product.flops / price(layer_of(product), OpKind.FORWARD) / GPU.flops_per_s["bfloat16"]
    assert 0.9 * cost.REACHED * GPU.efficiency["bfloat16"] < reached <= cost.REACHED * GPU.efficiency["bfloat16"]


def test_one_tile_more_than_the_device_has_units_is_another_wave() -> None:
    full = Product(rows=256 * GPU.num_units, inner=2 * kernel_rates.SPLIT - 64, columns=128)
    more = replace(full, rows=full.rows + 1)
    assert price(layer_of(more), OpKind.FORWARD) > 1.15 * price(layer_of(full), OpKind.FORWARD)


@pytest.mark.parametrize("columns", [128, 768, 1536])
@pytest.mark.parametrize("inner", [2**13, 2**16])
def test_the_last_wave_of_a_long_product_is_filled(columns: int, inner: int) -> None:
    """Tiles of half a wave, of one and a little, and of a few take little longer than their part of full waves."""
    product = Product(rows=4096, inner=inner, columns=columns)
    rate = GPU.flops_per_s["bfloat16"] * cost.REACHED * GPU.efficiency["bfloat16"]
    assert price(layer_of(product), OpKind.FORWARD) < 1.2 * product.flops / rate + 1e-5


@pytest.mark.parametrize("rows", [256 * GPU.num_units, 257 * GPU.num_units, 1024])
def test_longer_products_take_longer_however_they_are_split(rows: int) -> None:
    product = Product(rows=rows, inner=kernel_rates.SPLIT, columns=128)
    times = [price(layer_of(replace(product, inner=kernel_rates.SPLIT * n // 2)), OpKind.FORWARD) for n in range(2, 12)]
    assert times == sorted(times)


def test_few_tiles_are_shared_where_they_have_many_steps() -> None:
    """The gradient of a convolution's weight: a few results, each a sum over a whole batch."""
    wide = Product(rows=64, inner=2**18, columns=64)
    alone = wide.flops / (GPU.flops_per_s["bfloat16"] * cost.REACHED * GPU.efficiency["bfloat16"] / GPU.num_units)
    assert price(layer_of(wide), OpKind.FORWARD) < alone / 20


def test_rows_that_do_not_start_at_128_bytes_are_slower() -> None:
    times = [price(layer_of(Product(rows=8192, inner=4096, columns=n)), OpKind.FORWARD) for n in (8192, 8200, 8201)]
    assert times == sorted(times)
    assert times[2] > 1.5 * times[0]


def test_a_causal_kernel_does_half_at_a_lower_rate_and_a_frozen_weight_has_no_gradient() -> None:
    whole = Product(rows=4096, inner=256, columns=4096, count=32, factors="attention")
    causal = replace(whole, factors="causal")
    ratio = price(layer_of(causal), OpKind.FORWARD) / price(layer_of(whole), OpKind.FORWARD)
    assert 0.5 / kernel_rates.FLASH_2.causal <= ratio < 0.6
    trained = Product(rows=4096, inner=4096, columns=4096)
    frozen = replace(trained, factors="frozen")
    assert price(layer_of(frozen), OpKind.BACKWARD) < 0.55 * price(layer_of(trained), OpKind.BACKWARD)


def test_other_work_takes_its_bytes_and_its_instructions() -> None:
    elements = 10**9
    moved = 2 * elements / (GPU.memory_bytes_per_s * GPU.memory_efficiency)
    expected = math.hypot(moved, elements * cost.ISSUED / (GPU.flops_per_s["float32"] / 2))
    assert price(layer_of(moved=elements), OpKind.FORWARD) == pytest.approx(expected)
    assert price(layer_of(moved=elements), OpKind.FORWARD, samples=3) == pytest.approx(3 * expected)


@pytest.mark.parametrize("faster", [2.0, 4.0, 8.0])
def test_faster_memory_alone_helps_other_work_less_and_less(faster: float) -> None:
    quick = replace(GPU, memory_bytes_per_s=faster * GPU.memory_bytes_per_s)
    slow, fast = (price(layer_of(moved=10**9), OpKind.FORWARD, machine=machine) for machine in (GPU, quick))
    assert slow / faster < fast < slow
    assert fast >= 10**9 * cost.ISSUED / (GPU.flops_per_s["float32"] / 2)


def test_a_cpu_is_bound_by_bytes_alone() -> None:
    machine = replace(GPU, library="gloo")
    expected = 2 * 10**9 / (GPU.memory_bytes_per_s * GPU.memory_efficiency)
    assert price(layer_of(moved=10**9), OpKind.FORWARD, machine=machine) == pytest.approx(expected)


def test_the_host_is_a_floor_under_small_layers_and_nothing_under_large_ones() -> None:
    slow = replace(GPU, kernel_launch_s=1e-3)
    small = layer_of(Product(rows=8, inner=64, columns=64), kernels=10)
    assert price(small, OpKind.FORWARD, slow) == pytest.approx(10e-3, rel=0.01)
    large = layer_of(Product(rows=2**17, inner=8192, columns=8192), kernels=10)
    assert price(large, OpKind.FORWARD, slow) == pytest.approx(price(large, OpKind.FORWARD), rel=0.01)


def test_deterministic_kernels_cost_the_host_a_fill_and_the_device_another_write() -> None:
    slow = replace(GPU, kernel_launch_s=1e-3)
    small, moves = layer_of(Product(rows=8, inner=64, columns=64), kernels=10), layer_of(moved=10**9)
    part = cost.FILLS * cost.FILL_PART
    for layer, more in ((small, 1 + part), (moves, 1 + cost.FILL_PART)):
        for kind in (OpKind.FORWARD, OpKind.BACKWARD):
            plain, filled = (price(layer, kind, slow, deterministic=fills) for fills in (False, True))
            assert filled == pytest.approx(more * plain, rel=0.01)


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.BACKWARD])
def test_the_host_starts_the_collectives_of_a_layer_that_it_holds_up(kind: OpKind) -> None:
    slow = replace(GPU, kernel_launch_s=1e-3)
    sums = (PartialSum(owner="block.up", elements=64), PartialSum(owner="block.down", elements=64))
    small = replace(layer_of(Product(rows=8, inner=64, columns=64), kernels=10), forward_sums=sums, backward_sums=sums)
    whole, cut = price(small, kind, slow), price(small, kind, slow, layout="tp=2")
    assert cut - whole == pytest.approx(2 * cost.COLLECTIVE_STARTS * 1e-3, rel=0.01)
    large = replace(
        layer_of(Product(rows=2**17, inner=8192, columns=8192), kernels=10), forward_sums=sums, backward_sums=sums
    )
    assert price(large, kind, slow, layout="tp=2") == pytest.approx(price(large, kind, slow), rel=0.01)


class PlainBlock(nn.Module):
    """A block whose attention is made of plain products, as Megatron-LM's own modules make it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
        self.qkv, self.out, self.up, self.down = (nn.Linear(*size) for size in sizes)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = (one.view(batch, length, 4, -1).transpose(1, 2) for one in self.qkv(self.norms[0](x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(mask, -1e4).float().softmax(-1).to(x.dtype)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, hidden))
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return y


OPERATIONS = (
    "add", "add_", "addmm", "bmm", "cat", "copy_", "div", "gelu", "gelu_backward", "masked_fill_", "mm", "native_layer_norm",
    "native_layer_norm_backward", "sum", "_softmax", "_softmax_backward_data",
)  # fmt: skip
"""What starts a kernel; a copy that an `addmm` makes of its bias on a CPU does not on a GPU."""


def started(deterministic: bool) -> Counter[str]:
    """Operations of the forward and the backward of a block, by name."""
    block, x = PlainBlock(64).bfloat16(), torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    mask, before = torch.ones(16, 16, dtype=torch.bool).triu(1), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ) as seen:  # torch 2.11 warns without
            block(x, mask).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    return Counter(event.name.removeprefix("aten::") for event in seen.events())


def test_torch_fills_as_many_tensors_as_are_priced() -> None:
    plain, filling = started(False), started(True)
    operations = sum(plain[name] for name in OPERATIONS) - plain["addmm"]
    assert (filling["fill_"] - plain["fill_"]) / operations == pytest.approx(cost.FILLS, abs=0.08)


def test_selective_recompute_repeats_what_is_no_product() -> None:
    block = layer_of(Product(rows=8192, inner=8192, columns=8192), moved=10**8, kernels=8)
    assert price(block, OpKind.RECOMPUTE, recompute="full") == price(block, OpKind.FORWARD)
    assert price(block, OpKind.RECOMPUTE, recompute="selective") < 0.2 * price(block, OpKind.FORWARD)


def test_experts_read_all_their_weights_and_multiply_only_their_rows() -> None:
    dense = Product(rows=2**16, inner=4096, columns=4096)
    dealt = replace(dense, groups=8)
    assert dealt.flops == dense.flops
    times = [price(layer_of(product), OpKind.FORWARD) for product in (dense, dealt)]
    assert times[0] <= times[1] < 1.1 * times[0]
    few = [price(layer_of(replace(p, rows=64)), OpKind.FORWARD) for p in (dense, dealt)]
    assert few[1] > 4 * few[0]  # eight weights are read for rows of one


# -- whole steps -------------------------------------------------------------------------------------------------------


def step_s(name: str, layout: str, batch: int, machine: Hardware, **changes: int) -> float:
    model = presets.preset(name, changes=changes)
    job = Job(train={"global_batch": batch}, numerics={"precision": "bf16"})
    return clock.play([_program(model, job, layout, machine)], machine).step_s


def _program(model: ModelSpec, job: Job, layout: str, machine: Hardware) -> Program:
    return program_of(model, job, Layout(layout), machine.devices_per_node)


def test_a_published_step_is_met_within_a_fifth() -> None:
    """MosaicML llm-foundry, scripts/train/benchmarking: MPT-13b on 8 A100 80 GB, 2,330 tokens/s a device."""
    shape = {"vocab": 50368, "sequence": 1024, "positions": 1024, "tied": False, "bias": False}
    predicted_s = step_s("gpt3-13b", "dp=8 zero=3 microbatch=40 recompute=full", 960, GPU, **shape)
    assert predicted_s == pytest.approx(960 * 1024 / 8 / 2330, rel=0.2)


def test_smaller_dtypes_cost_the_host_a_cast_for_each_expert() -> None:
    products = (Product(rows=64, inner=64, columns=64, groups=8),)
    dtypes = cost._Dtypes("float8", "bfloat16", "float32")
    assert cost._casts(products, dtypes) == 9
    assert cost._casts(products, dtypes._replace(products="bfloat16")) == 0


def test_a_product_takes_longer_by_the_clock_that_is_not_sustained() -> None:
    layer = layer_of(Product(rows=8192, inner=8192, columns=8192))
    cool, hot = (price(layer, OpKind.FORWARD, replace(GPU, sustained=part)) for part in (1.0, 0.8))
    assert hot - GPU.kernel_s == pytest.approx((cool - GPU.kernel_s) / 0.8)
    assert price(layer, OpKind.FORWARD, replace(GPU, sustained=1.09)) < cool


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_update_on_the_host_crosses_the_link_twice_and_reads_its_memory(zero: int, precision: str) -> None:
    model = presets.preset("gpt2", 64)
    job = Job(train={"global_batch": 8}, numerics={"precision": precision})
    words = f"dp=4 zero={zero}" if zero else "dp=4"
    steps = [program_of(model, job, Layout(f"{words}{word}")) for word in ("", " offload")]
    updates = [next(op for _, op in one.ops() if op.kind is OpKind.UPDATE) for one in steps]
    on_device, on_host = (cost.seconds(op, one, GPU) for op, one in zip(updates, steps, strict=True))
    numel, parts = model.num_params, 4 if zero else 1
    back = sum(
        param.numel * (2 if precision == "bf16" and zero < 3 and not param.shared else 4) for param in model.params
    )
    expected = (4 * numel + back) / parts / GPU.host_bytes_per_s + 7 * 4 * numel / parts / GPU.host_update_bytes_per_s
    assert on_host == pytest.approx(GPU.host_step_s + expected)
    assert on_host > on_device
    one_memory = replace(GPU, host_bytes_per_s=0.0)
    assert cost.seconds(updates[1], steps[1], one_memory) == pytest.approx(on_device)
