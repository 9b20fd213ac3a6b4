"""Laws of convolutions: what was published of ResNet-50 on two devices, what torch's default memory format costs, and groups of few channels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep import Job, Layout, hardware
from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.presets import resnet
from samestep.models.spec import ModelSpec
from samestep.program.ops import OpKind
from samestep.wings.plan.simulation import cost
from samestep.wings.plan.simulation.simulate import predict

BACKWARD = cost.BACKWARD_MOVES
V100, A100 = hardware.load("v100x8"), hardware.load("a100-80x8")


def in_format(model: ModelSpec, *, channels_first: bool) -> ModelSpec:
    """Return a model whose tensors have their channels first, or last."""

    def changed(layer: LayerSpec) -> LayerSpec:
        products = tuple(replace(product, channels_first=channels_first) for product in layer.products)
        of_a_channel = layer.moved.channel_elements * channels_first
        return replace(layer, products=products, moved=replace(layer.moved, channel_elements=of_a_channel))

    return replace(model, layers=tuple(map(changed, model.layers)))


def images_per_s(machine: hardware.Hardware, precision: str, batch: int, *, channels_first: bool) -> float:
    """Images a second of ResNet-50 on one device."""
    model = in_format(resnet(), channels_first=channels_first)
    job = Job(train={"global_batch": batch}, numerics={"precision": precision}, optimizer={"name": "sgd", "lr": 0.1})
    return batch / predict(model, job, Layout("dp=1"), machine).step_s


@pytest.mark.parametrize(
    ("machine", "precision", "batch", "channels_first", "published"),
    [(V100, "float32", 112, True, 367), (V100, "fp16", 256, False, 1200), (A100, "fp16", 256, False, 2470)],
)
def test_resnet_50_is_as_fast_as_published(
    machine: hardware.Hardware, precision: str, batch: int, channels_first: bool, published: float
) -> None:
    """Images a second of NVIDIA's DeepLearningExamples (PyTorch/Classification/ConvNets/resnet50v1.5, training performance, 21.03)."""
    assert images_per_s(machine, precision, batch, channels_first=channels_first) == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("machine", "precision"), [(V100, "fp16"), (A100, "fp16"), (A100, "bf16")])
def test_torchs_default_memory_format_is_slower_on_tensor_cores(machine: hardware.Hardware, precision: str) -> None:
    first, last = (images_per_s(machine, precision, 256, channels_first=is_first) for is_first in (True, False))
    assert 1.2 < last / first < 1.6  # Timm's on an RTX 3090: 1218 / 826


def test_float32_runs_in_either_memory_format() -> None:
    first, last = (images_per_s(V100, "float32", 64, channels_first=is_first) for is_first in (True, False))
    assert 0.97 * last < first < last  # batch norms alone differ


@pytest.mark.parametrize(
    ("name", "published"), [("a100-80x8", 1582), ("h100x8", 2616), ("h200x8", 3079), ("b200x8", 3076)]
)
def test_batch_norms_of_one_block_for_each_channel_gain_little_from_faster_memory(name: str, published: float) -> None:
    """Images a second of Lambda's ResNet-50 in AMP, channels first: a B200 has four times the bandwidth of an A100, and is twice as fast."""
    machine = hardware.load(name)
    spread = replace(
        resnet(), layers=tuple(replace(la, moved=replace(la.moved, channel_elements=0)) for la in resnet().layers)
    )
    job = Job(train={"global_batch": 1280}, numerics={"precision": "fp16"}, optimizer={"name": "sgd", "lr": 0.1})
    with_blocks, without = (1280 / predict(model, job, Layout("dp=1"), machine).step_s for model in (resnet(), spread))
    assert abs(with_blocks / published - 1) < min(0.4, abs(without / published - 1))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("channels", [16, 64, 4096])
def test_a_channel_of_a_batch_norm_takes_as_long_as_one_block_of_threads(channels: int, backward: bool) -> None:
    """Few channels are bound by their blocks, whatever the bandwidth; many by the bandwidth."""
    elements = 3 * channels * 56 * 56
    dtypes = cost._Dtypes("float16", "float16", "float32")
    times = BACKWARD if backward else 1.0
    alone_s = times * 64 * 3 * 56 * 56 / cost.BLOCK_ELEMENTS_PER_S
    spread_s = cost._elementwise_s(times * 64 * elements, "float16", A100)
    work = cost._Work((), elements, 0, True, True, channel_elements=3 * 56 * 56)
    took_s = cost._layer_s(work, OpKind.BACKWARD if backward else OpKind.FORWARD, "all", 64, dtypes, A100)
    assert max(alone_s, spread_s) < took_s < alone_s + spread_s
    assert (alone_s > spread_s) == (channels <= 64)


@pytest.mark.parametrize("channels", [1, 4, 16])
def test_groups_of_few_channels_do_not_fill_tiles_with_nothing(channels: int) -> None:
    """A convolution in groups takes no longer than one over all channels, which has as many times the FLOPs as there are groups."""
    groups = 512 // channels
    grouped = Product(rows=784, inner=9 * channels, columns=channels, count=groups, taps=9)
    dense = Product(rows=784, inner=9 * 512, columns=512, taps=9)
    work = cost._Work((), 0, 0, True, True)
    dtypes = cost._Dtypes("float16", "float16", "float32")
    for backward in (False, True):
        took_s = [cost._product_s(product, 64, backward, "all", work, dtypes, A100) for product in (grouped, dense)]
        assert took_s[0] < took_s[1]
