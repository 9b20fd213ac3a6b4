"""Networks of convolutions of published rows: ResNets of all depths, and VGG-16."""

from __future__ import annotations

import re
from dataclasses import replace

from cells import Row, joined

from samestep.models.layer_parts import OtherWork, Product, WorkingSet
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.presets import resnet
from samestep.models.spec import ModelSpec

DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of the stages of ResNets (He et al. 2016, arXiv:1512.03385, table 1)."""
VGG = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and convolutions of 3 x 3 before each pooling of VGG-16 (Simonyan and Zisserman 2014, arXiv:1409.1556, table 1, D)."""


def vision_of(row: Row) -> str:
    """Return the network of convolutions that a row names; nothing for another model, or for one that has it as a part."""
    name = (row.get("model") or "").lower()
    if re.search("cnn|retina|ssd|yolo|unet", name):
        return ""
    if found := re.search(r"resnet.?(50|101|152)\b", name):
        return f"resnet{found[1]}"
    return "vgg16" if re.search(r"\bvgg.?16\b", name) else ""


def has_channels_last(row: Row) -> bool:
    """Whether images have their channels last: where the row says so, and in entries to MLPerf; torch's default has them first."""
    return re.search(r"channels.last|nhwc|mlperf", joined(row, "source", "notes"), re.IGNORECASE) is not None


def vision_model(name: str, *, is_fused: bool = False, channels_last: bool = False) -> ModelSpec:
    """Return the shape of a network of convolutions; one whose norms, sums and ReLUs are one kernel moves no more than norms do."""
    model = _vgg() if name == "vgg16" else resnet(name, stages=DEPTHS[int(name.removeprefix("resnet"))])
    if channels_last:
        model = replace(model, layers=tuple(map(_with_channels_last, model.layers)))
    if not is_fused or name == "vgg16":
        return model
    fused = (
        replace(la, moved=replace(la.moved, elements=la.saved_elements + la.output_elements)) if la.name != "fc" else la
        for la in model.layers
    )
    return replace(model, layers=tuple(fused))


def _with_channels_last(layer: LayerSpec) -> LayerSpec:
    products = tuple(replace(product, channels_first=False) for product in layer.products)
    return replace(layer, products=products, moved=replace(layer.moved, channel_elements=0))


def _vgg(size: int = 224, classes: int = 1000) -> ModelSpec:
    layers: list[LayerSpec] = []
    params: list[ParamSpec] = []

    def add(product: Product, given: int, kept: int, shape: tuple[int, ...], *, is_block: bool) -> None:
        made = product.rows * product.columns
        params.append(ParamSpec(name=f"{product.owner}.weight", shape=shape, layer=len(layers)))
        params.append(ParamSpec(name=f"{product.owner}.bias", shape=(product.columns,), layer=len(layers)))
        layers.append(
            LayerSpec(
                name=product.owner,
                modules=(product.owner,),
                is_block=is_block,
                forward_flops=product.flops,
                output_elements=kept,
                saved_elements=2 * made,
                working=WorkingSet(2 * max(given, made)),
                input_elements=given,
                products=(product,),
                moved=OtherWork(4 * made + (made + kept) * (kept < made), kernels=4),
                loss_elements=0 if is_block or product.columns != classes else classes,
            )
        )

    channels, side, given = 3, size, 3 * size**2
    for stage, (width, count) in enumerate(VGG):
        for index in range(count):
            product = Product(
                rows=side**2,
                inner=9 * channels,
                columns=width,
                taps=9,
                channels_first=True,
                owner=f"conv{stage}_{index}",
            )
            kept = width * (side // 2 if index == count - 1 else side) ** 2
            add(product, given, kept, (width, channels, 3, 3), is_block=True)
            channels, given = width, kept
        side //= 2
    for index, (inner, columns) in enumerate(((channels * side**2, 4096), (4096, 4096), (4096, classes))):
        add(
            Product(rows=1, inner=inner, columns=columns, owner=f"fc{index}"),
            inner,
            columns,
            (columns, inner),
            is_block=False,
        )
    return ModelSpec(name="vgg16", layers=tuple(layers), params=tuple(params), cut_refusal="convolutions have no plan")
