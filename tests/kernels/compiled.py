"""Compile the kernels for GPUs of two kinds, and look at what they became: `python -m tests.kernels.compiled one|every`.

`one` compiles a form of each attention kernel, `every` all widths, dtypes and masks. Run by `tests/unit/test_kernels.py`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from samestep.kernels import flash_dropout, flash_launches, hashed_dropout, remainder_bits

LEAST_SHARED = 99 * 2**10
"""Bytes of a block's shared memory on devices of compute capability 8.6, 8.9 and 12.0; others have more."""
CAPABILITIES = (80, 90)
FORMS: tuple[dict[str, Any], ...] = (
    {"IS_CAUSAL": True, "MASK": "", "HAS_DOCUMENTS": False},
    {"IS_CAUSAL": False, "MASK": "bool", "HAS_DOCUMENTS": True},
    {"IS_CAUSAL": True, "MASK": "added", "HAS_DOCUMENTS": False},
)
CASES = [
    *((dtype, width, FORMS[0], capability)
      for dtype in ("bf16", "fp16", "fp32") for width in (64, 128, 256) for capability in CAPABILITIES),
    *(("bf16", 128, form, 80) for form in FORMS[1:]),
]  # fmt: skip
_OF_INPUTS = ("q", "k", "v", "out", "gradient", "dq", "dk", "dv")
_OF_ATTENTION = {
    "halves": "*i32", "hashed_columns": "*i32", "documents": "*i64", "lse": "*fp32", "delta": "*fp32", "scale": "fp32", "times": "fp32"
}  # fmt: skip
_OF_MASK = {"": "*fp32", "bool": "*u8", "added": "*fp32"}
_OF_DROPOUT = {"halves": "*i32", "columns": "*i32", "dropped": "*i1"}


def compiled(
    kernel: Any, capability: int, types: Mapping[str, str], constants: Mapping[str, Any], **options: int
) -> Any:
    """Return a kernel compiled for devices of a compute capability; arguments of no given type are int32."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_attention(dtype: str, width: int, form: Mapping[str, Any], capability: int) -> None:
    """Compile the kernels of an attention with dropout within the shared memory that all devices have."""
    sizes = (flash_launches._FULL if dtype == "fp32" else flash_launches._HALF)[width]
    widths = {"D": width, "E": width, "PADDED_D": width, "PADDED_E": width}
    constants = {"HEADS": 8, "GROUP": 2, "PRECISION": "ieee", **widths, **form}
    types = {**dict.fromkeys(_OF_INPUTS, f"*{dtype}"), **_OF_ATTENTION, "mask": _OF_MASK[form["MASK"]]}
    for kernel, blocks in (
        (flash_dropout.forward_kernel, sizes.forward),
        (flash_dropout.query_gradients_kernel, sizes.of_queries),
        (flash_dropout.key_gradients_kernel, sizes.of_keys),
        (flash_dropout.products_kernel, flash_launches._Blocks(32, 32, 4, 1)),
    ):
        block = {"ROWS": blocks.queries, "COLUMNS": blocks.keys}
        made = compiled(
            kernel, capability, types, {**constants, **block}, num_warps=blocks.warps, num_stages=blocks.stages
        )
        assert made.metadata.shared <= LEAST_SHARED, (kernel, dtype, width, form, made.metadata.shared)


def compile_dropout(dtype: str, capability: int) -> None:
    """Compile the kernels of masks."""
    tile = {"ROWS": 2, "COLUMNS": 1024}
    given = {"x": f"*{dtype}", "y": f"*{dtype}", "scale": "i64", **_OF_DROPOUT}
    assert ".local" not in compiled(hashed_dropout.drop_and_scale, capability, given, tile).asm["ptx"], "it has no room"
    compiled(hashed_dropout.write_mask, capability, _OF_DROPOUT, tile)


def main() -> None:
    (which,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for capability in CAPABILITIES:
            for dtype in ("fp32", "bf16", "fp16", "fp64"):
                compile_dropout(dtype, capability)
            halves = {"bits": "*i32", "remainders": "*i16", "is_halfway": "*i1"}
            compiled(remainder_bits.write_remainders, capability, halves, {"BLOCK": 1024})
        for case in CASES if which == "every" else [("bf16", 64, FORMS[0], 80)]:
            compile_attention(*case)
    print(f"{which} form compiles")


if __name__ == "__main__":
    main()
