"""The precision of a published row: that of all values, that of its products, and the layers whose products are in none smaller."""

from __future__ import annotations

import math
import re

from cells import Row, SkippedError, joined, says_nothing

from samestep.hardware import Hardware
from samestep.models.spec import ModelSpec
from samestep.program.ops import TF32

_PRECISIONS = r"(F|FP|FLOAT)[-_ ]?(4|8|16|32)(?!\d)|TF32|NF4 WEIGHTS[^F]*FP16|NF4|INT[48](?!\d)|E\dM\d|BFLOAT|AMP|HALF|MIXED|(?<![A-Z\d])(16|32)(?!\d)"
TAIL = 0.15
"""Part of the blocks that stay in 16 bits in a recipe of four."""


def precision_of(row: Row, machine: Hardware) -> tuple[str, str]:
    """Return the precision of a row's values, and the dtype of its products where it is another.

    Raises:
        SkippedError: it is none.
    """
    text = (row.get("precision") or "").upper()
    if not says_nothing(text) and not re.search(_PRECISIONS, text):
        raise SkippedError(f"precision={row['precision'].strip()} is none of fp32, bf16, fp16, fp8 and fp4")
    products = ""
    if re.search(r"FP4", text) and "float4" in machine.flops_per_s:
        products = "float4"
    elif re.search(r"FP8|FLOAT8|INT8(?! WEIGHTS)", text) or (not text and "mlperf" in joined(row, "source").lower()):
        products = "float8" if "float8" in machine.flops_per_s else ""
    if re.match(r"TF32", text):
        return "float32", TF32 if TF32 in machine.flops_per_s else ""
    if re.match(r"FP32|FLOAT32", text):
        is_vision = re.search("resnet|vgg|inception", row.get("model") or "", re.IGNORECASE)
        return "float32", TF32 if is_vision and TF32 in machine.flops_per_s else products  # cuDNN's default
    if re.match(r"FP16(?!/BF)", text) or "bfloat16" not in machine.flops_per_s:
        return "fp16", products
    return "bf16", products


def wide_layers(row: Row, model: ModelSpec) -> frozenset[int]:
    """Return the layers whose products are in 16 bits where the others are in eight or four.

    Nobody casts the product that makes the logits: it is no module of Transformer Engine in Megatron-LM (`output_layer`), torchtitan
    leaves out `output`, MaxText gives `logits_dense` no quantization. A `bf16 tail` are the last 15 % of the blocks, with which training in
    four bits does not diverge (NVIDIA 2025, arXiv:2509.25149).
    """
    blocks = [index for index, layer in enumerate(model.layers) if layer.is_block]
    tail = math.ceil(TAIL * len(blocks)) if re.search(r"bf16 tail", row.get("precision") or "", re.IGNORECASE) else 0
    return frozenset(range(len(model.layers))).difference(blocks[: len(blocks) - tail])
