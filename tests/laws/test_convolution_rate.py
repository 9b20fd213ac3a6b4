"""Laws of convolutions: what was published of ResNet-50 on two devices, what torch's default memory format costs, and groups of few channels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep import Job, Layout, hardware
from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.presets import resnet
from samestep.models.spec import ModelSpec
from samestep.wings.plan.simulation import cost
from samestep.wings.plan.simulation.simulate import predict

V100, A100 = hardware.load("v100x8"), hardware.load("a100-80x8")


def of_layers(model: ModelSpec, **changes: bool) -> ModelSpec:
    """Return a model with changed products."""

    def changed(layer: LayerSpec) -> LayerSpec:
        return replace(layer, products=tuple(replace(product, **changes) for product in layer.products))

    return replace(model, layers=tuple(map(changed, model.layers)))


def images_per_s(machine: hardware.Hardware, precision: str, batch: int, *, channels_first: bool) -> float:
    """Images a second of ResNet-50 on one device."""
    model = of_layers(resnet(), channels_first=channels_first)
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
    assert first == last


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
